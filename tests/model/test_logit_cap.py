"""The cap of the logits: its formula, and what backward passes by hand take from it."""
import pytest
import torch

from nanochat.model.config import GPTConfig
from nanochat.model.logit_cap import LogitCap

SOFTCAPS = [0.0, 1.0, 15.0, 100.0, 1e4]


def some_logits():
    return 20 * torch.randn(50, 30, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("softcap", SOFTCAPS)
def test_the_slopes_are_those_of_autograd(softcap):
    cap = LogitCap(softcap)
    logits = some_logits().double().requires_grad_()
    capped = cap(logits)
    slope, = torch.autograd.grad(capped.sum(), logits)
    capped = capped.detach()
    one = torch.ones_like(slope)
    torch.testing.assert_close(cap.slope_at(capped) * one, slope)
    found_capped, found_slope = cap.with_slope(some_logits())
    torch.testing.assert_close(found_capped.double(), capped, atol=1e-6 * max(softcap, 1), rtol=1e-5)
    torch.testing.assert_close((found_slope * one).double(), slope, atol=1e-6, rtol=1e-5)
    assert (found_slope * one).min() >= 0


@pytest.mark.parametrize("softcap", SOFTCAPS)
def test_exponentials_are_summed_without_a_maximum_where_fp32_holds_them(softcap):
    cap = LogitCap(softcap)
    sum_of_largest = torch.exp(cap(torch.tensor(1e6))) * 2**20
    assert cap.needs_maximum or sum_of_largest.isfinite()
    assert not LogitCap(15.0).needs_maximum


def test_the_formula_is_that_of_gemma():
    logits = some_logits().double()
    torch.testing.assert_close(LogitCap.of(GPTConfig(softcap=15.0))(logits), 15 * torch.tanh(logits / 15))
    assert LogitCap(0.0)(logits) is logits
