"""The GPT's layer (layers.gpt_layer) for the loop over the layers, with a backward pass written by hand.

What the backward pass needs, the forward pass keeps: 9 widths per token and layer. Some of it is put into its stack and
used from there, so that the matrix product that makes it writes it there directly, where XLA would rather copy.
RMSNorm multiplies the vector of each token by a number s, and norm(x) W = s (x W), so no normalised copy of x is made.
tests/kernels/test_layer_loop.py compares all of it with autograd.
"""
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

from nanochat.common import BadInput
from nanochat.device.xla_ops import put, take
from nanochat.kernels import plain
from nanochat.kernels.layer_loop import Layer, LayerByHand
from nanochat.kernels.sharded import WHOLE, Sharding
from nanochat.model.gates import ATTENTION, MLP, VALUES, gate_backward, gate_of, gated
from nanochat.model.layers import (
    NORM_EPS,
    LayerOptions,
    WholeText,
    gpt_layer,
    one_later,
    shift_keys,
    shift_keys_backward,
)

KNOWN = {"head_dim", "layer_gates", "key_shift"}  # the LayerOptions that this file computes


@dataclass(frozen=True)
class AttentionByHand:
    """Attention of layer `index` with its own backward pass. q, k and v are stacks of (B, T, heads × head_dim): the
    products of attn_q, attn_k and attn_v, keys shifted, not yet rotated or normalised. The output y is (B, T,
    H × head_dim)."""
    # forward(q, k, v, index, window, *tables) -> y, log_sums. window: int32 scalar, or None. log_sums is what else the
    # backward pass needs, fp32, or None.
    forward: Callable
    # backward(q, k, v, index, window, log_sums, d_y, *tables) -> gradients of the layer's q, k and v. log_sums is a
    # stack, too.
    backward: Callable
    # tables(cos, sin) -> the tables, of those of layers.rotary_tables.
    tables: Callable
    # log_sums_shape(B, T, width of q) -> the shape of a layer's log_sums. None where there are none.
    log_sums_shape: Callable | None = None
    # row_major_matmul(x, weight): x @ weight for (B, T, in) and (in, out), which a TPU is to keep in memory in this
    # order.
    row_major_matmul: Callable = torch.matmul


class Saved(NamedTuple):
    """Stacks that are kept for the backward pass, of (B, T, width) each but the last."""
    q: torch.Tensor | None  # q, k and v are all kept, or none of them: then the backward pass computes them again
    k: torch.Tensor | None
    v: torch.Tensor | None
    y: torch.Tensor  # attention's output
    h: torch.Tensor  # the hidden units after ReLU, before they are squared
    x_mid: torch.Tensor | None = None  # between attention and MLP: kept where ranks along tensor must add it up
    log_sums: torch.Tensor | None = None  # see AttentionByHand

    @classmethod
    def of(cls, how, stacks):
        """The same from `stacks`, a tuple without those that there are not."""
        there_are = (*[how.keeps_qkv] * 3, True, True, bool(how.sharding.tensor_groups),
                     how.attention.log_sums_shape is not None)
        stacks = iter(stacks)
        return cls(*(next(stacks) if there_is else None for there_is in there_are))

    def stacks(self):
        return tuple(stack for stack in self if stack is not None)


@dataclass(frozen=True)
class How:
    """How a layer is computed."""
    options: LayerOptions
    attention: AttentionByHand
    sharding: Sharding = WHOLE
    keeps_qkv: bool = True  # otherwise the backward pass computes q, k and v again


@cache
def gpt_layer_for_loop(how):
    """The GPT's Layer, with its backward pass by hand where this file knows all of its options."""
    by_hand = None
    if unknown := how.options.unknown(KNOWN):
        if how.sharding.tensor_groups:
            raise BadInput(f"--mesh_tensor={len(how.sharding.tensor_groups[0])} is not for a model with {unknown}: "
                           "use --mesh_tensor=1")
    else:
        by_hand = LayerByHand(*(partial(function, how) for function in (_new_saved, _forward, _backward)))
    return Layer(partial(_by_definition, how.options), by_hand, how.sharding)


def tables_for_loop(how, rotary):
    """Returns the tables that this Layer gets, of those of layers.rotary_tables."""
    return how.attention.tables(*rotary) if gpt_layer_for_loop(how).by_hand else rotary


def _by_definition(options, x, x0, weights, window, tables, value):
    rotary = [table.to(x.dtype) for table in tables]
    return gpt_layer(options, x, x0, weights, rotary, WholeText(plain.attention, window), value)


def _new_saved(how, x, weights, slots):
    width, kv_width, hidden = (weight.size(-2) for weight in (weights.attn_q, weights.attn_k, weights.mlp_in))
    widths = (*([width, kv_width, kv_width] if how.keeps_qkv else []), width, hidden,
              *([x.size(-1)] if how.sharding.tensor_groups else []))
    saved = [x.new_zeros(slots, *x.shape[:-1], width) for width in widths]
    if how.attention.log_sums_shape:
        shape = how.attention.log_sums_shape(*x.shape[:-1], width)
        saved.append(x.new_zeros(slots, *shape, dtype=torch.float32))
    return tuple(saved)


# -----------------------------------------------------------------------------
# The passes. `given` is what the layer gets: layer_loop.Given


def _forward(how, x, index, saved, given):
    saved, weights = Saved.of(how, saved), given.weights
    x_in = _mixed(x, given)
    scale = _reciprocal_rms(x_in)
    q, k, v = _queries_keys_values(how, x_in, scale, weights, given.value())
    # Attention reads its operands from stacks, at the slot `at`. Where q, k and v are not kept, each is a stack of one
    # slot.
    if how.keeps_qkv:
        at = index
        q, k, v = (put(stack, index, product, use_from_memory=True)
                   for stack, product in ((saved.q, q), (saved.k, k), (saved.v, v)))
        saved = saved._replace(q=q, k=k, v=v)
    else:
        at = torch.zeros_like(index)
        q, k, v = q[None], k[None], v[None]
    y, log_sums = how.attention.forward(q, k, v, at, given.window, *given.tables)
    attended = how.sharding.sum(F.linear(y, weights.attn_o))
    x_mid = x_in + gated(gate_of(how.options, weights, ATTENTION, x_in, scale), attended)
    scale = _reciprocal_rms(x_mid)
    h = F.relu(scale * F.linear(x_mid, weights.mlp_in)).to(x.dtype)
    h = put(saved.h, index, h, use_from_memory=True)
    added = how.sharding.sum(F.linear(take(h, index).square(), weights.mlp_out))
    out = x_mid + gated(gate_of(how.options, weights, MLP, x_mid, scale), added)
    saved = saved._replace(y=put(saved.y, index, y), h=h)
    if saved.x_mid is not None:
        saved = saved._replace(x_mid=put(saved.x_mid, index, x_mid))
    if log_sums is not None:
        saved = saved._replace(log_sums=put(saved.log_sums, index, log_sums))
    return out, saved.stacks()


def _queries_keys_values(how, x_in, scale, weights, value):
    """Returns attention's queries, keys and values, (B, T, width) each. scale: the reciprocal root mean square of
    x_in; value: what is added to the values, or None."""
    q = (scale * F.linear(x_in, weights.attn_q)).to(x_in.dtype)
    k = (scale * F.linear(x_in, weights.attn_k)).to(x_in.dtype)
    if how.options.key_shift:
        k = shift_keys(k, one_later(k), how.options.head_dim)
    v = gated(gate_of(how.options, weights, VALUES, x_in, scale), scale * F.linear(x_in, weights.attn_v))
    if value is not None:
        v = v + value
    return q, k, v.to(x_in.dtype)


def _backward(how, x, index, d_out, saved, given):
    saved, weights = Saved.of(how, saved), given.weights
    y, h = take(saved.y, index), take(saved.h, index)
    x_in = _mixed(x, given)
    gate = None
    if how.options.layer_gates:
        gate = gate_of(how.options, weights, ATTENTION, x_in, _reciprocal_rms(x_in))
    # One product makes x_mid again, which is cheaper than a stack: 165.5 instead of 170.7 Mcycles a micro-step on v5e
    # at depth 16. Along tensor the ranks would have to sum it again, so there it is kept.
    if saved.x_mid is None:
        x_mid = x_in + gated(gate, F.linear(y, weights.attn_o))
    else:
        x_mid = take(saved.x_mid, index)
    d_mid, of_mlp, mlp_gate = _mlp_backward(how, x_mid, h, d_out, weights)
    # A gate is one number per token, so it can multiply either side of a product with attn_o. With the gate on d_mid
    # instead, here and in the MLP, the micro-step takes 94.8 Mcycles on v6e in place of 90.4.
    d_attn_o = _gradient_of_weight(d_mid, gated(gate, y))
    d_y = gated(gate, d_mid @ weights.attn_o)
    d_read, d_v, of_qkv, attention_gates = _attention_backward(how, index, saved, x_in, y, d_y, given)
    d_in = d_mid + d_read
    of_gates = {}
    if how.options.layer_gates:
        of_gates = {"gate_map": torch.cat([attention_gates.d_maps, mlp_gate.d_maps]),
                    "gate_scale": torch.stack([*attention_gates.d_scales, *mlp_gate.d_scales])}
    d_weights = type(weights)(resid_scale=(d_in.float() * x.float()).sum(),
                              x0_scale=(d_in.float() * given.x0.float()).sum(),
                              attn_o=d_attn_o, **of_qkv, **of_mlp, **of_gates)
    return weights.resid_scale * d_in, weights.x0_scale * d_in, d_v, d_weights


class OfGates(NamedTuple):
    """Gradients of some of a layer's gates."""
    d_maps: torch.Tensor  # (gates, C)
    d_scales: tuple  # (1,) each


def _mlp_backward(how, x_mid, h, d_out, weights):
    """Returns the gradient of x_mid, those of the weights, and OfGates or None."""
    dtype = d_out.dtype
    scale = _reciprocal_rms(x_mid)
    gate = gate_of(how.options, weights, MLP, x_mid, scale)
    # In an order of the compiler's choice, v6e would copy this product and h into another order, and back.
    d_act = how.attention.row_major_matmul(d_out, weights.mlp_out)
    d_h = (2 * scale * h * gated(gate, d_act)).to(dtype)  # with the scale of norm(x_mid)
    of_weights = {"mlp_out": _gradient_of_weight(d_out, gated(gate, h.square())),
                  "mlp_in": _gradient_of_weight(d_h, x_mid)}
    d_scaled = how.sharding.sum(d_h @ weights.mlp_in)
    of_gate = None
    if how.options.layer_gates:
        # What leaves the MLP × its gradient is half of this sum, because the MLP is of the second degree in its input
        # (Euler's theorem on homogeneous functions). So what leaves it need not be kept.
        change = (x_mid.float() * d_scaled.float()).sum(-1, keepdim=True) / 2
        d_gate, d_scale = gate_backward(weights, MLP, x_mid, scale, change)
        d_scaled = d_scaled + d_gate * weights.gate_map[MLP]
        of_gate = OfGates(_gradient_of_weight(d_gate.to(dtype), x_mid), (d_scale,))
    return d_out + _norm_backward(x_mid, scale, d_scaled), of_weights, of_gate


def _attention_backward(how, index, saved, x_in, y, d_y, given):
    """Returns the gradient of x_in, from what attention reads of it, that of attention's values, those of the weights
    of queries, keys and values, and OfGates or None."""
    dtype, weights, value = d_y.dtype, given.weights, given.value()
    scale = _reciprocal_rms(x_in)
    q, k, v, log_sums, at = saved.q, saved.k, saved.v, saved.log_sums, index
    if not how.keeps_qkv:
        q, k, v = (product[None] for product in _queries_keys_values(how, x_in, scale, weights, value))
        at = torch.zeros_like(index)
        if log_sums is not None:
            log_sums = take(log_sums, index)[None]
    d_q, d_k, d_v = how.attention.backward(q, k, v, at, given.window, log_sums, d_y, *given.tables)
    if how.options.key_shift:
        d_k = shift_keys_backward(d_k, how.options.head_dim)
    d_product, of_gates = d_v, None  # d_product: of the product of attn_v
    if how.options.layer_gates:
        v = take(v, at).float()
        # `gate_backward` needs a sum over what leaves each gate × its gradient. At attention's gate, y × d_y has the
        # same sum, because attn_o is linear. Ranks along tensor have other heads, so their sums add up.
        gated_product = v if value is None else v - value
        changes = how.sharding.sums((gated_product.float() * d_v.float()).sum(-1, keepdim=True),
                                    (y.float() * d_y.float()).sum(-1, keepdim=True))
        d_values_gate, d_values_scale = gate_backward(weights, VALUES, x_in, scale, changes[0])
        d_gate, d_scale = gate_backward(weights, ATTENTION, x_in, scale, changes[1])
        d_product = gated(gate_of(how.options, weights, VALUES, x_in, scale), d_v)
        d_gates = torch.cat([d_values_gate, d_gate], -1)
        of_gates = OfGates(_gradient_of_weight(d_gates.to(dtype), x_in), (d_values_scale, d_scale))
    normed = (scale * x_in).to(dtype)
    of_weights = {"attn_q": _gradient_of_weight(d_q, normed), "attn_k": _gradient_of_weight(d_k, normed),
                  "attn_v": _gradient_of_weight(d_product, normed)}
    d_normed = how.sharding.sum(d_q @ weights.attn_q + d_k @ weights.attn_k + d_product @ weights.attn_v)
    d_scaled = scale * d_normed
    if how.options.layer_gates:
        d_scaled = d_scaled + d_values_gate * weights.gate_map[VALUES] + d_gate * weights.gate_map[ATTENTION]
    return _norm_backward(x_in, scale, d_scaled), d_v, of_weights, of_gates


# -----------------------------------------------------------------------------
# Their parts


def _mixed(x, given):
    return given.weights.resid_scale * x + given.weights.x0_scale * given.x0


def _reciprocal_rms(x):
    """s = 1 / rms(x), fp32 (B, T, 1)."""
    return torch.rsqrt(x.float().square().mean(-1, keepdim=True) + NORM_EPS)


def _gradient_of_weight(d_out, x):
    """Gradient of a weight (out, in) from those of its product, (B, T, out), and its input, (B, T, in)."""
    return d_out.flatten(0, -2).t() @ x.flatten(0, -2)


def _norm_backward(x, scale, scaled):
    """Gradient of the input of norm(x) = s x, with s = 1 / rms(x), from `scaled`, s times the gradient of norm(x):
    scaled - s² x mean(scaled x)."""
    x, scaled, dtype = x.float(), scaled.float(), x.dtype
    return (scaled - scale.square() * x * (scaled * x).mean(-1, keepdim=True)).to(dtype)
