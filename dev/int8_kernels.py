"""Trains with what the int8 kernels of a TPU compute (kernels/pallas_int8.py), in eager PyTorch on a CPU:

    CHIP=v6e python3 -m dev.int8_kernels --device_type=cpu --products=int8 …    (base_train's flags)

CHIP: v6e (the MLP alone multiplies integers, and bfloat16 is rounded to the nearest) or v5e (all layers and the loss
do, and fp32 is rounded). Without CHIP it is base_train, whose products round their operands in passes of their own.
"""
import os
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F

from nanochat.common import BadInput, run_script
from nanochat.kernels import choose, int8, loss
from nanochat.kernels.int8 import Rows
from nanochat.kernels.pallas_int8 import NEAR_LARGEST, PART, SMALLEST, TURN, TURNS
from nanochat.model.layers import Products
from nanochat.train import language
from scripts import base_train

BLOCK = 2048  # tokens whose gradients of a weight have one scale for each column
CHIP = os.environ.get("CHIP")


def rounded(x):
    """The Rows of x (n, m), rounded to the nearest as the kernels do in the chip's arithmetic."""
    if CHIP == "v5e":
        return int8.rounded(x)
    reciprocal = (NEAR_LARGEST / x.abs().amax(1, keepdim=True).float().clamp_min(SMALLEST)).to(x.dtype)
    return Rows(torch.round(x * reciprocal).to(torch.int8), 1 / reciprocal.float())


def dithered_part(rows, number):
    """The Rows of a part of a matrix, fp32, whose chances begin TURN rows after those of the part before."""
    largest = rows.abs().amax(1, keepdim=True).clamp_min(SMALLEST)
    return int8.dithered_by_place(rows, largest, number % TURNS * TURN)


def dithered(x, part=PART):
    """The Rows of x (n, m), fp32, in parts of so many rows."""
    found = [dithered_part(rows, number) for number, rows in enumerate(x.split(part))]
    return Rows(*map(torch.cat, zip(*found, strict=True)))


def by_tokens(small, factor, integers, block=BLOCK):
    """The sum over the tokens of (small × factor)ᵀ · integers, (width of small, of the integers). factor: (tokens, 1);
    block: tokens that have one scale for each column of small."""
    total = 0
    blocks = zip((small.float() * factor).split(block), integers.split(block), strict=True)
    for number, (scaled, others) in enumerate(blocks):
        rows = dithered_part(scaled.t(), number)
        total = total + int8.product(rows.integers, others, 1, 0) * rows.scale
    return total


class MlpIn(torch.autograd.Function):

    @staticmethod
    def forward(ctx, x, weight):
        weight = int8.rounded_weight(weight)
        ctx.save_for_backward(x, *weight)
        return int8.linear(rounded(x.flatten(0, -2)), weight).to(x.dtype).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx, d):
        x, *weight = ctx.saved_tensors
        weight = Rows(*weight)
        rows = dithered(d.flatten(0, -2).float() * weight.scale[:, 0])
        d_x = int8.gradient_of_input(rows, weight).to(x.dtype).view_as(x)
        of_weight = by_tokens(x.flatten(0, -2), rows.scale, rows.integers).t() / weight.scale
        return d_x, of_weight.to(x.dtype)


class OfSquare(torch.autograd.Function):

    @staticmethod
    def forward(ctx, h, weight):
        squares = rounded(h.square().flatten(0, -2))
        weight = int8.rounded_weight(weight)
        ctx.save_for_backward(*squares, *weight)
        return int8.linear(squares, weight).to(h.dtype).unflatten(0, h.shape[:-1])

    @staticmethod
    def backward(ctx, d):
        integers, scale, *weight = ctx.saved_tensors
        weight = Rows(*weight)
        flat = d.flatten(0, -2)
        rows = dithered(flat.float() * weight.scale[:, 0])
        d_h = 2 * (integers.float() * scale).sqrt() * int8.gradient_of_input(rows, weight)
        return d_h.to(d.dtype).unflatten(0, d.shape[:-1]), by_tokens(flat, scale, integers).to(d.dtype)


def linear(x, weight):
    if weight.size(0) == 4 * weight.size(1):
        return MlpIn.apply(x, weight)
    return F.linear(x, weight) if CHIP == "v6e" else int8.Linear.apply(x, weight)


def kernels_of_chip(name, device_type, sharding, products):
    """As choose.get_kernels. Raises BadInput."""
    if CHIP not in ("v5e", "v6e") or device_type != "cpu" or products != "int8":
        raise BadInput(f"CHIP={CHIP} --device_type={device_type} --products={products}: CHIP is v5e or v6e, and needs "
                       "--device_type=cpu --products=int8")
    found = replace(choose.get_kernels(name, device_type, sharding, products=products),
                    products=Products(linear, OfSquare.apply))
    if CHIP == "v6e":
        found = replace(found, mean_loss=partial(loss.chunked_mean_loss, loss.CHUNK_TOKENS))
    return found


if CHIP:
    language.get_kernels = kernels_of_chip

if __name__ == "__main__":
    run_script(base_train.main)
