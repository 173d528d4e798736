"""What the model and its kernels share: the layer and its parts, its options, and the interface of kernels."""
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from nanochat.model.gates import ATTENTION, MLP, VALUES, gate_of, gated

NORM_EPS = torch.finfo(torch.float32).eps  # for every dtype
IGNORE_INDEX = -1  # the loss of a target with this value is 0


RECOMPUTED = ("none", "qkv", "all")  # what the backward pass computes again of a layer: qkv is queries, keys, values


@dataclass(frozen=True)
class LayerOptions:
    """What a layer computes: the fields of GPTConfig that say so, by their names. An option that is off is False.

    A new option is a field here and in GPTConfig, and a line in gpt_layer. Whatever computes a layer in its own way
    says which options it knows, and leaves models with others alone (see unknown).
    """
    head_dim: int
    layer_gates: bool = False  # see gates.py
    key_shift: bool = False  # see shift_keys

    @classmethod
    def of(cls, config):
        return cls(**{field.name: getattr(config, field.name) for field in fields(cls)})

    def unknown(self, known):
        """Returns the names of the options that are on and not among the `known` ones, as flags: text, "" if none."""
        names = [field.name for field in fields(self) if getattr(self, field.name) and field.name not in known]
        return ", ".join(f"--{name}" for name in names)


class LayerWindows(NamedTuple):
    """How many positions each layer's attention sees."""
    sizes: tuple  # those that occur, ints
    of_layers: torch.Tensor  # int32 (layers,)


class LayerValues(NamedTuple):
    """What layers add to attention's values: one of `count` blocks of columns of an array."""
    numbers: torch.Tensor  # of each layer's block, int32 (layers,); `count` where a layer adds none
    array: torch.Tensor  # (B, T, count × C_kv)
    count: int


@dataclass(frozen=True)
class Kernels:
    """The functions with which a GPT computes. nanochat/kernels/choose.py has the choices."""
    name: str
    # attention(q, k, v, window): causal attention of q (B, H, T, D) with k and v (B, H_kv, T, D) -> (B, H, T, D). A
    # position sees itself and the `window` - 1 positions before it, or all of them if the window is None.
    attention: Callable
    # cross_entropy(hidden, head, targets, cap): losses (N,), fp32, nats, of hidden (N, C), head (V, C) and targets
    # (N,), whose logits the LogitCap `cap` bounds. It may have no gradient.
    cross_entropy: Callable
    # mean_loss(hidden, head, targets, cap, teaching=None): the mean of these losses, a scalar with a gradient, for
    # training; with a Teaching, that of a student, as kernels/loss.py defines it.
    mean_loss: Callable
    # embedding(ids, table, dtype): the vectors in table (V, C) of ids (B, T) -> (B, T, C).
    embedding: Callable
    # recompute(function, *args): function(*args), which is computed again in the backward pass instead of keeping its
    # activations.
    recompute: Callable
    # run_layers(options, x, stacks, windows, rotary, recompute, values): x (B, T, C) after all layers. stacks: as
    # weights.layer_weights; windows: LayerWindows, or None where every layer sees all positions; rotary: cos and sin
    # (T, head_dim / 2); recompute: one of RECOMPUTED; values: LayerValues, or None. None instead of the function where
    # the model runs one layer after the other.
    run_layers: Callable | None = None
    # whole(after, parts): the whole weights, a list, of {name: this rank's part}, gathered once the tensor `after` is
    # known, so that few are whole at a time. None where ranks have whole weights. The functions above take parts.
    whole: Callable | None = None


# -----------------------------------------------------------------------------
# The parts of a layer


def norm(x):
    """RMSNorm without parameters, over the last dimension."""
    return F.rms_norm(x, (x.size(-1),), eps=NORM_EPS)


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
    """Gives each position of x (B, T, width) what the position before it has, and the first one 0."""
    return F.pad(x, (0, 0, 1, -1))


def shift_keys(k, before, head_dim):
    """Returns the keys k (B, T, C_kv), where half of each head's channels, those that rotary turns slowest, are of the
    position before: `before`, (B, T, C_kv).

    So one layer finds what followed earlier occurrences of a token: it looks for the key of the token itself, at the
    position after it. Otherwise one layer has to copy each token's predecessor first, and another one finds it
    (arXiv 2209.11895); the idea is modded-nanogpt's, and its gain on C++ is in dev/LOG.md.
    """
    return torch.where(_keeps_place(k, head_dim), k, before)


def shift_keys_backward(d_k, head_dim):
    """Returns the gradient of k in shift_keys(k, one_later(k), head_dim), from that of its result."""
    return torch.where(_keeps_place(d_k, head_dim), d_k, F.pad(d_k, (0, 0, -1, 1)))


def _keeps_place(k, head_dim):
    # Rotary turns channels i and i + head_dim / 2 of a head together, the fastest pair first. With the fastest shifted
    # instead, a model of depth 4 had 1.6920 bits per byte after 512 steps, and 1.5194 so.
    return torch.arange(k.size(-1), device=k.device) % (head_dim // 2) < (head_dim // 2 + 1) // 2


def split_heads(x, head_dim):
    """Turns (B, T, H × head_dim) into (B, H, T, head_dim)."""
    return x.unflatten(-1, (-1, head_dim)).transpose(1, 2)


def causal_mask(query_positions, key_positions, window):
    """Returns a boolean mask (…, T_q, T_k) that is True where a query may look, for query_positions (…, T_q) and
    key_positions (T_k,); `window` as in Kernels.attention."""
    distance = query_positions[..., None] - key_positions[None, :]
    mask = distance >= 0
    return mask if window is None else mask & (distance < window)


# -----------------------------------------------------------------------------
# The layer


@dataclass
class WholeText:
    """What a layer sees where all positions of a text are computed at once."""
    attention: Callable  # as in Kernels
    window: int | None

    def attend(self, q, k, v):
        return self.attention(q, k, v, self.window)

    def before(self, k):
        return one_later(k)


@dataclass
class CachedText:
    """What layer number `layer` sees of a text whose earlier positions are in a KVCache, or in one with its methods."""
    cache: Any
    layer: int
    positions: Any  # that are computed, as the cache takes them
    window: int | None

    def attend(self, q, k, v):
        return self.cache.attend(self.layer, q, k, v, self.positions, self.window)

    def before(self, k):
        return self.cache.keys_before(self.layer, k, self.positions)


def gpt_layer(options, x, x0, weights, rotary, text, value=None):
    """One layer of the GPT: returns x (B, T, C) after attention and MLP.

    This is the definition: every kernel and every way to generate computes it. x0: the embedding, which every layer
    adds (modded-nanogpt); weights: the layer's, see weights.layer_weights, cast to the dtype of x here; rotary: cos and
    sin (T, head_dim / 2) in the dtype of x; text: WholeText or CachedText; value: what is added to attention's values,
    (B, T, C_kv), or None.
    """
    w = type(weights)(*(weight.to(x.dtype) for weight in weights))
    x = w.resid_scale * x + w.x0_scale * x0
    normed = norm(x)
    q = F.linear(normed, w.attn_q)  # (B, T, H × head_dim)
    k = F.linear(normed, w.attn_k)  # (B, T, H_kv × head_dim), as v
    v = F.linear(normed, w.attn_v)
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
    attended = F.linear(y.transpose(1, 2).flatten(2), w.attn_o)
    x = x + gated(gate_of(options, w, ATTENTION, normed), attended)
    normed = norm(x)
    gate = gate_of(options, w, MLP, normed)
    hidden = F.relu(F.linear(normed, w.mlp_in)).square()  # (B, T, 4 × C)
    return x + gated(gate, F.linear(hidden, w.mlp_out))
