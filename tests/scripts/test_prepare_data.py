"""scripts/prepare_data.py with real parquet, real tarballs, a real git checkout and a real apt repository."""
import gzip
import hashlib
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from filelock import FileLock

from nanochat.common import BadInput
from nanochat.data import corpus, debian, sources
from scripts.prepare_data import main

LICENCE_MIT = "Permission is hereby granted, free of charge, to any person obtaining a copy"


def cpp(seed, lines=40):
    """C++ that shares no sequence of five words with another seed's."""
    rng = random.Random(seed)
    return "".join(f"int f{rng.getrandbits(40):x}(int a{rng.getrandbits(40):x}) {{ return {rng.choice('abc')}; }}\n"
                   for _ in range(lines))


def make_project(parent, name, files=6, seed=None):
    directory = parent / name
    for number in range(files):
        path = directory / "src" / f"file{number}.cpp"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(cpp(f"{seed or name}{number}"))
    return directory


def make_tar(path, members):
    """A tarball of {name: bytes}; .zst through pyarrow, which Python's tarfile does not know."""
    kind = path.suffix[1:]
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w" if kind == "zst" else f"w:{kind}") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    data = raw.getvalue()
    path.write_bytes(pa.Codec("zstd").compress(data, asbytes=True) if kind == "zst" else data)
    return path


def read(out_dir, side):
    return [row for path in sorted((out_dir / side).iterdir()) for row in pq.read_table(path).to_pylist()]


def shard_hashes(out_dir):
    return {str(path.relative_to(out_dir)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(out_dir.rglob("shard_*.parquet"))}


def manifest(out_dir):
    return json.loads((out_dir / "manifest.json").read_text())


def prepare(out_dir, *flags):
    main([f"--out_dir={out_dir}", f"--cache_dir={out_dir.parent / 'downloads'}", "--workers=1", *map(str, flags)])
    return manifest(out_dir)


# -----------------------------------------------------------------------------
# Corpus


def test_no_project_is_on_both_sides_whatever_its_versions(tmp_path):
    for name in "abcdefgh":
        make_project(tmp_path / "in", f"{name}-1.0", seed=name)
        make_project(tmp_path / "in", f"{name}-2.1.3", seed=f"{name}2")
    prepare(tmp_path / "out", f"--projects_dir={tmp_path / 'in'}", "--val_fraction=0.3")
    sides = [{row["source"][0] for row in read(tmp_path / "out", side)} for side in ("base_data_v3", "val")]
    assert all(sides) and not sides[0] & sides[1] and sides[0] | sides[1] == set("abcdefgh")


def test_validation_is_about_the_fraction_and_at_least_one_project():
    projects = {f"p{i}": 1000 + i for i in range(100)}
    for seed in range(5):
        chosen = sum(projects[name] for name in corpus.choose_validation(projects, 0.1, seed))
        assert 0.05 <= chosen / sum(projects.values()) <= 0.1
    assert corpus.choose_validation({"large": 100, "small": 10}, 0.01, seed=0) == {"small"}


def test_shards_have_the_columns_small_row_groups_and_a_shuffled_order(tmp_path):
    for name in "ab":
        make_project(tmp_path / "in", name, files=300)
    make_project(tmp_path / "in", "v", files=3)
    prepare(tmp_path / "out", f"--projects_dir={tmp_path / 'in'}", "--val_projects=v")
    shard, = (tmp_path / "out" / "base_data_v3").iterdir()
    file = pq.ParquetFile(shard)
    assert file.schema_arrow.names == ["text", "path", "source", "licence"]
    assert [file.metadata.row_group(i).num_rows for i in range(3)] == [256, 256, 88]
    assert file.metadata.row_group(0).column(0).compression == "ZSTD"
    first_half = Counter(row["source"] for row in read(tmp_path / "out", "base_data_v3")[:300])
    assert min(first_half["a"], first_half["b"]) > 100


def test_same_bytes_for_any_number_of_workers_and_order_of_flags(tmp_path):
    projects = [make_project(tmp_path / "in", name) for name in ("a", "b", "c", "d")]
    flags = ["--shard_bytes=10000", "--seed=5", "--val_fraction=0.3"]
    for workers, order in ((1, projects), (2, projects[::-1])):
        main([f"--out_dir={tmp_path / str(workers)}", f"--workers={workers}", *flags,
              f"--source={','.join(map(str, order))}"])
    assert shard_hashes(tmp_path / "1") == shard_hashes(tmp_path / "2")
    assert len(shard_hashes(tmp_path / "1")) > 3
    prepare(tmp_path / "other_seed", *flags, "--seed=6", f"--projects_dir={tmp_path / 'in'}")
    assert shard_hashes(tmp_path / "1") != shard_hashes(tmp_path / "other_seed")


def test_killed_anywhere_it_goes_on_and_gives_the_same_bytes(tmp_path):
    for number in range(40):
        make_project(tmp_path / "in", f"p{number}", files=20)
    flags = [f"--projects_dir={tmp_path / 'in'}", "--shard_bytes=10000"]
    prepare(tmp_path / "whole", *flags)
    out = tmp_path / "out"

    def run_until(pattern, workers):
        """Runs the command and kills it as soon as three paths match; returns the files finished by then."""
        process = subprocess.Popen([sys.executable, "-m", "scripts.prepare_data", f"--out_dir={out}",
                                    f"--workers={workers}", *flags], stdout=subprocess.DEVNULL)
        while process.poll() is None and len(list(out.glob(pattern))) < 3:
            time.sleep(0.001)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.kill()
        assert process.wait() == -signal.SIGKILL
        assert not (out / "val").exists(), "a corpus that is not finished must not be found by training"
        deadline = time.monotonic() + 20
        while any(Path(f"/proc/{child}").exists() for child in children):
            assert time.monotonic() < deadline, "workers outlive the process that was killed"
            time.sleep(0.05)
        finished = [path for path in (out / ".work").rglob("*.parquet") if "partial" not in str(path)]
        return {path: path.stat().st_mtime_ns for path in finished}

    scanned = run_until(".work/scans/*/stats.json", workers=2)
    written = run_until(".work/*/base_data_v3/shard_*.parquet", workers=1)
    assert len([path for path in scanned if "scans" in str(path)]) >= 3
    assert scanned.items() <= written.items(), "finished scans were done again"
    (out / ".work" / "scans" / "x.partial").mkdir()
    prepare(out, *flags)
    assert shard_hashes(out) == shard_hashes(tmp_path / "whole")
    assert {path.name for path in out.iterdir()} == {"base_data_v3", "val", "manifest.json", ".prepare_data.lock"}


def test_killed_while_it_publishes_it_goes_on(tmp_path, monkeypatch):
    for name in "ab":
        make_project(tmp_path / "in", name)
    flags = [f"--projects_dir={tmp_path / 'in'}"]
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


def test_second_run_does_nothing_and_other_data_is_never_overwritten(tmp_path, capsys):
    for name in "ab":
        make_project(tmp_path / "in", name)
    flags = [f"--projects_dir={tmp_path / 'in'}"]
    prepare(tmp_path / "out", *flags)
    before = shard_hashes(tmp_path / "out")
    prepare(tmp_path / "out", *flags)
    assert "already holds this corpus" in capsys.readouterr().out
    with pytest.raises(BadInput, match="holds other data"):
        prepare(tmp_path / "out", *flags, "--seed=2")
    assert shard_hashes(tmp_path / "out") == before


def test_exact_and_near_duplicates_are_removed_and_validation_stays_whole(tmp_path):
    for name in "abv":
        make_project(tmp_path / "in", name)
    text = cpp("a0")
    (tmp_path / "in/b/copy.cpp").write_text(text)
    (tmp_path / "in/b/similar.cpp").write_text(text.replace("int", "long", 1).replace("\n", "\r\n"))
    (tmp_path / "in/v/in_both.cpp").write_text(cpp("a1"))
    result = prepare(tmp_path / "out", f"--projects_dir={tmp_path / 'in'}", "--val_projects=v")
    assert result["dropped"] == {"exact_duplicate": 2, "near_duplicate": 1}
    assert result["totals"]["val"]["documents"] == 7 and result["totals"]["base_data_v3"]["documents"] == 11


def test_signatures_estimate_the_similarity():
    lines = cpp("x", 400).splitlines()
    whole = np.frombuffer(corpus.signature("\n".join(lines).encode()), np.uint32)
    for changed in (20, 80, 200):
        other = "\n".join(lines[changed:] + cpp(f"y{changed}", changed).splitlines()).encode()
        estimate = (whole == np.frombuffer(corpus.signature(other), np.uint32)).mean()
        assert abs(estimate - (400 - changed) / (400 + changed)) < 0.13  # 3 standard deviations for 128 permutations


def test_dropped_files_are_counted_by_reason(tmp_path):
    project = make_project(tmp_path / "in", "a", files=1)
    make_project(tmp_path / "in", "v", files=1)
    bad = {
        "binary.h": b"\x7fELF\0\0\0", "control.c": b"\x01\x02\x03\x04 int a;",
        "generated.cc": b"// Generated by the protocol buffer compiler\nint a;\n", "moc_x.cpp": b"int a;\n",
        "minified.h": b"int a=b+c;" * 1000 + b"\n", "table.c": b"0x12, 0x34, 0x56,\n" * 99, "empty.h": b" \n\t\n",
        "long.cpp": cpp("long", 400).encode(), "japanese.c": "// これはテストです\n".encode("shift-jis"),
        "README.md": b"# a\n", "script.py": b"print()\n",
    }
    for name, data in bad.items():
        (project / name).write_bytes(data)
    result = prepare(tmp_path / "out", f"--projects_dir={tmp_path / 'in'}", "--max_file_bytes=11000",
                     "--val_projects=v")
    assert {reason: count for reason, count in result["dropped"].items() if count} == {
        "binary": 2, "generated": 2, "minified": 1, "data_table": 1, "empty": 1, "over_long": 1, "not_utf8": 1,
        "not_c_or_cpp": 2}
    assert [source["files"] for source in result["sources"]] == [1 + len(bad), 1]


def test_encodings_are_recoded_to_utf8_and_the_rest_is_left_alone():
    code = "// Stra\u00dfe\n" + cpp("s")
    assert corpus.clean("a.c", code.encode("latin-1")) == (code.encode(), "recoded")
    assert corpus.clean("a.c", code.encode("utf-16")) == (code.encode(), "recoded")
    assert corpus.clean("a.c", b"\xef\xbb\xbf" + code.encode()) == (code.encode(), "")
    assert corpus.clean("a.c", code.replace("\n", "\r\n").encode()) == (code.replace("\n", "\r\n").encode(), "")
    assert corpus.clean("a.c", b"\xff\xfe\x00") == (None, "binary")
    boost_licence = b"// machine-executable object code generated by\n// a source language processor.\nint a;\n"
    assert corpus.clean("a.c", boost_licence) == (boost_licence, "")


# -----------------------------------------------------------------------------
# Sources


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
    assert source.label == f"tool={head[:12]}" and sources.licence_finder(source)("src/file0.cpp") == "Expat"


@pytest.mark.parametrize("suffix", ["tar.gz", "tar.bz2", "tar.xz", "tar.zst"])
def test_tarballs_are_read_as_streams(tmp_path, suffix):
    inner = make_tar(tmp_path / "inner.tar.gz", {"inner-2/lib/b.cc": b"int b;"})
    path = make_tar(tmp_path / f"thing-1.0.{suffix}", {
        "thing-1.0/LICENSE": LICENCE_MIT.encode(), "thing-1.0/src/a.cc": b"int a;",
        "thing-1.0/inner-2.tar.gz": inner.read_bytes()})
    source = sources.open_source(path)
    assert {name: read() for name, _, read in sources.iter_files(source)} == {
        "LICENSE": LICENCE_MIT.encode(), "src/a.cc": b"int a;", "lib/b.cc": b"int b;"}
    assert source.project == "thing" and sources.licence_finder(source)("src/a.cc") == "Expat"


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


# -----------------------------------------------------------------------------
# Debian


@pytest.mark.parametrize("name, project", [
    ("llvm-toolchain-14", "llvm-toolchain"), ("boost1.81", "boost"), ("glib2.0", "glib"), ("sqlite3", "sqlite3"),
    ("nlohmann-json3", "nlohmann-json3"), ("fmt-9.1.0+ds1", "fmt"), ("box2d", "box2d"), ("torch/c10", "torch/c10")])
def test_versions_in_a_name_do_not_make_another_project(name, project):
    assert sources.Source(name).project == project


def test_deb_becomes_deb_src_in_both_formats():
    one_line = ("# deb http://x y z\ndeb cdrom:[Debian]/ bookworm main\n"
                "deb [arch=amd64] http://a bookworm main\ndeb-src http://b sid main\n")
    assert debian.deb_to_deb_src(one_line) == "deb-src [arch=amd64] http://a bookworm main\ndeb-src http://b sid main\n"
    ubuntu = "Types: deb\nURIs: http://archive.ubuntu.com/ubuntu/\nSuites: noble\nComponents: main universe\n"
    assert debian.deb_to_deb_src(ubuntu) == ubuntu.replace("deb\n", "deb-src\n", 1)
    assert debian.deb_to_deb_src("# empty\n") == ""


COPYRIGHT = f"""Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/

Files: *
Copyright: A
License: Apache-2.0

Files: src/*
 lib/?.cc
Copyright: B
License: {"Expat"}
 {LICENCE_MIT}

Files: src/special.c
License: Zlib
"""


def checksum_line(path):
    return f" {hashlib.sha256(path.read_bytes()).hexdigest()} {path.stat().st_size} {path.name}\n"


def make_package(pool, name, version, archives):
    pool.mkdir(exist_ok=True)
    paths = [make_tar(pool / file, members) for file, members in archives.items()]
    hashes = "".join(map(checksum_line, paths))
    fields = f"Format: 3.0 (quilt)\nSource: {name}\nBinary: {name}\nArchitecture: any\nVersion: {version}\n"
    dsc = pool / f"{name}_{version}.dsc"
    dsc.write_text(f"{fields}Checksums-Sha256:\n{hashes}")
    fields = fields.replace("Source:", "Package:")
    return f"{fields}Directory: pool\nChecksums-Sha256:\n{hashes}{checksum_line(dsc)}\n"


@pytest.fixture
def apt_repository(tmp_path, monkeypatch):
    """A repository on disk that the machine's apt knows only through a sources.list with `deb`."""
    if not shutil.which("apt-get"):
        pytest.skip("this machine has no apt-get")
    root = tmp_path / "repository"
    root.mkdir()
    index = make_package(root / "pool", "tool", "1.0-2", {
        "tool_1.0.orig.tar.gz": {f"tool-1.0/src/{i}.c": cpp(f"tool{i}").encode() for i in range(4)},
        "tool_1.0.orig-extra.tar.gz": {"whatever/lib/x.cc": cpp("extra").encode()},
        "tool_1.0-2.debian.tar.xz": {"debian/copyright": COPYRIGHT.encode()}})
    for name in ("zebra", "alpha2.0"):
        index += make_package(root / "pool", name, "3", {f"{name}_3.tar.xz": {f"{name}/a.c": cpp(name).encode()}})
    (root / "Sources").write_text(index)
    digest = hashlib.sha256(index.encode()).hexdigest()
    (root / "Release").write_text(f"Suite: test\nSHA256:\n {digest} {len(index)} Sources\n")
    etc = tmp_path / "etc"
    (etc / "parts").mkdir(parents=True)
    (etc / "sources.list").write_text(f"deb [trusted=yes] copy:{root} ./\n")
    (etc / "apt.conf").write_text(f'Dir::Etc::sourcelist "{etc}/sources.list";\nDir::Etc::sourceparts "{etc}/parts";\n')
    monkeypatch.setenv("APT_CONFIG", str(etc / "apt.conf"))
    return etc


def test_debian_source_is_downloaded_by_apt_with_licence_and_version(tmp_path, apt_repository):
    before = {path: path.read_bytes() for path in apt_repository.rglob("*") if path.is_file()}
    result = prepare(tmp_path / "out", "--debian_source=tool,alpha2.0", "--val_projects=alpha")
    rows = {row["path"]: row for row in read(tmp_path / "out", "base_data_v3")}
    assert set(rows) == {"src/0.c", "src/1.c", "src/2.c", "src/3.c", "extra/lib/x.cc"}
    assert rows["src/0.c"]["source"] == "tool=1.0-2" and rows["src/0.c"]["licence"] == "Expat"
    assert rows["extra/lib/x.cc"]["licence"] == "Apache-2.0"
    tool = next(source for source in result["sources"] if source["name"] == "tool")
    assert tool["version"] == "1.0-2" and tool["licences"] == {"Expat": 4, "Apache-2.0": 1}
    assert before == {path: path.read_bytes() for path in apt_repository.rglob("*") if path.is_file()}
    shutil.rmtree(tmp_path / "repository")  # the cache is enough from now on
    prepare(tmp_path / "again", "--debian_source=tool,alpha2.0", "--val_projects=alpha")
    assert shard_hashes(tmp_path / "again") == shard_hashes(tmp_path / "out")


def test_reserved_packages_are_refused_unless_for_evaluation(tmp_path, apt_repository):
    with pytest.raises(BadInput, match="zebra is reserved for evaluation"):
        prepare(tmp_path / "out", "--debian_source=tool,zebra")
    prepare(tmp_path / "out", "--debian_source=zebra", "--eval_only")
    assert [path.name for path in (tmp_path / "out").iterdir() if path.is_dir()] == ["val"]
    assert read(tmp_path / "out", "val")[0]["source"] == "zebra=3"


def test_unknown_package_is_named(tmp_path, apt_repository):
    with pytest.raises(BadInput, match="Unable to find a source package for nonesuch"):
        prepare(tmp_path / "out", "--debian_source=tool,nonesuch")


def test_licence_of_a_file_is_that_of_the_last_rule_that_matches(tmp_path):
    make_tar(tmp_path / "t_1.debian.tar.xz", {"debian/copyright": COPYRIGHT.encode()})
    licence_of = sources.licence_finder(sources.archive_source("t", [tmp_path / "t_1.debian.tar.xz"]))
    assert [licence_of(path) for path in ("a.c", "src/b/c.c", "src/special.c", "lib/a.cc", "lib/ab.cc")] == [
        "Apache-2.0", "Expat", "Zlib", "Expat", "Apache-2.0"]


def test_copyright_is_found_in_the_diff_of_format_1(tmp_path):
    diff = "--- t-1.orig/debian/rules\n+++ t-1/debian/rules\n@@ -0,0 +1 @@\n+all:\n--- t-1.orig/debian/copyright\n"
    diff += "+++ t-1/debian/copyright\n@@ -0,0 +1,9 @@\n" + "".join(f"+{line}\n" for line in COPYRIGHT.splitlines())
    (tmp_path / "t_1-1.diff.gz").write_bytes(gzip.compress(diff.encode()))
    licence_of = sources.licence_finder(sources.archive_source("t", [tmp_path / "t_1-1.diff.gz"]))
    assert licence_of("src/a.c") == "Expat"


def test_spdx_tag_of_a_file_counts_more_than_the_package(tmp_path):
    project = make_project(tmp_path / "in", "a", files=1)
    (project / "src/b.cpp").write_text("// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception\n" + cpp("b"))
    make_project(tmp_path / "in", "v")
    prepare(tmp_path / "out", f"--projects_dir={tmp_path / 'in'}", "--val_projects=v")
    assert {row["path"]: row["licence"] for row in read(tmp_path / "out", "base_data_v3")} == {
        "src/file0.cpp": "unknown", "src/b.cpp": "Apache-2.0 WITH LLVM-exception"}


def test_real_package_from_the_distribution(tmp_path):
    if not Path("/etc/debian_version").exists():
        pytest.skip("not Debian or Ubuntu")
    try:
        result = prepare(tmp_path / "out", "--debian_source=fmtlib", "--eval_only")
    except BadInput as error:
        if "check the network" in str(error):
            pytest.skip(str(error))
        raise
    assert result["totals"]["val"]["documents"] > 50 and "unknown" not in result["sources"][0]["licences"]


# -----------------------------------------------------------------------------
# Bad input


@pytest.mark.parametrize("flags, message", [
    ([], "no sources"),
    (["--source=/nonexistent"], "not a directory, a git checkout or a tarball"),
    (["--projects_dir=/nonexistent"], "is not a directory"),
    (["--source={one}"], "all files are of one project"),
    (["--source={one},{two}", "--val_projects=three"], "no project is called three"),
    (["--source={one},{two}", "--val_projects=one,two"], "names every project"),
    (["--source={one},{two}", "--val_fraction=1.5"], "not between 0 and 1"),
    (["--source={one},{copy}", "--val_projects=one"], "is a copy of a validation document"),
    (["--source={nothing}"], "no C or C\\+\\+ file is left"),
    (["--debian_source=no such"], "is not the name of a source package"),
    (["--source={one}", "--eval_only", "--val_projects=one"], "exclude each other"),
    (["--source={one}", "--shard_bytes=0"], "not a positive number"),
    (["--source={one}", "--workers=0"], "not a number of processes"),
])
def test_bad_input_is_one_line(tmp_path, flags, message):
    paths = {name: make_project(tmp_path / "in", name, seed=seed)
             for name, seed in (("one", "one"), ("two", "two"), ("copy", "one"))}
    paths["nothing"] = tmp_path / "in" / "nothing"
    paths["nothing"].mkdir()
    (paths["nothing"] / "README").write_text("nothing")
    with pytest.raises(BadInput, match=message) as error:
        prepare(tmp_path / "out", *(flag.format(**paths) for flag in flags))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out" / "base_data_v3").exists()


def test_bad_input_exits_with_2_and_one_line():
    run = subprocess.run([sys.executable, "-m", "scripts.prepare_data", "--debian-source=zlib"], capture_output=True,
                         text=True)
    assert run.returncode == 2 and run.stdout == ""
    assert run.stderr.startswith("error: --debian_source: zlib is reserved") and run.stderr.count("\n") == 1


def test_full_disk_is_said_before_the_work(tmp_path, monkeypatch):
    make_project(tmp_path / "in", "a")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage._replace(free=100))
    with pytest.raises(BadInput, match="has 0 MB free"):
        prepare(tmp_path / "out", f"--projects_dir={tmp_path / 'in'}")


def test_two_runs_do_not_write_to_one_directory(tmp_path):
    make_project(tmp_path / "in", "a")
    (tmp_path / "out").mkdir()
    with FileLock(tmp_path / "out" / ".prepare_data.lock"), pytest.raises(BadInput, match="another prepare_data"):
        prepare(tmp_path / "out", f"--projects_dir={tmp_path / 'in'}")
