"""The main figures of runs in one table, and the page that shows it with pictures."""
import base64
from pathlib import Path

from nanochat.device.tpu import GIB
from nanochat.record.metrics import format_count, format_duration
from nanochat.record.page import fill


def summarise(runs, usd_per_hour=None):
    """Returns the rows of the summary, (label, [a text for each run]), without those that are empty for all runs.
    usd_per_hour: the price of the TPU."""
    columns = [summary_of(run, usd_per_hour) for run in runs]
    rows = []
    for label in columns[0]:
        texts = [column[label] for column in columns]
        if any(texts):
            rows.append((label, texts))
    return rows


def summary_of(run, usd_per_hour):
    """Returns {label: text} of one run, "" for what is unknown. All runs have the same labels."""
    speed = run.median("tokens_per_s")
    hours = run.wall_s() / 3600
    cost = ""
    cost_of_billion = ""
    if usd_per_hour is not None:
        cost = f"{usd_per_hour * hours:.2f} USD"
        if speed is not None:
            cost_of_billion = f"{usd_per_hour * 1e9 / speed / 3600:.2f} USD"
    losses = run.series("loss")[1][-20:]
    return {
        "run": run.name,
        "steps": f"{run.records[-1]['step']:,}",
        "tokens": count(run.last("tokens")),
        "puzzles": count(run.last("puzzles")),
        "positions per row": ", ".join(f"{length:,} at step {step:,}" for step, length in run.lengths()),
        "loss, last 20 steps": f"{losses.mean():.4f}" if len(losses) else "",
        "validation, bits per byte": last_validation(run),
        "the best, at step": best_validation(run),
        "validation sets": validation_sets(run),
        "held-out puzzles solved": text(run.last("val_exact"), "{:.1%}"),
        "tokens/s, median": text(speed, "{:,.0f}"),
        "puzzles/s, median": text(run.median("puzzles_per_s"), "{:,.0f}"),
        "MFU, median": text(run.median("mfu"), "{:.1%}"),
        "waiting for data": text(run.median("data_wait"), "{:.1%}"),
        "dispatching programs": text(run.median("host_dispatch"), "{:.1%}"),
        "peak device memory": peak_memory(run),
        "wall time": format_duration(run.wall_s()),
        "cost of that time": cost,
        "cost of 1B tokens, at this speed": cost_of_billion,
        "interruptions": str(len(run.interruptions())),
        "goodput": text(run.last("goodput"), "{:.1%}"),
        "not training": time_not_training(run),
        "steps skipped as not finite": text(run.last("bad_steps"), "{:.0f}"),
    }


def text(value, form, unknown=""):
    """Returns the value in this form, or `unknown` for None."""
    return unknown if value is None else form.format(value)


def count(value):
    return "" if value is None else format_count(int(value))


def last_validation(run):
    for record in reversed(run.records):
        if "val_bpb" in record:
            return text(record["val_bpb"], "{:.4f}", unknown="not finite")
    return ""


def validation_sets(run):
    """Returns the bits per byte of each set of --val_dir=NAME=FOLDER,…"""
    prefix = "val_bpb_"
    for record in reversed(run.records):
        found = []
        for name, value in record.items():
            if name.startswith(prefix):
                found.append(f"{name.removeprefix(prefix)} {text(value, '{:.4f}', unknown='not finite')}")
        if found:
            return ", ".join(found)
    return ""


def best_validation(run):
    steps, values = run.series("val_bpb")
    if not len(values):
        return ""
    return f"{values.min():.4f}, {steps[values.argmin()]:,}"


def peak_memory(run):
    peak = peak_bytes(run)
    if peak is None:
        return ""
    limit = run.last("device_memory_limit_bytes")
    if not limit:
        return f"{peak / GIB:.1f} GiB"
    return f"{peak / GIB:.1f} GiB of {limit / GIB:.1f}"


def peak_bytes(run):
    """Returns the largest peak of a device's memory in bytes, or None if it was not measured."""
    peaks = run.series("device_memory_peak_bytes")[1]
    return float(peaks.max()) if len(peaks) else None


def time_not_training(run):
    seconds = run.seconds()
    total = max(sum(seconds.values()), 1e-9)
    found = []
    for kind in sorted(seconds.keys() - {"train"}, key=seconds.get, reverse=True):
        if seconds[kind] >= 0.0005 * total:
            found.append(f"{kind} {seconds[kind] / total:.1%}")
    return ", ".join(found)


def format_table(rows):
    """Returns rows, (label, [texts]), as text in columns."""
    table = [[label, *texts] for label, texts in rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join("  ".join(map(str.ljust, cells, widths)).rstrip() for cells in table)


def make_page(title, rows, pictures):
    """Returns one HTML document with the rows of a table, the names of its columns first, and the pictures."""
    images = [(path.stem, base64.b64encode(path.read_bytes()).decode()) for path in pictures]
    return fill(Path(__file__).with_name("report.html"), title=title, rows=rows, images=images)
