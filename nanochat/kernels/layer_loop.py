"""All layers of the GPT as one loop of an XLA program, forward and backward.

Autograd would unroll the layers: a program sixteen times as long, with gradients that are added up afterwards. Here the
backward pass of a layer is written out by hand, as a second loop that runs from the last layer to the first and adds to
the gradients in place, slice by slice. tests/model/test_gpt.py compares all of it with autograd.

What the backward loop needs, the forward loop keeps in stacks: 9 widths per token and layer, or the layer's input
only, with `recompute`. Some are put into their stack and used from there, so that the matrix product that makes them
writes them there directly, where XLA would rather copy. RMSNorm scales rows, which commutes with a product from the
right: norm(x) W = s (x W), so no normalised copy of x is made.
"""
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from nanochat.device.xla_ops import loop, put, take
from nanochat.model.gpt import LAYER_WEIGHTS, NORM_EPS


@dataclass(frozen=True)
class Attention:
    """Attention of layer `index`. q, k and v are stacks of (B, T, heads × head_dim), the products of attn_q, attn_k and
    attn_v; y (B, T, H × head_dim) is the layer's output.

    tables(cos, sin) -> constants: what the others need of gpt.rotary_tables
    forward(q, k, v, index, window, *constants) -> y; window: int32 scalar, or None
    backward(q, k, v, index, window, d_y, *constants) -> gradients of the layer's q, k and v
    matmul(x, weight) -> x @ weight, of (B, T, in) and (in, out), which a TPU is to keep in memory in this order
    """
    tables: Any
    forward: Any
    backward: Any
    matmul: Any = torch.matmul


class Saved(NamedTuple):
    """What the layers keep for the backward pass: stacks of (B, T, width). With one slot, each layer writes over it."""
    x: torch.Tensor  # input of the layer
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    y: torch.Tensor  # attention's output
    h: torch.Tensor  # the hidden units after ReLU, before they are squared


class Weights(NamedTuple):
    """Of gpt.LAYER_WEIGHTS, with the windows."""
    resid_scale: torch.Tensor
    x0_scale: torch.Tensor
    attn_q: torch.Tensor
    attn_k: torch.Tensor
    attn_v: torch.Tensor
    attn_o: torch.Tensor
    mlp_in: torch.Tensor
    mlp_out: torch.Tensor
    window: torch.Tensor | None = None


def run_layers(attention, x, weights, windows, rotary, recompute=False):
    """x (B, T, C) after all layers. In the backward pass it adds to the `main_grad` of `weights`.

    windows: int32 (layers,), or None where every layer sees all; rotary: fp32 cos and sin (T, head_dim / 2)
    """
    return _LayerStack.apply(x, windows, attention.tables(*rotary), attention, recompute, torch.is_grad_enabled(),
                             *weights)


class _LayerStack(torch.autograd.Function):

    @staticmethod
    def forward(ctx, x, windows, tables, attention, recompute, is_training, *weights):
        stacks = [weight.detach() for weight in weights] + ([windows] if windows is not None else [])
        layers = weights[0].size(0)
        slots_of_x, slots = (layers if is_training else 1), (layers if is_training and not recompute else 1)
        saved = _empty(x, Weights(*weights), slots_of_x, slots)
        (out, *saved), _ = loop(_ForwardBody(attention), (x, *saved), stacks, (), (x, *tables))
        if is_training:
            ctx.save_for_backward(x, *(saved[:1] if recompute else saved))
            ctx.others = stacks, tables, attention, weights
        return out

    @staticmethod
    def backward(ctx, d_out):
        x0, *saved = ctx.saved_tensors
        stacks, tables, attention, weights = ctx.others
        (d_x, d_x0), gradients = loop(
            _BackwardBody(attention, len(saved)), (d_out, torch.zeros_like(d_out)), stacks,
            [weight.main_grad for weight in weights], (x0, *saved, *tables), reverse=True)
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.main_grad.copy_(gradient)
        return d_x + d_x0, *[None] * (5 + len(weights))


def _empty(x, weights, slots_of_x, slots):
    width, kv_width, hidden = (weight.size(-2) for weight in (weights.attn_q, weights.attn_k, weights.mlp_in))
    widths = Saved(x=width, q=width, k=kv_width, v=kv_width, y=width, h=hidden)
    stacks = Saved(*(x.new_zeros(slots, *x.shape[:-1], width) for width in widths))
    return stacks._replace(x=x.new_zeros(slots_of_x, *x.shape))


@dataclass(frozen=True)
class _ForwardBody:
    attention: Attention

    def __call__(self, index, carry, read, write, constants):
        (x, *saved), (x0, *tables) = carry, constants
        saved = Saved(*saved)
        saved = saved._replace(x=put(saved.x, _slot(saved.x, index), x))
        out, saved = _layer(self.attention, x, _slot(saved.q, index), saved, x0, _cast(read, x0.dtype), tables)
        return (out, *saved), ()


@dataclass(frozen=True)
class _BackwardBody:
    attention: Attention
    num_saved: int

    def __call__(self, index, carry, read, write, constants):
        (d_out, d_x0), x0 = carry, constants[0]
        saved, tables = constants[1:1 + self.num_saved], constants[1 + self.num_saved:]
        weights = _cast(read, x0.dtype)
        x = take(saved[0], index)
        if len(saved) == 1:
            index = torch.zeros_like(index)
            saved = _layer(self.attention, x, index, _empty(x, weights, 1, 1), x0, weights, tables)[1]
        d_x, d_x0_here, d_weights = _layer_backward(self.attention, x, index, d_out, Saved(*saved), x0, weights, tables)
        added = tuple(total + gradient.to(total.dtype) for total, gradient in zip(write, d_weights, strict=True))
        return (d_x, d_x0 + d_x0_here), added


def _cast(slices, dtype):
    """Weights of one layer in the dtype of the products."""
    numbers = len(LAYER_WEIGHTS)
    return Weights(*(weight.to(dtype) for weight in slices[:numbers]), *slices[numbers:])


def _slot(stack, index):
    return index if stack.size(0) > 1 else torch.zeros_like(index)


def _reciprocal_rms(x):
    """s = 1 / rms(x), fp32 (B, T, 1)."""
    return torch.rsqrt(x.float().square().mean(-1, keepdim=True) + NORM_EPS)


def _mixed(x, x0, weights):
    return weights.resid_scale * x + weights.x0_scale * x0


def _layer(attention, x, index, saved, x0, weights, tables):
    """The layer's output, and `saved` with what it made in slot `index`."""
    x_in = _mixed(x, x0, weights)
    scale = _reciprocal_rms(x_in)
    q, k, v = (put(stack, index, (scale * F.linear(x_in, weight)).to(x.dtype), use_from_memory=True)
               for stack, weight in zip(saved[1:4], weights[2:5], strict=True))
    y = attention.forward(q, k, v, index, weights.window, *tables)
    x_mid = x_in + F.linear(y, weights.attn_o)
    h = F.relu(_reciprocal_rms(x_mid) * F.linear(x_mid, weights.mlp_in)).to(x.dtype)
    h = put(saved.h, index, h, use_from_memory=True)
    out = x_mid + F.linear(take(h, index).square(), weights.mlp_out)
    return out, Saved(saved.x, q, k, v, put(saved.y, index, y), h)


def _layer_backward(attention, x, index, d_out, saved, x0, weights, tables):
    """Gradients of the layer's input, of x0, and of its weights, in the order of LAYER_WEIGHTS."""
    dtype = d_out.dtype
    y, h = take(saved.y, index), take(saved.h, index)
    x_in = _mixed(x, x0, weights)
    x_mid = x_in + F.linear(y, weights.attn_o)
    scale = _reciprocal_rms(x_mid)
    d_act = attention.matmul(d_out, weights.mlp_out)  # v6e would copy it and h into another order, and back
    d_h = (2 * scale * h * d_act).to(dtype)  # with the scale of norm(x_mid)
    d_mlp_out = _outer(d_out, h.square())
    d_mlp_in = _outer(d_h, x_mid)
    d_mid = d_out + _norm_backward(x_mid, scale, d_h @ weights.mlp_in)
    d_attn_o = _outer(d_mid, y)
    d_y = d_mid @ weights.attn_o
    d_q, d_k, d_v = attention.backward(saved.q, saved.k, saved.v, index, weights.window, d_y, *tables)
    scale = _reciprocal_rms(x_in)
    normed = (scale * x_in).to(dtype)
    d_attn = [_outer(d, normed) for d in (d_q, d_k, d_v)]
    d_normed = d_q @ weights.attn_q + d_k @ weights.attn_k + d_v @ weights.attn_v
    d_in = d_mid + _norm_backward(x_in, scale, scale * d_normed)
    d_scales = [(d_in.float() * source.float()).sum() for source in (x, x0)]
    return weights.resid_scale * d_in, weights.x0_scale * d_in, [*d_scales, *d_attn, d_attn_o, d_mlp_in, d_mlp_out]


def _outer(d_out, x):
    """Gradient of a weight (out, in) from those of its product, (B, T, out), and its input, (B, T, in)."""
    return d_out.flatten(0, -2).t() @ x.flatten(0, -2)


def _norm_backward(x, scale, scaled):
    """Gradient of the input of norm(x) = s x, with s = 1 / rms(x), from `scaled`, s times the gradient of norm(x):
    scaled - s² x mean(scaled x)."""
    x, scaled, dtype = x.float(), scaled.float(), x.dtype
    return (scaled - scale.square() * x * (scaled * x).mean(-1, keepdim=True)).to(dtype)
