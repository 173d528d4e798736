"""Checkpoints are saved whole or not at all, and load as they were saved."""
import subprocess
import threading
import time

import pytest
import torch

from nanochat.checkpoint import on_disk
from nanochat.checkpoint.pieces import load_checkpoint
from nanochat.checkpoint.saver import SaveOptions, save_checkpoint, save_lane_states
from tests.checkpoint.states import flip_a_byte, make_meta, make_state, names, save


def test_a_checkpoint_loads_as_it_was_saved_bit_for_bit(tmp_path):
    loaded = load_checkpoint(save(tmp_path, 100))
    model, optimizer = make_state(100)
    assert loaded.meta == make_meta(100)
    assert loaded.lane_states == {0: {"row": 100}, 1: {"row": 100, "buffer": [1, 2, 3]}}
    for saved, found in ((model, loaded.model_state), (optimizer, loaded.optimizer_state)):
        assert saved.keys() == found.keys()
        for name in saved:
            assert saved[name].dtype == found[name].dtype and torch.equal(saved[name], found[name]), name


def test_tensors_that_are_transposed_or_need_gradients_are_saved(tmp_path):
    weight = torch.nn.Parameter(torch.arange(6.0).view(2, 3).t())
    path = save_checkpoint(tmp_path, {"w": weight}, {}, make_meta(), num_lanes=0)
    assert torch.equal(load_checkpoint(path).model_state["w"], weight)


def test_a_finished_checkpoint_holds_only_files_that_sha256sum_accepts(tmp_path):
    path = save(tmp_path, 7)
    assert names(tmp_path) == ["step_000007"]
    assert names(path) == ["SHA256SUMS", "lanes.json", "meta.json", "model.safetensors", "optimizer.safetensors",
                           "source.zip"]
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=path, check=True, capture_output=True)


def test_lane_states_come_from_all_ranks_even_if_they_write_late(tmp_path):
    def rank(first_lane):
        time.sleep(0.05 * first_lane)
        save_lane_states(tmp_path, 5, {lane: {"lane": lane} for lane in range(first_lane, 8, 4)})

    ranks = [threading.Thread(target=rank, args=(first_lane,)) for first_lane in range(4)]
    for thread in ranks:
        thread.start()
    path = save_checkpoint(tmp_path, *make_state(), make_meta(5), num_lanes=8, options=SaveOptions(lanes_timeout_s=20))
    assert load_checkpoint(path).lane_states == {lane: {"lane": lane} for lane in range(8)}


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
