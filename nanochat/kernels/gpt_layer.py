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

from nanochat.device.xla_ops import add_to_columns, put, take, take_columns
from nanochat.kernels import plain
from nanochat.kernels.layer_loop import Layer, LayerByHand
from nanochat.kernels.sharded import WHOLE, Sharding
from nanochat.model.gates import ATTENTION, MLP, VALUES, gate_backward, gate_of, gated
from nanochat.model.layers import NORM_EPS, gpt_layer, one_later, shift_keys, shift_keys_backward


@dataclass(frozen=True)
class AttentionByHand:
    """Attention of layer `index` with its own backward pass. q, k and v are stacks of (B, T, heads × head_dim): the
    products of attn_q, attn_k and attn_v, keys shifted, not yet rotated or normalised. The output y is (B, T,
    H × head_dim).

    forward(q, k, v, index, window, *tables) -> y, log_sums; window: int32 scalar, or None. log_sums is what else the
        backward pass needs, fp32, or None
    backward(q, k, v, index, window, log_sums, d_y, *tables) -> gradients of the layer's q, k and v. log_sums is a
        stack, too
    log_sums_shape(B, T, width of q) -> the shape of a layer's log_sums; None where there are none
    row_major_matmul(x, weight): x @ weight for (B, T, in) and (in, out), which a TPU is to keep in memory in this order
    """
    forward: Callable
    backward: Callable
    log_sums_shape: Callable | None = None
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
    attention: AttentionByHand
    sharding: Sharding = WHOLE
    keeps_qkv: bool = True  # otherwise the backward pass computes q, k and v again
    shifted_head_dim: int = 0  # of heads whose keys go through shift_keys; 0: keys stay in place


@cache
def gpt_layer_for_loop(how):
    """The GPT's Layer with its backward pass by hand."""
    by_hand = LayerByHand(*(partial(function, how) for function in (_new_saved, _forward, _backward)))
    return Layer(partial(_plain, how.shifted_head_dim), by_hand, how.sharding)


def _plain(shifted_head_dim, x, x0, weights, window, tables):
    rotary = [table.to(x.dtype) for table in tables]
    return gpt_layer(x, x0, weights, rotary, lambda q, k, v: plain.attention(q, k, v, window),
                     before=one_later if shifted_head_dim else None)


def _new_saved(how, x, weights, slots):
    width, kv_width, hidden = (weight.size(-2) for weight in (weights.attn_q, weights.attn_k, weights.mlp_in))
    widths = (*([width, kv_width, kv_width] if how.keeps_qkv else []), width, hidden,
              *([x.size(-1)] if how.sharding.tensor_groups else []))
    saved = [x.new_zeros(slots, *x.shape[:-1], width) for width in widths]
    if how.attention.log_sums_shape:
        shape = how.attention.log_sums_shape(*x.shape[:-1], width)
        saved.append(x.new_zeros(slots, *shape, dtype=torch.float32))
    return tuple(saved)


def _forward(how, x, index, saved, x0, weights, window, tables, values):
    saved = Saved.of(how, saved)
    x_in = _mixed(x, x0, weights)
    scale = _reciprocal_rms(x_in)
    products = _queries_keys_values(how, x_in, scale, weights, _value_of(values, weights))
    if how.keeps_qkv:
        (q, k, v), at = (put(stack, index, product, use_from_memory=True)
                         for stack, product in zip(saved[:3], products, strict=True)), index
    else:
        (q, k, v), at = (product[None] for product in products), torch.zeros_like(index)
    y, log_sums = how.attention.forward(q, k, v, at, window, *tables)
    x_mid = x_in + gated(gate_of(weights, ATTENTION, x_in, scale), how.sharding.sum(F.linear(y, weights.attn_o)))
    scale = _reciprocal_rms(x_mid)
    h = F.relu(scale * F.linear(x_mid, weights.mlp_in)).to(x.dtype)
    h = put(saved.h, index, h, use_from_memory=True)
    out = x_mid + gated(gate_of(weights, MLP, x_mid, scale),
                        how.sharding.sum(F.linear(take(h, index).square(), weights.mlp_out)))
    new_saved = Saved(*((q, k, v) if how.keeps_qkv else [None] * 3), put(saved.y, index, y), h,
                      None if saved.x_mid is None else put(saved.x_mid, index, x_mid),
                      None if log_sums is None else put(saved.log_sums, index, log_sums))
    return out, new_saved.stacks()


def _queries_keys_values(how, x_in, scale, weights, value):
    """Yields attention's queries, keys and values, (B, T, width) each. scale: the reciprocal root mean square of x_in;
    value: what is added to the values, or None."""
    yield (scale * F.linear(x_in, weights.attn_q)).to(x_in.dtype)
    k = (scale * F.linear(x_in, weights.attn_k)).to(x_in.dtype)
    yield shift_keys(k, one_later(k), how.shifted_head_dim) if how.shifted_head_dim else k
    product = gated(gate_of(weights, VALUES, x_in, scale), scale * F.linear(x_in, weights.attn_v))
    yield (product if value is None else product + value).to(x_in.dtype)


def _backward(how, x, index, d_out, saved, x0, weights, window, tables, values, d_values):
    saved, dtype = Saved.of(how, saved), d_out.dtype
    value = _value_of(values, weights)
    y, h = take(saved.y, index), take(saved.h, index)
    x_in = _mixed(x, x0, weights)
    has_gates = hasattr(weights, "gate_map")
    scale_in = _reciprocal_rms(x_in) if has_gates else None
    gate_in = gate_of(weights, ATTENTION, x_in, scale_in)
    x_mid = x_in + gated(gate_in, F.linear(y, weights.attn_o)) if saved.x_mid is None else take(saved.x_mid, index)
    scale = _reciprocal_rms(x_mid)
    gate = gate_of(weights, MLP, x_mid, scale)
    # In an order of the compiler's choice, v6e would copy this product and h into another order, and back.
    d_act = how.attention.row_major_matmul(d_out, weights.mlp_out)
    d_h = (2 * scale * h * gated(gate, d_act)).to(dtype)  # with the scale of norm(x_mid)
    d_mlp_out = _gradient_of_weight(d_out, gated(gate, h.square()))
    d_mlp_in = _gradient_of_weight(d_h, x_mid)
    d_scaled = how.sharding.sum(d_h @ weights.mlp_in)
    if has_gates:  # what leaves the MLP × its gradient is half of this sum, because the MLP is of the second degree
        change = (x_mid.float() * d_scaled.float()).sum(-1, keepdim=True) / 2
        d_gate, d_scale = gate_backward(weights, MLP, x_mid, scale, change)
        d_scaled = d_scaled + d_gate * weights.gate_map[MLP]
        d_map = _gradient_of_weight(d_gate.to(dtype), x_mid)
    d_mid = d_out + _norm_backward(x_mid, scale, d_scaled)
    d_attn_o = _gradient_of_weight(d_mid, gated(gate_in, y))
    d_y = gated(gate_in, d_mid @ weights.attn_o)
    scale = _reciprocal_rms(x_in)
    q, k, v, log_sums, at = saved.q, saved.k, saved.v, saved.log_sums, index
    if not how.keeps_qkv:
        q, k, v = (product[None] for product in _queries_keys_values(how, x_in, scale, weights, value))
        log_sums, at = None if log_sums is None else take(log_sums, index)[None], torch.zeros_like(index)
    d_q, d_k, d_v = how.attention.backward(q, k, v, at, window, log_sums, d_y, *tables)
    if how.shifted_head_dim:
        d_k = shift_keys_backward(d_k, how.shifted_head_dim)
    if values:
        d_values = [add_to_columns(*d_values, values[0], d_v)]  # where the layer adds a value
    d_of_gates = ()
    if has_gates:
        v = take(v, at).float()
        changes = how.sharding.sums(*((out.float() * d_out.float()).sum(-1, keepdim=True)
                                      for out, d_out in ((v if value is None else v - value, d_v), (y, d_y))))
        d_gates, d_scales = zip(*(gate_backward(weights, which, x_in, scale, change)
                                  for which, change in zip((VALUES, ATTENTION), changes, strict=True)), strict=True)
        d_v = gated(gate_of(weights, VALUES, x_in, scale), d_v)
        d_maps = _gradient_of_weight(torch.cat(d_gates, -1).to(dtype), x_in)
        d_of_gates = torch.cat([d_maps, d_map]), torch.stack([*d_scales, d_scale])
    normed = (scale * x_in).to(dtype)
    d_attn_q, d_attn_k, d_attn_v = (_gradient_of_weight(d, normed) for d in (d_q, d_k, d_v))
    d_normed = how.sharding.sum(d_q @ weights.attn_q + d_k @ weights.attn_k + d_v @ weights.attn_v)
    d_scaled = scale * d_normed
    if has_gates:
        d_scaled = d_scaled + d_gates[0] * weights.gate_map[VALUES] + d_gates[1] * weights.gate_map[ATTENTION]
    d_in = d_mid + _norm_backward(x_in, scale, d_scaled)
    d_resid_scale, d_x0_scale = ((d_in.float() * source.float()).sum() for source in (x, x0))
    d_weights = type(weights)(d_resid_scale, d_x0_scale, d_attn_q, d_attn_k, d_attn_v, d_attn_o, d_mlp_in, d_mlp_out,
                              *d_of_gates)
    return weights.resid_scale * d_in, weights.x0_scale * d_in, d_values, d_weights


def _value_of(values, weights):
    """Returns what the layer adds to attention's values, (B, T, C_kv), or None where no layer adds any.

    values: None, or the layer's number and an array (B, T, n × C_kv). The layer adds the block of columns with that
    number, or 0 if the number is n.
    """
    if values is None:
        return None
    number, array = values
    value = take_columns(array, number, weights.attn_v.size(-2))
    return torch.where(number < array.size(-1) // value.size(-1), value, 0.0).to(value.dtype)


def _mixed(x, x0, weights):
    return weights.resid_scale * x + weights.x0_scale * x0


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
