"""Shards in a bucket, served on loopback: the same rows as from disk, in little room, through outages and kills."""
import errno
import fcntl
import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from nanochat.common import BadInput, Failure, Outage, expand_path
from nanochat.data import cache, gcs, remote
from nanochat.data import units as units_module
from nanochat.data.cache import CACHE_DIR, check_cache
from nanochat.data.gcs import _ask_gcloud
from nanochat.data.remote import Interruption
from nanochat.data.shards import fingerprint, list_shards, open_shards, whole_texts
from nanochat.data.storage import data_place
from tests.buckets import OUTAGE, Bucket, bucket, gcloud  # noqa: F401
from tests.data import documents
from tests.data.documents import write
from tests.data.test_loader import assert_same, read_steps
from tests.deploy.cloud import Failure as Answer
from tests.deploy.conftest import eventually

URL = "gs://b/corpus/train"
LANES = 4
CACHE_GB = 700e3 / 1e9  # less than the 1.2 MB of the data


@pytest.fixture
def folder(tmp_path):
    """Three shards of ten row groups, whose texts have 40 kB compressed."""
    path, rng = tmp_path / "train", np.random.default_rng(0)
    path.mkdir()
    for i in range(3):
        write(path / f"shard_{i}.parquet", [rng.bytes(5000).hex() for _ in range(80)], row_group_size=8)
    return path


@pytest.fixture
def storage(folder, bucket, monkeypatch):  # noqa: F811
    """The same data in a bucket, of which a process keeps no text in memory."""
    bucket.copy(folder, "b", "corpus/train")
    monkeypatch.setattr(units_module, "KEPT_BYTES", 0)
    monkeypatch.setattr(remote, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(remote, "LONGEST_PAUSE_S", 0.01)
    monkeypatch.setattr(remote.Retries, "silent_until", 0)
    cache._remote_files.cache_clear()
    return bucket


def open_loader(shards, **options):
    return documents.open_loader(shards, **{"seq_len": 1024, "num_lanes": LANES, **options})


def steps_of(shards, steps=150, readers=1):
    """The rows of each step, and the states after it. 150 steps are one pass over the data and a quarter."""
    return list(read_steps(shards, steps, readers, loader=open_loader))


def cached_bytes(base_dir):
    """Returns the bytes of the parts on the disk; one that is renamed meanwhile, and so seen twice, counts once."""
    found = {}
    for entry in os.scandir(base_dir / CACHE_DIR):
        if len(entry.name.split(".")[0]) == 32:
            try:
                found[entry.inode()] = entry.stat().st_blocks * 512
            except FileNotFoundError:
                pass
    return sum(found.values())


# -----------------------------------------------------------------------------
# The same as from disk


def test_shards_have_the_order_and_the_fingerprint_of_those_on_disk_also_in_folders_below(
        folder, storage, tmp_path, capsys):
    write(tmp_path / "deep/a/shard_1.parquet", ["int x;"])
    folder = folder.rename(tmp_path / "deep/b").parent
    write(folder / "a/other.parquet", ["int y;"])
    write(folder / "a/further/left.parquet", ["int z;"])
    storage.copy(folder, "b", "deep")
    storage.put("b", "deep/notes.txt", b"")
    storage.page_size = 2
    on_disk, there = list_shards(folder), list_shards("gs://b/deep")
    in_order = ["a/other", "b/shard_0", "a/shard_1", "b/shard_1", "b/shard_2"]
    for files, place in ((on_disk, folder), (there, "gs://b/deep")):
        assert [str(file) for file in files] == [f"{place}/{name}.parquet" for name in in_order]
    assert fingerprint(open_shards(there)) == fingerprint(open_shards(on_disk))
    assert capsys.readouterr().out.count("not a/further/left.parquet: ") == 2


def test_batches_are_those_from_disk_and_the_cache_keeps_its_limit(folder, storage, base_dir):
    expected = steps_of(list_shards(folder), readers=2)
    peak, is_over = [], threading.Event()

    def watch():
        while not is_over.wait(0.002):
            peak.append(cached_bytes(base_dir))

    shards = list_shards(URL, cache_gb=CACHE_GB)
    (base_dir / CACHE_DIR).mkdir(parents=True)
    watcher = threading.Thread(target=watch)
    watcher.start()
    found = steps_of(shards, readers=2)
    is_over.set()
    watcher.join()
    assert_same(found, expected)
    assert CACHE_GB * 1e9 * 0.5 < max(peak) <= CACHE_GB * 1e9
    assert len(storage.fetched) > len(set(storage.fetched))  # what was evicted is fetched again


def test_a_footer_of_any_length_is_found(storage, tmp_path, monkeypatch):
    (path := tmp_path / "many").mkdir()
    write(path / "x.parquet", [f"int x{i};" for i in range(2000)], row_group_size=1)
    storage.copy(path, "b", "many")
    assert (path / "x.parquet").stat().st_size > 2 * cache.TAIL_BYTES
    assert fingerprint(open_shards(list_shards("gs://b/many"))) == fingerprint(open_shards(list_shards(path)))


# -----------------------------------------------------------------------------
# The cache

def start_reader():
    """Starts a process that prints the texts of the bucket."""
    program = ("from nanochat.data.shards import list_shards, open_shards, whole_texts\n"
               f"for text in whole_texts(open_shards(list_shards('{URL}'))): print(text)")
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_two_processes_fetch_each_part_once(folder, storage):
    expected = list(whole_texts(open_shards(list_shards(folder))))
    for process in [start_reader() for _ in range(2)]:
        output, said = process.communicate(timeout=120)
        assert process.returncode == 0 and output.split() == expected, said
    assert len(storage.fetched) == len(set(storage.fetched)) == 33  # 3 footers and 30 row groups


def test_a_process_that_is_killed_in_the_middle_of_a_fetch_leaves_nothing_that_is_read(folder, storage, base_dir):
    storage.stall = threading.Event()
    process = start_reader()
    assert storage.stalled.wait(60)
    partial = eventually(lambda: list((base_dir / CACHE_DIR).glob("*.partial")))
    process.kill()
    process.communicate()
    storage.stall.set()
    storage.stall = None
    assert partial[0].exists()
    assert_same(steps_of(list_shards(URL), 30), steps_of(list_shards(folder), 30))
    assert not partial[0].exists()


def test_a_restart_fetches_only_what_a_crash_of_the_machine_has_cut(folder, storage, base_dir):
    open_shards(list_shards(URL))
    storage.fetched.clear()
    cache._remote_files.cache_clear()
    open_shards(list_shards(URL))
    assert storage.fetched == []
    for _, _, path in cache._parts_in(base_dir / CACHE_DIR):
        os.truncate(path, 10)
    assert fingerprint(open_shards(list_shards(URL))) == fingerprint(open_shards(list_shards(folder)))


def test_a_cache_that_is_too_small_or_a_disk_with_less_is_refused_before_any_work(folder, storage, monkeypatch):
    with pytest.raises(BadInput, match="--data_cache_gb=0.0003 is too small: .* 4 lanes .* 0.0 MB: give at least 0.01"):
        check_cache(open_shards(list_shards(URL, cache_gb=3e-4)), LANES)
    with monkeypatch.context() as patch, pytest.raises(BadInput, match="--data_cache_gb=20, .*0.0"):
        patch.setattr(cache.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
        check_cache(open_shards(list_shards(URL)), LANES)
    said = check_cache(open_shards(list_shards(URL)), LANES)
    assert f" GB in {URL}; a cache of up to 20 GB in " in said and "bucket_cache, where " in said
    assert check_cache(open_shards(list_shards(folder)), LANES) is None


@pytest.mark.parametrize("module, name, number, message", [
    (cache.os, "posix_fallocate", errno.ENOSPC, "disk is full .*--data_cache_gb=20"),
    (fcntl, "flock", errno.ENOSYS, "the cache .* cannot be used .*Function not implemented")])
def test_a_full_disk_and_a_cache_that_cannot_be_used_are_one_line_with_status_1(
        storage, monkeypatch, base_dir, module, name, number, message):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch, pytest.raises(Failure, match=message) as error:
        patch.setattr(module, name, fail)
        open_shards(list_shards(URL))
    assert error.value.status == 1 and not list((base_dir / CACHE_DIR).glob("*.partial"))


# -----------------------------------------------------------------------------
# Outages and refusals


def test_an_outage_and_connections_that_break_are_waited_for_and_change_no_row(folder, storage, capsys):
    shards = list_shards(URL)
    storage.failures += [(503, "UNAVAILABLE", "Try \x1b[2Jlater")] * 40 + [OUTAGE] * 5
    storage.cuts += [1000] * 40
    assert_same(steps_of(shards, 30), steps_of(list_shards(folder), 30))
    assert not storage.failures and not storage.cuts
    said = capsys.readouterr().out
    assert f"warning: {URL}/shard_" in said
    assert "cannot be reached (503 Try \\x1b[2Jlater); waiting for it, for up to 8 more minutes" in said
    assert said.count("\n") == 1  # and not one for each attempt
    begins = [int(part.split("=")[1].split("-")[0]) for _, part in storage.fetched]
    assert any(begin + 1000 in begins for begin in begins)  # it goes on where the connection broke


def test_a_bucket_that_is_gone_for_good_is_one_line_with_status_75(storage, monkeypatch):
    shards = list_shards(URL)
    open_shards(shards)
    storage.close()
    monkeypatch.setattr(remote, "OUTAGE_S", 0.3)
    with pytest.raises(Outage, match="gs://b/other .* 0 minutes"):
        list_shards("gs://b/other")
    shards = [replace(file, outage_s=0.3) for file in shards]
    with pytest.raises(Outage, match=rf"{URL}/shard_\d.parquet .*Connection refused") as error:
        steps_of(shards)
    assert error.value.status == 75 and "\n" not in str(error.value)


def test_a_file_that_changes_during_a_run_is_one_line(folder, storage):
    shards = list_shards(URL)
    open_shards(shards)
    storage.put("b", "corpus/train/shard_1.parquet", (folder / "shard_1.parquet").read_bytes())
    with pytest.raises(BadInput, match=f"{URL}/shard_1.parquet was replaced or deleted"):
        steps_of(shards)


@pytest.mark.parametrize("answer, words", [
    ((404, "NOT_FOUND", "The specified bucket does not exist."), "The specified bucket does not exist: correct the"),
    ((401, "UNAUTHENTICATED", "Invalid Credentials"), f"{URL}: 401 Invalid Credentials: let the account"),
    ((403, "PERMISSION_DENIED", "tpu@p.iam does not have storage.objects.list access."), "403 tpu@p.iam does not have"),
])
def test_what_trying_again_does_not_mend_is_refused_at_once(storage, answer, words):
    storage.broken = answer
    with pytest.raises(BadInput, match=words):
        list_shards(URL)


def test_a_login_that_expires_is_renewed(storage, monkeypatch):
    gcs._tokens["newest"] = "old"
    handle = storage.handle

    def check(method, path, body, headers):
        if headers["Authorization"] != "Bearer ya29.a-token":
            raise Answer(401, "UNAUTHENTICATED", "Invalid Credentials")
        return handle(method, path, body, headers)

    monkeypatch.setattr(storage, "handle", check)
    assert len(list_shards(URL)) == 3


def test_without_a_login_or_without_gcloud_a_bucket_is_refused(storage, monkeypatch):
    monkeypatch.delenv("CLOUDSDK_AUTH_ACCESS_TOKEN")
    with pytest.raises(BadInput, match=f"{URL}: .*You do not currently have an active account selected: log in"):
        list_shards(URL)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(BadInput, match="needs gcloud"):
        list_shards(URL)


def test_files_that_are_not_whole_parquet_files_and_empty_folders_are_named(storage, folder):
    whole = (folder / "shard_0.parquet").read_bytes()
    for name, content in (("empty", b""), ("short", b"PAR1"), ("cut", whole[:-100]), ("text", b"int x;" * 100)):
        storage.put("b", f"{name}/x.parquet", content)
        with pytest.raises(BadInput, match=f"gs://b/{name}/x.parquet is not a whole parquet file"):
            open_shards(list_shards(f"gs://b/{name}"))
    with pytest.raises(BadInput, match=r"no val data: gs://b/nothing has no \*.parquet file in it"):
        list_shards("gs://b/nothing", "val")


# -----------------------------------------------------------------------------
# Answers that no Cloud Storage gives: each is refused in one line, and nobody gets the token


def test_a_redirection_gets_no_token_and_an_error_that_repeats_it_is_printed_without_it(storage):
    thief = Bucket()
    storage.handle = lambda *request: ({":code": 302, "Location": thief.url}, b"")
    with pytest.raises(BadInput, match=f"{URL}: 302 "):
        list_shards(URL)
    assert not thief.requests
    thief.close()
    storage.handle = Mock(side_effect=Answer(403, "DENIED", "no: {'Authorization': 'Bearer ya29.a-token'}"))
    with pytest.raises(BadInput, match="403 .*Bearer .token."):
        list_shards(URL)


@pytest.mark.parametrize("answer, words", [
    ({"nextPageToken": "again"}, "does not end after 20 pages"),
    ([], "'list' object has no"), ({"items": [{"name": "a.parquet"}]}, "KeyError: 'size'"),
    ({"items": [{"name": "a.parquet", "size": "x", "generation": 1}]}, "ValueError: invalid literal"),
    ({"items": 5}, "TypeError: 'int'"),
    (b"[" * 100_000, "RecursionError"), (b"\xff", "UnicodeDecodeError")])
def test_answers_of_another_kind_are_one_line(storage, monkeypatch, answer, words):
    monkeypatch.setattr(remote, "OUTAGE_S", 0)
    monkeypatch.setattr(gcs, "MAX_PAGES", 20)
    storage.handle = lambda *request: ({}, answer if isinstance(answer, bytes) else json.dumps(answer).encode())
    with pytest.raises((BadInput, Outage), match=words) as error:
        list_shards(URL)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("output", ["", "a token\nand more", "ya29.\u00e4"])
def test_gcloud_that_prints_no_token_is_named_and_its_output_is_not_shown(tmp_path, monkeypatch, output):
    program = tmp_path / "gcloud"
    program.write_text(f"#!/bin/sh\nprintf '{output}'\necho 'WARNING: be careful' >&2\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(Interruption, match="^gcloud auth print-access-token printed no token$"):
        _ask_gcloud("gs://b")


# -----------------------------------------------------------------------------
# Places


@pytest.mark.parametrize("text", [
    "gs:/x", "gs://", "gs:///x", "gs//x", "GS://x", "gs:x", "s3://x", "http://x/y", "file:///x", "host:x", "gs://b/\n",
    "gs://B/x", "hf://org/data", "hf://datasets/org", "hf:/datasets/org/data", "hf://models/org/data/x",
    "hf://datasets/org/data/a,b", "hf://datasets/org/data@/x", "hf//datasets/org/data"])
def test_a_place_that_is_no_bucket_no_data_set_and_no_folder_is_refused(text):
    with pytest.raises(BadInput, match="neither gs://BUCKET/FOLDER, hf://datasets/ORG/NAME/FOLDER nor a folder"):
        data_place(text)


def test_a_folder_stays_a_folder_and_other_flags_refuse_buckets_and_data_sets(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert data_place("~/x") == "/home/me/x" and data_place("gs://b/x/") == "gs://b/x" and data_place("gs") == "gs"
    assert data_place("/x/a:b/./c") == "/x/a:b/c"
    for url in ("gs://b/x", "hf://datasets/org/data/out"):
        with pytest.raises(BadInput, match=f"{url} is not on this machine, .*copy it"):
            expand_path(url)
