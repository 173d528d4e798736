"""Says why one operation takes as long as it does: what bounds it, how its units are used, and its critical loop."""
import re

from nanochat.preflight.estimate import cycles_s, limit_of, op_seconds, with_twins

BUNDLES_SHOWN = 60
_COMMENT = re.compile(r"/\*.*?\*/|\s*\[(?:shape|resolvable)[^\]]*\]")


def explain(wanted, ops, schedules, tpu):
    """Returns a JSON object about the dearest operation whose name, or whose line of Python, contains `wanted`; None if
    there is none that has a schedule. ops: a list of hlo.Op. schedules: {name: Schedule}, read with bundles."""
    schedules = with_twins(schedules, ops)
    found = [op for op in ops if op.instruction.name in schedules
             and (wanted in op.instruction.name or wanted in op.instruction.source)]
    if not found:
        return None
    op = max(found, key=lambda op: op.times * op_seconds(op, schedules[op.instruction.name].bound_cycles, tpu))
    schedule = schedules[op.instruction.name]
    loop = schedule.critical
    return {
        "name": op.instruction.name, "source": op.instruction.source, "opcode": op.instruction.opcode,
        "shape": op.instruction.shape_text, "runs": op.times, "limit": limit_of(op, schedules, tpu),
        "estimated_s": op_seconds(op, schedule.bound_cycles, tpu),  # of one run, like the following
        "bundle_cycles": schedule.cycles, "matrix_cycles": schedule.matrix_cycles,
        "hbm_cycles": round(op.hbm_bytes / tpu.hbm_bytes_per_s / cycles_s(1, tpu)),
        "empty_cycles": schedule.empty_cycles, "heuristic_cycles": op.cycles,
        "uncounted_loops": schedule.uncounted_loops,
        "use": {unit: schedule.use(unit) for unit in schedule.slots}, "slots": schedule.slots,
        "critical_loop": {
            "bundles": loop.end - loop.begin, "runs": loop.runs, "cycles": loop.own_cycles, "units": loop.units,
            "dma_waits": sum("dma.done.wait" in bundle for bundle in schedule.bundles),
            "spills": sum(bundle.count("_spill]") for bundle in schedule.bundles),
            "program": listing(schedule.bundles, loop.begin)},
    }


def listing(bundles, begin, most=BUNDLES_SHOWN):
    """Returns the lines of a program: each bundle with its number, and one line for several empty ones. Ends after
    `most` lines."""
    lines, empty = [], 0
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
        lines.append(f"{number:>6}  " + " ;; ".join(_COMMENT.sub("", part).strip() for part in bundle.split(";;")))
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
    lines += [f"    {unit:<15} {loop['units'][unit]:5.2f} of {slots} slots a bundle; {found['use'][unit]:4.0%} in the "
              "whole operation" for unit, slots in found["slots"].items()]
    return lines + [line[:160] for line in loop["program"]]
