"""A tiny GPT with many options on: code with its own copy of the model's mathematics compares itself with it."""
from dataclasses import fields

import torch

from nanochat.common import BadInput
from nanochat.model.config import GPTConfig
from nanochat.model.gpt import GPT
from nanochat.model.layers import LayerOptions

IDS = torch.tensor([[1, 4, 2, 6, 0, 2, 1, 5]])  # a text for it


@torch.no_grad()
def tiny_gpt(kernels, known):
    """Returns the GPT. Its weights look random and are the same on every machine. known: the names of the LayerOptions
    that the copy computes; it refuses the others elsewhere, so they are off here."""
    options = {field.name: False for field in fields(LayerOptions) if field.name != "head_dim"}
    options |= {name: True for name in ("key_shift", "layer_gates") if name in known}
    config = GPTConfig(vocab_size=7, max_seq_len=IDS.size(1), n_layer=3, n_embd=8, n_head=2, n_kv_head=1,
                       window_pattern="SL", short_window=3, value_embeddings="own", softcap=1.0, rotary_base=10_000.0,
                       **options)
    model = GPT(config, kernels).requires_grad_(False)
    for p in model.parameters():
        p.copy_(torch.arange(1.0, p.numel() + 1).mul_(1.7).sin_().view_as(p))
    return model


def require_close(found, expected, refusal):
    """Raises BadInput(refusal) unless the two lists of tensors are equal up to rounding."""
    for one, other in zip(found, expected, strict=True):
        if not torch.allclose(one, other, rtol=1e-3, atol=1e-3 * float(other.abs().max())):
            raise BadInput(refusal)
