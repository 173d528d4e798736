"""A GPT with weights of 8 bits, for the CPU, where reading the weights takes most of a token's time.

Weights have a scale per row. Activations have a scale per position and are rounded, too, so the processor multiplies
integers: their sums are exact, and a position's result does not depend on what else is computed with it. FBGEMM, part
of PyTorch on x86, computes the products.
"""
import torch
import torch.nn.functional as F

from nanochat.common import BadInput
from nanochat.kernels import plain
from nanochat.kernels.int8 import rounded
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

    compute_dtype = torch.float32

    def __init__(self, model, matrix=Int8Matrix):
        """matrix: makes the matrices. Raises BadInput if this machine's PyTorch has no such products."""
        if "fbgemm" not in torch.backends.quantized.supported_engines:
            raise BadInput("--quantize=int8 needs an x86 processor: leave it out")
        unknown = model.options.unknown(KNOWN) or ", ".join(sorted(model.state_dict().keys() - WEIGHTS))
        if unknown:
            raise BadInput(f"--quantize=int8 is not for a model with {unknown}: leave it out")
        self.config = model.config
        self.options = model.options
        self.wte = model.wte.detach().clone()
        self.logit_cap = model.logit_cap
        self.value_table = model.value_table.detach().clone() if model.config.has_values else None
        self.rotary = torch.complex(model.cos, -model.sin)[:, None]  # (max_seq_len, 1, head_dim / 2)
        self.lm_head = matrix(model.lm_head.detach())
        self.layers = [_Int8Layer(model, index, matrix) for index in range(model.config.n_layer)]

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

    def __call__(self, ids, targets=None, reduction="none"):
        """As GPT.forward."""
        logits = self.logits(self.hidden(ids))
        if targets is None:
            return logits
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten().long(), ignore_index=-1, reduction=reduction)
        return losses.view_as(targets) if reduction == "none" else losses


class _Int8Layer:
    """A layer, like layers.gpt_layer. In q and k, the channels i and i + head_dim / 2 of a head stand side by side: a
    complex number, which rotary turns."""

    def __init__(self, model, index, matrix):
        config = model.config
        self.head_dim = config.head_dim
        self.is_key_shifted = config.key_shift
        self.resid_scale = model.resid_scale[index].item()
        self.x0_scale = model.x0_scale[index].item()
        q = _in_pairs(model.attn_q[index], config.head_dim)
        k = _in_pairs(model.attn_k[index], config.head_dim)
        self.qkv = matrix(torch.cat([q, k, model.attn_v[index]]).detach())
        self.num_q = config.n_head
        self.num_kv = config.n_kv_head
        self.attn_o = matrix(model.attn_o[index].detach())
        self.mlp_in = matrix(model.mlp_in[index].detach())
        self.mlp_out = matrix(model.mlp_out[index].detach(), is_input_positive=True)  # after ReLU²
        self.gate_map = None
        if config.layer_gates:
            self.gate_map = model.gate_map[index].detach().clone()
            self.gate_scale = 2 * model.gate_scale[index, :, 0].detach()

    def __call__(self, x, x0, rotary, text, value):
        x = (x * self.resid_scale).add_(x0, alpha=self.x0_scale)  # (B, T, C)
        normed = _norm(x)
        heads = self.qkv(normed).unflatten(-1, (-1, self.head_dim))  # (B, T, heads, head_dim)
        qk, v = heads.split([self.num_q + self.num_kv, self.num_kv], dim=2)
        if self.is_key_shifted:
            keys = qk[:, :, self.num_q:]
            shifted = (self.head_dim // 2 + 1) // 2 * 2  # from this channel on, see layers.shift_keys
            keys[..., shifted:] = text.before(keys.flatten(2)).view_as(keys)[..., shifted:]
        of_values, of_attention = self._gates(normed, VALUES, ATTENTION)
        v = v * of_values[..., None]
        if value is not None:
            v = v + value
        turned = torch.view_as_complex(qk.unflatten(-1, (-1, 2))) * rotary
        qk = _norm(torch.view_as_real(turned).flatten(-2))
        q, k = qk.transpose(1, 2).split([self.num_q, self.num_kv], dim=1)  # (B, heads, T, head_dim)
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
