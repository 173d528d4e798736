"""Copying to the mirror in the background, and what mirror.json says about it."""
import json
import shutil
import threading
import time

import pytest

from nanochat.checkpoint import mirror
from nanochat.checkpoint.mirror import Mirror, run_mirror
from nanochat.checkpoint.on_disk import MODEL, list_checkpoints
from nanochat.checkpoint.uploader import MirrorState, Uploader
from nanochat.common import BadInput, Outage
from scripts import base_train
from tests.buckets import OUTAGE
from tests.checkpoint.states import save
from tests.deploy.conftest import eventually


@pytest.fixture
def state(run_dir):
    """Returns the contents of mirror.json."""
    return lambda: json.loads((run_dir / "mirror.json").read_text())


def begin(there, run_dir, **options):
    copies = there.whole_copies()
    MirrorState(there.url, newest_copied=copies[-1] if copies else None).write(run_dir)
    return Uploader(there, run_dir, **options)


def test_mirror_json_says_what_is_saved_and_what_is_copied(run_dir, state, tmp_path, capsys):
    there = Mirror(str(tmp_path / "mirror"), 1)
    uploads = begin(there, run_dir)
    nothing = {"mirror": there.url, "newest_saved": None, "newest_copied": None, "behind_since": None, "error": None}
    assert state() == nothing
    uploads.upload(save(run_dir, 1))
    assert uploads.finish()
    assert state() == {**nothing, "newest_saved": "step_000001", "newest_copied": "step_000001"}
    assert capsys.readouterr().out.splitlines()[-1].startswith("copied step_000001 to ")
    assert there.whole_copies() == ["step_000001"]
    uploads = begin(there, run_dir)
    uploads.upload(run_dir / "step_000001")  # as after a restart: there is nothing to copy
    assert uploads.finish()
    assert state()["behind_since"] is None and state()["newest_copied"] == "step_000001"


class Slow:
    """A Mirror whose copies begin only when a test lets them."""

    def __init__(self, there):
        self._there = there
        self.begun = []
        self.may_copy = threading.Semaphore(0)

    def __getattr__(self, name):
        return getattr(self._there, name)

    def copy(self, path, metrics):
        self.begun.append(path.name)
        assert self.may_copy.acquire(timeout=60)
        self._there.copy(path, metrics)


def test_a_mirror_slower_than_the_saves_gets_whole_copies(run_dir, tmp_path):
    there = Slow(Mirror(str(tmp_path / "mirror"), 1))
    uploads = begin(there, run_dir)
    for step in (1, 2, 3):
        uploads.upload(save(run_dir, step, keep=1, uploader=uploads))
        eventually(lambda: there.begun == ["step_000001"])
    assert [path.name for path in list_checkpoints(run_dir)] == ["step_000001", "step_000002", "step_000003"]
    there.may_copy.release()
    eventually(lambda: there.begun == ["step_000001", "step_000003"])
    assert there.whole_copies() == ["step_000001"]
    uploads.upload(save(run_dir, 4, keep=1, uploader=uploads))
    assert [path.name for path in list_checkpoints(run_dir)] == ["step_000003", "step_000004"]
    there.may_copy.release(2)
    assert uploads.finish() and there.whole_copies() == ["step_000004"]


def test_a_checkpoint_that_a_full_disk_took_before_its_copy_is_no_fault_of_the_mirror(run_dir, state, tmp_path, capsys):
    there = Slow(Mirror(str(tmp_path / "mirror"), 1))
    uploads = begin(there, run_dir, first_retry_s=60)
    uploads.upload(save(run_dir, 1))
    eventually(lambda: there.begun)
    shutil.rmtree(run_dir / "step_000001")
    there.may_copy.release()
    eventually(lambda: state()["error"])
    assert "was full" in state()["error"] and "--checkpoint_mirror" not in capsys.readouterr().out
    assert not uploads.finish(lambda: True)
    assert "there is no checkpoint of this run" in capsys.readouterr().out


def test_the_end_copies_what_the_metrics_have_got_since_the_checkpoint(run_dir, bucket, tmp_path, capsys):
    for there in (run_mirror("gs://b", "run", 1), Mirror(str(tmp_path / "mirror"), 1)):
        uploads = begin(there, run_dir)
        uploads.upload(save(run_dir, 1))
        eventually(lambda there=there: there.whole_copies())
        with (run_dir / "metrics.jsonl").open("a") as file:
            file.write('{"step": 1, "val_bpb": 1.5}\n')
        assert uploads.finish()
        there._copy({"copy": there._files()["metrics.jsonl"]}, tmp_path)
        assert (tmp_path / "copy").read_text() == (run_dir / "metrics.jsonl").read_text()
    (run_dir / "metrics.jsonl").unlink()
    assert begin(there, run_dir).finish()  # a warning, and not the end of the run
    assert "warning: the last lines of metrics.jsonl are not in " in capsys.readouterr().out


def test_a_copy_of_the_metrics_that_hangs_ends_when_the_run_is_told_to_end(run_dir, tmp_path, monkeypatch):
    uploads = begin(Mirror(str(tmp_path / "mirror"), 1), run_dir)
    hangs = threading.Event()
    goes_on = threading.Event()
    monkeypatch.setattr(Mirror, "copy_metrics", lambda *_: hangs.set() or goes_on.wait())
    assert uploads.finish(hangs.is_set)
    goes_on.set()


def test_a_mirror_that_falls_behind_is_seen_and_gets_the_newest_checkpoint_once_it_is_back(run_dir, state, bucket,
                                                                                         capsys):
    uploads = begin(run_mirror("gs://b", "run", 1), run_dir, first_retry_s=0.2)
    bucket.broken = OUTAGE
    before = time.time()
    uploads.upload(save(run_dir, 1))
    eventually(lambda: state()["error"])
    uploads.upload(save(run_dir, 2))
    eventually(lambda: len(bucket.requests) > 3)
    assert before <= state()["behind_since"] <= time.time()
    assert (state()["newest_saved"], state()["newest_copied"]) == ("step_000002", None)
    bucket.broken = None
    assert uploads.finish()
    assert (state()["newest_copied"], state()["behind_since"], state()["error"]) == ("step_000002", None, None)
    # A copy of the first one may have been in progress as the bucket came back: then it is deleted after the second.
    eventually(lambda: not [name for name in bucket.names() if "step_000001" in name])
    assert capsys.readouterr().out.count("warning: ") == 1  # the same error is said once


def test_the_end_waits_for_the_mirror_until_it_is_told_to_end(run_dir, bucket, capsys):
    uploads = begin(run_mirror("gs://b", "run", 1), run_dir)
    bucket.broken = OUTAGE
    uploads.upload(save(run_dir, 1))
    said = []

    def is_told_to_end():
        said.extend(capsys.readouterr().out.splitlines())
        return any("waiting" in line for line in said)

    assert not uploads.finish(is_told_to_end)
    waiting = next(line for line in said if "waiting" in line)
    said += capsys.readouterr().out.splitlines()
    assert "until step_000001 is in gs://b/run, for up to 30 minutes" in waiting and "Ctrl-C or SIGTERM" in waiting
    assert "warning: step_000001 is on this machine's disk only, and not in gs://b/run" in said[-1]


def test_the_end_does_not_wait_for_a_mirror_that_refuses_for_good(run_dir, state, bucket, capsys):
    uploads = begin(run_mirror("gs://b", "run", 1), run_dir)
    bucket.refuses_writes = True
    uploads.upload(save(run_dir, 1))
    assert not uploads.finish()
    assert "does not have storage.objects.create access" in state()["error"]
    assert "on this machine's disk only" in capsys.readouterr().out.splitlines()[-1]


# At the start of a run, in the parent process


def test_a_start_without_a_mirror_that_can_be_written_to_says_why_and_trains_nothing(tiny, base_dir, bucket,
                                                                                     monkeypatch):
    def error():
        return json.loads((base_dir / "checkpoints/dummy/mirror.json").read_text())["error"]

    bucket.refuses_writes = True
    with pytest.raises(BadInput, match="--checkpoint_mirror: .*does not have storage.objects.create access"):
        base_train.main([*tiny, "--checkpoint_mirror=gs://b"])
    assert "storage.objects.create" in error()
    bucket.broken = (404, "NOT_FOUND", "The specified bucket does not exist.")
    with pytest.raises(BadInput, match="--checkpoint_mirror: .*bucket does not exist: correct the bucket"):
        base_train.main([*tiny, "--checkpoint_mirror=gs://b"])
    bucket.broken = OUTAGE
    monkeypatch.setattr(mirror, "OUTAGE_S", 0)
    with pytest.raises(Outage, match="--checkpoint_mirror: gs://b/dummy has not been reached for 0.*Too many requests"):
        base_train.main([*tiny, "--checkpoint_mirror=gs://b"])


def test_a_start_is_refused_if_all_checkpoints_of_the_mirror_are_damaged(tiny, run_dir, tmp_path, capsys):
    there = run_mirror(str(tmp_path / "mirror"), "dummy", 1)
    there.copy(save(run_dir, 2), run_dir / "metrics.jsonl")
    weights = tmp_path / "mirror/dummy/step_000002" / MODEL
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    found = {path: path.read_bytes() for path in (tmp_path / "mirror").rglob("*.*")}
    flags = [*tiny, f"--checkpoint_mirror={tmp_path}/mirror"]
    with pytest.raises(BadInput, match="all checkpoints in .*mirror/dummy are damaged: put whole copies"):
        base_train.main(flags)
    assert "step_000002 is damaged (model.safetensors does not match its checksum)" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in (tmp_path / "mirror").rglob("*.*")} == found
