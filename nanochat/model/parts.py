"""Which part of each weight a rank of a mesh holds, and how gradients and new weights travel between the parts.

There are two kinds of parts. What the model computes with is divided along the mesh's axis fsdp: of a stack of matrices
(L, out, in) a rank has (L, out / fsdp, in), of a table (V, C) it has V / fsdp rows. What the optimizer keeps, the fp32
weights and its state, is divided among all ranks: whole matrices of L / ranks layers, because Muon needs them whole
(padded with zeros where the ranks do not divide L), and V / ranks rows of a table. So both do not depend on fsdp, but
for the order of a table's rows, and checkpoints hold whole tensors.
"""
from dataclasses import dataclass

import torch

from nanochat.device.collectives import (
    all_gather,
    exchange_in_groups,
    gather_in_groups,
    reduce_scatter_sum,
    scatter_sum_in_groups,
)
from nanochat.device.mesh import Mesh
from nanochat.device.ranks import Dist


@dataclass(frozen=True)
class Parts:
    """The parts of one rank. `length` is the size of the whole weight's first dimension."""
    dist: Dist
    mesh: Mesh

    def of_model(self, tensor):
        """Returns the part of a whole weight that the model computes with."""
        _, place, _ = self.mesh.coordinates(self.dist.rank)
        return tensor.chunk(self.mesh.fsdp, tensor.dim() - 2)[place]

    def of_optimizer(self, tensor):
        """Returns the part of a whole weight, or of a tensor of its state, that the optimizer keeps."""
        number = self.dist.rank
        if self._rows_are_divided(tensor):
            data, fsdp, _ = self.mesh.coordinates(self.dist.rank)
            number = fsdp * self.mesh.data + data
        return self._padded(tensor).unflatten(0, (self.dist.world_size, -1))[number]

    def whole(self, part, length):
        """Returns the whole tensor from the optimizer's parts of all ranks. Every rank must call it."""
        whole = all_gather(part, self.dist)
        if self._rows_are_divided(part):
            whole = whole.unflatten(0, (self.mesh.data, self.mesh.fsdp, -1)).transpose(0, 1).flatten(0, 2)
        return whole[:length]

    def collect(self, slices, shapes, dtype):
        """Returns ({name: what the model computes with}, {name: the optimizer's part}) of weights that come in slices,
        in host memory. No more than one slice is whole at a time.

        slices: an iterable of (name, index, tensor), which is layer `index` of a stack, or the whole weight if the
        index is None. shapes: {name: shape of the whole weight}, of those that have parts; others stay whole, and the
        optimizer has none. dtype: of the model's parts.
        """
        _, place, _ = self.mesh.coordinates(self.dist.rank)
        of_model, of_optimizer = {}, {}
        for name, index, tensor in slices:
            if name not in shapes:
                of_model[name] = tensor
                continue
            if index is None:
                of_model[name], of_optimizer[name] = self.of_model(tensor).to(dtype), self.of_optimizer(tensor).clone()
                continue
            layers, outputs, inputs = shapes[name]
            mine = -(-layers // self.dist.world_size)
            if name not in of_model:
                of_model[name] = torch.empty(layers, outputs // self.mesh.fsdp, inputs, dtype=dtype)
                of_optimizer[name] = torch.zeros(mine, outputs, inputs)
            of_model[name][index] = tensor.chunk(self.mesh.fsdp)[place]
            if index // mine == self.dist.rank:
                of_optimizer[name][index % mine] = tensor
        return of_model, of_optimizer

    def sum_gradient(self, gradient):
        """Returns the optimizer's part of a gradient: of the sum of what the ranks have in the place of the model's
        part, which those along fsdp have summed already."""
        if self.mesh.fsdp == 1:
            return reduce_scatter_sum(self._padded(gradient), self.dist)
        if self.mesh.data > 1:
            gradient = scatter_sum_in_groups(self._padded(gradient), self.mesh.groups("data"))
        elif not self._rows_are_divided(gradient):
            gradient = self._padded(gradient)
        if self._rows_are_divided(gradient):
            return gradient
        return exchange_in_groups(gradient, self.mesh.groups("fsdp"), split=0, concat=1)

    def new_weight(self, part, length):
        """Returns the model's part of a weight from the optimizer's parts of it, in the dtype of `part`."""
        if self.mesh.fsdp == 1:
            return self.whole(part, length)
        if not self._rows_are_divided(part):
            part = exchange_in_groups(part, self.mesh.groups("fsdp"), split=1, concat=0)
        else:
            length //= self.mesh.fsdp
        return (gather_in_groups(part, self.mesh.groups("data")) if self.mesh.data > 1 else part)[:length]

    def _rows_are_divided(self, tensor):
        """Whether it is a table, or a part of one, whose parts are divided by fsdp first and then by data."""
        return tensor.dim() == 2 and self.mesh.fsdp > 1

    def _padded(self, tensor):
        # A table that fsdp divides has no padding: see require_divisible.
        missing = 0 if self._rows_are_divided(tensor) else -tensor.size(0) % self.dist.world_size
        return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]) if missing else tensor
