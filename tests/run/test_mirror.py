"""Copies of checkpoints in a directory and, through gcloud, in a bucket."""
import shutil

import pytest
import torch

from nanochat.common import BadInput
from nanochat.run import checkpoint, checkpoint_files
from nanochat.run.meta import Meta
from nanochat.run.mirror import Mirror, Uploader
from tests.deploy.cloud import Cloud


@pytest.fixture
def run_dir(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    (path / "metrics.jsonl").write_text('{"step": 1}\n')
    return path


def save(run_dir, step):
    checkpoint.save_lane_states(run_dir, step, {0: {"rows": step}})
    state = {"weight": torch.full((100,), float(step))}
    meta = Meta(step=step, config={}, tokenizer_sha256="", data_fingerprint="", flags={}, rng="")
    return checkpoint.save(run_dir, state, state, meta, num_lanes=1)


def upload(mirror, run_dir, steps, report=print):
    uploader = Uploader(mirror, report)
    for step in steps:
        uploader.upload(save(run_dir, step))
        uploader.finish(300)


def test_a_new_disk_gets_the_newest_checkpoint_and_the_metrics(run_dir, tmp_path):
    mirror = Mirror(str(tmp_path / "mirror" / "run"), keep=2)
    upload(mirror, run_dir, (1, 2, 3))
    assert sorted(path.name for path in (tmp_path / "mirror" / "run").glob("step_*")) == ["step_000002", "step_000003"]
    shutil.rmtree(run_dir)
    path = mirror.fetch(run_dir)
    assert path == run_dir / "step_000003" and checkpoint_files.find_problem(path) is None
    assert checkpoint.load(path).model_state["weight"][0] == 3
    assert (run_dir / "metrics.jsonl").read_text() == '{"step": 1}\n'


def test_checkpoints_that_keep_every_keeps_stay_in_the_mirror(run_dir, tmp_path):
    upload(Mirror(str(tmp_path / "mirror" / "run"), keep=1, keep_every=2), run_dir, (1, 2, 3, 4, 5))
    assert sorted(int(path.name[5:]) for path in (tmp_path / "mirror" / "run").glob("step_*")) == [2, 4, 5]


@pytest.mark.skipif(not shutil.which("gcloud"), reason="gcloud is not installed")
def test_a_bucket_gets_checkpoints_and_gives_them_back_through_gcloud(run_dir, tmp_path, monkeypatch):
    cloud, said = Cloud(), []
    try:
        for name, value in cloud.env(tmp_path / "gcloud").items():
            monkeypatch.setenv(name, value)
        mirror = Mirror("gs://b/x/run", keep=1)
        upload(mirror, run_dir, (1, 2), said.append)
        assert len(said) == 2 and all("copied step_" in line for line in said), said
        shutil.rmtree(run_dir)
        path = mirror.fetch(run_dir)
        assert path.name == "step_000002" and checkpoint_files.find_problem(path) is None
        assert checkpoint.load(path).model_state["weight"][0] == 2
        assert (run_dir / "metrics.jsonl").read_text() == '{"step": 1}\n'
        assert mirror._steps() == ["step_000002"]
    finally:
        cloud.close()


def test_incomplete_and_damaged_copies_are_not_used(run_dir, tmp_path):
    said = []
    mirror = Mirror(str(tmp_path / "mirror" / "run"), keep=9)
    upload(mirror, run_dir, (1, 2, 3))
    copies = tmp_path / "mirror" / "run"
    (copies / "step_000003" / checkpoint_files.SUMS).unlink()  # the upload was interrupted
    damaged = copies / "step_000002" / checkpoint_files.MODEL
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    shutil.rmtree(run_dir)
    assert mirror.fetch(run_dir, report=said.append).name == "step_000001"
    assert any("step_000002 is damaged" in line for line in said)
    assert [path.name for path in run_dir.glob("step_*")] == ["step_000001"]


def test_an_empty_mirror_gives_none_and_a_failing_one_only_warns(run_dir, tmp_path):
    assert Mirror(str(tmp_path / "mirror" / "run"), keep=1).fetch(tmp_path / "new") is None
    (tmp_path / "file").write_text("")
    said = []
    upload(Mirror(str(tmp_path / "file" / "run"), keep=1), run_dir, (1,), said.append)
    assert "warning: step_000001 is not in" in said[0]


def test_a_bucket_without_gcloud_is_bad_input(monkeypatch, run_dir):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(BadInput, match="needs gcloud"):
        Mirror("gs://bucket/x/run", keep=1).fetch(run_dir)
