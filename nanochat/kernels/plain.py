"""Kernels written with PyTorch's own operations: attention, cross-entropy, embedding, recomputation."""
import torch
import torch.nn.functional as F

from nanochat.kernels import distillation
from nanochat.kernels.sharded import WHOLE
from nanochat.model.layers import IGNORE_INDEX, causal_mask, softcapped

CHUNK_TOKENS = 1024  # tokens whose logits chunked_cross_entropy holds at a time: 1024 × 65,536 × 4 bytes = 256 MiB


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


# -----------------------------------------------------------------------------
# Cross-entropy, see layers.Kernels


def full_cross_entropy(hidden, head, targets, softcap):
    """Losses with all logits in memory at once."""
    logits = softcapped(F.linear(hidden, head.to(hidden.dtype)).float(), softcap)  # (N, V)
    return F.cross_entropy(logits, targets.long(), ignore_index=IGNORE_INDEX, reduction="none")


def chunked_cross_entropy(hidden, head, targets, softcap):
    """Losses with the logits of CHUNK_TOKENS tokens in memory at a time."""
    return _ChunkedCrossEntropy.apply(hidden, head, targets, softcap)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """The backward pass computes each chunk's logits again from the saved log-sum-exp:
    d logits = (softmax - one-hot) × d loss × (1 - (logits / softcap)²)."""

    @staticmethod
    def forward(ctx, hidden, head, targets, softcap):
        head_cast, targets = head.to(hidden.dtype), targets.long()
        losses, log_sums = [], []
        for start in range(0, hidden.size(0), CHUNK_TOKENS):
            chunk, chunk_targets = hidden[start:start + CHUNK_TOKENS], targets[start:start + CHUNK_TOKENS]
            logits = softcapped(F.linear(chunk, head_cast).float(), softcap)
            log_sum = torch.logsumexp(logits, dim=-1)
            picked = logits.gather(1, chunk_targets.clamp(min=0)[:, None])[:, 0]
            losses.append(torch.where(chunk_targets == IGNORE_INDEX, 0.0, log_sum - picked))
            log_sums.append(log_sum)
        ctx.save_for_backward(hidden, head, targets, torch.cat(log_sums))
        ctx.softcap = softcap
        return torch.cat(losses)

    @staticmethod
    def backward(ctx, d_losses):
        hidden, head, targets, log_sums = ctx.saved_tensors
        head_cast = head.to(hidden.dtype)
        classes = torch.arange(head.size(0), device=head.device)
        d_losses = torch.where(targets == IGNORE_INDEX, 0.0, d_losses)
        d_hidden, d_head = [], torch.zeros_like(head)
        for start in range(0, hidden.size(0), CHUNK_TOKENS):
            tokens = slice(start, start + CHUNK_TOKENS)
            chunk = hidden[tokens]
            logits = softcapped(F.linear(chunk, head_cast).float(), ctx.softcap)
            probabilities = torch.exp(logits - log_sums[tokens, None])
            d_logits = (probabilities - (classes == targets[tokens, None]).float()) * d_losses[tokens, None]
            if ctx.softcap:
                d_logits = d_logits * (1 - (logits / ctx.softcap) ** 2)
            d_logits = d_logits.to(hidden.dtype)
            d_hidden.append(d_logits @ head_cast)
            d_head = d_head + (d_logits.t() @ chunk).float()
        return torch.cat(d_hidden), d_head.to(head.dtype), None, None


def cut_cross_entropy(hidden, head, targets, softcap):
    """Losses by the package cut-cross-entropy, on CUDA."""
    from cut_cross_entropy import linear_cross_entropy
    return linear_cross_entropy(hidden, head.to(hidden.dtype), targets.long(), ignore_index=IGNORE_INDEX,
                                softcap=softcap or None, reduction="none")


def mean_distillation(hidden, head, targets, softcap, teaching):
    """See layers.Kernels. It holds the logits of CHUNK_TOKENS tokens of student and teacher."""
    return distillation.MeanLoss.apply(hidden, head, targets, softcap, teaching, lambda x: x.split(CHUNK_TOKENS),
                                       distillation.run_chunks, False, WHOLE)


# -----------------------------------------------------------------------------
# Recomputation, see layers.Kernels


def recompute(function, *args):
    """By PyTorch's activation checkpointing."""
    import torch.utils.checkpoint
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)


def recompute_on_xla(function, *args):
    """By torch_xla's activation checkpointing: PyTorch's own saves nothing on XLA, which merges the second computation
    with the first; torch_xla's puts an optimization barrier between the two."""
    from torch_xla.utils.checkpoint import checkpoint
    return checkpoint(function, *args)
