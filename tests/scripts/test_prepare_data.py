"""scripts/prepare_data.py as a person runs it: the same bytes every time, after being killed too, and clear errors."""
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from itertools import chain
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from filelock import FileLock

from nanochat.common import BadInput
from scripts.prepare_data import main
from tests.corpus.projects import make_project, prepare, read, shard_hashes, stack_rows, write_table


@pytest.fixture
def flags(tmp_path):
    """The flags that name two projects."""
    for name in "ab":
        make_project(tmp_path / "in", name)
    return [f"--projects_dir={tmp_path / 'in'}"]


def test_no_project_is_on_both_sides_whatever_its_versions(tmp_path):
    for name in "abcdefgh":
        make_project(tmp_path / "in", f"{name}-1.0", seed=name)
        make_project(tmp_path / "in", f"{name}-2.1.3", seed=f"{name}2")
    prepare(tmp_path / "out", f"--projects_dir={tmp_path / 'in'}", "--val_fraction=0.3")
    sides = [{document["source"][0] for document in read(tmp_path / "out", side)} for side in ("base_data_v3", "val")]
    assert all(sides) and not sides[0] & sides[1] and sides[0] | sides[1] == set("abcdefgh")


def test_shards_have_the_columns_small_row_groups_and_a_shuffled_order(tmp_path):
    for name in "ab":
        make_project(tmp_path / "in", name, files=300, lines=4)
    make_project(tmp_path / "in", "v", files=3)
    prepare(tmp_path / "out", f"--projects_dir={tmp_path / 'in'}", "--val_projects=v")
    shard, = (tmp_path / "out" / "base_data_v3").iterdir()
    file = pq.ParquetFile(shard)
    assert file.schema_arrow.names == ["text", "path", "source", "licence"]
    assert [file.metadata.row_group(i).num_rows for i in range(3)] == [256, 256, 88]
    assert file.metadata.row_group(0).column(0).compression == "ZSTD"
    first_half = Counter(document["source"] for document in read(tmp_path / "out", "base_data_v3")[:300])
    assert min(first_half["a"], first_half["b"]) > 100


def test_same_bytes_for_any_number_of_workers_and_order_of_flags_but_not_for_another_seed(tmp_path):
    projects = [make_project(tmp_path, name) for name in "abcd"]
    made = []
    for workers, order, seed in ((1, projects, 5), (2, projects[::-1], 5), (1, projects, 6)):
        prepare(tmp_path / str(len(made)), f"--workers={workers}", f"--source={','.join(map(str, order))}",
                f"--seed={seed}", "--shard_bytes=10000", "--val_projects=b")
        made.append(shard_hashes(tmp_path / str(len(made))))
    assert made[0] == made[1] != made[2] and len(made[0]) > 3


@pytest.mark.slow
def test_killed_at_ten_moments_it_resumes_and_gives_the_same_bytes(tmp_path):
    for number in range(12):
        make_project(tmp_path / "in", f"p{number}", files=10)
        suffix = (".parquet", ".jsonl", ".jsonl.gz", ".jsonl.zst")[number % 4]
        write_table(tmp_path / "tables" / f"part={number}" / f"a{suffix}", stack_rows(f"p{number}", 10))
    flags = [f"--projects_dir={tmp_path / 'in'}", f"--source={tmp_path / 'tables'}", "--shard_bytes=6000"]
    whole = prepare(tmp_path / "whole", *flags)
    out = tmp_path / "out"

    def finished():
        """Returns {file of a scan, or shard: time of change} of those that are whole."""
        there = [path.parent for path in out.glob(".work/*/scans/*/stats.json")]
        files = chain(*(folder.glob("run_*.parquet") for folder in there), out.glob(".work/*/*/shard_*.parquet"))
        return {path: path.stat().st_mtime_ns for path in files}

    context = multiprocessing.get_context("forkserver")  # whose processes begin at once
    context.set_forkserver_preload(["scripts.prepare_data"])
    for moment in range(10):
        kept = finished()
        process = context.Process(target=main, args=[[f"--out_dir={out}", f"--workers={1 + (moment < 2)}", *flags]])
        process.start()
        while process.is_alive() and len(finished()) < len(kept) + 1 + moment:
            time.sleep(0.001)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert not (out / "val").exists(), "a corpus that is not finished must not be found by training"
        deadline = time.monotonic() + 60
        while any(Path(f"/proc/{child}").exists() for child in children):
            assert time.monotonic() < deadline, "workers outlive the process that was killed"
            time.sleep(0.05)
        assert kept.items() <= finished().items(), "what was whole was made again"
    assert list(out.glob(".work/*/base_data_v3/shard_*.parquet")), "all kills were before the first shard"
    next(out.glob(".work/*/val/")).joinpath("shard_00000.parquet.1_a.partial").touch()
    stats = next(out.glob(".work/*/scans/*/stats.json"))
    stats.with_name("run_00009.parquet").write_bytes(next(stats.parent.glob("run_*.parquet")).read_bytes())
    stats.unlink()  # as if it had been killed after another run
    assert prepare(out, *flags) == whole
    assert shard_hashes(out) == shard_hashes(tmp_path / "whole")
    assert {path.name for path in out.iterdir()} == {"base_data_v3", "val", "manifest.json", ".prepare_data.lock"}
    assert not list(out.rglob("*.partial"))


def test_killed_while_it_publishes_it_resumes(tmp_path, monkeypatch, flags):
    prepare(tmp_path / "whole", *flags)
    real_replace = os.replace

    def replace(source, target):
        if Path(source).name == "val":
            raise KeyboardInterrupt
        real_replace(source, target)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("os.replace", replace)
        prepare(tmp_path / "out", *flags)
    assert (tmp_path / "out" / "base_data_v3").exists() and not (tmp_path / "out" / "manifest.json").exists()
    prepare(tmp_path / "out", *flags)
    assert shard_hashes(tmp_path / "out") == shard_hashes(tmp_path / "whole")


def test_the_corpus_may_lie_beside_its_sources_and_in_an_ignored_folder_of_a_checkout(tmp_path):
    one, two = (make_project(tmp_path, name) for name in ("one", "two"))
    subprocess.run(["git", "init", "-q"], cwd=one, check=True)
    subprocess.run(["git", "add", "src"], cwd=one, check=True)
    before = None
    for out in (tmp_path, one / "corpus"):
        prepare(out, f"--source={one},{two}", "--val_projects=two")
        assert before in (None, shard_hashes(out))
        before = shard_hashes(out)


def test_a_corpus_that_is_there_is_not_made_again_unless_its_shards_are_gone(tmp_path, capsys, flags):
    out, other = tmp_path / "out", [*flags, "--seed=2"]
    flags = [*flags, "--shard_bytes=5000"]
    manifest = prepare(out, *flags)
    before = shard_hashes(out)
    assert {name: shard["sha256"] for name, shard in manifest["shards"].items()} == before
    prepare(out, *flags)
    assert "already holds this corpus" in capsys.readouterr().out
    with pytest.raises(BadInput, match="holds other data"):
        prepare(out, *other)
    assert shard_hashes(out) == before
    (out / "val" / "shard_00000.parquet").rename(tmp_path / "moved")
    with pytest.raises(BadInput, match="base_data_v3 holds other data, or not all of this"):
        prepare(out, *flags)
    shutil.rmtree(out / "base_data_v3")
    shutil.rmtree(out / "val")
    prepare(out, *flags)
    assert shard_hashes(out) == before
    assert "already holds" not in capsys.readouterr().out


def test_a_project_of_source_is_held_out_only_if_it_is_named_and_the_choice_is_said_before(tmp_path, capsys):
    mine = make_project(tmp_path, "mine", files=1)
    for name in ("a", "b", "c"):
        make_project(tmp_path / "in", name, files=20)
    for seed in range(3):
        made = prepare(tmp_path / str(seed), f"--source={mine}", f"--projects_dir={tmp_path / 'in'}", f"--seed={seed}",
                       "--val_fraction=0.01")  # in which only `mine` fits
        output = capsys.readouterr().out
        assert set(made["val_projects"]) <= {"a", "b", "c"}
        assert output.startswith(f"held out for validation, not trained on: {', '.join(made['val_projects'])} (--val_")
    made = prepare(tmp_path / "named", f"--source={mine}", f"--projects_dir={tmp_path / 'in'}", "--val_projects=mine")
    assert made["val_projects"] == ["mine"]


@pytest.mark.parametrize("files", [2, 40])
def test_a_part_of_the_only_project_is_held_out_and_said(tmp_path, capsys, files):
    mine = make_project(tmp_path, "mine-1.2", files=files)
    (mine / "huge.cpp").write_text("int x;\n" * 200_000)  # takes no part in the choice
    made = prepare(tmp_path / "out", f"--source={mine}")
    output = capsys.readouterr().out
    assert f"of its {files} files are held out" in output
    assert f"\nread {files + 1} files; dropped 1 over_long\n" in output
    totals = {name: part["documents"] for name, part in made["totals"].items()}
    assert totals["base_data_v3"] + totals["val"] == files and 1 <= totals["val"] <= max(1, files // 10)
    again = prepare(tmp_path / "again", f"--source={mine}")
    assert again["shards"] == made["shards"]


def test_an_unknown_name_of_val_projects_is_refused_before_anything_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr("nanochat.corpus.build.scan_all", pytest.fail)
    with pytest.raises(BadInput, match="--val_projects: no project is called other; there are mine"):
        prepare(tmp_path / "out", f"--source={make_project(tmp_path, 'mine')}", "--val_projects=other")


@pytest.mark.parametrize("prevent, message", [
    (lambda out: (out / "base_data_v3").symlink_to(out), "base_data_v3 holds other data, .* or is a link"),
    (lambda out: (out / "val").symlink_to("nowhere"), "val holds other data"),
    (lambda out: (out / "val").touch(), "val holds other data"),
    (lambda out: (out / "manifest.json").mkdir(), "manifest.json is not a manifest"),
    (lambda out: (out / "manifest.json").write_text("{"), "manifest.json is not a manifest"),
    (lambda out: (out / "manifest.json").write_text("[]"), "manifest.json is not a manifest"),
    (lambda out: (out / ".work").touch(), "Not a directory|File exists"),
    (lambda out: (out / ".prepare_data.lock").mkdir(), "Is a directory"),
])
def test_what_is_in_the_way_in_the_folder_is_named_before_the_work(tmp_path, monkeypatch, flags, prevent, message):
    (tmp_path / "out").mkdir()
    prevent(tmp_path / "out")
    before = sorted((tmp_path / "out").rglob("*"))
    monkeypatch.setattr("nanochat.corpus.build.scan", None)
    with pytest.raises(BadInput, match=message):
        prepare(tmp_path / "out", *flags)
    assert [path for path in before if path not in (tmp_path / "out").rglob("*")] == []


def test_a_disk_that_fills_is_one_line_and_the_same_command_resumes(tmp_path):
    """On a real file system of 600 kB, while shutil.disk_usage tells of another that has room."""
    if os.geteuid() or subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("only root may mount a file system")
    make_project(tmp_path / "in", "big", files=300, lines=150)
    make_project(tmp_path / "in", "v", files=1)
    (tmp_path / "out").mkdir()
    (tmp_path / "program.py").write_text(f"""
import shutil, sys
from nanochat.common import run_script
from scripts.prepare_data import main
usage = shutil.disk_usage
shutil.disk_usage = lambda path: usage({str(tmp_path)!r})
if __name__ == "__main__":
    run_script(main)
""")
    command = f"{sys.executable} program.py --projects_dir=in --out_dir=out --val_projects=v --workers"
    script = f"""
mount -t tmpfs -o size=600k none out || exit
for workers in 1 2; do {command}=$workers; echo status $?; done
mount -o remount,size=60m out || exit
{command}=1; echo status $?
find out -name '*.parquet' | wc -l
"""
    run = subprocess.run(["unshare", "--mount", "--propagation=private", "sh", "-c", script], capture_output=True,
                         cwd=tmp_path, text=True, timeout=120, env={**os.environ, "PYTHONPATH": str(Path.cwd())})
    assert re.findall(r"^status \d", run.stdout, re.MULTILINE) == ["status 2", "status 2", "status 0"], run.stderr
    errors = [line for line in run.stderr.splitlines() if not re.match("reading|ordering|writing|looking", line)]
    assert [line[:23] for line in errors] == ["error: the disk is full"] * 2
    assert run.stdout.splitlines()[-1] == "2"


@pytest.mark.parametrize("flags, message", [
    ([], "no sources"),
    (["--source={nothing}/x"], "not a directory, a git checkout or a tarball"),
    (["--projects_dir={nothing}/x"], "is not a directory"),
    (["--source={one},{two}"], "no project can be held out for validation of one, two: .* with --val_projects"),
    (["--source={one},{two}", "--val_projects=one,two"], "names every project"),
    (["--source={one},{two}", "--val_fraction=1.5"], "is not a number above 0 and below 1"),
    (["--source={one},{copy}", "--val_projects=one"], "copies of others, none is left for base_data_v3/: add"),
    (["--source={nothing}"], "nothing has neither C or C\\+\\+ files nor parquet"),
    (["--debian_source=fmtlib"], "--debian_source=fmtlib is gone: .* --projects_dir"),
    (["--source={one}", "--eval_only", "--val_projects=one"], "exclude each other"),
    (["--source={one},{two}", "--out_dir={one}/corpus"], "one/corpus is in .*/one, which is read as a source"),
    (["--projects_dir={one}/..", "--out_dir={two}/.."], "is in .*, which is read as a source"),
    (["--source=~nobody_of_this_name/x"], "~nobody_of_this_name/x has no home directory"),
    (["--ray_open"], "--ray_open is gone: .* leave it out"),
    (["--source={one}", "--shard_bytes=0"], "is not a whole number of at least 1"),
    (["--source={one}", "--workers=0"], "is not a whole number of at least 1 and of at most 1000, or -1"),
])
def test_bad_input_is_one_line(tmp_path, flags, message):
    paths = {name: make_project(tmp_path / "in", name, seed=seed)
             for name, seed in (("one", "one"), ("two", "two"), ("copy", "one"))}
    paths["nothing"] = tmp_path / "in" / "nothing"
    paths["nothing"].mkdir()
    (paths["nothing"] / "README").write_text("nothing")
    with pytest.raises(BadInput, match=message):
        prepare(tmp_path / "out", *(flag.format(**paths) for flag in flags))
    assert not (tmp_path / "out" / "base_data_v3").exists()


def test_a_path_that_cannot_be_shown_or_written_is_no_traceback(tmp_path, flags):
    command = [sys.executable, "-m", "scripts.prepare_data", *flags, "--workers=1"]
    run = subprocess.run([*command, f"--out_dir={tmp_path}/é"], capture_output=True, text=True,
                         env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert run.returncode == 0 and f"{tmp_path}/\\xe9/val: 6 documents" in run.stdout, run.stderr
    with pytest.raises(BadInput, match="its name is not UTF-8"):
        prepare(tmp_path / os.fsdecode(b"\xff"), *flags)
    assert not (tmp_path / os.fsdecode(b"\xff")).exists()


def test_a_disk_without_room_and_one_that_another_run_uses_are_said_before_the_work(tmp_path, monkeypatch, flags):
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch, pytest.raises(BadInput, match="has 0 MB free"):
        patch.setattr("shutil.disk_usage", lambda path: usage._replace(free=100))
        prepare(tmp_path / "out", *flags)
    with FileLock(tmp_path / "out" / ".prepare_data.lock"), pytest.raises(BadInput, match="another prepare_data is"):
        prepare(tmp_path / "out", *flags)
