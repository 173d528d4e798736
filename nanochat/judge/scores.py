"""Scores of an evaluation, with intervals, and the comparison of two checkpoints on the same problems.

A score is a weighted mean over problems, sum(values) / sum(weights): for pass@k the value is an estimate between 0 and
1 and the weight 1; for bits per byte the value is the bits of a text and the weight its bytes.
"""
from dataclasses import dataclass

import numpy as np

DRAWS = 10_000
BLOCK = 100  # draws at a time, to limit memory


@dataclass(frozen=True)
class Score:
    mean: float
    low: float  # the 95% interval
    high: float
    num_problems: int


@dataclass(frozen=True)
class Difference:
    mean: float  # of the first minus the second
    low: float
    high: float
    p_value: float


def pass_at_k(num_samples, num_passed, k):
    """Returns the unbiased estimate of the probability that at least one of k samples passes, from `num_samples` of
    which `num_passed` passed: 1 - C(n - c, k) / C(n, k) (Chen et al., arXiv 2107.03374)."""
    if k > num_samples:
        raise ValueError(f"{num_samples} samples say nothing about {k}")
    if num_samples - num_passed < k:
        return 1.0
    # C(n - c, k) / C(n, k) as a product of fractions, because the binomials themselves are too large for floats.
    return 1.0 - float(np.prod(1.0 - k / np.arange(num_samples - num_passed + 1, num_samples + 1)))


def score(values, weights=None, seed=0):
    """Returns the Score of the problems. The interval is the percentile bootstrap's: problems are drawn with
    replacement (Efron 1979)."""
    values = np.asarray(values, float)
    weights = np.ones(len(values)) if weights is None else np.asarray(weights, float)
    low, high = _interval(values, weights, seed)
    return Score(float(values.sum() / weights.sum()), float(low), float(high), len(values))


def compare(first, second, weights=None, seed=0):
    """Returns the Difference between two lists of values of the same problems: its interval is the bootstrap's over
    problems, its p-value that of a permutation test."""
    differences = np.asarray(first, float) - np.asarray(second, float)
    weights = np.ones(len(differences)) if weights is None else np.asarray(weights, float)
    low, high = _interval(differences, weights, seed)
    # How often a difference at least as large comes out if, for each problem, chance decides which of the two values
    # belongs to which checkpoint.
    rng = np.random.default_rng(seed)
    sums = np.concatenate([rng.choice([-1.0, 1.0], (BLOCK, len(differences))) @ differences
                           for _ in range(DRAWS // BLOCK)])
    # What was observed counts as one of the draws, so p is never 0. A sum in another order is rounded otherwise, hence
    # 1e-12.
    p_value = (1 + (np.abs(sums) >= abs(differences.sum()) * (1 - 1e-12)).sum()) / (1 + DRAWS)
    return Difference(float(differences.sum() / weights.sum()), float(low), float(high), float(p_value))


def _interval(values, weights, seed):
    """Returns the 2.5 and 97.5 percentiles of the weighted mean over problems that are drawn with replacement."""
    rng = np.random.default_rng(seed)
    means = []
    for _ in range(DRAWS // BLOCK):
        drawn = rng.integers(len(values), size=(BLOCK, len(values)))
        means.append(values[drawn].sum(1) / weights[drawn].sum(1))
    return np.percentile(np.concatenate(means), [2.5, 97.5])
