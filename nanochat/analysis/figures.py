"""Draws runs with matplotlib: curves over work or time, where the time went, the memory."""
import textwrap
from dataclasses import dataclass
from functools import partial

import numpy as np

from nanochat.common import BadInput
from nanochat.device.tpu import GIB
from nanochat.record.history import SECONDS
from nanochat.record.metrics import format_count

COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22")
KINDS = {"train": "#2ca02c", "compile": "#ff7f0e", "load": "#17becf", "save": "#9467bd", "evaluate": "#1f77b4",
         "sample": "#e377c2", "other": "#7f7f7f", "lost": "#d62728"}  # Goodput's names in stacking order
TIME_UNITS = (("minutes", 60), ("hours", 3600), ("days", 86400))


def require_packages(*names):
    """Raises BadInput if one of the packages of '.[report]' is missing."""
    try:
        for name in names:
            __import__(name)
    except ImportError as error:
        raise BadInput(f"{error.name} is not installed: pip install '.[report]'") from None


@dataclass(frozen=True)
class Lines:
    """A metric of each run, drawn over "work", in the unit of the first run's task, or over "time"."""
    name: str
    label: str  # of the vertical axis, in whose unit the values are after multiplication by `scale`
    over: str = "work"
    scale: float = 1
    smooth: bool = False  # draws a running mean as well
    is_log: bool = False
    is_count: bool = False  # the values are whole numbers

    def is_shown(self, runs):
        """Returns whether one of the runs has the metric, or, for a count, has counted anything."""
        for run in runs:
            values = run.series(self.name)[1]
            if values.any() or len(values) and not self.is_count:
                return True
        return False

    def draw(self, runs, axes):
        unit_s = label_time(axes, runs) if self.over == "time" else 1
        for run, colour in zip(runs, COLOURS, strict=False):
            if len(run.series(self.name)[0]):
                self._draw_run(run, colour, axes, unit_s)
                mark_interruptions(axes, run, colour, self.over, unit_s)
        axes.set_ylabel(self.label)
        if self.over == "work":
            axes.set_xlabel(runs[0].unit)
            axes.xaxis.set_major_formatter(format_tick)
        self._scale_axis(axes)
        draw_legend(axes)

    def _draw_run(self, run, colour, axes, unit_s):
        steps, values = run.series(self.name)
        means = running_mean(values)
        x = run.work(steps)
        if self.over == "time":
            # The line has a gap at each interruption: matplotlib draws none to or from a point that is not a number.
            breaks = np.searchsorted(steps, [record["step"] for record in run.interruptions()])
            x = np.insert(run.elapsed_s(steps) / unit_s, breaks, np.nan)
            values = np.insert(values, breaks, np.nan)
            means = np.insert(means, breaks, np.nan)
        style = {"color": colour}
        if self.name == "val_bpb" or len(steps) == 1:
            style |= {"marker": "o", "markersize": 3}
        if self.smooth:
            axes.plot(x, values * self.scale, linewidth=1.2, alpha=0.3, **style)
            axes.plot(x, means * self.scale, linewidth=1.6, label=run.name, color=colour)
        else:
            axes.plot(x, values * self.scale, linewidth=1.2, label=run.name, **style)

    def _scale_axis(self, axes):
        if self.is_log:
            axes.set_yscale("log")
        elif self.scale == 100 or self.is_count or self.name == "lr_multiplier":
            bottom, top = axes.get_ylim()
            if axes.dataLim.ymin >= 0:  # negative values, if there are any, stay visible
                bottom = -0.02 * top
            axes.set_ylim(bottom=bottom)
        if self.is_count:
            axes.yaxis.get_major_locator().set_params(integer=True)


LOSS = Lines("loss", "loss, nats a token", smooth=True)
VALIDATION = Lines("val_bpb", "validation, bits per byte")
PICTURES = {
    "loss": ("Loss and validation", (
        LOSS,
        Lines("loss", "loss, nats a token", "time", smooth=True),
        VALIDATION,
        Lines("val_bpb", "validation, bits per byte", "time"),
        Lines("val_exact", "held-out puzzles solved, %", "time", scale=100))),
    "throughput": ("Throughput", (
        Lines("tokens_per_s", "tokens a second", "time"),
        Lines("puzzles_per_s", "puzzles a second", "time"),
        Lines("mfu", "model FLOPs utilisation, %", "time", scale=100),
        Lines("data_wait", "waiting for data, % of the time", "time", scale=100),
        Lines("host_dispatch", "dispatching programs, % of the time", "time", scale=100))),
    "optimizer": ("Learning rates and gradients", (
        Lines("lr_multiplier", "learning rates, × their full height"),
        Lines("seq_len", "positions per row"),
        Lines("grad_norm", "norm of the gradient", is_log=True),
        Lines("bad_steps", "steps skipped as not finite", is_count=True))),
}


def draw_all(runs, folder):
    """Writes the pictures for which some run has metrics, as PNGs, and returns their paths."""
    found = []
    for name, (title, lines) in PICTURES.items():
        panels = [partial(each.draw, runs) for each in lines if each.is_shown(runs)]
        if panels:
            found.append(save_figure(folder / f"{name}.png", title, panels))
    panels = [partial(draw_goodput, runs, run) for run in runs if run.seconds()]
    if panels:
        found.append(save_figure(folder / "goodput.png", "Where the time went", panels))
    if any(len(run.series("device_memory_bytes")[0]) for run in runs):
        found.append(save_figure(folder / "memory.png", "Device memory", [partial(draw_memory, runs)]))
    return found


def save_figure(path, title, panels):
    """Writes a picture of panels, functions that draw on axes, and returns its path."""
    # A Figure without pyplot needs no display, and is freed with its last reference.
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
    figure.savefig(path, format="png")
    return path


def draw_text(text, axes):
    """Shows `text` as it is, in a fixed-width font, instead of a plot; long lines continue on the next line."""
    lines = []
    for line in text.expandtabs(4).splitlines():
        lines += textwrap.wrap(line, 62, drop_whitespace=False, replace_whitespace=False) or [""]
    axes.axis("off")
    shown = axes.text(0.02, 0.97, "\n".join(lines), family="monospace", fontsize=10, va="top", parse_math=False,
                      transform=axes.transAxes)
    shown.set_in_layout(False)  # a long text is cut at the bottom instead of squeezing the plot beside it


def draw_goodput(runs, run, axes):
    """Draws the fractions of Goodput's kinds in the wall time of one of the runs so far, stacked."""
    unit_s = label_time(axes, [run])
    records = [record for record in run.records if SECONDS + "train" in record]
    known = run.seconds()
    times = [(record["time"] - run.records[0]["time"]) / unit_s for record in records]
    kinds = {}  # {kind: its seconds until each record}
    for kind in (*KINDS, *sorted(known.keys() - KINDS)):
        if kind in known:
            kinds[kind] = np.array([record.get(SECONDS + kind, 0.0) for record in records])
    total = np.maximum(sum(kinds.values()), 1e-9)  # the time so far
    percentages = []
    labels = []
    colours = []
    for kind, seconds in kinds.items():
        percentages.append(100 * seconds / total)
        labels.append(f"{kind} {percentages[-1][-1]:.1f}%")
        colours.append(KINDS.get(kind, "#bcbd22"))
    axes.stackplot(times, percentages, alpha=0.8, colors=colours, labels=labels)
    mark_interruptions(axes, run, "black", "time", unit_s)
    axes.set(ylabel="fraction of the time so far, %", ylim=(0, 100))
    if len(runs) > 1:
        axes.set_title(run.name)
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))


def draw_memory(runs, axes):
    unit_s = label_time(axes, runs)
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


def draw_legend(axes):
    """Draws the legend above the axes, so that it covers nothing."""
    axes.legend(fontsize="small", loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0.2, ncols=2, frameon=False)


def format_tick(value, _):
    return format_count(int(value))


def running_mean(values, decay=0.9):
    """Returns the exponential running mean of `values`, bias-corrected as in Adam (arXiv 1412.6980)."""
    means = []
    mean = 0.0
    weight = 0.0
    for value in values:
        # The mean begins at 0, so the first ones are too small. They are divided by `weight`, the mean of ones.
        mean = decay * mean + (1 - decay) * value
        weight = decay * weight + 1 - decay
        means.append(mean / weight)
    return np.array(means)


def label_time(axes, runs):
    """Labels the time axis and returns its unit in seconds."""
    longest_s = max(run.wall_s() for run in runs)
    unit = "seconds"
    unit_s = 1
    for longer, longer_s in TIME_UNITS:
        if longest_s > 3 * longer_s:
            unit = longer
            unit_s = longer_s
    axes.set_xlabel(f"time since the first record, {unit}")
    return unit_s


def mark_interruptions(axes, run, colour, over, unit_s):
    """Draws a broken line at each resumption of the run, and over time a shade over the pause before it."""
    label = f"{run.name}: resumed after an interruption"
    for record in run.interruptions():
        if over == "work":
            x = run.work(record["step"])
        else:
            before = run.records[run.records.index(record) - 1]
            x = (record["time"] - run.records[0]["time"]) / unit_s
            begin = (before["time"] - run.records[0]["time"]) / unit_s
            axes.axvspan(begin, x, color=colour, alpha=0.1, linewidth=0)
        axes.axvline(x, color=colour, linestyle="--", linewidth=1, alpha=0.8, label=label)
        label = None  # in the legend once
