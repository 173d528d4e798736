"""The kernels of 8-bit products, run as plain XLA operations on the CPU, against int8.py and against fp64."""
from functools import partial

import jax
import numpy as np
import pytest
import torch

from dev import int8_kernels
from dev.int8_kernels import by_tokens, dithered
from nanochat.kernels import int8, pallas_int8
from nanochat.kernels.int8 import Rows
from nanochat.kernels.pallas_int8 import PART
from tests.kernels.test_int8 import normal

TOKENS, WIDTH, HIDDEN = 3 * PART, 128, 256


def by_pallas(function, *arrays, **options):
    """Returns the tensors of a kernel on the second layer of two."""
    function = partial(function, interpret=True, **options)
    found = jax.jit(function)(np.asarray([1], "int32"), *(jax.numpy.asarray(np.asarray(x)) for x in arrays))
    return [torch.from_numpy(np.array(x)) for x in (found if isinstance(found, (list, tuple)) else [found])]


def stacked(integers):
    return torch.stack([torch.full_like(integers, 99), integers])


def assert_nearly_equal(integers, expected):
    """A number whose last bits differ may be rounded to the next integer."""
    steps = (integers.int() - expected.int()).abs()
    assert steps.max() <= 1 and steps.float().mean() < 1e-3


@pytest.fixture(name="mlp")
def _mlp():
    """x, gradients of the MLP's output, which differ between tokens, and the Rows of mlp_in and mlp_out."""
    d = normal(TOKENS, WIDTH, seed=1) * torch.logspace(-3, 0, TOKENS)[:, None]
    return (normal(TOKENS, WIDTH), d, int8.rounded_weight(normal(HIDDEN, WIDTH, seed=2)),
            int8.rounded_weight(normal(WIDTH, HIDDEN, seed=3)))


def hidden(x, mlp_in, arithmetic):
    """Returns the kernel's Rows of h²."""
    stack, scale = by_pallas(pallas_int8.hidden, x, mlp_in.integers.t(), mlp_in.scale.t(),
                             torch.full((2, TOKENS, HIDDEN), 99, dtype=torch.int8), arithmetic=arithmetic)
    assert (stack[0] == 99).all()
    return Rows(stack[1], scale.t())


def d_hidden(d, mlp_out, mlp_in, squares, arithmetic):
    """Returns the kernel's Rows of the gradient of h, times the rows' scales of mlp_in."""
    found, scale = by_pallas(pallas_int8.d_hidden, d, mlp_out.scale.t(), mlp_out.integers, mlp_in.scale.t(),
                             stacked(squares.integers), arithmetic=arithmetic)
    return Rows(found, scale.t() * 2 * squares.scale.sqrt())


def test_in_fp32_the_hidden_units_are_those_of_the_definition(mlp):
    x, _, mlp_in, _ = mlp
    found = hidden(x, mlp_in, "float32")
    expected = int8.rounded(int8.linear(int8.rounded(x), mlp_in).relu().square())
    assert_nearly_equal(found.integers, expected.integers)
    assert torch.allclose(found.scale, expected.scale, rtol=1e-2)


def test_in_fp32_their_gradient_is_that_of_the_definition_to_the_dither(mlp):
    x, d, mlp_in, mlp_out = mlp
    squares = int8.rounded(int8.linear(int8.rounded(x), mlp_in).relu().square())
    found = d_hidden(d, mlp_out, mlp_in, squares, "float32")
    d = dithered(d * mlp_out.scale[:, 0])
    of_squares = int8.product(d.integers, mlp_out.integers, -1, 0)
    expected = dithered(of_squares * squares.integers.float().sqrt() * mlp_in.scale[:, 0])
    assert_nearly_equal(found.integers, expected.integers)
    assert torch.allclose(found.scale, expected.scale * d.scale * 2 * squares.scale.sqrt(), rtol=1e-2)


@pytest.mark.parametrize("tokens", [TOKENS, 4 * PART])  # three blocks of tokens, and one
def test_the_sum_over_tokens_is_that_of_the_definition(tokens):
    small = normal(tokens, WIDTH)
    factor = torch.rand(tokens, generator=torch.Generator().manual_seed(1))
    large = int8.rounded(normal(tokens, HIDDEN, seed=2)).integers
    found, = by_pallas(pallas_int8.by_tokens, small, factor[None], stacked(large))
    expected = by_tokens(small, factor[:, None], large, block=PART if tokens == TOKENS else tokens)
    assert (found - expected).norm() < 1e-3 * expected.norm()


def test_in_bfloat16_gradients_are_near_those_in_fp64(mlp):
    x, d, mlp_in, mlp_out = mlp
    squares = hidden(x, mlp_in, "bfloat16")
    h = (x.double() @ mlp_in.value().double().t()).relu()
    d_h = d.double() @ mlp_out.value().double() * 2 * h
    assert (squares.value() - h.square()).norm() < 0.03 * h.square().norm()
    found = d_hidden(d, mlp_out, mlp_in, squares, "bfloat16")
    assert (found.value() / mlp_in.scale[:, 0] - d_h).norm() < 0.06 * d_h.norm()
    of_mlp_out, = by_pallas(pallas_int8.by_tokens, d, squares.scale.t(), stacked(squares.integers))
    expected = d.double().t() @ h.square()
    assert (of_mlp_out - expected).norm() < 0.06 * expected.norm()
    of_mlp_in, = by_pallas(pallas_int8.by_tokens, x, found.scale.t(), stacked(found.integers))
    expected = d_h.t() @ x.double()
    assert (of_mlp_in.t() / mlp_in.scale - expected).norm() < 0.06 * expected.norm()


def test_the_script_that_trains_without_a_tpu_rounds_h_nearly_as_the_kernel_does(monkeypatch, mlp):
    """It rounds h with the scales of the tokens, the kernel without."""
    monkeypatch.setattr(int8_kernels, "CHIP", "v6e")
    x, _, mlp_in, _ = mlp
    h = int8.linear(int8_kernels.rounded(x.bfloat16()), mlp_in).bfloat16().relu()
    expected = hidden(x, mlp_in, "bfloat16").value()
    assert (int8_kernels.rounded(h.square()).value() - expected).norm() < 0.02 * expected.norm()


def test_small_gradients_beside_a_large_one_keep_their_sum():
    """Rounded to the nearest, all of them would be 0."""
    small = 5e-4 * torch.rand(4 * PART, WIDTH, generator=torch.Generator().manual_seed(0))
    small[0] = 1
    small[:, WIDTH // 2:] *= -1
    ones = torch.ones(4 * PART, HIDDEN, dtype=torch.int8)
    found, = by_pallas(pallas_int8.by_tokens, small, torch.ones(1, 4 * PART), stacked(ones))
    for columns, expected in zip(found.chunk(2), small.sum(0).chunk(2), strict=True):  # of both signs
        assert columns.mean().item() == pytest.approx(expected.mean().item(), rel=0.01)


def test_rows_of_zeros_stay_zeros(mlp):
    _, _, mlp_in, mlp_out = mlp
    for arithmetic in ("float32", "bfloat16"):
        squares = hidden(torch.zeros(TOKENS, WIDTH), mlp_in, arithmetic)
        found = d_hidden(torch.zeros(TOKENS, WIDTH), mlp_out, mlp_in, squares, arithmetic)
        assert not squares.value().any() and not found.value().any()
