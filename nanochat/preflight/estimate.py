"""Derives from a compiled program the memory that it needs on a TPU, which is exact, and its time, an estimate.

The cycles are the compiler's heuristic or, where they were asked for, those of the machine's own schedule
(schedule.py). They tell well which of two programs is faster, and less well how many seconds either takes.
"""
import re
from dataclasses import asdict, dataclass, field

from nanochat.preflight import hlo


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
    compute_s: float = 0.0
    operations_s: float = 0.0  # all operations one after the other, each waiting for its own traffic with HBM
    hbm_s: float = 0.0
    ici_s: float = 0.0  # of collectives during which nothing else runs
    overlapped_ici_s: float = 0.0
    top_operations: list = field(default_factory=list)

    @property
    def seconds(self):
        """The estimated time of one run. Arithmetic and memory traffic overlap; a collective overlaps with them only
        if the compiler cut it into steps. With schedules, an operation also waits for its own memory traffic."""
        busy_s = self.operations_s if self.scheduled_cycles else self.compute_s
        return max(busy_s, self.hbm_s, self.overlapped_ici_s) + self.ici_s


def report_program(traced, compiled, runs_per_step, resident_bytes, tpu_slice):
    """Returns the ProgramReport of a TracedProgram and its CompiledProgram, which must fit.

    resident_bytes: {name: bytes} of all tensors that stay on the chip, also of those that this program does not use.
    """
    unused = sum(size for name, size in resident_bytes.items() if name not in traced.arguments)
    memory = {name: getattr(compiled, name)
              for name in ("argument_bytes", "output_bytes", "alias_bytes", "temp_bytes", "code_bytes")}
    peak = unused + sum(memory.values()) - 2 * compiled.alias_bytes
    module = hlo.parse(compiled.hlo_text)
    ops = module.ops()
    report = ProgramReport(
        traced.name, runs_per_step, compiled.seconds, traced.instructions, module.instruction_count(),
        traced.hlo_hash, peak, **memory)
    tpu = tpu_slice.tpu
    for op in ops:
        cycles, is_scheduled = cycles_of(op, compiled.schedules, tpu)
        report.cycles += op.times * cycles
        report.scheduled_cycles += op.times * cycles * is_scheduled
        report.operations_s += op.times * op_seconds(op, cycles, tpu)
        report.accessed_bytes += op.times * op.bytes
        report.hbm_bytes += op.times * op.hbm_bytes
        if op.instruction.custom_call_target == hlo.PALLAS_CALL:
            report.pallas_calls += op.times
            report.pallas_flops += op.times * pallas_flops(op)
            if not op.instruction.declared_cost:
                report.pallas_uncounted.append(op.instruction.name)
    report.collectives = hlo.collectives(ops, tpu_slice.chips)
    report.compute_s = report.cycles * tpu.flops_per_cycle / tpu.peak_flops
    report.hbm_s = report.hbm_bytes / tpu.hbm_bytes_per_s
    for name, (_, total, overlapped) in report.collectives.items():
        report.ici_s += collective_s(name, total - overlapped, tpu_slice)
        report.overlapped_ici_s += collective_s(name, overlapped, tpu_slice)
    report.top_operations = top_operations(ops, tpu, compiled.schedules)
    return report


def cycles_of(op, schedules, tpu):
    """Returns the cycles of one run of an operation, and whether they are those of its schedule.

    Where its schedule is not known or has a loop of unknown length, they are the compiler's heuristic, and of a Pallas
    kernel its declared FLOPs at the rate of the matrix units.
    """
    schedule = schedules.get(op.instruction.name)
    if schedule and not schedule.uncounted_loops:
        return schedule.bound_cycles, True
    return op.cycles + int(pallas_flops(op) / tpu.flops_per_cycle), False


def op_seconds(op, cycles, tpu):
    """Returns the seconds of one run of an operation that waits for its own traffic with HBM; copies wait for none."""
    compute_s = cycles * tpu.flops_per_cycle / tpu.peak_flops
    return compute_s if op.instruction.opcode.endswith("-start") else max(compute_s, op.hbm_bytes / tpu.hbm_bytes_per_s)


def pallas_flops(op):
    """Returns the FLOPs of one run of a Pallas kernel that the kernel itself declares, 0 if it declares none."""
    is_kernel = op.instruction.custom_call_target == hlo.PALLAS_CALL
    return (is_kernel and op.instruction.declared_cost or {"flops": 0})["flops"]


def collective_s(name, num_bytes, tpu_slice):
    """Returns the estimated seconds of collectives over `num_bytes`.

    Assumes rings: each chip sends along one dimension of the torus, in both directions.
    """
    ring_bytes_per_s = tpu_slice.tpu.ici_bytes_per_s / (2 * tpu_slice.tpu.torus_dims)
    rounds = 2 if name == "all-reduce" else 1
    return rounds * (tpu_slice.chips - 1) / tpu_slice.chips * num_bytes / ring_bytes_per_s


def top_operations(ops, tpu, schedules, count=10):
    """Returns the `count` operations that take longest as JSON objects, the longest first.

    Operations of the same source line, opcode and shape, such as those of several layers, are added up. `limit` says
    what the first of them waits for: HBM, the matrix units, or the issue of its instructions, of which it then says how
    many each unit gets per cycle; "" where its schedule is not known.
    """
    lines = {}
    for op in ops:
        cycles, is_scheduled = cycles_of(op, schedules, tpu)
        key = (op.instruction.source or op.instruction.opcode, op.instruction.opcode, op.instruction.shape_text)
        line = lines.setdefault(key, {"source": key[0], "opcode": key[1], "shape": key[2], "runs": 0, "cycles": 0,
                                      "hbm_bytes": 0.0, "estimated_s": 0.0,
                                      "limit": limit_of(op, schedules, tpu) if is_scheduled else ""})
        line["runs"] += op.times
        line["cycles"] += op.times * cycles
        line["hbm_bytes"] += op.times * op.hbm_bytes
        line["estimated_s"] += op.times * op_seconds(op, cycles, tpu)
    return sorted(lines.values(), key=lambda line: line["estimated_s"], reverse=True)[:count]


def limit_of(op, schedules, tpu):
    """Returns what a scheduled operation waits for, in words (see top_operations)."""
    schedule = schedules[op.instruction.name]
    if op.hbm_bytes / tpu.hbm_bytes_per_s > schedule.bound_cycles * tpu.flops_per_cycle / tpu.peak_flops:
        return "HBM"
    if schedule.matrix_cycles >= schedule.cycles:
        return "matrix units"
    rates = sorted(((count / schedule.cycles, unit) for unit, count in schedule.units.items()), reverse=True)
    rates = [(schedule.matrix_cycles / schedule.cycles, "matrix units"), *rates[:3]]
    return "issue: " + ", ".join(f"{unit} {rate:.2f}" for rate, unit in rates)


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


def report_run(reports, plan, tpu_slice):
    """Returns the estimated speed and duration of a run as a JSON object.

    reports: the ProgramReports of the run's programs. plan: a Plan. tpu_slice: a tpu.Slice.
    """
    step_s = sum(report.runs_per_step * report.seconds for report in reports)
    tokens_per_s = plan.total_batch_size / step_s
    return {
        "step_s": step_s,
        "tokens_per_s": tokens_per_s,
        "mfu": tokens_per_s * plan.flops_per_token / (tpu_slice.tpu.peak_flops * tpu_slice.chips),
        "hours": plan.tokens(0, plan.num_iterations) / tokens_per_s / 3600,
        "shares": {report.name: report.runs_per_step * report.seconds / step_s for report in reports
                   if report.runs_per_step},
    }


def as_json(report):
    """Returns a ProgramReport as a JSON object."""
    return asdict(report) | {"estimated_s": report.seconds}
