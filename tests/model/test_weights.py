"""The FLOPs that MFU counts, compared with independent counts."""
import pytest

from nanochat.model.config import GPTConfig
from nanochat.model.weights import flops_per_token, mfu
from tests.model.test_gpt import PLAIN


@pytest.mark.parametrize("pattern, n_kv_head", [("L", 4), ("SSL", 4), ("S", 1)])
def test_flops_agree_with_a_count_of_every_product_and_every_position_looked_at(pattern, n_kv_head):
    T = 16
    config = GPTConfig(vocab_size=96, max_seq_len=T, n_layer=4, n_embd=64, n_head=4, n_kv_head=n_kv_head,
                       **{**PLAIN, "window_pattern": pattern, "short_window": 8 if "S" in pattern else None})
    kv_width = n_kv_head * 16
    forward = 2 * 64 * 96 * T
    for window in config.windows():
        forward += 2 * 64 * (64 + kv_width + kv_width + 64 + 4 * 64 + 4 * 64) * T
        for query in range(T):
            for key in range(T):
                if key <= query and (window is None or query - key < window):
                    forward += 2 * (2 * 64)  # q·k and the weighting of v, all heads
    assert flops_per_token(config, T) * T == pytest.approx(3 * forward)


def test_mfu_of_a_chip_that_does_its_peak_is_one_and_of_an_unknown_chip_is_unknown():
    assert mfu(8 * 197e12 / 1e9, 1e9, 197e12, 8) == pytest.approx(1.0)
    assert mfu(1e5, 1e9, None, 8) is None
