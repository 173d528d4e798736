"""Makes the report of a preflight, a JSON object: whether the programs of a run fit into a chip's memory, and what the
run costs. describe.py says it to a person."""
import re
import tempfile

from nanochat.common import say, work
from nanochat.device import tpu
from nanochat.preflight import estimate
from nanochat.preflight.compile import compile_programs
from nanochat.preflight.measured import corrected

MICRO_STEP = "micro_step"  # the kind of these programs, see kind_of


def kind_of(name):
    """Returns the kind of the program with this name: each length of rows has a micro_step of its own."""
    return name.partition(" ")[0]


def of_kinds(traced, kinds):
    """Returns a list of the TracedPrograms of these kinds in {name: TracedProgram}."""
    return [program for name, program in traced.items() if kind_of(name) in kinds]


def make_report(own, flags, programs, traced, checks=()):
    """Compiles the traced programs of a run that the PreflightFlags `own` name and returns the report. flags: {name:
    value} of all flags of the run. programs: its Programs. traced: its {name: TracedProgram}. checks: of
    find_checks."""
    tpu_slice = own.tpu_slice
    plan = programs.plan
    traced = of_kinds(traced, own.kinds)
    say(f"compiling {', '.join(program.name for program in traced)} for {own.accelerator} ({tpu_slice.tpu.name} "
        f"{tpu_slice.topology})")
    report = {
        "accelerator": own.accelerator, "chips": tpu_slice.chips, "hosts": tpu_slice.hosts,
        "topology": tpu_slice.topology, "zone": own.zone, "flags": flags, "kernel": plan.kernel,
        "plan": {"total_batch_size": plan.units(0, 1), "grad_accum_steps": plan.micro_steps,
                 "num_iterations": plan.num_iterations, "flops_per_token": plan.flops_per_unit,
                 "parameters": sum(plan.parameters.values())},
        "usable_hbm_bytes": tpu_slice.tpu.usable_hbm_bytes, "memory": programs.memory_groups(),
        "programs": {}, "out_of_memory": {}}
    _compile(own, programs, traced, report)
    order = [program.name for program in traced]  # of the report; they were done in another
    report["programs"] = {name: report["programs"][name] for name in order if name in report["programs"]}
    peak = max((program["peak_bytes"] for program in report["programs"].values()), default=0)
    report["peak_bytes"] = peak or None
    peak *= max((factors.get("memory", 1) for _, factors in checks), default=1)
    report["fits"] = not report["out_of_memory"] and peak <= tpu_slice.tpu.usable_hbm_bytes
    of_a_step = {"update", *(name for _, _, name in plan.stages)}
    if of_a_step <= report["programs"].keys():
        run = by_compiler = estimate.report_run(report["programs"], plan, tpu_slice)
        if checks:
            run = estimate.report_run(corrected(report["programs"], checks), plan, tpu_slice)
            report["measured"] = {"checks": checks, "by_compiler": by_compiler}
        report["estimate"] = run | costs(run["hours"], own)
    return report


def _compile(own, programs, traced, report):
    """Compiles the TracedPrograms, and adds the result of each to `report`."""
    left = [program.name for program in traced]
    runs_per_step = {MICRO_STEP: programs.plan.micro_steps, "update": 1, "evaluate": 0}
    resident_bytes = programs.resident_bytes()
    work.begin(f"compiling {', '.join(left)}")
    with tempfile.TemporaryDirectory(prefix="tpu_preflight_") as scratch:
        for program, compiled in compile_programs(traced, own.tpu_slice, own.dump_dir or scratch, own.timeout_s,
                                                  own.jobs, with_schedules=True):
            name = program.name
            left.remove(name)
            work.begin(f"compiling {', '.join(left)}" if left else "estimating")
            if compiled.out_of_memory:
                say(f"{name}: {compiled.seconds:.0f} s, does not fit")
                report["out_of_memory"][name] = explain_out_of_memory(compiled, sum(resident_bytes.values()))
                continue
            say(f"{name}: {compiled.seconds:.0f} s")
            report["programs"][name] = estimate.report_program(
                program, compiled, runs_per_step[kind_of(name)], resident_bytes, own.tpu_slice,
                programs.branch_shares.get(name))


def costs(hours, own):
    """Returns the price of `hours` on the TPU of the PreflightFlags in USD, on spot and on demand; None if unknown."""
    prices = {"usd_spot": tpu.usd_per_hour(own.accelerator, True, own.zone),
              "usd_on_demand": tpu.usd_per_hour(own.accelerator, False, own.zone)}
    return {name: price and price * hours for name, price in prices.items()}


# Programs that do not fit


def explain_out_of_memory(compiled, resident_bytes):
    """Returns a JSON object about a program that does not fit: the bytes that it needs (0 if the compiler's report does
    not say), and its largest buffers. resident_bytes: of all tensors that stay on the chip."""
    text = compiled.out_of_memory
    needed_bytes = parse_size(_first(r"Used ([\d.]+[KMG]) of|Allocation \(size=(\d+)\)", text) or "0")
    buffers = [{"bytes": parse_size(entry.split()[0]), "shape": _first(r"Shape: (\S+?)\{", entry),
                "source": _first(r'op_name="([^"]*)"', entry)}
               for entry in re.split(r"\n\s+\d+\. Size: ", text)[1:]]
    if not buffers:
        buffers = [{"bytes": needed_bytes, "shape": shape, "source": ""}
                   for shape in re.findall(r"shape = '([^{']*)", text)]
    memory = "vmem"  # of one operation, such as a Pallas kernel
    if "memory space vmem" not in text:
        memory = "hbm"
        needed_bytes += resident_bytes  # the compiler's report covers temporaries only
    return {"memory": memory, "needed_bytes": needed_bytes, "report": text[:4000],
            "largest": sorted(buffers, key=lambda buffer: buffer["bytes"], reverse=True)[:10]}


def _first(pattern, text):
    """Returns the text of the group that takes part in the first match, or "" without a match."""
    found = re.search(pattern, text)
    return found[found.lastindex] if found else ""


def parse_size(text):
    """Returns the bytes that "24.25G", "31.0K", "512B" or "17179869184" stands for."""
    number, unit = re.fullmatch(r"([\d.]+)([BKMG]?)", text).groups()
    return int(float(number) * 1024 ** "BKMG".index(unit or "B"))


def lacks_vmem(report):
    return any(found["memory"] == "vmem" for found in report["out_of_memory"].values())


def advice(report):
    """Returns the flags that would make a run fit, the most promising first. report: of make_report."""
    flags = report["flags"]
    if lacks_vmem(report):
        return ["a shorter --max_seq_len", "--kernel=chunked"]
    suggestions = []
    if report["kernel"] == "current":
        suggestions.append("--kernel=flash")
    if flags["activation_checkpointing"] == "none":
        suggestions.append("--activation_checkpointing=all")
    if flags["device_batch_size"] > 1:
        suggestions.append(f"--device_batch_size={flags['device_batch_size'] // 2}")
    if report["chips"] > 1 and flags["mesh_fsdp"] == 1 and report["kernel"] != "current":
        suggestions.append("the --mesh_fsdp that tpu_preflight --find_mesh finds")
    return suggestions or ["a smaller model", "a TPU with more memory"]
