"""What a run's parent process decides before a device is touched."""
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nanochat.checkpoint import on_disk
from nanochat.common import BadInput
from nanochat.device.ranks import Dist
from nanochat.train import launch
from nanochat.train.flags import Flags, RunFlags
from nanochat.train.prepare import Run, prepare, run_directory
from nanochat.train.start import saved_meta
from tests.checkpoint.states import flip_a_byte, save

FLAGS = Flags(RunFlags(run="a"))


@dataclass(frozen=True)
class Task:
    flags: Flags
    plan: SimpleNamespace
    checkpoint: Path | None = None

    def state_bytes(self):
        return 1000


def prepared(steps=5):
    def make_task(flags, device_type, world_size, directory, checkpoint):
        return Task(flags, SimpleNamespace(num_iterations=steps, world_size=world_size), checkpoint)

    return prepare(FLAGS, "cpu", make_task)


def test_a_run_resumes_from_its_newest_checkpoint_and_has_finished_with_its_mark_only(base_dir):
    directory = base_dir / "checkpoints" / "a"
    directory.mkdir(parents=True)
    run = prepared()
    assert run.directory == directory and run.requests_file.exists() and run.heartbeats_file.exists()
    assert run.checkpoint is run.finished_step is run.mirror is None and not run.task.checkpoint
    for step in (2, 5):
        save(directory, step)
    run = prepared(steps=9)
    assert run.checkpoint.name == "step_000005" and run.task.checkpoint == run.checkpoint and run.finished_step is None
    assert prepared(steps=5).finished_step is None
    run.mark_finished()
    assert prepared(steps=5).finished_step == 5
    assert prepared(steps=9).finished_step is None
    run.begin()
    assert prepared(steps=5).finished_step is None
    with pytest.raises(BadInput, match="past step 4.*--num_iterations"):
        prepared(steps=4)


def test_a_damaged_checkpoint_moves_aside_if_another_is_whole_and_the_start_is_refused_if_none_is(base_dir, capsys):
    directory = base_dir / "checkpoints" / "a"
    for step in (2, 5):
        save(directory, step)
    flip_a_byte(directory / "step_000005/model.safetensors")
    assert prepared(steps=9).checkpoint.name == "step_000002"
    assert f"{directory}/step_000005 is damaged (model.safetensors does not match" in capsys.readouterr().out
    save(directory, 5)
    for step in (2, 5):
        flip_a_byte(directory / f"step_00000{step}/optimizer.safetensors")
    with pytest.raises(BadInput, match="damaged: step_000005 .optimizer.*, step_000002 .*another --run"):
        prepared(steps=9)
    assert sorted(path.name for path in directory.glob("step*")) == \
        ["step_000002", "step_000005", "step_000005.aside"]


def test_an_imported_model_is_no_training_to_resume(base_dir):
    path = save(base_dir / "checkpoints" / "a", 0)
    weights = [path / name for name in (on_disk.MODEL, on_disk.META)]
    (path / on_disk.SUMS).write_text(on_disk.sums_text(weights))
    for file in set(path.iterdir()) - {*weights, path / on_disk.SUMS}:
        file.unlink()
    with pytest.raises(BadInput, match="--run=a is a model that import_hf made.* another --run.*--init_from=a$"):
        prepared()


def test_a_checkpoint_of_another_task_is_refused(tmp_path):
    path = save(tmp_path, 1)
    assert saved_meta(None, "language") is None and saved_meta(path, "language").step == 1
    with pytest.raises(BadInput, match="task language, not chess.*--run"):
        saved_meta(path, "chess")


def test_a_run_on_several_hosts_without_a_mirror_is_refused_before_it_waits_for_them(monkeypatch):
    monkeypatch.setenv("NANOCHAT_HOSTS", "a,b")
    monkeypatch.setenv("NANOCHAT_HOST_INDEX", "1")
    with pytest.raises(BadInput, match="several hosts needs --checkpoint_mirror"):
        launch.train_on("xla", FLAGS, None)


@pytest.mark.parametrize("name", ["a/b", "", ".hidden", "-x", "a b", "a" * 201, "é" * 101])
def test_a_run_needs_a_name_that_can_be_a_folder(name):
    with pytest.raises(BadInput, match=f"--run={name[:40]}.*at most 200 bytes, letters"):
        run_directory(SimpleNamespace(run=RunFlags(run=name)))
    assert run_directory(SimpleNamespace(run=RunFlags(run="a" * 200))).name == "a" * 200


def test_ranks_must_be_as_many_as_were_planned(tmp_path):
    run = Run(Task(None, SimpleNamespace(world_size=2)), tmp_path, None, None, None)
    run.check_ranks(Dist("cpu", torch.device("cpu"), world_size=2))
    with pytest.raises(BadInput, match="1 devices and 2 were expected.*TPU_ACCELERATOR_TYPE"):
        run.check_ranks(Dist("cpu", torch.device("cpu")))
