"""The matrix products of the layer by hand (gpt_layer.py), in the dtype of the activations or in 8 bits (--products).

Plain and Int8 have the same methods. An *operand* is what a product reads: a tensor, or its int8.Rows.
"""
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

import torch
import torch.nn.functional as F

from nanochat.device.xla_ops import put, take
from nanochat.kernels import int8
from nanochat.kernels.int8 import Rows
from nanochat.model.layers import gated

MATRICES = ("attn_q", "attn_k", "attn_v", "attn_o", "mlp_in", "mlp_out")  # the weights that the layer multiplies with


@dataclass(frozen=True)
class Plain:
    """Products of tensors in the dtype of the activations."""

    def operand(self, x):
        return x

    def value(self, operand):
        """Returns the tensor of an operand."""
        return operand

    # Weights: a loop over the layers reads a slice of each stack.

    def to_read(self, name, stack):
        """Returns the tensors to read of a stack of weights, a list."""
        return [stack]

    def read(self, tensors, name, dtype, gather):
        """Returns the operand of the weight `name`, from the next tensors of an iterator over slices. gather(part,
        name): the whole weight of a rank's part."""
        return gather(next(tensors).to(dtype), name)

    # Products. These two are PyTorch's own functions, so that the preflight names them by the layer's line.

    linear = staticmethod(F.linear)  # linear(x, weight): x · weightᵀ (…, out) of operands
    of_input = staticmethod(torch.matmul)  # of_input(d, weight): the gradient of x; see `gradient`

    # The hidden units h of the MLP are multiplied as their squares.

    def put_hidden(self, saved, index, x, scale, weight):
        """Writes h = relu(scale × linear(x, weight)), for a tensor x, to the slot `index`, as `squares` and
        `gradient_of_hidden` read it."""
        h = F.relu(scale * self.linear(x, weight)).to(x.dtype)
        self.put(saved, "h", index, h, use_from_memory=True)

    def squares(self, hidden):
        """Returns the operand h²."""
        return hidden.square()

    # The gradients of linear(x, weight). d is that of its result, (…, out).

    def gradient(self, d, weight):
        """Returns the operand of d for of_input and of_weight."""
        return d

    def of_weight(self, d, x, weight):
        """Returns the gradient of the weight. x: a tensor."""
        return of_weight(d, x)

    def of_several(self, gradients, x, weights):
        """Returns the gradient of x, {name: gradient} of the weights, and that of x through the first product alone if
        it is known, for several products with the tensor x. gradients: {name of the weight: d}; weights: a named
        tuple."""
        products = [d @ getattr(weights, name) for name, d in gradients.items()]
        of_weights = {name: of_weight(d, x) for name, d in gradients.items()}
        return reduce(torch.add, products), of_weights, products[0]

    def gradient_of_hidden(self, d, weights, hidden, scale, gate, matmul):
        """Returns the operand, for products with mlp_in, of the gradient of h times `scale`, from d, the gradient of
        the MLP's output. gate: of this output; matmul(d, weight): of_input, if operands are tensors."""
        # In an order of the compiler's choice, v6e would copy this product and h into another order, and back.
        of_squares = matmul(d, weights.mlp_out)
        return (2 * scale * hidden * gated(gate, of_squares)).to(d.dtype)

    def of_weight_with(self, x, gate, d):
        """Returns the gradient of the weight in gate × linear(x, weight), for an operand x and a tensor d."""
        return of_weight(d, gated(gate, x))

    # What the forward pass keeps of an operand: stacks, in the dict `saved`.

    def new_stack(self, name, x, shape, dtype):
        """Returns an empty stack (slots, B, T, width) on the device of x. dtype: None for that of x."""
        return x.new_zeros(shape, dtype=dtype)

    def stacks_of(self, name):
        """Returns {name of a stack: its dtype, or None for that of the activations} of the operand `name`."""
        return {name: None}

    def put(self, saved, name, index, operand, use_from_memory=False):
        """Writes an operand to the slot `index` of its stacks."""
        saved[name] = put(saved[name], index, operand, use_from_memory)

    def take(self, saved, name, index):
        """Returns the operand in the slot `index`."""
        return take(saved[name], index)


class Kept(NamedTuple):
    """Rows in a slot of a stack."""
    stack: torch.Tensor  # int8 (slots, B, T, width)
    index: torch.Tensor  # int32 ()
    scale: torch.Tensor  # fp32 (B, T, 1)

    @property
    def integers(self):
        return take(self.stack, self.index)


@dataclass(frozen=True)
class MlpKernels:
    """Functions that round and multiply at once, see pallas_int8.py. Stacks are (slots, B, T, width)."""
    # fits(tokens, width) -> whether they take so many tokens, and stacks of this width.
    fits: Callable
    # new_stack(x, shape) -> a stack on the device of x, int8, whose numbers may be any.
    new_stack: Callable
    # hidden(index, x, weight, stack) -> the stack with the integers of relu(linear(x, weight))² at its index, and their
    # scales (B, T). weight: Rows.
    hidden: Callable
    # d_hidden(index, d, mlp_out, mlp_in, stack) -> Int8.gradient_of_hidden without the factors of tokens, int8, and its
    # scales (B, T).
    d_hidden: Callable
    # by_tokens(index, small, factor, stack) -> the sum over the tokens of (small × factor)ᵀ · the integers, in small's
    # dtype. factor: fp32 (B, T).
    by_tokens: Callable


@dataclass(frozen=True)
class Int8:
    """Products of integers of 8 bits, see int8.py. Tensors are rounded to operands, and results are fp32."""
    kernels: MlpKernels | None = None  # for the MLP, if their sizes fit

    operand = staticmethod(int8.rounded)
    linear = staticmethod(int8.linear)
    gradient = staticmethod(int8.rounded_gradient)
    of_input = staticmethod(int8.gradient_of_input)

    def value(self, operand):
        return operand.value()

    def to_read(self, name, stack):
        return stack.rounded if name in MATRICES else [stack]

    def read(self, tensors, name, dtype, gather):
        if name not in MATRICES:
            return gather(next(tensors).to(dtype), name)
        return Rows(gather(next(tensors), name), gather(next(tensors), name))

    def put_hidden(self, saved, index, x, scale, weight):
        stack = saved["h"]
        if not self._has_kernels(stack.shape):
            h = F.relu(scale * self.linear(self.operand(x), weight)).to(x.dtype)
            self.put(saved, "h", index, int8.rounded(h.float().square()), use_from_memory=True)
            return
        saved["h"], of_squares = self.kernels.hidden(index, x, weight, stack)
        saved["h_scale"] = put(saved["h_scale"], index, of_squares * scale[..., 0].square())

    def _has_kernels(self, shape):
        """shape: of a stack, (slots, B, T, width)."""
        return self.kernels is not None and self.kernels.fits(math.prod(shape[1:-1]), shape[-1])

    def squares(self, hidden):
        return hidden

    def of_weight(self, d, x, weight):
        if not self._has_kernels(d.integers[None].shape):
            return int8.gradient_of_weight(d, x, weight)
        first = torch.zeros((), dtype=torch.int32, device=x.device)
        return self.kernels.by_tokens(first, x, d.scale[..., 0], d.integers[None]).t() / weight.scale

    def of_several(self, gradients, x, weights):
        # As one product with all rows of the weights: a sum of several would go through memory.
        matrices = [getattr(weights, name) for name in gradients]
        whole = Rows(*map(torch.cat, zip(*matrices, strict=True)))
        d = int8.rounded_gradient(torch.cat(list(gradients.values()), -1), whole)
        widths = [d.size(-1) for d in gradients.values()]
        of_weights = []
        for integers, weight in zip(d.integers.split(widths, -1), matrices, strict=True):
            of_weights.append(int8.gradient_of_weight(Rows(integers, d.scale), x, weight))
        return int8.gradient_of_input(d, whole), dict(zip(gradients, of_weights, strict=True)), None

    def gradient_of_hidden(self, d, weights, hidden, scale, gate, matmul):
        if isinstance(hidden, Kept):
            found, found_scale = self.kernels.d_hidden(hidden.index, d, weights.mlp_out, weights.mlp_in, hidden.stack)
            return Rows(found, found_scale[..., None] * gated(gate, 2 * scale * hidden.scale.sqrt()))
        d_operand = int8.rounded_gradient(d, weights.mlp_out)
        of_squares = int8.product(d_operand.integers, weights.mlp_out.integers, -1, 0)
        # The root of the rounded square is h: a rounded h, too, would have to be read and written. A token's factors
        # multiply the scale that is found for its row, instead of each number.
        found = int8.rounded_gradient((hidden.integers.float().sqrt() * of_squares).to(d.dtype), weights.mlp_in)
        factor = 2 * scale * d_operand.scale * hidden.scale.sqrt()
        return Rows(found.integers, found.scale * gated(gate, factor))

    def of_weight_with(self, x, gate, d):
        if isinstance(x, Kept):
            return self.kernels.by_tokens(x.index, d, gated(gate, x.scale)[..., 0], x.stack)
        return int8.gradient_by_rows(gated(gate, d), x)

    def stacks_of(self, name):
        return {name: torch.int8, f"{name}_scale": torch.float32}

    def new_stack(self, name, x, shape, dtype):
        if name == "h" and self._has_kernels(shape):
            return self.kernels.new_stack(x, shape)
        return x.new_zeros(shape, dtype=dtype)

    def put(self, saved, name, index, operand, use_from_memory=False):
        saved[name] = put(saved[name], index, operand.integers, use_from_memory)
        saved[f"{name}_scale"] = put(saved[f"{name}_scale"], index, operand.scale[..., 0])

    def take(self, saved, name, index):
        scale = take(saved[f"{name}_scale"], index)[..., None]
        if name == "h" and self._has_kernels(saved[name].shape):
            return Kept(saved[name], index, scale)
        return Rows(take(saved[name], index), scale)


@dataclass(frozen=True)
class Halves:
    """The products of a layer's two halves."""
    attention: Plain | Int8 = Plain()
    mlp: Plain | Int8 = Plain()

    def of(self, name):
        """Returns the products with the weight `name`."""
        return self.mlp if name.startswith("mlp") else self.attention

    @property
    def are_rounded(self):
        return self != Halves()

    def round_weights(self, model):
        """See layers.Kernels."""
        for name in MATRICES:
            if self.of(name) != Plain():
                int8.keep_rounded(getattr(model, name))


def of_weight(d, x):
    """Returns the gradient (out, in) of a weight, from that of its product, (B, T, out), and its input, (B, T, in)."""
    return d.flatten(0, -2).t() @ x.flatten(0, -2)
