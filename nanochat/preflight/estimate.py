"""Derives from a compiled program the memory that it needs on a TPU, which is exact, and its time, an estimate.

The cycles are those of the machine's own schedule (schedule.py). They tell well which of two programs is faster, and
less well how many seconds either takes.
"""
from nanochat.preflight import hlo, timeline
from nanochat.preflight.ops import ops_of

FULL = 0.9  # a unit with this fraction of its slots in use is what an operation waits for
NOTHING_DECLARED = {"flops": 0, "transcendentals": 0}


def report_program(traced, compiled, runs_per_step, resident_bytes, tpu_slice, branch_shares=None):
    """Returns a JSON object about a TracedProgram and its CompiledProgram, which must fit: memory and time of one run
    of the program on one chip.

    resident_bytes: {name: bytes} of all tensors that stay on the chip, also of those that this program does not use.
    branch_shares: as in ops_of.
    """
    module = hlo.parse(compiled.hlo_text)
    ops = ops_of(module, branch_shares)
    kernels = [op for op in ops if op.kernel]
    costs = Costs(ops, compiled.schedules, tpu_slice.tpu)
    cycles = sum(op.times * costs.cycles(op) for op in ops)
    scheduled_cycles = sum(op.times * costs.cycles(op) for op in ops if costs.is_scheduled(op))
    hbm_bytes = sum(op.times * op.hbm_bytes for op in ops)
    line = timeline.run(ops, lambda op: costs.seconds(costs.cycles(op)), tpu_slice)
    return {
        "name": traced.name, "runs_per_step": runs_per_step, "compile_s": compiled.seconds,
        "traced_instructions": traced.instructions, "compiled_instructions": module.instruction_count(),
        "hlo_hash": traced.hlo_hash, "peak_bytes": peak_bytes(traced, compiled, resident_bytes),
        "temp_bytes": compiled.temp_bytes, "argument_bytes": compiled.argument_bytes,
        "output_bytes": compiled.output_bytes, "alias_bytes": compiled.alias_bytes, "code_bytes": compiled.code_bytes,
        "cycles": cycles, "scheduled_cycles": scheduled_cycles,
        "pallas_calls": sum(op.times for op in kernels),
        "pallas_flops": sum(op.times * declared(op)["flops"] for op in kernels),
        "pallas_uncounted": [op.instruction.name for op in kernels if not op.kernel.declared_cost],
        "accessed_bytes": sum(op.times * op.bytes for op in ops),  # in HBM and in VMEM
        "hbm_bytes": hbm_bytes, "collectives": timeline.count_collectives(ops, tpu_slice.chips),
        "compute_s": costs.seconds(cycles), "hbm_s": hbm_bytes / tpu_slice.tpu.hbm_bytes_per_s,
        "copies_s": line.copies_s, "copies_waited_s": line.copies_waited_s,  # what no operation hides
        "ici_s": line.ici_s, "ici_waited_s": line.ici_waited_s,
        "estimated_s": line.seconds, "low_s": line.low_s, "high_s": line.high_s,  # low to high: the error bar
        "doubt": f"whether {1000 * line.traffic_s:.1f} ms of traffic with HBM, {1000 * line.copies_s:.1f} of copies "
                 f"and {1000 * line.ici_s:.1f} of collectives are hidden; "
                 f"{1000 * costs.seconds(cycles - scheduled_cycles):.1f} ms are the compiler's heuristic",
        "top_operations": top_operations(ops, costs)}


def peak_bytes(traced, compiled, resident_bytes):
    """Returns the bytes of a chip's memory that are in use while a program runs, with what it does not touch."""
    # An output that takes the memory of a donated argument is in argument_bytes and in output_bytes, so alias_bytes
    # takes it away once.
    untouched = sum(size for name, size in resident_bytes.items() if name not in traced.arguments)
    return (untouched + compiled.argument_bytes + compiled.output_bytes - compiled.alias_bytes
            + compiled.temp_bytes + compiled.code_bytes)


# -----------------------------------------------------------------------------
# Operations


class Costs:
    """What one run of each operation of a program costs on a chip. Operations are Ops."""

    def __init__(self, ops, schedules, tpu):
        """schedules: {name of an operation: Schedule}; tpu: a TpuType."""
        self.tpu = tpu
        # An operation's own schedule goes before a twin's. In the micro-step of depth 16 on v5e, 6.7% of the cycles had
        # none of their own, all of operations that are alike.
        self.schedules = _twins(schedules, ops) | schedules

    def seconds(self, cycles):
        """Returns the seconds that a number of cycles takes."""
        # The chip's clock is its peak rate over the FLOPs of a cycle.
        return cycles * self.tpu.flops_per_cycle / self.tpu.peak_flops

    def is_scheduled(self, op):
        """Returns whether the machine's own schedule says how many cycles the operation takes: not if there is none,
        or if it has a loop whose length is no constant."""
        schedule = self.schedules.get(op.instruction.name)
        return schedule is not None and not schedule.uncounted_loops

    def cycles(self, op):
        """Returns the cycles of the operation, if it never waits for memory.

        Where no schedule says it, they are the compiler's heuristic, and of a Pallas kernel, of which that knows
        nothing, its declared FLOPs at the rate of the matrix units.
        """
        cost = declared(op)
        matrix_cycles = int(cost["flops"] / self.tpu.flops_per_cycle)
        if not self.is_scheduled(op):
            return op.cycles + matrix_cycles
        schedule = self.schedules[op.instruction.name]
        if not matrix_cycles:
            return schedule.bound_cycles
        # Of a kernel with products in several branches, only as many cycles count as its declared FLOPs need.
        return schedule.cycles_with(matrix_cycles, cost["transcendentals"])

    def traffic_s(self, op):
        return op.hbm_bytes / self.tpu.hbm_bytes_per_s

    def op_seconds(self, op, cycles):
        """Returns the seconds of the operation, which takes so many cycles and waits for its own traffic with HBM;
        transfers wait for none."""
        if op.begins:
            return self.seconds(cycles)
        return max(self.seconds(cycles), self.traffic_s(op))

    def limit(self, op):
        """Returns what a scheduled operation waits for, in words: HBM, the unit whose slots are full in its critical
        loop, or, if none is, the results of its own instructions; then the fractions of the fullest units' slots in
        use."""
        schedule = self.schedules[op.instruction.name]
        if self.traffic_s(op) > self.seconds(schedule.bound_cycles):
            return "HBM"
        units = schedule.critical.units
        use = sorted(((units[unit] / slots, unit) for unit, slots in schedule.slots.items()), reverse=True)
        fraction, unit = use[0]
        full = f"{unit} slots" if fraction >= FULL else "results"
        return f"{full}: " + ", ".join(f"{unit} {fraction:.2f}" for fraction, unit in use[:3])


def declared(op):
    """Returns what one run of a Pallas kernel declares, {"flops": …, "transcendentals": …}, zeros if nothing."""
    if op.kernel and op.kernel.declared_cost:
        return NOTHING_DECLARED | op.kernel.declared_cost
    return NOTHING_DECLARED


def _twins(schedules, ops):
    """Returns the schedules of operations by the name of others that are like them: with the same opcode, shapes and
    heuristic cycles. The compiler makes code once for operations that are alike."""
    def likeness(op):
        return op.instruction.opcode, op.instruction.shape_text, op.instruction.cycles, len(op.instruction.operands)

    known = {}  # likeness -> Schedule
    # Where the compiler estimates no cycles, as of Pallas kernels, opcode and shapes would not tell two programs apart:
    # such an operation is nobody's twin.
    for op in ops:
        if op.instruction.name in schedules and op.instruction.cycles:
            known[likeness(op)] = schedules[op.instruction.name]
    return {op.instruction.name: known[likeness(op)] for op in ops if likeness(op) in known}


def top_operations(ops, costs, count=10):
    """Returns the `count` operations that take longest as JSON objects, the longest first.

    Operations of the same source line, opcode and shape, such as those of several layers, are added up; `name` is the
    first of them, and `limit` says what that one waits for (Costs.limit).
    """
    lines = {}
    for op in ops:
        instruction = op.instruction
        source = instruction.source or instruction.opcode
        key = source, instruction.opcode, instruction.shape_text
        if key not in lines:
            lines[key] = {"source": source, "opcode": instruction.opcode, "shape": instruction.shape_text,
                          "name": instruction.name, "runs": 0, "cycles": 0, "hbm_bytes": 0.0, "estimated_s": 0.0,
                          "limit": costs.limit(op) if costs.is_scheduled(op) else ""}
        cycles = costs.cycles(op)
        line = lines[key]
        line["runs"] += op.times
        line["cycles"] += op.times * cycles
        line["hbm_bytes"] += op.times * op.hbm_bytes
        line["estimated_s"] += op.times * costs.op_seconds(op, cycles)
    return sorted(lines.values(), key=lambda line: line["estimated_s"], reverse=True)[:count]


# -----------------------------------------------------------------------------
# A step and a run


def report_run(programs, plan, tpu_slice):
    """Returns the estimated speed and duration of a run as a JSON object: of a step in the last stage, of each stage,
    and the hours that the run takes, and would take with the batches of the last stage throughout.

    programs: {name: what report_program returned}. plan: of a Task. tpu_slice: a tpu.Slice.
    """
    stages = {}
    for first, last, name in plan.stages:
        of_stage = [programs[name], programs["update"]]
        stages[name] = final = report_stage(of_stage, first, last, plan, tpu_slice)
    of_step = {name: value for name, value in final.items() if name not in ("first", "last", "hours")}
    return of_step | {
        "hours": sum(stage["hours"] for stage in stages.values()), "stages": stages,
        "hours_of_last": plan.units(0, plan.num_iterations) / final[f"{plan.unit}_per_s"] / 3600}


def report_stage(programs, first, last, plan, tpu_slice):
    """Returns the estimated speed of the steps from `first` up to and without `last`, which run these programs."""
    def seconds(which):
        return sum(program["runs_per_step"] * program[which] for program in programs)

    step_s = seconds("estimated_s")
    units = plan.units(first, last)
    units_per_s = plan.units(0, 1) / step_s
    peak_flops = tpu_slice.tpu.peak_flops * tpu_slice.chips
    return {
        "first": first, "last": last,
        "step_s": step_s, "step_low_s": seconds("low_s"), "step_high_s": seconds("high_s"),
        f"{plan.unit}_per_s": units_per_s, "mfu": units_per_s * plan.flops(first, last) / units / peak_flops,
        "hours": units / units_per_s / 3600,
        "shares": {program["name"]: program["runs_per_step"] * program["estimated_s"] / step_s for program in programs}}
