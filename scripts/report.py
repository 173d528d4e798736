"""Draws the metrics of one or more runs: an HTML file without references, the same pictures as PNGs, a printed summary.

    python3 -m scripts.report RUN [RUN …]

RUN is the name of a run, its directory, or a copy of its metrics.jsonl. A panel is drawn if at least one run has its
metric. Broken lines mark interruptions. It needs matplotlib: pip install '.[report]'
"""
import base64
import html
import json
import textwrap
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nanochat.analysis.measured import markdown_block
from nanochat.common import BadInput, expand_path, flag, read_flags, require_writable_dir, run_script
from nanochat.device import tpu
from nanochat.record.history import SECONDS, read_run
from nanochat.record.metrics import format_count, format_duration
from scripts.tpu_advice import read_flags as read_run_flags

COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf")
KINDS = {"train": "#2ca02c", "compile": "#ff7f0e", "load": "#17becf", "save": "#9467bd", "evaluate": "#1f77b4",
         "sample": "#e377c2", "other": "#7f7f7f", "lost": "#d62728"}  # Goodput's names in stacking order
GIB = 2**30


@dataclass(frozen=True)
class Flags:
    runs: list = flag(None, "name of a run, its directory, or its metrics.jsonl", positional=True, nargs="+",
                      metavar="RUN")
    completion: Path | None = flag(None, "also draw completion.png: the loss with the text of FILE beside it",
                                   metavar="FILE", of=expand_path)
    preflight: Path | None = flag(None, "also print a block to paste into an issue: what the first run measured beside "
                                  "the estimate in FILE, which tpu_preflight --json wrote", metavar="FILE",
                                  of=expand_path)
    out_dir: Path | None = flag(None, "the report's folder; default: report/ in the first run's", of=expand_path)
    accelerator: str | None = flag(None, "also print what the runs cost on this TPU, such as v5litepod-8")
    zone: str | None = flag(None, "zone whose prices count, such as us-west4-a; default: the dearest")
    on_demand: bool = flag(False, "the prices of VMs that are not spot VMs")
    usd_per_chip_hour: float | None = flag(None, "price of a chip, instead of nanochat/device/prices.csv", of=float,
                                           at_least=0)

    def usd_per_hour(self):
        """Returns the price of the TPU in USD an hour, or None without --accelerator. Raises BadInput if it is not
        known."""
        if self.accelerator is None:
            return None
        usd = tpu.usd_per_hour(self.accelerator, not self.on_demand, self.usd_per_chip_hour, self.zone)
        if usd is None:
            raise BadInput(f"no price of --accelerator={self.accelerator} is known: give --usd_per_chip_hour")
        return usd


def main(argv=None):
    (flags,) = read_flags(argv, __doc__, {Flags: "flags"})
    if len(flags.runs) > len(COLOURS):
        raise BadInput(f"{len(flags.runs)} runs are too many for one picture: give at most {len(COLOURS)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise BadInput("there is no matplotlib: pip install '.[report]'") from None
    usd_per_hour = flags.usd_per_hour()
    estimate = read_preflight(flags.preflight) if flags.preflight else None
    runs = [read_run(name) for name in flags.runs]
    out_dir = require_writable_dir(flags.out_dir or runs[0].directory / "report")
    summary = summarise(runs, usd_per_hour)
    print(format_table(summary))
    pictures = draw(runs, out_dir)
    if flags.completion:
        pictures.append(draw_completion(runs, out_dir / "completion.png", read_text(flags.completion)))
    (out_dir / "report.html").write_text(make_page(runs, summary, pictures), encoding="utf-8")
    print(f"\n{out_dir / 'report.html'} and {len(pictures)} pictures: {', '.join(path.name for path in pictures)}")
    if estimate:
        print("\n" + markdown_block(runs[0], read_run_flags(runs[0]), estimate))


# -----------------------------------------------------------------------------
# The summary


def summarise(runs, usd_per_hour=None):
    """Returns the rows of the summary, (label, [a text for each run]), without those that are empty for all runs. The
    cost is that of `usd_per_hour`, the price of the TPU."""
    rows = [("run", [run.name for run in runs])] + [
        (label, [text(run) or "" for run in runs]) for label, text in (
            ("steps", lambda run: f"{run.records[-1]['step']:,}"),
            *((unit, lambda run, unit=unit: of(run.last(unit), lambda number: format_count(int(number))))
              for unit in ("tokens", "puzzles")),
            ("positions per row", lambda run: ", ".join(f"{length:,} at step {step:,}"
                                                        for step, length in run.lengths())),
            ("loss, last 20 steps", lambda run: of(run.series("loss")[1][-20:], lambda values: f"{values.mean():.4f}")),
            ("validation, bits per byte", last_validation),
            ("the best, at step", best_validation),
            ("held-out puzzles solved", lambda run: of(run.last("val_exact"), "{:.1%}".format)),
            *((f"{unit}/s, median", lambda run, unit=unit: of(run.median(f"{unit}_per_s"), "{:,.0f}".format))
              for unit in ("tokens", "puzzles")),
            ("MFU, median", lambda run: of(run.median("mfu"), "{:.1%}".format)),
            ("waiting for data", lambda run: of(run.median("data_wait"), "{:.1%}".format)),
            ("dispatching programs", lambda run: of(run.median("host_dispatch"), "{:.1%}".format)),
            ("peak device memory", peak_memory),
            ("wall time", lambda run: format_duration(wall_s(run))),
            ("cost of that time", lambda run: of(usd_per_hour, lambda usd: f"{usd * wall_s(run) / 3600:.2f} USD")),
            ("cost of 1B tokens, at this speed", lambda run: usd_per_hour is not None and of(
                run.median("tokens_per_s"), lambda speed: f"{usd_per_hour * 1e9 / speed / 3600:.2f} USD")),
            ("interruptions", lambda run: str(len(run.interruptions()))),
            ("goodput", lambda run: of(run.last("goodput"), "{:.1%}".format)),
            ("not training", time_not_training),
            ("steps skipped as not finite", lambda run: of(run.last("bad_steps"), "{:.0f}".format)))]
    return [(label, texts) for label, texts in rows if any(texts)]


def wall_s(run):
    """Returns the seconds from the run's first record to its newest, the time between two VMs among them."""
    return run.records[-1]["time"] - run.records[0]["time"]


def of(value, form):
    """Returns form(value), or None if the value is None or an empty array."""
    return None if value is None or np.size(value) == 0 else form(value)


def last_validation(run):
    found = [record["val_bpb"] for record in run.records if "val_bpb" in record]
    return ("not finite" if found[-1] is None else f"{found[-1]:.4f}") if found else None


def best_validation(run):
    steps, values = run.series("val_bpb")
    return f"{values.min():.4f}, {steps[values.argmin()]:,}" if len(values) else None


def peak_memory(run):
    peaks = run.series("device_memory_peak_bytes")[1]
    limit = run.last("device_memory_limit_bytes")
    return f"{peaks.max() / GIB:.1f} GiB" + (f" of {limit / GIB:.1f}" if limit else "") if len(peaks) else None


def time_not_training(run):
    seconds = run.seconds()
    total = max(sum(seconds.values()), 1e-9)
    kinds = sorted(seconds.keys() - {"train"}, key=seconds.get, reverse=True)
    return ", ".join(f"{kind} {seconds[kind] / total:.1%}" for kind in kinds if seconds[kind] >= 0.0005 * total)


def format_table(rows):
    """Returns the summary as text, with one column for each run."""
    widths = [max(len(row) for row in column)
              for column in zip(*([label, *texts] for label, texts in rows), strict=True)]
    return "\n".join("  ".join(text.ljust(width) for text, width in zip([label, *texts], widths, strict=True)).rstrip()
                     for label, texts in rows)


# -----------------------------------------------------------------------------
# The pictures


def draw(runs, out_dir):
    """Writes the pictures that some run has metrics for, as PNGs, and returns their paths."""
    pictures = [
        ("loss", "Loss and validation", [
            (lambda axes: draw_lines(axes, runs, "loss", "loss, nats a token", "work", smooth=True), "loss"),
            (lambda axes: draw_lines(axes, runs, "loss", "loss, nats a token", "time", smooth=True), "loss"),
            (lambda axes: draw_lines(axes, runs, "val_bpb", "validation, bits per byte", "work"), "val_bpb"),
            (lambda axes: draw_lines(axes, runs, "val_bpb", "validation, bits per byte", "time"), "val_bpb"),
            (lambda axes: draw_lines(axes, runs, "val_exact", "held-out puzzles solved, %", "time", scale=100),
             "val_exact")]),
        ("throughput", "Throughput", [
            (lambda axes: draw_lines(axes, runs, "tokens_per_s", "tokens a second", "time"), "tokens_per_s"),
            (lambda axes: draw_lines(axes, runs, "puzzles_per_s", "puzzles a second", "time"), "puzzles_per_s"),
            (lambda axes: draw_lines(axes, runs, "mfu", "model FLOPs utilisation, %", "time", scale=100), "mfu"),
            (lambda axes: draw_lines(axes, runs, "data_wait", "waiting for data, % of the time", "time", scale=100),
             "data_wait"),
            (lambda axes: draw_lines(axes, runs, "host_dispatch", "dispatching programs, % of the time", "time",
                                     scale=100), "host_dispatch")]),
        ("goodput", "Where the time went", [
            (lambda axes, run=run: draw_goodput(axes, runs, run), None) for run in runs if run.seconds()] or [
            (lambda axes: draw_lines(axes, runs, "goodput", "goodput, % of the time", "time", scale=100), "goodput")]),
        ("memory", "Device memory", [
            (lambda axes: draw_memory(axes, runs), "device_memory_bytes")]),
        ("optimizer", "Learning rates and gradients", [
            (lambda axes: draw_lines(axes, runs, "lr_multiplier", "learning rates, × their full height", "work"),
             "lr_multiplier"),
            (lambda axes: draw_lines(axes, runs, "seq_len", "positions per row", "work", is_count=True), "seq_len"),
            (lambda axes: draw_lines(axes, runs, "grad_norm", "norm of the gradient", "work", is_log=True),
             "grad_norm"),
            (lambda axes: draw_lines(axes, runs, "bad_steps", "steps skipped as not finite", "work", is_count=True),
             "bad_steps")])]
    paths = []
    for name, title, panels in pictures:
        panels = [panel for panel, field in panels if field is None or any(has_shown(run, field) for run in runs)]
        if panels:
            paths.append(save_figure(out_dir / f"{name}.png", title, panels))
    return paths


def has_shown(run, name):
    """Returns whether the run has the metric `name`, and for a count whether anything was counted."""
    values = run.series(name)[1]
    return bool(values.any() if name == "bad_steps" else len(values))


def draw_completion(runs, path, text):
    """Writes a picture of the loss over tokens with `text` beside it, and returns its path."""
    return save_figure(path, "Loss, and a completion", [
        lambda axes: draw_lines(axes, runs, "loss", "loss, nats per token", "work", smooth=True),
        lambda axes: draw_text(axes, text)])


def draw_text(axes, text):
    """Shows `text` as it is, in a fixed-width font, instead of a plot; long lines continue on the next line."""
    lines = [part for line in text.expandtabs(4).splitlines() for part in textwrap.wrap(
        line, 62, drop_whitespace=False, replace_whitespace=False) or [""]]
    axes.axis("off")
    shown = axes.text(0.02, 0.97, "\n".join(lines), family="monospace", fontsize=10, va="top", parse_math=False,
                      transform=axes.transAxes)
    shown.set_in_layout(False)  # a long text is cut at the bottom, and does not squeeze the plot beside it


def read_text(path):
    """The text of the file at `path`. Raises BadInput if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"--completion={path} cannot be read: {error}") from None


def read_preflight(path):
    """Returns the report that tpu_preflight wrote to `path`, a JSON object. Raises BadInput if it is none."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"--preflight={path} cannot be read: {error}") from None
    names = {"accelerator", "chips", "plan", "flags", "kernel", "fits"}
    if not isinstance(report, dict) or not names <= report.keys() or not isinstance(report["flags"], dict):
        raise BadInput(f"--preflight={path} is not a report of tpu_preflight --json")
    return report


def save_figure(path, title, panels):
    from matplotlib.figure import Figure
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(6.5 * columns, 3.8 * rows + 0.5), dpi=110, layout="constrained")
    figure.suptitle(title, fontweight="bold")
    grid = list(figure.subplots(rows, columns, squeeze=False).flat)
    for panel, axes in zip(panels, grid, strict=False):
        panel(axes)
        axes.grid(alpha=0.3)
    for axes in grid[len(panels):]:
        axes.remove()
    figure.savefig(path)
    return path


def draw_lines(axes, runs, name, label, over, scale=1, smooth=False, is_log=False,
               is_count=False):
    """Draws the metric `name` of each run over "work", in the unit of the first run's task, or over "time".

    label: of the vertical axis, in whose unit the values are after multiplication by `scale`.
    smooth: draws a running mean as well. is_count: the values are whole numbers.
    """
    unit_s = time_unit(axes, runs) if over == "time" else 1
    for run, colour in zip(runs, COLOURS, strict=False):
        steps, values = run.series(name)
        if not len(steps):
            continue
        x = run.work(steps)
        if over == "time":  # a gap where the run was interrupted
            breaks = np.searchsorted(steps, [record["step"] for record in run.interruptions()])
            x, values = np.insert(run.elapsed_s(steps) / unit_s, breaks, np.nan), np.insert(values, breaks, np.nan)
        marker = "o" if name == "val_bpb" or len(steps) == 1 else None
        axes.plot(x, values * scale, color=colour, marker=marker, markersize=3, linewidth=1.2,
                  alpha=0.3 if smooth else 1, label=None if smooth else run.name)
        if smooth:
            axes.plot(x, running_mean(values) * scale, color=colour, linewidth=1.6, label=run.name)
        mark_interruptions(axes, run, colour, over, unit_s)
    axes.set_ylabel(label)
    if over == "work":
        axes.set_xlabel(runs[0].unit)
        axes.xaxis.set_major_formatter(lambda value, _: format_count(int(value)))
    if is_log:
        axes.set_yscale("log")
    elif scale == 100 or is_count or name == "lr_multiplier":
        bottom, top = axes.get_ylim()
        lowest = axes.dataLim.ymin
        axes.set_ylim(bottom=bottom if lowest < 0 else -0.02 * top)  # zero is on it, and what should not be below, too
    if is_count:
        axes.yaxis.get_major_locator().set_params(integer=True)
    draw_legend(axes)


def draw_legend(axes):
    """Draws the legend above the axes, where it hides nothing."""
    axes.legend(fontsize="small", loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0.2, ncols=2, frameon=False)


def running_mean(values, decay=0.9):
    """Returns the exponential running mean of `values`, bias-corrected as in Adam (arXiv 1412.6980)."""
    means, mean, weight = [], 0.0, 0.0
    for value in values:
        if not np.isnan(value):
            mean, weight = decay * mean + (1 - decay) * value, decay * weight + 1 - decay
        means.append(value if np.isnan(value) else mean / weight)
    return np.array(means)


def time_unit(axes, runs):
    """Labels the time axis and returns its unit in seconds."""
    longest_s = max(run.records[-1]["time"] - run.records[0]["time"] for run in runs)
    unit, unit_s = next((unit for unit in (("days", 86400), ("hours", 3600), ("minutes", 60))
                         if longest_s > 3 * unit[1]), ("seconds", 1))
    axes.set_xlabel(f"time since the first record, {unit}")
    return unit_s


def mark_interruptions(axes, run, colour, over, unit_s):
    """Draws a broken line where the run was resumed; over time, also a shade over the pause before it."""
    for i, record in enumerate(run.interruptions()):
        if over == "work":
            x = run.work(record["step"])
        else:
            before = run.records[run.records.index(record) - 1]
            begin, x = ((time - run.records[0]["time"]) / unit_s for time in (before["time"], record["time"]))
            axes.axvspan(begin, x, color=colour, alpha=0.1, linewidth=0)
        axes.axvline(x, color=colour, linestyle="--", linewidth=1, alpha=0.8,
                     label=f"{run.name}: resumed after an interruption" if i == 0 else None)


def draw_goodput(axes, runs, run):
    """Draws the fractions of Goodput's kinds in the wall time so far, stacked."""
    unit_s = time_unit(axes, [run])
    records = [record for record in run.records if SECONDS + "train" in record]
    kinds = [kind for kind in (*KINDS, *sorted(run.seconds().keys() - KINDS)) if kind in run.seconds()]
    seconds = np.array([[record.get(SECONDS + kind, 0.0) for record in records] for kind in kinds])
    percentages = 100 * seconds / np.maximum(seconds.sum(axis=0), 1e-9)
    axes.stackplot([(record["time"] - run.records[0]["time"]) / unit_s for record in records], percentages, alpha=0.8,
                   labels=[f"{kind} {percent:.1f}%" for kind, percent in zip(kinds, percentages[:, -1], strict=True)],
                   colors=[KINDS.get(kind, "#bcbd22") for kind in kinds])
    mark_interruptions(axes, run, "black", "time", unit_s)
    axes.set(ylabel="fraction of the time so far, %", ylim=(0, 100), title=run.name if len(runs) > 1 else "")
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))


def draw_memory(axes, runs):
    unit_s = time_unit(axes, runs)
    for run, colour in zip(runs, COLOURS, strict=False):
        for name, style, label in (("device_memory_bytes", "-", "in use"), ("device_memory_peak_bytes", ":", "peak"),
                                  ("device_memory_limit_bytes", "-.", "limit")):
            steps, values = run.series(name)
            if len(values):
                axes.plot(run.elapsed_s(steps) / unit_s, values / GIB, style, color=colour,
                          label=f"{run.name}: {label}")
        mark_interruptions(axes, run, colour, "time", unit_s)
    axes.set(ylabel="memory of one device, GiB", ylim=(0, None))
    draw_legend(axes)


# -----------------------------------------------------------------------------
# The page


def make_page(runs, summary, pictures):
    """Returns the report as one HTML document that contains the pictures."""
    title = html.escape(" and ".join(run.name for run in runs))
    (_, names), *rows = summary
    table = "".join("<tr>" + "".join(f"<td>{html.escape(text)}</td>" for text in (label, *texts)) + "</tr>\n"
                    for label, texts in rows)
    head = "".join(f"<th>{html.escape(name)}</th>" for name in ("", *names))
    images = "".join(f'<p><img alt="{path.stem}" src="data:image/png;base64,{encode(path)}"></p>\n'
                     for path in pictures)
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>body {{ font: 15px sans-serif; margin: 2em auto; max-width: 1450px }} img {{ max-width: 100% }}
td, th {{ text-align: left; padding: 0.2em 1.5em 0.2em 0 }} td:first-child {{ color: #555 }}</style></head>
<body><h1>{title}</h1>
<table><tr>{head}</tr>
{table}</table>
{images}</body></html>
"""


def encode(path):
    """Returns the file in base64."""
    return base64.b64encode(Path(path).read_bytes()).decode()


if __name__ == "__main__":
    run_script(main)
