"""A tiny GPT with many options on: code with its own copy of the model's mathematics refuses to run once this GPT
computes something else than the copy."""
from dataclasses import fields

import torch

from nanochat.common import BadInput
from nanochat.model.config import GPTConfig
from nanochat.model.gpt import GPT
from nanochat.model.layers import LayerOptions

IDS = torch.tensor([[1, 4, 2, 6, 0, 2, 1, 5]])  # a text for it
# Its last logits when the tests last found that the layer by hand (tests/kernels/test_layer_loop.py) and the files for
# transformers (tests/export) compute what the GPT does.
LOGITS = torch.tensor([0.200698, -0.442182, -0.597668, -0.226708, 0.424689, 0.601004, 0.252034])


@torch.no_grad()
def tiny_gpt(kernels):
    """Returns the GPT. Its weights look random and are the same on every machine. LayerOptions that not all copies know
    are off: these copies refuse them elsewhere."""
    options = {field.name: False for field in fields(LayerOptions) if field.name != "head_dim"}
    options |= {"key_shift": True, "layer_gates": True}
    config = GPTConfig(vocab_size=7, max_seq_len=IDS.size(1), n_layer=3, n_embd=8, n_head=2, n_kv_head=1,
                       window_pattern="SL", short_window=3, value_embeddings="shared", softcap=1.0,
                       rotary_base=10_000.0, **options)
    model = GPT(config, kernels).requires_grad_(False)
    for p in model.parameters():
        p.copy_(torch.arange(1.0, p.numel() + 1).mul_(1.7).sin_().view_as(p))
    return model


def require_unchanged(kernels, refusal):
    """Raises BadInput(refusal) if the GPT, with these Kernels on the CPU, computes something else than LOGITS."""
    require_close(tiny_gpt(kernels)(IDS)[0, -1], LOGITS, refusal)


def require_close(found, expected, refusal):
    """Raises BadInput(refusal) unless the two tensors are equal up to rounding."""
    if not torch.allclose(found, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max())):
        raise BadInput(refusal)
