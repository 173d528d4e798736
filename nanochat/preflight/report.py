"""Makes the report of a preflight: whether the programs of a run fit into a chip's memory, and what the run costs.

The report is a JSON object. scripts/tpu_preflight.py writes it to a file and describes it to a person.
"""
import math
import tempfile
import time
from dataclasses import asdict, dataclass

from nanochat.device import tpu
from nanochat.preflight import estimate, hlo, schedule
from nanochat.preflight.between_slices import exchange
from nanochat.preflight.compile import compile_programs
from nanochat.preflight.explain import explain
from nanochat.preflight.preemptions import report_preemptions

MICRO_STEP = "micro_step"  # the kind of these programs, see kind_of


@dataclass(frozen=True)
class Request:
    """Which programs of a run to compile, for which TPU, and how."""
    accelerator: str  # "v5litepod-8"
    programs: tuple  # names; the estimate of a step needs "micro_step" and "update"
    jobs: int = 2  # compilers that run concurrently
    timeout_s: int = 1800  # for one program
    dump_dir: str | None = None  # keeps the compilers' input and output
    heuristic: bool = False  # the compiler's cycles instead of the machine's own schedule
    explain: str | None = None  # a part of the name or the line of an operation to explain
    usd_per_chip_hour: float | None = None  # instead of the prices in device/prices.csv
    zone: str | None = None  # where they hold; None: the dearest
    preemptions_per_day: float | None = None  # None: nothing is said about them
    restart_minutes: float = 10.0  # from a preemption until the run trains again
    slices: int = 1  # that train the run together, each the `accelerator`
    dcn_gbps: float | None = None  # Gbit/s between slices of a host, instead of what device/host_types.py knows


def make_report(programs, traced, trace_s, flags, request, say=print):
    """Compiles the traced programs of a run that `request` names and returns the report, a JSON object.

    programs: a Programs, of one slice if there are several. traced: its {name: TracedProgram}; trace_s: the seconds
    that tracing took.
    flags: {name: value} of all flags of the run.
    say: is called with a line of text whenever there is progress.
    """
    tpu_slice, plan = tpu.parse_accelerator(request.accelerator), programs.plan
    traced = [program for name, program in traced.items() if kind_of(name) in request.programs]
    say(f"traced {', '.join(program.name for program in traced)} in {trace_s:.0f} s; compiling for "
        f"{request.accelerator} ({tpu_slice.tpu.name} {tpu_slice.topology})")
    report = {
        "accelerator": request.accelerator, "chips": tpu_slice.chips, "hosts": tpu_slice.hosts,
        "topology": tpu_slice.topology, "slices": request.slices, "zone": request.zone, "flags": flags,
        "kernel": plan.kernel,
        "plan": {"unit": plan.unit, "total_batch_size": request.slices * plan.units(0, 1),
                 "grad_accum_steps": plan.micro_steps(0), "num_iterations": plan.num_iterations,
                 f"flops_per_{plan.unit[:-1]}": plan.flops_per_unit, "parameters": sum(plan.parameters.values())},
        "trace_s": trace_s, "usable_hbm_bytes": tpu_slice.tpu.usable_hbm_bytes,
        "memory": programs.memory_groups(), "programs": {}, "out_of_memory": {},
        "explained": {},
    }
    runs_per_step = {MICRO_STEP: plan.micro_steps(0), "update": 1, "evaluate": 0}
    resident_bytes, fitting, started = programs.resident_bytes(), [], time.monotonic()
    options = None if request.heuristic else \
        schedule.LIBTPU_OPTIONS_WITH_BUNDLES if request.explain else schedule.LIBTPU_OPTIONS
    with tempfile.TemporaryDirectory(prefix="tpu_preflight_") as scratch:
        for program, compiled in compile_programs(traced, tpu_slice, request.dump_dir or scratch, request.timeout_s,
                                                  request.jobs, options):
            say(f"{program.name}: {compiled.seconds:.0f} s" + (", does not fit" if compiled.out_of_memory else ""))
            if compiled.out_of_memory:
                report["out_of_memory"][program.name] = explain_out_of_memory(
                    program, compiled, sum(resident_bytes.values()), programs.name_buffer)
            else:
                shares = programs.branch_shares.get(program.name)
                fitting.append(estimate.report_program(program, compiled, runs_per_step[kind_of(program.name)],
                                                       resident_bytes, tpu_slice, shares))
                report["programs"][program.name] = asdict(fitting[-1])
                if request.explain:
                    ops = hlo.parse(compiled.hlo_text).ops(shares)
                    found = explain(request.explain, ops, compiled.schedules, tpu_slice.tpu)
                    report["explained"] |= {program.name: found} if found else {}
    report["compile_wall_s"] = time.monotonic() - started
    peak = max((program.peak_bytes for program in fitting), default=0)
    report["peak_bytes"] = peak or None
    report["fits"] = not report["out_of_memory"] and peak <= tpu_slice.tpu.usable_hbm_bytes
    between_s = 0.0
    if request.slices > 1:
        report["between_slices"] = exchange(sum(plan.parameters.values()), request.slices, tpu_slice, request.dcn_gbps)
        between_s = report["between_slices"]["seconds"]
    if {"update", *(name for _, _, name in plan.stages)} <= report["programs"].keys():
        run = estimate.report_run(fitting, plan, tpu_slice, request.slices, between_s)
        report["estimate"] = run | costs(run["hours"], request)
        if request.preemptions_per_day:
            found = report_preemptions(
                request.preemptions_per_day, request.restart_minutes, sum(plan.parameters.values()),
                save_every_s(flags, run["step_s"]), run["hours"])
            found["usd_spot"] = costs(found["hours"], request)["usd_spot"]
            report["preemptions"] = {name: None if value == math.inf else value  # JSON has no infinity
                                     for name, value in found.items()}
    return report


def save_every_s(flags, step_s):
    """Returns the seconds between two checkpoints of a run with these flags, whose steps take so long; inf: none."""
    return min(flags["save_every"] * step_s if flags["save_every"] > 0 else math.inf,
               flags["save_every_minutes"] * 60 if flags["save_every_minutes"] > 0 else math.inf)


def kind_of(name):
    """Returns the kind of the program with this name: there is a micro_step for each length of rows."""
    return name.partition(" ")[0]


def costs(hours, request):
    """Returns the price of `hours` on the requested slices in USD, on spot and on demand; None where it is unknown."""
    prices = {name: tpu.usd_per_hour(request.accelerator, spot, request.usd_per_chip_hour, request.zone)
              for name, spot in (("usd_spot", True), ("usd_on_demand", False))}
    return {name: None if price is None else request.slices * price * hours for name, price in prices.items()}


def explain_out_of_memory(program, compiled, resident_bytes, name_buffer):
    """Returns a JSON object about a program that does not fit: the bytes that it needs, and its largest buffers."""
    needed, buffers = estimate.large_buffers(compiled.out_of_memory)
    is_vmem = "memory space vmem" in compiled.out_of_memory  # of one operation, such as a Pallas kernel
    return {
        "memory": "vmem" if is_vmem else "hbm",
        "needed_bytes": needed + (0 if is_vmem else resident_bytes),  # the compiler's report covers temporaries only
        "compile_s": compiled.seconds, "traced_instructions": program.instructions,
        "largest": [asdict(buffer) | {"what": name_buffer(buffer.shape)} for buffer in buffers[:10]],
        "report": compiled.out_of_memory[:4000],
    }


def name_buffer_of_gpt(shape, config, batch_size, seq_len):
    """Guesses from its shape, "bf16[8192,65536]" for example, what an array of a GPT holds.

    Returns "logits", "attention scores" and so on, or "" if it could be anything.
    """
    dims = [int(side) for side in shape.partition("[")[2].rstrip("]").split(",") if side]
    if config.vocab_size in dims and config.n_embd in dims:
        return "embedding or head"
    if config.vocab_size in dims:
        return "logits"
    if dims.count(seq_len) >= 2 and (config.n_head in dims or batch_size * config.n_head in dims):
        return "attention scores"
    is_stack = bool(dims) and dims[0] == config.n_layer
    if math.prod(dims) % (batch_size * seq_len) == 0:
        return "activations of all layers" if is_stack else "activations"
    return "stacked weights" if is_stack else ""


def advice(report):
    """Returns the flags that would make a run fit that does not, the most promising first."""
    flags = report["flags"]
    if any(oom["memory"] == "vmem" for oom in report["out_of_memory"].values()):
        return ["a shorter --max_seq_len", "--kernel=chunked"]
    found = {buffer["what"] for oom in report["out_of_memory"].values() for buffer in oom["largest"][:5]}
    suggestions = []
    if report["kernel"] == "current" and found & {"attention scores", "logits"}:
        suggestions.append("--kernel=flash")
    if flags.get("activation_checkpointing") in ("none", "qkv") and found & {
            "activations", "activations of all layers", "attention scores", ""}:
        suggestions.append("--activation_checkpointing=all")
    if flags["device_batch_size"] > 1:
        suggestions.append(f"--device_batch_size={flags['device_batch_size'] // 2}")
    if report.get("chips", 1) > 1 and flags.get("mesh_fsdp") in (1, "auto") and report["kernel"] != "current":
        suggestions.append("the --mesh_fsdp that tpu_preflight --find_mesh finds")
    return suggestions or ["a smaller model", "a TPU with more memory"]


def find_mesh(try_mesh, sizes, say=print):
    """Searches for the smallest --mesh_fsdp that fits, one of `sizes`, from the first of them on.

    try_mesh: function of a number of chips along fsdp; returns the report of such a run.
    Returns a JSON object with the smallest (None if none fits) and the peak memory of all that it tried.
    """
    peak_bytes, smallest, started = {}, None, time.monotonic()
    for fsdp in sizes:
        report = try_mesh(fsdp)
        peak_bytes[fsdp] = report["peak_bytes"] if report["fits"] else None
        say(f"--mesh_fsdp={fsdp}: " + (f"fits, {report['peak_bytes'] / tpu.GIB:.2f} GiB" if report["fits"] else
                                       f"{' and '.join(report['out_of_memory'])} do not fit"))
        if report["fits"]:
            smallest = fsdp
            break
    return {"smallest": smallest, "peak_bytes": peak_bytes, "seconds": time.monotonic() - started}


def find_batch(try_batch, start, settings, say=print):
    """Searches for the largest --device_batch_size that fits with each of `settings`, the values of
    --activation_checkpointing that are to be tried, in the order in which they need less memory.

    try_batch: function of a batch size and a setting; returns the report of such a run.
    start: the first batch size, which is doubled while everything fits, and halved until something does; last comes
    the size between the largest and its double. A setting begins with the largest of the one before.
    Returns a JSON object with the largest batch size of each (None if there is none) and the peak memory of all that it
    tried.
    """
    found, started = {}, time.monotonic()
    for setting in settings:
        peak_bytes = {}

        def fits(batch, setting=setting, peak_bytes=peak_bytes):
            if batch not in peak_bytes:
                report = try_batch(batch, setting)
                peak_bytes[batch] = report["peak_bytes"] if report["fits"] else None
                said = f"fits, {peak_bytes[batch] / tpu.GIB:.2f} GiB" if report["fits"] else "does not fit"
                say(f"--device_batch_size={batch} --activation_checkpointing={setting}: {said}")
            return peak_bytes[batch] is not None

        batch = start
        while batch and not fits(batch):
            batch //= 2
        while batch and fits(2 * batch):
            batch *= 2
        if batch > 1 and fits(batch * 3 // 2):
            batch = batch * 3 // 2
        start = batch or start
        found[setting] = {"largest": batch or None, "peak_bytes": peak_bytes}
    compilations = sum(len(each["peak_bytes"]) for each in found.values())
    return {"settings": found, "compilations": compilations, "seconds": time.monotonic() - started}
