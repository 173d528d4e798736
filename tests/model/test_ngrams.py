"""--ngram_rows. tests/model/test_gpt.py compares their gradients on every kernel, and their cached generation."""
import pytest
import torch

from nanochat.common import BadInput
from nanochat.infer.quantize import Int8GPT
from nanochat.infer.readers import Reader
from nanochat.model.config import GPTConfig
from nanochat.model.gpt import GPT
from nanochat.model.ngrams import rows_of
from nanochat.model.optim import adagrad
from tests.model.test_gpt import TINY, build, some_ids

WITH = GPTConfig(**{**TINY, "ngram_rows": 1024})


def test_a_position_adds_the_rows_of_its_pair_and_its_triple():
    model, ids = build(WITH), some_ids(WITH, batch=1)
    pairs, triples = rows_of(ids, 1024)[0].view(2, -1)
    for rows, length in ((pairs, 2), (triples, 3)):
        before = model(ids)
        with torch.no_grad():
            model.ngram_table[rows[6]] += 1
        changed = (model(ids) != before)[0].any(-1)
        assert not changed[:6].any() and changed[6]
        other = ids.clone()
        other[0, 6 - length] += 1  # one position too early to matter
        assert rows_of(other, 1024)[0].view(2, -1)[length - 2, 6] == rows[6]
        other[0, 7 - length] += 1
        assert rows_of(other, 1024)[0].view(2, -1)[length - 2, 6] != rows[6]


def test_ngrams_spread_evenly_over_the_rows():
    first, second = torch.meshgrid(torch.arange(300), torch.arange(300), indexing="ij")
    rows = rows_of(torch.stack([first.flatten(), second.flatten()], dim=1), 2**16)[:, 1]
    assert rows.min() >= 0 and rows.max() < 2**16
    assert len(rows.unique()) == pytest.approx(2**16 * (1 - (1 - 2**-16) ** 90_000), rel=0.01)  # as random numbers


def test_a_new_model_is_the_one_without_them():
    ids = some_ids(WITH)
    new, plain = (GPT(config, build(WITH).kernels).init_weights(seed=1) for config in (WITH, GPTConfig(**TINY)))
    assert torch.equal(new(ids), plain(ids))


@pytest.mark.parametrize("make", [lambda model: model, Int8GPT])
def test_a_text_that_is_read_in_parts_has_the_same_logits(make):
    model, ids = make(build(WITH)), some_ids(WITH, batch=1)
    whole = Reader(model, torch.device("cpu")).read(ids[0].tolist(), num_last=12)
    torch.testing.assert_close(whole, model(ids)[0], atol=0.1, rtol=0)  # weights of 8 bits have a cache of 16
    reader = Reader(model, torch.device("cpu"))
    parts = [reader.read(ids[0, :end].tolist())[0] for end in (5, 6, 12)]
    reader.prefill(ids[0, :7].tolist(), 2, lambda: True)
    parts.append(reader.decode([int(ids[0, 7])] * 2)[1])
    torch.testing.assert_close(torch.stack(parts), whole[[4, 5, 11, 7]], atol=1e-5, rtol=1e-5)


def test_weights_of_8_bits_have_them_too():
    model, ids = build(WITH), some_ids(WITH)
    exact, rounded = model(ids), Int8GPT(model)(ids)
    model.ngram_table.data.zero_()
    assert (rounded - exact).abs().mean() < 0.3 * (model(ids) - exact).abs().mean()


def test_only_rows_with_a_gradient_change_and_the_more_often_the_less():
    table, squares = torch.zeros(3, 4), torch.zeros(3, 1)
    gradient = torch.tensor([[2.0, 2.0, 2.0, 2.0], [0, 0, 0, 0], [1.0, -1.0, 1.0, -1.0]])
    moved = []
    for _ in range(4):
        before = table
        table, squares = adagrad(table, squares, gradient, lr=0.1)
        moved.append(before - table)
    assert not table[1].any()
    torch.testing.assert_close(moved[0], 0.1 * gradient.sign())  # however large the gradient
    torch.testing.assert_close(moved[3], moved[0] / 2)  # 1 / the root of the fourth time


def test_rows_are_a_power_of_two():
    with pytest.raises(BadInput, match="--ngram_rows=1000 is no power of two.*1024"):
        GPTConfig(**{**TINY, "ngram_rows": 1000})
