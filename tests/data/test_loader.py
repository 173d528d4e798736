"""The loader's rows are the same for any number of ranks, are restored exactly, are full, and hold every token once."""
import itertools
import json
import subprocess
import sys
import threading
from collections import Counter

import numpy as np
import pytest
import torch

from nanochat.common import BadInput
from nanochat.data import loader as loader_module
from nanochat.data import shards as shards_module
from nanochat.data.lanes import PADDING, Lane, smallest_cover
from nanochat.data.loader import SyntheticLoader
from nanochat.data.shards import open_shards, read_pieces
from nanochat.data.units import Units
from scripts.bench import loader as bench_loader
from tests.data.documents import ByteTokenizer, make_texts, open_loader, rows_and_others, write


def as_saved(state):
    """Returns the state as it comes back from a checkpoint."""
    return {int(lane): saved for lane, saved in json.loads(json.dumps(state)).items()}


@pytest.fixture
def shards(tmp_path, monkeypatch):
    """Three shards, and documents of more than 500 bytes are read in pieces."""
    monkeypatch.setattr(shards_module, "PIECE_BYTES", 500)
    monkeypatch.setattr(loader_module, "BLOCK_TOKENS", 500)
    texts = make_texts(600)
    return [write(tmp_path / f"shard_{i:05d}.parquet", texts[i * 200:(i + 1) * 200], row_group_size=67)
            for i in range(3)]


def read_steps(shards, steps, readers, rows_per_step=16, batch_size=None, loader=open_loader, **options):
    """Yields the rows of each global step in their order, and the state of all ranks after it."""
    batch_size = batch_size or rows_per_step // readers
    loaders = [loader(shards, batch_size=batch_size, reader=reader, readers=readers, **options)
               for reader in range(readers)]
    try:
        for _ in range(steps):
            micro_steps = []
            for _ in range(rows_per_step // (batch_size * readers)):
                batches = [next(loader) for loader in loaders]
                micro_steps += [row for rows in zip(*(batch.rows for batch in batches), strict=True) for row in rows]
            state = {lane: saved for batch in batches for lane, saved in batch.state.items()}
            yield torch.stack(micro_steps), as_saved(state)
    finally:
        # After an error, too: a thread that goes on would wait for a bucket of this test in the tests after it.
        for loader in loaders:
            loader.close()


def assert_same(found, expected, what=""):
    """Compares the rows and states of steps, as read_steps yields them."""
    for (rows, state), (expected_rows, expected_state) in zip(found, expected, strict=True):
        assert torch.equal(rows, expected_rows) and state == expected_state, what


def repeated_steps(shards, num_steps, restored_after, **options):
    """Returns what read_steps yields on one rank. First 2, 4 and 8 ranks have read the same, and so have ranks that
    were restored after each of the steps `restored_after`."""
    steps = list(read_steps(shards, num_steps, 1, **options))
    for readers in (2, 4, 8):
        assert_same(read_steps(shards, num_steps, readers, **options), steps, f"on {readers} ranks")
    for k, readers in zip(restored_after, itertools.cycle((1, 2, 4, 8)), strict=False):
        assert_same(read_steps(shards, 2, readers, state=steps[k][1], **options), steps[k + 1:k + 3],
                    f"restored after step {k} on {readers} ranks")
    return steps


def open_synthetic(_, **options):
    rows, options = rows_and_others({"seq_len": 128, "num_lanes": 8, **options})
    return SyntheticLoader(1000, rows, **options)


@pytest.mark.parametrize("loader", [open_loader, open_synthetic])
def test_a_step_has_the_same_tokens_for_any_number_of_ranks(shards, loader):
    def run(readers, batch_size, seed=0):
        steps = read_steps(shards, 20, readers, batch_size=batch_size, loader=loader, seed=seed)
        return torch.stack([rows for rows, _ in steps])

    reference = run(1, 16)
    for readers, batch_size in ((1, 2), (1, 1), (2, 8), (2, 4), (4, 4), (4, 1), (8, 2), (8, 1)):
        assert torch.equal(run(readers, batch_size), reference), (readers, batch_size)
    assert torch.equal(run(1, 16), reference)
    assert not torch.equal(run(1, 16, seed=1), reference)
    assert len(set(map(tuple, reference.flatten(0, 1).tolist()))) == reference.shape[0] * reference.shape[1]


def test_it_is_restored_exactly_after_every_step_on_any_number_of_ranks(shards):
    in_the_middle_of = Counter()
    for _, state in repeated_steps(shards, 30, range(28)):
        for lane in state.values():
            in_the_middle_of["document"] += bool(lane["pending"])
            in_the_middle_of["piece"] += bool(lane["pending"] and lane["pending"][2])
            in_the_middle_of["buffer"] += len(lane["buffer"]) > 1
    assert min(in_the_middle_of[what] for what in ("document", "piece", "buffer")) > 10


def test_rows_become_longer_at_a_step_and_hold_the_same_whatever_the_ranks_and_wherever_they_resume(shards):
    """Steps of 16 × 128 tokens, in rows of 32, 64 and then 128."""
    lengths = [32] * 4 + [64] * 3 + [128] * 4

    def run(readers, begin=0, state=None):
        before, now = lengths[max(begin - 1, 0)], lengths[begin]
        loaders = [open_loader(shards, reader=reader, readers=readers, seq_len=now, state=state,
                               seq_len_before=before, batch_size=2048 // now // readers)
                   for reader in range(readers)]
        for step in range(begin, len(lengths)):
            if lengths[step] != now:
                now = lengths[step]
                for loader in loaders:
                    loader.change_rows(2048 // now // readers, now)
            batches = [next(loader) for loader in loaders]
            yield (torch.stack([batch.rows for batch in batches], dim=1).flatten(0, 1),
                   as_saved({lane: saved for batch in batches for lane, saved in batch.state.items()}))
        for loader in loaders:
            assert loader.stats["dropped_share"] < 0.1
            loader.close()

    steps = list(run(1))
    assert [tuple(rows.shape) for rows, _ in steps] == [(2048 // length, length + 1) for length in lengths]
    for readers in (2, 4):
        assert_same(run(readers), steps)
    for begin, readers in zip(range(1, len(lengths)), itertools.cycle((1, 2, 4)), strict=False):
        assert_same(run(readers, begin, steps[begin - 1][1]), steps[begin:], f"resumed before step {begin}")
    with pytest.raises(BadInput, match="seq_len 64, .* 32"):
        next(run(1, 4, steps[5][1]))


def lane_text(shards, lane, state, seed=0, num_lanes=8):
    """Returns {ref: bytes} of the documents that a lane read up to `state`, without those that wait in its buffer."""
    units, documents = Units(open_shards(shards), num_lanes, seed), {}
    for number in range(state["next"][0] + 1):
        unit = units.get(lane, number)
        for piece in read_pieces(unit.shard, unit.row_group, unit.first, unit.stop)[0]:
            ref = (number, piece.document - unit.first, 0)
            if ref < tuple(state["next"]) and list(ref) not in state["buffer"]:
                documents[ref] = documents.get(ref, b"") + piece.text.encode()
    return documents


def test_every_token_of_every_document_appears_once_in_full_rows(shards):
    num_lanes, bos, streams = 8, ByteTokenizer.bos_id, {lane: [] for lane in range(8)}
    with open_loader(shards, batch_size=1) as loader:
        state, stats = None, {"epoch": 0}
        while stats["epoch"] < 1.5:
            lane = stats.get("rows", 0) % num_lanes
            batch, before = next(loader), state and state[lane]
            state, stats = as_saved(batch.state), loader.stats
            row = batch.rows[0].tolist()
            assert len(row) == 129 and all(0 <= token <= bos for token in row)
            goes_on = bool(before and before["pending"])
            assert goes_on and row[0] == streams[lane][-1] or row[0] == bos
            streams[lane] += row[goes_on:]
    for lane, stream in streams.items():
        expected = lane_text(shards, lane, state[lane])
        if state[lane]["pending"]:  # its last document has begun
            begun = tuple(state[lane]["pending"][:2]) + (0,)
            ends = np.flatnonzero(np.array(stream) == bos)[-1]
            assert expected.pop(begun).startswith(bytes(stream[ends + 1:]))
            stream = stream[:ends]
        found = Counter(bytes(map(int, part.split())) for part in " ".join(map(str, stream)).split(str(bos))[1:])
        whole = Counter(expected.values())
        cropped, missing = found - whole, whole - found
        assert all(any(text.startswith(part) for text in missing) for part in cropped)
        lost = sum(len(text) * n for text, n in missing.items()) - sum(len(part) * n for part, n in cropped.items())
        assert lost == state[lane]["dropped"]
    assert stats["dropped_share"] <= 0.01
    assert stats["tokens"] == sum(map(len, streams.values()))


def test_nothing_but_short_documents_is_packed_nearly_without_loss(tmp_path):
    rng = np.random.default_rng(0)
    texts = ["x" * n for n in rng.integers(1, 300, size=3000)]
    with open_loader([write(tmp_path / "a.parquet", texts, 50)], seq_len=512) as loader:
        while loader.stats["epoch"] < 1:
            next(loader)
        assert loader.stats["dropped_share"] <= 0.001


@pytest.mark.parametrize("texts, row_group_size", [
    (["int main() { return 0; }"], None),  # one document
    (["x"], None),  # of one token
    (["", None, "int x;", ""], 1),  # in one of four row groups
    (["a" * 5000], None),  # that fills many rows
    (["a" * n for n in range(100)], None),  # one row group
    (["a" * n for n in range(100)], 34),  # three, for eight ranks
    (["a" * 127, "b" * 128, "c" * 129, "d" * 130], None),  # as long as a row, one token more, one less
], ids=["document", "token", "empty", "long", "row-group", "row-groups", "edges"])
def test_little_data_keeps_every_rank_busy(tmp_path, monkeypatch, texts, row_group_size):
    monkeypatch.setattr(loader_module, "BLOCK_TOKENS", 500)
    shards = [write(tmp_path / "a.parquet", texts, row_group_size)]
    for reader in range(8):
        with open_loader(shards, reader=reader, readers=8) as loader:
            for batch in itertools.islice(loader, 2):
                assert batch.rows.shape == (4, 129)
    steps = list(read_steps(shards, 4, readers=1))
    for k in range(2):
        rows, _ = next(read_steps(shards, 1, readers=2, state=steps[k][1]))
        assert torch.equal(rows, steps[k + 1][0])


@pytest.mark.parametrize("small_bytes", [0, 1 << 20])
def test_an_evaluation_has_every_document_once_and_the_same_rows_on_any_number_of_ranks(shards, monkeypatch,
                                                                                        small_bytes):
    monkeypatch.setattr(loader_module, "SMALL_BYTES", small_bytes)
    num_lanes = 1 if small_bytes else 8

    def read(readers):
        batches = [list(open_loader(shards, reader=reader, readers=readers, num_rows=3840, batch_size=8))
                   for reader in range(readers)]
        return torch.stack([row for of_ranks in zip(*batches, strict=True)
                            for rows in zip(*(batch.rows for batch in of_ranks), strict=True) for row in rows])

    rows = read(1)
    assert len(rows) == 3840 or small_bytes and 500 < len(rows) < 1500 and (rows[-64:] != PADDING).any()
    for readers in (2, 4, 8):
        again = read(readers)
        n = min(len(rows), len(again))  # the last batch is longer on more ranks
        assert torch.equal(again[:n], rows[:n]) and (torch.cat([again[n:], rows[n:]]) == PADDING).all()
    endless, _ = next(read_steps(shards, 1, readers=1, rows_per_step=16, num_lanes=num_lanes))
    assert torch.equal(rows[:16], endless)
    with open_loader(shards, num_rows=3840) as loader:
        read_all = [batch.rows for batch in loader]
    documents = [text for text in make_texts(600) if text]
    stats, in_rows = loader.stats, sum(int((rows != PADDING).sum()) for rows in read_all)
    assert stats["documents"] == len(documents)
    assert stats["tokens"] + stats["dropped"] == sum(1 + len(text) for text in documents)
    assert stats["tokens"] <= in_rows < 1.01 * stats["tokens"]  # each row may repeat one token


@pytest.mark.parametrize("num_rows, at_most", [(5, 5), (None, 4 * 3 + 4)])
def test_no_more_is_packed_than_is_asked_for(shards, monkeypatch, num_rows, at_most):
    """Without an end: each of 8 lanes has one row ready, and the 4 that gave one make two more."""
    made, make_rows = [], Lane.make_rows
    monkeypatch.setattr(Lane, "make_rows", lambda lane, count: made.append(count) or make_rows(lane, count))
    with open_loader(shards, num_rows=num_rows) as loader:
        next(loader)
    assert 4 <= sum(made) <= at_most


def test_batches_stay_as_they_were_and_closing_ends_the_threads(shards):
    before = threading.active_count()
    with open_loader(shards, threads=3) as loader:
        batches = [next(loader) for _ in range(10)]
        copies = [batch.rows.clone() for batch in batches]
        states = [json.dumps(batch.state) for batch in batches]
        for _ in range(50):
            next(loader).rows.zero_()
        assert threading.active_count() == before + 3
    assert all(torch.equal(batch.rows, copy) for batch, copy in zip(batches, copies, strict=True))
    assert [json.dumps(batch.state) for batch in batches] == states and batches[0].rows.dtype == torch.int32
    assert threading.active_count() == before
    loader.close()
    with pytest.raises(RuntimeError, match="closed"):
        next(loader)


def test_what_does_not_fit_is_one_clear_line(shards, tmp_path):
    (_, state), = read_steps(shards, 1, readers=1)
    cases = [
        (dict(readers=3), "8 lanes cannot be divided among 3 ranks: use 2 or 4 ranks"),
        (dict(state=state, seed=1), "is for seed 0, but this run has 1"),
        (dict(state=state, seq_len=64), "is for seq_len 128, but this run has 64"),
        (dict(state=state, num_lanes=16), "is for num_lanes 8, but this run has 16"),
        (dict(state={k: v for k, v in state.items() if k != 3}), "lacks lanes 3"),
        (dict(state={**state, 2: {**state[2], "rows": 7}}), "different steps"),
    ]
    for options, message in cases:
        with pytest.raises(BadInput, match=message):
            open_loader(shards, **options)
    with pytest.raises(BadInput, match="is for data "):
        open_loader(shards[:2], state=state)
    with open_loader(shards, batch_size=1) as loader:
        odd = [next(loader) for _ in range(6)][-1].state
    with pytest.raises(BadInput, match="6 rows .* 4 ranks: use 2 ranks"):
        open_loader(shards, readers=4, state=odd)
    with pytest.raises(BadInput, match="every document is empty"):
        open_loader([write(tmp_path / "empty.parquet", ["", None])])


@pytest.mark.parametrize("kind", [ZeroDivisionError, GeneratorExit])  # a panic of Rust's is no Exception, either
def test_an_error_in_a_worker_comes_out_of_next_as_itself(shards, kind):
    class Fails(ByteTokenizer):
        def encode_to_numpy(self, text):
            if "<50:" in text:
                raise kind("document 50")
            return super().encode_to_numpy(text)

    with open_loader(shards, Fails()) as loader:
        for _ in range(2):
            with pytest.raises(kind, match="document 50"):
                for _ in range(1000):
                    next(loader)


def test_waiting_has_a_limit_and_says_for_what(shards, monkeypatch):
    monkeypatch.setattr(loader_module, "TIMEOUT_S", 0.2)
    release = threading.Event()

    class Hangs(ByteTokenizer):
        def encode_to_numpy(self, text):
            release.wait(10)
            return super().encode_to_numpy(text)

    with open_loader(shards, Hangs()) as loader:
        with pytest.raises(TimeoutError, match=r"waited 0.2 s for rows of lane 0 \(.*shard_0000.\.parquet, row group"):
            next(loader)
        release.set()


def test_smallest_cover_against_all_subsets():
    rng = np.random.default_rng(0)
    for _ in range(300):
        lengths = rng.integers(1, 30, size=rng.integers(0, 8)).tolist()
        space = int(rng.integers(1, 40))
        limit = space + int(rng.integers(0, 20))
        sums = [sum(subset) for n in range(len(lengths) + 1) for subset in itertools.combinations(lengths, n)]
        best = min((total for total in sums if space <= total <= limit), default=None)
        indices = smallest_cover(lengths, space, limit)
        assert (indices is None) == (best is None)
        if indices is not None:
            assert len(set(indices)) == len(indices) and sum(lengths[i] for i in indices) == best


@pytest.mark.slow
def test_a_document_of_20_megabytes_takes_little_memory(tmp_path):
    long, short = "/* long */ " * 2_000_000, "int x; // short\n" * 100  # every lane reads the long one, of 22 MB
    paths = [str(write(tmp_path / "alone.parquet", [long])),
             str(write(tmp_path / "among_others.parquet", [short, long] * 2 + [short] * 1000, 500))]
    program = f"""
import torch
from tests.data.documents import open_loader
from tests.memory import peak_bytes
before = peak_bytes()
for path in {paths}:
    with open_loader([path], batch_size=64, seq_len=1024, num_lanes=64) as loader:
        for _ in range(20):
            next(loader)
print((peak_bytes() - before) >> 20)
"""
    del long
    grown_mb = int(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True,
                                  timeout=120).stdout)
    assert grown_mb < 600


@pytest.mark.slow
def test_the_benchmark_runs(shards, capsys):
    bench_loader.main([f"--data_dir={shards[0].parent}", "--max_seq_len=128", "--rounds=1"])
    report = capsys.readouterr().out
    assert "times as fast as tokenizer alone" in report
    assert "best fit, cropping the rest" in report
