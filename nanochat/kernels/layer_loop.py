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

from nanochat.device.xla_ops import loop, put, put_columns, take, take_columns
from nanochat.kernels.sharded import WHOLE, Sharding


@dataclass(frozen=True)
class LayerByHand:
    """A layer with its own backward pass. `saved` is a tuple of stacks, (slots, B, T, width) each. The forward pass
    writes to slot `index` of them, and the backward pass reads that slot.

    new_saved(x, weights, slots) -> saved: stacks of zeros; weights are stacks or the slices of a layer
    forward(x, index, saved, x0, weights, window, tables, value) -> (x after the layer, saved)
    backward(x, index, d_out, saved, x0, weights, window, tables, value) -> (d x, d x0, d value, a tuple of the
        gradients of weights); d value is not used where value is None
    """
    new_saved: Callable
    forward: Callable
    backward: Callable


@dataclass(frozen=True)
class Layer:
    """A layer for run_layers. Use the same object at every call: otherwise its loops are built again each time.

    forward(x, x0, weights, window, tables, value) -> x (B, T, C) after the layer, differentiable. x0 is the input of
        the first layer, weights this layer's slice of each stack in the dtype of x, window an int32 scalar or None,
        value what the layer adds to attention's values, (B, T, C_kv), or None
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
    computed again from its input, too. values: which of the n blocks of C_kv columns of an array (B, T, n × C_kv) each
    layer adds to attention's values, int32 (layers,), n where it adds none; and that array; or None.
    """
    keeps_input_only = keeps_input_only or layer.by_hand is None
    slots, values = values or (None, None)
    return _AllLayers.apply(x, values, slots, windows, tables, layer, keeps_input_only, torch.is_grad_enabled(),
                            type(stacks), *stacks)


class _AllLayers(torch.autograd.Function):

    @staticmethod
    def forward(ctx, x, values, slots, windows, tables, layer, keeps_input_only, is_training, weights_type, *stacks):
        slices = _Slices(layer, weights_type, windows is not None, values is not None)
        read = [stack.detach() for stack in stacks] + [numbers for numbers in (windows, slots) if numbers is not None]
        constants = (x, *tables, *([] if values is None else [values.detach()]))
        layers = stacks[0].size(0)
        kept = layers if is_training and not keeps_input_only else 1
        inputs = x.new_zeros(layers if is_training else 1, *x.shape)
        whole = weights_type(*map(layer.sharding.whole_shape, stacks))
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
        d_values = [constants[-1]] if slices.has_values else []  # all of it is replaced
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
        """Returns a layer's x0, its whole weights in the dtype of x0, its window or None, the tables, and its value or
        None."""
        x0, *tables = constants
        number = len(self.weights_type._fields)
        weights = self.weights_type(*(self.layer.sharding.gather(weight.to(x0.dtype)) for weight in read[:number]))
        window = read[number] if self.has_windows else None
        if not self.has_values:
            return x0, weights, window, tables, None
        *tables, values = tables
        value = take_columns(values, read[-1], weights.attn_v.size(-2))
        return x0, weights, window, tables, torch.where(self.has_value(read, value, values), value, 0.0).to(value.dtype)

    def has_value(self, read, value, values):
        """Returns whether a layer adds something to attention's values, a boolean scalar."""
        return read[-1] < values.size(-1) // value.size(-1)

    def put_gradient(self, d_values, d_value, read):
        """Returns the gradient of all layers' values with that of this layer's."""
        before = take_columns(d_values, read[-1], d_value.size(-1))
        return put_columns(d_values, read[-1], torch.where(self.has_value(read, d_value, d_values), d_value, before))


@dataclass(frozen=True)
class _ForwardBody:
    slices: _Slices

    def __call__(self, index, carry, read, write, constants):
        (x, inputs, *saved), layer = carry, self.slices.layer
        inputs = put(inputs, _slot(inputs, index), x)
        x0, weights, window, tables, value = self.slices(read, constants)
        if layer.by_hand:
            slot = _slot(saved[0], index)
            out, saved = layer.by_hand.forward(x, slot, saved, x0, weights, window, tables, value)
        else:
            out = layer.forward(x, x0, weights, window, tables, value)
        return (out, inputs, *saved), ()


@dataclass(frozen=True)
class _BackwardBody:
    slices: _Slices
    num_saved: int  # stacks that the forward loop kept beside the inputs

    def __call__(self, index, carry, read, write, constants):
        (d_out, d_x0, *d_values), (inputs, *rest), layer = carry, constants, self.slices.layer
        saved = rest[:self.num_saved]
        x0, *others = self.slices(read, rest[self.num_saved:])  # weights, window, tables, value
        x = take(inputs, index)
        if layer.by_hand:
            by_hand = layer.by_hand
            if not saved:
                index = torch.zeros_like(index)
                _, saved = by_hand.forward(x, index, by_hand.new_saved(x, others[0], 1), x0, *others)
            d_x, d_x0_here, d_value, d_weights = by_hand.backward(x, index, d_out, saved, x0, *others)
        else:
            d_x, d_x0_here, d_value, d_weights = _differentiated(layer, x, d_out, x0, *others)
        parts = map(layer.sharding.scatter, d_weights)
        added = tuple(total + part.to(total.dtype) for total, part in zip(write, parts, strict=True))
        d_values = (self.slices.put_gradient(gradients, d_value, read) for gradients in d_values)
        return (d_x, d_x0 + d_x0_here, *d_values), added


def _differentiated(layer, x, d_out, x0, weights, window, tables, value):
    """Computes the layer again, and returns the gradients of x, of x0, of its value, if it has one, and of its
    weights."""
    with torch.enable_grad():
        x, x0, *weights_ = (tensor.detach().requires_grad_() for tensor in (x, x0, *weights))
        values = [] if value is None else [value.detach().requires_grad_()]
        out = layer.forward(x, x0, type(weights)(*weights_), window, tables, *(values or [None]))
        d_x, d_x0, *d_others = torch.autograd.grad(out, [x, x0, *values, *weights_], d_out)
    return d_x, d_x0, d_others[0], d_others[len(values):]


def _slot(stack, index):
    """Where in a stack a layer writes: at its index, or over what the layer before wrote, if there is one slot."""
    return index if stack.size(0) > 1 else torch.zeros_like(index)
