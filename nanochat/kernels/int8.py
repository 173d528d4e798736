"""Matrix products of 8-bit integers, which a TPU multiplies twice as fast as bfloat16, and their gradients.

Each row of an operand is rounded to integers from -127 to 127, and has a scale that turns them back. The sums are
exact, in int32. A scale can leave the sum if it belongs to a row of the result. One that belongs to a term of the sum
multiplies the other operand before that is rounded. So weights, and the wide activations between the two products of
the MLP, are rounded once for all products with them.

The idea is SwitchBack's (arXiv 2304.13013) and Jetfire's (arXiv 2403.12422); dev/DECISIONS.md has what it costs and
gains.
"""
from typing import NamedTuple

import torch

LARGEST = 127
SMALLEST_SCALE = 1e-30  # of a row of zeros
DITHER = 8191.37  # times a number, it has a fraction that looks random and is the same in equal runs
# The fractions of their multiples are spread evenly over rows, over columns and over both: 1/r and 1/r² with r³ = r + 1
# (M. Roberts' sequence R2)
ROW_STEP = 0.7548777
COLUMN_STEP = 0.5698403


class Rows(NamedTuple):
    """Numbers in 8 bits."""
    integers: torch.Tensor  # int8 (…, n)
    scale: torch.Tensor  # fp32 (…, 1)

    def value(self):
        """Returns the numbers, fp32."""
        return self.integers.float() * self.scale

    def size(self, dim):
        return self.integers.size(dim)


def rounded(x, dim=-1):
    """Returns the Rows of x, each number rounded to the nearest. dim: of the numbers that share a scale."""
    scaled, scale = _scaled(x, dim)
    return Rows(torch.round(scaled).to(torch.int8), scale)


# Most gradients of a token, and of a channel, are far below the largest. Rounded to the nearest, they would be 0, and
# so would their sums over the tokens.
def dithered(x, dim=-1):
    """Returns the Rows of x. Each number is rounded up or down as if by chance, up with the probability that is its
    fraction. So sums of many numbers are about right. dim: as in rounded."""
    scaled, scale = _scaled(x, dim)
    return Rows(_up_or_down(scaled, scaled * DITHER), scale)


def dithered_by_place(x, largest, first_row=0):
    """Returns the Rows of x (n, m), dithered by the place of each number, because many of them may be equal. largest
    (n, 1): no absolute number of a row exceeds it, so it need not be found. first_row: where x begins in a larger
    matrix; in parts with the same places, errors would add up."""
    scale = largest / LARGEST
    rows, columns = (torch.arange(size, dtype=torch.int32, device=x.device) for size in x.shape)
    chance = _fraction(first_row + rows, ROW_STEP)[:, None] + _fraction(columns, COLUMN_STEP)
    return Rows(_up_or_down(x.float() / scale, chance), scale)


def _fraction(numbers, step):
    """Returns the fractions of numbers × step, fp32, from 0 on and below 1."""
    # In 24 bits of an integer; what overflows does not change them. In fp32, a product near 50,000 is a multiple of
    # 1 / 256, so any number below 1 / 256 would be rounded down in every place.
    return (numbers * round(step * 2**24)).bitwise_and(2**24 - 1).float() / 2**24


def _up_or_down(scaled, chance):
    return torch.floor(scaled + (chance - torch.floor(chance))).to(torch.int8)


def _scaled(x, dim):
    x = x.float()
    scale = (x.abs().amax(dim, keepdim=True) / LARGEST).clamp_min(SMALLEST_SCALE)
    return x / scale, scale


def rounded_weight(weight):
    """Returns the Rows of a weight (…, out, in). A row's scale is at least an eighth of the largest row's, because the
    row's gradient is divided by its scale: with a tiny scale, the rounding errors of the other rows would become a
    large gradient. The scales of a weight of zeros are 1, because some weights begin at 0."""
    weight = weight.float()
    scale = weight.abs().amax(-1, keepdim=True) / LARGEST
    largest = scale.amax(-2, keepdim=True)
    scale = torch.where(largest <= SMALLEST_SCALE, 1.0, torch.maximum(scale, largest / 8))  # NaN stays NaN
    return Rows(torch.round(weight / scale).to(torch.int8), scale)


@torch.no_grad()
def keep_rounded(weight):
    """Rounds a weight once for all micro-steps until it changes: `weight.rounded` are its Rows, in the same memory
    after every call."""
    rows = rounded_weight(weight)
    if not hasattr(weight, "rounded"):
        weight.rounded = rows
        return
    for kept, tensor in zip(weight.rounded, rows, strict=True):
        kept.copy_(tensor)


def linear(x, weight):
    """Returns x · weightᵀ, fp32 (…, out), of Rows (…, in) and (out, in)."""
    return product(x.integers, weight.integers, -1, 1) * x.scale * weight.scale[:, 0]


# The gradients of y = linear(x, w). d is that of y, (…, out).


def rounded_gradient(d, weight):
    """Returns the Rows of d times the scales of the weight's rows, for gradient_of_input and gradient_of_weight."""
    return dithered(d.float() * weight.scale[:, 0])


def gradient_of_input(d, weight):
    """Returns the gradient of x, fp32 (…, in), from Rows d."""
    return product(d.integers, weight.integers, -1, 0) * d.scale


def gradient_of_weight(d, x, weight):
    """Returns the gradient of the weight, fp32 (out, in), from Rows d and x, which is rounded here."""
    return sum_of_products(d, x) / weight.scale


def sum_of_products(d, x):
    """Returns the sum over the tokens of dᵀ · x, fp32 (out, in), of Rows d (…, out) and x (…, in), which is rounded
    here."""
    x = dithered((x.float() * d.scale).flatten(0, -2), 0)
    return product(d.integers.flatten(0, -2), x.integers, 0, 0) * x.scale


def gradient_by_rows(d, x):
    """Returns the gradient of the weight, fp32 (out, in), from d, which is rounded here, and Rows x."""
    d = (d.float() * x.scale).flatten(0, -2).t().to(d.dtype)
    if d.device.type == "xla":
        # Behind a barrier, d is transposed in memory once. Else the product transposes it for each of its tiles: the
        # micro-step of depth 16 took 67.0 ms on v5e, and takes 64.7.
        import torch_xla.core.xla_model as xm
        d = d.clone()
        xm.optimization_barrier_([d])
    d = dithered(d)
    return product(d.integers, x.integers.flatten(0, -2), 1, 0) * d.scale


def product(a, b, over_a, over_b):
    """Returns the sum over a dimension of each, fp32."""
    if a.device.type != "xla":
        # Exact up to 1,040 terms, whose sum has 24 bits; longer sums are rounded like any other in fp32.
        return torch.tensordot(a.float(), b.float(), ([over_a], [over_b]))
    import torch_xla
    dimensions = ([over_a % a.dim()], [over_b]), ([], [])
    return torch_xla._XLAC._xla_dot_general(a, b, dimensions, preferred_element_type=torch.int32).float()


# For autograd: the definition, with which the layer by hand is compared.


class Linear(torch.autograd.Function):
    """x · weightᵀ for x (…, in) and weight (out, in) of one dtype, which is that of the result."""

    @staticmethod
    def forward(ctx, x, weight):
        weight = rounded_weight(weight)
        ctx.save_for_backward(x, *weight)
        return linear(rounded(x), weight).to(x.dtype)

    @staticmethod
    def backward(ctx, d):
        x, *weight = ctx.saved_tensors
        weight = Rows(*weight)
        d = rounded_gradient(d, weight)
        return gradient_of_input(d, weight).to(x.dtype), gradient_of_weight(d, x, weight).to(x.dtype)


class LinearOfSquare(torch.autograd.Function):
    """h² · weightᵀ for h (…, in) ≥ 0 and weight (out, in) of one dtype, which is that of the result. h² is kept in 8
    bits alone."""

    @staticmethod
    def forward(ctx, h, weight):
        squares = rounded(h.float().square())
        weight = rounded_weight(weight)
        ctx.save_for_backward(*squares, *weight)
        return linear(squares, weight).to(h.dtype)

    @staticmethod
    def backward(ctx, d):
        integers, scale, *weight = ctx.saved_tensors
        squares = Rows(integers, scale)
        weight = Rows(*weight)
        d_squares = gradient_of_input(rounded_gradient(d, weight), weight)
        d_h = 2 * squares.value().sqrt() * d_squares
        return d_h.to(d.dtype), gradient_by_rows(d, squares).to(d.dtype)
