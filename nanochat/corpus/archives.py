"""Reads tarballs as streams, and unpacks nothing to disk.

A cut or damaged archive is an error wherever the damage is, and never a shorter archive. Archives may come from
anywhere, so no length in one is trusted: reading is bounded.
"""
import bz2
import gzip
import lzma
import re
import tarfile
import zlib
from contextlib import contextmanager
from functools import partial

import pyarrow as pa

from nanochat.common import BadInput

TARBALL = re.compile(r"\.(?:tar\.|t)(gz|bz2|xz|lzma|zst)$|\.tar$")
MAX_RATIO, RATIO_FREE_BYTES = 200, 1 << 30  # source code shrinks to a fifth; a file of zeros to a thousandth or less


def iter_archive(archive):
    """Yields (path, nbytes, read) for every regular file of the archive whose path is `archive`, a str. `read()`
    returns the bytes of the file, before the next file is requested. Both raise BadInput if the archive is damaged or
    unpacks to far more than its size. After the last file, the archive has been read to its end, where its format has
    checksums."""
    with _archive_errors(archive), open(archive, "rb") as raw:
        nbytes = raw.seek(0, 2)
        raw.seek(0)
        with unpacked(TARBALL.search(archive)[1], raw) as stream:
            bounded = _Bounded(stream, nbytes)
            tar = tarfile.open(fileobj=bounded, mode="r|", tarinfo=_Header)
            while (member := tar.next()) is not None:
                tar.members.clear()  # or they would stay in memory
                if member.isfile():
                    path = member.name.removeprefix("./").split("/", 1)[-1]  # without the directory NAME-VERSION/
                    yield path, member.size, partial(_read_member, archive, tar, member)
            while bounded.read(1 << 20):  # to the end, where gzip, xz and bzip2 check their sums
                pass


def _read_member(archive, tar, member):
    with _archive_errors(archive):
        return tar.extractfile(member).read()


@contextmanager
def _archive_errors(archive):
    try:
        yield
    except (tarfile.TarError, lzma.LZMAError, zlib.error, pa.ArrowException, EOFError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise BadInput(f"{archive} is truncated or corrupt ({reason}): delete it and fetch it again") from None


class _Bounded:
    """Reads a stream that unpacks an archive of `packed_bytes`, and refuses to read far more."""

    def __init__(self, stream, packed_bytes):
        self.stream = stream
        self.packed_bytes = packed_bytes
        self.room = RATIO_FREE_BYTES + MAX_RATIO * packed_bytes
        self.reads_at_end = 0

    def read(self, size):
        data = self.stream.read(size)
        self.room -= len(data)
        self.reads_at_end += not data
        if self.reads_at_end > 2:  # tarfile would go on, 10 kB at a time, to the end of a file of 2^60 bytes
            raise tarfile.ReadError("a file in it claims to be longer than the archive")
        if self.room < 0:
            raise tarfile.ReadError(f"its {self.packed_bytes} bytes unpack to more than {MAX_RATIO} times as many")
        return data


class _Header(tarfile.TarInfo):
    """The header of a file in a tarball. tarfile would go back without end by a size below 0."""

    @classmethod
    def frombuf(cls, buf, encoding, errors):
        header = super().frombuf(buf, encoding, errors)
        if header.size < 0:
            raise tarfile.ReadError(f"a header claims {header.size} bytes")
        return header


def unpacked(kind, raw):
    """Returns the stream of what an open file holds. kind: the end of its name; others than these are not packed."""
    if kind == "gz":
        return gzip.open(raw)
    if kind == "bz2":
        return bz2.open(raw)
    if kind in ("xz", "lzma"):
        return lzma.open(raw)
    if kind == "zst":
        return pa.CompressedInputStream(pa.PythonFile(raw), "zstd")
    return raw
