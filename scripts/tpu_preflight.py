"""Compiles the programs of a training run for a TPU, on a machine that has none, and reports whether they fit into a
chip's memory and what they cost:

    python3 -m scripts.tpu_preflight --accelerator=v5litepod-8 --depth=16 --device_batch_size=8 --max_seq_len=1024

All flags of base_train are accepted too (python3 -m scripts.base_train --help). The programs are those that base_train
runs, and libtpu, the real TPU compiler, compiles them. The memory is what the compiler allocated. The times are
estimates: the cycles of the machine's own schedule, which libtpu writes for every operation, or the operation's traffic
with HBM, whichever takes longer, and the waits for copies and collectives that nothing hides. docs/preflight.md says
how far to trust them.

Exit status: 0 if the run fits, 3 if it does not, 2 for bad flags, 1 for a failure.
"""
import json
import os
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

from nanochat.common import BadInput, expand_path, flag, read_flags, run_script
from nanochat.data.tokenizer import load_tokenizer
from nanochat.device import tpu
from nanochat.device.host_types import dcn_gbps
from nanochat.device.mesh import all_meshes
from nanochat.device.tpu import GIB
from nanochat.model.layers import RECOMPUTED
from nanochat.preflight import between_slices, explain
from nanochat.preflight.compile import require_packages
from nanochat.preflight.report import (
    MICRO_STEP,
    Request,
    advice,
    find_batch,
    find_mesh,
    kind_of,
    make_report,
    name_buffer_of_gpt,
)
from nanochat.preflight.trace import prepare_environment
from nanochat.train.flags import AUTO, TITLES, Flags
from nanochat.train.host_plan import describe_host, estimate_host
from nanochat.train.plan import make_plan
from nanochat.train.prepare import run_directory

PROGRAMS = ("micro_step", "update", "evaluate")
DOES_NOT_FIT = 3


def file_or_dash(text):
    return text if text == "-" else str(expand_path(text))


@dataclass(frozen=True)
class PreflightFlags:
    accelerator: str = flag("", "the TPU to compile for: v5litepod-8, v6e-4, v4-32 …", required=True)
    json: str | None = flag(None, "write the report to FILE too; -: write it to standard output, and nothing else "
                            "there", metavar="FILE", of=file_or_dash)
    programs: str = flag(",".join(PROGRAMS), "the programs to compile; without micro_step or update there is no "
                         "estimate of a step")
    find_batch: bool = flag(False, "search for the largest --device_batch_size that fits, with each value of "
                            "--activation_checkpointing")
    find_mesh: bool = flag(False, "search for the smallest --mesh_fsdp that fits")
    heuristic: bool = flag(False, "count the cycles by the compiler's heuristic, and Pallas kernels by the FLOPs that "
                           "they declare, instead of the machine's own schedule")
    explain: str | None = flag(None, "say what the dearest operation whose name or line of Python contains OPERATION "
                               "waits for, and print its critical loop; compiling takes twice as long",
                               metavar="OPERATION")
    dump_dir: Path | None = flag(None, "keep the traced programs (HLO protos) and the optimised HLO text in DIR",
                                 metavar="DIR", of=expand_path)
    jobs: int = flag(2, "the number of compilers that run concurrently", at_least=1, at_most=1000)
    timeout_s: int = flag(1800, "the longest time that one program may take to compile", at_least=1)
    usd_per_chip_hour: float | None = flag(None, "price of a chip; default: the prices in "
                                           "nanochat/device/prices.csv, on spot and on demand", of=float, at_least=0)
    zone: str | None = flag(None, "zone whose prices count, such as us-west4-a; default: the dearest")
    preemptions_per_day: float | None = flag(None, "also say what so many preemptions a day cost, and how often to "
                                             "save then", of=float, above=0, at_most=1000)
    restart_minutes: float = flag(10.0, "from a preemption until the run trains again: a new VM, setup, compiling",
                                  at_least=0, at_most=10_000)
    slices: int = flag(1, "estimate a run on so many of these TPUs, which exchange gradients over the data-centre "
                       "network; base_train trains on one", at_least=1, at_most=1024)
    dcn_gbps: float | None = flag(None, "Gbit/s of a host to other slices; default: what Google says of this TPU",
                                  of=float, above=0, at_most=1e6)


def read_preflight_flags(argv=None, description=__doc__, titles=TITLES, flags_of_training=Flags):
    """Returns the PreflightFlags of a command line and the Flags of the script that trains, by default base_train.
    titles: those of its groups of flags, in the order of its Flags. Raises BadInput."""
    own, *of_training = read_flags(argv, description, {PreflightFlags: "preflight", **titles})
    unknown = set(own.programs.split(",")) - set(PROGRAMS)
    if unknown:
        raise BadInput(f"--programs={own.programs} is unknown: choose among {','.join(PROGRAMS)}")
    if own.explain is not None and (own.heuristic or not own.explain):
        raise BadInput(f"--explain={own.explain}: " + ("the schedule that it needs is not read with --heuristic: leave "
                                                        "one of them out" if own.explain else "name an operation"))
    if own.preemptions_per_day is None and own.restart_minutes != PreflightFlags.restart_minutes:
        raise BadInput(f"--restart_minutes={own.restart_minutes:g} needs --preemptions_per_day: give both, or neither")
    if own.preemptions_per_day is not None and not {"micro_step", "update"} <= set(own.programs.split(",")):
        raise BadInput(f"--preemptions_per_day={own.preemptions_per_day:g} needs the time of a step, and so micro_step "
                       f"and update in --programs={own.programs}")
    tpu_slice = tpu.parse_accelerator(own.accelerator)
    if own.slices == 1 and own.dcn_gbps is not None:
        raise BadInput(f"--dcn_gbps={own.dcn_gbps:g} is the network between slices, and there is one: give --slices")
    if own.slices > 1 and own.dcn_gbps is None and dcn_gbps(tpu_slice) is None:
        raise BadInput(f"--slices={own.slices}: the network between slices of {tpu_slice.tpu.name} is not known: give "
                       "--dcn_gbps, the Gbit/s of a host")
    if own.json not in (None, "-"):
        _require_folder("json", own.json, Path(own.json).parent)
        if Path(own.json).is_dir():
            raise BadInput(f"--json={own.json} is a folder: name a file")
    if own.dump_dir and own.dump_dir.exists():
        _require_folder("dump_dir", own.dump_dir, own.dump_dir)
    return replace(own, accelerator=tpu_slice.accelerator), flags_of_training(*of_training)


def _require_folder(name, value, folder):
    """Raises BadInput for the flag `name` if nothing can be written to `folder`."""
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        why = "is not writable" if folder.is_dir() else "is not a folder"
        raise BadInput(f"--{name}={value}: {folder} {why}: name another one")


# -----------------------------------------------------------------------------
# The programs of a run


def preflight(flags, request, say=print, trace=None):
    """Traces the programs of a run by trace(flags, chips), compiles those that `request` names, and returns the report
    (preflight/report.py). Without `trace`, the run is base_train's, and the report has its hosts, too."""
    started, tpu_slice = time.monotonic(), tpu.parse_accelerator(request.accelerator)
    of_slice = flags_of_slice(flags, tpu_slice.chips, request.slices) if request.slices > 1 else flags
    programs, traced = (trace or trace_run)(of_slice, tpu_slice.chips)
    settled = flags.settled(programs.plan.config).as_dict()
    report = make_report(programs, traced, time.monotonic() - started, settled, request, say)
    return report if trace else report | {"host": estimate_host(flags, programs.plan, tpu_slice)}


def flags_of_slice(flags, chips, slices):
    """Returns the Flags of one of `slices` slices of so many chips that train the run of `flags` together: its part of
    every batch and of the lanes. Raises BadInput if they do not divide."""
    n_vocab = load_tokenizer(flags.data.tokenizer_dir).n_vocab
    of_mesh = flags.replace(total_batch_size=-1, batch_ramp="", seq_len_ramp="", num_lanes=chips)
    readers = slices * make_plan(of_mesh, n_vocab, "tpu", chips).mesh.readers
    whole = make_plan(flags.replace(mesh_data=readers, mesh_fsdp=1, mesh_tensor=1), n_vocab, "tpu", readers)
    return flags.replace(total_batch_size=whole.total_batch_size // slices, num_iterations=whole.num_iterations,
                         num_lanes=flags.data.num_lanes // slices)


def trace_run(flags, chips):
    """Returns the Programs of a run on `chips` TPU chips, and its {name: TracedProgram}.

    Call prepare_environment() before.
    """
    import torch
    import torch_xla

    from nanochat.data.loader import Rows, SyntheticLoader
    from nanochat.device.ranks import Dist
    from nanochat.infer.loss_eval import bits_per_byte
    from nanochat.preflight.programs import Programs, fill_with_placeholders
    from nanochat.train.language import NEXT_TOKEN, make_model, make_step
    from nanochat.train.step import Objective
    from nanochat.train.teacher import DistillationLoss, find_teacher, make_teacher
    tokenizer = load_tokenizer(flags.data.tokenizer_dir)
    plan = make_plan(flags, tokenizer.n_vocab, "tpu", chips)
    dist = Dist("tpu", torch_xla.device(), world_size=chips)
    with torch.device("meta"):
        model = make_model(plan)
        found = find_teacher(flags, plan, tokenizer, run_directory(flags))
        teacher = make_teacher(found, plan, dist) if found else None
    objective = NEXT_TOKEN
    if found:
        objective = Objective(DistillationLoss(found, fill_with_placeholders(teacher)), teacher=teacher)
    training = make_step(plan, fill_with_placeholders(model), dist, objective)
    rows, length = plan.device_batch_size, plan.config.max_seq_len
    batches, shares = {}, {"evaluate": branch_shares(plan.config, length)}
    for first, _, name in plan.stages:
        batches[name] = {"rows": torch.zeros(plan.rows(first), plan.seq_len(first) + 1, dtype=torch.int32)}
        shares[name] = branch_shares(plan.config, plan.seq_len(first))

    def evaluate():
        readers = plan.mesh.readers
        wanted = Rows(rows, length, world_size=readers, num_lanes=flags.data.num_lanes)
        loader = SyntheticLoader(tokenizer.n_vocab, wanted, num_rows=2 * rows * readers)
        bits_per_byte(training.model, loader, tokenizer.token_bytes(), dist, copies=plan.mesh.tensor)

    programs = Programs(plan, training, lambda shape: name_buffer_of_gpt(shape, plan.config, rows, length), shares)
    return programs, programs.trace(batches, evaluate)


def flags_of_meshes(flags, accelerator):
    """Returns {chips along fsdp: Flags} for each mesh on which a run is possible, the fewest first. All its axes are
    given, so that TPU_MESH_CONFIG names none of them."""
    from nanochat.train.teacher import find_teacher
    tokenizer, found = load_tokenizer(flags.data.tokenizer_dir), {}
    chips = tpu.parse_accelerator(accelerator).chips
    for mesh in all_meshes(chips, flags.devices.mesh_tensor):
        trial = flags.replace(mesh_data=mesh.data, mesh_fsdp=mesh.fsdp)
        try:
            find_teacher(trial, make_plan(trial, tokenizer.n_vocab, "tpu", chips), tokenizer, run_directory(flags))
        except BadInput:
            continue
        found[mesh.fsdp] = trial
    return found


def require_searchable(own, flags):
    """Raises BadInput if base_train's flags leave nothing to what is to be searched for."""
    devices = flags.devices
    if own.find_mesh and (devices.mesh_data != -1 or devices.mesh_fsdp == AUTO):
        raise BadInput(f"--find_mesh searches for the mesh, and --mesh_data={devices.mesh_data} "
                       f"--mesh_fsdp={devices.mesh_fsdp} is given: leave both out")
    if own.find_batch and devices.mesh_fsdp == AUTO:
        raise BadInput(f"--find_batch with --mesh_fsdp={AUTO}, which chooses another mesh for another batch: give "
                       "--mesh_fsdp a number")


def branch_shares(config, length):
    """Returns the fraction of the layers that run each branch of the conditionals in a loop over the layers, for rows
    of `length`, as hlo.Module.ops takes them: in the attention kernel those of the windows, the shortest first, and in
    the backward pass those of layers that add value embeddings, and of others."""
    windows = Counter(min(window or length, length) for window in config.windows())
    adding = Fraction(sum(slot is not None for slot in config.value_slots()), config.n_layer)
    return {"branch_computations": [Fraction(windows[size], config.n_layer) for size in sorted(windows)],
            "true_computation": [adding, 1 - adding]}


# -----------------------------------------------------------------------------
# For a person


def gib(num_bytes):
    return f"{num_bytes / GIB:.2f} GiB"


def span_ms(low_s, high_s, digits=1):
    return f"{1000 * low_s:.{digits}f} to {1000 * high_s:.{digits}f}"


def describe(report):
    """Returns the report as lines of text."""
    usable = report["usable_hbm_bytes"]
    lines = [f"memory of a chip ({gib(usable)} usable):"]
    lines += [f"  {gib(size):>10}  {name}" for name, size in report["memory"].items()]
    if report["programs"]:
        lines += ["", f"{'':>14}  {'peak':>10} {'temporary':>10} {'Mcycles':>8} {'HBM GB':>7} {'est. ms':>8} "
                  f"{'low to high':>13} {'runs':>4} {'HLO':>6} {'compiled':>8} {'seconds':>7}"]
    for name, program in report["programs"].items():
        lines.append(f"{name:>14}  {gib(program['peak_bytes']):>10} {gib(program['temp_bytes']):>10} "
                     f"{program['cycles'] / 1e6:8.1f} {program['hbm_bytes'] / 1e9:7.1f} "
                     f"{1000 * program['estimated_s']:8.1f} {span_ms(program['low_s'], program['high_s']):>13} "
                     f"{program['runs_per_step']:4} "
                     f"{program['traced_instructions']:6} {program['compiled_instructions']:8} "
                     f"{program['compile_s']:7.0f}")
    if "between_slices" in report:
        lines += between_slices.describe(report["between_slices"])
    for name, program in report["programs"].items():
        lines.append(f"  {name}: the error bar is {program['doubt']}")
        for kind, (count, num_bytes, overlapped) in program["collectives"].items():
            lines.append(f"  {name}: {count} {kind}, {num_bytes / 1e6:.1f} MB, {overlapped / 1e6:.1f} of them while "
                         "other work goes on")
        for kind, total, waited in (("collectives", "ici_s", "ici_waited_s"),
                                    ("copies", "copies_s", "copies_waited_s")):
            if program[total]:
                lines.append(f"  {name}: {kind} est. {1000 * program[total]:.1f} ms; the program waits for "
                             f"{1000 * program[waited]:.1f} of them")
        if program["pallas_calls"]:
            lines.append(f"  {name}: {program['pallas_calls']} Pallas kernels, {program['pallas_flops'] / 1e12:.2f} "
                         "TFLOP, counted in the cycles "
                         + ("as scheduled" if program["scheduled_cycles"] else "at the rate of the matrix units"))
        if program["pallas_uncounted"]:
            lines.append(f"  {name}: Pallas kernels of unknown cost, not counted: {program['pallas_uncounted']}")
    for name, program in report["programs"].items():
        if kind_of(name) != MICRO_STEP:
            continue
        lines += ["", f"most expensive operations of {name} (estimates):"]
        lines += [f"  {1000 * line['estimated_s']:7.2f} ms {line['runs']:4} × {line['name']:<28} {line['source']}  "
                  f"{line['shape'][:60]}  {line['limit']}".rstrip() for line in program["top_operations"]]
        if program["scheduled_cycles"]:
            lines.append(f"  {program['scheduled_cycles'] / program['cycles']:.1%} of the cycles are the machine's own "
                         "schedule, the others the compiler's heuristic")
    for name, found in report["explained"].items():
        lines += ["", f"of {name}:", *explain.describe(found)]
    for name, oom in report["out_of_memory"].items():
        lines += ["", f"{name} does not fit: it needs " + (
            f"{gib(oom['needed_bytes'])}" if oom["memory"] == "hbm" else
            f"{oom['needed_bytes'] / 2**20:.2f} MiB of VMEM for one operation") + ". Largest buffers:"]
        lines += [f"  {gib(buffer['bytes']):>10}  {buffer['what'] or 'a temporary':<26} {buffer['shape']:<28} "
                  f"{buffer['source']}" for buffer in oom["largest"]]
    if "estimate" in report:
        run = report["estimate"]
        cost = describe_cost(run, report["zone"])
        plan, unit = report["plan"], report["plan"]["unit"]
        lines += ["", f"estimate: {1000 * run['step_s']:.0f} ms a step of {plan['total_batch_size']:,} {unit} "
                  f"({span_ms(run['step_low_s'], run['step_high_s'], 0)}), "
                  f"{run[f'{unit}_per_s']:,.0f} {unit}/s, MFU {run['mfu']:.1%}; "
                  f"update {run['shares']['update']:.1%} of a step",
                  f"estimate: {run['hours']:.1f} h for {plan['num_iterations']:,} steps{cost}"]
        lines[-2:-2] = [f"estimate: {1000 * stage['step_s']:.0f} ms a step in steps {stage['first']:,} to "
                        f"{stage['last']:,} ({name}), MFU {stage['mfu']:.1%}, {stage['hours']:.1f} h"
                        for name, stage in run["stages"].items() if len(run["stages"]) > 1]
        if len(run["stages"]) > 1:
            lines.append(f"estimate: {1 - run['hours'] / run['hours_of_last']:.1%} less than with the last of these "
                         "programs throughout")
    if "preemptions" in report:
        lines += describe_preemptions(report["preemptions"], report["zone"])
    lines += ["", *describe_host(report["host"])] if "host" in report else []
    lines.append("")
    if report["fits"]:
        lines.append(f"fits: {gib(report['peak_bytes'])} of {gib(usable)} ({report['peak_bytes'] / usable:.0%})")
    else:
        into = gib(usable) if all(oom["memory"] == "hbm" for oom in report["out_of_memory"].values()) else "VMEM"
        lines.append(f"does not fit into {into}. Try {', or '.join(advice(report))}")
    return lines


def describe_cost(found, zone):
    """Returns ", 62 USD on spot …" for a JSON object with costs; "" if no price is known."""
    cost = "".join(f", {found[key]:.0f} USD {name}" for key, name in (("usd_spot", "on spot"),
                                                                      ("usd_on_demand", "on demand"))
                   if found.get(key) is not None)
    return cost and f"{cost} in {zone or 'the dearest region (--zone)'}"


def describe_preemptions(found, zone):
    """Returns lines about a report's preemptions."""
    saved = "no checkpoint" if found["save_every_s"] is None else \
        f"a checkpoint every {found['save_every_s'] / 60:.1f} min"
    wall = f"{found['hours']:.1f} h{describe_cost(found, zone)}" if found["hours"] is not None else \
        "it never ends"
    return [f"estimate: with {found['per_day']:g} preemptions a day, {found['restart_s'] / 60:g} min of restarting for "
            f"each, and {saved}: goodput {found['goodput']:.1%}, {wall}",
            f"estimate: then --save_every_minutes={max(found['best_save_every_s'] / 60, 0.1):.1f} would be best: "
            f"goodput {found['best_goodput']:.1%}"]


def main(argv=None):
    own, flags = read_preflight_flags(argv)
    require_searchable(own, flags)
    return run(own, flags)


def run(own, train_flags, trace=None):
    """Makes the report, prints it and writes it to a file. Returns the exit status. trace: see preflight."""
    require_packages()
    prepare_environment()
    os.environ["TPU_ACCELERATOR_TYPE"] = own.accelerator  # the attention kernel's tiles depend on the chip
    say = (lambda line: print(line, file=sys.stderr, flush=True)) if own.json == "-" else \
        (lambda line: print(line, flush=True))
    request = Request(own.accelerator, tuple(own.programs.split(",")), own.jobs, own.timeout_s, own.dump_dir,
                      own.heuristic, own.explain, own.usd_per_chip_hour, own.zone, own.preemptions_per_day,
                      own.restart_minutes, own.slices, own.dcn_gbps)
    report = preflight(train_flags, request, say, trace)

    def memory_of(flags, *programs):
        memory_only = replace(request, programs=programs, dump_dir=None, heuristic=True, explain=None)
        return preflight(flags, memory_only, say=lambda line: None)

    if own.find_mesh:
        trials = flags_of_meshes(train_flags, own.accelerator)
        report["find_mesh"] = find_mesh(lambda fsdp: memory_of(trials[fsdp], "micro_step", "update"), trials, say)
    if own.find_batch:
        def try_batch(batch_size, setting):
            return memory_of(train_flags.replace(device_batch_size=batch_size, total_batch_size=-1,
                                                 activation_checkpointing=setting), "micro_step")

        settings = ("none", "all") if report["kernel"] == "current" else RECOMPUTED
        report["find_batch"] = find_batch(try_batch, train_flags.batch.device_batch_size, settings, say)
    say("\n".join(describe(report)))
    if own.find_mesh:
        found = report["find_mesh"]
        say(f"smallest --mesh_fsdp that fits: {found['smallest']}; {len(found['peak_bytes'])} tried, "
            f"{found['seconds']:.0f} s")
    if own.find_batch:
        found = report["find_batch"]
        say("largest --device_batch_size by --activation_checkpointing: "
            + ", ".join(f"{setting} {each['largest']}" for setting, each in found["settings"].items())
            + f"; {found['compilations']} compilations, {found['seconds']:.0f} s")
    if own.json == "-":
        print(json.dumps(report, indent=1))
    elif own.json:
        Path(own.json).write_text(json.dumps(report, indent=1))
    if own.explain and not report["explained"] and report["programs"]:
        raise BadInput(f"--explain={own.explain}: no scheduled operation has this in its name or its line of Python: "
                       "the list of the most expensive operations has some")
    return 0 if report["fits"] else DOES_NOT_FIT


if __name__ == "__main__":
    run_script(main)
