"""Tarballs: one that is cut or damaged anywhere is an error, and none takes much memory, time or disk."""
import gzip
import io
import subprocess
import tarfile
import tracemalloc

import pytest

from nanochat.common import BadInput
from nanochat.corpus import archives
from nanochat.corpus.scan import licence_finder
from nanochat.corpus.sources import archive_source, iter_files
from tests.corpus.projects import LICENCE_MIT, cpp, make_tar

KINDS = ["tar", "tar.gz", "tar.bz2", "tar.xz", "tar.zst"]
NUM_FILES = 40
FILES = {f"a/{number}.c": cpp(number, 3).encode() for number in range(NUM_FILES)}
FILE_BLOCKS = 2  # of 512 bytes: a header, and three lines of text


def files_of(path):
    """Returns {path: bytes} of all files in an archive."""
    return {name: read() for name, _, read in archives.iter_archive(str(path))}


@pytest.fixture(scope="module")
def tarball(tmp_path_factory):
    """The bytes of a tarball without compression, made once."""
    path = make_tar(tmp_path_factory.mktemp("tarball") / "a.tar", FILES)
    assert len(files_of(path)) == NUM_FILES
    return path.read_bytes()


@pytest.mark.parametrize("kind", KINDS)
def test_an_archive_cut_anywhere_is_an_error(tmp_path, kind):
    whole = make_tar(tmp_path / f"whole.{kind}", FILES).read_bytes()
    assert len(files_of(tmp_path / f"whole.{kind}")) == NUM_FILES
    end = NUM_FILES * FILE_BLOCKS * 512 if kind == "tar" else len(whole)  # a tarball has more zeros than it needs
    cuts = {1, 512, 1024, end - 1, end - 4, end - 8, end - 12, end, *range(0, end, end // 16)}
    for cut in sorted(cuts - {len(whole)}):
        path = tmp_path / f"cut.{kind}"
        path.write_bytes(whole[:cut])
        with pytest.raises(BadInput, match=r"cut\.tar\S* is truncated or corrupt"):
            files_of(path)


@pytest.mark.parametrize("damage", [b"\xff", b"\0" * 512])
def test_a_damaged_header_in_the_middle_is_an_error(tmp_path, tarball, damage):
    data = bytearray(tarball)
    header = NUM_FILES // 2 * FILE_BLOCKS * 512
    data[header:header + len(damage)] = damage
    for name, packed in {"a.tar": data, "a.tar.gz": gzip.compress(data)}.items():
        (tmp_path / name).write_bytes(packed)
        with pytest.raises(BadInput, match=r"a\.tar\S* is truncated or corrupt \(the header at byte \d+ is damaged"):
            files_of(tmp_path / name)


def test_the_sum_at_the_end_of_the_stream_is_compared(tmp_path, tarball):
    data = bytearray(gzip.compress(tarball))
    data[-8] ^= 1  # of CRC-32
    (tmp_path / "a.tar.gz").write_bytes(data)
    with pytest.raises(BadInput, match="truncated or corrupt .CRC"):
        files_of(tmp_path / "a.tar.gz")


def test_of_two_archives_one_after_the_other_both_are_read(tmp_path, tarball):
    (tmp_path / "a.tar").write_bytes(make_tar(tmp_path / "b.tar", {"b/x.c": b"int x;"}).read_bytes() + tarball)
    assert len(files_of(tmp_path / "a.tar")) == NUM_FILES + 1


def zeros(path, name, nbytes):
    """Writes a tarball of one file of zeros, which need no memory."""
    class Zeros(io.RawIOBase):
        def read(self, size):
            return bytes(size)
    with tarfile.open(path, "w:gz", compresslevel=1) as tar:
        info = tarfile.TarInfo(name)
        info.size = nbytes
        tar.addfile(info, Zeros())
    return path


def test_a_licence_without_end_is_not_read_into_memory(tmp_path):
    source = archive_source("a", [zeros(tmp_path / "a.tar.gz", "a/LICENSE", 100 << 20)])
    tracemalloc.start()
    assert licence_finder(source)("x.c") == "unknown"
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 30e6


def test_an_archive_that_unpacks_to_far_more_than_its_size_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "RATIO_FREE_BYTES", 1 << 20)
    path = zeros(tmp_path / "a.tar.gz", "a/zeros", 30 << 20)
    with pytest.raises(BadInput, match="bytes unpack to more than 200 times as many"):
        files_of(path)
    with gzip.open(tmp_path / "a_1.diff.gz", "wb") as file:
        for _ in range(30):
            file.write(bytes(1 << 20))
    with pytest.raises(BadInput, match="bytes unpack to more than 200 times as many"):
        files_of(tmp_path / "a_1.diff.gz")
    path = make_tar(tmp_path / "b.tar.gz", FILES)
    monkeypatch.setattr(archives, "RATIO_FREE_BYTES", 0)
    assert len(files_of(path)) == NUM_FILES  # real text does not shrink so much


@pytest.mark.parametrize("tar_format, name, claim", [
    (tarfile.GNU_FORMAT, "a/" + "x" * 5000, "a header claims"), (tarfile.PAX_FORMAT, "a/" + "é" * 5000, "a path has"),
    (tarfile.PAX_FORMAT, "a/" + "é" * (1 << 20), "a header claims")])
def test_a_path_without_end_is_refused(tmp_path, tar_format, name, claim):
    with tarfile.open(tmp_path / "a.tar", "w", format=tar_format) as tar:
        tar.addfile(tarfile.TarInfo(name), io.BytesIO())
    with pytest.raises(BadInput, match=claim):
        files_of(tmp_path / "a.tar")


def test_a_file_that_claims_more_bytes_than_any_disk_has_ends_at_once(tmp_path):
    info = tarfile.TarInfo("a/x.c")
    info.size = 1 << 60
    (tmp_path / "a.tar").write_bytes(info.tobuf(tarfile.GNU_FORMAT) + bytes(10240))
    with pytest.raises(BadInput, match="claims to be longer than the archive"):
        list(archives.iter_archive(str(tmp_path / "a.tar")))


def test_links_devices_and_deep_tarballs_are_left_out(tmp_path):
    inner = make_tar(tmp_path / "inner.tar", {"x/y.c": b"int y;"}).read_bytes()
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE):
            info = tarfile.TarInfo(f"a/special{kind.decode()}.c")
            info.type, info.linkname = kind, "/etc/passwd"
            tar.addfile(info)
        for name, data in {"a/deep/inner.tar": inner, "a/é.c": b"int e;"}.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    assert files_of(tmp_path / "a.tar") == {"deep/inner.tar": inner, "é.c": b"int e;"}


def test_a_damaged_archive_within_an_archive_is_named(tmp_path, tarball):
    path = make_tar(tmp_path / "a.tar", {"a/inner.tar.gz": gzip.compress(tarball)[:-9], "a/x.c": b"int x;"})
    with pytest.raises(BadInput, match=r"inner\.tar\.gz in .*/a\.tar is truncated or corrupt"):
        files_of(path)


@pytest.mark.parametrize("tar_format", ["gnu", "posix"])
def test_sparse_files_are_read_as_gnu_tar_writes_them(tmp_path, tar_format):
    (tmp_path / "a").mkdir()
    with open(tmp_path / "a/hole.c", "wb") as file:
        file.seek(1 << 20)
        file.write(b"int x;")
    (tmp_path / "a/z.c").write_text("int z;")
    subprocess.run(["tar", f"--format={tar_format}", "--sparse", "--sort=name", "-cf", "a.tar", "a"], cwd=tmp_path,
                   check=True, timeout=60)
    assert (tmp_path / "a.tar").stat().st_size < 1 << 20
    assert files_of(tmp_path / "a.tar") == {"hole.c": bytes(1 << 20) + b"int x;", "z.c": b"int z;"}


def test_the_sums_that_a_package_states_are_compared(tmp_path):
    path = make_tar(tmp_path / "a.tar.xz", {"a/LICENSE": LICENCE_MIT.encode()})
    with open(path, "rb") as file:
        sha256 = archives.sha256_of(file)
    archives.check_sha256(path, sha256)
    with pytest.raises(BadInput, match="its SHA-256 is"):
        archives.check_sha256(path, "0" * 64)
    assert [name for name, *_ in iter_files(archive_source("a", [path]))] == ["LICENSE"]
