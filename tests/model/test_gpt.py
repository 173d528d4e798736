"""The model against an independent reference, and itself on every kernel."""
import math
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
import torch_xla

from nanochat.common import BadInput
from nanochat.infer.quantize import Int8GPT
from nanochat.kernels.choose import get_kernels
from nanochat.kernels.gpt_layer import How, layer_for_loop
from nanochat.kernels.sharded import Sharding
from nanochat.kernels.xla import PYTORCH_ATTENTION
from nanochat.model.config import GPTConfig
from nanochat.model.gpt import GPT
from nanochat.model.layers import IGNORE_INDEX, LayerOptions

# A model without gates and value embeddings, whose layers see everything: tests add what they are about.
PLAIN = dict(window_pattern="L", layer_gates=False, value_embeddings="off")
TINY = dict(vocab_size=61, max_seq_len=12, n_layer=3, n_embd=32, n_head=4, n_kv_head=4, **PLAIN)
SHARED = {"value_embeddings": "shared"}


def build(config, kernel="current", device_type="cpu", chunk_tokens=None, **kwargs):
    """A model in which no weight is at a special value such as zero."""
    kernels = get_kernels(kernel, device_type, chunk_tokens=chunk_tokens)
    model = GPT(config, kernels, **kwargs).init_weights(seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn(p.shape, generator=generator)
    return model


def assert_close(gradient, expected, name):
    torch.testing.assert_close(gradient, expected, atol=1e-5 * float(expected.abs().max()), rtol=1e-3,
                               msg=lambda message: name + message)


def some_ids(config, batch=2, seed=3):
    return torch.randint(config.vocab_size, (batch, config.max_seq_len), generator=torch.Generator().manual_seed(seed))


def reference_logits(model, ids):
    """The same network, written token by token and head by head, in double precision."""
    c, w = model.config, {name: p.double() for name, p in model.named_parameters()}

    def rms(x):
        return x / (x.square().mean(-1, keepdim=True) + torch.finfo(torch.float32).eps).sqrt()

    def rotate(x, t):  # x (head_dim,)
        half = c.head_dim // 2
        out = x.clone()
        for i in range(half):
            angle = t * 10000.0 ** (-2 * i / c.head_dim)
            out[i] = x[i] * math.cos(angle) + x[i + half] * math.sin(angle)
            out[i + half] = x[i + half] * math.cos(angle) - x[i] * math.sin(angle)
        return out

    def gate(layer, which, h):  # (T, 1)
        if not c.layer_gates:
            return 1
        return w["gate_scale"][layer, which] * (1 + torch.tanh(h @ w["gate_map"][layer, which] / 2))[:, None]

    rows = []
    for row in ids:
        x = x0 = rms(w["wte"][row])
        for layer, window in enumerate(c.windows()):
            x = w["resid_scale"][layer] * x + w["x0_scale"][layer] * x0
            h = rms(x)
            q, k, v = (h @ w[name][layer].T for name in ("attn_q", "attn_k", "attn_v"))
            if c.key_shift:
                moves = [i for i in range(k.shape[1]) if i % (c.head_dim // 2) >= math.ceil(c.head_dim / 4)]
                k[:, moves] = torch.cat([torch.zeros(1, len(moves)).double(), k[:-1, moves]])
            v = gate(layer, 0, h) * v
            if c.has_values and (c.n_layer - layer) % 2:
                v += w["value_table"][row]
            attended = torch.zeros_like(x)
            for head in range(c.n_head):
                mine = slice(head * c.head_dim, (head + 1) * c.head_dim)
                kv_head = head // (c.n_head // c.n_kv_head)
                shared = slice(kv_head * c.head_dim, (kv_head + 1) * c.head_dim)
                keys = torch.stack([rms(rotate(k[t, shared], t)) for t in range(len(row))])
                for t in range(len(row)):
                    first = max(0, t - window + 1) if window else 0
                    scores = keys[first:t + 1] @ rms(rotate(q[t, mine], t))
                    attended[t, mine] = torch.softmax(scores / math.sqrt(c.head_dim), 0) @ v[first:t + 1, shared]
            x = x + gate(layer, 1, h) * (attended @ w["attn_o"][layer].T)
            h = rms(x)
            x = x + gate(layer, 2, h) * (F.relu(h @ w["mlp_in"][layer].T).square() @ w["mlp_out"][layer].T)
        logits = rms(x) @ w["lm_head"].T
        rows.append(c.softcap * torch.tanh(logits / c.softcap))
    return torch.stack(rows)


@pytest.mark.parametrize("overrides", [{}, {"key_shift": False}, {"n_kv_head": 2},
                                       {"n_kv_head": 1, "window_pattern": "SSL", "short_window": 6},
                                       {"layer_gates": True},
                                       {"n_kv_head": 2, **SHARED}, {**SHARED, "layer_gates": True}])
def test_logits_and_gradients_equal_those_of_an_independent_reference(overrides):
    config = GPTConfig(**{**TINY, **overrides})
    model, ids = build(config), some_ids(config)
    logits, expected_logits = model(ids), reference_logits(model, ids)
    torch.testing.assert_close(logits.double(), expected_logits, atol=2e-5, rtol=1e-4)
    gradients, expected = (torch.autograd.grad(x.square().sum(), [*model.parameters()])
                           for x in (logits, expected_logits))
    for (name, _), found, exact in zip(model.named_parameters(), gradients, expected, strict=True):
        assert_close(found, exact, name)


KERNELS = ("current", "cpu"), ("chunked", "cpu"), ("chunked", "xla"), ("current", "xla"), ("flash", "xla")
MODELS = (15.0, "off"), (0.0, "shared"), (15.0, "shared")


@pytest.mark.parametrize("kernel, device_type, activation_checkpointing, softcap, values", [
    *((*kernel, "all", *MODELS[at % 3]) for at, kernel in enumerate(KERNELS)),
    *(pytest.param(*kernel, "none", *model, marks=[pytest.mark.slow] if at > 2 else [])
      for at, kernel in enumerate(KERNELS) for model in MODELS)])
def test_every_kernel_gives_the_same_losses_and_gradients(kernel, activation_checkpointing, device_type, softcap,
                                                          values):
    config = GPTConfig(vocab_size=61, max_seq_len=12, n_layer=3, n_embd=256, n_head=2, n_kv_head=1,
                       window_pattern="SL", short_window=6, softcap=softcap, key_shift=values != "off",
                       layer_gates=softcap == 0, value_embeddings=values)
    ids, targets = some_ids(config), some_ids(config, seed=5)
    targets[0, 3] = IGNORE_INDEX
    reference = build(config)
    losses = reference(ids, targets)
    losses.mean().backward()
    assert losses[0, 3] == 0
    chunk_tokens = 100 if activation_checkpointing == "none" else 8
    model = build(config, kernel, device_type, chunk_tokens, activation_checkpointing=activation_checkpointing)
    if device_type == "xla":
        model, ids, targets = model.to(torch_xla.device()), ids.to(torch_xla.device()), targets.to(torch_xla.device())
    model.create_main_grads()
    mean = model(ids, targets, reduction="mean")
    mean.backward()
    with torch.no_grad():
        found = model(ids, targets)
    torch_xla.sync()  # one program, where each fetch below would else be one
    assert mean.item() == pytest.approx(losses.mean().item(), rel=1e-5)
    torch.testing.assert_close(found.cpu(), losses, atol=1e-5, rtol=1e-5)
    for (name, p), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert_close(p.main_grad.cpu(), expected.grad, name)


@dataclass(frozen=True)
class MoreOptions(LayerOptions):
    """Those of a variant that only the definition of the layer knows."""
    novelty: bool = False


@pytest.mark.parametrize("kernel", ["chunked", "flash"])
def test_a_layer_that_no_kernel_knows_by_hand_has_the_same_gradients(kernel):
    config = GPTConfig(vocab_size=61, max_seq_len=12, n_layer=3, n_embd=256, n_head=2, n_kv_head=1,
                       window_pattern="SL", layer_gates=True, **SHARED)
    reference, ids = build(config), some_ids(config)
    reference(ids, ids, reduction="mean").backward()
    model = build(config, kernel, "xla").to(torch_xla.device())
    model.options = MoreOptions(config.head_dim, layer_gates=True, key_shift=True, novelty=True)
    model.create_main_grads()
    ids = ids.to(torch_xla.device())
    model(ids, ids, reduction="mean").backward()
    torch_xla.sync()
    for (name, p), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert_close(p.main_grad.cpu(), expected.grad, name)
    with pytest.raises(BadInput, match="--quantize=int8 .*--novelty"):
        Int8GPT(model)
    how = How(model.options, PYTORCH_ATTENTION)
    assert layer_for_loop(how).by_hand is None
    assert layer_for_loop(replace(how, options=replace(model.options, novelty=False))).by_hand
    with pytest.raises(BadInput, match="--mesh_tensor=2 .*--novelty: use --mesh_tensor=1"):
        layer_for_loop(replace(how, sharding=Sharding(tensor_groups=((0, 1),))))


def test_bfloat16_compute_stays_near_float32():
    config = GPTConfig(**TINY)
    ids = some_ids(config)
    exact, rounded = build(config)(ids), build(config, compute_dtype=torch.bfloat16)(ids)
    assert rounded.dtype == torch.float32
    assert (exact - rounded).abs().mean() < 0.05 * exact.abs().mean()


def test_a_new_model_predicts_almost_uniformly():
    config = GPTConfig(n_layer=2, vocab_size=500, max_seq_len=16)
    model = GPT(config, get_kernels("current", "cpu")).init_weights()
    ids = some_ids(config)
    assert model(ids, ids).mean().item() == pytest.approx(math.log(500), abs=0.01)


def test_depth_sets_everything_and_depth_16_has_the_known_size():
    config = GPTConfig(n_layer=16)
    assert (config.n_embd, config.n_head, config.head_dim) == (1024, 8, 128)
    with torch.device("meta"):
        model = GPT(config, kernels=None)
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    assert sizes["wte"] == sizes["lm_head"] == 65536 * 1024
    assert sum(n for name, n in sizes.items() if name.startswith(("attn", "mlp"))) == 16 * 12 * 1024**2
    assert config.windows() == ([256] * 3 + [None]) * 4
    assert GPTConfig(n_layer=4, window_pattern="SL", max_seq_len=600).windows() == [256, None] * 2  # whole 128s
    assert GPTConfig(n_layer=4, window_pattern="S", max_seq_len=128).windows() == [None] * 4
    assert GPTConfig(n_layer=4, window_pattern="S", short_window=100).windows() == [100] * 3 + [None]
    assert GPTConfig(n_layer=5).n_embd == 384  # 320 is not a multiple of 128
    assert GPTConfig(n_layer=4, n_embd=64, n_head=2).head_dim == 32


@pytest.mark.parametrize("overrides, words", [
    ({"window_pattern": "SXL"}, "--window_pattern=SXL"), ({"window_pattern": ""}, "--window_pattern="),
    ({"value_embeddings": "some"}, "--value_embeddings=some"),
    ({"n_kv_head": 3}, "--num_kv_heads=3"), ({"n_head": 5, "n_kv_head": 5}, "5 heads"),
])
def test_impossible_shapes_are_refused_with_the_value(overrides, words):
    with pytest.raises(BadInput, match=words):
        GPTConfig(**{**TINY, **overrides})
