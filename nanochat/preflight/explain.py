"""Says why one operation takes as long as it does: what bounds it, how it uses its units, and its critical loop."""
import re

from nanochat.preflight.estimate import Costs

BUNDLES_SHOWN = 60
LONGEST_LINE = 160
_COMMENT = re.compile(r"/\*.*?\*/|\s*\[(?:shape|resolvable)[^\]]*\]")


def explain(pattern, ops, schedules, tpu):
    """Returns lines about the dearest operation whose name or line of Python contains `pattern`, [] if none has a
    schedule. ops: a list of Op. schedules: {name: Schedule}, read with bundles."""
    costs = Costs(ops, schedules, tpu)
    found = []
    for op in ops:
        is_named = pattern in op.instruction.name or pattern in op.instruction.source
        if is_named and op.instruction.name in costs.schedules:
            found.append(op)
    if not found:
        return []

    def seconds(op):
        return costs.op_seconds(op, costs.schedules[op.instruction.name].bound_cycles)

    op = max(found, key=lambda op: op.times * seconds(op))
    instruction = op.instruction
    schedule = costs.schedules[instruction.name]
    hbm_cycles = round(costs.traffic_s(op) / costs.seconds(1))
    lines = [f"{instruction.name}: {instruction.source or 'no line of Python'}",
             f"  {instruction.opcode} {instruction.shape_text[:100]}",
             f"  {1e6 * seconds(op):,.1f} us a run, {op.times} runs; it waits for {costs.limit(op)}",
             f"  cycles a run: bundles {schedule.cycles:,} ({schedule.empty_cycles:,} of them empty), "
             f"matrix units {schedule.matrix_cycles:,}, HBM {hbm_cycles:,}; heuristic {op.cycles:,}"]
    if schedule.uncounted_loops:
        lines.append(f"  {schedule.uncounted_loops} loops have no constant number of runs and count once: the table "
                     "has the heuristic")
    return lines + _explain_loop(schedule)


def _explain_loop(schedule):
    """Returns lines about the critical loop of a Schedule, with its program."""
    loop = schedule.critical
    dma_waits = 0
    spills = 0
    for bundle in schedule.bundles:
        dma_waits += "dma.done.wait" in bundle
        spills += bundle.count("_spill]")
    lines = [f"  critical loop: {loop.end - loop.begin:,} bundles, {loop.runs:,} runs, {loop.own_cycles:,} cycles; in "
             f"each run {dma_waits} waits for a DMA, {spills} registers spilled or filled"]
    for unit, slots in schedule.slots.items():
        lines.append(f"    {unit:<15} {loop.units[unit]:5.2f} of {slots} slots a bundle; {schedule.use(unit):4.0%} "
                     "in the whole operation")
    for line in listing(schedule.bundles, loop.begin):
        lines.append(line[:LONGEST_LINE])
    return lines


def listing(bundles, begin, most=BUNDLES_SHOWN):
    """Returns the lines of a program: each bundle with its number, and one line for several empty ones. Ends after
    `most` lines."""
    lines = []
    empty = 0
    for number, bundle in enumerate(bundles, begin):
        if not bundle:
            empty += 1
            continue
        if empty:
            lines.append(f"{'':>6}  ({empty} empty)")
        empty = 0
        if len(lines) >= most:
            lines.append(f"{'':>6}  (and {begin + len(bundles) - number} more)")
            break
        parts = [_COMMENT.sub("", part).strip() for part in bundle.split(";;")]
        lines.append(f"{number:>6}  {' ;; '.join(parts)}")
    return lines
