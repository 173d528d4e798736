"""Which attention and which cross-entropy the model uses: chosen by name, with no XLA touched at import.

| name      | attention                       | cross-entropy                                | runs on      |
|-----------|---------------------------------|----------------------------------------------|--------------|
| `current` | PyTorch's                       | PyTorch's                                    | everywhere   |
| `chunked` | PyTorch's                       | over chunks of rows: never all the logits    | everywhere   |
| `flash`   | Pallas flash attention          | PyTorch's                                    | TPU with jax |
| `cce`     | PyTorch's                       | cut cross-entropy, from its package          | CUDA         |
"""
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from nanochat.common import BadInput

IGNORE_INDEX = -1  # a target with this value has loss 0
CHUNK_ROWS = 1024  # rows of logits that `chunked` holds at a time: 1024 × 65,536 × 4 bytes = 256 MiB


@dataclass(frozen=True)
class Kernels:
    """What GPT calls.

    attention(q, k, v, window): q (B, H, T, D), k and v (B, H_kv, T, D), causal, each position sees itself and the
        `window` - 1 positions before it (window 0: all of them) -> (B, H, T, D)
    cross_entropy(hidden, head, targets, softcap): hidden (N, C), head (V, C), targets (N,) -> losses (N,), fp32, nats
    checkpoint(function, *args): calls it, and again in the backward pass instead of keeping its activations
    """
    name: str
    attention: Callable
    cross_entropy: Callable
    checkpoint: Callable


def available_kernels(device_type):
    """Names of the kernels that run on `device_type` on this machine, `current` first."""
    names = ["current", "chunked"]
    if device_type == "tpu" and importlib.util.find_spec("jax"):
        names.append("flash")
    if device_type == "cuda" and importlib.util.find_spec("cut_cross_entropy"):
        names.append("cce")
    return names


def get_kernels(name, device_type):
    """The Kernels called `name`; "auto" is `current`. Raises BadInput where `device_type` cannot run them."""
    name = "current" if name == "auto" else name
    available = available_kernels(device_type)
    if name not in available:
        raise BadInput(f"--kernel={name} does not run here (device type {device_type}): "
                       f"choose {' or '.join(available)}")
    attention = flash_attention if name == "flash" else sdpa_attention
    cross_entropy = {"chunked": chunked_cross_entropy, "cce": cut_cross_entropy}.get(name, full_cross_entropy)
    if device_type in ("tpu", "xla"):
        return Kernels(name, attention, cross_entropy, _xla_checkpoint)
    return Kernels(name, attention, cross_entropy, _torch_checkpoint)


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


def flash_attention(q, k, v, window):
    if window and window < q.size(2):
        raise BadInput("--kernel=flash has no attention windows: use --window_pattern=L or --kernel=current")
    _pin_mosaic_version()
    from torch_xla.experimental.custom_kernel import flash_attention as pallas_flash_attention
    groups = q.size(1) // k.size(1)
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    return pallas_flash_attention(q, k, v, causal=True, sm_scale=q.size(-1) ** -0.5)


def _pin_mosaic_version():
    """jaxlib 0.7.1 writes Pallas kernels in Mosaic version 8, libtpu 0.0.21 reads 7 (pytorch/xla issue 9614)."""
    import jax._src.tpu_custom_call as tpu_custom_call
    tpu_custom_call.get_ir_version = lambda *args, **kwargs: 7


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
        losses, log_sums, previous = [], [], None
        for start in range(0, hidden.size(0), CHUNK_ROWS):
            chunk, chunk_targets = hidden[start:start + CHUNK_ROWS], targets[start:start + CHUNK_ROWS]
            logits = softcapped(F.linear(_after(previous, chunk), head_cast).float(), softcap)
            log_sum = torch.logsumexp(logits, dim=-1)
            picked = logits.gather(1, chunk_targets.clamp(min=0)[:, None])[:, 0]
            losses.append(torch.where(chunk_targets == IGNORE_INDEX, 0.0, log_sum - picked))
            log_sums.append(log_sum)
            previous = log_sum
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
            chunk = _after(d_head if start else None, hidden[rows])
            logits = softcapped(F.linear(chunk, head_cast).float(), ctx.softcap)
            probabilities = torch.exp(logits - log_sums[rows, None])
            d_logits = (probabilities - (classes == targets[rows, None]).float()) * d_losses[rows, None]
            if ctx.softcap:
                d_logits = d_logits * (1 - (logits / ctx.softcap) ** 2)
            d_logits = d_logits.to(hidden.dtype)
            d_hidden.append(d_logits @ head_cast)
            d_head = d_head + (d_logits.t() @ chunk).float()
        return torch.cat(d_hidden), d_head.to(head.dtype), None, None


def _after(previous, tensor):
    """`tensor`, computed on only once `previous` is there: without it XLA runs all chunks at once, and holds them."""
    if previous is None or tensor.device.type != "xla":
        return tensor
    import torch_xla.core.xla_model as xm
    barriered = [tensor.clone(), previous.clone()]
    xm.optimization_barrier_(barriered)
    return barriered[0]


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
