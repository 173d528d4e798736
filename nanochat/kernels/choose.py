"""Which attention, loss and loop over the layers the model uses: chosen by name, with no XLA touched at import.

| name      | layers   | attention           | cross-entropy                              | runs on           |
|-----------|----------|---------------------|--------------------------------------------|-------------------|
| `current` | unrolled | PyTorch's           | PyTorch's                                  | everywhere        |
| `chunked` | a loop*  | PyTorch's           | over chunks of rows: never all the logits  | everywhere        |
| `flash`   | a loop   | pallas_attention.py | over chunks of rows                        | TPU with jax      |
| `cce`     | unrolled | PyTorch's           | cut cross-entropy, from its package        | CUDA              |

* on XLA, see layer_stack.py. `auto` is `flash` on a TPU if jax is there, and else `current`.
"""
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from nanochat.common import BadInput

IGNORE_INDEX = -1  # a target with this value has loss 0
CHUNK_ROWS = 1024  # rows of logits that `chunked` holds at a time off XLA: 1024 × 65,536 × 4 bytes = 256 MiB
XLA_CHUNK_ROWS = 8192  # and on XLA, in bf16: 8192 × 65,536 × 2 bytes = 1 GiB


@dataclass(frozen=True)
class Kernels:
    """What GPT calls.

    attention(q, k, v, window): q (B, H, T, D), k and v (B, H_kv, T, D), causal, each position sees itself and the
        `window` - 1 positions before it (window 0: all of them) -> (B, H, T, D)
    cross_entropy(hidden, head, targets, softcap): hidden (N, C), head (V, C), targets (N,) -> losses (N,), fp32, nats
    mean_cross_entropy: the mean of these losses, a scalar; all that training needs, where cross_entropy may have no
        gradient
    embedding(ids, table, dtype): ids (B, T), table (V, C) -> (B, T, C)
    checkpoint(function, *args): calls it, and again in the backward pass instead of keeping its activations
    run_layers(x, stacks, windows, rotary, recompute): all layers at once, see layer_stack.py; None: one after the other
    """
    name: str
    attention: Callable
    cross_entropy: Callable
    mean_cross_entropy: Callable
    embedding: Callable
    checkpoint: Callable
    run_layers: Callable | None = None


def available_kernels(device_type):
    """Names of the kernels that run on `device_type` on this machine."""
    names = ["current", "chunked"]
    if device_type in ("tpu", "xla") and importlib.util.find_spec("jax"):
        names.append("flash")
    if device_type == "cuda" and importlib.util.find_spec("cut_cross_entropy"):
        names.append("cce")
    return names


def get_kernels(name, device_type):
    """The Kernels called `name`. Raises BadInput where `device_type` cannot run them."""
    available = available_kernels(device_type)
    if name == "auto":
        name = "flash" if device_type == "tpu" and "flash" in available else "current"
    if name not in available:
        raise BadInput(f"--kernel={name} does not run here (device type {device_type}): "
                       f"choose {' or '.join(available)}")
    if device_type in ("tpu", "xla") and name in ("chunked", "flash"):
        from nanochat.kernels import xla as xla_kernels
        return xla_kernels.get_kernels(name, interpret=device_type == "xla")
    cross_entropy = {"chunked": chunked_cross_entropy, "cce": cut_cross_entropy}.get(name, full_cross_entropy)
    checkpoint = _xla_checkpoint if device_type in ("tpu", "xla") else _torch_checkpoint
    return Kernels(name, sdpa_attention, cross_entropy, partial(_mean, cross_entropy), embedding, checkpoint)


def embedding(ids, table, dtype):
    return F.embedding(ids, table).to(dtype)


def _mean(cross_entropy, *arguments):
    return cross_entropy(*arguments).mean()


# -----------------------------------------------------------------------------
# Attention


def causal_mask(query_positions, key_positions, window):
    """Boolean (T_q, T_k): True where a query may look. `window` as in Kernels.attention."""
    distance = query_positions[:, None] - key_positions[None, :]
    mask = distance >= 0
    return mask & (distance < window) if window else mask


def sdpa_attention(q, k, v, window):
    grouped = q.size(1) != k.size(1)
    if not window or window >= q.size(2):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    positions = torch.arange(q.size(2), device=q.device)
    mask = causal_mask(positions, positions, window)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)


# -----------------------------------------------------------------------------
# Cross-entropy


def softcapped(logits, softcap):
    """softcap × tanh(logits / softcap): logits stay within ±softcap (Gemma 2, arXiv 2408.00118). 0 turns it off."""
    return softcap * torch.tanh(logits / softcap) if softcap else logits


def full_cross_entropy(hidden, head, targets, softcap):
    logits = softcapped(F.linear(hidden, head.to(hidden.dtype)).float(), softcap)  # (N, V)
    return F.cross_entropy(logits, targets.long(), ignore_index=IGNORE_INDEX, reduction="none")


def chunked_cross_entropy(hidden, head, targets, softcap):
    return _ChunkedCrossEntropy.apply(hidden, head, targets, softcap)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Cross-entropy over chunks of rows; the backward pass computes each chunk's logits again from the saved
    log-sum-exp: d logits = (softmax - one-hot) × d loss × (1 - (logits / softcap)²)."""

    @staticmethod
    def forward(ctx, hidden, head, targets, softcap):
        head_cast, targets = head.to(hidden.dtype), targets.long()
        losses, log_sums = [], []
        for start in range(0, hidden.size(0), CHUNK_ROWS):
            chunk, chunk_targets = hidden[start:start + CHUNK_ROWS], targets[start:start + CHUNK_ROWS]
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
        for start in range(0, hidden.size(0), CHUNK_ROWS):
            rows = slice(start, start + CHUNK_ROWS)
            chunk = hidden[rows]
            logits = softcapped(F.linear(chunk, head_cast).float(), ctx.softcap)
            probabilities = torch.exp(logits - log_sums[rows, None])
            d_logits = (probabilities - (classes == targets[rows, None]).float()) * d_losses[rows, None]
            if ctx.softcap:
                d_logits = d_logits * (1 - (logits / ctx.softcap) ** 2)
            d_logits = d_logits.to(hidden.dtype)
            d_hidden.append(d_logits @ head_cast)
            d_head = d_head + (d_logits.t() @ chunk).float()
        return torch.cat(d_hidden), d_head.to(head.dtype), None, None


def cut_cross_entropy(hidden, head, targets, softcap):
    from cut_cross_entropy import linear_cross_entropy
    return linear_cross_entropy(hidden, head.to(hidden.dtype), targets.long(), ignore_index=IGNORE_INDEX,
                                softcap=softcap or None, reduction="none")


# -----------------------------------------------------------------------------
# Activation checkpointing


def _torch_checkpoint(function, *args):
    import torch.utils.checkpoint
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)


def _xla_checkpoint(function, *args):
    # PyTorch's own saves nothing on XLA, which merges the recomputation with the first computation; torch_xla's puts
    # an optimization barrier between them.
    from torch_xla.utils.checkpoint import checkpoint
    return checkpoint(function, *args)
