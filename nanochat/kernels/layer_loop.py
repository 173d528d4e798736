"""All layers of a model as one loop of an XLA program, forward and backward.

Autograd would unroll the layers: a program sixteen times as long, with gradients that are added up afterwards. Here the
forward pass is a loop, and the backward pass a second one, from the last layer to the first, which adds to the
gradients in place, slice by slice. Both are xla_ops.loop: it calls body(index, carry, read, write, constants) for each
layer. The carry goes from one call to the next. Of the stacks `read` and `write`, the body gets the slice of the layer,
and what it returns for `write` replaces that slice.

A layer is a function that PyTorch can differentiate. By default the backward loop computes each layer again from its
input, and differentiates it inside the traced body of the loop. A layer may bring its own backward pass (LayerByHand):
then the forward loop keeps what that needs, and little or nothing is computed twice.

The calls for a GPT: Decoder._all_layers → run_all (xla.py) → run_layers → _forward and _backward (gpt_layer.py).
"""
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from nanochat.device.xla_ops import add_if, loop, put, take
from nanochat.kernels.products import Halves
from nanochat.kernels.sharded import WHOLE, Sharding


class Given(NamedTuple):
    """A layer's arguments beside its input."""
    x0: torch.Tensor  # (B, T, C), the input of the first layer
    weights: Any  # this layer's slice of each stack, whole, in the dtype of x
    window: torch.Tensor | None  # int32 (), as in Kernels.attention
    tables: tuple  # further tensors, which have no gradient
    adds: torch.Tensor | None  # int32 (), of layers.LayerValues
    values: torch.Tensor | None  # (B, T, C_kv)

    def value(self):
        """Returns what the layer adds to attention's values, (B, T, C_kv), or None if no layer of the model adds
        anything. A layer that adds nothing gets 0."""
        if self.values is None:
            return None
        return torch.where(self.adds > 0, self.values, 0.0).to(self.values.dtype)


@dataclass(frozen=True)
class LayerByHand:
    """A layer with its own backward pass. `saved` is a tuple of stacks, (slots, B, T, width) each. The forward pass
    writes to slot `index` of them, and the backward pass reads that slot."""
    # new_saved(x, weights, slots) -> saved, stacks of zeros. weights: stacks, or the slices of a layer.
    new_saved: Callable
    # forward(x, index, saved, given) -> (x after the layer, saved)
    forward: Callable
    # backward(x, index, d_out, saved, given) -> the gradients of x, of x0, of given.value(), and of weights, a tuple
    backward: Callable


@dataclass(frozen=True)
class Layer:
    """A layer for run_layers. Pass the same object at every call: another one builds the loops again."""
    # forward(x, x0, weights, window, tables, value) -> x (B, T, C) after the layer, differentiable. See Given.
    forward: Callable
    # The same layer with its own backward pass. None: the backward pass differentiates `forward`.
    by_hand: LayerByHand | None = None
    # How the ranks divide the weights. The loops gather a layer's weights, and scatter their gradients.
    sharding: Sharding = WHOLE
    products: Halves = Halves()  # how attention and MLP of the layer by hand multiply: plainly, or in 8 bits


def run_layers(layer, x, stacks, windows, tables, keeps_input_only=False, values=None):
    """Returns x (B, T, C) after all layers. Its backward pass adds to the `main_grad` of each of `stacks`.

    stacks: a named tuple of weights, each (layers, …); windows: int32 (layers,), or None if every layer sees all
    positions; tables: further tensors, which have no gradient. keeps_input_only: a layer by hand is computed again from
    its input, too. values: LayerValues, or None.
    """
    per_layer = []  # read beside the stacks
    if windows is not None:
        per_layer.append(windows)
    array = None
    if values is not None:
        per_layer.append(values.adds)
        array = values.array
    loops = _Loops(layer, type(stacks), windows is not None, len(tables), values is not None,
                   keeps_input_only or layer.by_hand is None)
    return _AllLayers.apply(x, array, per_layer, tables, loops, torch.is_grad_enabled(), *stacks)


# What one loop leaves to the other: the input of every layer in `inputs`, (layers, B, T, C), and the stacks of a layer
# by hand. Slot i belongs to layer i alone. So the backward loop, which goes from the last layer to the first, finds at
# index i all that layer i needs. Without a gradient nothing is left over, and one slot serves all layers in turn.
#
# The gradients go another way. They begin as the sums of earlier micro-steps, which are the loop's `write`: iteration i
# gets slice i, adds to it and returns it. So XLA adds in place, and a separate gradient of all layers never exists. x0
# is the same in every layer, so its gradient is carried from layer to layer, as is that of the values.
class _AllLayers(torch.autograd.Function):

    @staticmethod
    def forward(ctx, x, values, per_layer, tables, loops, is_training, *stacks):
        layer = loops.layer
        num_layers = stacks[0].size(0)
        read = []  # of each weight: itself, or its 8-bit numbers and their scales
        for name, stack in zip(loops.weights_type._fields, stacks, strict=True):
            read += [tensor.detach() for tensor in layer.products.of(name).to_read(name, stack)]
        read += per_layer
        constants = [x, *tables]
        if values is not None:
            constants.append(values.detach())
        inputs = x.new_zeros(num_layers if is_training else 1, *x.shape)  # (slots, B, T, C), see _slot
        saved = ()
        if layer.by_hand:
            slots = num_layers if is_training and not loops.keeps_input_only else 1
            # A layer computes with gathered weights, so the stacks have the widths of whole ones.
            whole = map(layer.sharding.whole_shape, stacks, loops.weights_type._fields)
            saved = layer.by_hand.new_saved(x, loops.weights_type(*whole), slots)
        (out, inputs, *saved), _ = loop(_ForwardBody(loops), (x, inputs, *saved), read, (), constants)
        if is_training:
            if loops.keeps_input_only:
                saved = []
            ctx.save_for_backward(inputs, *saved)
            ctx.others = loops, read, constants, stacks
        return out

    @staticmethod
    def backward(ctx, d_out):
        inputs, *saved = ctx.saved_tensors
        loops, read, constants, stacks = ctx.others
        carry = [d_out, torch.zeros_like(d_out)]
        if loops.has_values:
            carry.append(torch.zeros_like(constants[-1]))
        (d_x, d_x0, *d_values), gradients = loop(
            _BackwardBody(loops, len(saved)), carry, read, [stack.main_grad for stack in stacks],
            (inputs, *saved, *constants), reverse=True)
        for stack, gradient in zip(stacks, gradients, strict=True):
            stack.main_grad.copy_(gradient)
        # x is both the first layer's input and the x0 of every layer.
        return d_x + d_x0, *(d_values or [None]), *[None] * (4 + len(stacks))


@dataclass(frozen=True)
class _Loops:
    """What both loops have in common. Equal ones are the same program."""
    layer: Layer
    weights_type: Any
    has_windows: bool
    num_tables: int
    has_values: bool  # layers add to attention's values
    keeps_input_only: bool

    def given(self, read, constants):
        """Returns a layer's Given, from the slices of what the loops read, and from their constants."""
        x0, *others = constants
        # The weights are gathered in the body of the loop, so those of one layer are whole at a time.
        tensors = iter(read)
        weights = []
        for name in self.weights_type._fields:
            products = self.layer.products.of(name)
            weights.append(products.read(tensors, name, x0.dtype, self.layer.sharding.gather))
        window = next(tensors) if self.has_windows else None
        adds = values = None
        if self.has_values:
            adds = next(tensors)
            values = others[self.num_tables]
        return Given(x0, self.weights_type(*weights), window, others[:self.num_tables], adds, values)


@dataclass(frozen=True)
class _ForwardBody:
    loops: _Loops

    def __call__(self, index, carry, read, write, constants):
        x, inputs, *saved = carry
        layer = self.loops.layer
        inputs = put(inputs, _slot(inputs, index), x)
        given = self.loops.given(read, constants)
        if layer.by_hand:
            out, saved = layer.by_hand.forward(x, _slot(saved[0], index), saved, given)
        else:
            out = layer.forward(x, given.x0, given.weights, given.window, given.tables, given.value())
        return (out, inputs, *saved), ()


@dataclass(frozen=True)
class _BackwardBody:
    loops: _Loops
    num_saved: int  # stacks that the forward loop kept beside the inputs

    def __call__(self, index, carry, read, write, constants):
        d_out, d_x0, *d_values = carry
        inputs, *rest = constants
        saved = rest[:self.num_saved]
        layer = self.loops.layer
        given = self.loops.given(read, rest[self.num_saved:])
        x = take(inputs, index)
        if layer.by_hand:
            if not saved:
                # The forward loop kept the layer's input alone: one slot holds what this layer's backward pass needs.
                index = torch.zeros_like(index)
                saved = layer.by_hand.new_saved(x, given.weights, 1)
                _, saved = layer.by_hand.forward(x, index, saved, given)
            d_x, d_x0_here, d_value, d_weights = layer.by_hand.backward(x, index, d_out, saved, given)
        else:
            d_x, d_x0_here, d_value, d_weights = _differentiated(layer, x, d_out, given)
        if d_values:
            d_values = [add_if(given.adds, d_values[0], d_value)]
        sums = []
        for name, total, gradient in zip(self.loops.weights_type._fields, write, d_weights, strict=True):
            sums.append(total + layer.sharding.scatter(gradient, x.dtype, name).to(total.dtype))
        return (d_x, d_x0 + d_x0_here, *d_values), tuple(sums)


def _differentiated(layer, x, d_out, given):
    """Computes the layer again, and returns the gradients of x, of x0, of the value, and of the weights."""
    value = given.value()
    end = 2 + len(given.weights)  # x, x0, the weights, and the value if there is one
    with torch.enable_grad():
        tensors = [x, given.x0, *given.weights, *([] if value is None else [value])]
        tensors = [tensor.detach().requires_grad_() for tensor in tensors]
        if value is not None:
            value = tensors[end]
        weights = type(given.weights)(*tensors[2:end])
        out = layer.forward(*tensors[:2], weights, given.window, given.tables, value)
        gradients = torch.autograd.grad(out, tensors, d_out, materialize_grads=True)
    d_x, d_x0 = gradients[:2]
    d_value = None if value is None else gradients[end]
    return d_x, d_x0, d_value, gradients[2:end]


def _slot(stack, index):
    """Where in a stack a layer writes: at its index, or over the previous layer's values if there is a single slot."""
    return index if stack.size(0) > 1 else torch.zeros_like(index)
