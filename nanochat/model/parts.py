"""Which part of each weight a rank of a mesh holds, and how gradients and new weights travel between the parts.

There are two kinds of parts:
- The model's: tensor first divides a stack of matrices (L, out, in) by outputs, or by inputs if it is in
  models.DIVIDED_BY_INPUTS, and a table (V, C) by rows. Then fsdp divides the rest by outputs and rows. A table gets
  rows of zeros until the chips divide them (see Sharding.vocab_size).
- The optimizer's, fp32 weights and state, are divided among all ranks: whole matrices of L / ranks layers, because Muon
  needs them whole (padded with zeros if the ranks do not divide L), and V / ranks rows of a table. Apart from the order
  of a table's rows, they do not depend on the mesh. Checkpoints hold whole tensors.
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
from nanochat.device.mesh import Mesh, require_divisible
from nanochat.device.programs import one_program
from nanochat.device.ranks import Dist
from nanochat.model.config import in_whole
from nanochat.model.models import DIVIDED_BY_INPUTS, TABLES, UNDIVIDED

GATHER_BYTES = 2**30  # of a whole tensor that a device holds at a time while the ranks' parts go to the host


@dataclass(frozen=True)
class Parts:
    """The parts of one rank. `length` is the size of the whole weight's first dimension."""
    dist: Dist
    mesh: Mesh

    def of_model(self, name, tensor):
        """Returns the model's part of a whole weight called `name`, or of a layer of it. Scalars, vectors, and the
        weights in UNDIVIDED are whole on every rank."""
        if tensor.dim() < 2 or name in UNDIVIDED:
            return tensor
        _, fsdp, along_tensor = self.mesh.coordinates(self.dist.rank)
        if name in TABLES and self.mesh.divides_weights:
            tensor = _with_rows(tensor, -tensor.size(0) % self.mesh.chips)
        # Gathering goes the other way: fsdp first.
        tensor = tensor.chunk(self.mesh.tensor, _dim_along_tensor(name))[along_tensor]
        return tensor.chunk(self.mesh.fsdp, -2)[fsdp]

    def of_optimizer(self, tensor):
        """Returns the optimizer's part of a whole weight, or of a tensor of its state."""
        number = self.dist.rank
        if self._rows_are_divided(tensor):
            # A table's rows are in the order of the model's parts, tensor, then fsdp, and data divides each of these.
            # So the ranks along data hold the model's part together, and a gather along data alone makes it.
            data, fsdp, along_tensor = self.mesh.coordinates(self.dist.rank)
            number = (along_tensor * self.mesh.fsdp + fsdp) * self.mesh.data + data
        rows = -(-tensor.size(0) // self.dist.world_size)
        part = tensor[number * rows:(number + 1) * rows]
        return _with_rows(part, rows - part.size(0))

    def whole(self, part, length):
        """Returns the whole tensor from the optimizer's parts of all ranks. Every rank must call it."""
        whole = all_gather(part, self.dist)
        if self._rows_are_divided(part):
            # (data, fsdp, tensor, rows, C), in the order of the ranks, -> (tensor, fsdp, data, rows, C), of the rows
            sizes = self.mesh.data, self.mesh.fsdp, self.mesh.tensor
            whole = whole.unflatten(0, (*sizes, -1)).transpose(0, 2).flatten(0, 3)
        return whole[:length]

    def whole_on_host(self, part, length, is_needed):
        """Returns the whole tensor in host memory from the optimizer's parts of all ranks, or None unless `is_needed`.
        Every rank must call it."""
        # Every device receives the gathered tensor, so a large one is gathered some columns at a time.
        columns = part.size(1)
        size = part.nbytes // part.size(0) * length
        blocks = 1
        while columns % blocks or size // blocks > GATHER_BYTES and blocks < columns:
            blocks += 1
        width = columns // blocks
        whole = torch.empty(length, *part.shape[1:], dtype=part.dtype) if is_needed else None
        for begin in range(0, columns, width):
            chosen = None
            if width < columns:
                # A tensor, because Python numbers would make a program for each block.
                chosen = torch.arange(begin, begin + width).to(part.device)
            with one_program(self.dist, f"gather {(part.size(0), width, *part.shape[2:])}", collective=True):
                gathered = self.whole(part if chosen is None else part.index_select(1, chosen), length)
            if is_needed:
                whole[:, begin:begin + width] = gathered.detach().cpu()
        return whole

    def collect(self, slices, shapes, dtype):
        """Returns ({name: the model's part}, {name: the optimizer's part}) of weights that come in slices, in host
        memory. At most one slice is whole at a time.

        slices: an iterable of (name, index, tensor): layer `index` of a stack, or the whole weight if the index is
        None. shapes: {name: shape of the whole weight} of the divided weights; others stay whole, and the optimizer
        gets none. dtype: of the model's parts.
        """
        of_model = {}
        of_optimizer = {}
        for name, index, tensor in slices:
            if name not in shapes:
                of_model[name] = tensor
            elif index is None:
                of_model[name] = self.of_model(name, tensor).to(dtype)
                of_optimizer[name] = self.of_optimizer(tensor).clone()
            else:
                layers, outputs, inputs = shapes[name]
                layers_here = -(-layers // self.dist.world_size)
                part = self.of_model(name, tensor)
                if name not in of_model:
                    of_model[name] = torch.empty(layers, *part.shape, dtype=dtype)
                    of_optimizer[name] = torch.zeros(layers_here, outputs, inputs)
                of_model[name][index] = part
                if index // layers_here == self.dist.rank:
                    of_optimizer[name][index % layers_here] = tensor
        return of_model, of_optimizer

    # The way of a gradient from the model's part to the optimizer's, for a stack of matrices divided by outputs, on a
    # mesh of data D, fsdp F and tensor T (each step is left out if its axis has one chip):
    #     (L, out / (T F), in)         summed over micro-steps; fsdp is reduced already
    #     (L / D, out / (T F), in)     data: each rank gets the sum of L / D layers
    #     (L / (D F), out / T, in)     fsdp: gives layers away, and gets their outputs from the others
    #     (L / (D F T), out, in)       tensor: the same, and the matrices are whole
    # A new weight goes the same way back (new_weight). The rows of a table stay where they are, and data divides them
    # further. If no chip divides the weights, all of this is one reduce-scatter.
    def sum_gradient(self, name, gradient):
        """Returns the optimizer's part of a gradient, summed over the ranks. `gradient` is that of the model's part,
        already summed over all axes except data."""
        is_of_rows = self._rows_are_divided(gradient)
        if not is_of_rows:  # a table's is padded already, see of_model
            gradient = _with_rows(gradient, -gradient.size(0) % self.dist.world_size)
        if not self.mesh.divides_weights:
            return reduce_scatter_sum(gradient, self.dist)
        if self.mesh.data > 1:
            gradient = scatter_sum_in_groups(gradient, self.mesh.groups("data"))
        if is_of_rows:
            return gradient
        # A rank has parts of matrices of L / data layers. Each exchange gives away layers, and gets the outputs or
        # inputs of the remaining layers from the others.
        for axis, dim in self._exchanges(name):
            gradient = exchange_in_groups(gradient, self.mesh.groups(axis), split=0, concat=dim)
        return gradient

    def new_weight(self, name, part, length):
        """Returns the model's part of a weight from the optimizer's parts of it, in the dtype of `part`."""
        if not self.mesh.divides_weights:
            return self.whole(part, length)
        if self._rows_are_divided(part):
            length = in_whole(length, self.mesh.chips) // (self.mesh.fsdp * self.mesh.tensor)
        else:
            for axis, dim in reversed(self._exchanges(name)):
                part = exchange_in_groups(part, self.mesh.groups(axis), split=dim, concat=0)
        if self.mesh.data > 1:
            part = gather_in_groups(part, self.mesh.groups("data"))
        return part[:length]

    def new_weights(self, parts, lengths):
        """Returns new_weight for each of `parts`, {name: part}; lengths: {name: length}. Parts of one shape travel
        together: the compiler overlaps few exchanges with Muon's products, however small."""
        if self.mesh.divides_weights:
            return {name: self.new_weight(name, part, lengths[name]) for name, part in parts.items()}
        groups = {}
        for name, part in parts.items():
            groups.setdefault(part.shape, []).append(name)
        found = {}
        for names in groups.values():
            # (names, n, …) of each rank -> (ranks × names, n, …) -> for each name (ranks, n, …)
            together = all_gather(torch.stack([parts[name] for name in names]), self.dist)
            each = together.unflatten(0, (self.dist.world_size, len(names))).unbind(1)
            for name, whole in zip(names, each, strict=True):
                found[name] = whole.flatten(0, 1)[:lengths[name]]
        return found

    def _exchanges(self, name):
        """Returns the axes along which parts of a stack (L, out, in) become whole matrices of fewer layers, in order,
        and the dimension that each joins: [(axis, dimension), …]."""
        steps = [("fsdp", 1), ("tensor", _dim_along_tensor(name) + 3)]
        return [(axis, dim) for axis, dim in steps if getattr(self.mesh, axis) > 1]

    def _rows_are_divided(self, tensor):
        """Whether it is a table, or a part of one, whose rows tensor divides, then fsdp, then data."""
        return tensor.dim() == 2 and self.mesh.divides_weights


def _with_rows(tensor, missing):
    """Returns the tensor with `missing` more rows of zeros."""
    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]) if missing else tensor


def _dim_along_tensor(name):
    """Returns the dimension of a weight that tensor divides, counted from the last; fsdp divides -2 of the rest."""
    return -1 if name in DIVIDED_BY_INPUTS else -2


def require_parts(mesh, config):
    """Raises BadInput if a Mesh cannot divide the weights of a GPTConfig's model."""
    if not mesh.divides_weights:
        return
    require_divisible(mesh, "tensor", {
        "the attention heads (--num_heads)": config.n_head,
        "the heads of keys and values (--num_kv_heads)": config.n_kv_head,
        "the hidden units of the MLP (--mlp_dim)": config.mlp_dim})
    here = " that a chip along tensor has" if mesh.tensor > 1 else ""
    require_divisible(mesh, "fsdp", {
        "the width (--model_dim)": config.n_embd,
        f"the hidden units of the MLP (--mlp_dim){here}": config.mlp_dim // mesh.tensor,
        f"the width of the queries (--num_heads × head size){here}": config.n_head * config.head_dim // mesh.tensor,
        f"the width of keys and values (--num_kv_heads × head size){here}":
            config.n_kv_head * config.head_dim // mesh.tensor})
