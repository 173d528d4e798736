"""How a run ends, what it leaves behind, and what the next start of the same run makes of that."""
import os

import pytest

from nanochat.checkpoint import on_disk
from nanochat.checkpoint.meta import load_meta
from nanochat.common import BadInput
from scripts import base_train
from tests.conftest import last_of_each


@pytest.fixture
def run_dir(base_dir):
    return base_dir / "checkpoints" / "test"


def steps_of(run_dir):
    return [int(path.name[5:]) for path in on_disk.list_checkpoints(run_dir)]


def test_a_step_past_the_horizon_trains_nothing_and_deletes_nothing(train, tiny, run_dir):
    train("--save_every=2", "--eval_every=-1")
    again = train("--save_every=2", "--num_iterations=4")
    assert "has reached step 6 (" in again.stdout
    (run_dir / ".finished").unlink()  # as if it had been interrupted on its way to a later step
    with pytest.raises(BadInput, match="step_000006 is past step 4, .*: raise --num_iter"):
        base_train.main(last_of_each(*tiny, "--run=test", "--save_every=2", "--num_iterations=4"))
    assert steps_of(run_dir) == [2, 4, 6]
    finished = train("--save_every=2")  # exactly at the horizon: it lacks its last evaluation
    assert finished.bpb.keys() == {6} and (run_dir / ".finished").exists()


@pytest.mark.slow
def test_a_run_may_switch_its_products_at_any_checkpoint(train, run_dir):
    flags = "--save_every=3", "--eval_every=-1", "--compute_dtype=bfloat16", "--matrix_lr=0.02"
    int8 = train(*flags, "--products=int8")
    on_disk.set_aside_after(run_dir, 3)
    switched = train(*flags)
    assert f"resuming from {run_dir / 'step_000003'}" in switched.stdout
    # Other products, of the same weights and rows
    assert switched.losses[4] != int8.losses[4] and switched.losses[4] == pytest.approx(int8.losses[4], abs=0.02)
    on_disk.set_aside_after(run_dir, 3)
    again = train(*flags, "--products=int8")
    assert again.losses[4] == int8.losses[4] and again.losses[6] == int8.losses[6]


def test_a_start_that_is_refused_changes_no_mark_and_moves_nothing_aside(train, tiny, run_dir):
    train("--save_every=3", "--eval_every=-1")
    before = sorted([*os.listdir(run_dir), "mirror.json"])  # which a mirror that refuses leaves behind
    for flags, words in [(["--kernel=flash"], "--kernel=flash has heads of 128"),
                         (["--checkpoint_mirror=s3://bucket/x"], "--checkpoint_mirror=s3://bucket/x: it is neither"),
                         (["--checkpoint_mirror=/dev/null/x"], "--checkpoint_mirror: /dev/null/x/test: Not a dir"),
                         (["--checkpoint_mirror="], "--checkpoint_mirror=: the path is empty")]:
        with pytest.raises(BadInput, match=words):
            base_train.main(last_of_each(*tiny, "--run=test", "--num_iterations=8", *flags))
        assert sorted({*os.listdir(run_dir), "mirror.json"}) == before and ".finished" in before


def test_a_run_whose_last_state_is_not_saved_ends_with_status_1(train, run_dir):
    train("--num_iterations=4", "--save_every=3", "--eval_every=-1")
    on_disk.set_aside_after(run_dir, 3)
    # the update of step 4 makes the embedding infinite, and its loss was still finite
    process = train("--num_iterations=4", "--save_every=3", "--eval_every=-1", "--embedding_lr=1e44", status=1)
    assert "error: the state of step 4 is not saved: the run ends with /" in process.stdout
    assert not (run_dir / ".finished").exists() and steps_of(run_dir) == [3] and not list(run_dir.glob("*.tmp"))


def test_the_pause_of_a_finished_run_is_no_interruption_and_a_lost_process_is_one(train, run_dir):
    train("--save_every=4", "--eval_every=-1")
    assert [load_meta(path).is_pause for path in on_disk.list_checkpoints(run_dir)] == [False, True]
    extended = train("--num_iterations=8", "--eval_every=-1").records[-1]
    assert extended["interruptions"] == 0 and "seconds_lost" not in extended
    on_disk.set_aside_after(run_dir, 4)
    resumed = train("--num_iterations=8", "--eval_every=-1").records[-1]
    assert resumed["interruptions"] == 1 and resumed["seconds_lost"] > 0


def test_a_newer_checkpoint_of_the_mirror_comes_before_an_older_or_damaged_one_here(train, run_dir, tmp_path):
    mirror = f"--checkpoint_mirror={tmp_path}/mirror"
    train("--save_every=2", "--eval_every=-1", mirror)
    metrics = (tmp_path / "mirror/test/metrics.jsonl").read_text()
    for path in on_disk.list_checkpoints(run_dir)[1:]:
        path.rename(tmp_path / path.name)  # as on a disk that was used before another VM went on with the run
    again = train("--save_every=2", "--eval_every=-1", mirror)
    assert "has reached step 6 (" in again.stdout and steps_of(run_dir) == [2, 6]
    assert (tmp_path / "mirror/test/metrics.jsonl").read_text() == metrics
    for path in on_disk.list_checkpoints(run_dir):
        (path / "model.safetensors").write_bytes(b"damaged")
    resumed = train("--save_every=2", "--eval_every=-1", "--num_iterations=8", mirror)
    assert "step_000006 is damaged" in resumed.stdout and "step_000002 is damaged" in resumed.stdout
    assert f"resuming from {run_dir / 'step_000006'}" in resumed.stdout and steps_of(run_dir)[-1] == 8
