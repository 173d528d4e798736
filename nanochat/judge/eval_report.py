"""Scores of an evaluation with their intervals, and the comparison with another evaluation.

A score is a weighted mean over problems, sum(values) / sum(weights). For pass@k the value is an estimate between 0 and
1 and the weight 1. For bits per byte the value is the bits of a text and the weight its bytes.
"""
import importlib.util
import math
from collections import defaultdict
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from nanochat.common import BadInput, say
from nanochat.judge.judge import PASSED, Verdict

DRAWS = 10_000
BATCH = 100  # draws at a time, to limit memory
SEED = 0
PASS_AT_K = 10
ALL = "all"


@dataclass(frozen=True)
class Score:
    mean: float
    low: float  # the 95% interval
    high: float
    num_problems: int


@dataclass(frozen=True)
class Difference(Score):
    """Of the first minus the second."""
    p_value: float


def pass_at_k(num_samples, num_passed, k):
    """Returns the unbiased estimate of the probability that one of k samples passes (Chen et al., arXiv 2107.03374)."""
    return 1 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


def require_scipy():
    """Raises BadInput if scipy is missing."""
    if not importlib.util.find_spec("scipy"):
        raise BadInput("scipy is not installed: pip install '.[judge]'")


def score(values, weights=None):
    """Returns the Score of the problems. Where each value is 0 or 1, its interval is Wilson's (1927)."""
    from scipy.stats import binomtest
    if not np.isin(values, (0, 1)).all() or weights is not None and set(weights) != {1}:
        return bootstrap(values, weights)
    num = int(sum(values))
    interval = binomtest(num, len(values)).proportion_ci(method="wilson")
    return Score(num / len(values), float(interval.low), float(interval.high), len(values))


def bootstrap(values, weights=None):
    """Returns the Score of the problems, with the interval of the percentile bootstrap over problems (Efron 1979)."""
    from scipy import stats

    def mean(values, weights, axis=-1):
        return values.sum(axis) / weights.sum(axis)

    values = np.asarray(values, float)
    weights = np.ones(len(values)) if weights is None else np.asarray(weights, float)
    low = high = whole = float(mean(values, weights))
    if len(values) > 1:  # of one problem, every sample is the same
        low, high = stats.bootstrap((values, weights), mean, paired=True, method="percentile", n_resamples=DRAWS,
                                    batch=BATCH, rng=SEED).confidence_interval
    return Score(whole, float(low), float(high), len(values))


def compare(first, second, weights=None):
    """Returns the Difference of two lists of values of the same problems, with the p-value of a permutation test."""
    from scipy.stats import permutation_test

    def size_of_sum(values, axis=-1):
        return abs(values.sum(axis))

    differences = np.asarray(first, float) - np.asarray(second, float)
    # How often a sum at least as large comes out if, for each problem, chance decides which of the two values belongs
    # to which checkpoint.
    p_value = 1.0
    if len(differences) > 1:
        p_value = permutation_test((differences,), size_of_sum, permutation_type="samples", alternative="greater",
                                   n_resamples=DRAWS, batch=BATCH, rng=SEED).pvalue
    return Difference(**vars(bootstrap(differences, weights)), p_value=float(p_value))


# From records to scores


def measures(records):
    """Returns {measure: {name of the problem or gap: (value, weight)}} of the records of one evaluation."""
    samples_of = defaultdict(list)
    for record in records:
        samples_of[record["name"]].append(record)
    found = defaultdict(dict)
    for name, samples in samples_of.items():
        for measure, value in measures_of(samples).items():
            found[measure][name] = value
    return dict(found)


def measures_of(samples):
    """Returns {measure: (value, weight)} of the samples of one problem or gap: the greedy one, and the drawn ones."""
    greedy, *drawn = samples
    found = {}
    if "exact" in greedy:  # a gap
        found["exact match"] = float(greedy["exact"]), 1
        found["edit similarity"] = greedy["similarity"], 1
    found["compiles"] = float(compiles(greedy)), 1
    found["pass@1"] = float(greedy["status"] == PASSED), 1
    if drawn:
        found["compiles, drawn"] = fmean(map(compiles, drawn)), 1
        # pass_at_k estimates from n samples for any k up to n, so with few samples k is their number.
        k = min(PASS_AT_K, len(drawn))
        num_passed = sum(sample["status"] == PASSED for sample in drawn)
        found[f"pass@{k}, drawn"] = pass_at_k(len(drawn), num_passed, k), 1
    if "bits" in greedy:
        found["bits per byte"] = greedy["bits"], greedy["bytes"]
    if "bits_without_suffix" in greedy:
        found["bits per byte without suffix"] = greedy["bits_without_suffix"], greedy["bytes"]
    return found


def compiles(sample):
    return Verdict(sample["status"], "").compiles


def score_lines(records):
    """Returns the lines of a table: each measure over all problems, and over the problems of each group."""
    group_of = {record["name"]: record["group"] for record in records}
    groups = [ALL, *(group for group in dict.fromkeys(group_of.values()) if group)]
    lines = []
    for measure, found in measures(records).items():
        for group in groups:
            chosen = [found[name] for name in found if group in (ALL, group_of[name])]
            if chosen:
                values, weights = zip(*chosen, strict=True)
                scored = score(values, weights)
                interval = f"[{scored.low:.4f}, {scored.high:.4f}]"
                lines.append(f"{measure:<30} {group:<14} {scored.mean:7.4f}  {interval}  of {scored.num_problems}")
    return lines


def difference_lines(records, others):
    """Returns the lines of a table: the Difference of each measure of two evaluations, over the problems of both."""
    all_theirs = measures(others)
    lines = []
    for measure, ours in measures(records).items():
        theirs = all_theirs.get(measure, {})
        pairs = [(*ours[name], theirs[name][0]) for name in ours if name in theirs]
        if pairs:
            our_values, weights, their_values = zip(*pairs, strict=True)
            found = compare(our_values, their_values, weights)
            interval = f"[{found.low:+.4f}, {found.high:+.4f}]"
            lines.append(f"{measure:<30} {found.mean:+.4f}  {interval}  p = {found.p_value:.4f}")
    return lines


def write_report(out_dir, records, others):
    """Prints the scores, and writes them. others: records to compare with."""
    scores = score_lines(records)
    say("\n".join(scores), keep="\n\t")
    differences = difference_lines(records, others)
    if differences:
        print("\nthe difference to --against, each problem compared with itself:\n" + "\n".join(differences))
    (out_dir / "scores.txt").write_text("\n".join([*scores, *differences]) + "\n", encoding="utf-8")
    print(f"\n{out_dir}: samples.jsonl, scores.txt")
