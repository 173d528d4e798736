"""Compares variants of a run that were each trained with several seeds: their curves, and whether they differ.

Two variants are said to differ only if their final values differ by more than the spread between seeds explains.
"""
from dataclasses import dataclass

import numpy as np

LEVEL = 0.05  # of the tests, for a whole table


@dataclass(frozen=True)
class Curve:
    """The validation of one run. All arrays are (n,), one entry for each evaluation."""
    seed: int
    bits_per_byte: np.ndarray
    tokens: np.ndarray
    seconds: np.ndarray  # of training, without compiling and evaluating
    cpu_s: float | None  # of all processes of the finished run; None if one of them was killed


@dataclass(frozen=True)
class Comparison:
    """The final bits per byte of a variant, beside those of the reference."""
    mean: float
    deviation: float | None  # standard deviation between seeds; None with one seed
    difference: float | None  # mean minus that of the reference; None for the reference itself
    p_value: float | None  # corrected; None where there is no test
    verdict: str


def read_curve(run, seed, cpu_s=None):
    """Returns the Curve of a History (history.py)."""
    # Evaluations and seconds are recorded at different steps, so the seconds are interpolated; at step 0 there were
    # none.
    steps, bits_per_byte = run.series("val_bpb")
    known_steps, seconds = run.series("seconds_train")
    return Curve(seed, bits_per_byte, run.work(steps), np.interp(steps, [0, *known_steps], [0, *seconds]), cpu_s)


def compare(finals, reference):
    """Returns {variant: Comparison} of {variant: [final bits per byte, one of each seed]}. reference: the name of the
    variant with which the others are compared; without one of that name in `finals` there is no comparison.

    The test is Welch's (1947), which compares two means whose spreads may differ. Its p-values are corrected by Holm's
    method (1979), so that a table without any true difference shows one with a probability of at most 5%.
    """
    # Welch's test does not pair the seeds. A paired test sees more, but with two seeds it has one degree of freedom and
    # needs a difference of 12.7 standard errors, where Welch's needs 4.3 or more.
    others = [name for name in finals if reference in finals and name != reference]
    p_values = {name: welch_p(finals[name], finals[reference]) for name in others}
    # Holm's factor is the number of tests, so variants without a test must not be among them.
    corrected = holm({name: p for name, p in p_values.items() if p is not None})
    found = {}
    for name, values in finals.items():
        difference = float(np.mean(values) - np.mean(finals[reference])) if name in others else None
        in_words = "the reference" if name == reference else verdict(difference, corrected.get(name))
        found[name] = Comparison(float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None,
                                 difference, corrected.get(name), in_words)
    return found


def verdict(difference, p_value):
    """Returns in words what is known about a variant's difference from the reference."""
    if difference is None:
        return "no run of the reference finished"
    if p_value is None:
        return "needs two seeds"
    return "not beyond the spread of seeds" if p_value >= LEVEL else "better" if difference < 0 else "worse"


def welch_p(first, second):
    """Returns the two-sided p-value of Welch's test that two samples have the same mean, or None if one of them has
    fewer than two values."""
    from scipy.stats import ttest_ind
    if min(len(first), len(second)) < 2:
        return None
    if np.ptp(first) == np.ptp(second) == 0:  # no spread at all: seeds that change nothing
        return 0.0 if first[0] != second[0] else 1.0
    return float(ttest_ind(first, second, equal_var=False).pvalue)


def holm(p_values):
    """Returns {name: p-value} corrected for their number by Holm's step-down method."""
    corrected, largest = {}, 0.0
    for rank, (name, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        # The smallest of n p-values is multiplied by n, the next one by n - 1, and so on. None becomes smaller than the
        # one before.
        largest = max(largest, min(1.0, (len(p_values) - rank) * p))
        corrected[name] = largest
    return corrected
