"""How the ranks of a mesh compute with their parts of the weights. model/parts.py divides each weight.

Along the axis fsdp, parts are gathered before they are used, and gradients are reduced and scattered as soon as they
are known (ZeRO-3, arXiv 1910.02054). Along the axis tensor, they are never gathered: each rank computes with its own
heads, hidden units and rows of the vocabulary, on the same tokens as the others, and the ranks all-reduce the results
(arXiv 1909.08053).
"""
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from nanochat.device.collectives import all_reduce_in_groups, gather_in_groups, place_in_group, scatter_sum_in_groups
from nanochat.device.xla_ops import use_device_of, wait_for
from nanochat.model.layers import TensorRanks
from nanochat.model.models import DIVIDED_BY_INPUTS, UNDIVIDED

NO_TOKEN = -1e9  # a logit whose exponential is 0, and whose differences are finite


# A matrix (out, in) on a mesh of fsdp F and tensor T. Rank (f, t) holds (out / (F T), in): the f-th part of the t-th
# part. `gather` makes (out / T, in) of it, the rows of the rank's own heads or hidden units, and x times these is
# computed without the others. The matrices that follow, attn_o and mlp_out, are divided by inputs: (out / F, in / T),
# gathered to (out, in / T). Each rank multiplies its own hidden units with its columns, and `sum` adds up the products.
# So a layer has two all-reduces along tensor, after attention and after the MLP. Its backward pass has two more, and a
# small one for the gates.
@dataclass(frozen=True)
class Sharding:
    """The groups of ranks along the axes fsdp and tensor. An axis of one chip is (), and its operations are no-ops."""
    groups: tuple = ()
    tensor_groups: tuple = ()
    # Tokens, if the ranks do not divide them: then tables end with rows of no token, which model/parts.py adds. These
    # stay 0, because they get no gradient.
    vocab_size: int | None = None

    @classmethod
    def of_mesh(cls, mesh, vocab_size):
        """vocab_size: rows of the whole tables."""
        found = []
        for axis in ("fsdp", "tensor"):
            groups = ()
            if getattr(mesh, axis) > 1:
                groups = tuple(map(tuple, mesh.groups(axis)))  # hashable
            found.append(groups)
        is_padded = mesh.divides_weights and vocab_size % mesh.chips
        return cls(*found, vocab_size if is_padded else None)

    # Along fsdp. "Whole" is what the ranks along it hold together: a slice of the weight, if tensor divides it too.

    def gather(self, part, name=None):
        """Returns the whole weight (out, in), from this rank's part (out / ranks, in). Scalars and weights in UNDIVIDED
        are whole already."""
        if not self._divides(part, name):
            return part
        return gather_in_groups(part, self.groups)

    def scatter(self, gradient, dtype, name=None):
        """Returns this rank's part in fp32 of a whole weight's gradient, summed over the ranks. The parts travel in
        `dtype`."""
        if not self._divides(gradient, name):
            return gradient
        return scatter_sum_in_groups(gradient.to(dtype), self.groups)

    def whole_shape(self, stack, name=None):
        """Returns a tensor without memory in the shape of the whole weights, from a stack of parts."""
        if stack.dim() < 3 or not self._divides(stack, name):
            return stack
        return torch.empty(stack.size(0), len(self.groups[0]) * stack.size(1), *stack.shape[2:], device="meta")

    # Along both

    def whole(self, after, parts):
        """See layers.Kernels."""
        # The compiler would gather nearly all weights first: generating with 6.98B parameters on 8 chips took a peak of
        # 14.38 GiB, and takes 4.33 if a layer's parts wait for its input. Clones, because wait_for changes its tensors
        # in place.
        tensors = [part.clone() for part in parts.values()]
        wait_for(after, tensors)
        return [self._whole(name, tensor) for name, tensor in zip(parts, tensors, strict=True)]

    def _whole(self, name, part):
        part = self.gather(part, name)
        if name == "lm_head":
            if self.tensor_groups:
                part = gather_in_groups(part, self.tensor_groups)
            return part[:self.vocab_size] if self.vocab_size else part
        if not self.tensor_groups or part.dim() < 2 or name in UNDIVIDED:
            return part
        parts = gather_in_groups(part, self.tensor_groups)
        if name in DIVIDED_BY_INPUTS:
            # (ranks × out, in / ranks) -> (ranks, out, in / ranks) -> (out, ranks, in / ranks) -> (out, in)
            return parts.unflatten(0, (len(self.tensor_groups[0]), -1)).movedim(0, 1).flatten(1)
        return parts

    def _divides(self, tensor, name):
        return self.groups and tensor.dim() > 1 and name not in UNDIVIDED

    # Along tensor

    def sum(self, part):
        """Returns the sum over the ranks along tensor of each one's `part`."""
        return all_reduce_in_groups("sum", part, self.tensor_groups) if self.tensor_groups else part

    def sums(self, *parts):
        """Returns the sums of several tensors of one shape, in one all-reduce."""
        return self.sum(torch.stack(parts)).unbind() if self.tensor_groups else parts

    def largest(self, values):
        """Returns the elementwise maximum of the ranks' values."""
        return all_reduce_in_groups("max", values, self.tensor_groups) if self.tensor_groups else values

    def first_row(self, num_rows, device):
        """Returns the number, int32 (), of the first of this rank's `num_rows` rows of a table."""
        return num_rows * place_in_group(self.tensor_groups, device)

    def ranks(self):
        """Returns the TensorRanks of a layer that autograd differentiates."""
        share = partial(_WithGradient.apply, torch.clone, self.sum)
        join = partial(_WithGradient.apply, self.sum, lambda d_out: d_out)
        return TensorRanks(share, join, self.own_part)

    def own_part(self, x):
        """Returns this rank's columns (…, width) of x (…, ranks × width), with a gradient."""
        return _WithGradient.apply(self._own_columns, self._all_columns, x)

    def head(self, part, dtype):
        """Returns a list: the rows of the head that this rank computes with, from its part, in `dtype`; along tensor,
        also the number of the first row."""
        head = self.gather(part.to(dtype))
        if not self.tensor_groups:
            return [head]
        return [head, self.first_row(head.size(0), head.device)]

    def log_softmax(self, logits):
        """Returns the log-probabilities (N, V / ranks) of this rank's rows of the head, from their fp32 logits."""
        if not self.tensor_groups:
            return F.log_softmax(logits, dim=-1)
        # The ranks exchange the largest logit and the sum of exponentials: two numbers per token, not V.
        logits = logits - self.largest(logits.max(dim=-1, keepdim=True).values)
        return logits - self.sum(logits.exp().sum(dim=-1, keepdim=True)).log()

    def of_tokens(self, logits, first_row):
        """Returns logits (N, rows of the head), from `first_row` on, after the cap: those of rows without a token get
        the probability 0."""
        if self.vocab_size is None:
            return logits
        is_token = first_row + torch.arange(logits.size(1), device=logits.device) < self.vocab_size
        return torch.where(is_token, logits, NO_TOKEN)

    def count_from(self, first_row, ids):
        """Returns the ids as numbers of this rank's rows of a table, counted from `first_row`."""
        return ids - first_row if self.tensor_groups else ids

    def rows_here(self, ids, num_rows):
        """Returns the ids as numbers of this rank's `num_rows` rows of a table, 0 for other ranks' rows, and whether
        this rank has them."""
        ids = ids - self.first_row(num_rows, ids.device)
        is_here = (ids >= 0) & (ids < num_rows)
        return torch.where(is_here, ids, 0), is_here

    def _own_columns(self, x):
        parts = x.unflatten(-1, (len(self.tensor_groups[0]), -1))  # (…, ranks, width)
        return parts.index_select(-2, place_in_group(self.tensor_groups, x.device)[None]).flatten(-2)

    def _all_columns(self, own):
        return gather_in_groups(own[None], self.tensor_groups).movedim(0, -2).flatten(-2)  # from (ranks, …, width)


class _WithGradient(torch.autograd.Function):
    """forward(x), whose gradient with respect to x is backward(d_out)."""

    @staticmethod
    def forward(ctx, forward, backward, x):
        ctx.backward_of = backward
        return forward(x)

    @staticmethod
    def backward(ctx, d_out):
        use_device_of(d_out)
        return None, None, ctx.backward_of(d_out)


WHOLE = Sharding()
