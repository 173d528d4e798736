"""--layer_gates. tests/model/test_gpt.py compares their logits with a reference,
their gradients on every kernel, and their cached generation."""
import torch

from nanochat.infer.quantize import Int8GPT
from nanochat.model.config import GPTConfig
from nanochat.model.gpt import GPT
from nanochat.train.describe import describe_plan
from nanochat.train.flags import parse_flags
from nanochat.train.plan import make_plan
from tests.model.test_gpt import TINY, build, some_ids

GATED = GPTConfig(**{**TINY, "layer_gates": True})


def test_a_model_with_gates_begins_as_the_plain_one():
    plain, gated = build(GPTConfig(**TINY)), build(GATED)
    new = GPT(GATED, gated.kernels).init_weights(seed=1)
    missing = gated.load_state_dict(plain.state_dict(), strict=False).missing_keys
    assert missing == ["gate_map", "gate_scale"]
    ids = some_ids(GATED)
    assert not torch.equal(gated(ids), plain(ids))
    gated.gate_map.data, gated.gate_scale.data = new.gate_map.data, new.gate_scale.data
    assert torch.equal(gated(ids), plain(ids))


def test_no_gradient_comes_from_the_future():
    model, ids = build(GATED), some_ids(GATED)
    embedded = []

    def embedding(*arguments):
        embedded.append(plain_embedding(*arguments).detach().requires_grad_())
        return embedded[0]

    plain_embedding = model.kernels.embedding
    object.__setattr__(model.kernels, "embedding", embedding)
    model(ids)[:, 5].square().sum().backward()
    found = embedded[0].grad.abs().sum(-1)  # (B, T)
    assert (found[:, :6] > 0).all() and (found[:, 6:] == 0).all()


def test_weights_of_8_bits_have_the_gates_too():
    model, ids = build(GATED), some_ids(GATED)
    exact, rounded = model(ids), Int8GPT(model)(ids)
    model.gate_map.data.zero_()
    model.gate_scale.data.fill_(1)
    assert (rounded - exact).abs().mean() < 0.1 * (model(ids) - exact).abs().mean()


def test_the_plan_counts_the_gates():
    plan = make_plan(parse_flags(["--depth=4", "--layer_gates=on"]), 65536, "cpu", 1)
    assert plan.parameters["gates"] == 4 * 3 * 257
    tokenizer = type("Tokenizer", (), {"n_vocab": 65536, "sha256": "0" * 64, "losses": ""})
    assert "3,084 gates" in describe_plan(plan, tokenizer)[2]
