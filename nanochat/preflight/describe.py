"""Says the report of a preflight to a person."""
import json

from nanochat.common import say
from nanochat.device.tpu import GIB
from nanochat.preflight.report import MICRO_STEP, advice, kind_of, lacks_vmem

DOES_NOT_FIT = 3


def deliver(own, report):
    """Prints the report, and writes its JSON to --json of the PreflightFlags `own`. Returns the exit status."""
    say("\n".join(describe(report)), keep="\n")
    if own.json:
        own.json.write_text(json.dumps(report, indent=1))
    return 0 if report["fits"] else DOES_NOT_FIT


def describe(report):
    """Returns the report as lines of text."""
    usable = report["usable_hbm_bytes"]
    lines = [f"memory of a chip ({gib(usable)} usable):"]
    lines += [f"  {gib(size):>10}  {name}" for name, size in report["memory"].items()]
    lines += describe_programs(report["programs"])
    for name, found in report["out_of_memory"].items():
        needed = gib(found["needed_bytes"])
        if found["memory"] == "vmem":
            needed = f"{found['needed_bytes'] / 2**20:.2f} MiB of VMEM for one operation"
        lines += ["", f"{name} does not fit: it needs {needed}. Largest buffers:"]
        lines += [f"  {gib(each['bytes']):>10}  {each['shape']:<28} {each['source']}" for each in found["largest"]]
    if "estimate" in report:
        lines += describe_run(report["estimate"], report["plan"], report["zone"])
    if "measured" in report:
        lines.append(describe_measured(report["measured"], report["estimate"]))
    if report["fits"]:
        lines += ["", f"fits: {gib(report['peak_bytes'])} of {gib(usable)} ({report['peak_bytes'] / usable:.0%})"]
    else:
        what = "VMEM" if lacks_vmem(report) else gib(usable)
        lines += ["", f"does not fit into {what}. Try {', or '.join(advice(report))}"]
    if "find_mesh" in report:
        found = report["find_mesh"]
        lines.append(f"smallest --mesh_fsdp that fits: {found['smallest']}; {len(found['peak_bytes'])} tried")
    if "find_batch" in report:
        found = report["find_batch"]
        lines.append(f"largest --device_batch_size that fits: {found['largest']}; {len(found['peak_bytes'])} tried")
    return lines


def gib(num_bytes):
    return f"{num_bytes / GIB:.2f} GiB"


def span_ms(low_s, high_s, digits=1):
    return f"{1000 * low_s:.{digits}f} to {1000 * high_s:.{digits}f}"


# Programs

COLUMNS = {  # of the table of programs: heading -> the text of a program's cell
    "peak": lambda program: gib(program["peak_bytes"]),
    "temporary": lambda program: gib(program["temp_bytes"]),
    "Mcycles": lambda program: f"{program['cycles'] / 1e6:.1f}",
    "HBM GB": lambda program: f"{program['hbm_bytes'] / 1e9:.1f}",
    "est. ms": lambda program: f"{1000 * program['estimated_s']:.1f}",
    "low to high": lambda program: span_ms(program["low_s"], program["high_s"]),
    "runs": lambda program: str(program["runs_per_step"]),
    "seconds": lambda program: f"{program['compile_s']:.0f}"}


def describe_programs(programs):
    """Returns lines about the programs that fit: what report_program returned of each."""
    if not programs:
        return []
    rows = [["", *COLUMNS]]
    for name, program in programs.items():
        rows.append([name, *(cell(program) for cell in COLUMNS.values())])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["", *("  " + "  ".join(map(str.rjust, row, widths)) for row in rows)]
    for name, program in programs.items():
        lines += [f"  {name}: {line}" for line in describe_waits(program)]
    for name, program in programs.items():
        if kind_of(name) == MICRO_STEP:
            lines += describe_top_operations(name, program)
    return lines


def describe_waits(program):
    """Returns lines about what a program may wait for, and about its Pallas kernels."""
    traffic, copies, copies_waited, ici, ici_waited = (
        f"{1000 * program[name]:.1f}" for name in ("traffic_s", "copies_s", "copies_waited_s", "ici_s", "ici_waited_s"))
    lines = [f"the error bar is whether {traffic} ms of traffic with HBM, {copies} of copies and {ici} of collectives "
             f"overlap with compute; the program waits for {copies_waited} of copies and {ici_waited} of collectives"]
    for kind, (count, num_bytes, overlapped) in program["collectives"].items():
        lines.append(f"{count} {kind}, {num_bytes / 1e6:.1f} MB, {overlapped / 1e6:.1f} of them overlapped with "
                     "compute")
    if program["pallas_uncounted"]:
        lines.append(f"Pallas kernels of unknown cost, not counted: {program['pallas_uncounted']}")
    return lines


def describe_top_operations(name, program):
    lines = ["", f"most expensive operations of {name} (estimates):"]
    for op in program["top_operations"]:
        line = (f"  {1000 * op['estimated_s']:7.2f} ms {op['runs']:4} × {op['name']:<28} {op['source']}  "
                f"{op['shape'][:60]}  {op['limit']}")
        lines.append(line.rstrip())
    scheduled = program["scheduled_cycles"] / program["cycles"]
    lines.append(f"  {scheduled:.1%} of the cycles are the machine's own schedule, the rest the compiler's heuristic")
    return lines


# The run


def describe_run(run, plan, zone):
    """Returns lines about a report's estimate of a run. zone: whose prices count, or None."""
    lines = [""]
    if len(run["stages"]) > 1:
        for name, stage in run["stages"].items():
            lines.append(f"estimate: {1000 * stage['step_s']:.0f} ms a step in steps {stage['first'] + 1:,} to "
                         f"{stage['last']:,} ({name}), MFU {stage['mfu']:.1%}, {stage['hours']:.1f} h")
    costs = [f", {run[key]:.0f} USD {kind}" for key, kind in (("usd_spot", "on spot"), ("usd_on_demand", "on demand"))
             if run.get(key) is not None]
    where = f" in {zone or 'the dearest region (--zone)'}" if costs else ""
    return [*lines, f"estimate: {1000 * run['step_s']:.0f} ms a step of {plan['total_batch_size']:,} tokens "
            f"({span_ms(run['step_low_s'], run['step_high_s'], 0)}), {run['tokens_per_s']:,.0f} tokens/s, "
            f"MFU {run['mfu']:.1%}; update {run['update_share']:.1%} of a step",
            f"estimate: {run['hours']:.1f} h for {plan['num_iterations']:,} steps{''.join(costs)}{where}"]


def describe_measured(measured, run):
    """Returns a line about how checks have corrected the estimate of a run."""
    compiled, checks = measured["by_compiler"], measured["checks"]
    dates = sorted(date for date, _ in checks)
    whose = f"your check of {dates[0]}" if len(dates) == 1 else f"{len(dates)} checks until {dates[-1]}"
    means = {name: sum(factors.get(name, 1) for _, factors in checks) / len(checks) for name in checks[0][1]}
    return (f"by the compiler {1000 * compiled['step_s']:.0f} ms "
            f"({span_ms(compiled['step_low_s'], compiled['step_high_s'], 0)}); by {whose} "
            f"× {run['step_s'] / compiled['step_s']:.2f} "
            f"({', '.join(f'{name} × {factor:.2f}' for name, factor in means.items())})")
