"""Derives from a compiled program the memory that it needs on a TPU, which is exact, and its time, an estimate.

The cycles are those of the machine's own schedule (schedule.py) or, where there is none, the compiler's heuristic. They
tell well which of two programs is faster, and less well how many seconds either takes.
"""
import re
from dataclasses import dataclass, field

from nanochat.preflight import collectives, hlo, timeline

FULL = 0.9  # a unit with this fraction of its slots in use is what an operation waits for
HEURISTIC_RANGE = 0.7, 1.1  # schedule / heuristic: 0.72 to 0.89 at depth 16, and a margin


@dataclass
class ProgramReport:
    """Memory and time of one program on one chip. Bytes, cycles and seconds are for one run of the program."""
    name: str
    runs_per_step: int
    compile_s: float
    traced_instructions: int
    compiled_instructions: int
    hlo_hash: str
    peak_bytes: int  # of device memory while it runs, with the tensors that stay there
    temp_bytes: int
    argument_bytes: int
    output_bytes: int
    alias_bytes: int  # of the outputs that reuse the memory of donated arguments
    code_bytes: int
    cycles: int = 0  # with those of Pallas kernels
    scheduled_cycles: int = 0  # the part of `cycles` that the machine's own schedule says; 0 if it was not asked for
    pallas_calls: int = 0
    pallas_flops: float = 0.0
    pallas_uncounted: list = field(default_factory=list)  # kernels whose FLOPs are not known
    accessed_bytes: float = 0.0  # in HBM and in VMEM
    hbm_bytes: float = 0.0
    collectives: dict = field(default_factory=dict)  # name -> [number, bytes, bytes moved concurrently with other work]
    compute_s: float = 0.0  # of all cycles
    hbm_s: float = 0.0  # of all traffic with HBM
    copies_s: float = 0.0  # of copies that go on beside operations
    copies_waited_s: float = 0.0  # for which no operation is left that could hide them
    ici_s: float = 0.0  # of collectives
    ici_waited_s: float = 0.0
    estimated_s: float = 0.0
    low_s: float = 0.0  # the error bar of estimated_s
    high_s: float = 0.0
    doubt: str = ""  # the reason for the error bar
    top_operations: list = field(default_factory=list)


def report_program(traced, compiled, runs_per_step, resident_bytes, tpu_slice, branch_shares=None):
    """Returns the ProgramReport of a TracedProgram and its CompiledProgram, which must fit.

    resident_bytes: {name: bytes} of all tensors that stay on the chip, also of those that this program does not use.
    branch_shares: as in hlo.Module.ops.
    """
    unused = sum(size for name, size in resident_bytes.items() if name not in traced.arguments)
    memory = {name: getattr(compiled, name)
              for name in ("argument_bytes", "output_bytes", "alias_bytes", "temp_bytes", "code_bytes")}
    peak = unused + sum(memory.values()) - 2 * compiled.alias_bytes
    module = hlo.parse(compiled.hlo_text)
    ops, tpu = module.ops(branch_shares), tpu_slice.tpu
    schedules = with_twins(compiled.schedules, ops)
    report = ProgramReport(
        traced.name, runs_per_step, compiled.seconds, traced.instructions, module.instruction_count(),
        traced.hlo_hash, peak, **memory)
    for op in ops:
        cycles, is_scheduled = cycles_of(op, schedules, tpu)
        report.cycles += op.times * cycles
        report.scheduled_cycles += op.times * cycles * is_scheduled
        report.accessed_bytes += op.times * op.bytes
        report.hbm_bytes += op.times * op.hbm_bytes
        if op.kernel:
            report.pallas_calls += op.times
            report.pallas_flops += op.times * pallas_cost(op)["flops"]
            if not op.kernel.declared_cost:
                report.pallas_uncounted.append(op.instruction.name)
    report.collectives = collectives.count(ops, tpu_slice.chips)
    report.compute_s = cycles_s(report.cycles, tpu)
    report.hbm_s = report.hbm_bytes / tpu.hbm_bytes_per_s
    line = timeline.run(ops, lambda op: cycles_s(cycles_of(op, schedules, tpu)[0], tpu), tpu_slice)
    report.copies_s, report.copies_waited_s = line.copies_s, line.copies_waited_s
    report.ici_s, report.ici_waited_s = line.ici_s, line.ici_waited_s
    if schedules:
        guessed_s = cycles_s(report.cycles - report.scheduled_cycles, tpu)
        report.estimated_s, report.low_s, report.high_s = line.seconds, line.low_s, line.high_s
        report.doubt = (f"whether {1000 * line.traffic_s:.1f} ms of traffic with HBM, {1000 * line.copies_s:.1f} of "
                        f"copies and {1000 * line.ici_s:.1f} of collectives are hidden; {1000 * guessed_s:.1f} ms "
                        "are the compiler's heuristic")
    else:
        report.estimated_s = max(max(report.compute_s, report.hbm_s) + line.ici_waited_s, line.ici_s)
        report.low_s, report.high_s = report.estimated_s * HEURISTIC_RANGE[0], report.estimated_s * HEURISTIC_RANGE[1]
        report.doubt = "the heuristic: the machine's own schedule took 0.72 to 0.89 of its time at depth 16"
    report.top_operations = top_operations(ops, tpu, schedules)
    return report


def with_twins(schedules, ops):
    """Returns the schedules with those of operations that have none of their own: the compiler makes code once for
    operations that are alike, which have the same opcode, shapes and heuristic cycles."""
    if not schedules:
        return {}

    def likeness(op):
        return op.instruction.opcode, op.instruction.shape_text, op.instruction.cycles, len(op.instruction.operands)

    known = {likeness(op): schedules[op.instruction.name] for op in ops
             if op.instruction.name in schedules and op.instruction.cycles}
    return {op.instruction.name: known[likeness(op)] for op in ops if likeness(op) in known} | schedules


def cycles_s(cycles, tpu):
    """Returns the seconds that a number of cycles takes."""
    return cycles * tpu.flops_per_cycle / tpu.peak_flops


def cycles_of(op, schedules, tpu):
    """Returns the cycles of one run of an operation, and whether they are those of its schedule.

    Of a Pallas kernel with products in several branches, only as many cycles count as its declared FLOPs need. Where
    the schedule is not known or has a loop of unknown length, they are the compiler's heuristic, and of a Pallas kernel
    its declared FLOPs at the rate of the matrix units.
    """
    schedule, cost = schedules.get(op.instruction.name), pallas_cost(op)
    matrix_cycles = int(cost["flops"] / tpu.flops_per_cycle)
    if schedule and not schedule.uncounted_loops:
        return (schedule.cycles_with(matrix_cycles, cost["transcendentals"]) if matrix_cycles
                else schedule.bound_cycles), True
    return op.cycles + matrix_cycles, False


def op_seconds(op, cycles, tpu):
    """Returns the seconds of one run of an operation that waits for its own traffic with HBM; transfers wait for
    none."""
    return cycles_s(cycles, tpu) if op.begins else max(cycles_s(cycles, tpu), op.hbm_bytes / tpu.hbm_bytes_per_s)


def pallas_cost(op):
    """Returns what one run of a Pallas kernel declares, {"flops": …, "transcendentals": …}, zeros if nothing."""
    return {"flops": 0, "transcendentals": 0} | (op.kernel and op.kernel.declared_cost or {})


def top_operations(ops, tpu, schedules, count=10):
    """Returns the `count` operations that take longest as JSON objects, the longest first.

    Operations of the same source line, opcode and shape, such as those of several layers, are added up; `name` is the
    first of them, and `limit` says what that one waits for (limit_of).
    """
    lines = {}
    for op in ops:
        cycles, is_scheduled = cycles_of(op, schedules, tpu)
        key = (op.instruction.source or op.instruction.opcode, op.instruction.opcode, op.instruction.shape_text)
        line = lines.setdefault(key, {"source": key[0], "opcode": key[1], "shape": key[2], "name": op.instruction.name,
                                      "runs": 0, "cycles": 0, "hbm_bytes": 0.0, "estimated_s": 0.0,
                                      "limit": limit_of(op, schedules, tpu) if is_scheduled else ""})
        line["runs"] += op.times
        line["cycles"] += op.times * cycles
        line["hbm_bytes"] += op.times * op.hbm_bytes
        line["estimated_s"] += op.times * op_seconds(op, cycles, tpu)
    return sorted(lines.values(), key=lambda line: line["estimated_s"], reverse=True)[:count]


def limit_of(op, schedules, tpu):
    """Returns what a scheduled operation waits for, in words: HBM, the unit whose slots are full in its critical loop,
    or, if none is, the results of its own instructions; then the fractions of the fullest units' slots in use."""
    schedule = schedules[op.instruction.name]
    if op.hbm_bytes / tpu.hbm_bytes_per_s > cycles_s(schedule.bound_cycles, tpu):
        return "HBM"
    loop = schedule.critical
    use = sorted(((loop.units[unit] / slots, unit) for unit, slots in schedule.slots.items()), reverse=True)
    full = f"{use[0][1]} slots" if use[0][0] >= FULL else "results"
    return f"{full}: " + ", ".join(f"{unit} {fraction:.2f}" for fraction, unit in use[:3])


# -----------------------------------------------------------------------------
# Memory


@dataclass
class Buffer:
    """One large allocation in the compiler's out-of-memory report."""
    bytes: float
    shape: str
    source: str


def large_buffers(out_of_memory):
    """Reads the compiler's out-of-memory report. Returns the bytes that the program would need (0 if the report does
    not say) and a list of Buffer, the largest first."""
    needed = re.search(r"Used ([\d.]+[KMG]) of", out_of_memory) \
        or re.search(r"Allocation \(size=(\d+)\)", out_of_memory)
    buffers = []
    for entry in re.split(r"\n\s+\d+\. Size: ", out_of_memory)[1:]:
        shape, source = re.search(r"Shape: (\S+?)\{", entry), re.search(r'op_name="([^"]*)"', entry)
        buffers.append(Buffer(parse_size(entry.split()[0]), shape[1] if shape else "", source[1] if source else ""))
    if not buffers:
        for shape in re.findall(r"shape = '([^{']*)", out_of_memory):
            buffers.append(Buffer(parse_size(needed[1]), shape, ""))
    return parse_size(needed[1]) if needed else 0, sorted(buffers, key=lambda buffer: buffer.bytes, reverse=True)


def parse_size(text):
    """Returns the bytes that "24.25G", "31.0K", "512B" or "17179869184" stands for."""
    number, unit = re.fullmatch(r"([\d.]+)([BKMG]?)", text).groups()
    return int(float(number) * 1024 ** "BKMG".index(unit or "B"))


# -----------------------------------------------------------------------------
# A step and a run


def report_run(reports, plan, tpu_slice, slices=1, between_s=0.0):
    """Returns the estimated speed and duration of a run as a JSON object: of a step in the last stage, of each stage,
    and the hours that the run takes, and would take with the batches of the last stage throughout.

    reports: the ProgramReports of the run's programs. plan: of a Task. tpu_slice: a tpu.Slice. slices: how many of them
    train the run, each by this plan; between_s: the seconds of a step in which they exchange gradients.
    """
    stages = {name: report_stage([report for report in reports if report.name in (name, "update")], first, last, plan,
                                 tpu_slice, slices, between_s) for first, last, name in plan.stages}
    *_, final = stages.values()
    return {name: value for name, value in final.items() if name not in ("first", "last", "hours")} | {
        "hours": sum(stage["hours"] for stage in stages.values()), "stages": stages,
        "hours_of_last": slices * plan.units(0, plan.num_iterations) / final[f"{plan.unit}_per_s"] / 3600}


def report_stage(reports, first, last, plan, tpu_slice, slices, between_s):
    """Returns the estimated speed of the steps from `first` up to and without `last`, which run these programs."""
    step_s, low_s, high_s = (between_s + sum(report.runs_per_step * getattr(report, name) for report in reports)
                             for name in ("estimated_s", "low_s", "high_s"))
    units_per_s, units = slices * plan.units(0, 1) / step_s, slices * plan.units(first, last)
    return {
        "first": first, "last": last, "step_s": step_s, "step_low_s": low_s, "step_high_s": high_s,
        f"{plan.unit}_per_s": units_per_s,
        "mfu": units_per_s * plan.flops(first, last) / units / (tpu_slice.tpu.peak_flops * tpu_slice.chips),
        "hours": units / units_per_s / 3600,
        "shares": {report.name: report.runs_per_step * report.estimated_s / step_s for report in reports},
    }
