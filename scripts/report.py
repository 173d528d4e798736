"""Says what came of one or more runs, and what would make them faster: a printed table and recommendations, and a
picture of their curves, curves.png.

    python3 -m scripts.report RUN [RUN …]

RUN is the name of a run, its directory, or a copy of its metrics.jsonl. Broken lines mark interruptions. It needs
matplotlib: pip install '.[report]'

After `make demo`, these commands make README.md's picture, report/completion.png:

    RUN=~/.cache/nanochat/demo/checkpoints/dummy
    python3 -m scripts.generate --checkpoint=$RUN --device_type=xla --prompt=$'#include <vector>\\n\\nnamespace' \\
        --echo --max_tokens=100 --temperature=0.6 --seed=1 > completion.txt
    python3 -m scripts.report $RUN --completion=completion.txt --out_dir=report
"""
import importlib.util
import textwrap
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from nanochat.common import BadInput, expand_path, flag, read_flags, read_named, require_writable_dir, run_script
from nanochat.device.tpu import GIB
from nanochat.record.history import read_run
from nanochat.record.metrics import format_count, format_duration

SMOOTH = 10  # steps in the running mean of the loss


@dataclass(frozen=True)
class Flags:
    runs: list = flag(None, "name of a run, its directory, or its metrics.jsonl", positional=True, nargs="+",
                      metavar="RUN")
    completion: Path | None = flag(None, "also draw completion.png: the loss beside the text of FILE", metavar="FILE",
                                   of=expand_path)
    out_dir: Path | None = flag(None, "the report's folder; default: report/ in the first run's", of=expand_path)


def main(argv=None):
    (flags,) = read_flags(argv, __doc__, {Flags: "flags"}, gone={"preflight": "run python3 -m scripts.tpu_check"})
    if not importlib.util.find_spec("matplotlib"):
        raise BadInput("matplotlib is not installed: pip install '.[report]'")
    completion = flags.completion and read_named("completion", flags.completion).decode(errors="replace")
    runs = [read_run(name) for name in flags.runs]
    out_dir = require_writable_dir(flags.out_dir or runs[0].directory / "report")
    print(summarise(runs))
    for run in runs:
        print("", f"Recommendations for {run.name}:", *recommend(run), sep="\n")
    shown = [panel for panel in PANELS if any(len(run.series(panel[0])[0]) for run in runs)]
    pictures = [save_figure(out_dir / "curves.png", [partial(draw_metric, runs, *panel) for panel in shown])]
    if completion is not None:
        pictures.append(save_figure(out_dir / "completion.png", [partial(draw_metric, runs, *PANELS[0]),
                                                                 partial(draw_text, completion)]))
    print("", *pictures, sep="\n")


# The summary


def summarise(runs):
    """Returns the table as text: a line for each figure that a run has, and a column for each run."""
    columns = [figures(run) for run in runs]
    rows = [[label, *(column[label] for column in columns)] for label in columns[0]]
    rows = [row for row in rows if any(row[1:])]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def figures(run):
    """Returns {label: text} of one run, "" for what is unknown. All runs have the same labels."""
    losses = run.series("loss")[1][-20:]
    return {
        "run": run.name,
        "steps": f"{run.records[-1]['step']:,}",
        "seen": text(run.last(run.unit), f"{{:,.0f}} {run.unit}"),
        "loss, last 20 steps": f"{losses.mean():.4f}" if len(losses) else "",
        "validation, bits per byte": validation_at(run, lambda values: -1),
        "the best": validation_at(run, np.argmin),
        "held-out puzzles solved": text(run.last("val_exact"), "{:.1%}"),
        "speed, median": text(run.median(f"{run.unit}_per_s"), f"{{:,.0f}} {run.unit}/s"),
        "MFU, median": text(run.median("mfu"), "{:.1%}"),
        "peak device memory": text(peak_bytes(run), "{:.1f} GiB", 1 / GIB),
        "wall time": format_duration(run.wall_s()),
        "interruptions": str(len(run.interruptions())),
        "goodput": text(run.last("goodput"), "{:.1%}"),
        "steps skipped as not finite": text(run.last("bad_steps"), "{:.0f}"),
    }


def text(value, form, scale=1):
    """Returns the value × scale in this form, or "" for None."""
    return "" if value is None else form.format(scale * value)


def validation_at(run, choose):
    """Returns the bits per byte that choose(values), an index, chooses, with their step."""
    steps, values = run.series("val_bpb")
    if not len(values):
        return ""
    chosen = choose(values)
    return f"{values[chosen]:.4f} at step {steps[chosen]:,}"


def peak_bytes(run):
    """Returns the largest peak of a device's memory in bytes, or None if it was not measured."""
    return max(run.series("device_memory_peak_bytes")[1], default=None)


# Recommendations

WORTH_SAYING = 0.05  # of the time
HOST_BOUND = 0.80  # below it, the host's work overlaps with the device's
MEMORY_FREE = 0.48  # twice the batch takes less than twice the memory, because weights do not grow with it
REMEDIES = {
    "evaluate": "a larger --eval_every, or fewer --eval_tokens (puzzle_train: --eval_puzzles)",
    "sample": "a larger --sample_every",
    "save": "a larger --save_every",
    "lost": "a smaller --save_every, or a VM that is replaced sooner (deploy/watch.sh with more zones)",
    "waiting for data": "the shards on the machine's own disk, and no other work on its cores",
    "dispatching programs": "a larger --device_batch_size, if a step has several micro-steps, and --log_every=10",
}


def recommend(run):
    """Returns lines: what takes much of the run's time, the largest first, and which flags change that."""
    seconds = run.seconds()  # {kind of work, as in goodput.py: seconds of the wall time}
    total = max(sum(seconds.values()), 1e-9)
    parts = {kind: seconds[kind] / total for kind in seconds if kind in REMEDIES}
    if not run.last("interruptions"):
        parts.pop("lost", None)  # pauses, not interruptions
    # The best interval between checkpoints loses as much time to saving as to work done again (Young 1974). So only the
    # larger of both says how to change it.
    if "save" in parts and "lost" in parts:
        del parts[min("save", "lost", key=parts.get)]
    parts["waiting for data"] = run.median("data_wait") or 0
    dispatching = run.median("host_dispatch") or 0
    if dispatching > HOST_BOUND:
        parts["dispatching programs"] = dispatching
    found = []
    for kind in sorted(parts, key=parts.get, reverse=True):
        if parts[kind] > WORTH_SAYING:
            found.append(f"{kind} takes {parts[kind]:.0%} of the time: {REMEDIES[kind]}")
    compiled = sorted({cause for record in run.records for cause in record.get("recompiled", ())})
    if compiled:
        found.append(f"Programs were compiled again: {', '.join(compiled[:3])}")
    peak, limit = peak_bytes(run), run.last("device_memory_limit_bytes")
    if peak and limit and peak < MEMORY_FREE * limit:
        found.append(f"Device memory peaks at {peak / limit:.0%} of {limit / GIB:.1f} GiB: twice the "
                     "--device_batch_size fits, if a step has several micro-steps")
    return found or ["none: the measurements show nothing wrong"]


# The pictures

PANELS = (  # metric, label of its axis, what its values are multiplied by
    ("loss", "loss, nats a token", 1),
    ("val_bpb", "validation, bits per byte", 1),
    ("val_exact", "held-out puzzles solved, %", 100),
    ("tokens_per_s", "tokens a second", 1),
    ("mfu", "model FLOPs utilisation, %", 100),
    ("grad_norm", "norm of the gradient", 1),
)


def draw_metric(runs, name, label, scale, axes):
    """Draws a metric of each run over tokens, or over the unit of the first run's task."""
    for index, run in enumerate(runs):
        steps, values = run.series(name)
        style = {"color": f"C{index}", "linewidth": 1.4, "label": run.name}
        if name == "loss" and len(values) > 2 * SMOOTH:
            axes.plot(run.work(steps), values, color=f"C{index}", linewidth=1, alpha=0.3)
            steps = steps[SMOOTH - 1:]
            values = np.convolve(values, np.full(SMOOTH, 1 / SMOOTH), "valid")
            style["label"] += f", mean of {SMOOTH} steps"
        elif name == "val_bpb" or len(values) == 1:
            style["marker"] = "o"
        axes.plot(run.work(steps), scale * values, **style)
        for record in run.interruptions():
            axes.axvline(run.work(record["step"]), color=f"C{index}", linestyle="--", linewidth=1)
    axes.set(xlabel=runs[0].unit, ylabel=label)
    axes.xaxis.set_major_formatter(lambda value, _: format_count(int(value)))
    axes.grid(alpha=0.3)
    # Above the axes, so that it covers nothing.
    axes.legend(fontsize="small", loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False)


def draw_text(text, axes):
    """Shows `text` as it is, in a fixed-width font, instead of a plot; long lines continue on the next line."""
    lines = []
    for line in text.expandtabs(4).splitlines():
        lines += textwrap.wrap(line, 62, drop_whitespace=False, replace_whitespace=False) or [""]
    axes.axis("off")
    shown = axes.text(0.02, 0.97, "\n".join(lines), family="monospace", fontsize=10, va="top", parse_math=False,
                      transform=axes.transAxes)
    shown.set_in_layout(False)  # a long text is cut at the bottom instead of squeezing the plot beside it


def save_figure(path, panels):
    """Writes a picture of panels, functions that draw on axes, and returns its path."""
    # A Figure without pyplot needs no display, and is freed with its last reference.
    from matplotlib.figure import Figure
    rows = max(1, -(-len(panels) // 2))
    figure = Figure(figsize=(13, 3.8 * rows + 0.5), dpi=110, layout="constrained")
    for number, panel in enumerate(panels, 1):
        panel(figure.add_subplot(rows, 2, number))
    figure.savefig(path, format="png")
    return path


if __name__ == "__main__":
    run_script(main)
