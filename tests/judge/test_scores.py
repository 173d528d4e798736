import itertools

import numpy as np
import pytest

from nanochat.common import BadInput
from nanochat.judge.code_eval import make_results_dir
from nanochat.judge.eval_report import compare, pass_at_k, score
from scripts import code_eval


@pytest.mark.parametrize("k", [1, 2, 5])
def test_pass_at_k_is_the_share_of_all_choices_with_a_sample_that_passes(k):
    for passed in range(6):
        choices = [any(choice) for choice in itertools.combinations([i < passed for i in range(5)], k)]
        assert pass_at_k(5, passed, k) == pytest.approx(sum(choices) / len(choices))


def test_shares_without_variation_have_an_interval():
    """Wilson's; resampled, equal values stay equal."""
    none, some, full = score([0] * 49), score([1] * 3 + [0] * 46), score([1.0] * 49, [1] * 49)
    assert (none.low, none.high) == pytest.approx((0, 0.0727), abs=1e-4)
    assert (some.low, some.high) == pytest.approx((0.0211, 0.1652), abs=1e-4)
    assert (full.low, full.high) == pytest.approx((1 - none.high, 1))


def test_without_scipy_one_line_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BadInput, match=r"scipy.*pip install '\.\[judge\]'"):
        code_eval.main(["--checkpoint=missing"])


def test_bits_per_byte_are_all_bits_over_all_bytes():
    found = score([10, 90], [10, 30])
    assert found.mean == 2.5 and found.low == 1.0 and found.high == 3.0


def test_chance_is_told_from_a_difference():
    rng = np.random.default_rng(1)
    base = rng.random(60)
    noise = compare(base, rng.permutation(base))
    better = compare(base + 0.05 + 0.05 * rng.random(60), base)
    assert noise.p_value > 0.05 and noise.low < 0 < noise.high
    assert better.p_value < 0.001 and 0.05 <= better.low <= better.mean <= better.high
    same, one = compare(base, base), compare([10], [12], [4])
    assert (same.mean, same.p_value) == (0, 1)
    assert (one.mean, one.low, one.high, one.p_value) == (-0.5, -0.5, -0.5, 1)


@pytest.mark.parametrize("content", ["x", '["format"]\n', '{"format": 1}\n"name"\n', '{"format": 1}\n{"name": "a"}\n',
                                     "", "[" * 10**5 + "\n"])
def test_another_file_than_results_is_refused_and_kept(tmp_path, content):
    path = tmp_path / "samples.jsonl"
    path.write_text(content)
    with pytest.raises(BadInput, match="has no results of code_eval"):
        make_results_dir(tmp_path, "run", {"format": 1})
    assert path.read_text() == content
