"""Derives from a compiled program the memory that it needs on a TPU, which is exact, and its time, an estimate by the
machine's own schedule (schedule.py): it tells better which of two programs is faster than how long either takes."""
from dataclasses import replace

from nanochat.preflight import hlo, timeline
from nanochat.preflight.ops import ops_of

FULL = 0.9  # an operation waits for a unit that uses this fraction of its slots


def report_program(traced, compiled, runs_per_step, resident_bytes, tpu_slice, branch_shares=None):
    """Returns a JSON object: memory and time of one run of a TracedProgram on one chip. Its CompiledProgram must fit.
    resident_bytes: {name: bytes} of all tensors that stay on the chip. branch_shares: as in ops_of."""
    tpu = tpu_slice.tpu
    ops = scheduled(ops_of(hlo.parse(compiled.hlo_text), branch_shares), compiled.schedules, tpu)
    kernels = [op for op in ops if op.kernel]
    line = timeline.run(ops, lambda op: busy_s(op, tpu), tpu_slice)
    # Of all kernels but the products that round, see kernels/pallas_int8.py.
    attention_s = sum(op.times * op_seconds(op, tpu) for op in kernels if "pallas_int8" not in op.kernel.source)
    return {
        "runs_per_step": runs_per_step, "compile_s": compiled.seconds,
        "traced_instructions": sum(map(len, hlo.parse(traced.hlo_text).computations.values())),
        "peak_bytes": peak_bytes(traced, compiled, resident_bytes), "temp_bytes": compiled.temp_bytes,
        "alias_bytes": compiled.alias_bytes,
        "cycles": sum(op.times * op.cycles for op in ops),
        "scheduled_cycles": sum(op.times * op.cycles for op in ops if op.schedule),
        "hbm_bytes": sum(op.times * op.hbm_bytes for op in ops),
        "pallas_calls": sum(op.times for op in kernels),
        "pallas_uncounted": [op.instruction.name for op in kernels if not op.kernel.declared_cost],
        "collectives": timeline.count_collectives(ops, tpu_slice.chips),
        "traffic_s": line.traffic_s,
        # waited: the part that no operation overlaps
        "copies_s": line.copies_s, "copies_waited_s": line.copies_waited_s,
        "ici_s": line.ici_s, "ici_waited_s": line.ici_waited_s,
        "estimated_s": line.seconds, "low_s": line.low_s, "high_s": line.high_s,  # low to high: the error bar
        "parts_s": {"products": line.seconds - attention_s - line.ici_waited_s, "attention": attention_s,
                    "collectives": line.ici_waited_s},  # products: and all that is neither of the others
        "top_operations": top_operations(ops, tpu)}


def peak_bytes(traced, compiled, resident_bytes):
    """Returns the bytes of a chip's memory in use while a program runs, including tensors that it does not touch."""
    # An output that takes the memory of a donated argument counts in argument_bytes and in output_bytes, so alias_bytes
    # is subtracted once.
    untouched = 0
    for name, size in resident_bytes.items():
        if name not in traced.arguments:
            untouched += size
    return (untouched + compiled.argument_bytes + compiled.output_bytes - compiled.alias_bytes
            + compiled.temp_bytes + compiled.code_bytes)


# Operations


def scheduled(ops, schedules, tpu):
    """Returns the Ops with the machine's own schedule, and with the cycles that they take if they never wait for
    memory. schedules: {name of an operation: Schedule}; tpu: a TpuType."""
    def likeness(op):
        return op.instruction.opcode, op.instruction.shape_text, op.instruction.cycles, len(op.instruction.operands)

    # The compiler generates code once for operations that are alike. An operation's own schedule goes before a twin's.
    # In the micro-step of depth 16 on v5e, 6.7% of the cycles have none of their own, all of operations that are alike.
    # The compiler estimates no cycles for Pallas kernels, for example. Opcode and shapes would not tell two of these
    # programs apart, so such an operation is nobody's twin.
    twins = {likeness(op): schedules[op.instruction.name] for op in ops
             if op.instruction.name in schedules and op.instruction.cycles}
    found = []
    for op in ops:
        schedule = schedules.get(op.instruction.name) or twins.get(likeness(op))
        if schedule and schedule.uncounted_loops:  # it does not say how many cycles
            schedule = None
        found.append(replace(op, schedule=schedule, cycles=cycles_of(op, schedule, tpu)))
    return found


def cycles_of(op, schedule, tpu):
    """Returns the cycles of an operation. Without a schedule they are the compiler's heuristic, plus the declared FLOPs
    of a Pallas kernel, which the heuristic does not know, at the rate of the matrix units."""
    declared = op.kernel and op.kernel.declared_cost or {}
    matrix_cycles = int(declared.get("flops", 0) / tpu.flops_per_cycle)
    if not schedule:
        return op.cycles + matrix_cycles
    if not matrix_cycles:
        return schedule.bound_cycles
    # Of a kernel with products in several branches, only as many cycles count as its declared FLOPs need.
    return schedule.cycles_with(matrix_cycles, declared.get("transcendentals", 0))


def busy_s(op, tpu):
    """Returns the seconds of an Op of `scheduled` without waiting for memory."""
    # The chip's clock is its peak rate over the FLOPs of a cycle.
    return op.cycles * tpu.flops_per_cycle / tpu.peak_flops


def op_seconds(op, tpu):
    """Returns the seconds of an Op that waits for its own traffic with HBM. The start of a transfer does not wait."""
    if op.begins:
        return busy_s(op, tpu)
    return max(busy_s(op, tpu), op.hbm_bytes / tpu.hbm_bytes_per_s)


def limit(op, tpu):
    """Returns in words what an operation waits for, "" without a schedule: HBM; the unit whose slots are full in its
    critical loop; or, if none is, the results of its own instructions. The fullest units' fractions of used slots
    follow."""
    if not op.schedule:
        return ""
    if op.hbm_bytes / tpu.hbm_bytes_per_s > op.schedule.bound_cycles * tpu.flops_per_cycle / tpu.peak_flops:
        return "HBM"
    units = op.schedule.critical.units
    used = sorted(((units[unit] / slots, unit) for unit, slots in op.schedule.slots.items()), reverse=True)
    fraction, unit = used[0]
    full = f"{unit} slots" if fraction >= FULL else "results"
    return f"{full}: " + ", ".join(f"{unit} {fraction:.2f}" for fraction, unit in used[:3])


def top_operations(ops, tpu):
    """Returns the ten operations that take longest as JSON objects, the longest first. Operations of the same source
    line, opcode and shape are added up; `name` and `limit` belong to the first of them."""
    lines = {}
    for op in ops:
        instruction = op.instruction
        source = instruction.source or instruction.opcode
        line = lines.setdefault((source, instruction.opcode, instruction.shape_text), {
            "source": source, "shape": instruction.shape_text, "name": instruction.name, "limit": limit(op, tpu),
            "runs": 0, "estimated_s": 0.0})
        line["runs"] += op.times
        line["estimated_s"] += op.times * op_seconds(op, tpu)
    return sorted(lines.values(), key=lambda line: line["estimated_s"], reverse=True)[:10]


# A step and a run


def report_run(programs, plan, tpu_slice):
    """Returns the estimated speed and duration of a run as a JSON object: of a step in the last stage, of each stage,
    and the hours of the run. programs: {name: what report_program returned}. plan: its Plan. tpu_slice: a tpu.Slice."""
    stages = {}
    for first, last, name in plan.stages:
        of_step = report_stage(programs[name], programs["update"], first, last, plan, tpu_slice)
        hours = plan.units(first, last) / of_step["tokens_per_s"] / 3600
        stages[name] = of_step | {"first": first, "last": last, "hours": hours}
    return of_step | {"hours": sum(stage["hours"] for stage in stages.values()), "stages": stages}


def report_stage(micro_step, update, first, last, plan, tpu_slice):
    """Returns the estimated speed of the steps from `first` up to and without `last`, which run these programs."""
    def seconds(which):
        return micro_step["runs_per_step"] * micro_step[which] + update[which]

    step_s = seconds("estimated_s")
    tokens_per_s = plan.units(0, 1) / step_s
    peak_flops = tpu_slice.tpu.peak_flops * tpu_slice.chips
    return {"step_s": step_s, "step_low_s": seconds("low_s"), "step_high_s": seconds("high_s"),
            "tokens_per_s": tokens_per_s, "update_share": update["estimated_s"] / step_s,
            "mfu": tokens_per_s * plan.flops(first, last) / plan.units(first, last) / peak_flops}
