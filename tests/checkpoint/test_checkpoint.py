"""Checkpoints are saved whole or not at all, and load as they were saved."""
import subprocess

import pytest

from nanochat.checkpoint import on_disk
from nanochat.checkpoint.pieces import load_checkpoint
from nanochat.checkpoint.saver import SaveOptions, save_checkpoint, save_lane_states
from tests.checkpoint.states import assert_holds, flip_a_byte, make_meta, make_state, names, save


def test_a_checkpoint_loads_as_it_was_saved_bit_for_bit_and_sha256sum_accepts_its_files(tmp_path):
    path = save(tmp_path, 100)
    loaded = load_checkpoint(path)
    assert loaded.meta == make_meta(100)
    assert loaded.lane_states == {0: {"row": 100}, 1: {"row": 100, "buffer": [1, 2, 3]}}
    assert_holds(loaded, make_state(100))
    assert names(tmp_path) == ["step_000100"]
    assert names(path) == ["SHA256SUMS", "lanes.json", "meta.json", "model.safetensors", "optimizer.safetensors",
                           "source.zip"]
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=path, check=True, capture_output=True)


def test_a_rank_that_never_writes_its_lanes_is_named_after_the_limit(tmp_path):
    save_lane_states(tmp_path, 5, {0: {}, 2: {}})
    with pytest.raises(TimeoutError, match="lanes 1, 3 "):
        save_checkpoint(tmp_path, *make_state(), make_meta(5), num_lanes=4,
                        options=SaveOptions(lanes_timeout_s=0.1))
    assert on_disk.latest(tmp_path) is None
    assert not list(tmp_path.glob("*/*.safetensors"))


def test_saving_a_step_again_keeps_a_good_checkpoint_and_replaces_a_damaged_one(tmp_path):
    path = save(tmp_path, 10)
    before = path.stat().st_ino
    assert save(tmp_path, 10) == path and path.stat().st_ino == before
    flip_a_byte(path / "model.safetensors")
    assert save(tmp_path, 10) == path and on_disk.find_problem(path) is None
    assert [name for name in names(tmp_path) if "aside" in name] == ["step_000010.aside"]


def test_an_error_while_saving_leaves_the_old_checkpoint_and_frees_the_disk(tmp_path, monkeypatch):
    old = save(tmp_path, 1, keep=1)

    def disk_full(path):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(on_disk, "sync_to_disk", disk_full)
        with pytest.raises(OSError, match="No space left"):
            save(tmp_path, 2, keep=1)
    assert on_disk.latest_good(tmp_path)[0] == old
    assert not list((tmp_path / "step_000002.tmp").glob("*.safetensors"))
    save(tmp_path, 3, keep=1)
    assert [path.name for path in on_disk.list_checkpoints(tmp_path)] == ["step_000003"]
