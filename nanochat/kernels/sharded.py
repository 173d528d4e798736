"""Weights of which each rank of a mesh holds a part, and how it computes with them.

Along the axis fsdp, parts are gathered before they are used, and gradients are summed and divided among the ranks as
soon as they are known (ZeRO-3, arXiv 1910.02054). Along the axis tensor, they are never gathered: each rank computes
with its own heads, hidden units and rows of the vocabulary, on the same tokens as the others, and the ranks add up what
comes out (arXiv 1909.08053). model/parts.py says how each weight is divided.
"""
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from nanochat.device.collectives import (
    gather_in_groups,
    largest_in_groups,
    place_in_group,
    scatter_sum_in_groups,
    sum_in_groups,
)
from nanochat.device.xla_ops import wait_for
from nanochat.model.weights import DIVIDED_BY_INPUTS, UNDIVIDED


@dataclass(frozen=True)
class Sharding:
    """The groups of ranks along the axes fsdp and tensor; () where an axis has one chip, and nothing is done."""
    groups: tuple = ()
    tensor_groups: tuple = ()

    @classmethod
    def of_mesh(cls, mesh):
        return cls(_groups(mesh, "fsdp"), _groups(mesh, "tensor"))

    # Along fsdp. "Whole" is what the ranks along it hold together: a slice of the weight, if tensor divides it too.

    def gather(self, part, name=None):
        """Returns the whole weight (out, in), of this rank's part (out / ranks, in). Scalars are whole, and so is what
        has a name in weights.UNDIVIDED."""
        return gather_in_groups(part, _lists(self.groups)) if self._divides(part, name) else part

    def scatter(self, gradient, name=None):
        """Returns this rank's part in fp32 of the sum over the ranks of a whole weight's gradient."""
        return scatter_sum_in_groups(gradient, _lists(self.groups)) if self._divides(gradient, name) else gradient

    def whole_shape(self, stack, name=None):
        """Returns a tensor without memory that has the shape of the whole weights of a stack of parts."""
        if stack.dim() < 3 or not self._divides(stack, name):
            return stack
        return torch.empty(stack.size(0), len(self.groups[0]) * stack.size(1), *stack.shape[2:], device="meta")

    # Along both

    def whole(self, after, parts):
        """See layers.Kernels."""
        # Left alone, the compiler gathers nearly all weights first: to generate with 6.98B parameters on 8 chips took
        # 14.38 GiB at the peak, and takes 4.33 if a layer's parts wait for its input. Clones, because wait_for changes
        # its tensors in place.
        tensors = [part.clone() for part in parts.values()]
        wait_for(after, tensors)
        return [self._whole(name, tensor) for name, tensor in zip(parts, tensors, strict=True)]

    def _whole(self, name, part):
        part = self.gather(part, name)
        if not self.tensor_groups or part.dim() < 2 or name in UNDIVIDED:
            return part
        parts = gather_in_groups(part, _lists(self.tensor_groups))
        if name in DIVIDED_BY_INPUTS:
            # (ranks × out, in / ranks) -> (ranks, out, in / ranks) -> (out, ranks, in / ranks) -> (out, in)
            return parts.unflatten(0, (len(self.tensor_groups[0]), -1)).movedim(0, 1).flatten(1)
        return parts

    def _divides(self, tensor, name):
        return self.groups and tensor.dim() > 1 and name not in UNDIVIDED

    # Along tensor

    def sum(self, part):
        """Returns the sum over the ranks along tensor of what each of them has computed with its part."""
        return sum_in_groups(part, _lists(self.tensor_groups)) if self.tensor_groups else part

    def sums(self, *parts):
        """Returns the sums of several tensors of one shape, which travel together."""
        return self.sum(torch.stack(parts)).unbind() if self.tensor_groups else parts

    def largest(self, values):
        """Returns the largest of the ranks' values, element by element."""
        return largest_in_groups(values, _lists(self.tensor_groups)) if self.tensor_groups else values

    def first_row(self, num_rows, device):
        """Returns the number, int32 (), of the first row of this rank's `num_rows` rows of a table."""
        return num_rows * place_in_group(_lists(self.tensor_groups), device)

    def head(self, part, dtype):
        """Returns the rows of the head with which this rank computes, of its part, in `dtype`, and, where ranks along
        tensor have others, the number of the first: a list of one tensor or two."""
        head = self.gather(part.to(dtype))
        if not self.tensor_groups:
            return [head]
        return [head, self.first_row(head.size(0), head.device)]

    def log_softmax(self, logits):
        """Returns the logarithms of the probabilities (N, V / ranks) of this rank's rows of the head, from its fp32
        logits of them."""
        if not self.tensor_groups:
            return F.log_softmax(logits, dim=-1)
        # The largest logit and the sum of exponentials are those of all ranks: two numbers of a token travel, not V.
        logits = logits - self.largest(logits.max(dim=-1, keepdim=True).values)
        return logits - self.sum(logits.exp().sum(dim=-1, keepdim=True)).log()

    def count_from(self, first_row, ids):
        """Returns the ids as numbers of this rank's rows of a table, of which `first_row` is the first."""
        return ids - first_row if self.tensor_groups else ids

    def rows_here(self, ids, num_rows):
        """Returns which of this rank's `num_rows` rows of a table the ids mean, the first for those that others have,
        and whether this rank has them."""
        ids = ids - self.first_row(num_rows, ids.device)
        is_here = (ids >= 0) & (ids < num_rows)
        return torch.where(is_here, ids, 0), is_here

    def own_columns(self, x, width):
        """Returns this rank's columns (…, n × width) of x (…, n × ranks × width), `width` of each block."""
        blocks = x.unflatten(-1, (-1, len(self.tensor_groups[0]), width))  # (…, n, ranks, width)
        return blocks.index_select(-2, place_in_group(_lists(self.tensor_groups), x.device)[None]).flatten(-3)

    def all_columns(self, own, width):
        """Returns x (…, n × ranks × width) of which each rank has own_columns."""
        parts = gather_in_groups(own[None], _lists(self.tensor_groups))  # (ranks, …, n × width)
        return parts.unflatten(-1, (-1, width)).movedim(0, -2).flatten(-3)


WHOLE = Sharding()


def _groups(mesh, axis):
    if getattr(mesh, axis) == 1:
        return ()
    return tuple(tuple(group) for group in mesh.groups(axis))


def _lists(groups):
    return [list(group) for group in groups]
