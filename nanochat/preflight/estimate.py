"""Derives from a compiled program the memory that it needs on a TPU, which is exact, and its time, an estimate by the
machine's own schedule (schedule.py): it tells better which of two programs is faster than how long either takes."""
from nanochat.preflight import hlo, timeline
from nanochat.preflight.ops import ops_of

FULL = 0.9  # an operation waits for a unit that uses this fraction of its slots
NOTHING_DECLARED = {"flops": 0, "transcendentals": 0}


def report_program(traced, compiled, runs_per_step, resident_bytes, tpu_slice, branch_shares=None):
    """Returns a JSON object: memory and time of one run of a TracedProgram on one chip. Its CompiledProgram must fit.
    resident_bytes: {name: bytes} of all tensors that stay on the chip. branch_shares: as in ops_of."""
    ops = ops_of(hlo.parse(compiled.hlo_text), branch_shares)
    costs = Costs(ops, compiled.schedules, tpu_slice.tpu)
    totals = costs.totals(ops)
    line = timeline.run(ops, lambda op: costs.seconds(costs.cycles(op)), tpu_slice)
    heuristic_s = costs.seconds(totals["cycles"] - totals["scheduled_cycles"])
    attention_s = sum(op.times * costs.op_seconds(op, costs.cycles(op)) for op in ops if op.kernel)
    return {
        "name": traced.name, "runs_per_step": runs_per_step, "compile_s": compiled.seconds,
        "traced_instructions": sum(map(len, hlo.parse(traced.hlo_text).computations.values())),
        "peak_bytes": peak_bytes(traced, compiled, resident_bytes), "temp_bytes": compiled.temp_bytes,
        "alias_bytes": compiled.alias_bytes,
        **totals,
        "collectives": timeline.count_collectives(ops, tpu_slice.chips),
        # waited: the part that no operation overlaps
        "copies_s": line.copies_s, "copies_waited_s": line.copies_waited_s,
        "ici_s": line.ici_s, "ici_waited_s": line.ici_waited_s,
        "estimated_s": line.seconds, "low_s": line.low_s, "high_s": line.high_s,  # low to high: the error bar
        "parts_s": {"products": line.seconds - attention_s - line.ici_waited_s, "attention": attention_s,
                    "collectives": line.ici_waited_s},  # products: and all that is neither of the others
        "doubt": f"whether {1000 * line.traffic_s:.1f} ms of traffic with HBM, {1000 * line.copies_s:.1f} of copies "
                 f"and {1000 * line.ici_s:.1f} of collectives overlap with compute; "
                 f"{1000 * heuristic_s:.1f} ms are the compiler's heuristic",
        "top_operations": top_operations(ops, costs)}


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


class Costs:
    """What one run of each operation of a program costs on a chip. Operations are Ops."""

    def __init__(self, ops, schedules, tpu):
        """schedules: {name of an operation: Schedule}; tpu: a TpuType."""
        self.tpu = tpu
        # An operation's own schedule goes before a twin's. In the micro-step of depth 16 on v5e, 6.7% of the cycles
        # have none of their own, all of operations that are alike.
        self.schedules = _twins(schedules, ops) | schedules

    def seconds(self, cycles):
        """Returns the seconds that a number of cycles takes."""
        # The chip's clock is its peak rate over the FLOPs of a cycle.
        return cycles * self.tpu.flops_per_cycle / self.tpu.peak_flops

    def is_scheduled(self, op):
        """Returns whether the machine's own schedule says how many cycles the operation takes: it must have one, and
        no loop of unknown length."""
        schedule = self.schedules.get(op.instruction.name)
        return schedule is not None and not schedule.uncounted_loops

    def cycles(self, op):
        """Returns the cycles of the operation, if it never waits for memory. Without a schedule they are the compiler's
        heuristic, plus the declared FLOPs of a Pallas kernel, which the heuristic does not know, at the rate of the
        matrix units."""
        cost = declared(op)
        matrix_cycles = int(cost["flops"] / self.tpu.flops_per_cycle)
        if not self.is_scheduled(op):
            return op.cycles + matrix_cycles
        schedule = self.schedules[op.instruction.name]
        if not matrix_cycles:
            return schedule.bound_cycles
        # Of a kernel with products in several branches, only as many cycles count as its declared FLOPs need.
        return schedule.cycles_with(matrix_cycles, cost["transcendentals"])

    def totals(self, ops):
        """Returns {name: sum over all runs of all operations}, and under pallas_uncounted the names of kernels that
        declare no cost."""
        found = {"cycles": 0, "scheduled_cycles": 0, "pallas_calls": 0, "pallas_flops": 0, "pallas_uncounted": [],
                 "hbm_bytes": 0}
        for op in ops:
            cycles = op.times * self.cycles(op)
            found["cycles"] += cycles
            found["hbm_bytes"] += op.times * op.hbm_bytes
            if self.is_scheduled(op):
                found["scheduled_cycles"] += cycles
            if op.kernel:
                found["pallas_calls"] += op.times
                found["pallas_flops"] += op.times * declared(op)["flops"]
                if not op.kernel.declared_cost:
                    found["pallas_uncounted"].append(op.instruction.name)
        return found

    def traffic_s(self, op):
        return op.hbm_bytes / self.tpu.hbm_bytes_per_s

    def op_seconds(self, op, cycles):
        """Returns the seconds of an operation of so many cycles that waits for its own traffic with HBM. The start of a
        transfer does not wait."""
        if op.begins:
            return self.seconds(cycles)
        return max(self.seconds(cycles), self.traffic_s(op))

    def limit(self, op):
        """Returns in words what a scheduled operation waits for: HBM; the unit whose slots are full in its critical
        loop; or, if none is, the results of its own instructions. The fullest units' fractions of used slots follow."""
        schedule = self.schedules[op.instruction.name]
        if self.traffic_s(op) > self.seconds(schedule.bound_cycles):
            return "HBM"
        units = schedule.critical.units
        used = sorted(((units[unit] / slots, unit) for unit, slots in schedule.slots.items()), reverse=True)
        fraction, unit = used[0]
        full = f"{unit} slots" if fraction >= FULL else "results"
        return f"{full}: " + ", ".join(f"{unit} {fraction:.2f}" for fraction, unit in used[:3])


def declared(op):
    """Returns what one run of a Pallas kernel declares, {"flops": …, "transcendentals": …}, zeros if nothing."""
    if op.kernel and op.kernel.declared_cost:
        return NOTHING_DECLARED | op.kernel.declared_cost
    return NOTHING_DECLARED


def _twins(schedules, ops):
    """Returns {name of an operation: schedule of another that is like it}: with the same opcode, shapes and heuristic
    cycles. The compiler generates code once for operations that are alike."""
    def likeness(op):
        return op.instruction.opcode, op.instruction.shape_text, op.instruction.cycles, len(op.instruction.operands)

    known = {}  # likeness -> Schedule
    # The compiler estimates no cycles for Pallas kernels, for example. Opcode and shapes would not tell two of these
    # programs apart, so such an operation is nobody's twin.
    for op in ops:
        if op.instruction.name in schedules and op.instruction.cycles:
            known[likeness(op)] = schedules[op.instruction.name]
    found = {}
    for op in ops:
        if likeness(op) in known:
            found[op.instruction.name] = known[likeness(op)]
    return found


def top_operations(ops, costs):
    """Returns the ten operations that take longest as JSON objects, the longest first. Operations of the same source
    line, opcode and shape are added up; `name` and `limit` belong to the first of them."""
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
