"""Products with weights of 8 bits, for the CPU, where reading the weights is most of a token's time.

Weights have a scale per row. Activations have one per position and are rounded as well, so the processor multiplies
integers: their sums are exact, and a position's result does not depend on what else is computed with it. The products
are FBGEMM's, which is part of PyTorch on x86.
"""
import torch
import torch.nn.functional as F

from nanochat.common import BadInput
from nanochat.model.layers import MATRICES

_linear = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32


class Int8Matrix:
    """Stands for a weight (out, in) in F.linear, and nowhere else."""

    def __init__(self, weight, is_input_positive=False):
        """weight: fp32 (out, in); is_input_positive: no activation is below 0, so none of the 8 bits is a sign."""
        # Without VNNI, two products of 8 bits are added in 16 bits, which 7 bits of the activations do not overflow.
        bits = 8 if torch.cpu._is_vnni_supported() else 7
        self.zero_point = 0 if is_input_positive else 2 ** (bits - 1)
        self.max_code = 2 ** bits - 1 - self.zero_point  # the largest activation becomes this
        scales = weight.abs().amax(dim=1).clamp_min(1e-30) / 127
        codes = (weight / scales[:, None]).round().to(torch.int8)
        quantized = torch._make_per_channel_quantized_tensor(
            codes, scales.double() / self.max_code, torch.zeros(len(codes), dtype=torch.long), 0)
        previous, torch.backends.quantized.engine = torch.backends.quantized.engine, "fbgemm"
        self.packed = torch.ops.quantized.linear_prepack(quantized, None)
        torch.backends.quantized.engine = previous

    def to(self, dtype):
        """Returns itself: the model asks for the weight in the dtype of its activations."""
        return self

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is not F.linear or kwargs or not isinstance(args[1], cls):
            raise NotImplementedError(f"{function} of a weight of 8 bits")
        x, matrix = args
        largest = torch.linalg.vector_norm(x, ord=torch.inf, dim=-1, keepdim=True).clamp_min(1e-30)
        return _linear(x * (matrix.max_code / largest), 1.0, matrix.zero_point, matrix.packed) * largest


class Int8Stack:
    """Stands for the weights of all layers, (layers, out, in)."""

    def __init__(self, weights, is_input_positive):
        self._matrices = [Int8Matrix(weight, is_input_positive) for weight in weights]

    def unbind(self, dim):
        return self._matrices


def quantize_to_int8(model):
    """Replaces the weights of the GPT's products by such of 8 bits; it can then only be evaluated. Returns the model.

    Raises BadInput if this machine's PyTorch has no such products.
    """
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        raise BadInput("--quantize=int8 needs an x86 processor: leave it out")
    for name in MATRICES:
        weights = getattr(model, name).detach()
        delattr(model, name)
        setattr(model, name, Int8Stack(weights, is_input_positive=name == "mlp_out"))  # after ReLU²
    head = model.lm_head.detach()
    del model.lm_head
    model.lm_head = Int8Matrix(head)
    return model
