"""Source packages and their licences, from a real apt repository on disk and from the distribution."""
import gzip
import hashlib
import shutil
from pathlib import Path

import pytest

from nanochat.common import BadInput
from nanochat.corpus import debian, sources
from nanochat.corpus.scan import licence_finder
from tests.corpus.projects import LICENCE_MIT, cpp, make_tar, prepare, read, shard_hashes

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


def test_deb_becomes_deb_src_in_both_formats():
    one_line = ("# deb http://x y z\ndeb cdrom:[Debian]/ bookworm main\n"
                "deb [arch=amd64] http://a bookworm main\ndeb-src http://b sid main\n")
    assert debian.deb_to_deb_src(one_line) == "deb-src [arch=amd64] http://a bookworm main\ndeb-src http://b sid main\n"
    ubuntu = "Types: deb\nURIs: http://archive.ubuntu.com/ubuntu/\nSuites: noble\nComponents: main universe\n"
    assert debian.deb_to_deb_src(ubuntu) == ubuntu.replace("deb\n", "deb-src\n", 1)
    assert debian.deb_to_deb_src("# empty\n") == ""


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
    """A repository on disk that apt knows only through a sources.list with `deb` lines."""
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
    documents = {document["path"]: document for document in read(tmp_path / "out", "base_data_v3")}
    assert set(documents) == {"src/0.c", "src/1.c", "src/2.c", "src/3.c", "extra/lib/x.cc"}
    assert documents["src/0.c"]["source"] == "tool=1.0-2" and documents["src/0.c"]["licence"] == "Expat"
    assert documents["extra/lib/x.cc"]["licence"] == "Apache-2.0"
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


def test_a_package_in_the_cache_must_be_whole_and_have_its_sums(tmp_path, apt_repository):
    cached = tmp_path / "downloads" / "debian" / "tool"
    prepare(tmp_path / "out", "--debian_source=tool,alpha2.0", "--val_projects=alpha")
    extra = cached / "tool_1.0.orig-extra.tar.gz"
    content = extra.read_bytes()
    make_tar(extra, {"whatever/lib/x.cc": b"int changed;"})
    with pytest.raises(BadInput, match=r"orig-extra\.tar\.gz is truncated or corrupt \(its SHA-256 is"):
        prepare(tmp_path / "again", "--debian_source=tool,alpha2.0", "--val_projects=alpha")
    for damage in (extra, cached / "tool_1.0-2.dsc"):
        damage.unlink()
        with pytest.raises(BadInput, match=rf"not a whole source package \(({damage.name}|its \.dsc) is missing"):
            prepare(tmp_path / "again", "--debian_source=tool,alpha2.0", "--val_projects=alpha")
        extra.write_bytes(content)


def test_unknown_package_is_named(tmp_path, apt_repository):
    with pytest.raises(BadInput, match="Unable to find a source package for nonesuch"):
        prepare(tmp_path / "out", "--debian_source=tool,nonesuch")


def test_licence_of_a_file_is_that_of_the_last_rule_that_matches(tmp_path):
    make_tar(tmp_path / "t_1.debian.tar.xz", {"debian/copyright": COPYRIGHT.encode()})
    licence_of = licence_finder(sources.archive_source("t", [tmp_path / "t_1.debian.tar.xz"]))
    assert [licence_of(path) for path in ("a.c", "src/b/c.c", "src/special.c", "lib/a.cc", "lib/ab.cc")] == [
        "Apache-2.0", "Expat", "Zlib", "Expat", "Apache-2.0"]


def test_copyright_is_found_in_the_diff_of_format_1(tmp_path):
    diff = "--- t-1.orig/debian/rules\n+++ t-1/debian/rules\n@@ -0,0 +1 @@\n+all:\n--- t-1.orig/debian/copyright\n"
    diff += "+++ t-1/debian/copyright\n@@ -0,0 +1,9 @@\n" + "".join(f"+{line}\n" for line in COPYRIGHT.splitlines())
    (tmp_path / "t_1-1.diff.gz").write_bytes(gzip.compress(diff.encode()))
    licence_of = licence_finder(sources.archive_source("t", [tmp_path / "t_1-1.diff.gz"]))
    assert licence_of("src/a.c") == "Expat"


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
