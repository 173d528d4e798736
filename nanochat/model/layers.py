"""What the model and its kernels share: the parts of a layer, the weights of a layer, and the interface of kernels."""
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from nanochat.model.gates import ATTENTION, MLP, VALUES, gate_of, gated

NORM_EPS = torch.finfo(torch.float32).eps  # for every dtype
IGNORE_INDEX = -1  # the loss of a target with this value is 0


class LayerWeights(NamedTuple):
    """The weights of a layer. The model holds each of them as one stack over all layers, (layers, …)."""
    resid_scale: torch.Tensor  # (): the layer's input is resid_scale × x + x0_scale × embedding (modded-nanogpt)
    x0_scale: torch.Tensor  # ()
    attn_q: torch.Tensor  # (C, C)
    attn_k: torch.Tensor  # (C_kv, C)
    attn_v: torch.Tensor  # (C_kv, C)
    attn_o: torch.Tensor  # (C, C)
    mlp_in: torch.Tensor  # (4 C, C)
    mlp_out: torch.Tensor  # (C, 4 C)


# The same for a model with gates (gates.py). gate_map is (3, C), gate_scale (3, 1).
GatedLayerWeights = NamedTuple("GatedLayerWeights", [*LayerWeights.__annotations__.items(), ("gate_map", torch.Tensor),
                                                     ("gate_scale", torch.Tensor)])

MATRICES = ("attn_q", "attn_k", "attn_v", "attn_o", "mlp_in", "mlp_out")  # Muon updates these, AdamW the rest
SCALES = ("resid_scale", "x0_scale")
RECOMPUTED = ("none", "qkv", "all")  # what the backward pass computes again of a layer: qkv is queries, keys, values


@dataclass(frozen=True)
class Kernels:
    """The functions with which a GPT computes. nanochat/kernels/choose.py has the choices.

    attention(q, k, v, window): causal attention of q (B, H, T, D) with k and v (B, H_kv, T, D) -> (B, H, T, D). A
        position sees itself and the `window` - 1 positions before it, or all of them if the window is None
    cross_entropy(hidden, head, targets, softcap): losses (N,), fp32, nats, of hidden (N, C), head (V, C) and targets
        (N,); it may have no gradient
    mean_cross_entropy: the mean of these losses, a scalar with a gradient, for training
    mean_distillation(hidden, head, targets, softcap, teaching): the mean loss of a student, as kernels/distillation.py
        defines it, a scalar with a gradient; teaching is a Teaching
    embedding(ids, table, dtype): the vectors in table (V, C) of ids (B, T) -> (B, T, C)
    recompute(function, *args): function(*args), which is computed again in the backward pass instead of keeping its
        activations
    run_layers(x, stacks, windows, rotary, key_shift, recompute, values): x (B, T, C) after all layers, whose weights
        are `stacks`, LayerWeights or GatedLayerWeights; windows is the sizes that occur, ints, and each layer's, int32
        (layers,), or None where every layer sees all positions; rotary is cos and sin (T, head_dim / 2); key_shift says
        whether keys go through shift_keys; recompute is one of RECOMPUTED; values is which of the n blocks of C_kv
        columns of an array (B, T, n × C_kv) each layer adds to attention's values, int32 (layers,), n where it adds
        none, and that array; or None. run_layers itself is None where the model runs one layer after the other
    whole(after, parts): the whole weights, a list, of {name: this rank's part}, gathered once the tensor `after` is
        known, so that few are whole at a time; None where ranks have whole weights. The functions above take parts
    """
    name: str
    attention: Callable
    cross_entropy: Callable
    mean_cross_entropy: Callable
    mean_distillation: Callable
    embedding: Callable
    recompute: Callable
    run_layers: Callable | None = None
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


def softcapped(logits, softcap):
    """softcap × tanh(logits / softcap), which keeps logits within ±softcap (Gemma 2, arXiv 2408.00118). 0: as is."""
    return softcap * torch.tanh(logits / softcap) if softcap else logits


def gpt_layer(x, x0, weights, rotary, attend, value=None, before=None):
    """One layer of the GPT: returns x (B, T, C) after attention and MLP.

    x0: the embedding, which every layer adds; weights: LayerWeights or GatedLayerWeights, cast to the dtype of x here;
    rotary: cos and sin (T, head_dim / 2) in the dtype of x; attend(q, k, v): attention as in Kernels, with this layer's
    window; value: what is added to attention's values, (B, T, C_kv), or None; before: a function that gives each
    position of keys (B, T, C_kv) those of the position before it, for shift_keys, or None where keys stay in place.
    """
    w = type(weights)(*(weight.to(x.dtype) for weight in weights))
    x = w.resid_scale * x + w.x0_scale * x0
    normed = norm(x)
    head_dim = 2 * rotary[0].size(-1)
    q, k, v = (F.linear(normed, weight) for weight in (w.attn_q, w.attn_k, w.attn_v))
    k = k if before is None else shift_keys(k, before(k), head_dim)
    v = gated(gate_of(w, VALUES, normed), v)
    q, k, v = (split_heads(product, head_dim) for product in (q, k, v if value is None else v + value))
    q, k = norm(apply_rotary(q, *rotary)), norm(apply_rotary(k, *rotary))  # QK-norm
    attended = F.linear(attend(q, k, v).transpose(1, 2).flatten(2), w.attn_o)
    x = x + gated(gate_of(w, ATTENTION, normed), attended)
    normed = norm(x)
    return x + gated(gate_of(w, MLP, normed), F.linear(F.relu(F.linear(normed, w.mlp_in)).square(), w.mlp_out))
