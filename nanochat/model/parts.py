"""Which part of each weight a rank of a mesh holds, and how gradients and new weights travel between the parts.

There are two kinds of parts. What the model computes with is divided along the mesh's axes tensor and fsdp: first by
tensor, a stack of matrices (L, out, in) by outputs or, of those in weights.DIVIDED_BY_INPUTS, by inputs, and a table
(V, C) by rows; then what is left by fsdp, along outputs and rows. What the optimizer keeps, the fp32 weights and its
state, is divided among all ranks: whole matrices of L / ranks layers, because Muon needs them whole (padded with zeros
where the ranks do not divide L), and V / ranks rows of a table. So both do not depend on the mesh, but for the order of
a table's rows, and checkpoints hold whole tensors.
"""
from dataclasses import dataclass

import torch

from nanochat.common import BadInput
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
from nanochat.model.weights import DIVIDED_BY_INPUTS, UNDIVIDED

GATHER_BYTES = 2**30  # of a whole tensor that every device has at a time while the ranks' parts are copied to the host


@dataclass(frozen=True)
class Parts:
    """The parts of one rank. `length` is the size of the whole weight's first dimension."""
    dist: Dist
    mesh: Mesh
    gradient_sums: torch.dtype = torch.float32

    def of_model(self, name, tensor):
        """Returns the part that the model computes with, of a whole weight called `name`, or of a layer of it. Single
        numbers, rows of them, and the weights in UNDIVIDED are whole on every rank."""
        if tensor.dim() < 2 or name in UNDIVIDED:
            return tensor
        _, *places = self.mesh.coordinates(self.dist.rank)
        # Tensor divides the whole, and fsdp what is left. Gathering goes the other way: fsdp first.
        for (axis, dim), place in reversed([*zip(_divided(name), places, strict=True)]):
            tensor = tensor.chunk(getattr(self.mesh, axis), dim)[place]
        return tensor

    def of_optimizer(self, tensor):
        """Returns the part of a whole weight, or of a tensor of its state, that the optimizer keeps."""
        number = self.dist.rank
        if self._rows_are_divided(tensor):
            # A table's rows are in the order of the model's parts, tensor, then fsdp, and data divides each of these.
            # So the ranks along data hold the model's part together, and a gather along data alone makes it.
            data, fsdp, tensor_place = self.mesh.coordinates(self.dist.rank)
            number = (tensor_place * self.mesh.fsdp + fsdp) * self.mesh.data + data
        rows = -(-tensor.size(0) // self.dist.world_size)
        part = tensor[number * rows:(number + 1) * rows]
        missing = rows - part.size(0)  # a table that the axes divide has no padding: see require_divisible
        return torch.cat([part, part.new_zeros(missing, *part.shape[1:])]) if missing else part

    def whole(self, part, length):
        """Returns the whole tensor from the optimizer's parts of all ranks. Every rank must call it."""
        whole = all_gather(part, self.dist)
        if self._rows_are_divided(part):
            # (data, fsdp, tensor, rows, C), as ranks are numbered, -> (tensor, fsdp, data, rows, C), as rows are
            sizes = self.mesh.data, self.mesh.fsdp, self.mesh.tensor
            whole = whole.unflatten(0, (*sizes, -1)).transpose(0, 2).flatten(0, 3)
        return whole[:length]

    def whole_on_host(self, part, length, is_wanted):
        """Returns the whole tensor in host memory from the optimizer's parts of all ranks, or None if it is not wanted.
        Every rank must call it.

        Every device gets what is gathered, so a large tensor is gathered some columns at a time.
        """
        columns = part.size(1)
        size = part.nbytes // part.size(0) * length
        width = next(columns // n for n in range(1, columns + 1)
                     if columns % n == 0 and (size // n <= GATHER_BYTES or n == columns))
        whole = torch.empty(length, *part.shape[1:], dtype=part.dtype) if is_wanted else None
        for begin in range(0, columns, width):
            # Where to begin is a tensor, because a Python number would make another program of each.
            chosen = None if width == columns else torch.arange(begin, begin + width).to(part.device)
            with one_program(self.dist, f"gather {(part.size(0), width, *part.shape[2:])}", collective=True):
                gathered = self.whole(part if chosen is None else part.index_select(1, chosen), length)
            if is_wanted:
                whole[:, begin:begin + width] = gathered.detach().cpu()
        return whole

    def collect(self, slices, shapes, dtype):
        """Returns ({name: what the model computes with}, {name: the optimizer's part}) of weights that come in slices,
        in host memory. No more than one slice is whole at a time.

        slices: an iterable of (name, index, tensor), which is layer `index` of a stack, or the whole weight if the
        index is None. shapes: {name: shape of the whole weight}, of those that have parts; others stay whole, and the
        optimizer has none. dtype: of the model's parts.
        """
        of_model, of_optimizer = {}, {}
        for name, index, tensor in slices:
            if name not in shapes:
                of_model[name] = tensor
                continue
            if index is None:
                of_model[name] = self.of_model(name, tensor).to(dtype)
                of_optimizer[name] = self.of_optimizer(tensor).clone()
                continue
            layers, outputs, inputs = shapes[name]
            mine, part = -(-layers // self.dist.world_size), self.of_model(name, tensor)
            if name not in of_model:
                of_model[name] = torch.empty(layers, *part.shape, dtype=dtype)
                of_optimizer[name] = torch.zeros(mine, outputs, inputs)
            of_model[name][index] = part
            if index // mine == self.dist.rank:
                of_optimizer[name][index % mine] = tensor
        return of_model, of_optimizer

    def sum_gradient(self, name, gradient):
        """Returns the optimizer's part of a gradient: of the sum of what the ranks have in the place of the model's
        part, which is summed already but along the axis data. Gradients travel to that sum in `gradient_sums`."""
        if not self.mesh.divides_weights:
            return reduce_scatter_sum(self._padded(gradient).to(self.gradient_sums), self.dist).float()
        if self.mesh.data > 1:
            gradient = scatter_sum_in_groups(self._padded(gradient).to(self.gradient_sums), self.mesh.groups("data"))
        elif not self._rows_are_divided(gradient):
            gradient = self._padded(gradient)
        if self._rows_are_divided(gradient):
            return gradient
        # A rank has parts of matrices of L / data layers. Each exchange gives away layers, and gets the outputs or
        # inputs of the layers that it keeps from the others.
        for axis, dim in self._exchanges(name):
            gradient = exchange_in_groups(gradient, self.mesh.groups(axis), split=0, concat=dim)
        return gradient

    def new_weight(self, name, part, length):
        """Returns the model's part of a weight from the optimizer's parts of it, in the dtype of `part`."""
        if not self.mesh.divides_weights:
            return self.whole(part, length)
        if self._rows_are_divided(part):
            length //= self.mesh.fsdp * self.mesh.tensor
        else:
            for axis, dim in reversed(self._exchanges(name)):
                part = exchange_in_groups(part, self.mesh.groups(axis), split=dim, concat=0)
        return (gather_in_groups(part, self.mesh.groups("data")) if self.mesh.data > 1 else part)[:length]

    def new_weights(self, parts, lengths):
        """Returns new_weight for each of `parts`, {name: part}; lengths: {name: length}.

        Parts of one shape travel together: the compiler hides few exchanges behind Muon's products, however small they
        are.
        """
        if self.mesh.divides_weights:
            return {name: self.new_weight(name, part, lengths[name]) for name, part in parts.items()}
        groups, found = {}, {}
        for name, part in parts.items():
            groups.setdefault(part.shape, []).append(name)
        for names in groups.values():
            # (names, n, …) of each rank -> (ranks × names, n, …) -> for each name (ranks, n, …)
            together = all_gather(torch.stack([parts[name] for name in names]), self.dist)
            each = together.unflatten(0, (self.dist.world_size, len(names))).unbind(1)
            found |= {name: whole.flatten(0, 1)[:lengths[name]] for name, whole in zip(names, each, strict=True)}
        return found

    def _exchanges(self, name):
        """Returns the axes along which parts of a stack become whole matrices of fewer layers, in this order, and the
        dimension of the stack that each puts together: [(axis, dimension), …]."""
        return [(axis, dim + 3) for axis, dim in _divided(name) if getattr(self.mesh, axis) > 1]

    def _rows_are_divided(self, tensor):
        """Whether it is a table, or a part of one, whose parts are divided by tensor, then by fsdp, then by data."""
        return tensor.dim() == 2 and self.mesh.divides_weights

    def _padded(self, tensor):
        # A table that these axes divide has no padding: see require_divisible.
        missing = 0 if self._rows_are_divided(tensor) else -tensor.size(0) % self.dist.world_size
        return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]) if missing else tensor


def _divided(name):
    """Returns which dimension of a weight each axis divides, counted from the last one: fsdp what tensor leaves."""
    return ("fsdp", -2), ("tensor", -1 if name in DIVIDED_BY_INPUTS else -2)


def require_parts(mesh, config):
    """Raises BadInput if a Mesh cannot divide the weights of a GPTConfig's model."""
    if not mesh.divides_weights:
        return
    require_divisible(mesh, "tensor", {
        "the attention heads (--num_heads)": config.n_head,
        "the heads of keys and values (--num_kv_heads)": config.n_kv_head})
    here = " that a chip along tensor has" if mesh.tensor > 1 else ""
    require_divisible(mesh, "fsdp", {
        f"the width (--model_dim){here}": config.n_embd // mesh.tensor,
        f"the width of keys and values (--num_kv_heads × head size){here}":
            config.n_kv_head * config.head_dim // mesh.tensor})
    if config.vocab_size % mesh.chips:
        raise BadInput(f"{mesh.source} divides the vocabulary among all {mesh.chips} chips, and "
                       f"{config.vocab_size} tokens cannot be divided by {mesh.chips}: use "
                       f"{mesh.ask_for_whole_weights()}, or a tokenizer with "
                       f"{-(-config.vocab_size // mesh.chips) * mesh.chips} tokens")
