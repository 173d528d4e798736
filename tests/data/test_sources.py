"""Sources: directories, real git checkouts, real tarballs, and the headers of installed packages."""
import subprocess

import pytest

from nanochat.common import BadInput
from nanochat.data import licences, sources
from tests.data.projects import LICENCE_MIT, cpp, make_project, make_tar, prepare, read


def test_git_checkout_gives_tracked_files_and_its_commit(tmp_path):
    checkout = make_project(tmp_path, "tool")
    (checkout / "LICENSE").write_text(LICENCE_MIT)
    git = ["git", "-C", str(checkout), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "all"]):
        subprocess.run([*git, *command], check=True)
    (checkout / "untracked.cpp").write_text("int a;")
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout
    source = sources.open_source(checkout)
    assert source.files == ("LICENSE", *(f"src/file{i}.cpp" for i in range(6)))
    assert source.label == f"tool={head[:12]}" and licences.licence_finder(source)("src/file0.cpp") == "Expat"


@pytest.mark.parametrize("suffix", ["tar.gz", "tar.bz2", "tar.xz", "tar.zst"])
def test_tarballs_are_read_as_streams(tmp_path, suffix):
    inner = make_tar(tmp_path / "inner.tar.gz", {"inner-2/lib/b.cc": b"int b;"})
    path = make_tar(tmp_path / f"thing-1.0.{suffix}", {
        "thing-1.0/LICENSE": LICENCE_MIT.encode(), "thing-1.0/src/a.cc": b"int a;",
        "thing-1.0/inner-2.tar.gz": inner.read_bytes()})
    source = sources.open_source(path)
    assert {name: read() for name, _, read in sources.iter_files(source)} == {
        "LICENSE": LICENCE_MIT.encode(), "src/a.cc": b"int a;", "lib/b.cc": b"int b;"}
    assert source.project == "thing" and licences.licence_finder(source)("src/a.cc") == "Expat"


@pytest.mark.parametrize("suffix", ["tar.gz", "tar.bz2", "tar.xz", "tar.zst"])
def test_truncated_tarball_is_named(tmp_path, suffix):
    members = {"a/LICENSE": LICENCE_MIT.encode(), **{f"a/{i}.c": cpp(i, 1000).encode() for i in range(4)}}
    path = make_tar(tmp_path / f"a.{suffix}", members)
    path.write_bytes(path.read_bytes()[:-20000])
    make_project(tmp_path, "b")
    with pytest.raises(BadInput, match=r"/a\.tar\.\w+ is truncated or corrupt"):
        prepare(tmp_path / "out", f"--source={path},{tmp_path / 'b'}")


def test_installed_headers_are_several_projects_without_generated_operators():
    found = sources.installed_headers()
    files = [f"{source.name}: {file}" for source in found for file in source.files]
    assert any(file.endswith("arrow/api.h") for file in files) and any(file.endswith("ATen/ATen.h") for file in files)
    assert not any("ATen/ops/" in file or "/generated/" in file for file in files)
    assert len({source.project for source in found}) > 5 and all(source.licence != "unknown" for source in found)


@pytest.mark.parametrize("name, project", [
    ("llvm-toolchain-14", "llvm-toolchain"), ("boost1.81", "boost"), ("glib2.0", "glib"), ("sqlite3", "sqlite3"),
    ("nlohmann-json3", "nlohmann-json3"), ("fmt-9.1.0+ds1", "fmt"), ("box2d", "box2d"), ("torch/c10", "torch/c10")])
def test_versions_in_a_name_do_not_make_another_project(name, project):
    assert sources.Source(name).project == project


def test_spdx_tag_of_a_file_counts_more_than_the_package(tmp_path):
    project = make_project(tmp_path / "in", "a", files=1)
    (project / "src/b.cpp").write_text("// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception\n" + cpp("b"))
    make_project(tmp_path / "in", "v")
    prepare(tmp_path / "out", f"--projects_dir={tmp_path / 'in'}", "--val_projects=v")
    assert {document["path"]: document["licence"] for document in read(tmp_path / "out", "base_data_v3")} == {
        "src/file0.cpp": "unknown", "src/b.cpp": "Apache-2.0 WITH LLVM-exception"}
