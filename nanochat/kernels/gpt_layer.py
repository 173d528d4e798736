"""The GPT's layer (layers.gpt_layer) for the loop over the layers, with a backward pass written by hand. xla.py brings
it and layer_loop.py together.

The forward pass keeps 9 widths per token and layer for the backward pass. It reads some of them from their stack, so
that the matrix product that makes them writes there directly; otherwise XLA would copy them. RMSNorm multiplies the
vector of each token by a number s, and norm(x) W = s (x W), so no normalised copy of x is made.
tests/model/test_gpt.py compares all of it with the definition.
"""
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch

from nanochat.common import BadInput
from nanochat.device.xla_ops import put, take
from nanochat.kernels import plain
from nanochat.kernels.layer_loop import Layer, LayerByHand
from nanochat.kernels.products import Halves, of_weight
from nanochat.kernels.sharded import WHOLE, Sharding
from nanochat.model import layers

KNOWN = {"head_dim", "layer_gates", "key_shift"}  # the LayerOptions that this file computes


@dataclass(frozen=True)
class AttentionByHand:
    """Attention of layer `index` with its own backward pass. q, k and v are stacks of (B, T, heads × head_dim): the
    products of attn_q, attn_k and attn_v, keys shifted, not yet rotated or normalised. The output y is (B, T,
    H × head_dim)."""
    # forward(q, k, v, index, window, *tables) -> y, log_sums. window: int32 scalar, or None. tables: Given's. log_sums:
    # fp32, what else the backward pass needs, or None.
    forward: Callable
    # backward(q, k, v, index, window, log_sums, d_y, *tables) -> gradients of the layer's q, k and v. log_sums is a
    # stack, too.
    backward: Callable
    # log_sums_shape(B, T, width of q) -> the shape of a layer's log_sums. None: there are none.
    log_sums_shape: Callable | None = None
    # of_heads(q, k, v, window): as Kernels.attention, for a layer that is differentiated.
    of_heads: Callable = plain.attention
    # row_major_matmul(x, weight): x @ weight for (B, T, in) and (in, out), stored in this order on a TPU.
    row_major_matmul: Callable = torch.matmul


@dataclass(frozen=True)
class How:
    """How a layer is computed."""
    options: layers.LayerOptions
    attention: AttentionByHand
    sharding: Sharding = WHOLE
    products: Halves = Halves()  # how attention and MLP multiply

    def saved(self):
        """Returns {name: dtype, or None for that of x} of the stacks that are kept for the backward pass, (slots, B, T,
        width) each but log_sums and scales: q, k and v; y, attention's output; h, the hidden units after ReLU, before
        they are squared; x_mid, between attention and MLP, if ranks along tensor would have to sum it again; log_sums,
        see AttentionByHand."""
        dtypes = {"q": None, "k": None, "v": None}
        dtypes |= self.products.attention.stacks_of("y") | self.products.mlp.stacks_of("h")
        if self.sharding.tensor_groups:
            dtypes["x_mid"] = None
        if self.attention.log_sums_shape:
            dtypes["log_sums"] = torch.float32
        return dtypes


@cache
def layer_for_loop(how):
    """The Layer of a model. That of a GPT has its backward pass by hand if this file knows all of its options; that of
    another model is differentiated."""
    by_hand = None
    unknown = how.options.unknown(KNOWN)
    if not unknown:
        by_hand = LayerByHand(partial(_new_saved, how), partial(_forward, how), partial(_backward, how))
    elif how.sharding.tensor_groups and not how.options.divides_heads:
        raise BadInput(f"--mesh_tensor={len(how.sharding.tensor_groups[0])} is not for a model with {unknown}: "
                       "use --mesh_tensor=1")
    elif how.products.are_rounded:
        raise BadInput(f"--products=int8 is not for a model with {unknown}: leave it out")
    return Layer(partial(_by_definition, how), by_hand, how.sharding, how.products)


def _by_definition(how, x, x0, weights, window, tables, value):
    rotary = [table.to(x.dtype) for table in tables]
    arguments = [x, x0, weights, rotary, layers.WholeText(how.attention.of_heads, window), value]
    if how.sharding.tensor_groups:
        arguments += layers.PLAIN, how.sharding.ranks()
    return how.options.layer(*arguments)


def _new_saved(how, x, weights, slots):
    batch, length, width = x.shape
    q_width = weights.attn_q.size(-2)
    kv_width = weights.attn_k.size(-2)
    widths = {"q": q_width, "k": kv_width, "v": kv_width, "y": q_width, "h": weights.mlp_in.size(-2), "x_mid": width}
    saved = []
    for name, dtype in how.saved().items():
        shape = batch, length
        if name == "log_sums":
            shape = how.attention.log_sums_shape(batch, length, q_width)
        elif name in widths:
            shape = batch, length, widths[name]
        saved.append(how.products.mlp.new_stack(name, x, (slots, *shape), dtype))
    return tuple(saved)


# The passes. `given`: layer_loop.Given. `products`: products.Plain or Int8. Its operand(x) and gradient(d, w) make what
# a product reads, for Plain the tensor itself; linear(x, w) = x wᵀ, of_input(d, w) = d w, of_weight(d, x, w) = dᵀ x.
#
# With n(x) = s x, the gates g and the weights W, a layer is
#     x_in  = resid_scale x + x0_scale x0
#     x_mid = x_in + g_attention W_o y       y = attention(q, k, v)
#         q = W_q n(x_in)     k = shifted W_k n(x_in)     v = g_values W_v n(x_in) + value
#     out   = x_mid + g_mlp W_out h²         h = relu(W_in n(x_mid))
# Kept are x, q, k, v and y of one width each (with as many key heads as query heads), and h of four: 9 widths. The
# backward pass goes from the last line to the first. It computes x_in, x_mid, the numbers s and the gates again: of the
# products with weights, W_o y alone.


def _forward(how, x, index, saved, given):
    products = how.products.attention
    saved = dict(zip(how.saved(), saved, strict=True))
    weights = given.weights
    x_in = _mixed(x, given)
    scale = _reciprocal_rms(x_in)
    qkv = _queries_keys_values(how, x_in, scale, weights, given.value())
    for name, tensor in zip("qkv", qkv, strict=True):
        saved[name] = put(saved[name], index, tensor, use_from_memory=True)
    y, log_sums = how.attention.forward(saved["q"], saved["k"], saved["v"], index, given.window, *given.tables)
    y = products.operand(y)
    attended = how.sharding.sum(products.linear(y, weights.attn_o).to(x.dtype))
    gate = layers.gate_of(how.options, weights, layers.ATTENTION, x_in, scale)
    x_mid = x_in + layers.gated(gate, attended)
    scale = _reciprocal_rms(x_mid)
    mlp = how.products.mlp
    mlp.put_hidden(saved, index, x_mid, scale, weights.mlp_in)
    squares = mlp.squares(mlp.take(saved, "h", index))
    added = how.sharding.sum(mlp.linear(squares, weights.mlp_out).to(x.dtype))
    gate = layers.gate_of(how.options, weights, layers.MLP, x_mid, scale)
    out = x_mid + layers.gated(gate, added)
    products.put(saved, "y", index, y)
    for name, value in (("x_mid", x_mid), ("log_sums", log_sums)):
        if name in saved:
            saved[name] = put(saved[name], index, value)
    return out, tuple(saved.values())


def _queries_keys_values(how, x_in, scale, weights, value):
    """Returns attention's queries, keys and values, (B, T, width) each. scale: the reciprocal root mean square of
    x_in; value: added to the values, or None."""
    products = how.products.attention
    operand = products.operand(x_in)
    q = (scale * products.linear(operand, weights.attn_q)).to(x_in.dtype)
    k = (scale * products.linear(operand, weights.attn_k)).to(x_in.dtype)
    if how.options.key_shift:
        k = layers.shift_keys(k, layers.one_later(k), how.options.head_dim)
    gate = layers.gate_of(how.options, weights, layers.VALUES, x_in, scale)
    v = layers.gated(gate, scale * products.linear(operand, weights.attn_v))
    if value is not None:
        v = v + value
    return q, k, v.to(x_in.dtype)


def _backward(how, x, index, d_out, saved, given):
    products = how.products.attention
    saved = dict(zip(how.saved(), saved, strict=True))
    weights = given.weights
    y = products.take(saved, "y", index)
    x_in = _mixed(x, given)
    gate = layers.gate_of(how.options, weights, layers.ATTENTION, x_in, _reciprocal_rms(x_in))
    # One product makes x_mid again, which is cheaper than a stack: 165.5 instead of 170.7 Mcycles a micro-step on v5e
    # at depth 16.
    if "x_mid" in saved:
        x_mid = take(saved["x_mid"], index)
    else:
        x_mid = x_in + layers.gated(gate, products.linear(y, weights.attn_o).to(x.dtype))
    d_mid, of_mlp = _mlp_backward(how, x_mid, how.products.mlp.take(saved, "h", index), d_out, weights)
    # A gate is one number per token, so it can multiply either side of a product with attn_o. With the gate on d_mid
    # instead, here and in the MLP, the micro-step takes 94.8 Mcycles on v6e instead of 90.4.
    d_attn_o = products.of_weight_with(y, gate, d_mid)
    d_y = layers.gated(gate, products.of_input(products.gradient(d_mid, weights.attn_o), weights.attn_o))
    d_through_attention, d_v, of_attention = _attention_backward(how, index, saved, x_in, y, d_y.to(x.dtype), given)
    d_in = d_mid + d_through_attention
    gradients = of_mlp | of_attention
    gradients["attn_o"] = d_attn_o
    gradients["resid_scale"] = (d_in.float() * x.float()).sum()
    gradients["x0_scale"] = (d_in.float() * given.x0.float()).sum()
    if how.options.layer_gates:
        gradients["gate_map"] = torch.cat([of_attention["gate_map"], of_mlp["gate_map"]])
        gradients["gate_scale"] = torch.stack([*of_attention["gate_scale"], *of_mlp["gate_scale"]])
    return weights.resid_scale * d_in, weights.x0_scale * d_in, d_v, type(weights)(**gradients)


def _mlp_backward(how, x_mid, hidden, d_out, weights):
    """Returns the gradient of x_mid, and those of the weights, {name: gradient}; of the gate, gate_map is (1, C) and
    gate_scale a list of (1,)."""
    products = how.products.mlp
    dtype = d_out.dtype
    scale = _reciprocal_rms(x_mid)
    gate = layers.gate_of(how.options, weights, layers.MLP, x_mid, scale)
    # s times the gradient of W_in n(x_mid), so that its products with x_mid and W_in need no further s
    d = products.gradient_of_hidden(d_out, weights, hidden, scale, gate, how.attention.row_major_matmul)
    gradients = {"mlp_out": products.of_weight_with(products.squares(hidden), gate, d_out),
                 "mlp_in": products.of_weight(d, x_mid, weights.mlp_in)}
    d_scaled = how.sharding.sum(products.of_input(d, weights.mlp_in).to(dtype))
    along = _along(x_mid, d_scaled)
    if how.options.layer_gates:
        # The MLP's output × its gradient is half of this sum, because the MLP is of the second degree in its input
        # (Euler's theorem on homogeneous functions). So the output need not be kept.
        d_gate, d_scale, of_gate = layers.gate_backward(weights, layers.MLP, x_mid, scale, along / 2)
        along = along + of_gate
        d_scaled = d_scaled + d_gate * weights.gate_map[layers.MLP]
        gradients["gate_map"] = of_weight(d_gate.to(dtype), x_mid)
        gradients["gate_scale"] = [d_scale]
    return d_out + _norm_backward(x_mid, scale, d_scaled, along), gradients


def _attention_backward(how, index, saved, x_in, y, d_y, given):
    """Returns the gradient of x_in through attention's inputs, that of attention's values, and those of the weights,
    {name: gradient}; of the two gates, gate_map is (2, C) and gate_scale a list of (1,)."""
    products = how.products.attention
    weights = given.weights
    value = given.value()
    scale = _reciprocal_rms(x_in)
    d_q, d_k, d_v = how.attention.backward(saved["q"], saved["k"], saved["v"], index, given.window,
                                           saved.get("log_sums"), d_y, *given.tables)
    if how.options.key_shift:
        d_k = layers.shift_keys_backward(d_k, how.options.head_dim)
    gate = layers.gate_of(how.options, weights, layers.VALUES, x_in, scale)
    d_product = layers.gated(gate, d_v)  # of attn_v's product
    normed = (scale * x_in).to(d_y.dtype)
    d_normed, gradients, d_normed_of_values = products.of_several(
        {"attn_v": d_product, "attn_q": d_q, "attn_k": d_k}, normed, weights)
    d_normed = how.sharding.sum(d_normed.to(d_y.dtype))
    d_scaled = scale * d_normed
    along = scale * _along(x_in, d_normed)
    if how.options.layer_gates:
        # `gate_backward` needs a sum over each gate's output × its gradient. At attention's gate, y × d_y has the same
        # sum, because attn_o is linear; at that of the values, their input × its gradient, which needs no pass over
        # memory. Ranks along tensor have other heads, so their sums add up.
        if d_normed_of_values is not None:
            change_of_values = _along(normed, d_normed_of_values)
        else:
            v = take(saved["v"], index)
            change_of_values = _along(v if value is None else v - value, d_v)
        changes = how.sharding.sums(change_of_values, _along(products.value(y), d_y))
        d_values_gate, d_values_scale, of_values = layers.gate_backward(weights, layers.VALUES, x_in, scale, changes[0])
        d_gate, d_scale, of_gate = layers.gate_backward(weights, layers.ATTENTION, x_in, scale, changes[1])
        along = along + of_values + of_gate
        d_gates = torch.cat([d_values_gate, d_gate], -1)
        gradients["gate_map"] = of_weight(d_gates.to(d_y.dtype), x_in)
        gradients["gate_scale"] = [d_values_scale, d_scale]
        d_scaled = (d_scaled + d_values_gate * weights.gate_map[layers.VALUES]
                    + d_gate * weights.gate_map[layers.ATTENTION])
    return _norm_backward(x_in, scale, d_scaled, along), d_v, gradients


def _mixed(x, given):
    return given.weights.resid_scale * x + given.weights.x0_scale * given.x0


def _reciprocal_rms(x):
    """s = 1 / rms(x), fp32 (B, T, 1)."""
    return torch.rsqrt(x.float().square().mean(-1, keepdim=True) + layers.NORM_EPS)


def _along(x, d):
    """The sum of x × d over the width, fp32 (B, T, 1)."""
    return (x.float() * d.float()).sum(-1, keepdim=True)


def _norm_backward(x, scale, scaled, along):
    """Gradient of the input of norm(x) = s x, with s = 1 / rms(x), from `scaled`, s times the gradient of norm(x), and
    its sum `along` x: scaled - s² x along / width."""
    # Where gates add to the gradient, each part's sum is known before the parts are added. So no pass over memory is
    # needed to sum.
    return (scaled.float() - scale.square() * along / x.size(-1) * x.float()).to(x.dtype)
