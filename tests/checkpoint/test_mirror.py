"""Copies of checkpoints in a directory and in a bucket."""
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from nanochat.checkpoint import mirror, on_disk
from nanochat.checkpoint.mirror import Mirror, patiently, run_mirror
from nanochat.checkpoint.pieces import load_checkpoint
from nanochat.common import BadInput, Outage
from nanochat.data import gcs, remote, storage
from nanochat.data.remote import Interruption
from tests.buckets import OUTAGE
from tests.checkpoint.states import names, save
from tests.deploy.conftest import eventually
from tests.run.life import require_ended


@pytest.fixture
def folder(tmp_path):
    return Mirror(str(tmp_path / "mirror" / "run"), 2)


def copy(mirror, run_dir, *steps):
    for step in steps:
        path = save(run_dir, step)
        mirror.copy(path, path.parent / "metrics.jsonl")
        mirror.prune(path.name)


@pytest.mark.parametrize("place", ["{}/mirror", "gs://b/x"])
def test_a_new_disk_gets_the_newest_checkpoint_and_the_metrics(run_dir, tmp_path, bucket, place):
    there = run_mirror(place.format(tmp_path), "run", 2)
    there.try_to_write(run_dir)
    assert there.whole_copies() == [] == bucket.names() and not list(run_dir.glob(".write_test*"))
    copy(there, run_dir, 1, 2, 3)
    assert there.whole_copies() == ["step_000002", "step_000003"]
    shutil.rmtree(run_dir)
    path = there.fetch(run_dir)
    assert path == run_dir / "step_000003" and on_disk.find_problem(path) is None
    assert load_checkpoint(path).lane_states[0] == {"row": 3}
    assert (path / on_disk.SOURCE).read_bytes() == b"the small files"
    assert (run_dir / "metrics.jsonl").read_text() == '{"step": 1}\n'


def test_what_a_killed_upload_leaves_in_a_bucket_is_deleted_after_the_next_copy(run_dir, bucket):
    there = run_mirror("gs://b/x", "run", 2)
    copy(there, run_dir, 1)
    assert sum(request.startswith("PUT ") for request in bucket.requests) == len(bucket.names())  # no file in parts
    del bucket.objects["b", f"x/run/step_000001/{on_disk.SUMS}"]  # which would have been the last
    copy(there, run_dir, 2)
    assert {name.split("/")[2] for name in bucket.names()} == {"metrics.jsonl", "step_000002"}


def test_what_is_damaged_on_its_way_to_a_bucket_is_sent_again(run_dir, bucket, monkeypatch):
    monkeypatch.setattr(storage, "BLIP_S", 60)
    monkeypatch.setattr(remote, "FIRST_PAUSE_S", 0.01)
    put = bucket.put
    sent = []

    def put_with_a_fault(name_of_bucket, name, content):
        sent.append(name)
        put(name_of_bucket, name, content[:-1] if len(sent) == 1 else content)

    monkeypatch.setattr(bucket, "put", put_with_a_fault)
    there = run_mirror("gs://b/x", "run", 1)
    copy(there, run_dir, 1)
    assert len(sent) == len(set(sent)) + 1
    shutil.rmtree(run_dir)
    assert there.fetch(run_dir).name == "step_000001"


def test_a_folder_of_a_bucket_is_deleted_and_nothing_beside_it(bucket):
    for name in ("check/whole/step_1/meta.json", "check/whole/metrics.jsonl", "check2/x", "x"):
        bucket.put("b", name, b"x")
    storage.delete_folder("gs://b/check")
    assert bucket.names() == ["check2/x", "x"]


def test_a_mirror_without_metrics_gives_its_checkpoint_with_a_warning(run_dir, tmp_path, bucket, capsys):
    for place in (f"{tmp_path}/mirror", "gs://b/x"):
        there = run_mirror(place, "run", 1)
        copy(there, run_dir, 1)
        there._delete("metrics.jsonl")
        shutil.rmtree(run_dir / "step_000001")
        assert on_disk.find_problem(there.fetch(run_dir)) is None
        assert capsys.readouterr().out == (f"warning: {there.url} has no metrics.jsonl: the run continues at "
                                           "step_000001, with only the metrics that are on this disk\n")


def test_files_of_somebody_else_in_an_old_copy_stay(run_dir, folder, tmp_path, bucket):
    for there in (folder, run_mirror("gs://b/x", "run", 2)):
        copy(there, run_dir, 1)
        (tmp_path / "notes.txt").write_text("of a user")
        there._copy({"notes.txt": tmp_path / "notes.txt"}, f"{there.url}/step_000001")
        copy(there, run_dir, 2, 3)
        assert there.whole_copies() == ["step_000002", "step_000003"]
        assert [path for path in there._files() if "000001" in path] == ["step_000001/notes.txt"]


def test_incomplete_and_damaged_copies_are_not_used(run_dir, folder, tmp_path, capsys):
    copy(folder, run_dir, 1, 2)
    copies = tmp_path / "mirror" / "run"
    folder.copy(save(run_dir, 3), run_dir / "metrics.jsonl")
    (copies / "step_000003" / on_disk.SUMS).unlink()  # the upload was interrupted
    folder.copy(save(run_dir, 4), run_dir / "metrics.jsonl")
    (copies / "step_000004" / on_disk.MODEL).unlink()
    (copies / "step_000004" / on_disk.MODEL).mkdir()
    folder.copy(save(run_dir, 5), run_dir / "metrics.jsonl")
    (copies / "step_000005").rename(copies / "step_000005.rounded")  # as an earlier version wrote it
    damaged = copies / "step_000002" / on_disk.MODEL
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    shutil.rmtree(run_dir)
    assert folder.fetch(run_dir).name == "step_000001"
    said = capsys.readouterr().out
    assert "step_000002 is damaged" in said and "that end in .rounded: they are skipped" in said
    assert [path.name for path in run_dir.glob("step_*")] == ["step_000001"]


def test_a_copy_is_kept_although_the_mirror_has_later_steps(run_dir, folder):
    """As when a VM whose disk still has an older checkpoint goes on."""
    copy(folder, run_dir, 100, 200, 50)
    assert folder.whole_copies() == ["step_000050", "step_000100", "step_000200"]


# Refusals and outages


@pytest.mark.parametrize("place", ["{}/mirror", "gs://b/x"])
def test_copies_of_another_run_of_the_same_name_are_refused(run_dir, tmp_path, bucket, place):
    there = run_mirror(place.format(tmp_path), "run", 2)
    mine, others = (save(tmp_path / name, 1, wandb_id=name) for name in ("mine", "others"))
    there.require_same_run(mine)
    for path in (mine, others):
        there.copy(path, run_dir / "metrics.jsonl")
        there.require_same_run(path)
    with pytest.raises(BadInput, match="of another run than .*/mine: choose another --run"):
        there.require_same_run(mine)
    assert names(tmp_path / "mine") == ["step_000001"]


def test_the_run_s_own_folder_is_no_mirror(run_dir):
    with pytest.raises(BadInput, match=f"--checkpoint_mirror: {run_dir} is the run's own folder"):
        run_mirror(run_dir.parent, run_dir.name, 1).try_to_write(run_dir)


def test_a_directory_that_cannot_be_written_to_is_refused(run_dir, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="--checkpoint_mirror: .*/file/x/run.*: choose a directory"):
        run_mirror(f"{tmp_path}/file/x", "run", 1).try_to_write(run_dir)
    with pytest.raises(BadInput, match="--checkpoint_mirror: /proc/x.*: choose a directory"):
        run_mirror("/proc/x", "run", 1).try_to_write(run_dir)


def test_a_mirror_that_takes_no_more_is_named_and_keeps_nothing_of_the_file(tmp_path):
    (tmp_path / "source").write_bytes(bytes(100))
    _, most = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, most))
    try:
        with pytest.raises(BadInput, match="--checkpoint_mirror: .*/run/source.partial: File too large: choose a"):
            run_mirror(f"{tmp_path}/mirror", "run", 1).copy_metrics(tmp_path / "source")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list((tmp_path / "mirror/run").iterdir())


def test_an_outage_is_waited_for_with_a_line_and_ends_well_or_after_ten_minutes(bucket, run_dir, monkeypatch, capsys):
    monkeypatch.setattr(remote, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(remote, "SAY_S", 0)
    monkeypatch.setattr(remote.Retries, "silent_until", 0.0)
    there = run_mirror("gs://b/x", "run", 1)
    outages = [OUTAGE, OUTAGE, None]

    def try_mirror():
        bucket.broken = outages.pop(0)
        there.try_to_write(run_dir)

    patiently(there.url, try_mirror)
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 2 and said[0].startswith("warning: --checkpoint_mirror: gs://b/x/run cannot be reached (")
    assert "429" in said[0] and "10 more minutes" in said[0] and not outages
    bucket.broken = OUTAGE
    monkeypatch.setattr(mirror, "OUTAGE_S", 0)
    with pytest.raises(Outage, match="--checkpoint_mirror: gs://b/x/run .*start the same command"):
        patiently(there.url, lambda: there.try_to_write(run_dir))


@pytest.fixture
def hanging_gcloud(tmp_path, monkeypatch):
    """A gcloud that hangs. Its helper has inherited the pipes, so that reading from them would wait for it. Returns the
    file that gets the helper's process id."""
    (tmp_path / "gcloud").write_text(f"#!/bin/sh\nsleep 1000 &\necho $! >{tmp_path}/new\n"
                                     f"mv {tmp_path}/new {tmp_path}/helper\nwait\n")
    (tmp_path / "gcloud").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(gcs, "_tokens", {})
    return tmp_path / "helper"


def test_a_gcloud_that_hangs_is_ended_with_its_helpers(run_dir, hanging_gcloud, monkeypatch):
    monkeypatch.setattr(gcs, "LOGIN_TIMEOUT_S", 1)
    monkeypatch.setattr(storage, "BLIP_S", 0)
    with pytest.raises(Interruption, match="gcloud .* has not ended after 1 s"):
        run_mirror("gs://b/x", "run", 1).try_to_write(run_dir)
    require_ended(int(hanging_gcloud.read_text()))


@pytest.mark.parametrize("how, status", [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
def test_a_signal_to_a_script_ends_the_gcloud_that_hangs_with_its_helpers(run_dir, hanging_gcloud, how, status):
    program = ("from nanochat.checkpoint.mirror import *; from nanochat.common import run_script; "
               f"run_script(lambda: run_mirror('gs://b/x', 'run', 1).try_to_write('{run_dir}'))")
    script = subprocess.Popen([sys.executable, "-c", program],
                              preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
    eventually(hanging_gcloud.exists)
    script.send_signal(how)
    assert script.wait(60) == status
    require_ended(int(hanging_gcloud.read_text()))


def test_a_file_system_that_does_not_answer_is_an_outage_and_a_slow_copy_ends_within_the_file(tmp_path, folder):
    with pytest.raises(Interruption, match="has not answered after 0.01 s"):
        mirror._within(0.01, time.sleep, 0.5)
    (tmp_path / "source").touch()
    os.truncate(tmp_path / "source", 1 << 30)
    with pytest.raises(Interruption, match="has not answered after 0.001 s|took too long"):
        folder.copy_metrics(tmp_path / "source", 0.001)
    eventually(lambda: not any(thread.name == "mirror-files" for thread in threading.enumerate()))
    assert not Path(folder.url, "source").exists()
