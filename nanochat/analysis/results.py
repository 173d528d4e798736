"""What came of an ablation: its table, as text, page and JSON, and the curves of its variants over what they cost."""
import json
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np

from nanochat.analysis.ablation import compare, read_curve
from nanochat.analysis.figures import COLOURS, save_figure
from nanochat.analysis.history import read_run
from nanochat.analysis.summary import format_table, make_page, text
from nanochat.common import BadInput, is_disk_full
from nanochat.record.metrics import format_count

STYLES = ("-", "--", ":")


@dataclass(frozen=True)
class Variant:
    """The finished runs of a variant."""
    plan: object  # a Plan
    chip_s_per_token: float | None  # estimated; None where it is not known
    curves: list  # one Curve for each seed

    def finals(self):
        return [curve.bits_per_byte[-1] for curve in self.curves]

    def cost(self):
        """Returns what one run costs, {unit: number or None}; the seconds are medians over seeds."""
        plan = self.plan
        tokens = plan.tokens(0, plan.num_iterations)
        cpu_s = [curve.cpu_s for curve in self.curves if curve.cpu_s is not None]
        return {"tokens": tokens, "flops": plan.flops(0, plan.num_iterations),
                "train_s": float(np.median([curve.seconds[-1] for curve in self.curves])),
                "cpu_s": float(np.median(cpu_s)) if cpu_s else None,
                "chip_s": None if self.chip_s_per_token is None else self.chip_s_per_token * tokens}


def write_results(trials, chip_seconds, folder):
    """Writes report.html, ablation.png and results.json of all finished runs, and returns the table as text.

    chip_seconds: {variant: chip-seconds per token, or None}.
    """
    variants = {}
    for trial in trials:
        if trial.is_finished():
            new = Variant(trial.plan, chip_seconds.get(trial.variant), [])
            variants.setdefault(trial.variant, new).curves.append(curve_of(trial))
    comparisons = compare({name: variant.finals() for name, variant in variants.items()}, trials[0].variant)
    rows = make_rows(variants, comparisons)
    results = {}
    for name, variant in variants.items():
        seeds = {curve.seed: curve.bits_per_byte[-1] for curve in variant.curves}
        results[name] = asdict(comparisons[name]) | variant.cost() | {"seeds": seeds}
    picture = folder / "ablation.png"
    with replacing(picture) as partial_path:
        draw(partial_path, variants)
    with replacing(folder / "report.html") as partial_path:
        partial_path.write_text(make_page(folder.name, rows, [picture]), encoding="utf-8")
    with replacing(folder / "results.json") as partial_path:
        partial_path.write_text(json.dumps(results, indent=1))
    return format_table(rows)


def curve_of(trial):
    """Returns the Curve of a finished trial. Raises BadInput if its record does not end with the trial's last step."""
    last = trial.plan.num_iterations
    remedy = f"delete {trial.directory}, and the same command trains it again"
    try:
        run = read_run(str(trial.directory))
    except BadInput as error:
        raise BadInput(f"{trial.variant}, seed {trial.seed}, has finished, but its record is lost ({error}): "
                       f"{remedy}") from None
    steps = run.series("val_bpb")[0]
    if not len(steps) or steps[-1] != last:
        where = f"step {steps[-1]:g}" if len(steps) else "none"
        raise BadInput(f"{trial.variant}, seed {trial.seed}: its last evaluation is of {where}, not of step {last}, so "
                       f"it was trained on by hand, or its metrics.jsonl is damaged: {remedy}")
    return read_curve(run, trial.seed, trial.notes().get("cpu_s"))


@contextmanager
def replacing(path):
    """Gives the path of a file that takes the name `path` when the block ends. Raises BadInput if it cannot."""
    partial_path = path.with_name(f"partial_{path.name}")
    try:
        yield partial_path
        partial_path.replace(path)
    except OSError as error:
        if is_disk_full(error):
            raise
        raise BadInput(f"{path} cannot be written ({error.strerror}): move it away, and start the same command "
                       "again") from None
    finally:
        partial_path.unlink(missing_ok=True)


def make_rows(variants, comparisons):
    """Returns the rows of the table for a person, (name, [texts]), the names of the columns first."""
    rows = [("variant", ["seeds", "bits per byte", "± s.d.", "difference", "p", "", "tokens", "FLOPs", "train s",
                         "CPU s", "chip-s"])]
    for name, variant in variants.items():
        found = comparisons[name]
        cost = variant.cost()
        rows.append((name, [str(len(variant.curves)), f"{found.mean:.4f}", text(found.deviation, "{:.4f}"),
                            text(found.difference, "{:+.4f}"), text(found.p_value, "{:.2g}"), found.verdict,
                            format_count(cost["tokens"]), f"{cost['flops']:.3g}", f"{cost['train_s']:.0f}",
                            text(cost["cpu_s"], "{:.0f}"), text(cost["chip_s"], "{:.3g}")]))
    return rows


def draw(path, variants):
    """Writes the picture of validation over tokens, FLOPs, seconds and chip-seconds."""
    axes = {"tokens": tokens_of, "FLOPs": flops_of, "seconds of training on this machine": seconds_of}
    if any(variant.chip_s_per_token for variant in variants.values()):
        axes["estimated chip-seconds"] = chip_seconds_of
    save_figure(path, "Validation, bits per byte", [partial(draw_curves, variants, *each) for each in axes.items()])


def tokens_of(variant, curve):
    return curve.tokens


def flops_of(variant, curve):
    """Returns the FLOPs after which a run has seen its tokens, an array; rows that become longer cost more."""
    plan = variant.plan
    # Between two switches each token costs the same, so a straight line from switch to switch is exact.
    steps = [0, *plan.switches, plan.num_iterations]
    return np.interp(curve.tokens, [plan.tokens(0, step) for step in steps], [plan.flops(0, step) for step in steps])


def seconds_of(variant, curve):
    return curve.seconds


def chip_seconds_of(variant, curve):
    return curve.tokens * (variant.chip_s_per_token or np.nan)


def draw_curves(variants, label, x_of, axes):
    """Draws every run thinly and the mean of each variant's seeds. The first evaluation, before training, is left out,
    because beside it the others would look alike."""
    for index, (name, variant) in enumerate(variants.items()):
        # All colours first with one style of line, then with the next: 30 variants look different.
        style = {"color": COLOURS[index % len(COLOURS)], "linestyle": STYLES[index // len(COLOURS) % len(STYLES)]}
        xs = [x_of(variant, curve)[1:] for curve in variant.curves]
        ys = [curve.bits_per_byte[1:] for curve in variant.curves]
        for x, y in zip(xs, ys, strict=True):
            axes.plot(x, y, linewidth=0.7, alpha=0.4, **style)
        # The mean is over the evaluations that all seeds have.
        common = min(map(len, ys))
        axes.plot(np.mean([x[:common] for x in xs], axis=0), np.mean([y[:common] for y in ys], axis=0),
                  linewidth=1.6, marker="o", markersize=3, label=name, **style)
    axes.set(xlabel=label, ylabel="bits per byte")
    axes.legend(fontsize="small")
