"""What the model and its kernels share: the layer and its parts, its options, and the interface of kernels."""
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

NORM_EPS = torch.finfo(torch.float32).eps  # for every dtype
IGNORE_INDEX = -1  # a target with this value has no loss


@dataclass(frozen=True)
class LayerOptions:
    """The fields of GPTConfig that decide what a layer computes, by their names. An option that is off is False. A new
    option is a field here and in GPTConfig, and a line in gpt_layer below; other implementations of the layer refuse
    options that they do not know (see unknown)."""
    head_dim: int
    layer_gates: bool = False  # see gate_of
    key_shift: bool = False  # see shift_keys

    divides_heads = False  # whether `layer` takes TensorRanks: only kernels/gpt_layer.py divides a GPT's heads

    @classmethod
    def of(cls, config):
        return cls(**{field.name: getattr(config, field.name) for field in fields(cls)})

    def layer(self, *args):
        """Returns x (B, T, C) after the layer: see gpt_layer for the arguments."""
        return gpt_layer(self, *args)

    def unknown(self, known):
        """Returns the options that are on and not among the `known` names, as flags in one text, "" if none."""
        names = [field.name for field in fields(self) if getattr(self, field.name) and field.name not in known]
        return ", ".join(f"--{name}" for name in names)


class LayerWindows(NamedTuple):
    """How many positions each layer's attention sees."""
    sizes: tuple  # the different sizes, ints
    of_layers: torch.Tensor  # int32 (layers,)


class LayerValues(NamedTuple):
    """What some layers add to attention's values."""
    adds: torch.Tensor  # int32 (layers,): 1 if the layer adds it, else 0
    array: torch.Tensor  # (B, T, C_kv)


class Products(NamedTuple):
    """How a layer by definition multiplies with a weight (out, in). The layer by hand has kernels/products.py."""
    linear: Callable  # linear(x, weight): x (…, in) · weightᵀ
    of_square: Callable  # of_square(h, weight): h² · weightᵀ


PLAIN = Products(F.linear, lambda h, weight: F.linear(h.square(), weight))


class TensorRanks(NamedTuple):
    """How the ranks along the axis tensor make one layer together: each computes with its own heads and hidden units.
    """
    share: Callable  # share(x): x, of which each rank uses a part or all; its gradient is the sum of the ranks'
    join: Callable  # join(x): the sum of the ranks' x, whose gradient each of them has
    own: Callable  # own(vector): this rank's part of a vector that all of them have


ALONE = TensorRanks(*[lambda x: x] * 3)


@dataclass(frozen=True)
class Kernels:
    """The functions with which a model computes. nanochat/kernels/choose.py has the choices: on a TPU kernels/xla.py,
    elsewhere, by default, `current`: PyTorch's operations and autograd, the layers one after another."""
    name: str
    # attention(q, k, v, window): causal attention of q (B, H, T, D) with k and v (B, H_kv, T, D) -> (B, H, T, D). A
    # position sees itself and the `window` - 1 positions before it, or all before it if the window is None.
    attention: Callable
    # cross_entropy(hidden, head, targets, cap): losses (N,), fp32, nats, of hidden (N, C), head (V, C) and targets
    # (N,); the LogitCap `cap` bounds the logits. It may have no gradient.
    cross_entropy: Callable
    # mean_loss(hidden, head, targets, cap, teaching=None): the mean of these losses, a scalar with a gradient, for
    # training; with a Teaching, the student's loss (kernels/loss.py).
    mean_loss: Callable
    # embedding(ids, table, dtype): the vectors in table (V, C) of ids (B, T) -> (B, T, C).
    embedding: Callable
    # recompute(function, *args): function(*args); the backward pass computes it again instead of keeping activations.
    recompute: Callable
    # run_layers(options, x, stacks, windows, rotary, recompute, values): x (B, T, C) after all layers. stacks: as
    # weights.layer_weights; windows: LayerWindows, or None if every layer sees all positions; rotary: cos and sin
    # (T, head_dim / 2); recompute: one of config.RECOMPUTED; values: LayerValues or None. None instead of the function:
    # the model runs one layer after the other.
    run_layers: Callable | None = None
    # whole(after, parts): the whole weights, a list, of {name: this rank's part}. Gathering starts once the tensor
    # `after` is known, so few are whole at a time. None: ranks have whole weights. The functions above take parts.
    whole: Callable | None = None
    # round_weights(model): rounds the weights that run_layers reads in 8 bits; called after each change. None: it reads
    # none.
    round_weights: Callable | None = None
    # times(x, weight): x (B, T, C) × weight (C,), outside of the layers.
    times: Callable = torch.mul
    # Of the layers one after another, in training.
    products: Products = PLAIN


def norm(x, eps=NORM_EPS):
    """RMSNorm without parameters, over the last dimension."""
    return F.rms_norm(x, (x.size(-1),), eps=eps)


def rotary_tables(positions, head_dim, base=10000.0):
    """Returns cos and sin for `positions` (T,), each (T, head_dim / 2), fp32 (RoPE, arXiv 2104.09864)."""
    frequencies = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = positions[:, None].float() * frequencies[None, :].to(positions.device)
    return angles.cos(), angles.sin()


def apply_rotary(x, cos, sin):
    """Rotates x (B, H, T, head_dim) by the tables (T, head_dim / 2)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos + second * sin, second * cos - first * sin], dim=-1)


def one_later(x):
    """Shifts x (B, T, width) by one position; the first one becomes 0."""
    return F.pad(x, (0, 0, 1, -1))


def shift_keys(k, before, head_dim):
    """Returns the keys k (B, T, C_kv) with half of each head's channels, those that rotary turns slowest, taken from
    the previous position's keys `before`, (B, T, C_kv).

    So one layer finds what followed earlier occurrences of a token: it looks for the token's own key one position
    later. Without it, one layer must copy each token's predecessor before another one can match it (arXiv 2209.11895).
    The idea is from modded-nanogpt; dev/log has its gain on C++.
    """
    return torch.where(_keeps_place(k, head_dim), k, before)


def shift_keys_backward(d_k, head_dim):
    """Returns the gradient of k in shift_keys(k, one_later(k), head_dim), from that of its result."""
    return torch.where(_keeps_place(d_k, head_dim), d_k, F.pad(d_k, (0, 0, -1, 1)))


def _keeps_place(k, head_dim):
    # Rotary turns channels i and i + head_dim / 2 of a head together, the fastest pair first. A model of depth 4 had
    # 1.5194 bits per byte after 512 steps, and 1.6920 with the fastest channels shifted.
    return torch.arange(k.size(-1), device=k.device) % (head_dim // 2) < (head_dim // 2 + 1) // 2


def split_heads(x, head_dim):
    """Turns (B, T, H × head_dim) into (B, H, T, head_dim)."""
    return x.unflatten(-1, (-1, head_dim)).transpose(1, 2)


def causal_mask(query_positions, key_positions, window):
    """Returns a boolean mask (…, T_q, T_k), True where a query may look, for query_positions (…, T_q) and key_positions
    (T_k,); `window` as in Kernels.attention."""
    distance = query_positions[..., None] - key_positions[None, :]
    mask = distance >= 0
    return mask if window is None else mask & (distance < window)


# Gates (--layer_gates) multiply attention's values, what attention adds to the residual stream, and what the MLP adds,
# by one number each per token. A gate is a × 2 × sigmoid(map · norm(x)): x is the input of the layer's attention or
# MLP, the number a and the vector map are learned. A gate starts at 1, so a model starts as the plain one. These are
# hyper-connections (arXiv 2409.19606, 2512.24880) of one stream; more streams cost more and gained nothing
# (dev/log).
VALUES, ATTENTION, MLP = range(3)  # the rows of a layer's gate_map, (3, C), and gate_scale, (3, 1)


def gate_of(options, weights, which, x, scale=None):
    """Returns a gate (B, T, 1) of x (B, T, C), fp32, or None for LayerOptions without gates. scale: (B, T, 1), which
    multiplies x to norm(x); None: x is normalised."""
    if not options.layer_gates:
        return None
    return weights.gate_scale[which].float() * 2 * torch.sigmoid(_logit(weights, which, x, scale))


def gated(gate, x):
    """Returns x (B, T, width) times its gate, if there is one."""
    return x if gate is None else (gate * x).to(x.dtype)


def gate_backward(weights, which, x, scale, change):
    """For the backward pass by hand (kernels/gpt_layer.py). Returns the gradients of map · norm(x), times scale,
    (B, T, 1), and of the gate's scale, (1,); and `along`, the sum over the width of x × its gradient through the gate,
    as if scale were constant, (B, T, 1). change: the gate × its gradient, (B, T, 1), fp32: the sum over the width of
    the gate's output × its gradient."""
    # With z = map · norm(x), the gate's derivative is gate × sigmoid(-z) by z, and gate / a by a. So `change` alone is
    # needed of the gate's input.
    logit = _logit(weights, which, x, scale)
    d_logit = change * torch.sigmoid(-logit)
    return scale * d_logit, change.sum().reshape(1) / weights.gate_scale[which].float(), d_logit * logit


def _logit(weights, which, x, scale):
    product = (x.float() * weights.gate_map[which].float()).sum(-1, keepdim=True)
    return product if scale is None else scale * product


@dataclass
class WholeText:
    """What a layer sees when all positions of a text are computed at once."""
    attention: Callable  # as in Kernels
    window: int | None

    def attend(self, q, k, v):
        return self.attention(q, k, v, self.window)

    def before(self, k):
        return one_later(k)


@dataclass
class CachedText:
    """What layer number `layer` sees of a text whose earlier positions are in a KVCache, or one with its methods."""
    cache: Any
    layer: int
    positions: Any  # to compute, as the cache takes them
    window: int | None

    def attend(self, q, k, v):
        return self.cache.attend(self.layer, q, k, v, self.positions, self.window)

    def before(self, k):
        return self.cache.keys_before(self.layer, k, self.positions)


def gpt_layer(options, x, x0, weights, rotary, text, value=None, products=PLAIN):
    """One layer of the GPT: returns x (B, T, C) after attention and MLP.

    This is the definition: every kernel and every way to generate computes it. x0: the embedding, which every layer
    adds (modded-nanogpt); weights: the layer's, see weights.layer_weights, cast to the dtype of x here; rotary: cos and
    sin (T, head_dim / 2) in the dtype of x; text: WholeText or CachedText; value: added to attention's values, (B, T,
    C_kv), or None.
    """
    w = type(weights)(*(weight.to(x.dtype) for weight in weights))
    x = w.resid_scale * x + w.x0_scale * x0
    normed = norm(x)
    q = products.linear(normed, w.attn_q)  # (B, T, H × head_dim)
    k = products.linear(normed, w.attn_k)  # (B, T, H_kv × head_dim), as v
    v = products.linear(normed, w.attn_v)
    if options.key_shift:
        k = shift_keys(k, text.before(k), options.head_dim)
    v = gated(gate_of(options, w, VALUES, normed), v)
    if value is not None:
        v = v + value
    q = split_heads(q, options.head_dim)  # (B, H, T, head_dim)
    k = split_heads(k, options.head_dim)
    v = split_heads(v, options.head_dim)
    q = norm(apply_rotary(q, *rotary))  # QK-norm
    k = norm(apply_rotary(k, *rotary))
    y = text.attend(q, k, v)
    attended = products.linear(y.transpose(1, 2).flatten(2), w.attn_o)
    x = x + gated(gate_of(options, w, ATTENTION, normed), attended)
    normed = norm(x)
    gate = gate_of(options, w, MLP, normed)
    hidden = F.relu(products.linear(normed, w.mlp_in))  # (B, T, 4 × C)
    return x + gated(gate, products.of_square(hidden, w.mlp_out))
