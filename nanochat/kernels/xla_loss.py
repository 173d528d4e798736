"""Embedding and loss of the kernels `chunked` and `flash` on XLA: cross-entropy in chunks of tokens.

Their backward passes add to the `main_grad` of the weights in place (see GPT.create_main_grads).
"""
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from nanochat.device.xla_ops import loop, use_device_of
from nanochat.kernels import distillation
from nanochat.kernels.sharded import WHOLE, Sharding
from nanochat.model.layers import IGNORE_INDEX

CHUNK_TOKENS = 8192  # tokens whose logits are held at a time, in bf16: 8192 × 65,536 × 2 bytes = 1 GiB


class Embedding(torch.autograd.Function):

    @staticmethod
    def forward(ctx, ids, table, dtype, sharding):
        ctx.save_for_backward(ids)
        ctx.table, ctx.sharding = table, sharding
        table = sharding.gather(table)
        if not sharding.tensor_groups:
            return F.embedding(ids, table).to(dtype)
        rows, is_here = sharding.rows_here(ids, table.size(0))
        return sharding.sum(torch.where(is_here[..., None], F.embedding(rows, table).to(dtype), 0.0))

    @staticmethod
    def backward(ctx, d_out):
        ids, = ctx.saved_tensors
        ids, d_out, total, sharding = ids.flatten().long(), d_out.flatten(0, 1), ctx.table.main_grad, ctx.sharding
        if sharding != WHOLE:
            use_device_of(d_out)
        if sharding.tensor_groups:
            ids, is_here = sharding.rows_here(ids, total.size(0) * len(sharding.groups[0] if sharding.groups else [0]))
            d_out = torch.where(is_here[:, None], d_out, 0.0)
        if not sharding.groups:
            total.index_add_(0, ids, d_out.float())
        else:
            whole = total.new_zeros(len(sharding.groups[0]) * total.size(0), total.size(1))
            total.add_(sharding.scatter(whole.index_add_(0, ids, d_out.float()).to(d_out.dtype)))
        return None, None, None, None


def _chunks(x, chunk_tokens=CHUNK_TOKENS):
    """Returns x (N, …) as a stack of chunks of equal size, (N / size, size, …), of at most `chunk_tokens` tokens."""
    tokens = x.size(0)
    size = max(size for size in range(1, min(tokens, chunk_tokens) + 1) if tokens % size == 0)
    return x.view(-1, size, *x.shape[1:])


def _losses(hidden, head, targets, softcap, sharding, first_row=0):
    """Returns the losses (N,) of hidden (N, C), and what their gradients need: `weights` (N, V), `of_target` (N, 1) and
    `total` (N, 1), of this rank's rows of the head, which begin with `first_row`.

    A loss's gradient with respect to the logits is (softmax - one-hot) × slope, where slope is the derivative of the
    softcap. Times `total`, the sum of a row's exponentials, it is exponentials × slope, and (exponential - total) ×
    slope at the target. The first is known as soon as the logits are, so the product that makes them writes it, and
    nothing else of this size: `weights`, with -1 at the target, where `of_target` belongs.

    A bounded softcap makes it safe to sum exponentials in fp32 without subtracting a maximum, which would cost another
    pass over the logits.
    """
    logits, slope = _capped(F.linear(hidden.float(), head.float()), softcap)  # a product in bfloat16 rounds its result
    largest = 0.0 if 0 < softcap <= 60 else sharding.largest(logits.max(dim=-1, keepdim=True).values)
    exponentials = torch.exp(logits - largest)
    total = exponentials.sum(dim=-1, keepdim=True)
    rows = sharding.count_from(first_row, targets)
    is_target = torch.arange(head.size(0), device=head.device) == rows[:, None]
    picked = torch.where(is_target, logits, 0.0).sum(dim=-1, keepdim=True)
    total, picked = sharding.sums(total, picked)
    losses = (torch.log(total) + largest - picked)[:, 0]
    losses = torch.where(targets == IGNORE_INDEX, 0.0, losses)
    weights = torch.where(is_target, -1.0, exponentials * slope).to(hidden.dtype)
    slope_of_target = 1 - (picked / softcap).square() if softcap else 1.0
    of_target = (torch.exp(picked - largest) - total) * slope_of_target
    return losses, weights, of_target.to(hidden.dtype), total


def _capped(logits, softcap):
    """Returns softcapped(logits, softcap) and its derivative there, which is never negative: a chip's tanh may exceed 1
    by rounding."""
    if not softcap:
        return logits, 1.0
    tanh = torch.tanh(logits / softcap)
    return softcap * tanh, (1 - tanh.square()).clamp(min=0.0)


def _with_targets(weights, of_target):
    """Returns what `_losses` gives as one tensor."""
    return torch.where(weights < 0, of_target, weights)


@dataclass(frozen=True)
class _LossBody:
    softcap: float
    sharding: Sharding

    def __call__(self, index, carry, read, write, constants):
        head, *first_row = constants
        return (), (_losses(read[0], head, read[1], self.softcap, self.sharding, *first_row)[0],)


def cross_entropy(sharding, hidden, head, targets, softcap):
    constants = sharding.head(head, hidden.dtype)
    chunks = _chunks(hidden), _chunks(targets.long())
    losses = torch.zeros(chunks[1].shape, device=hidden.device)
    _, (losses,) = loop(_LossBody(softcap, sharding), (), chunks, [losses], constants)
    return losses.flatten()


@dataclass(frozen=True)
class _GradientBody:
    softcap: float
    num_tokens: int
    sharding: Sharding

    def __call__(self, index, carry, read, write, constants):
        import torch_xla.core.xla_model as xm
        (loss, d_head), (hidden, targets), (head, *first_row) = carry, read, constants
        losses, weights, of_target, total = _losses(hidden, head, targets, self.softcap, self.sharding, *first_row)
        xm.optimization_barrier_([weights])  # else XLA keeps the logits, and both products compute exponentials again
        scale = torch.where(targets == IGNORE_INDEX, 0.0, 1 / self.num_tokens)[:, None] / total
        # Twice, because a result of which both products need the same copy would be written to HBM first.
        d_head = d_head + (_with_targets(weights.t(), of_target.t()) @ (hidden * scale).to(hidden.dtype)).float()
        d_hidden = (_with_targets(weights, of_target) @ head) * scale
        return (loss + losses.sum() / self.num_tokens, d_head), (d_hidden.to(hidden.dtype),)


class MeanCrossEntropy(torch.autograd.Function):
    """The mean loss. Its gradients are computed in the forward pass, chunk by chunk, while what _losses gives is in
    memory."""

    @staticmethod
    def forward(ctx, hidden, head, targets, softcap, sharding):
        body = _GradientBody(softcap, hidden.size(0), sharding)
        chunks = _chunks(hidden), _chunks(targets.long())
        constants = sharding.head(head, hidden.dtype)
        sums = torch.zeros((), device=hidden.device), torch.zeros_like(constants[0], dtype=torch.float32)
        if len(chunks[0]) == 1:
            (loss, d_head), (d_hidden,) = body(None, sums, [chunk[0] for chunk in chunks], None, constants)
        else:
            (loss, d_head), (d_hidden,) = loop(body, sums, chunks, [torch.zeros_like(chunks[0])], constants)
        if sharding.groups:
            d_head = sharding.scatter(d_head.to(hidden.dtype))
        ctx.save_for_backward(sharding.sum(d_hidden.view_as(hidden)), d_head)
        ctx.head = head
        return loss

    @staticmethod
    def backward(ctx, d_loss):
        d_hidden, d_head = ctx.saved_tensors
        ctx.head.main_grad.add_(d_head * d_loss)
        return d_hidden * d_loss.to(d_hidden.dtype), None, None, None, None


def mean_distillation(sharding, hidden, head, targets, softcap, teaching):
    """See layers.Kernels. Chunks are half as large, because there are logits of two models."""
    return distillation.MeanLoss.apply(hidden, head, targets, softcap, teaching, _half_chunks, loop, True, sharding)


def _half_chunks(x):
    return _chunks(x, CHUNK_TOKENS // 2)
