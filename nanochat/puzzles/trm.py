"""The Tiny Recursive Model (arXiv 2510.04871): one small network, applied to its own answer again and again. A SwiGLU
mixes the positions, which the paper found better for Sudokus than attention.

State: an answer y and a latent z, both (B, positions, hidden). One cycle is n times z = f(z + y + x) and then
y = f(y + z), with the puzzle's embedding x. A supervision step runs T cycles, the last one with a gradient, and reads
an answer from y. Learned positions precede the puzzle's cells; the first one tells whether the answer is right.
"""
import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

from nanochat.model.layers import norm


@dataclass(frozen=True)
class TRMConfig:
    vocab_size: int
    cells: int
    hidden: int
    layers: int = 2
    recursions: int = 1  # n
    cycles: int = 1  # T
    prefix: int = 4  # learned positions before the cells

    @property
    def positions(self):
        """Positions of the state: prefix and cells, padded to a multiple of 8, the tile of the TPU's memory."""
        return -(-(self.prefix + self.cells) // 8) * 8

    @property
    def inner(self):
        """Inner width of the SwiGLU over `hidden`."""
        return self._inner_of(self.hidden)

    @property
    def inner_mix(self):
        """Inner width of the SwiGLU over the positions."""
        return self._inner_of(self.positions)

    def _inner_of(self, width):
        """Two thirds of four times the width, in multiples of 256, or of `hidden` if that is less."""
        multiple = min(256, self.hidden)
        return -(-width * 8 // (3 * multiple)) * multiple


class Block(NamedTuple):
    """The matrices of f. The model holds each of them as one stack over its layers, (layers, out, in)."""
    mix_in: torch.Tensor  # of the SwiGLU over the positions, (2 I', P)
    mix_out: torch.Tensor  # (P, I')
    mlp_in: torch.Tensor  # (2 I, C)
    mlp_out: torch.Tensor  # (C, I)


def swiglu(x, into, out):
    """SwiGLU (arXiv 2002.05202) over the last dimension of x."""
    gate, value = (F.linear(x, weight) for weight in into.chunk(2))
    return F.linear(F.silu(gate) * value, out)


class TRM(nn.Module):
    training_dtype = torch.float32  # of the weights; activations and products have compute_dtype

    def __init__(self, config, compute_dtype=torch.float32):
        super().__init__()
        self.config = config
        self.compute_dtype = compute_dtype
        hidden = config.hidden
        layers = config.layers

        def parameter(*shape):
            return nn.Parameter(torch.empty(*shape, dtype=torch.float32))

        self.embedding = parameter(config.vocab_size, hidden)
        self.prefix = parameter(config.positions - config.cells, hidden)
        self.mix_in = parameter(layers, 2 * config.inner_mix, config.positions)
        self.mix_out = parameter(layers, config.positions, config.inner_mix)
        self.mlp_in = parameter(layers, 2 * config.inner, hidden)
        self.mlp_out = parameter(layers, hidden, config.inner)
        self.head = parameter(config.vocab_size, hidden)
        self.halt = parameter(hidden)
        self.halt_bias = parameter(1)
        self.register_buffer("start", torch.empty(2, hidden))  # of y and of z; not trained

    @torch.no_grad()
    def init_weights(self, seed=0):
        """Draws the weights with a CPU generator: every rank gets the same ones from a seed."""
        generator = torch.Generator().manual_seed(seed)
        for matrix in (self.mix_in, self.mlp_in):
            nn.init.trunc_normal_(matrix, std=matrix.size(-1) ** -0.5, a=-2, b=2, generator=generator)
        # Every part begins as the identity. With random matrices a small model forgets the puzzle: its loss stays at
        # ln 4, that of guessing.
        for matrix in (self.mix_out, self.mlp_out):
            matrix.zero_()
        for table in (self.embedding, self.head):
            nn.init.trunc_normal_(table, std=self.config.hidden ** -0.5, a=-2, b=2, generator=generator)
        nn.init.trunc_normal_(self.start, std=1.0, a=-2, b=2, generator=generator)
        self.prefix.zero_()
        self.halt.zero_()
        self.halt_bias.fill_(-5.0)  # at first no answer seems right
        return self

    def create_main_grads(self):
        """Gives every weight `main_grad`, to which autograd adds."""
        for p in self.parameters():
            p.main_grad = p.grad = torch.zeros_like(p, dtype=torch.float32)

    def after_update(self):
        """Does nothing: nothing is computed from the weights once a step."""

    def starts(self, rows):
        """Returns y and z at the beginning of an episode, (rows, P, C) each."""
        return (start.to(self.compute_dtype).expand(rows, self.config.positions, -1) for start in self.start)

    def forward(self, puzzle, y, z):
        """One supervision step on puzzle (B, cells). Returns y, z, the logits of the cells, fp32 (B, cells, V), and the
        logit that they are all right, fp32 (B,)."""
        config = self.config
        # By a product, because the backward pass of a gather would scatter.
        given = F.one_hot(puzzle.long(), config.vocab_size).to(self.compute_dtype)
        cells = given @ self.embedding.to(self.compute_dtype)
        prefix = self.prefix.to(self.compute_dtype).expand(len(puzzle), -1, -1)
        # (B, P, C). The tables' rows have a standard deviation of hidden^-½, so that of x is about 1, as that of the
        # start vectors.
        x = torch.cat([prefix, cells], 1) * config.hidden ** 0.5
        with torch.no_grad():
            for _ in range(config.cycles - 1):
                y, z = self._cycle(x, y, z)
        y, z = self._cycle(x, y, z)
        # The cells are the last positions: (B, cells, C). Position 0 has the logit that they are all right.
        answer = y[:, config.positions - config.cells:]
        logits = F.linear(answer, self.head.to(answer.dtype)).float()
        return y, z.detach(), logits, y[:, 0].float() @ self.halt + self.halt_bias

    def _cycle(self, x, y, z):
        for _ in range(self.config.recursions):
            z = self._network(z + y + x)
        return self._network(y + z), z

    def _network(self, x):
        """f: the layers, one after the other."""
        for weights in zip(*(getattr(self, name).to(x.dtype).unbind(0) for name in Block._fields), strict=True):
            x = self._layer(x, Block(*weights))
        return x

    def _layer(self, x, w):
        """Returns x (B, P, C) after a layer with the matrices of a Block. Each part is added, then normalised, without
        gains and biases."""
        x = norm(x + swiglu(x.mT, w.mix_in, w.mix_out).mT)
        return norm(x + swiglu(x, w.mlp_in, w.mlp_out))


@functools.cache
def parameters_by_group(config):
    """Returns {group: number of parameters}."""
    with torch.device("meta"):
        sizes = {name: p.numel() for name, p in TRM(config).named_parameters()}
    matrices = sum(sizes[name] for name in Block._fields)
    return {"matrices": matrices, "others": sum(sizes.values()) - matrices}


def flops_per_puzzle(config):
    """Returns the useful FLOPs of one supervision step on one puzzle. f takes 2 per matrix parameter and position, in
    the mixer over positions 2 per parameter and feature. The last cycle takes three times as many, for its gradient."""
    matrices = parameters_by_group(config)["matrices"]
    mix = 3 * config.inner_mix * config.positions * config.layers
    once = 2 * config.positions * (matrices - mix) + 2 * config.hidden * mix
    return once * (config.recursions + 1) * (config.cycles - 1 + 3)
