"""Prints the rows of dev/DECISIONS.md's first table that the preflight estimates, from two reports of its --json:

    python3 -m dev.figures v5e.json v6e.json

dev/DECISIONS.md has the two commands that write the reports.
"""
import json
import sys
from pathlib import Path

from nanochat.device.tpu import GIB


def figures(report):
    """Returns {name of the row: figure} of a report."""
    programs, run = report["programs"], report["estimate"]
    micro_step = programs["micro_step"]
    instructions = [f"{programs[name]['traced_instructions']:,}" for name in ("micro_step", "update", "evaluate")]
    low, high = 1000 * run["step_low_s"], 1000 * run["step_high_s"]
    return {
        f"step of {report['plan']['total_batch_size']:,} tokens (its error bar)":
            f"{1000 * run['step_s']:.0f} ms ({low:.0f} to {high:.0f})",
        "tokens/s; MFU": f"{run['tokens_per_s']:,.0f}; {run['mfu']:.1%}",
        "Mcycles of a micro-step, by the machine's own schedule": f"{micro_step['cycles'] / 1e6:.1f}",
        "GB of HBM traffic of a micro-step": f"{micro_step['hbm_bytes'] / 1e9:.1f}",
        "peak HBM, GiB": f"{report['peak_bytes'] / GIB:.2f}",
        "traced instructions: micro-step, update, evaluation": ", ".join(instructions),
        "update, fraction of a step": f"{run['update_share']:.1%}",
    }


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    columns = [figures(json.loads(Path(path).read_text())) for path in sys.argv[1:]]
    for name in columns[0]:
        print(f"| {name} | {' | '.join(column[name] for column in columns)} |")


if __name__ == "__main__":
    main()
