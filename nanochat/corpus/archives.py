"""Reads tarballs and Debian's diffs as streams, and unpacks nothing to disk.

A cut or damaged archive is an error wherever the damage is, and never a shorter archive. Archives may come from
anywhere, so no length in one is trusted: reading is bounded.
"""
import bz2
import gzip
import hashlib
import lzma
import math
import re
import tarfile
import zlib
from contextlib import contextmanager

import pyarrow as pa

from nanochat.common import BadInput

TARBALL = re.compile(r"\.(?:tar\.|t)(gz|bz2|xz|lzma|zst)$|\.tar$")
MAX_RATIO, RATIO_FREE_BYTES = 200, 1 << 30  # source code shrinks to a fifth; a file of zeros to a thousandth or less
MAX_PATH_BYTES = 4096  # PATH_MAX of Linux
MAX_HEADER_BYTES = 1 << 20  # of the attributes that a tarball holds for one file
MAX_LICENCE_BYTES = 16 << 20  # longer files are no licences


def iter_archive(archive):
    """Yields (path, nbytes, read) for every regular file of the archive whose path is `archive`, a str. `read()`
    returns the bytes of the file, before the next file is requested. Both raise BadInput if the archive is damaged or
    unpacks to far more than its size. After the last file, the archive has been read to its end, where its format has
    checksums."""
    with _archive_errors(archive), open(archive, "rb") as raw:
        nbytes = raw.seek(0, 2)
        raw.seek(0)
        if archive.endswith(".diff.gz"):
            yield from _iter_debian_diff(_Bounded(gzip.open(raw), nbytes))
        else:
            # dpkg-source unpacks NAME.orig-COMPONENT.tar into a folder COMPONENT/, and NAME.debian.tar into debian/.
            # The paths here are the same, so that debian/copyright can name them.
            component = re.search(r"\.orig-([\w-]+)\.tar|\.(debian)\.tar", archive)
            yield from _iter_tar(archive, raw, nbytes, f"{component[1] or component[2]}/" if component else "")


def check_sha256(archive, expected):
    """Raises BadInput unless the file `archive` has this SHA-256, in hexadecimal."""
    with _archive_errors(archive), open(archive, "rb") as file:
        found = sha256_of(file)
        if found != expected:
            raise tarfile.ReadError(f"its SHA-256 is {found[:12]}…, not {expected[:12]}…")


def sha256_of(file):
    """Returns the SHA-256, in hexadecimal, of the rest of a file that is open for bytes."""
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


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
        return self._count(self.stream.read(size))

    def readline(self, size):
        return self._count(self.stream.readline(size))

    def _count(self, data):
        self.room -= len(data)
        self.reads_at_end += not data
        if self.reads_at_end > 2:  # tarfile would go on, 10 kB at a time, to the end of a file of 2^60 bytes
            raise tarfile.ReadError("a file in it claims to be longer than the archive")
        if self.room < 0:
            raise tarfile.ReadError(f"its {self.packed_bytes} bytes unpack to more than {MAX_RATIO} times as many")
        return data


class _Header(tarfile.TarInfo):
    """The header of a file in a tarball. A damaged one, which tarfile takes for the end of the archive, is an error."""
    # An archive ends with blocks of zeros, and only another archive may follow them.

    @classmethod
    def frombuf(cls, buf, encoding, errors):
        header = super().frombuf(buf, encoding, errors)
        # tarfile reads the contents of headers of these kinds into memory in one go, whatever size they claim. So the
        # claim is checked first.
        most = math.inf
        if header.type in (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK):
            most = MAX_PATH_BYTES
        elif header.type in (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE):
            most = MAX_HEADER_BYTES
        if not 0 <= header.size <= most:
            raise tarfile.ReadError(f"a header claims {header.size} bytes")
        return header

    @classmethod
    def fromtarfile(cls, tar):
        # Only an archive that has closed with a block of zeros may run out of bytes.
        try:
            header = super().fromtarfile(tar)
        except tarfile.EOFHeaderError:  # a block of zeros
            tar.has_ended = True
            raise
        except tarfile.EmptyHeaderError:  # no more bytes
            if not tar.has_ended:
                raise tarfile.ReadError("it ends without the blocks that end an archive") from None
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(f"the header at byte {tar.offset} is damaged: {error}") from None
        tar.has_ended = False
        if len(header.name) > MAX_PATH_BYTES:
            raise tarfile.ReadError(f"a path has {len(header.name)} characters")
        return header


class _Tar(tarfile.TarFile):
    tarinfo = _Header
    has_ended = False  # whether the last block ends the archive


def _iter_tar(archive, raw, nbytes, prefix, nested_name=None):
    """Yields the files of a tarball as iter_archive does. In their paths `prefix` replaces the directory NAME-VERSION/.
    """
    # Some source packages contain the real tarball: one in the outermost directory is read as if unpacked there.
    with (unpacked(TARBALL.search(nested_name or archive)[1], raw) as stream,
          _Tar.open(fileobj=_Bounded(stream, nbytes), mode="r|", ignore_zeros=True) as tar):
        # With ignore_zeros, tarfile reads on to the end of the stream, where gzip, xz and bzip2 check their sums.
        while (member := tar.next()) is not None:
            tar.members.clear()  # or they would stay in memory
            if not member.isfile():
                continue
            path = member.name.removeprefix("./").split("/", 1)[-1]
            # The inner archive is read through its member of the outer one, block by block. Only one level is opened,
            # so archives of archives cannot go on without end.
            if not nested_name and "/" not in path and TARBALL.search(path):
                with _archive_errors(f"{path} in {archive}"):
                    yield from _iter_tar(archive, tar.extractfile(member), member.size, prefix, nested_name=path)
                continue

            def read(member=member):
                with _archive_errors(archive):
                    return tar.extractfile(member).read()
            yield prefix + path, member.size, read


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


def _iter_debian_diff(stream):
    """Yields debian/copyright, from the diff that contains debian/ in source packages of format 1.0."""
    copyright_lines = []
    nbytes = 0
    inside = False
    while line := stream.readline(MAX_LICENCE_BYTES):
        # debian/ is only on the new side of this diff, so the added lines of a file are the whole file.
        if line.startswith(b"+++ "):
            inside = b"".join(line.split()[1:2]).split(b"/", 1)[-1] == b"debian/copyright"
        elif inside and line.startswith(b"+"):
            nbytes += len(line)
            if nbytes <= MAX_LICENCE_BYTES:
                copyright_lines.append(line[1:])
    text = b"".join(copyright_lines)
    yield "debian/copyright", len(text), lambda: text
