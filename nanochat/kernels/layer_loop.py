"""All layers of a model as one loop of an XLA program, forward and backward.

Autograd would unroll the layers: a program sixteen times as long, with gradients that are added up afterwards. Here the
forward pass is a loop, and the backward pass a second one from the last layer to the first, which adds to the gradients
in place, slice by slice.

A layer is a function that PyTorch can differentiate. By default the backward loop computes each layer again from its
input, and differentiates it inside the traced body of the loop. A layer may bring its own backward pass, written by
hand (LayerByHand): then the forward loop can keep what that needs, so that little or nothing is computed twice.
"""
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from nanochat.device.xla_ops import loop, put, take
from nanochat.kernels.sharded import WHOLE, Sharding


@dataclass(frozen=True)
class LayerByHand:
    """A layer with its own backward pass. `saved` is a tuple of stacks, (slots, B, T, width) each. The forward pass
    writes to slot `index` of them, and the backward pass reads that slot.

    new_saved(x, weights, slots) -> saved: stacks of zeros; weights are stacks or the slices of a layer
    forward(x, index, saved, x0, weights, window, tables, values) -> (x after the layer, saved)
    backward(x, index, d_out, saved, x0, weights, window, tables, values, d_values) -> (d x, d x0, d_values, a tuple of
        the gradients of weights)

    values is None, or an int32 scalar and an array, see run_layers. d_values is a list with the gradient of that array,
    to which each layer adds its part; an empty one without values.
    """
    new_saved: Callable
    forward: Callable
    backward: Callable


@dataclass(frozen=True)
class Layer:
    """A layer for run_layers. Use the same object at every call: otherwise its loops are built again each time.

    forward(x, x0, weights, window, tables) -> x (B, T, C) after the layer, differentiable. x0 is the input of the first
        layer, weights this layer's slice of each stack in the dtype of x, window an int32 scalar or None
    by_hand: the same layer with its own backward pass; None: the backward pass differentiates `forward`
    sharding: how the ranks divide the weights. The loops gather those of a layer, and scatter their gradients
    """
    forward: Callable
    by_hand: LayerByHand | None = None
    sharding: Sharding = WHOLE


def run_layers(layer, x, stacks, windows, tables, keeps_input_only=False, values=None):
    """Returns x (B, T, C) after all layers. Its backward pass adds to the `main_grad` of each of `stacks`.

    stacks: a NamedTuple of weights, each (layers, …); windows: int32 (layers,), or None where every layer sees all
    positions; tables: further tensors, which have no gradient. keeps_input_only: a layer that is written by hand is
    computed again from its input, too. values, for layers written by hand: a number for each layer, int32 (layers,),
    and an array that all of them read and whose gradient each writes a part of, until all of it is written; or None.
    """
    keeps_input_only = keeps_input_only or layer.by_hand is None
    numbers, values = values or (None, None)
    return _AllLayers.apply(x, values, numbers, windows, tables, layer, keeps_input_only, torch.is_grad_enabled(),
                            type(stacks), *stacks)


class _AllLayers(torch.autograd.Function):

    @staticmethod
    def forward(ctx, x, values, numbers, windows, tables, layer, keeps_input_only, is_training, weights_type, *stacks):
        slices = _Slices(layer, weights_type, windows is not None, values is not None)
        read = [stack.detach() for stack in stacks] + [each for each in (windows, numbers) if each is not None]
        constants = (x, *tables, *([] if values is None else [values.detach()]))
        layers = stacks[0].size(0)
        kept = layers if is_training and not keeps_input_only else 1
        inputs = x.new_zeros(layers if is_training else 1, *x.shape)
        whole = weights_type(*map(layer.sharding.whole_shape, stacks, weights_type._fields))
        saved = layer.by_hand.new_saved(x, whole, kept) if layer.by_hand else ()
        (out, inputs, *saved), _ = loop(_ForwardBody(slices), (x, inputs, *saved), read, (), constants)
        if is_training:
            ctx.save_for_backward(inputs, *([] if keeps_input_only else saved))
            ctx.others = slices, read, constants, stacks
        return out

    @staticmethod
    def backward(ctx, d_out):
        inputs, *saved = ctx.saved_tensors
        slices, read, constants, stacks = ctx.others
        d_values = [torch.zeros_like(constants[-1])] if slices.has_values else []
        (d_x, d_x0, *d_values), gradients = loop(
            _BackwardBody(slices, len(saved)), (d_out, torch.zeros_like(d_out), *d_values), read,
            [stack.main_grad for stack in stacks], (inputs, *saved, *constants), reverse=True)
        for stack, gradient in zip(stacks, gradients, strict=True):
            stack.main_grad.copy_(gradient)
        return d_x + d_x0, *(d_values or [None]), *[None] * (7 + len(stacks))


@dataclass(frozen=True)
class _Slices:
    """What a layer gets of what the loops read."""
    layer: Layer
    weights_type: Any
    has_windows: bool
    has_values: bool

    def __call__(self, read, constants):
        """Returns x0, a layer's whole weights in the dtype of x0, its window or None, the tables, and the values: its
        number and the array, or None."""
        x0, *tables = constants
        names = self.weights_type._fields
        weights = self.weights_type(*(self.layer.sharding.gather(weight.to(x0.dtype), name)
                                      for weight, name in zip(read, names, strict=False)))  # windows and numbers follow
        values = (read[-1], tables.pop()) if self.has_values else None
        return x0, weights, read[len(names)] if self.has_windows else None, tables, values


@dataclass(frozen=True)
class _ForwardBody:
    slices: _Slices

    def __call__(self, index, carry, read, write, constants):
        (x, inputs, *saved), layer = carry, self.slices.layer
        inputs = put(inputs, _slot(inputs, index), x)
        x0, weights, window, tables, values = self.slices(read, constants)
        if layer.by_hand:
            slot = _slot(saved[0], index)
            out, saved = layer.by_hand.forward(x, slot, saved, x0, weights, window, tables, values)
        else:
            out = layer.forward(x, x0, weights, window, tables)
        return (out, inputs, *saved), ()


@dataclass(frozen=True)
class _BackwardBody:
    slices: _Slices
    num_saved: int  # stacks that the forward loop kept beside the inputs

    def __call__(self, index, carry, read, write, constants):
        (d_out, d_x0, *d_values), (inputs, *rest), layer = carry, constants, self.slices.layer
        saved = rest[:self.num_saved]
        x0, weights, window, tables, values = self.slices(read, rest[self.num_saved:])
        x = take(inputs, index)
        if layer.by_hand:
            by_hand, given = layer.by_hand, (x0, weights, window, tables, values)
            if not saved:
                index = torch.zeros_like(index)
                _, saved = by_hand.forward(x, index, by_hand.new_saved(x, weights, 1), *given)
            d_x, d_x0_here, d_values, d_weights = by_hand.backward(x, index, d_out, saved, *given, d_values)
        else:
            d_x, d_x0_here, d_weights = _differentiated(layer, x, d_out, x0, weights, window, tables)
        parts = map(layer.sharding.scatter, d_weights, self.slices.weights_type._fields)
        added = tuple(total + part.to(total.dtype) for total, part in zip(write, parts, strict=True))
        return (d_x, d_x0 + d_x0_here, *d_values), added


def _differentiated(layer, x, d_out, x0, weights, window, tables):
    """Computes the layer again, and returns the gradients of x, of x0 and of its weights."""
    with torch.enable_grad():
        x, x0, *weights_ = (tensor.detach().requires_grad_() for tensor in (x, x0, *weights))
        out = layer.forward(x, x0, type(weights)(*weights_), window, tables)
        d_x, d_x0, *d_weights = torch.autograd.grad(out, [x, x0, *weights_], d_out)
    return d_x, d_x0, d_weights


def _slot(stack, index):
    """Where in a stack a layer writes: at its index, or over what the layer before wrote, if there is one slot."""
    return index if stack.size(0) > 1 else torch.zeros_like(index)
