"""Weights of which each rank along the mesh's axis fsdp holds a part: gathered before they are used, and their
gradients summed and divided among the ranks as soon as they are known (ZeRO-3, arXiv 1910.02054).

A matrix (out, in) is divided by its outputs, a table (V, C) by its rows, both dimension 0.
"""
from dataclasses import dataclass

import torch

from nanochat.device.collectives import gather_in_groups, scatter_sum_in_groups


@dataclass(frozen=True)
class Sharding:
    """groups: of the ranks that together hold a weight; () where each rank holds all of it, and nothing is done."""
    groups: tuple = ()

    @classmethod
    def of_mesh(cls, mesh):
        return cls(tuple(map(tuple, mesh.groups("fsdp"))) if mesh.fsdp > 1 else ())

    def gather(self, part):
        """Returns the whole weight (out, in), of this rank's part (out / ranks, in). Scalars are whole."""
        return gather_in_groups(part, self._lists()) if self._divides(part) else part

    def scatter(self, gradient):
        """Returns this rank's part in fp32 of the sum over the ranks of a whole weight's gradient."""
        return scatter_sum_in_groups(gradient, self._lists()) if self._divides(gradient) else gradient

    def whole_shape(self, stack):
        """Returns a tensor without memory that has the shape of the whole weights of a stack of parts."""
        if not self.groups or stack.dim() < 3:
            return stack
        return torch.empty(stack.size(0), len(self.groups[0]) * stack.size(1), *stack.shape[2:], device="meta")

    def _divides(self, tensor):
        return self.groups and tensor.dim() > 1

    def _lists(self):
        return [list(group) for group in self.groups]


WHOLE = Sharding()
