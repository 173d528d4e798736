"""Kernels written with PyTorch's own operations: attention, embedding, recomputation. loss.py has the losses."""
import torch
import torch.nn.functional as F

from nanochat.model.layers import causal_mask


def embedding(ids, table, dtype):
    """See layers.Kernels."""
    return F.embedding(ids, table).to(dtype)


def attention(q, k, v, window):
    """See layers.Kernels. The window may also be an int32 scalar tensor."""
    grouped = q.size(1) != k.size(1)
    if window is None or not torch.is_tensor(window) and window >= q.size(2):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    positions = torch.arange(q.size(2), device=q.device)
    mask = causal_mask(positions, positions, window)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)


def recompute(function, *args):
    """See layers.Kernels: PyTorch's activation checkpointing."""
    import torch.utils.checkpoint
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)


def recompute_on_xla(function, *args):
    """torch_xla's activation checkpointing. PyTorch's saves nothing on XLA, which merges the second computation with
    the first; torch_xla's puts an optimization barrier between the two."""
    from torch_xla.utils.checkpoint import checkpoint
    return checkpoint(function, *args)
