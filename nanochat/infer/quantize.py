"""A GPT with weights of 8 bits, for the CPU, where reading the weights takes most of a token's time.

Weights have a scale per row. Activations have a scale per position and are rounded, too, so the processor multiplies
integers: their sums are exact, and a position's result does not depend on what else is computed with it. FBGEMM, part
of PyTorch on x86, computes the products.
"""
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from nanochat.common import BadInput
from nanochat.kernels import plain
from nanochat.kernels.int8 import rounded
from nanochat.model.config import GPTConfig
from nanochat.model.layers import ATTENTION, MLP, VALUES, CachedText, WholeText

KNOWN = {"head_dim", "layer_gates", "key_shift"}  # the LayerOptions that this file computes
WEIGHTS = {"wte", "value_table", "lm_head", "resid_scale", "x0_scale", "attn_q", "attn_k", "attn_v", "attn_o", "mlp_in",
           "mlp_out", "gate_map", "gate_scale"}
TINY = 1e-30  # replaces 0 as a divisor
_linear = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32


class Int8Matrix:
    """A weight in 8 bits. Calling it multiplies."""

    def __init__(self, weight, is_input_positive=False):
        """weight: fp32 (out, in); is_input_positive: no activation is below 0, so all 8 bits hold its value."""
        # Without VNNI, two products of 8 bits are added in 16 bits, which 7 bits of the activations do not overflow.
        bits = 8 if torch.cpu._is_vnni_supported() else 7
        self.zero_point = 0 if is_input_positive else 2 ** (bits - 1)
        self.unit = 1 / (2 ** bits - 1 - self.zero_point)  # of the codes of activations between -1 and 1
        codes, scales = rounded(weight)
        quantized = torch._make_per_channel_quantized_tensor(
            codes, scales[:, 0].double(), torch.zeros(len(codes), dtype=torch.long), 0)
        previous = torch.backends.quantized.engine
        torch.backends.quantized.engine = "fbgemm"
        self.packed = torch.ops.quantized.linear_prepack(quantized, None)
        torch.backends.quantized.engine = previous

    def __call__(self, x):
        """Returns the product (…, out) with x (…, in), fp32."""
        # FBGEMM takes one scale for all activations. Divided by the largest of its position, each lies between -1 and
        # 1, so one scale fits all positions; the product is multiplied by the largest again.
        largest = torch.linalg.vector_norm(x, ord=torch.inf, dim=-1, keepdim=True).clamp_min_(TINY)  # (…, 1)
        return _linear(x / largest, self.unit, self.zero_point, self.packed).mul_(largest)


class Int8GPT:
    """Computes like the GPT that it is made from, rounded, for evaluation. It holds no fp32 copy of the matrices.
    Beside the products, a token's time depends on the number of operations: there are few here."""

    def __init__(self, model, read=None):
        """read: returns the fp32 weight of a name; None: that of the model. Raises BadInput if this machine's PyTorch
        has no such products."""
        if "fbgemm" not in torch.backends.quantized.supported_engines:
            raise BadInput("--quantize=int8 needs an x86 processor: leave it out")
        unknown = model.options.unknown(KNOWN) or ", ".join(sorted(model.state_dict().keys() - WEIGHTS))
        if unknown:
            raise BadInput(f"--quantize=int8 is not for a model with {unknown}: leave it out")
        read = read or model.state_dict().get
        self.config = config = model.config
        self.logit_cap = model.logit_cap
        self.rotary = torch.complex(model.cos, -model.sin)[:, None]  # (max_seq_len, 1, head_dim / 2)
        self.lm_head = Int8Matrix(read("lm_head"))  # first, because rounding it takes the most memory
        # Then a stack after the other, because a caller may read them from a disk.
        pairs = partial(_in_pairs, head_dim=config.head_dim)
        parts = {"qkv": [Int8Matrix(torch.cat([pairs(q), pairs(k), v]))
                         for q, k, v in zip(read("attn_q"), read("attn_k"), read("attn_v"), strict=True)],
                 "attn_o": [Int8Matrix(weight) for weight in read("attn_o")],
                 "mlp_in": [Int8Matrix(weight) for weight in read("mlp_in")],
                 "mlp_out": [Int8Matrix(weight, is_input_positive=True) for weight in read("mlp_out")],  # after ReLU²
                 "resid_scale": read("resid_scale").tolist(),
                 "x0_scale": read("x0_scale").tolist()}
        if config.layer_gates:
            parts |= {"gate_map": read("gate_map"), "gate_scale": 2 * read("gate_scale")[:, :, 0]}
        self.layers = [_Int8Layer(config, **dict(zip(parts, layer, strict=True)))
                       for layer in zip(*parts.values(), strict=True)]
        self.wte = read("wte")
        self.value_table = read("value_table") if config.has_values else None

    @torch.no_grad()
    def hidden(self, ids, cache=None, positions=None):
        """As GPT.hidden. positions: a slice."""
        if positions is None:
            positions = slice(0, ids.size(1))
        rotary = self.rotary[positions]
        x = x0 = _norm(F.embedding(ids, self.wte))
        values = None
        if self.value_table is not None:
            values = F.embedding(ids, self.value_table).unflatten(-1, (self.config.n_kv_head, self.config.head_dim))
        each = zip(self.layers, self.config.windows(), self.config.adds_values(), strict=True)
        for index, (layer, window, adds) in enumerate(each):
            text = WholeText(plain.attention, window)
            if cache is not None:
                text = CachedText(cache, index, positions, window)
            x = layer(x, x0, rotary, text, values if adds else None)
        return _norm(x)

    def logits(self, hidden):
        """As GPT.logits."""
        return self.logit_cap(self.lm_head(hidden))

    def __call__(self, ids, targets=None):
        """As GPT.forward without a reduction."""
        logits = self.logits(self.hidden(ids))
        if targets is None:
            return logits
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten().long(), ignore_index=-1, reduction="none")
        return losses.view_as(targets)


@dataclass
class _Int8Layer:
    """A layer, like layers.gpt_layer. In q and k, the channels i and i + head_dim / 2 of a head stand side by side: a
    complex number, which rotary turns."""

    config: GPTConfig
    qkv: Int8Matrix
    attn_o: Int8Matrix
    mlp_in: Int8Matrix
    mlp_out: Int8Matrix
    resid_scale: float
    x0_scale: float
    gate_map: torch.Tensor | None = None
    gate_scale: torch.Tensor | None = None

    def __call__(self, x, x0, rotary, text, value):
        head_dim, num_q, num_kv = self.config.head_dim, self.config.n_head, self.config.n_kv_head
        x = (x * self.resid_scale).add_(x0, alpha=self.x0_scale)  # (B, T, C)
        normed = _norm(x)
        heads = self.qkv(normed).unflatten(-1, (-1, head_dim))  # (B, T, heads, head_dim)
        qk, v = heads.split([num_q + num_kv, num_kv], dim=2)
        if self.config.key_shift:
            keys = qk[:, :, num_q:]
            shifted = (head_dim // 2 + 1) // 2 * 2  # from this channel on, see layers.shift_keys
            keys[..., shifted:] = text.before(keys.flatten(2)).view_as(keys)[..., shifted:]
        of_values, of_attention = self._gates(normed, VALUES, ATTENTION)
        v = v * of_values[..., None]
        if value is not None:
            v = v + value
        turned = torch.view_as_complex(qk.unflatten(-1, (-1, 2))) * rotary
        qk = _norm(torch.view_as_real(turned).flatten(-2))
        q, k = qk.transpose(1, 2).split([num_q, num_kv], dim=1)  # (B, heads, T, head_dim)
        attended = self.attn_o(text.attend(q, k, v.transpose(1, 2)).transpose(1, 2).flatten(2))
        x = x.addcmul_(of_attention, attended)
        normed = _norm(x)
        of_mlp, = self._gates(normed, MLP)
        return x.addcmul_(of_mlp, self.mlp_out(self.mlp_in(normed).relu_().square_()))

    def _gates(self, normed, first, last=None):
        """Returns the gates from row `first` to `last` of gate_map, each (B, T, 1), as layers.gate_of."""
        rows = slice(first, (first if last is None else last) + 1)
        if self.gate_map is None:
            return normed.new_ones(rows.stop - rows.start, 1, 1, 1)
        logits = (normed[:, :, None] * self.gate_map[rows]).sum(-1)
        return logits.sigmoid_().mul_(self.gate_scale[rows]).split(1, dim=-1)


def _in_pairs(weight, head_dim):
    """Returns the rows of q or k with those of each complex number side by side."""
    return weight.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)


def _norm(x):
    """RMSNorm, like layers.norm."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / length.clamp_min_(TINY).mul_(x.size(-1) ** -0.5)
