"""Attention on a CPU, against fp64, where rounding shows most. test_loss.py has the loss."""
import pytest
import torch

from nanochat.kernels import on_cpu, plain
from nanochat.model.layers import norm


def gradients(attention, q, k, v, d_out, window):
    inputs = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    return torch.autograd.grad(attention(*inputs, window), inputs, d_out)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("mean_of_values", [0.0, 5.0])
def test_gradients_in_bfloat16_are_as_exact_as_pytorchs(window, mean_of_values):
    generator = torch.Generator().manual_seed(0)
    q, k, v, d_out = (torch.randn(1, 2, 300, 128, generator=generator) for _ in range(4))
    inputs = [x.bfloat16() for x in (norm(q), norm(k), v + mean_of_values, d_out)]
    exact = gradients(plain.attention, *(x.double() for x in inputs), window)
    for ours, theirs, truth in zip(gradients(on_cpu.attention, *inputs, window),
                                   gradients(plain.attention, *inputs, window), exact, strict=True):
        assert (ours - truth).norm() < 1.5 * (theirs - truth).norm() + 0.004 * truth.norm()


def test_a_query_that_sees_one_key_moves_neither():
    generator = torch.Generator().manual_seed(0)
    q, k, v, d_out = (torch.randn(2, 1, 50, 16, generator=generator).bfloat16() for _ in range(4))
    d_q, d_k, d_v = gradients(on_cpu.attention, q, k, v, d_out, 1)
    assert not d_q.any() and not d_k.any() and torch.equal(d_v, d_out)
