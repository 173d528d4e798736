"""--layer_gates and --value_embeddings. test_gpt.py compares their logits and gradients with those of a reference."""
import pytest
import torch

from nanochat.data.tokenizer import load_tokenizer
from nanochat.model.config import GPTConfig
from nanochat.model.gpt import GPT
from nanochat.train.describe import describe_plan
from nanochat.train.flags import parse_flags
from nanochat.train.plan import make_plan
from tests.model.test_gpt import SHARED, TINY, build, some_ids


def test_a_model_with_gates_begins_as_the_plain_one():
    plain, gated = build(GPTConfig(**TINY)), build(GPTConfig(**{**TINY, "layer_gates": True}))
    new = GPT(gated.config, gated.kernels).init_weights(seed=1)
    missing = gated.load_state_dict(plain.state_dict(), strict=False).missing_keys
    assert missing == ["gate_map", "gate_scale"]
    gated.gate_map.data, gated.gate_scale.data = new.gate_map.data, new.gate_scale.data
    ids = some_ids(gated.config)
    assert torch.equal(gated(ids), plain(ids))


@pytest.mark.parametrize("layers, adding", [(1, [0]), (2, [1]), (3, [0, 2]), (4, [1, 3])])
def test_every_second_layer_adds_the_values_and_the_last_one_always(layers, adding):
    config = GPTConfig(**{**TINY, "n_layer": layers, **SHARED})
    assert [layer for layer, adds in enumerate(config.adds_values()) if adds] == adding
    assert build(config).value_table.shape == (61, 32)


def test_with_values_the_other_weights_begin_as_nanochats():
    model = GPT(GPTConfig(**{**TINY, "n_layer": 4, **SHARED}), kernels=None).init_weights(seed=1)
    plain = GPT(GPTConfig(**{**TINY, "n_layer": 4}), kernels=None).init_weights(seed=1)
    torch.testing.assert_close(model.mlp_in, 0.4 * plain.mlp_in)
    torch.testing.assert_close(model.wte, 0.8 * plain.wte)
    torch.testing.assert_close(model.resid_scale[[0, -1]], torch.tensor([1.15, 1.05]))
    torch.testing.assert_close(model.x0_scale[[0, -1]], torch.tensor([0.2, 0.05]))
    assert set(plain.resid_scale.tolist()) == {1.0} and torch.equal(plain.x0_scale, torch.full((4,), 0.1))


@pytest.mark.parametrize("flag, value, group, count", [
    ("--layer_gates", "on", "gates", 4 * 3 * 257),
    ("--value_embeddings", "shared", "value embeddings", 65536 * 256)])
def test_the_plan_counts_them_and_no_flops_of_theirs(flag, value, group, count):
    on, off = (make_plan(parse_flags(["--depth=4", f"{flag}={each}"]), 65536, "cpu", 1) for each in (value, "off"))
    assert on.parameters[group] == count and group not in off.parameters
    assert on.flops_per_token == off.flops_per_token and on.num_iterations == off.num_iterations
    assert f"{count:,} {group}" in describe_plan(on, load_tokenizer())[2]
