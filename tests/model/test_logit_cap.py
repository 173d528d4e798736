"""The cap of the logits. tests/kernels/test_loss.py checks the slopes that backward passes by hand take from it."""
import pytest
import torch

from nanochat.model.config import GPTConfig
from nanochat.model.logit_cap import LogitCap


@pytest.mark.parametrize("softcap", [0.0, 1.0, 15.0, 100.0, 1e4])
def test_exponentials_are_summed_without_a_maximum_where_fp32_holds_them(softcap):
    cap = LogitCap(softcap)
    sum_of_largest = torch.exp(cap(torch.tensor(1e6))) * 2**20
    assert cap.needs_maximum or sum_of_largest.isfinite()
    assert not LogitCap(15.0).needs_maximum


def test_the_formula_is_that_of_gemma():
    logits = 20 * torch.randn(50, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(LogitCap.of(GPTConfig(softcap=15.0))(logits), 15 * torch.tanh(logits / 15))
    assert LogitCap(0.0)(logits) is logits
