"""Bits per byte against the formula, and views of rows in which only middles count."""
import math
from functools import partial
from unittest.mock import MagicMock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from nanochat.data import loader
from nanochat.data.lanes import PADDING
from nanochat.data.loader import Batch, DataLoader, RankRows
from nanochat.data.shards import list_shards, open_shards
from nanochat.data.tokenizer import FIM_TOKENS, Infill, load_tokenizer
from nanochat.device.ranks import Dist
from nanochat.infer.loss_eval import bits_per_byte, with_suffixes, without_suffixes
from nanochat.model.layers import IGNORE_INDEX
from tests.data.hub import hub_tokenizer, llama3, qwen, smollm2

CPU = Dist("cpu", torch.device("cpu"))


@pytest.fixture
def evaluate(corpus_dir, byte_tokenizer_dir):
    def run(model, num_rows, batch_size=3):
        tokenizer = load_tokenizer(byte_tokenizer_dir)
        shards = open_shards(list_shards(corpus_dir / "val"))
        with DataLoader(shards, tokenizer, RankRows(batch_size, seq_len=32, num_lanes=2), num_rows=num_rows) as rows:
            return bits_per_byte(model, rows, tokenizer.token_bytes(), CPU)

    return run


def test_three_bits_for_every_byte_are_three_bits_per_byte(evaluate):
    def model(ids, targets):
        return torch.where(targets == IGNORE_INDEX, 0.0, 3 * math.log(2))

    found = evaluate(model, num_rows=70)
    assert found.bits_per_byte == pytest.approx(3, rel=1e-6) and not found.is_whole_text
    assert 70 * 32 - 20 < found.num_bytes <= 70 * 32  # each token is a byte but BOS, which stands for none


@pytest.mark.parametrize("make, line", [
    (qwen, "// cafe\u0301\n"),  # 10 bytes, and 9 in NFC
    (qwen, "// \u0958\n"),  # 7 bytes, and 10 in NFC
    (smollm2, "// \x02\x04\n"),  # bytes without a token
    pytest.param(llama3, "// cafe\u0301\n", marks=pytest.mark.slow),
])
@pytest.mark.parametrize("seq_len", [8, pytest.param(32, marks=pytest.mark.slow)])
def test_bytes_are_those_of_the_files_where_a_tokenizer_changes_text(tmp_path, make, line, seq_len):
    text = 50 * line
    pq.write_table(pa.table({"text": [text]}), tmp_path / "shard_00000.parquet")
    tokenizer = hub_tokenizer(make)
    seen = []

    def model(ids, targets):
        seen.append(ids)
        return torch.zeros(targets.shape)

    with DataLoader(open_shards(list_shards(tmp_path)), tokenizer, RankRows(1, seq_len), num_rows=400) as rows:
        found = bits_per_byte(model, rows, tokenizer.token_bytes(), CPU)
    assert found.num_bytes == len(text.encode()) and found.is_whole_text
    assert {*torch.cat(seen).unique().tolist()} <= {0, tokenizer.bos_id, *tokenizer.encode(text)}


def test_bytes_of_middles_are_those_of_the_files_too():
    tokenizer = hub_tokenizer(qwen)
    infill = Infill("int a;\n", "}\n", "// cafe\u0301\n")
    [(tokens, _, _)] = tokenizer.with_lost_bytes().encode_infills([infill])
    loader = MagicMock(unfinished_lanes=(), problem=None)
    loader.__iter__.return_value = [Batch(np.array([tokens]).astype(np.int32), {}, {})]
    found = bits_per_byte(lambda ids, targets: torch.zeros(targets.shape), loader, tokenizer.token_bytes(), CPU,
                          view=partial(with_suffixes, tokenizer))
    assert found.num_bytes == len(infill.middle.encode())


def test_the_text_counts_once_and_is_whole_only_if_every_lane_has_come_to_its_end(evaluate, corpus_dir, monkeypatch):
    def model(ids, targets):
        return torch.zeros(targets.shape)

    whole, texts = evaluate(model, 8000), pq.read_table(corpus_dir / "val").column("text").to_pylist()
    assert 0.9 < whole.num_bytes / sum(len(text.encode()) for text in texts) <= 1 and whole.is_whole_text
    monkeypatch.setattr(loader, "SMALL_BYTES", 0)  # else so little text is read by one lane for all ranks
    found = {num_rows: evaluate(model, num_rows) for num_rows in (512, 4096, 8000, 12000, 16000)}
    size = found[16000].num_bytes
    assert [each.is_whole_text for each in found.values()] == [each.num_bytes == size for each in found.values()]
    assert any(not each.is_whole_text and each.num_bytes < num_rows * 31
               for num_rows, each in found.items()), "no lane ended early"


def test_the_rows_are_the_same_for_every_batch_size(evaluate):
    def model(ids, targets):  # a loss that depends on each row
        return torch.where(targets == IGNORE_INDEX, 0.0, ids.float() / 100)

    one, seven = evaluate(model, 64, batch_size=1), evaluate(model, 64, batch_size=7)
    assert one.bits_per_byte == pytest.approx(seven.bits_per_byte) and one.num_bytes == seven.num_bytes


def test_views_of_rows_keep_the_middles_and_leave_out_what_they_say(byte_tokenizer_dir):
    """Of rows with text from left to right, a document with an empty suffix, and one that is cropped in its middle."""
    tokenizer = load_tokenizer(byte_tokenizer_dir)
    bos, pre, suf, mid, sep = map(tokenizer.special, ("<|bos|>", *FIM_TOKENS))
    rows = torch.tensor([[7, bos, 8, bos, pre, 1, 2, suf, 3, mid, 4, 5, sep, bos, 9],
                         [bos, pre, 1, suf, mid, 2, sep, bos, pre, 3, suf, 4, mid, 5, 6]])
    seen = [view(tokenizer, rows) for view in (with_suffixes, without_suffixes)]
    for found, counts in seen:
        assert [row[of].tolist() for row, of in zip(found, counts, strict=True)] == [[4, 5], [2, 5, 6]]
    assert [[row[row != PADDING].tolist() for row in found] for found, _ in seen] == [
        rows.tolist(),
        [[7, bos, 8, bos, pre, 1, 2, suf, mid, 4, 5, sep, bos, 9],
         [bos, pre, 1, suf, mid, 2, sep, bos, pre, 3, suf, mid, 5, 6]]]


def test_views_keep_the_middles_of_a_tokenizer_whose_documents_and_middles_end_alike():
    tokenizer = hub_tokenizer(qwen)
    end, pre, suf, mid = map(tokenizer.special, ("<|endoftext|>", *FIM_TOKENS[:3]))
    rows = torch.tensor([[7, end, 8, end, pre, 1, suf, 3, mid, 4, 5, end, end, 9, end, pre, 2, suf, mid, 6]])
    for view in (with_suffixes, without_suffixes):
        found, counts = view(tokenizer, rows)
        assert found[counts].tolist() == [4, 5, 6]
