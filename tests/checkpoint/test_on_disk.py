"""Which checkpoints a run has, keeps, sets aside and resumes from, and how much disk they need."""
import errno
import json
import os
from stat import S_ISDIR

import pytest

from nanochat.checkpoint import on_disk
from nanochat.checkpoint.on_disk import META
from nanochat.checkpoint.pieces import state_bytes
from nanochat.common import BadInput, Outage
from tests.checkpoint.states import DAMAGES, damage, make_state, names, save
from tests.checkpoint.test_pieces import save_in_pieces


@pytest.mark.parametrize("name", [
    on_disk.MODEL, on_disk.OPTIMIZER, on_disk.LANES, META, on_disk.SOURCE, on_disk.SUMS, "model.safetensors.index.json",
    "optimizer.safetensors.index.json", "model-00003-of-00007.safetensors", "optimizer-00001-of-00007.safetensors"])
@pytest.mark.parametrize("how", DAMAGES)
def test_any_damage_to_any_file_is_found_and_the_checkpoint_before_is_used(tmp_path, name, how):
    save_any = save_in_pieces if "-0" in name or "index" in name else save
    good, bad = save_any(tmp_path, 100), save_any(tmp_path, 200)
    damage(bad / name, how)
    assert bool(on_disk.find_problem(bad, weights_only=True)) == (not name.startswith(("optimizer", "lanes")))
    path, damaged = on_disk.latest_good(tmp_path)
    assert path == good and list(damaged) == [bad] and damaged[bad]
    assert names(tmp_path) == ["step_000100", "step_000200"]


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ESTALE])
def test_a_file_system_that_fails_is_tried_again_and_is_no_proof_of_damage(tmp_path, number, monkeypatch, capsys):
    for step in (1, 2):
        save(tmp_path, step)
    failures = []

    def failing(path, *args, **options):
        if "step_000002/model" in str(path) and len(failures) < most:
            failures.append(path)
            raise OSError(number, os.strerror(number), str(path))
        return open(path, *args, **options)

    monkeypatch.setattr(on_disk, "READ_AGAIN_S", (0.01, 0.01))
    monkeypatch.setattr(on_disk, "open", failing, raising=False)
    most = 2
    assert on_disk.latest_good(tmp_path) == (tmp_path / "step_000002", {})
    assert capsys.readouterr().out.count(f"model.safetensors: {os.strerror(number)}") == 2
    most = 99
    with pytest.raises(Outage, match=f"step_000002 cannot be read .model.safetensors: {os.strerror(number)}.*again.*"
                                     "answers. Or move it away: the run then resumes from the checkpoint before it"):
        on_disk.latest_good(tmp_path)
    assert names(tmp_path) == ["step_000001", "step_000002"]


def test_a_folder_that_cannot_be_listed_is_no_new_run(tmp_path, monkeypatch):
    save(tmp_path, 1)
    monkeypatch.setattr(on_disk, "READ_AGAIN_S", (0.01,))
    monkeypatch.setattr(on_disk.os, "listdir", lambda path: open("/proc/self/mem", "rb").read(1))  # EIO
    with pytest.raises(Outage, match=f"{tmp_path} cannot be read.*once the disk answers$"):  # moved away, it is new
        on_disk.latest_good(tmp_path)


def test_no_run_deletes_what_was_set_aside(tmp_path):
    for _ in range(2):
        for step in (1, 2):
            save(tmp_path, step)
        on_disk.set_aside_after(tmp_path, 1)
    save(tmp_path, 3, keep=1)
    assert names(tmp_path) == ["step_000002.aside", "step_000002.aside2", "step_000003"]


@pytest.mark.parametrize("name", [on_disk.MODEL, META, on_disk.SUMS])
@pytest.mark.parametrize("what", ["pipe", "/dev/zero"])
def test_a_file_whose_read_would_never_end_is_damage(tmp_path, name, what):
    file = save(tmp_path, 1) / name
    file.unlink()
    if what == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to(what)
    assert on_disk.find_problem(file.parent) == f"{name}: it is no ordinary file"


@pytest.mark.parametrize("piece", ["/etc/model.safetensors", "../model.safetensors", "a\0b.safetensors", "[" * 10**5])
def test_an_index_names_files_of_its_own_folder_only(tmp_path, piece):
    text = piece if piece[0] == "[" else json.dumps({"weight_map": {"wte": piece}})
    (tmp_path / on_disk.index_of(on_disk.MODEL)).write_text(text)
    with pytest.raises(OSError, match="it is no index of pieces"):
        on_disk.tensor_files(tmp_path, on_disk.MODEL)


def test_what_is_left_of_a_save_that_was_given_up_is_deleted_once_the_run_has_passed_its_step(tmp_path):
    for step in (1, 3):  # a rank may hand over its part of a later checkpoint already
        (tmp_path / f"step_{step:06d}.tmp").mkdir()
        (tmp_path / f"step_{step:06d}.tmp" / "lanes_from_0.unfinished").write_text("{}")
    save(tmp_path, 2)
    assert names(tmp_path) == ["step_000002", "step_000003.tmp"]


def test_keep_leaves_the_newest_and_sorts_by_number(tmp_path):
    for step in (999_999, 1_000_000, 1_000_001):
        save(tmp_path, step, keep=2)
    assert [path.name for path in on_disk.list_checkpoints(tmp_path)] == ["step_1000000", "step_1000001"]
    assert on_disk.latest(tmp_path).name == "step_1000001"


def test_too_little_disk_for_two_checkpoints_is_bad_input(tmp_path):
    on_disk.check_disk_space(tmp_path, state_bytes(*make_state()))
    with pytest.raises(BadInput, match="2,000,000,000.0 MB .*: free some"):
        on_disk.check_disk_space(tmp_path, 10**15)


def test_every_file_of_a_checkpoint_has_the_rights_of_a_new_file(tmp_path):
    umask = os.umask(0o027)
    try:
        path = save(tmp_path, 1)
    finally:
        os.umask(umask)
    assert {oct(file.stat().st_mode & 0o777) for file in path.iterdir()} == {"0o640"}


def test_on_a_nearly_full_disk_the_oldest_are_deleted_and_the_newest_stays(tmp_path, monkeypatch):
    for step in (1, 2, 3):
        save(tmp_path, step)
    usage = on_disk.shutil.disk_usage(tmp_path)
    has_room = True

    def nearly_full(path):
        return usage._replace(free=10**6 if len(on_disk.list_checkpoints(tmp_path)) == 1 and has_room else 0)

    monkeypatch.setattr(on_disk.shutil, "disk_usage", nearly_full)
    save(tmp_path, 4)
    assert [path.name for path in on_disk.list_checkpoints(tmp_path)] == ["step_000003", "step_000004"]
    with pytest.raises(OSError, match="0.0 MB are free"):
        has_room = False
        save(tmp_path, 5)
    assert [path.name for path in on_disk.list_checkpoints(tmp_path)] == ["step_000004"]


def test_a_disk_that_cannot_rename_a_folder_is_refused_and_one_that_cannot_sync_it_holds_checkpoints(
        tmp_path, monkeypatch):
    def failing(number):
        def fail(*_):
            raise OSError(number, os.strerror(number))
        return fail

    on_disk.check_renaming(tmp_path)
    sync = os.fsync
    with monkeypatch.context() as patch:
        patch.setattr(on_disk.Path, "rename", failing(errno.ENOSYS))
        with pytest.raises(BadInput, match="renamed .Function not implemented.*NANOCHAT_BASE_DIR"):
            on_disk.check_renaming(tmp_path)
        assert names(tmp_path) == []
    monkeypatch.setattr(os, "fsync", lambda number: failing(errno.EINVAL)() if S_ISDIR(os.fstat(number).st_mode)
                        else sync(number))
    on_disk.check_renaming(tmp_path)
    assert on_disk.find_problem(save(tmp_path, 1)) is None
