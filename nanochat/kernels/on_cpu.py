"""Attention and loss for training on a CPU, where memory is slow beside the products.

Both work on blocks that stay in the cache, and have backward passes of their own, which read each block few times.
scripts.bench train compares them with PyTorch's.
"""
import torch
from torch.autograd.function import once_differentiable

from nanochat.model.layers import IGNORE_INDEX, causal_mask

BLOCK_QUERIES = 128  # queries whose scores are computed together
CHUNK_TOKENS = 1024  # tokens for which the loss adds to the head's gradient at once
BLOCK_LOGITS = 2**20  # logits that the loss computes at a time, 4 MiB
BLOCK_TOKENS = 64  # but it takes so many tokens at least: products of fewer are slow


def attention(q, k, v, window):
    """See layers.Kernels. Scores are fp32, whatever the dtype of q."""
    group = q.size(1) // k.size(1)
    if group > 1:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    return _Attention.apply(q, k, v, window)


class _Attention(torch.autograd.Function):
    """The backward pass computes the probabilities again from the saved log-sum-exp, block by block, and
    d scores = probabilities × (d probabilities - sum of probabilities × d probabilities)."""

    @staticmethod
    def forward(ctx, q, k, v, window):
        shape, dtype = q.shape, q.dtype
        q, k, v = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
        q_scaled, k_whole = q.float() * shape[-1]**-0.5, k.float()
        out, log_sums = torch.empty_like(q), torch.empty(*q.shape[:2], 1)
        for block, seen, bias in _blocks(shape[2], window):
            scores = torch.bmm(q_scaled[:, block], k_whole[:, seen].transpose(1, 2)).add_(bias)
            highest = scores.amax(-1, keepdim=True)
            total = scores.sub_(highest).exp_().sum(-1, keepdim=True)
            out[:, block] = torch.bmm(scores.to(dtype), v[:, seen]) / total
            log_sums[:, block] = total.log_().add_(highest)
        ctx.save_for_backward(q, k, v, log_sums)
        ctx.shape, ctx.window = shape, window
        return out.view(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):
        q, k, v, log_sums = ctx.saved_tensors
        scale, d_out = ctx.shape[-1]**-0.5, d_out.reshape(q.shape)
        q_scaled, k_whole, v_whole, d_out_whole = q.float() * scale, k.float(), v.float(), d_out.float()
        d_q, d_k, d_v = torch.empty_like(q), torch.zeros_like(k_whole), torch.zeros_like(k_whole)
        for block, seen, bias in _blocks(q.size(1), ctx.window):
            probabilities = torch.bmm(q_scaled[:, block], k_whole[:, seen].transpose(1, 2)).add_(bias)
            probabilities.sub_(log_sums[:, block]).exp_()
            d_v[:, seen] += torch.bmm(probabilities.to(v.dtype).transpose(1, 2), d_out[:, block])
            d_scores = torch.bmm(d_out_whole[:, block], v_whole[:, seen].transpose(1, 2)).mul_(probabilities)
            d_scores = d_scores.sub_(probabilities.mul_(d_scores.sum(-1, keepdim=True))).mul_(scale).to(q.dtype)
            d_q[:, block] = torch.bmm(d_scores, k[:, seen])
            d_k[:, seen] += torch.bmm(d_scores.transpose(1, 2), q[:, block])
        return *(d.to(q.dtype).view(ctx.shape) for d in (d_q, d_k, d_v)), None


def _blocks(length, window):
    """Yields, for each block of queries, its slice of the positions, that of the keys that it sees, and what is added
    to its scores: 0, or -inf where a query does not look."""
    positions = torch.arange(length)
    for begin in range(0, length, BLOCK_QUERIES):
        block = slice(begin, min(begin + BLOCK_QUERIES, length))
        seen = slice(0 if window is None else max(begin - int(window) + 1, 0), block.stop)
        mask = causal_mask(positions[block], positions[seen], window)
        yield block, seen, torch.zeros(mask.shape).masked_fill_(~mask, -torch.inf)


def mean_cross_entropy(hidden, head, targets, softcap):
    """See layers.Kernels."""
    return _MeanCrossEntropy.apply(hidden, head, targets.long(), softcap)


class _MeanCrossEntropy(torch.autograd.Function):
    """The gradients are computed in the forward pass, while a block's logits are in the cache:
    d logits = (softmax - one-hot) × (1 - (logits / softcap)²)."""

    @staticmethod
    def forward(ctx, hidden, head, targets, softcap):
        head_here = head.to(hidden.dtype)
        rows = max(BLOCK_LOGITS // head.size(0), BLOCK_TOKENS)
        loss = torch.zeros((), dtype=torch.float64)
        d_hidden, d_head = torch.empty_like(hidden), torch.zeros(head.shape)
        for chunk, chunk_targets, d_chunk in zip(*(x.split(CHUNK_TOKENS) for x in (hidden, targets, d_hidden)),
                                                 strict=True):
            d_logits = torch.empty(len(chunk), head.size(0), dtype=hidden.dtype)
            for block, block_targets, d_block in zip(*(x.split(rows) for x in (chunk, chunk_targets, d_logits)),
                                                     strict=True):
                losses, d_block[:] = _losses(torch.mm(block, head_here.t()).float(), block_targets, softcap)
                loss += losses.sum()
            torch.mm(d_logits, head_here, out=d_chunk)
            d_head += torch.mm(d_logits.t(), chunk)
        ctx.save_for_backward(d_hidden, d_head)
        ctx.num_tokens = len(targets)
        return (loss / len(targets)).float()

    @staticmethod
    @once_differentiable
    def backward(ctx, d_loss):
        d_hidden, d_head = (d * (d_loss / ctx.num_tokens).to(d.dtype) for d in ctx.saved_tensors)
        return d_hidden, d_head, None, None


def _losses(logits, targets, softcap):
    """Returns the losses (N, 1) of logits (N, V), fp32, which it overwrites, before the softcap, and their gradients
    (N, V). Targets (N,) of IGNORE_INDEX have neither."""
    slope = None
    if softcap:
        if softcap > 100:
            capped = logits.div_(softcap).tanh_()
        else:  # tanh(x) is 2 × sigmoid(2 x) - 1, which takes a tenth of the time and is off by 1e-7 × softcap
            capped = logits.mul_(2 / softcap).sigmoid_().mul_(2).sub_(1)
        slope = 1 - capped.square()
        logits = capped.mul_(softcap)
    counts = (targets != IGNORE_INDEX)[:, None]
    index = targets.clamp(min=0)[:, None]
    at_target = logits.gather(1, index)
    highest = logits.amax(-1, keepdim=True)
    total = logits.sub_(highest).exp_().sum(-1, keepdim=True)
    losses = (total.log() + highest - at_target) * counts
    d_logits = logits.mul_(counts / total).scatter_add_(1, index, -counts.float())
    return losses, d_logits if slope is None else d_logits.mul_(slope)
