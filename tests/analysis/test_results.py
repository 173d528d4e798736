"""When two variants are said to differ."""
from types import SimpleNamespace

import numpy as np
import pytest

from nanochat.analysis import results
from nanochat.analysis.results import compare, holm, welch_p


def test_the_p_value_is_that_of_welch_s_own_formula():
    first, second = [2.0, 2.2, 2.1], [2.4, 2.9]
    spreads = [np.var(values, ddof=1) / len(values) for values in (first, second)]
    t = abs(np.mean(first) - np.mean(second)) / np.sqrt(sum(spreads))
    freedom = sum(spreads) ** 2 / sum(s**2 / (len(v) - 1) for s, v in zip(spreads, (first, second), strict=True))
    angles = np.linspace(0, np.pi / 2, 200_001)  # t = √ν tan θ turns Student's density into cos^(ν-1) θ
    density = np.cos(angles) ** (freedom - 1)
    inside = density[angles <= np.arctan(t / np.sqrt(freedom))].sum() / density.sum()
    assert welch_p(first, second) == pytest.approx(1 - inside, abs=1e-3)
    assert welch_p([1.0], [2.0, 3.0]) is None
    assert welch_p([1.0, 1.0], [1.0, 1.0]) == 1 and welch_p([1.0, 1.0], [2.0, 2.0]) == 0


def test_p_values_are_corrected_for_their_number():
    assert holm({"a": 0.01, "b": 0.04, "c": 0.03}) == pytest.approx({"a": 0.03, "c": 0.06, "b": 0.06})
    assert holm({"a": 0.7, "b": 0.6}) == {"b": 1.0, "a": 1.0} and holm({}) == {}


def test_a_difference_is_one_only_beyond_the_spread_of_the_seeds():
    found = compare({"reference": [2.00, 2.02, 2.01], "same": [2.01, 2.03, 1.99], "better": [1.90, 1.91, 1.89],
                     "worse": [2.20, 2.22, 2.19], "one seed": [1.0]}, "reference")
    assert {name: one.verdict for name, one in found.items()} == {
        "reference": "the reference", "same": "not beyond the spread of seeds", "better": "better", "worse": "worse",
        "one seed": "needs two seeds"}
    assert found["better"].difference == pytest.approx(-0.11) and found["one seed"].deviation is None


def test_bits_per_byte_of_solutions_are_means_over_seeds_with_their_interval():
    def variant(*solutions):
        curves = [results.Curve(seed, [1.0], [1], [1], None, found) for seed, found in enumerate(solutions)]
        plan = SimpleNamespace(num_iterations=1, tokens=lambda first, end: 1, flops=lambda first, end: 1)
        return results.Variant(plan, None, curves)

    variants = {"a": variant((2.0, 1.5, 3.0), (3.0, 2.5, 4.0)), "b": variant((None, None, None))}
    rows = results.make_rows(variants, results.compare({name: [1.0] for name in variants}, "a"))
    assert [texts[-1] for _, texts in rows] == ["solutions", "2.5000 [2.000, 3.500]", ""]


def test_without_the_reference_nothing_is_compared():
    found = compare({"same": [2.01, 2.03], "better": [1.90, 1.91]}, "reference")
    assert {(one.verdict, one.difference) for one in found.values()} == {("no run of the reference finished", None)}


def test_a_table_without_a_true_difference_shows_one_in_at_most_five_of_a_hundred_cases():
    random = np.random.default_rng(0)
    tables = 150
    false = sum(any(one.verdict in ("better", "worse") for one in compare(
        {str(name): list(random.normal(2, 0.01, 3)) for name in range(6)}, "0").values()) for _ in range(tables))
    assert false / tables <= 0.05 + 2 * np.sqrt(0.05 * 0.95 / tables)
