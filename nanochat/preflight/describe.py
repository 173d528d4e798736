"""Says the report of a preflight to a person."""
import json
from pathlib import Path

from nanochat.device.tpu import GIB
from nanochat.preflight.report import MICRO_STEP, advice, kind_of

DOES_NOT_FIT = 3


def deliver(own, report, say):
    """Prints the report, and writes its JSON to --json of the PreflightFlags `own`. Returns the exit status."""
    say("\n".join(describe(report)))
    if own.json == "-":
        print(json.dumps(report, indent=1))
    elif own.json:
        Path(own.json).write_text(json.dumps(report, indent=1))
    return 0 if report["fits"] else DOES_NOT_FIT


def describe(report):
    """Returns the report as lines of text."""
    usable = report["usable_hbm_bytes"]
    lines = [f"memory of a chip ({gib(usable)} usable):"]
    for name, size in report["memory"].items():
        lines.append(f"  {gib(size):>10}  {name}")
    lines += describe_programs(report["programs"])
    for name, found in report["out_of_memory"].items():
        lines += describe_out_of_memory(name, found)
    prices = f"in {report['zone'] or 'the dearest region (--zone)'}"
    if report["usd_per_chip_hour"] is not None:
        prices = "at --usd_per_chip_hour"
    if "estimate" in report:
        lines += describe_run(report["estimate"], report["plan"], prices)
    if "measured" in report:
        lines.append(describe_measured(report["measured"], report["estimate"]))
    lines.append("")
    if report["fits"]:
        lines.append(f"fits: {gib(report['peak_bytes'])} of {gib(usable)} ({report['peak_bytes'] / usable:.0%})")
    else:
        memories = [found["memory"] for found in report["out_of_memory"].values()]
        what = "VMEM" if "vmem" in memories else gib(usable)
        lines.append(f"does not fit into {what}. Try {', or '.join(advice(report))}")
    return lines + describe_searches(report)


def gib(num_bytes):
    return f"{num_bytes / GIB:.2f} GiB"


def span_ms(low_s, high_s, digits=1):
    return f"{1000 * low_s:.{digits}f} to {1000 * high_s:.{digits}f}"


# Programs


def describe_programs(programs):
    """Returns lines about the programs that fit: what report_program returned of each."""
    if not programs:
        return []
    lines = ["", f"{'':>14}  {'peak':>10} {'temporary':>10} {'Mcycles':>8} {'HBM GB':>7} {'est. ms':>8} "
             f"{'low to high':>13} {'runs':>4} {'HLO':>6} {'compiled':>8} {'seconds':>7}"]
    for name, program in programs.items():
        lines.append(f"{name:>14}  {gib(program['peak_bytes']):>10} {gib(program['temp_bytes']):>10} "
                     f"{program['cycles'] / 1e6:8.1f} {program['hbm_bytes'] / 1e9:7.1f} "
                     f"{1000 * program['estimated_s']:8.1f} {span_ms(program['low_s'], program['high_s']):>13} "
                     f"{program['runs_per_step']:4} {program['traced_instructions']:6} "
                     f"{program['compiled_instructions']:8} {program['compile_s']:7.0f}")
    for name, program in programs.items():
        lines += [f"  {name}: {line}" for line in describe_waits(program)]
    for name, program in programs.items():
        if kind_of(name) == MICRO_STEP:
            lines += describe_top_operations(name, program)
    return lines


def describe_waits(program):
    """Returns lines about what a program may wait for, and about its Pallas kernels."""
    lines = [f"the error bar is {program['doubt']}"]
    for kind, (count, num_bytes, overlapped) in program["collectives"].items():
        lines.append(f"{count} {kind}, {num_bytes / 1e6:.1f} MB, {overlapped / 1e6:.1f} of them overlapped with "
                     "compute")
    for kind, total_s, waited_s in (("collectives", program["ici_s"], program["ici_waited_s"]),
                                    ("copies", program["copies_s"], program["copies_waited_s"])):
        if total_s:
            lines.append(f"{kind} est. {1000 * total_s:.1f} ms; the program waits for {1000 * waited_s:.1f} of them")
    if program["pallas_calls"]:
        lines.append(f"{program['pallas_calls']} Pallas kernels, {program['pallas_flops'] / 1e12:.2f} TFLOP, counted "
                     "in the cycles as scheduled")
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


def describe_out_of_memory(name, found):
    """Returns lines about a program that does not fit. found: of explain_out_of_memory."""
    needed = gib(found["needed_bytes"])
    if found["memory"] == "vmem":
        needed = f"{found['needed_bytes'] / 2**20:.2f} MiB of VMEM for one operation"
    lines = ["", f"{name} does not fit: it needs {needed}. Largest buffers:"]
    for buffer in found["largest"]:
        lines.append(f"  {gib(buffer['bytes']):>10}  {buffer['what'] or 'a temporary':<26} {buffer['shape']:<28} "
                     f"{buffer['source']}")
    return lines


# The run


def describe_run(run, plan, prices):
    """Returns lines about a report's estimate of a run. prices: which they are, "in us-west4-a"."""
    has_stages = len(run["stages"]) > 1
    lines = [""]
    if has_stages:
        for name, stage in run["stages"].items():
            lines.append(f"estimate: {1000 * stage['step_s']:.0f} ms a step in steps {stage['first']:,} to "
                         f"{stage['last']:,} ({name}), MFU {stage['mfu']:.1%}, {stage['hours']:.1f} h")
    lines += [f"estimate: {1000 * run['step_s']:.0f} ms a step of {plan['total_batch_size']:,} tokens "
              f"({span_ms(run['step_low_s'], run['step_high_s'], 0)}), {run['tokens_per_s']:,.0f} tokens/s, "
              f"MFU {run['mfu']:.1%}; update {run['shares']['update']:.1%} of a step",
              f"estimate: {run['hours']:.1f} h for {plan['num_iterations']:,} steps{describe_cost(run, prices)}"]
    if has_stages:
        lines.append(f"estimate: {1 - run['hours'] / run['hours_of_last']:.1%} less than with the last of these "
                     "programs throughout")
    return lines


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


def describe_cost(found, prices):
    """Returns ", 62 USD on spot …" for a JSON object with costs, "" if no price is known."""
    cost = ""
    for key, name in (("usd_spot", "on spot"), ("usd_on_demand", "on demand")):
        if found.get(key) is not None:
            cost += f", {found[key]:.0f} USD {name}"
    return cost and f"{cost} {prices}"


def describe_searches(report):
    """Returns lines about the results of fit.py's searches."""
    lines = []
    if "find_mesh" in report:
        found = report["find_mesh"]
        lines.append(f"smallest --mesh_fsdp that fits: {found['smallest']}; {len(found['peak_bytes'])} tried")
    if "find_batch" in report:
        found = report["find_batch"]
        largest = ", ".join(f"{setting} {each['largest']}" for setting, each in found["settings"].items())
        lines.append(f"largest --device_batch_size by --activation_checkpointing: {largest}; "
                     f"{found['compilations']} compilations")
    return lines
