"""--value_embeddings. tests/model/test_gpt.py compares their logits with a reference, their gradients on every kernel,
and their cached generation."""
import pytest
import torch

from nanochat.infer.quantize import Int8GPT
from nanochat.model.config import GPTConfig
from nanochat.model.gpt import GPT
from nanochat.train.describe import describe_plan
from nanochat.train.flags import parse_flags
from nanochat.train.plan import make_plan
from tests.model.test_gpt import SHARED, TINY, build, some_ids

WITH = GPTConfig(**{**TINY, **SHARED})


@pytest.mark.parametrize("layers, adding", [(1, [0]), (2, [1]), (3, [0, 2]), (4, [1, 3])])
def test_every_second_layer_adds_the_values_and_the_last_one_always(layers, adding):
    config = GPTConfig(**{**TINY, "n_layer": layers, **SHARED})
    assert [layer for layer, adds in enumerate(config.adds_values()) if adds] == adding
    assert build(config).value_table.shape == (61, 32)


def test_the_other_weights_begin_as_nanochats():
    model = GPT(GPTConfig(**{**TINY, "n_layer": 4, **SHARED}), kernels=None).init_weights(seed=1)
    plain = GPT(GPTConfig(**{**TINY, "n_layer": 4}), kernels=None).init_weights(seed=1)
    torch.testing.assert_close(model.mlp_in, 0.4 * plain.mlp_in)
    torch.testing.assert_close(model.wte, 0.8 * plain.wte)
    torch.testing.assert_close(model.resid_scale[[0, -1]], torch.tensor([1.15, 1.05]))
    torch.testing.assert_close(model.x0_scale[[0, -1]], torch.tensor([0.2, 0.05]))
    assert set(plain.resid_scale.tolist()) == {1.0} and torch.equal(plain.x0_scale, torch.full((4,), 0.1))


def test_a_token_changes_nothing_before_it():
    model, ids = build(WITH), some_ids(WITH)
    before = model(ids)
    model.value_table.data[ids[0, 6]] += 1
    changed = (model(ids)[0] != before[0]).any(-1)
    first = ids[0].tolist().index(ids[0, 6])
    assert not changed[:first].any() and changed[first]


def test_weights_of_8_bits_have_the_values_too():
    model, ids = build(WITH), some_ids(WITH)
    exact, rounded = model(ids), Int8GPT(model)(ids)
    model.value_table.data.zero_()
    assert (rounded - exact).abs().mean() < 0.3 * (model(ids) - exact).abs().mean()


def test_the_plan_counts_the_values_and_no_flops_of_theirs():
    plan, plain = (make_plan(parse_flags(["--depth=4", f"--value_embeddings={values}"]), 65536, "cpu", 1)
                   for values in ("shared", "off"))
    assert plan.parameters["value embeddings"] == 65536 * 256
    assert plan.flops_per_token == plain.flops_per_token and plan.num_iterations == plain.num_iterations
    text = describe_plan(plan, type("Tokenizer", (), {"n_vocab": 65536, "sha256": "0" * 64, "losses": ""}))[2]
    assert "16,777,216 value embeddings" in text
