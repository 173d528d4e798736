"""Scores of an evaluation, with intervals, and the comparison of two checkpoints on the same problems.

A score is a weighted mean over problems, sum(values) / sum(weights): for pass@k the value is an estimate between 0 and
1 and the weight 1; for bits per byte the value is the bits of a text and the weight its bytes.
"""
from dataclasses import dataclass

import numpy as np

DRAWS = 10_000


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
    return 1.0 - float(np.prod(1.0 - k / np.arange(num_samples - num_passed + 1, num_samples + 1)))


def score(values, weights=None, seed=0):
    """Returns the Score of the problems. The interval is the percentile bootstrap's: problems are drawn with
    replacement (Efron 1979)."""
    values = np.asarray(values, float)
    weights = np.ones(len(values)) if weights is None else np.asarray(weights, float)
    drawn = _draw(len(values), seed)
    means = drawn @ values / np.maximum(drawn @ weights, 1e-300)
    low, high = np.percentile(means, [2.5, 97.5])
    return Score(float(values.sum() / weights.sum()), float(low), float(high), len(values))


def compare(first, second, weights=None, seed=0):
    """Returns the Difference between two lists of values of the same problems.

    The interval is the bootstrap's over problems. The p-value is that of a permutation test: how often a difference at
    least as large comes out if, for each problem, chance decides which of the two values belongs to which checkpoint.
    """
    differences = np.asarray(first, float) - np.asarray(second, float)
    weights = np.ones(len(differences)) if weights is None else np.asarray(weights, float)
    drawn = _draw(len(differences), seed)
    low, high = np.percentile(drawn @ differences / np.maximum(drawn @ weights, 1e-300), [2.5, 97.5])
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], (DRAWS, len(differences)))
    as_large = np.abs(signs @ differences) >= abs(differences.sum()) * (1 - 1e-12)
    p_value = (1 + as_large.sum()) / (1 + DRAWS)
    return Difference(float(differences.sum() / weights.sum()), float(low), float(high), float(p_value))


def _draw(num_problems, seed):
    """Returns how often each problem is in each of DRAWS samples of the problems: (DRAWS, num_problems)."""
    uniform = np.full(num_problems, 1 / num_problems)
    return np.random.default_rng(seed).multinomial(num_problems, uniform, size=DRAWS).astype(float)
