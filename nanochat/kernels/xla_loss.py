"""Embedding and loss of the kernels `chunked` and `flash` on XLA: cross-entropy in chunks of tokens.
xla.py hands them to a model.

Their backward passes add to the `main_grad` of the weights in place (see Decoder.create_main_grads).
"""
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from nanochat.device.xla_ops import loop, use_device_of
from nanochat.kernels import int8
from nanochat.kernels.int8 import Rows
from nanochat.kernels.loss import ChunkBody, ChunkedLoss, equal_chunks
from nanochat.kernels.products import Int8
from nanochat.kernels.sharded import WHOLE, Sharding
from nanochat.model.layers import IGNORE_INDEX
from nanochat.model.logit_cap import LogitCap

# In chunks of 8,192, 4,096 and 2,048 tokens, a micro-step at depth 16 took 151.6, 154.9 and 158.7 Mcycles on v5e, with
# a peak of 6.97, 6.16 and 5.63 GiB.
CHUNK_TOKENS = 8192  # tokens whose logits are held at a time, in bf16: 8192 × 65,536 × 2 bytes = 1 GiB


class Embedding(torch.autograd.Function):
    """See layers.Kernels. Each rank looks up its own rows."""

    @staticmethod
    def forward(ctx, ids, table, dtype, sharding):
        ctx.save_for_backward(ids)
        ctx.table = table
        ctx.sharding = sharding
        table = sharding.gather(table)
        if not sharding.tensor_groups:
            return F.embedding(ids, table).to(dtype)
        rows, is_here = sharding.rows_here(ids, table.size(0))
        return sharding.sum(torch.where(is_here[..., None], F.embedding(rows, table).to(dtype), 0.0))

    @staticmethod
    def backward(ctx, d_out):
        ids = ctx.saved_tensors[0].flatten().long()
        d_out = d_out.flatten(0, 1)
        total = ctx.table.main_grad
        sharding = ctx.sharding
        parts = len(sharding.groups[0]) if sharding.groups else 1
        if sharding != WHOLE:
            use_device_of(d_out)
        if sharding.tensor_groups:
            ids, is_here = sharding.rows_here(ids, parts * total.size(0))
            d_out = torch.where(is_here[:, None], d_out, 0.0)
        # Along fsdp, a rank's tokens have rows on all ranks: it makes the gradient of the whole table, which is then
        # reduced and scattered. Along tensor, all ranks have the same tokens, and each adds to its own rows.
        if not sharding.groups:
            total.index_add_(0, ids, d_out.float())
        else:
            whole = total.new_zeros(parts * total.size(0), total.size(1))
            total.add_(sharding.scatter(whole.index_add_(0, ids, d_out.float()), d_out.dtype))
        return None, None, None, None


def cross_entropy(chunk_tokens, sharding, hidden, head, targets, cap):
    """See layers.Kernels."""
    chunks = [equal_chunks(hidden, chunk_tokens), equal_chunks(targets.long(), chunk_tokens)]
    losses = torch.zeros(chunks[1].shape, device=hidden.device)
    _, (losses,) = loop(_LossBody(cap, sharding), (), chunks, [losses], sharding.head(head, hidden.dtype))
    return losses.flatten()


def mean_loss(chunk_tokens, sharding, products, hidden, head, targets, cap, teaching=None):
    """See layers.Kernels. products: Plain or Int8. With a teacher, chunks are half as large, because two models have
    logits, and products are plain."""
    new_body = ChunkBody
    if teaching is not None:
        chunk_tokens //= 2
    elif isinstance(products, Int8):
        # Two chunks, because the gradient in 8 bits needs memory beside the logits: the micro-step of depth 16 takes
        # 65.1 ms and 7.01 GiB on v5e, with one chunk 65.0 ms and 7.88 GiB.
        chunk_tokens = min(chunk_tokens, (len(hidden) + 1) // 2)
        new_body = Int8Body
    else:
        new_body = _FastBody
    body = new_body(cap, sharding, len(hidden), teaching and teaching.terms)
    return ChunkedLoss.apply(hidden, head, targets, teaching, body, chunk_tokens)


@dataclass(frozen=True)
class _LossBody:
    cap: LogitCap
    sharding: Sharding

    def __call__(self, index, carry, read, write, constants):
        hidden, targets = read
        losses, *_ = _losses(self.cap, self.sharding, _logits(hidden, constants[0]), targets, *constants)
        return (), (losses,)


@dataclass(frozen=True)
class _FastBody(ChunkBody):
    """A ChunkBody without a teacher."""

    def of_chunk(self, index, scale, hidden, head, targets, first_row=0):
        import torch_xla.core.xla_model as xm
        logits = _logits(hidden, head)
        losses, numerators, of_target, total = _losses(self.cap, self.sharding, logits, targets, head, first_row)
        # Else XLA would keep the logits, and both products compute exponentials again.
        xm.optimization_barrier_([numerators])
        scale = scale / total
        # _with_targets is called twice, because a result that both products need would be written to HBM first.
        d_head = (_with_targets(numerators.t(), of_target.t()) @ (hidden * scale).to(hidden.dtype)).float()
        d_hidden = (_with_targets(numerators, of_target) @ head) * scale
        return losses, d_hidden.to(hidden.dtype), d_head


@dataclass(frozen=True)
class Int8Body(ChunkBody):
    """The same with products of 8-bit integers. It runs on any device."""

    def of_chunk(self, index, scale, hidden, head, targets):
        logits = int8.linear(int8.rounded(hidden), int8.rounded_weight(head))
        losses, numerators, of_target, total = _losses(self.cap, self.sharding, logits, targets, head)
        if hidden.device.type == "xla":
            import torch_xla.core.xla_model as xm
            xm.optimization_barrier_([numerators])
        # No number exceeds `total`, up to the rounding of bfloat16.
        d = int8.dithered_by_place(_with_targets(numerators, of_target), 1.01 * total, index * len(hidden))
        d = Rows(d.integers, d.scale * (scale / total))
        # Rounded by columns for this product. With the scales of its rows in d instead, the rows of rare tokens, whose
        # scales are small, got a gradient of noise.
        columns = int8.rounded(head, 0)
        d_hidden = int8.gradient_of_input(d, columns) * columns.scale
        return losses, d_hidden.to(hidden.dtype), int8.sum_of_products(d, hidden)


def _logits(hidden, head):
    return F.linear(hidden.float(), head.float())  # a product in bfloat16 rounds its result


def _losses(cap, sharding, logits, targets, head, first_row=0):
    """Returns the losses (N,) of logits (N, V) before the cap, and the terms of their gradients: `numerators` (N, V),
    `of_target` (N, 1) and `total` (N, 1), for this rank's rows of the head, from `first_row` on.

    A loss's gradient with respect to the logits is (softmax - one-hot) × slope, where slope is the derivative of the
    cap. Times `total`, the sum of a row's exponentials, it is exponentials × slope, and (exponential - total) × slope
    at the target. The first is known with the logits, so the product that makes them writes it, and nothing else of
    this size: `numerators`, with -1 at the target, the place of `of_target`.

    With a bounded cap, exponentials can be summed in fp32 without subtracting a maximum, which would cost another pass
    over the logits.
    """
    logits, slope = cap.with_slope(logits)
    logits = sharding.of_tokens(logits, first_row)
    largest = 0.0
    if cap.needs_maximum:
        largest = sharding.largest(logits.max(dim=-1, keepdim=True).values)
    exponentials = torch.exp(logits - largest)
    total = exponentials.sum(dim=-1, keepdim=True)
    rows = sharding.count_from(first_row, targets)
    is_target = torch.arange(head.size(0), device=head.device) == rows[:, None]
    picked = torch.where(is_target, logits, 0.0).sum(dim=-1, keepdim=True)
    total, picked = sharding.sums(total, picked)
    losses = (torch.log(total) + largest - picked)[:, 0]
    losses = torch.where(targets == IGNORE_INDEX, 0.0, losses)
    # Exponentials × slope are never negative, so -1 can only be the target. Comparing positions in each product instead
    # took 23.1 ms for a micro-step of one layer, not 22.5 (v5e).
    numerators = torch.where(is_target, -1.0, exponentials * slope).to(head.dtype)
    of_target = (torch.exp(picked - largest) - total) * cap.slope_at(picked)
    return losses, numerators, of_target.to(head.dtype), total


def _with_targets(numerators, of_target):
    """Returns the gradient with respect to the logits, times `total`, from the results of `_losses`."""
    return torch.where(numerators < 0, of_target, numerators)
