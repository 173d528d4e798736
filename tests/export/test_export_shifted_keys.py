"""Shifted keys in the exported model: the caches, masks and compiled programs of transformers."""
import pytest
import torch

pytest.importorskip("transformers")


@pytest.fixture
def shifted():
    """A model of transformers with shifted keys and windows, ids for it, and their logits."""
    from nanochat.export import modeling_nanochat_scaled as code
    torch.manual_seed(0)
    model = code.ScaledNanoChatForCausalLM(code.ScaledNanoChatConfig(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, key_shift=True, sliding_window=4,
        layer_types=["sliding_attention", "full_attention"])).eval().requires_grad_(False)
    ids = torch.randint(32, (1, 16))
    return model, ids, model(ids, use_cache=False).logits


def test_shifted_keys_need_a_cache_and_positions_that_are_understood(shifted):
    from transformers import QuantizedCache
    model, ids, logits = shifted
    mask = torch.ones(16, 16, dtype=torch.bool).tril()[None, None]
    with pytest.raises(ValueError, match="give position_ids, too"):
        model(ids, attention_mask=mask)
    with pytest.raises(ValueError, match="do not work with continuous batching"):
        model(ids, cache=object())
    model.config.layer_types = ["full_attention"] * 2
    cache = QuantizedCache(backend="fp8", config=model.config)
    with pytest.raises(ValueError, match="work with a dynamic or a static cache"):
        for part in ids.split(8, dim=1):
            model(part, past_key_values=cache)


def test_a_mask_may_be_as_long_as_its_static_cache(shifted):
    from transformers import StaticCache
    model, ids, logits = shifted
    cache, found = StaticCache(config=model.config, max_cache_len=16), []
    for start, end in ((0, 3), (3, 4), (4, 9), (9, 16)):
        mask = (torch.arange(16) < end)[None].long()
        found.append(model(ids[:, start:end], attention_mask=mask, past_key_values=cache).logits)
    torch.testing.assert_close(torch.cat(found, dim=1), logits, atol=1e-5, rtol=0)


@torch.no_grad()
@torch._dynamo.config.patch(automatic_dynamic_shapes=True)  # which torch_xla turns off
def test_a_static_cache_compiles_few_programs(shifted):
    from transformers import StaticCache
    model, ids, logits = shifted
    programs, cache = [], StaticCache(config=model.config, max_cache_len=16)
    compiled = torch.compile(model.forward, backend=lambda module, _: programs.append(module) or module.forward)
    found = []
    for end, count, forward in [(3, 3, model)] + [(end, 1, compiled) for end in range(4, 17)]:
        inputs = model.prepare_inputs_for_generation(
            ids[:, :end], next_sequence_length=count, past_key_values=cache, use_cache=True,
            attention_mask=torch.ones(1, end, dtype=torch.long), position_ids=torch.arange(end)[None])
        found.append(forward(**inputs).logits)
    torch.testing.assert_close(torch.cat(found, dim=1), logits, atol=1e-5, rtol=0)
    assert len(programs) <= 4  # for a window that is not full, that becomes full, and that is
