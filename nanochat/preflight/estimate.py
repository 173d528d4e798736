"""What a compiled program needs and takes on a TPU: memory for certain, time as an estimate.

The compiler's cycles are its heuristic: they compare two programs well, and a program with a stopwatch badly.
"""
import re
from dataclasses import asdict, dataclass, field

from nanochat.preflight import hlo


@dataclass
class ProgramReport:
    """One program on one chip. Bytes, cycles and seconds are those of one run."""
    name: str
    runs_per_step: int
    compile_s: float
    traced_instructions: int
    compiled_instructions: int
    hlo_hash: str
    peak_bytes: int  # of a chip's memory while it runs, with all that stays there
    temp_bytes: int
    argument_bytes: int
    output_bytes: int
    alias_bytes: int  # of the outputs, those in the memory of donated arguments
    code_bytes: int
    cycles: int = 0  # the kernels' included
    pallas_calls: int = 0
    pallas_flops: float = 0.0
    pallas_uncounted: list = field(default_factory=list)  # kernels whose FLOPs are not known
    accessed_bytes: float = 0.0  # in HBM and in VMEM
    hbm_bytes: float = 0.0
    collectives: dict = field(default_factory=dict)  # name -> [how many, bytes, of these beside other work]
    compute_s: float = 0.0
    hbm_s: float = 0.0
    ici_s: float = 0.0  # of collectives that everything waits for
    overlapped_ici_s: float = 0.0
    top_operations: list = field(default_factory=list)

    @property
    def seconds(self):
        """Estimated time of a run: arithmetic and memory traffic overlap, collectives only where the compiler cut them
        into steps."""
        return max(self.compute_s, self.hbm_s, self.overlapped_ici_s) + self.ici_s


def report_program(traced, compiled, runs_per_step, resident_bytes, tpu_slice):
    """ProgramReport of a TracedProgram and its CompiledProgram, which fits.

    resident_bytes: name -> bytes of the tensors that stay on the chip, whether this program uses them or not
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
        report.cycles += op.times * op.cycles
        report.accessed_bytes += op.times * op.bytes
        report.hbm_bytes += op.times * op.hbm_bytes
        if op.instruction.custom_call_target == hlo.PALLAS_CALL:
            report.pallas_calls += op.times
            report.pallas_flops += op.times * pallas_flops(op)
            report.cycles += int(op.times * pallas_flops(op) / tpu.flops_per_cycle)
            if not op.instruction.declared_cost:
                report.pallas_uncounted.append(op.instruction.name)
    report.collectives = hlo.collectives(ops, tpu_slice.chips)
    report.compute_s = report.cycles * tpu.flops_per_cycle / tpu.peak_flops
    report.hbm_s = report.hbm_bytes / tpu.hbm_bytes_per_s
    for name, (_, total, overlapped) in report.collectives.items():
        report.ici_s += collective_s(name, total - overlapped, tpu_slice)
        report.overlapped_ici_s += collective_s(name, overlapped, tpu_slice)
    report.top_operations = top_operations(ops, tpu)
    return report


def pallas_flops(op):
    """FLOPs of one run of a Pallas kernel, as it declares them; 0 if it does not."""
    return (op.instruction.declared_cost or {"flops": 0})["flops"]


def collective_s(name, num_bytes, tpu_slice):
    """Estimated seconds of collectives on rings: every chip sends by one of the torus' dimensions, both ways."""
    ring_bytes_per_s = tpu_slice.tpu.ici_bytes_per_s / (2 * tpu_slice.tpu.torus_dims)
    rounds = 2 if name == "all-reduce" else 1
    return rounds * (tpu_slice.chips - 1) / tpu_slice.chips * num_bytes / ring_bytes_per_s


def top_operations(ops, tpu, count=10):
    """The operations that take longest, as dicts; equal ones of one line, of several layers say, are added up."""
    lines = {}
    for op in ops:
        cycles = op.cycles
        if op.instruction.custom_call_target == hlo.PALLAS_CALL:
            cycles = pallas_flops(op) / tpu.flops_per_cycle
        key = (op.instruction.source or op.instruction.opcode, op.instruction.opcode, op.instruction.shape_text)
        line = lines.setdefault(key, {"source": key[0], "opcode": key[1], "shape": key[2], "runs": 0, "cycles": 0,
                                      "hbm_bytes": 0.0, "estimated_s": 0.0})
        line["runs"] += op.times
        line["cycles"] += op.times * cycles
        line["hbm_bytes"] += op.times * op.hbm_bytes
        line["estimated_s"] += op.times * max(cycles * tpu.flops_per_cycle / tpu.peak_flops,
                                              op.hbm_bytes / tpu.hbm_bytes_per_s)
    return sorted(lines.values(), key=lambda line: line["estimated_s"], reverse=True)[:count]


# -----------------------------------------------------------------------------
# Memory


@dataclass
class Buffer:
    """A large allocation in the compiler's out-of-memory report."""
    bytes: float
    shape: str
    source: str


def large_buffers(out_of_memory):
    """(bytes that the program would need, [Buffer, largest first]) of the compiler's out-of-memory report."""
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
    """Bytes of "24.25G", "31.0K", "512B" or "17179869184"."""
    number, unit = re.fullmatch(r"([\d.]+)([BKMG]?)", text).groups()
    return int(float(number) * 1024 ** "BKMG".index(unit or "B"))


# -----------------------------------------------------------------------------
# A step and a run


def report_run(reports, plan, tpu_slice):
    """Estimated speed, and length of the run, as a dict: what is derived from the programs of a step."""
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
    return asdict(report) | {"estimated_s": report.seconds}
