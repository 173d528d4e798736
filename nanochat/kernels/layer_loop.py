"""All layers of a model as one loop of an XLA program, forward and backward.

Autograd would unroll the layers: a program sixteen times as long, with gradients that are added up afterwards. Here the
forward pass is a loop, and the backward pass a second one from the last layer to the first, which adds to the gradients
in place, slice by slice.

A layer is a function that PyTorch can differentiate. By default the backward loop computes each layer again from its
input, and differentiates it inside the traced body of the loop. A layer may bring its own backward pass, written by
hand (LayerByHand): then the forward loop can keep what that needs, so that nothing is computed twice, or little.
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
    forward(x, index, saved, x0, weights, window, tables) -> (x after the layer, saved)
    backward(x, index, d_out, saved, x0, weights, window, tables) -> (d x, d x0, a tuple of the gradients of weights)
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


def run_layers(layer, x, stacks, windows, tables, keeps_input_only=False):
    """Returns x (B, T, C) after all layers. Its backward pass adds to the `main_grad` of each of `stacks`.

    stacks: a NamedTuple of weights, each (layers, …); windows: int32 (layers,), or None where every layer sees all
    positions; tables: further tensors, which have no gradient. keeps_input_only: also of a layer that is written by
    hand.
    """
    keeps_input_only = keeps_input_only or layer.by_hand is None
    return _AllLayers.apply(x, windows, tables, layer, keeps_input_only, torch.is_grad_enabled(), type(stacks), *stacks)


class _AllLayers(torch.autograd.Function):

    @staticmethod
    def forward(ctx, x, windows, tables, layer, keeps_input_only, is_training, weights_type, *stacks):
        read = [stack.detach() for stack in stacks] + ([windows] if windows is not None else [])
        layers = stacks[0].size(0)
        slots = layers if is_training and not keeps_input_only else 1
        inputs = x.new_zeros(layers if is_training else 1, *x.shape)
        whole = weights_type(*map(layer.sharding.whole_shape, stacks))
        saved = layer.by_hand.new_saved(x, whole, slots) if layer.by_hand else ()
        body = _ForwardBody(layer, weights_type)
        (out, inputs, *saved), _ = loop(body, (x, inputs, *saved), read, (), (x, *tables))
        if is_training:
            ctx.save_for_backward(x, inputs, *([] if keeps_input_only else saved))
            ctx.others = read, tables, layer, weights_type, stacks
        return out

    @staticmethod
    def backward(ctx, d_out):
        x0, inputs, *saved = ctx.saved_tensors
        read, tables, layer, weights_type, stacks = ctx.others
        (d_x, d_x0), gradients = loop(
            _BackwardBody(layer, weights_type, len(saved)), (d_out, torch.zeros_like(d_out)), read,
            [stack.main_grad for stack in stacks], (x0, inputs, *saved, *tables), reverse=True)
        for stack, gradient in zip(stacks, gradients, strict=True):
            stack.main_grad.copy_(gradient)
        return d_x + d_x0, *[None] * (6 + len(stacks))


@dataclass(frozen=True)
class _ForwardBody:
    layer: Layer
    weights_type: Any

    def __call__(self, index, carry, read, write, constants):
        (x, inputs, *saved), (x0, *tables) = carry, constants
        inputs = put(inputs, _slot(inputs, index), x)
        weights, window = _slices(self.layer, self.weights_type, read, x0.dtype)
        if self.layer.by_hand:
            slot = _slot(saved[0], index)
            out, saved = self.layer.by_hand.forward(x, slot, saved, x0, weights, window, tables)
        else:
            out = self.layer.forward(x, x0, weights, window, tables)
        return (out, inputs, *saved), ()


@dataclass(frozen=True)
class _BackwardBody:
    layer: Layer
    weights_type: Any
    num_saved: int  # stacks that the forward loop kept beside the inputs

    def __call__(self, index, carry, read, write, constants):
        (d_out, d_x0), (x0, inputs, *rest) = carry, constants
        saved, tables = rest[:self.num_saved], rest[self.num_saved:]
        weights, window = _slices(self.layer, self.weights_type, read, x0.dtype)
        x = take(inputs, index)
        if self.layer.by_hand:
            by_hand = self.layer.by_hand
            if not saved:
                index = torch.zeros_like(index)
                _, saved = by_hand.forward(x, index, by_hand.new_saved(x, weights, 1), x0, weights, window, tables)
            d_x, d_x0_here, d_weights = by_hand.backward(x, index, d_out, saved, x0, weights, window, tables)
        else:
            d_x, d_x0_here, d_weights = _differentiated(self.layer, x, d_out, x0, weights, window, tables)
        parts = map(self.layer.sharding.scatter, d_weights)
        added = tuple(total + part.to(total.dtype) for total, part in zip(write, parts, strict=True))
        return (d_x, d_x0 + d_x0_here), added


def _differentiated(layer, x, d_out, x0, weights, window, tables):
    """Computes the layer again, and returns the gradients of x, of x0 and of its weights."""
    with torch.enable_grad():
        x, x0, *weights_ = (tensor.detach().requires_grad_() for tensor in (x, x0, *weights))
        out = layer.forward(x, x0, type(weights)(*weights_), window, tables)
        d_x, d_x0, *d_weights = torch.autograd.grad(out, [x, x0, *weights_], d_out)
    return d_x, d_x0, d_weights


def _slices(layer, weights_type, read, dtype):
    """A layer's whole weights in `dtype`, and its window, or None, from its slices of what the loop reads."""
    number = len(weights_type._fields)
    weights = (layer.sharding.gather(weight.to(dtype)) for weight in read[:number])
    return weights_type(*weights), *(read[number:] or (None,))


def _slot(stack, index):
    """Where in a stack a layer writes: at its index, or over what the layer before wrote, if there is one slot."""
    return index if stack.size(0) > 1 else torch.zeros_like(index)
