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

from nanochat.common import run_script
from nanochat.kernels import choose, int8, loss
from nanochat.kernels.int8 import Rows
from nanochat.model.layers import Products
from nanochat.train import language
from scripts import base_train

PART, TURN, TURNS, BLOCK = 256, 8, 32, 2048  # as in pallas_int8.py
CHIP = os.environ.get("CHIP")


def rounded(x):
    """The Rows of x (n, m), rounded to the nearest as the kernels do in the chip's arithmetic."""
    if CHIP == "v5e":
        return int8.rounded(x)
    reciprocal = (126 / x.abs().amax(1, keepdim=True).float().clamp_min(1e-28)).to(x.dtype)
    return Rows(torch.round(x * reciprocal).to(torch.int8), 1 / reciprocal.float())


def dithered(x, part):
    """The Rows of x (n, m), fp32, whose parts of so many rows have chances that begin TURN rows apart."""
    found = [int8.dithered_by_place(rows, rows.abs().amax(1, keepdim=True).clamp_min(1e-28), number % TURNS * TURN)
             for number, rows in enumerate(x.split(part))]
    return Rows(*map(torch.cat, zip(*found, strict=True)))


def by_tokens(small, factor, integers):
    """The sum over the tokens of (small × factor)ᵀ · integers, with a scale for each column of a block of tokens."""
    total = 0
    for number, (rows, factors, others) in enumerate(zip(*(x.split(BLOCK) for x in (small, factor, integers)),
                                                         strict=True)):
        rows = (rows.float() * factors).t()
        rows = int8.dithered_by_place(rows, rows.abs().amax(1, keepdim=True).clamp_min(1e-28), number % TURNS * TURN)
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
        rows = dithered(d.flatten(0, -2).float() * weight.scale[:, 0], PART)
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
        rows = dithered(flat.float() * weight.scale[:, 0], PART)
        d_h = 2 * (integers.float() * scale).sqrt() * int8.gradient_of_input(rows, weight)
        return d_h.to(d.dtype).unflatten(0, d.shape[:-1]), by_tokens(flat, scale, integers).to(d.dtype)


def linear(x, weight):
    if weight.size(0) == 4 * weight.size(1):
        return MlpIn.apply(x, weight)
    return F.linear(x, weight) if CHIP == "v6e" else int8.Linear.apply(x, weight)


def kernels_of_chip(*arguments, **options):
    found = ORIGINAL(*arguments, **options)
    if options.get("products") == "int8":
        found = replace(found, products=Products(linear, OfSquare.apply))
        if CHIP == "v6e":
            found = replace(found, mean_loss=partial(loss.chunked_mean_loss, loss.CHUNK_TOKENS))
    return found


ORIGINAL = choose.get_kernels
if CHIP:
    language.get_kernels = kernels_of_chip

if __name__ == "__main__":
    run_script(base_train.main)
