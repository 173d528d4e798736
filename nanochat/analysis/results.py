"""Compares the variants of an ablation, and writes its table, as text, page and JSON, and their curves. Two variants
differ only if their final values do by more than the spread between seeds explains."""
import json
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np

from nanochat.analysis.figures import COLOURS, save_figure
from nanochat.analysis.history import read_run
from nanochat.analysis.summary import format_table, make_page, text
from nanochat.common import BadInput, is_disk_full, written_whole
from nanochat.record.metrics import format_count
from nanochat.train.prepare import FINISHED_FILE

LEVEL = 0.05  # of the tests, for a whole table
STYLES = ("-", "--", ":")


@dataclass(frozen=True)
class Curve:
    """The validation of one run. All arrays are (n,), one entry for each evaluation."""
    seed: int
    bits_per_byte: np.ndarray
    tokens: np.ndarray
    seconds: np.ndarray  # of training, without compiling and evaluating
    cpu_s: float | None  # of all processes of the finished run; None if one of them was killed
    solutions: tuple  # bits per byte of solutions at the end, and its interval; Nones without --code_eval_every


@dataclass(frozen=True)
class Variant:
    """The finished runs of a variant."""
    plan: object  # a Plan
    chip_s_per_token: float | None  # estimated; None if it is unknown
    curves: list  # one Curve for each seed

    def finals(self):
        return [curve.bits_per_byte[-1] for curve in self.curves]

    def solutions(self):
        """Returns the means over seeds of Curve.solutions, or None."""
        found = [curve.solutions for curve in self.curves if None not in curve.solutions]
        return np.mean(found, axis=0).tolist() if found else None

    def cost(self):
        """Returns what one run costs, {unit: number or None}; the seconds are medians over seeds."""
        tokens = self.plan.tokens(0, self.plan.num_iterations)
        train_s = [curve.seconds[-1] for curve in self.curves]
        cpu_s = [curve.cpu_s for curve in self.curves if curve.cpu_s is not None]
        chip_s = None
        if self.chip_s_per_token is not None:
            chip_s = self.chip_s_per_token * tokens
        return {"tokens": tokens, "flops": self.plan.flops(0, self.plan.num_iterations),
                "train_s": float(np.median(train_s)), "cpu_s": float(np.median(cpu_s)) if cpu_s else None,
                "chip_s": chip_s}


def write_results(trials, chip_seconds, folder):
    """Writes report.html, ablation.png and results.json of all finished runs, and returns the table as text.
    chip_seconds: {variant: chip-seconds per token, or None}."""
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
        of_runs = {"seeds": seeds, "solutions": variant.solutions()}
        results[name] = asdict(comparisons[name]) | variant.cost() | of_runs
    picture = folder / "ablation.png"
    try:
        with written_whole(picture) as unfinished:
            draw(unfinished, variants)
        with written_whole(folder / "report.html") as unfinished:
            unfinished.write_text(make_page(folder.name, rows, [picture]), encoding="utf-8")
        with written_whole(folder / "results.json") as unfinished:
            unfinished.write_text(json.dumps(results, indent=1))
    except OSError as error:
        if is_disk_full(error):
            raise
        raise BadInput(f"{folder} cannot be written ({error}): mend this, and start again") from None
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
    steps, bits_per_byte = run.series("val_bpb")
    if not len(steps) or steps[-1] != last:
        where = f"step {steps[-1]:g}" if len(steps) else "none"
        raise BadInput(f"{trial.variant}, seed {trial.seed}: its last evaluation is of {where}, not of step {last}, so "
                       f"it was trained on by hand, or its metrics.jsonl is damaged: {remedy}")
    # Evaluations and seconds are recorded at different steps, so the seconds are interpolated, from 0 at step 0 on.
    known_steps, known_seconds = run.series("seconds_train")
    seconds = np.interp(steps, [0, *known_steps], [0, *known_seconds])
    solutions = tuple(run.last(name) for name in ("code_bpb", "code_bpb_low", "code_bpb_high"))
    return Curve(trial.seed, bits_per_byte, run.work(steps), seconds, trial.notes().get("cpu_s"), solutions)


def finish_or_reopen(trial):
    """Returns whether a run that has ended is finished, with its last evaluation. A run without it counts as unfinished
    from now on, so that the same command repeats the evaluation."""
    if not trial.is_finished():
        return False
    try:
        curve_of(trial)
    except BadInput:  # the text could not be read
        (trial.directory / FINISHED_FILE).unlink()
        return False
    return True


# The comparison


@dataclass(frozen=True)
class Comparison:
    """The final bits per byte of a variant, beside those of the reference."""
    mean: float
    deviation: float | None  # standard deviation between seeds; None with one seed
    difference: float | None  # mean minus that of the reference; None for the reference itself
    p_value: float | None  # corrected; None without a test
    verdict: str


def compare(finals, reference):
    """Returns {variant: Comparison} of {variant: [final bits per byte, one of each seed]}. If `finals` lacks the
    reference, nothing is compared."""
    # The test is Welch's (1947), which compares two means whose spreads may differ. Holm's method (1979) corrects its
    # p-values, so that a table without any true difference shows one with a probability of at most 5%.
    # Welch's test does not pair the seeds. A paired test sees more, but with two seeds it has one degree of freedom and
    # needs a difference of 12.7 standard errors, where Welch's needs 4.3 or more.
    p_values = {}
    for name, values in finals.items():
        if name != reference and reference in finals:
            p_value = welch_p(values, finals[reference])
            if p_value is not None:  # Holm's factor is the number of tests, so variants without a test do not count
                p_values[name] = p_value
    corrected = holm(p_values)
    found = {}
    for name, values in finals.items():
        mean = float(np.mean(values))
        deviation = float(np.std(values, ddof=1)) if len(values) > 1 else None
        difference = None
        in_words = "the reference"
        if name != reference:
            if reference in finals:
                difference = mean - float(np.mean(finals[reference]))
            in_words = verdict(difference, corrected.get(name))
        found[name] = Comparison(mean, deviation, difference, corrected.get(name), in_words)
    return found


def verdict(difference, p_value):
    if difference is None:
        return "no run of the reference finished"
    if p_value is None:
        return "needs two seeds"
    if p_value >= LEVEL:
        return "not beyond the spread of seeds"
    return "better" if difference < 0 else "worse"


def welch_p(first, second):
    """Returns the two-sided p-value of Welch's test that two samples have the same mean, or None if one of them has
    fewer than two values."""
    from scipy.stats import ttest_ind
    if min(len(first), len(second)) < 2:
        return None
    if np.ptp(first) == np.ptp(second) == 0:  # no spread at all: the seed changes nothing
        return 0.0 if first[0] != second[0] else 1.0
    return float(ttest_ind(first, second, equal_var=False).pvalue)


def holm(p_values):
    """Returns {name: p-value} corrected for their number by Holm's step-down method."""
    corrected = {}
    largest = 0.0
    for rank, name in enumerate(sorted(p_values, key=p_values.get)):
        # The smallest of n p-values is multiplied by n, the next one by n - 1, and so on. None becomes smaller than the
        # one before.
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[name]))
        corrected[name] = largest
    return corrected


# The table and the picture


def make_rows(variants, comparisons):
    """Returns the rows of the table for a person, (name, [texts]), the names of the columns first."""
    rows = [("variant", ["seeds", "bits per byte", "± s.d.", "difference", "p", "", "tokens", "FLOPs", "CPU s",
                         "chip-s", "solutions"])]
    for name, variant in variants.items():
        found = comparisons[name]
        cost = variant.cost()
        rows.append((name, [str(len(variant.curves)), f"{found.mean:.4f}", text(found.deviation, "{:.4f}"),
                            text(found.difference, "{:+.4f}"), text(found.p_value, "{:.2g}"), found.verdict,
                            format_count(cost["tokens"]), f"{cost['flops']:.3g}", text(cost["cpu_s"], "{:.0f}"),
                            text(cost["chip_s"], "{:.3g}"),
                            text(variant.solutions(), "{0[0]:.4f} [{0[1]:.3f}, {0[2]:.3f}]")]))
    return rows


def draw(path, variants):
    """Writes the picture of validation over tokens, FLOPs, seconds and chip-seconds."""
    labels = ["tokens", "FLOPs", "seconds of training on this machine"]
    if any(variant.chip_s_per_token for variant in variants.values()):
        labels.append("estimated chip-seconds")
    panels = [partial(draw_curves, variants, label) for label in labels]
    save_figure(path, "Validation, bits per byte", panels)


def costs_of(variant, curve):
    """Returns {label of an axis: what each evaluation of a curve has cost until then, an array}."""
    # Longer rows cost more FLOPs. Between two switches each token costs the same, so a straight line from switch to
    # switch is exact.
    plan = variant.plan
    steps = [0, *plan.switches, plan.num_iterations]
    flops = np.interp(curve.tokens, [plan.tokens(0, step) for step in steps], [plan.flops(0, step) for step in steps])
    return {"tokens": curve.tokens, "FLOPs": flops, "seconds of training on this machine": curve.seconds,
            "estimated chip-seconds": curve.tokens * (variant.chip_s_per_token or np.nan)}


def draw_curves(variants, label, axes):
    """Draws every run thinly and the mean of each variant's seeds. The first evaluation, before training, is left out,
    because beside it the others would look alike."""
    for index, (name, variant) in enumerate(variants.items()):
        # All colours first with one style of line, then with the next: 30 variants look different.
        style = {"color": COLOURS[index % len(COLOURS)], "linestyle": STYLES[index // len(COLOURS) % len(STYLES)]}
        xs = []
        ys = []
        for curve in variant.curves:
            xs.append(costs_of(variant, curve)[label][1:])
            ys.append(curve.bits_per_byte[1:])
            axes.plot(xs[-1], ys[-1], linewidth=0.7, alpha=0.4, **style)
        # The mean is over the evaluations that all seeds have.
        common = min(map(len, ys))
        mean_x = np.mean([x[:common] for x in xs], axis=0)
        mean_y = np.mean([y[:common] for y in ys], axis=0)
        axes.plot(mean_x, mean_y, linewidth=1.6, marker="o", markersize=3, label=name, **style)
    axes.set(xlabel=label, ylabel="bits per byte")
    axes.legend(fontsize="small")
