"""Says what came of one or more runs, and what would make them faster: a printed table and recommendations, and a
picture of their curves, curves.png.

    python3 -m scripts.report RUN [RUN …]

RUN is the name of a run, its directory, or a copy of its metrics.jsonl. Broken lines mark interruptions. It needs
matplotlib: pip install '.[report]'

After `make demo`, these commands make README.md's picture, report/completion.png:

    python3 -m scripts.generate --checkpoint=demo --device_type=xla --prompt=$'#include <vector>\\n\\nnamespace' \\
        --echo --max_tokens=100 --temperature=0.6 --seed=1 > completion.txt
    python3 -m scripts.report demo --completion=completion.txt --out_dir=report
"""
import importlib.util
import json
import platform
import re
import textwrap
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path

import numpy as np

from nanochat.checkpoint.on_disk import list_checkpoints
from nanochat.common import BadInput, expand_path, flag, read_flags, read_named, require_writable_dir, run_script
from nanochat.device.tpu import GIB
from nanochat.record.history import read_run
from nanochat.record.metrics import format_count, format_duration

MOST_RUNS = 10  # matplotlib has ten colours
SMOOTH = 10  # steps in the running mean of the loss


@dataclass(frozen=True)
class Flags:
    runs: list = flag(None, "name of a run, its directory, or its metrics.jsonl", positional=True, nargs="+",
                      metavar="RUN")
    completion: Path | None = flag(None, "also draw completion.png: the loss beside the text of FILE", metavar="FILE",
                                   of=expand_path)
    preflight: Path | None = flag(None, "also print the measurements beside FILE of tpu_preflight --json",
                                  metavar="FILE", of=expand_path)
    out_dir: Path | None = flag(None, "the report's folder; default: report/ in the first run's", of=expand_path)


def main(argv=None):
    (flags,) = read_flags(argv, __doc__, {Flags: "flags"})
    if len(flags.runs) > MOST_RUNS:
        raise BadInput(f"{len(flags.runs)} runs are too many for one picture: give at most {MOST_RUNS}")
    if not importlib.util.find_spec("matplotlib"):
        raise BadInput("matplotlib is not installed: pip install '.[report]'")
    estimate = read_preflight(flags.preflight) if flags.preflight else None
    completion = flags.completion and read_named("completion", flags.completion).decode(errors="replace")
    runs = [read_run(name) for name in flags.runs]
    out_dir = require_writable_dir(flags.out_dir or runs[0].directory / "report")
    texts = [format_table(summarise(runs))]
    for run in runs:
        texts.append("\n".join([f"Recommendations for {run.name}:", *recommend(run, flags_of(run))]))
    if estimate:
        texts.append(markdown_block(runs[0], estimate))
    print("\n\n".join(texts))
    shown = [panel for panel in PANELS if any(len(run.series(panel[0])[0]) for run in runs)]
    pictures = [save_figure(out_dir / "curves.png", [partial(draw_metric, runs, *panel) for panel in shown])]
    if completion is not None:
        pictures.append(save_figure(out_dir / "completion.png", [partial(draw_metric, runs, *PANELS[0]),
                                                                 partial(draw_text, completion)]))
    print("", *pictures, sep="\n")


# The summary


def summarise(runs):
    """Returns the rows of the summary, (label, [a text for each run]), without those that are empty for all runs."""
    columns = [summary_of(run) for run in runs]
    rows = [(label, [column[label] for column in columns]) for label in columns[0]]
    return [(label, texts) for label, texts in rows if any(texts)]


def summary_of(run):
    """Returns {label: text} of one run, "" for what is unknown. All runs have the same labels."""
    losses = run.series("loss")[1][-20:]
    sets = sorted({name for record in run.records for name in record if name.startswith("val_bpb_")})
    return {
        "run": run.name,
        "steps": f"{run.records[-1]['step']:,}",
        "tokens": text(run.last("tokens"), "{:,.0f}"),
        "puzzles": text(run.last("puzzles"), "{:,.0f}"),
        "positions per row": ", ".join(f"{length:,} at step {step:,}" for step, length in run.lengths()),
        "loss, last 20 steps": f"{losses.mean():.4f}" if len(losses) else "",
        "validation, bits per byte": validation_at(run, lambda values: -1),
        "the best": validation_at(run, np.argmin),
        "validation sets": ", ".join(f"{name.removeprefix('val_bpb_')} {run.last(name):.4f}" for name in sets
                                     if run.last(name) is not None),
        "held-out puzzles solved": text(run.last("val_exact"), "{:.1%}"),
        "tokens/s, median": text(run.median("tokens_per_s"), "{:,.0f}"),
        "puzzles/s, median": text(run.median("puzzles_per_s"), "{:,.0f}"),
        "MFU, median": text(run.median("mfu"), "{:.1%}"),
        "waiting for data": text(run.median("data_wait"), "{:.1%}"),
        "dispatching programs": text(run.median("host_dispatch"), "{:.1%}"),
        "peak device memory, GiB": text(scaled(peak_bytes(run), 1 / GIB), "{:.1f}"),
        "wall time": format_duration(run.wall_s()),
        "interruptions": str(len(run.interruptions())),
        "goodput": text(run.last("goodput"), "{:.1%}"),
        "not training": ", ".join(f"{kind} {part:.1%}" for kind, part in parts_of(run).items()
                                  if kind != "train" and part >= 0.0005),
        "steps skipped as not finite": text(run.last("bad_steps"), "{:.0f}"),
    }


def text(value, form, unknown=""):
    """Returns the value in this form, or `unknown` for None."""
    return unknown if value is None else form.format(value)


def scaled(value, factor):
    return None if value is None else value * factor


def validation_at(run, choose):
    """Returns the bits per byte that choose(values), an index, chooses, with their step."""
    steps, values = run.series("val_bpb")
    if not len(values):
        return ""
    chosen = choose(values)
    return f"{values[chosen]:.4f} at step {steps[chosen]:,}"


def peak_bytes(run):
    """Returns the largest peak of a device's memory in bytes, or None if it was not measured."""
    peaks = run.series("device_memory_peak_bytes")[1]
    return float(peaks.max()) if len(peaks) else None


def parts_of(run):
    """Returns {kind of work, as in goodput.py: its part of the wall time}, the largest first."""
    seconds = run.seconds()
    total = max(sum(seconds.values()), 1e-9)
    return {kind: seconds[kind] / total for kind in sorted(seconds, key=seconds.get, reverse=True)}


def format_table(rows):
    """Returns rows, (label, [texts]), as text in columns."""
    table = [[label, *texts] for label, texts in rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join("  ".join(map(str.ljust, cells, widths)).rstrip() for cells in table)


# Recommendations

WORTH_SAYING = 0.05  # of the time
HOST_BOUND = 0.80  # below it, the host's work overlaps with the device's
MEMORY_FREE = 0.48  # twice the batch takes less than twice the memory, because weights do not grow with it
REMEDIES = {
    "evaluate": "a larger --eval_every, or fewer --eval_tokens",
    "sample": "a larger --sample_every",
    "save": "a larger --save_every",
    "lost": "a smaller --save_every, or a VM that is replaced sooner (deploy/watch.sh with more zones)",
    "waiting for data": "the shards on the machine's own disk, and no other work on its cores",
    "dispatching programs": "a larger --device_batch_size, if a step has several micro-steps, and --log_every=10",
}


def recommend(run, flags):
    """Returns lines: what takes much of the run's time, the largest first, and which flags change that. flags: {name:
    value} of the run, {} if they are unknown."""
    parts = {kind: part for kind, part in parts_of(run).items() if kind in REMEDIES}
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
            found.append(f"{kind} takes {parts[kind]:.0%} of the time: {with_values(REMEDIES[kind], flags)}")
    compiled = sorted({cause for record in run.records for cause in record.get("recompiled", ())})
    if compiled:
        found.append(f"Programs were compiled again; keep constant: {'; '.join(compiled[:3])}")
    peak, limit = peak_bytes(run), run.last("device_memory_limit_bytes")
    if peak and limit and peak < MEMORY_FREE * limit:
        found.append(f"Device memory peaks at {peak / limit:.0%} of {limit / GIB:.1f} GiB: " + with_values(
            "twice the --device_batch_size fits, if a step has several micro-steps", flags))
    return found or ["none: the measurements show nothing wrong"]


def with_values(remedy, flags):
    """Returns the remedy with the run's values of the flags that it names."""
    values = [f"--{name}={flags[name]}" for name in re.findall(r"--(\w+)", remedy) if name in flags]
    return f"{remedy} (now {' '.join(values)})" if values else remedy


def flags_of(run):
    """Returns the flags {name: value} of the run's newest checkpoint whose meta.json can be read, {} without one."""
    from nanochat.checkpoint.meta import load_meta
    for path in reversed(list_checkpoints(run.directory)):
        try:
            return load_meta(path).flags
        except BadInput:
            continue
    return {}


# The pictures

PANELS = (  # metric, label of its axis, what its values are multiplied by
    ("loss", "loss, nats a token", 1),
    ("val_bpb", "validation, bits per byte", 1),
    ("val_exact", "held-out puzzles solved, %", 100),
    ("tokens_per_s", "tokens a second", 1),
    ("puzzles_per_s", "puzzles a second", 1),
    ("mfu", "model FLOPs utilisation, %", 100),
    ("data_wait", "waiting for data, % of the time", 100),
    ("host_dispatch", "dispatching programs, % of the time", 100),
    ("lr_multiplier", "learning rates, × their full height", 1),
    ("seq_len", "positions per row", 1),
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
    grid = list(figure.subplots(rows, 2, squeeze=False).flat)
    for panel, axes in zip(panels, grid, strict=False):
        panel(axes)
    for axes in grid[len(panels):]:
        axes.remove()
    figure.savefig(path, format="png")
    return path


# The comparison with the preflight, as Markdown to paste into an issue

PACKAGES = ("torch", "torch_xla", "libtpu", "jax")  # which decide the speed


def read_preflight(path):
    """Returns the report that tpu_preflight wrote to `path`, a JSON object. Raises BadInput."""
    try:
        report = json.loads(read_named("preflight", path))
    except ValueError:
        report = None
    names = {"accelerator", "chips", "plan", "kernel", "fits"}
    if not isinstance(report, dict) or not names <= report.keys():
        raise BadInput(f"--preflight={path} is not a report of tpu_preflight --json")
    return report


def markdown_block(run, report):
    """Returns the block as text. run: a History; report: as read_preflight returns it."""
    estimate = report.get("estimate", {})
    if lengths := run.lengths():
        # If rows become longer, the run's medians are of its newest length, so the estimate is that stage's.
        estimate = estimate.get("stages", {}).get(f"micro_step {lengths[-1][1]}", {})
    step_ms = scaled(estimate.get("step_s"), 1000)
    lines = [f"**{report['accelerator']}: run {run.name}, measured beside the preflight's estimate**", "",
             "| | measured | estimated | measured ÷ estimated |", "|---|---|---|---|",
             row("step, ms", "{:,.0f}", run.median("step_ms"), step_ms, error_bar(estimate)),
             row("tokens/s", "{:,.0f}", run.median("tokens_per_s"), estimate.get("tokens_per_s")),
             row("MFU, %", "{:.1f}", scaled(run.median("mfu"), 100), scaled(estimate.get("mfu"), 100)),
             row("peak HBM of a chip, GiB", "{:.2f}", scaled(peak_bytes(run), 1 / GIB),
                 scaled(report.get("peak_bytes"), 1 / GIB))]
    plan = report["plan"]
    versions = [f"{name} {metadata.version(name)}" for name in PACKAGES if importlib.util.find_spec(name)]
    lines += ["", f"{report['chips']} chips, steps of {plan['total_batch_size']:,} tokens, {plan['parameters']:,} "
              f"parameters, kernel {report['kernel']}; Python {platform.python_version()}, {', '.join(versions)}."]
    return "\n".join(lines)


def row(name, form, measured, estimated, spread=""):
    ratio = None
    if measured is not None and estimated:
        ratio = measured / estimated
    return f"| {name} | {known(measured, form)} | {known(estimated, form)}{spread} | {known(ratio, '{:.3f}')} |"


def known(value, form):
    return text(value, form, unknown="–")


def error_bar(estimate):
    """Returns that of the estimated step in milliseconds, " (677 to 912)", or "" without an estimate."""
    if "step_low_s" not in estimate:
        return ""
    return f" ({1000 * estimate['step_low_s']:,.0f} to {1000 * estimate['step_high_s']:,.0f})"


if __name__ == "__main__":
    run_script(main)
