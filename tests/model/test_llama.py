"""The Llama family computes what transformers does, and its layer is one layer on every kernel."""
from types import SimpleNamespace

import pytest
import torch
import torch_xla

from nanochat.common import BadInput
from nanochat.device.ranks import Dist
from nanochat.export.llama import weights
from nanochat.infer.readers import BLOCK, KVCache, Reader, StaticReader
from nanochat.kernels.choose import get_kernels
from nanochat.model.llama import LlamaConfig
from nanochat.model.models import config_from_flags, settled
from nanochat.model.weights import shapes

SMALL = {"vocab_size": 40, "n_layer": 3, "max_seq_len": 96, "n_embd": 24, "n_head": 4, "n_kv_head": 2, "head_dim": 10,
         "mlp_dim": 40}
VARIANTS = {"llama": {}, "own head": {"tied_head": False, "rope_theta": 5e5},
            "qwen2": {"qkv_bias": True, "norm_eps": 1e-6}, "qwen3": {"qk_norm": True, "tied_head": False}}


@pytest.fixture(params=VARIANTS)
def config(request):
    return LlamaConfig(**SMALL, **VARIANTS[request.param])


def build(config, kernel="current", device_type="cpu", **options):
    """A model whose every weight is random: with norms of 1 and biases of 0, a missing one would not show."""
    model = config.new_model(get_kernels(kernel, device_type), **options)
    generator = torch.Generator().manual_seed(1)
    for name, weight in model.named_parameters():
        start = 1.0 if name.endswith("_norm") else 0.0
        weight.data.copy_(start + 0.2 * torch.randn(weight.shape, generator=generator))
    return model


def some_ids(length=70):
    return torch.randint(SMALL["vocab_size"], (2, length), generator=torch.Generator().manual_seed(2))


def of_transformers(model):
    transformers = pytest.importorskip("transformers")
    config = model.config
    kind = "Qwen2" if config.qkv_bias else "Qwen3" if config.qk_norm else "Llama"
    theirs = getattr(transformers, f"{kind}Config")(
        vocab_size=config.vocab_size, hidden_size=config.n_embd, intermediate_size=config.mlp_dim,
        num_hidden_layers=config.n_layer, num_attention_heads=config.n_head, num_key_value_heads=config.n_kv_head,
        head_dim=config.head_dim, rms_norm_eps=config.norm_eps, tie_word_embeddings=config.tied_head,
        max_position_embeddings=config.max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta})
    made = getattr(transformers, f"{kind}ForCausalLM")(theirs).eval()
    state = weights(model, SimpleNamespace(source={})) | {"lm_head.weight": model.head}
    made.load_state_dict(state)
    return made


def test_logits_and_gradients_are_those_of_transformers_also_of_a_tied_head(config):
    model, ids = build(config), some_ids(96)
    theirs = of_transformers(model)
    of_theirs = theirs(ids, labels=ids)
    expected = of_theirs.logits
    torch.testing.assert_close(model(ids), expected, atol=1e-5 * float(expected.detach().abs().max()), rtol=1e-5)
    model.create_main_grads()
    model(ids[:, :-1], ids[:, 1:], "mean").backward()
    of_theirs.loss.backward()
    torch.testing.assert_close(model.wte.grad, theirs.model.embed_tokens.weight.grad, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(model.attn_k.grad[1], theirs.model.layers[1].self_attn.k_proj.weight.grad, atol=1e-6,
                               rtol=1e-4)
    assert all(p.grad.isfinite().all() and p.grad.abs().sum() > 0 for p in model.parameters())


def test_the_loop_on_xla_gives_the_gradients_of_the_layers_one_after_another(config):
    """The loop computes each layer again, whatever `recompute` is."""
    ids = some_ids(32)
    found = []
    for kernel, device_type, recompute in (("current", "cpu", "none"), ("current", "cpu", "all"),
                                           ("chunked", "xla", "none"), ("flash", "xla", "all")):
        model = build(config, kernel, device_type, activation_checkpointing=recompute)
        device = "cpu" if device_type == "cpu" else torch_xla.device()
        model = model.to(device)
        model.create_main_grads()
        here = ids.to(device)
        loss = model(here[:, :-1], here[:, 1:], "mean")
        loss.backward()
        torch_xla.sync()
        found.append({"loss": loss.detach().cpu(), **{name: p.main_grad.cpu() for name, p in model.named_parameters()}})
    for name, expected in found[0].items():
        for other in found[1:]:
            torch.testing.assert_close(other[name], expected, atol=1e-5 * float(expected.abs().max()), rtol=1e-4)


@torch.no_grad()
def test_every_cache_gives_the_logits_of_the_whole_text(config):
    model = build(config)
    ids = some_ids(BLOCK + 6)[0].tolist()
    expected = model(torch.tensor([ids]))[0]
    torch.testing.assert_close(Reader(model, "cpu").read(ids, len(ids)), expected, atol=1e-5, rtol=1e-4)
    cache = KVCache(config, 1, config.max_seq_len, torch.float32, "cpu")
    hidden = model.hidden(torch.tensor([ids]), cache, torch.arange(len(ids)))
    torch.testing.assert_close(model.logits(hidden)[0], expected, atol=1e-5, rtol=1e-4)
    on_xla = build(config, "current", "xla").to(torch_xla.device())
    reader = StaticReader(on_xla, Dist("xla", torch_xla.device()), 2)
    reader.prefill(ids[:-2])
    reader.decode([ids[-2]] * 2)
    torch.testing.assert_close(reader.decode([ids[-1]] * 2)[0], expected[-1], atol=1e-4, rtol=1e-3)


def test_settled_flags_make_the_same_config_again(config):
    assert config_from_flags(settled(config), vocab_size=7) == config


def test_sizes_follow_from_the_depth():
    config = config_from_flags({"arch": "llama", "depth": 8, "head_dim": None}, vocab_size=100)
    assert (config.n_embd, config.n_head, config.n_kv_head, config.mlp_dim) == (512, 8, 8, 1408)
    assert "lm_head" not in shapes(config)


@pytest.mark.parametrize("given, words", [
    ({"key_shift": "on"}, "--key_shift=on is not for --arch=llama: leave it out"),
    ({"head_dim": 5}, "--head_dim=5"),
    ({"num_heads": 4, "num_kv_heads": 3}, "--num_kv_heads=3"),
    ({"max_positions": 16, "max_seq_len": 32}, "--max_seq_len=32 is more than the 16 positions"),
])
def test_models_that_cannot_be_are_refused(given, words):
    with pytest.raises(BadInput, match=words):
        config_from_flags({"arch": "llama", **given}, vocab_size=100)
    with pytest.raises(BadInput, match="--head_dim=64 is not for --arch=gpt"):
        config_from_flags({"head_dim": 64}, vocab_size=100)
