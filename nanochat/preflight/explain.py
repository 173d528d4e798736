"""Says why one operation takes as long as it does: what bounds it, how its units are used, and its critical loop."""
import re

from nanochat.preflight.estimate import Costs

BUNDLES_SHOWN = 60
_COMMENT = re.compile(r"/\*.*?\*/|\s*\[(?:shape|resolvable)[^\]]*\]")


def explain(wanted, ops, schedules, tpu):
    """Returns a JSON object about the dearest operation whose name, or whose line of Python, contains `wanted`; None if
    there is none that has a schedule. ops: a list of Op. schedules: {name: Schedule}, read with bundles."""
    costs = Costs(ops, schedules, tpu)
    found = [op for op in ops if op.instruction.name in costs.schedules
             and (wanted in op.instruction.name or wanted in op.instruction.source)]
    if not found:
        return None

    def seconds(op):
        return costs.op_seconds(op, costs.schedules[op.instruction.name].bound_cycles)

    op = max(found, key=lambda op: op.times * seconds(op))
    schedule = costs.schedules[op.instruction.name]
    return {
        "name": op.instruction.name, "source": op.instruction.source, "opcode": op.instruction.opcode,
        "shape": op.instruction.shape_text, "runs": op.times, "limit": costs.limit(op),
        "estimated_s": seconds(op),  # of one run, like the following
        "bundle_cycles": schedule.cycles, "matrix_cycles": schedule.matrix_cycles,
        "hbm_cycles": round(costs.traffic_s(op) / costs.seconds(1)),
        "empty_cycles": schedule.empty_cycles, "heuristic_cycles": op.cycles,
        "uncounted_loops": schedule.uncounted_loops,
        "use": {unit: schedule.use(unit) for unit in schedule.slots}, "slots": schedule.slots,
        "critical_loop": explain_loop(schedule.critical, schedule.bundles),
    }


def explain_loop(loop, bundles):
    """Returns a JSON object about a Loop and the texts of its bundles."""
    return {"bundles": loop.end - loop.begin, "runs": loop.runs, "cycles": loop.own_cycles, "units": loop.units,
            "dma_waits": sum("dma.done.wait" in bundle for bundle in bundles),
            "spills": sum(bundle.count("_spill]") for bundle in bundles),
            "program": listing(bundles, loop.begin)}


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


def describe(found):
    """Returns what explain() returned as lines of text."""
    loop = found["critical_loop"]
    lines = [f"{found['name']}: {found['source'] or 'no line of Python'}",
             f"  {found['opcode']} {found['shape'][:100]}",
             f"  {1e6 * found['estimated_s']:,.1f} us a run, {found['runs']} runs; it waits for {found['limit']}",
             f"  cycles a run: bundles {found['bundle_cycles']:,} ({found['empty_cycles']:,} of them empty), "
             f"matrix units {found['matrix_cycles']:,}, HBM {found['hbm_cycles']:,}; "
             f"heuristic {found['heuristic_cycles']:,}"]
    if found["uncounted_loops"]:
        lines.append(f"  {found['uncounted_loops']} loops have no constant number of runs and count once: the table "
                     "has the heuristic")
    lines.append(f"  critical loop: {loop['bundles']:,} bundles, {loop['runs']:,} runs, {loop['cycles']:,} cycles; in "
                 f"each run {loop['dma_waits']} waits for a DMA, {loop['spills']} registers spilled or filled")
    for unit, slots in found["slots"].items():
        lines.append(f"    {unit:<15} {loop['units'][unit]:5.2f} of {slots} slots a bundle; {found['use'][unit]:4.0%} "
                     "in the whole operation")
    return lines + [line[:160] for line in loop["program"]]
