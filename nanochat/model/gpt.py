"""The model and nothing else: a GPT with rotary positions, QK-norm, ReLU², parameterless RMSNorm, an untied head with
softcapped logits, grouped-query attention and, where asked for, short attention windows.

The weights of all layers are stacked: `attn_q` is (layer, out, in). So Muon orthogonalises all layers in one batched
product, gradients are a few large tensors for the collectives, and a loop over the layers needs no copy.

Activations and products have `compute_dtype`. Weights are fp32; in training, where the kernels allow it, those in the
model are copies in `compute_dtype` of fp32 ones that the optimizer keeps, which spares converting them in every step.
"""
import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

from nanochat.common import BadInput
from nanochat.kernels.choose import causal_mask, get_kernels, softcapped

HEAD_DIM = 128  # the TPU's matrix unit is 128 (v5e) or 256 (v6e) wide
NORM_EPS = torch.finfo(torch.float32).eps  # for every dtype
LAYER_WEIGHTS = ("resid_scale", "x0_scale", "attn_q", "attn_k", "attn_v", "attn_o", "mlp_in", "mlp_out")


@dataclass(frozen=True)
class GPTConfig:
    vocab_size: int = 65536
    max_seq_len: int = 1024
    n_layer: int = 16
    n_embd: int = 1024
    n_head: int = 8
    n_kv_head: int = 8
    window_pattern: str = "L"  # one letter a layer, repeated: L sees all positions, S the last max_seq_len / 2
    softcap: float = 15.0

    def __post_init__(self):
        if self.n_embd % self.n_head or (self.n_embd // self.n_head) % 2:
            raise BadInput(f"width {self.n_embd} does not divide into {self.n_head} heads of an even size")
        if self.n_kv_head < 1 or self.n_head % self.n_kv_head:
            raise BadInput(f"--num_kv_heads={self.n_kv_head} does not divide the {self.n_head} heads")
        if not self.window_pattern or set(self.window_pattern) - set("SL"):
            raise BadInput(f"--window_pattern={self.window_pattern} is unknown: use letters S (short) and L (long), "
                           "for example SSSL")

    @property
    def head_dim(self):
        return self.n_embd // self.n_head

    def windows(self):
        """Attention window of each layer, in positions; 0 is unlimited. The last layer always sees everything."""
        pattern = [self.window_pattern[i % len(self.window_pattern)] for i in range(self.n_layer - 1)] + ["L"]
        return [0 if letter == "L" else max(self.max_seq_len // 2, 1) for letter in pattern]


def config_for_depth(depth, **overrides):
    """GPTConfig in which everything follows from `depth`: width 64 × depth, rounded up to whole heads of 128."""
    width = math.ceil(depth * 64 / HEAD_DIM) * HEAD_DIM
    width = overrides.pop("n_embd", None) or width
    heads = overrides.pop("n_head", None) or max(width // HEAD_DIM, 1)
    kv_heads = overrides.pop("n_kv_head", None) or heads
    return GPTConfig(n_layer=depth, n_embd=width, n_head=heads, n_kv_head=kv_heads, **overrides)


class KVCache:
    """Keys and values of each layer, (B, H_kv, max_len, head_dim): of one shape for ever, so that XLA compiles once."""

    def __init__(self, config, batch_size, max_len, dtype, device):
        shape = (batch_size, config.n_kv_head, max_len, config.head_dim)
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.n_layer)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.n_layer)]


def norm(x):
    return F.rms_norm(x, (x.size(-1),), eps=NORM_EPS)


def rotary_tables(positions, head_dim, base=10000.0):
    """cos and sin for `positions` (T,), each (T, head_dim / 2), fp32 (RoPE, arXiv 2104.09864)."""
    frequencies = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = positions[:, None].float() * frequencies[None, :].to(positions.device)
    return angles.cos(), angles.sin()


def apply_rotary(x, cos, sin):
    """Rotates x (B, H, T, head_dim) by the tables (T, head_dim / 2)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos + second * sin, second * cos - first * sin], dim=-1)


class GPT(nn.Module):
    def __init__(self, config, kernels=None, compute_dtype=torch.float32, activation_checkpointing=False):
        super().__init__()
        self.config = config
        self.kernels = kernels or get_kernels("current", "cpu")
        self.compute_dtype = compute_dtype
        self.activation_checkpointing = activation_checkpointing
        layers, width, kv_width = config.n_layer, config.n_embd, config.n_kv_head * config.head_dim

        def parameter(*shape):
            return nn.Parameter(torch.empty(*shape, dtype=torch.float32))

        self.wte = parameter(config.vocab_size, width)
        self.attn_q = parameter(layers, width, width)
        self.attn_k = parameter(layers, kv_width, width)
        self.attn_v = parameter(layers, kv_width, width)
        self.attn_o = parameter(layers, width, width)
        self.mlp_in = parameter(layers, 4 * width, width)
        self.mlp_out = parameter(layers, width, 4 * width)
        # x of each layer's input = resid_scale × x + x0_scale × embedding (modded-nanogpt)
        self.resid_scale = parameter(layers)
        self.x0_scale = parameter(layers)
        self.lm_head = parameter(config.vocab_size, width)
        cos, sin = rotary_tables(torch.arange(config.max_seq_len), config.head_dim)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        windows = torch.tensor([window or config.max_seq_len for window in config.windows()], dtype=torch.int32)
        self.register_buffer("windows", windows, persistent=False)

    @property
    def weights_dtype(self):
        """Of the weights in training. Autograd gives gradients, and sums of them, the dtype of the weights: where it
        does that, they stay fp32."""
        return self.compute_dtype if self.kernels.run_layers else torch.float32

    @classmethod
    def on_meta(cls, config):
        """A GPT without memory, to count its parameters."""
        with torch.device("meta"):
            return cls(config)

    @torch.no_grad()
    def init_weights(self, seed=0):
        """Every rank gets the same weights from the same seed, without a broadcast: drawn by a CPU generator."""
        generator = torch.Generator().manual_seed(seed)
        bound = (3 / self.config.n_embd) ** 0.5  # uniform with the standard deviation 1 / sqrt(width)
        self.wte.normal_(0.0, 1.0, generator=generator)
        self.lm_head.normal_(0.0, 0.001, generator=generator)  # near-uniform predictions at the start
        for matrix in (self.attn_q, self.attn_k, self.attn_v, self.mlp_in):
            matrix.uniform_(-bound, bound, generator=generator)
        for matrix in (self.attn_o, self.mlp_out):  # every layer begins as the identity
            matrix.zero_()
        self.resid_scale.fill_(1.0)
        self.x0_scale.fill_(0.1)
        return self

    def hidden(self, ids, cache=None, positions=None):
        """Final hidden states (B, T, C) of ids (B, T).

        With a KVCache, `positions` (T,) says where the ids stand; their keys and values are written to the cache, and
        they see all that is in it at or before their own position.
        """
        x0 = norm(self.kernels.embedding(ids, self.wte, self.compute_dtype))  # (B, T, C)
        stacks = [getattr(self, name) for name in LAYER_WEIGHTS]
        windows = self.config.windows()
        if self.kernels.run_layers and cache is None:
            rotary = self.cos[:ids.size(1)], self.sin[:ids.size(1)]
            return norm(self.kernels.run_layers(x0, stacks, self.windows if any(windows) else None, rotary,
                                                self.activation_checkpointing))
        positions = torch.arange(ids.size(1), device=ids.device) if positions is None else positions
        rotary = self.cos[positions].to(self.compute_dtype), self.sin[positions].to(self.compute_dtype)
        x = x0
        # unbind's backward is one stack, where indexing would add up whole stacks
        for layer, weights in enumerate(zip(*(stack.unbind(0) for stack in stacks), strict=True)):
            def block(x, x0, *weights, layer=layer):
                return self._block(x, x0, weights, rotary, lambda q, k, v: self._attend(
                    q, k, v, windows[layer], cache, layer, positions))
            if self.activation_checkpointing and torch.is_grad_enabled():
                x = self.kernels.checkpoint(block, x, x0, *weights)
            else:
                x = block(x, x0, *weights)
        return norm(x)

    def _block(self, x, x0, weights, rotary, attend):
        resid_scale, x0_scale, attn_q, attn_k, attn_v, attn_o, mlp_in, mlp_out = (w.to(x.dtype) for w in weights)
        B, T, _ = x.shape
        x = resid_scale * x + x0_scale * x0
        normed = norm(x)
        q, k, v = (F.linear(normed, w).view(B, T, -1, self.config.head_dim).transpose(1, 2)  # (B, H, T, head_dim)
                   for w in (attn_q, attn_k, attn_v))
        q, k = norm(apply_rotary(q, *rotary)), norm(apply_rotary(k, *rotary))  # QK-norm
        y = attend(q, k, v).transpose(1, 2).reshape(B, T, -1)
        x = x + F.linear(y, attn_o)
        return x + F.linear(F.relu(F.linear(norm(x), mlp_in)).square(), mlp_out)

    def _attend(self, q, k, v, window, cache, layer, positions):
        if cache is None:
            return self.kernels.attention(q, k, v, window)
        keys = cache.keys[layer] = cache.keys[layer].index_copy(2, positions, k)
        values = cache.values[layer] = cache.values[layer].index_copy(2, positions, v)
        mask = causal_mask(positions, torch.arange(keys.size(2), device=keys.device), window)
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=q.size(1) != k.size(1))

    def logits(self, hidden):
        """fp32 logits (…, V) of hidden states (…, C)."""
        return softcapped(F.linear(hidden, self.lm_head.to(hidden.dtype)).float(), self.config.softcap)

    def forward(self, ids, targets=None, reduction="none"):
        """Logits (B, T, V) of ids (B, T); with targets (B, T), the losses of the tokens instead, fp32, nats: (B, T), or
        their mean, a scalar, with reduction "mean"."""
        hidden = self.hidden(ids)
        if targets is None:
            return self.logits(hidden)
        arguments = hidden.flatten(0, 1), self.lm_head, targets.flatten(), self.config.softcap
        if reduction == "mean":
            return self.kernels.mean_cross_entropy(*arguments)
        return self.kernels.cross_entropy(*arguments).view_as(targets)
