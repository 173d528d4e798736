"""A lane alone: its rows, its states, and the choice of documents that fill a row."""
import itertools
import json

import numpy as np

from nanochat.data import shards as shards_module
from nanochat.data.lanes import Lane, LaneState, SharedByLanes, smallest_cover
from nanochat.data.shards import open_shards
from nanochat.data.units import Units
from tests.data.documents import ByteTokenizer, make_texts, write


def test_a_lane_makes_the_same_rows_in_any_portions_and_after_being_restored(tmp_path, monkeypatch):
    monkeypatch.setattr(shards_module, "PIECE_BYTES", 500)
    shard = write(tmp_path / "shard.parquet", make_texts(200), row_group_size=67)
    shared = SharedByLanes(Units(open_shards([shard]), num_lanes=8, seed=0), ByteTokenizer(), read_bytes=2000)

    def open_lane(state=None):
        return Lane(3, state or LaneState(), shared, row_tokens=129)

    rows, states = open_lane().make_rows(40)
    assert rows.shape == (40, 129)
    lane, begin = open_lane(), 0
    for count in (1, 7, 32):
        portion, after = lane.make_rows(count)
        assert np.array_equal(portion, rows[begin:begin + count]) and after == states[begin:begin + count]
        begin += count
    for k in range(38):
        saved = json.loads(json.dumps(LaneState(*states[k])._asdict()))
        again, after = open_lane(LaneState(**saved)).make_rows(2)
        assert np.array_equal(again, rows[k + 1:k + 3]) and after == states[k + 1:k + 3], f"restored after row {k}"


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
