"""Sources: directories, real git checkouts, real tarballs, and the headers of installed packages."""
import os
import shutil
import subprocess
import time

import pytest

from nanochat.common import BadInput
from nanochat.corpus import sources
from nanochat.corpus.build import CorpusFlags
from nanochat.corpus.scan import licence_of, scan
from nanochat.corpus.tables import open_table
from tests.corpus.projects import LICENCE_MIT, cpp, make_project, make_tar, prepare, read


def run_git(directory, *command):
    git = ["git", "-C", str(directory), "-c", "user.name=a", "-c", "user.email=a@b", *command]
    return subprocess.run(git, check=True, capture_output=True, text=True).stdout


def make_checkout(directory):
    """Makes a git checkout of what is in the directory. Returns its commit."""
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "all"], ["rev-parse", "HEAD"]):
        printed = run_git(directory, *command)
    return printed.strip()


def test_a_checkout_gives_tracked_files_and_its_commit_if_it_has_one(tmp_path, capsys):
    checkout = make_project(tmp_path, "tool")
    (checkout / "LICENSE").write_text(LICENCE_MIT)
    head = make_checkout(checkout)
    source = sources.open_source(checkout)
    assert source.files == ("LICENSE", *(f"src/file{i}.cpp" for i in range(6)))
    assert source.label == f"tool={head[:12]}" and licence_of(source) == "Expat"
    run_git(checkout, "worktree", "add", "-q", str(tmp_path / "linked"))
    assert sources.open_source(tmp_path / "linked").label == f"linked={head[:12]}"
    fresh = make_project(tmp_path, "fresh")
    run_git(fresh, "init", "-q")
    run_git(fresh, "add", ".")
    source = sources.open_source(fresh)
    assert source.version == "" and len(source.files) == 6
    assert capsys.readouterr().out == ""


def test_what_is_left_out_of_a_checkout_is_said(tmp_path, capsys):
    library, checkout = make_project(tmp_path, "library"), make_project(tmp_path, "tool")
    make_checkout(library)
    shutil.copytree(library, checkout / "third_party" / "library")  # git adds it as a submodule
    make_checkout(checkout)
    for name in ("untracked.cpp", "b.H", "c.cc", "d.c", "notes.txt"):
        (checkout / name).write_text("int a;")
    (checkout / "src/file5.cpp").unlink()
    assert sources.open_source(checkout).files == tuple(f"src/file{i}.cpp" for i in range(5))
    submodules, untracked = capsys.readouterr().out.splitlines()
    assert submodules.endswith("left out 1 submodules (name their folders with --source, too): third_party/library")
    assert untracked.endswith("left out 4 C and C++ files that git does not track: b.H, c.cc, d.c …")
    assert len(sources.open_source(checkout / "third_party/library").files) == 6
    shutil.rmtree(checkout / "src")
    (checkout / "src").symlink_to(library / "src")
    assert sources.open_source(checkout).files == ()


def test_a_checkout_runs_no_program_of_its_own(tmp_path, monkeypatch):
    checkout, marker = make_project(tmp_path, "tool"), tmp_path / "ran"
    make_checkout(checkout)
    program = checkout / ".git" / "program"
    program.write_text(f"#!/bin/sh\ntouch '{marker}'\n")
    program.chmod(0o755)
    for hook in ("post-index-change", "fsmonitor-watchman", "query-watchman", "reference-transaction"):
        shutil.copy(program, checkout / ".git" / "hooks" / hook)
    for name in ("core.fsmonitor", "core.pager", "pager.ls-files", "core.sshCommand", "filter.x.clean", "core.editor",
                 "filter.x.process", "diff.external", "diff.x.textconv", "alias.ls-files", "remote.o.uploadpack"):
        run_git(checkout, "config", name, str(program))
    for name, value in {"core.hooksPath": checkout / ".git/hooks", "remote.o.url": f"ext::{program}",
                        "protocol.ext.allow": "always", "extensions.partialClone": "o"}.items():
        run_git(checkout, "config", name, str(value))
    (checkout / ".gitattributes").write_text("* filter=x diff=x\n")
    time.sleep(0.01)
    (checkout / "src/file0.cpp").touch()
    subprocess.run(["git", "-C", str(checkout), "status"], capture_output=True, check=False)
    assert marker.exists(), "the trap does not work"
    marker.unlink()
    assert len(sources.open_source(checkout).files) == 6 and not marker.exists()
    for reference in (checkout / ".git/refs/heads").iterdir():  # a commit that git would have to fetch
        reference.write_text("1" * 40 + "\n")
    assert len(sources.open_source(checkout).files) == 6 and not marker.exists()


def test_the_environment_and_the_folders_above_choose_no_other_repository(tmp_path, monkeypatch, capsys):
    checkout, other = make_project(tmp_path, "tool"), make_project(tmp_path, "other", files=2)
    head = make_checkout(checkout)
    make_checkout(other)
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(other))
    monkeypatch.setenv("GIT_INDEX_FILE", str(other / ".git/index"))
    source = sources.open_source(checkout)
    assert source.version == head[:12] and len(source.files) == 6
    shutil.rmtree(other / "src")
    inside = make_project(other, "inside", files=3)
    (inside / ".git").mkdir()
    assert len(sources.open_source(inside).files) == 3
    assert "git cannot read this checkout (fatal: not a git repository" in capsys.readouterr().out


# -----------------------------------------------------------------------------
# Names


def test_directories_of_one_name_are_two_projects_and_other_names_stay(tmp_path):
    found = [sources.open_source(make_project(tmp_path, path)) for path in ("x/lib", "y/lib", "y/app-1", "z/app-2")]
    tarballs = [make_tar(tmp_path / name, {"lib/a.c": b"int a;"}) for name in ("lib.tar", "other.tar")]
    found += map(sources.open_source, tarballs)
    places = {source.directory or source.archive: source for source in sources.distinguish([*found, *found])}
    assert {os.path.relpath(place, tmp_path): (source.name, source.project) for place, source in places.items()} == {
        "x/lib": ("x/lib", "x/lib"), "y/lib": ("y/lib", "y/lib"), "lib.tar": ("lib", "lib"),
        "y/app-1": ("app-1", "app"), "z/app-2": ("app-2", "app"), "other.tar": ("other", "other")}


def test_a_place_has_one_source_however_it_is_written(tmp_path, monkeypatch):
    project, tarball = make_project(tmp_path, "tool"), make_tar(tmp_path / "t-1.tar.gz", {"t/a.c": b"int a;"})
    (tmp_path / "link").symlink_to(project)
    monkeypatch.chdir(tmp_path)
    ways = [sources.open_source(path) for path in ("tool", "./link", project, "tool/src/..", tarball, "t-1.tar.gz")]
    assert len(set(ways)) == 2 and sources.distinguish(ways) == [ways[0], ways[-1]]


def test_a_name_that_is_not_utf8_is_replaced(tmp_path, capsys):
    project = make_project(tmp_path / "in", os.fsdecode(b"caf\xe9"), seed="x")
    (project / os.fsdecode(b"src/\xff.cpp")).write_text(cpp("y"))
    make_project(tmp_path / "in", "v")
    (tmp_path / "in" / os.fsdecode(b"\xff.zip")).touch()
    result = prepare(tmp_path / "out", f"--projects_dir={tmp_path / 'in'}", "--val_projects=v")
    assert [source["name"] for source in result["sources"]] == ["caf\ufffd", "v"]
    assert "src/\ufffd.cpp" in {document["path"] for document in read(tmp_path / "out", "base_data_v3")}
    assert "left out 1 files that are neither subdirectories nor tarballs: \ufffd.zip" in capsys.readouterr().out


# -----------------------------------------------------------------------------
# What cannot be read


@pytest.mark.parametrize("closed", ["tool", "tool/src", "tool-1.tar.gz", ""])
def test_what_this_user_may_not_read_is_named(as_nobody, closed):
    folder, run = as_nobody
    make_project(folder, "tool")
    make_tar(folder / "tool-1.tar.gz", {"tool/a.c": b"int a;"})
    (folder / closed).chmod(0)
    try:
        with pytest.raises(BadInput, match=r"cannot be read \(Permission denied\): give yourself the right") as error:
            run(lambda: sources.open_projects(folder))
        assert str(folder / closed) in str(error.value)
    finally:
        (folder / closed).chmod(0o700)


def test_a_source_file_that_may_not_be_read_is_counted_and_a_licence_named(as_nobody):
    folder, run = as_nobody
    (make_project(folder, "tool") / "src/file0.cpp").chmod(0)
    (folder / "tool/untracked").mkdir(mode=0)
    assert run(lambda: open_table(folder / "tool")) is None
    (folder / "tool/untracked").rmdir()

    def scan_it(name):
        return run(lambda: scan(sources.open_source(folder / "tool"), folder / name, CorpusFlags(), frozenset()))

    assert scan_it("scan")["dropped"] == {"unreadable": 1}
    (folder / "tool/LICENSE").touch(mode=0)
    with pytest.raises(BadInput, match="LICENSE cannot be read .Permission denied"):
        scan_it("again")


@pytest.mark.parametrize("make", [
    lambda path: path.symlink_to(path), lambda path: path.symlink_to("nowhere"), lambda path: path.write_text("int a;"),
    os.mkfifo, lambda path: path.with_suffix(".zip").touch()])
def test_what_is_no_source_is_named(tmp_path, make):
    make(tmp_path / "x")
    with pytest.raises(BadInput, match=r"is not a directory, a git checkout or a tarball"):
        sources.open_source(next(tmp_path.iterdir()))


def test_a_file_that_vanishes_is_named_and_one_that_grows_is_read_to_its_listed_size(tmp_path):
    project = make_project(tmp_path, "tool")
    source = sources.open_source(project)
    first = sources.iter_files(source)
    path, nbytes, read = next(first)
    with open(project / path, "a") as file:
        file.write(cpp("more"))
    assert len(read()) == nbytes
    (project / "src/file1.cpp").unlink()
    with pytest.raises(BadInput, match=r"file1\.cpp cannot be read .No such file"):
        next(first)


# -----------------------------------------------------------------------------
# Kinds of sources


def test_a_tarball_is_read_as_if_unpacked_there(tmp_path):
    path = make_tar(tmp_path / "thing-1.0.tar.zst", {
        "thing-1.0/LICENSE": LICENCE_MIT.encode(), "thing-1.0/src/a.cc": b"int a;"})
    source = sources.open_source(path)
    assert {name: read() for name, _, read in sources.iter_files(source)} == {
        "LICENSE": LICENCE_MIT.encode(), "src/a.cc": b"int a;"}
    assert source.project == "thing" and licence_of(source) == "Expat"


def test_installed_headers_are_several_projects_without_generated_operators():
    found = sources.installed_headers()
    files = [f"{source.name}: {file}" for source in found for file in source.files]
    assert any(file.endswith("arrow/api.h") for file in files) and any(file.endswith("ATen/ATen.h") for file in files)
    assert not any("ATen/ops/" in file or "/generated/" in file for file in files)
    assert len({source.project for source in found}) > 5 and all(source.licence != "unknown" for source in found)


@pytest.mark.parametrize("name, project", [
    ("llvm-toolchain-14", "llvm-toolchain"), ("boost1.81", "boost"), ("glib2.0", "glib"), ("sqlite3", "sqlite3"),
    ("nlohmann-json3", "nlohmann-json3"), ("fmt-9.1.0+ds1", "fmt"), ("fmt_9.1.0+ds1.orig", "fmt"), ("box2d", "box2d"),
    ("torch/c10", "torch/c10")])
def test_versions_in_a_name_do_not_make_another_project(name, project):
    assert sources.Source(name).project == project
