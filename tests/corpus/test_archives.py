"""Tarballs: one that is cut or damaged anywhere is an error, and none takes much memory, time or disk."""
import io
import tarfile
import tracemalloc

import pytest

from nanochat.common import BadInput
from nanochat.corpus import archives
from nanochat.corpus.scan import licence_of
from nanochat.corpus.sources import archive_source
from tests.corpus.projects import cpp, make_tar

KINDS = ["tar", "tar.gz", "tar.bz2", "tar.xz", "tar.zst"]
NUM_FILES = 40
FILES = {f"a/{number}.c": cpp(number, 3).encode() for number in range(NUM_FILES)}
FILE_BLOCKS = 2  # of 512 bytes: a header, and three lines of text


def files_of(path):
    """Returns {path: bytes} of all files in an archive."""
    return {name: read() for name, _, read in archives.iter_archive(str(path))}


@pytest.mark.parametrize("kind", KINDS)
def test_an_archive_cut_anywhere_is_an_error(tmp_path, kind):
    whole = make_tar(tmp_path / f"whole.{kind}", FILES).read_bytes()
    assert len(files_of(tmp_path / f"whole.{kind}")) == NUM_FILES
    end = len(whole)
    cuts = {1, 512, 1024, end - 1, end - 4, end - 8, end - 12, *range(0, end, end // 16)}
    if kind == "tar":  # without a checksum, it may end after any file
        cuts = {100, 700, NUM_FILES * FILE_BLOCKS * 512 - 1}
    for cut in sorted(cuts):
        path = tmp_path / f"cut.{kind}"
        path.write_bytes(whole[:cut])
        with pytest.raises(BadInput, match=r"cut\.tar\S* is truncated or corrupt"):
            files_of(path)


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
    source = archive_source(zeros(tmp_path / "a.tar.gz", "a/LICENSE", 100 << 20))
    tracemalloc.start()
    assert licence_of(source) == "unknown"
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 30e6


def test_an_archive_that_unpacks_to_far_more_than_its_size_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "RATIO_FREE_BYTES", 1 << 20)
    path = zeros(tmp_path / "a.tar.gz", "a/zeros", 30 << 20)
    with pytest.raises(BadInput, match="bytes unpack to more than 200 times as many"):
        files_of(path)
    path = make_tar(tmp_path / "b.tar.gz", FILES)
    monkeypatch.setattr(archives, "RATIO_FREE_BYTES", 0)
    assert len(files_of(path)) == NUM_FILES  # real text does not shrink so much


@pytest.mark.parametrize("size, message", [
    (1 << 60, "claims to be longer than the archive"), (-1 << 20, "a header claims -1048576 bytes")])
def test_a_file_that_claims_more_bytes_than_any_disk_has_or_fewer_than_none_ends_at_once(tmp_path, size, message):
    info = tarfile.TarInfo("a/x.c")
    info.size = size
    (tmp_path / "a.tar").write_bytes(info.tobuf(tarfile.GNU_FORMAT) + bytes(10240))
    with pytest.raises(BadInput, match=message):
        list(archives.iter_archive(str(tmp_path / "a.tar")))


def test_links_and_devices_are_left_out(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE):
            info = tarfile.TarInfo(f"a/special{kind.decode()}.c")
            info.type, info.linkname = kind, "/etc/passwd"
            tar.addfile(info)
        info = tarfile.TarInfo("a/é.c")
        info.size = 6
        tar.addfile(info, io.BytesIO(b"int e;"))
    assert files_of(tmp_path / "a.tar") == {"é.c": b"int e;"}
