"""Bits per byte against the formula."""
import math

import pytest
import torch

from nanochat.data.loader import DataLoader
from nanochat.data.shards import list_shards
from nanochat.data.tokenizer import load_tokenizer
from nanochat.device.ranks import Dist
from nanochat.model.layers import IGNORE_INDEX
from nanochat.train.loss_eval import bits_per_byte

CPU = Dist("cpu", torch.device("cpu"))


@pytest.fixture
def evaluate(corpus_dir, byte_tokenizer_dir):
    def run(model, num_rows, batch_size=3):
        tokenizer = load_tokenizer(byte_tokenizer_dir)
        with DataLoader(list_shards(corpus_dir / "val"), tokenizer, batch_size=batch_size, seq_len=32) as loader:
            return bits_per_byte(model, loader, num_rows, tokenizer.token_bytes(), CPU)

    return run


def test_three_bits_for_every_byte_are_three_bits_per_byte(evaluate):
    def model(ids, targets):
        return torch.where(targets == IGNORE_INDEX, 0.0, 3 * math.log(2))

    bpb, num_bytes = evaluate(model, num_rows=70)
    assert bpb == pytest.approx(3, rel=1e-6)
    assert 70 * 32 - 20 < num_bytes <= 70 * 32  # each token is a byte but BOS, which stands for none


def test_the_rows_are_the_same_for_every_batch_size(evaluate):
    def model(ids, targets):  # a loss that depends on each row
        return torch.where(targets == IGNORE_INDEX, 0.0, ids.float() / 100)

    assert evaluate(model, 64, batch_size=1) == pytest.approx(evaluate(model, 64, batch_size=7))
