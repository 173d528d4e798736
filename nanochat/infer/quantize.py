"""Products with weights of 8 bits, for the CPU, where reading the weights is most of a token's time.

Weights have a scale per row. Activations have one per position and are rounded as well, so the processor multiplies
integers: their sums are exact, and a position's result does not depend on what else is computed with it. The products
are FBGEMM's, which is part of PyTorch on x86.
"""
import torch
import torch.nn.functional as F

from nanochat.common import BadInput

TINY = 1e-30  # instead of 0, by which nothing can be divided

_linear = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32


class Int8Matrix:
    """Stands for a weight (out, in) in F.linear, and nowhere else."""

    def __init__(self, weight, is_input_positive=False):
        """weight: fp32 (out, in); is_input_positive: no activation is below 0, so none of the 8 bits is a sign."""
        # Without VNNI, two products of 8 bits are added in 16 bits, which 7 bits of the activations do not overflow.
        bits = 8 if torch.cpu._is_vnni_supported() else 7
        self.zero_point = 0 if is_input_positive else 2 ** (bits - 1)
        self.unit = 1 / (2 ** bits - 1 - self.zero_point)  # of the codes of activations between -1 and 1
        scales = weight.abs().amax(dim=1).clamp_min(TINY) / 127
        codes = (weight / scales[:, None]).round().to(torch.int8)
        quantized = torch._make_per_channel_quantized_tensor(
            codes, scales.double(), torch.zeros(len(codes), dtype=torch.long), 0)
        previous, torch.backends.quantized.engine = torch.backends.quantized.engine, "fbgemm"
        self.packed = torch.ops.quantized.linear_prepack(quantized, None)
        torch.backends.quantized.engine = previous

    def to(self, dtype):
        """Returns itself: the model asks for the weight in the dtype of its activations."""
        return self

    def product(self, x):
        """Returns what F.linear does, rounded: (…, out) of x (…, in)."""
        largest = torch.linalg.vector_norm(x, ord=torch.inf, dim=-1, keepdim=True).clamp_min_(TINY)
        return _linear(x / largest, self.unit, self.zero_point, self.packed).mul_(largest)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is not F.linear or kwargs or not isinstance(args[1], cls):
            raise NotImplementedError(f"{function} of a weight of 8 bits")
        return args[1].product(args[0])


class JointMatrix:
    """Several weights (out, in) that are multiplied with the same activations, one after the other: in one product."""

    def __init__(self, weights):
        self.sizes, self.matrix = [len(weight) for weight in weights], Int8Matrix(torch.cat(weights))
        self.parts = [JointPart(self, index) for index in range(len(weights))]
        self.x = self.products = None

    def product(self, x, index):
        if x is not self.x:
            self.x, self.products = x, self.matrix.product(x).split(self.sizes, dim=-1)
        return self.products[index]


class JointPart(Int8Matrix):
    """One of the weights of a JointMatrix."""

    def __init__(self, joint, index):
        self.joint, self.index = joint, index

    def product(self, x):
        return self.joint.product(x, self.index)


class Stack:
    """Stands for the weights of all layers, (layers, out, in)."""

    def __init__(self, matrices):
        self._matrices = matrices

    def unbind(self, dim):
        return self._matrices


def quantize_to_int8(model):
    """Replaces the weights of the GPT's products by such of 8 bits; it can then only be evaluated. Returns the model.

    Raises BadInput if this machine's PyTorch has no such products.
    """
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        raise BadInput("--quantize=int8 needs an x86 processor: leave it out")
    def replace(name, new):
        delattr(model, name)  # the parameter
        setattr(model, name, new)

    names = ("attn_q", "attn_k", "attn_v")
    joint = [JointMatrix(weights) for weights in zip(*(getattr(model, name).detach() for name in names), strict=True)]
    for index, name in enumerate(names):
        replace(name, Stack([matrix.parts[index] for matrix in joint]))
    for name in ("attn_o", "mlp_in", "mlp_out"):
        after_relu = name == "mlp_out"
        replace(name, Stack([Int8Matrix(weight, after_relu) for weight in getattr(model, name).detach()]))
    replace("lm_head", Int8Matrix(model.lm_head.detach()))
    return model


def is_quantized(model):
    """Returns whether quantize_to_int8 was called with this model."""
    return isinstance(model.lm_head, Int8Matrix)
