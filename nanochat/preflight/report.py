"""Makes the report of a preflight: whether the programs of a run fit into a chip's memory, and what the run costs.

The report is a JSON object. describe.py says it to a person.
"""
import math
import tempfile
import time

from nanochat.device import tpu
from nanochat.preflight import estimate, hlo, schedule
from nanochat.preflight.compile import compile_programs
from nanochat.preflight.explain import explain
from nanochat.preflight.ops import ops_of
from nanochat.preflight.out_of_memory import explain_out_of_memory
from nanochat.preflight.preemptions import report_preemptions

MICRO_STEP = "micro_step"  # the kind of these programs, see kind_of


def kind_of(name):
    """Returns the kind of the program with this name: there is a micro_step for each length of rows."""
    return name.partition(" ")[0]


def make_report(own, flags, programs, traced, trace_s, say=print):
    """Compiles the traced programs of a run that the PreflightFlags `own` name and returns the report.

    flags: {name: value} of all flags of the run. programs: its Programs. traced: its {name: TracedProgram}; trace_s:
    the seconds that tracing took. say: is called with a line of text whenever there is progress.
    """
    tpu_slice = own.tpu_slice
    plan = programs.plan
    traced = [program for name, program in traced.items() if kind_of(name) in own.kinds]
    say(f"traced {', '.join(program.name for program in traced)} in {trace_s:.0f} s; compiling for "
        f"{own.accelerator} ({tpu_slice.tpu.name} {tpu_slice.topology})")
    report = {
        "accelerator": own.accelerator, "chips": tpu_slice.chips, "hosts": tpu_slice.hosts,
        "topology": tpu_slice.topology, "zone": own.zone, "flags": flags, "kernel": plan.kernel,
        "plan": {"unit": plan.unit, "total_batch_size": plan.units(0, 1), "grad_accum_steps": plan.micro_steps(0),
                 "num_iterations": plan.num_iterations, f"flops_per_{plan.unit[:-1]}": plan.flops_per_unit,
                 "parameters": sum(plan.parameters.values())},
        "trace_s": trace_s, "usable_hbm_bytes": tpu_slice.tpu.usable_hbm_bytes, "memory": programs.memory_groups(),
        "programs": {}, "out_of_memory": {}, "explained": {}}
    _compile(own, programs, traced, report, say)
    peak = max((program["peak_bytes"] for program in report["programs"].values()), default=0)
    report["peak_bytes"] = peak or None
    report["fits"] = not report["out_of_memory"] and peak <= tpu_slice.tpu.usable_hbm_bytes
    of_a_step = {"update", *(name for _, _, name in plan.stages)}
    if of_a_step <= report["programs"].keys():
        run = estimate.report_run(report["programs"], plan, tpu_slice)
        report["estimate"] = run | costs(run["hours"], own)
        if own.preemptions_per_day:
            every_s = save_every_s(flags, run["step_s"])
            found = report_preemptions(own, programs.checkpoint_bytes(), every_s, run["hours"])
            found["usd_spot"] = costs(found["hours"], own)["usd_spot"]
            report["preemptions"] = {name: None if value == math.inf else value  # JSON has no infinity
                                     for name, value in found.items()}
    return report


def _compile(own, programs, traced, report, say):
    """Compiles the TracedPrograms, and adds to `report` what came of each."""
    runs_per_step = {MICRO_STEP: programs.plan.micro_steps(0), "update": 1, "evaluate": 0}
    resident_bytes = programs.resident_bytes()
    options = schedule.LIBTPU_OPTIONS_WITH_BUNDLES if own.explain else schedule.LIBTPU_OPTIONS
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tpu_preflight_") as scratch:
        for program, compiled in compile_programs(traced, own.tpu_slice, own.dump_dir or scratch, own.timeout_s,
                                                  own.jobs, options):
            if compiled.out_of_memory:
                say(f"{program.name}: {compiled.seconds:.0f} s, does not fit")
                report["out_of_memory"][program.name] = explain_out_of_memory(
                    program, compiled, sum(resident_bytes.values()), programs.name_buffer)
                continue
            say(f"{program.name}: {compiled.seconds:.0f} s")
            shares = programs.branch_shares.get(program.name)
            report["programs"][program.name] = estimate.report_program(
                program, compiled, runs_per_step[kind_of(program.name)], resident_bytes, own.tpu_slice, shares)
            if own.explain:
                ops = ops_of(hlo.parse(compiled.hlo_text), shares)
                found = explain(own.explain, ops, compiled.schedules, own.tpu_slice.tpu)
                if found:
                    report["explained"][program.name] = found
    report["compile_wall_s"] = time.monotonic() - started


def save_every_s(flags, step_s):
    """Returns the seconds between two checkpoints of a run with these flags, whose steps take so long; inf: none."""
    every_s = math.inf
    if flags["save_every"] > 0:
        every_s = flags["save_every"] * step_s
    if flags["save_every_minutes"] > 0:
        every_s = min(every_s, 60 * flags["save_every_minutes"])
    return every_s


def costs(hours, own):
    """Returns the price of `hours` on the TPU of the PreflightFlags in USD, on spot and on demand; None where it is
    unknown."""
    found = {}
    for name, spot in (("usd_spot", True), ("usd_on_demand", False)):
        price = tpu.usd_per_hour(own.accelerator, spot, own.usd_per_chip_hour, own.zone)
        found[name] = None if price is None else price * hours
    return found
