"""Attention and loss for training on a CPU, where memory is the bottleneck.

Both work on blocks that stay in the cache, and their own backward passes read each block few times. scripts.bench train
compares them with PyTorch's.
"""
from dataclasses import dataclass

import torch
from torch.autograd.function import once_differentiable

from nanochat.kernels.loss import ChunkedLoss, chunked_mean_loss
from nanochat.kernels.sharded import WHOLE
from nanochat.model.layers import IGNORE_INDEX, causal_mask
from nanochat.model.logit_cap import LogitCap

BLOCK_QUERIES = 128  # queries whose scores are computed together
BLOCK_LOGITS = 2**20  # logits that the loss computes at a time, 4 MiB
BLOCK_TOKENS = 64  # but at least this many tokens: smaller products are slow


def attention(q, k, v, window):
    """See layers.Kernels. Scores are fp32, whatever the dtype of q."""
    group = q.size(1) // k.size(1)
    if group > 1:
        k = k.repeat_interleave(group, 1)
        v = v.repeat_interleave(group, 1)
    return _Attention.apply(q, k, v, window)


# Scores and their gradients are fp32. A layer of 8 × 2 heads and 512 positions takes 14 + 17 ms forward and backward,
# PyTorch's attention 25 + 42. Scores in bfloat16 would take 8 + 15, with errors of 0.4% instead of 0.2%. Gradients of
# the probabilities in bfloat16 were five times less exact than PyTorch's if all values have a mean.
class _Attention(torch.autograd.Function):
    """The backward pass computes the probabilities again from the saved log-sum-exp, block by block, and
    d scores = probabilities × (d probabilities - sum of probabilities × d probabilities)."""

    @staticmethod
    def forward(ctx, q, k, v, window):
        shape = q.shape
        q = q.flatten(0, 1)  # (B × H, T, D)
        k = k.flatten(0, 1)
        v = v.flatten(0, 1)
        q_scaled = q.float() * shape[-1]**-0.5
        k_whole = k.float()
        out = torch.empty_like(q)
        log_sums = torch.empty(*q.shape[:2], 1)
        for block, seen, bias in _blocks(shape[2], window):
            scores = torch.bmm(q_scaled[:, block], k_whole[:, seen].transpose(1, 2)).add_(bias)
            highest = scores.amax(-1, keepdim=True)
            total = scores.sub_(highest).exp_().sum(-1, keepdim=True)
            out[:, block] = torch.bmm(scores.to(q.dtype), v[:, seen]) / total
            log_sums[:, block] = total.log_().add_(highest)
        ctx.save_for_backward(q, k, v, log_sums)
        ctx.shape = shape
        ctx.window = window
        return out.view(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):
        q, k, v, log_sums = ctx.saved_tensors
        d_out = d_out.reshape(q.shape)
        scale = ctx.shape[-1]**-0.5
        q_scaled = q.float() * scale
        k_whole = k.float()
        v_whole = v.float()
        d_out_whole = d_out.float()
        d_q = torch.empty_like(q)
        d_k = torch.zeros_like(k_whole)
        d_v = torch.zeros_like(k_whole)
        for block, seen, bias in _blocks(q.size(1), ctx.window):
            probabilities = torch.bmm(q_scaled[:, block], k_whole[:, seen].transpose(1, 2)).add_(bias)
            probabilities.sub_(log_sums[:, block]).exp_()
            d_v[:, seen] += torch.bmm(probabilities.to(v.dtype).transpose(1, 2), d_out[:, block])
            # The sum over a row of unrounded numbers. Summing out × d_out would give the same number, except for the
            # rounding of out.
            d_scores = torch.bmm(d_out_whole[:, block], v_whole[:, seen].transpose(1, 2)).mul_(probabilities)
            d_scores = d_scores.sub_(probabilities.mul_(d_scores.sum(-1, keepdim=True))).mul_(scale).to(q.dtype)
            d_q[:, block] = torch.bmm(d_scores, k[:, seen])
            d_k[:, seen] += torch.bmm(d_scores.transpose(1, 2), q[:, block])
        d_inputs = [d.to(q.dtype).view(ctx.shape) for d in (d_q, d_k, d_v)]
        return *d_inputs, None


def _blocks(length, window):
    """Yields, for each block of queries, its slice of the positions, the slice of the keys that it sees, and the bias
    of its scores: 0, or -inf where a query does not look."""
    positions = torch.arange(length)
    for begin in range(0, length, BLOCK_QUERIES):
        block = slice(begin, min(begin + BLOCK_QUERIES, length))
        first_seen = 0
        if window is not None:
            first_seen = max(begin - int(window) + 1, 0)
        seen = slice(first_seen, block.stop)
        mask = causal_mask(positions[block], positions[seen], window)
        yield block, seen, torch.zeros(mask.shape).masked_fill_(~mask, -torch.inf)


def mean_loss(chunk_tokens, hidden, head, targets, cap, teaching=None):
    """See layers.Kernels. With a teacher, it is loss.py's."""
    if teaching is not None:
        return chunked_mean_loss(chunk_tokens, hidden, head, targets, cap, teaching)
    total = ChunkedLoss.apply(hidden, head, targets, None, _ChunkBody(cap), chunk_tokens, WHOLE)
    return (total / len(targets)).float()


@dataclass(frozen=True)
class _ChunkBody:
    """The body of ChunkedLoss. It sums the losses in fp64.

    The logits of a block stay in the cache while they become its losses and gradients. The products with the head and
    the hidden states take a whole chunk, because large products are fast.
    """
    cap: LogitCap

    def __call__(self, index, carry, read, write, constants):
        loss, d_head = carry
        hidden, targets = read
        head = constants[0]
        rows = max(BLOCK_LOGITS // len(head), BLOCK_TOKENS)
        d_logits = torch.empty(len(hidden), len(head), dtype=hidden.dtype)  # (chunk, V)
        blocks = zip(hidden.split(rows), targets.split(rows), d_logits.split(rows), strict=True)
        for block, block_targets, d_block in blocks:
            logits = torch.mm(block, head.t()).float()
            losses, d_block[:] = _losses(logits, block_targets, self.cap)
            loss = loss + losses.sum().double()
        d_head += torch.mm(d_logits.t(), hidden)
        return (loss, d_head), (torch.mm(d_logits, head),)


def _losses(logits, targets, cap):
    """Returns the losses (N, 1) of uncapped logits (N, V), fp32, and their gradients (N, V). Overwrites the logits.
    Targets (N,) of IGNORE_INDEX have neither."""
    # d logits = (softmax - one-hot) × slope. All but the slope is computed in place, because a second tensor of this
    # size would push the logits out of the cache.
    logits, slope = cap.with_slope_in_place(logits)
    counts = (targets != IGNORE_INDEX)[:, None]
    index = targets.clamp(min=0)[:, None]
    at_target = logits.gather(1, index)
    highest = logits.amax(-1, keepdim=True)
    total = logits.sub_(highest).exp_().sum(-1, keepdim=True)
    losses = (total.log() + highest - at_target) * counts
    d_logits = logits.mul_(counts / total).scatter_add_(1, index, -counts.float())
    return losses, d_logits.mul_(slope)
