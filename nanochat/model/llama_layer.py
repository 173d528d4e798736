"""The layer of the Llama family, and the model: see llama.py."""
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from nanochat.model.decoder import Decoder
from nanochat.model.layers import ALONE, PLAIN, apply_rotary, norm, split_heads


@dataclass(frozen=True)
class LlamaOptions:
    """What the layer needs to know of the config, by the same names."""
    head_dim: int
    norm_eps: float
    qkv_bias: bool
    qk_norm: bool
    divides_heads = True

    def unknown(self, known):
        """Returns the name of the model for a person: only `layer` computes it."""
        return "--arch=llama"

    def layer(self, x, x0, weights, rotary, text, value=None, products=PLAIN, ranks=ALONE):
        """One layer: returns x (B, T, C) after attention and MLP. This is the definition, as in transformers. The
        arguments are those of layers.gpt_layer; x0 and value are unused. ranks: layers.TensorRanks, of which this one
        has its own heads and hidden units."""
        w = type(weights)(*(weight.to(x.dtype) for weight in weights))
        normed = ranks.share(norm(x, self.norm_eps) * w.attn_norm)
        q = products.linear(normed, w.attn_q)  # (B, T, H × head_dim)
        k = products.linear(normed, w.attn_k)  # (B, T, H_kv × head_dim), as v
        v = products.linear(normed, w.attn_v)
        if self.qkv_bias:
            q = q + ranks.own(w.q_bias)
            k = k + ranks.own(w.k_bias)
            v = v + ranks.own(w.v_bias)
        q = split_heads(q, self.head_dim)  # (B, H, T, head_dim)
        k = split_heads(k, self.head_dim)
        if self.qk_norm:  # before the rotation, with one weight for all heads
            q = norm(q, self.norm_eps) * ranks.share(w.q_norm)
            k = norm(k, self.norm_eps) * ranks.share(w.k_norm)
        y = text.attend(apply_rotary(q, *rotary), apply_rotary(k, *rotary), split_heads(v, self.head_dim))
        x = x + ranks.join(products.linear(y.transpose(1, 2).flatten(2), w.attn_o))
        normed = ranks.share(norm(x, self.norm_eps) * w.mlp_norm)
        hidden = F.silu(products.linear(normed, w.mlp_gate)) * products.linear(normed, w.mlp_in)  # (B, T, mlp_dim)
        return x + ranks.join(products.linear(hidden, w.mlp_out))


class Llama(Decoder):

    def _options(self):
        config = self.config
        return LlamaOptions(config.head_dim, config.norm_eps, config.qkv_bias, config.qk_norm)

    def _rotary_tables(self):
        """As layers.rotary_tables, computed as transformers does, which turns the other way round."""
        config = self.config
        frequencies = 1.0 / config.rope_theta ** (torch.arange(0, config.head_dim, 2).float() / config.head_dim)
        angles = torch.arange(config.max_seq_len)[:, None].float() * frequencies
        return angles.cos(), -angles.sin()

    def _begin(self, x):
        return x

    def _end(self, x):
        return self.kernels.times(norm(x, self.config.norm_eps), self.out_norm.to(x.dtype))

    @property
    def head(self):
        return self.wte if self.config.tied_head else self.lm_head
