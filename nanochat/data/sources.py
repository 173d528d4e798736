"""Sources of C and C++ text: directories, git checkouts, tarballs, and the headers of installed packages.

A Source has the name and the version of a project, and lists its files or archives. `iter_files` reads it as a stream
and unpacks nothing to disk; `licence_finder` tells the licence of each file. debian.py makes Sources of packages.
"""
import bz2
import gzip
import hashlib
import importlib.metadata
import importlib.util
import lzma
import os
import re
import subprocess
import tarfile
import zlib
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from nanochat.common import BadInput

TARBALL = re.compile(r"\.(?:tar\.|t)(gz|bz2|xz|lzma|zst)$|\.tar$")
LICENCE_FILE = re.compile(r"(?:licen[cs]e|copying)[^/]*|debian/copyright", re.IGNORECASE)


@dataclass(frozen=True)
class Source:
    """A project to read: a directory with a list of files in it, or the archives that together make up a package."""
    name: str
    version: str = ""
    licence: str = ""  # if it is already known; otherwise licence_finder looks for it among the files
    directory: str = ""
    files: tuple[str, ...] = ()
    archives: tuple[str, ...] = ()
    nbytes: int = 0  # size of the files or archives on disk
    fingerprint: str = ""  # hash of names, sizes and times of change

    @property
    def label(self):
        """The value for the column `source`: NAME=VERSION, as apt writes it, or NAME."""
        return f"{self.name}={self.version}" if self.version else self.name

    @property
    def project(self):
        """The name without a trailing version: llvm-toolchain-14 and llvm-toolchain-15 are one project."""
        return re.sub(r"(?:[-_]v?\d[\w.+~-]*|(?<=[a-z+])\d+\.[\d.]+)$", "", self.name)


def _fingerprint(paths):
    """Returns (number of bytes of all files, hex hash that changes when one of them does)."""
    digest, nbytes = hashlib.blake2b(digest_size=16), 0
    for path in paths:
        stat = os.stat(path)
        digest.update(f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode(errors="surrogateescape"))
        nbytes += stat.st_size
    return nbytes, digest.hexdigest()


def directory_source(name, directory, files, **fields):
    """Returns a Source for `files`, paths relative to `directory`; `fields` are further fields of Source."""
    nbytes, fingerprint = _fingerprint(os.path.join(directory, file) for file in files)
    return Source(name, directory=str(directory), files=tuple(files), nbytes=nbytes, fingerprint=fingerprint, **fields)


def archive_source(name, archives, **fields):
    """Returns a Source for the paths `archives`; `fields` are further fields of Source."""
    nbytes, fingerprint = _fingerprint(archives)
    return Source(name, archives=tuple(map(str, archives)), nbytes=nbytes, fingerprint=fingerprint, **fields)


def open_source(path):
    """Returns a Source for one directory, git checkout or tarball. Raises BadInput if `path` is none of these."""
    path = Path(path)
    if path.is_dir():
        files, version = (_git_files(path) if (path / ".git").exists() else None) or (_walk(path), "")
        return directory_source(path.resolve().name, path, files, version=version)
    if path.is_file() and TARBALL.search(path.name):
        return archive_source(TARBALL.sub("", path.name), [path])
    raise BadInput(f"{path} is not a directory, a git checkout or a tarball (.tar, .tar.gz, .bz2, .xz, .zst): "
                   "check --source")


def open_projects(directory):
    """Returns a list of Sources, one for every subdirectory and every tarball of `directory`.

    Raises BadInput if `directory` is not a directory or has neither.
    """
    if not directory.is_dir():
        raise BadInput(f"--projects_dir={directory} is not a directory")
    sources = [open_source(path) for path in sorted(directory.iterdir())
               if not path.name.startswith(".") and (path.is_dir() or TARBALL.search(path.name))]
    if not sources:
        raise BadInput(f"--projects_dir={directory} has neither subdirectories nor tarballs")
    return sources


def installed_headers():
    """Returns Sources for the C++ headers that pyarrow and torch install, one per top-level include directory.

    The generated headers of torch are left out: they are 30 of its 36 MB, and nearly identical. Raises BadInput if one
    of the packages is not installed.
    """
    sources = []
    for package in ("pyarrow", "torch"):
        spec = importlib.util.find_spec(package)
        include = Path(spec.submodule_search_locations[0], "include") if spec else None
        if include is None or not include.is_dir():
            raise BadInput(f"--installed_headers: this Python has no {package} with headers; pip install {package}")
        metadata = importlib.metadata.metadata(package)
        licence = metadata.get("License-Expression") or metadata.get("License") or "unknown"
        by_directory = {}
        for file in _walk(include):
            if not re.search(r"^ATen/ops/|/generated/|^ATen/RegistrationDeclarations\.h$", file):
                by_directory.setdefault(file.split("/")[0] if "/" in file else "", []).append(file)
        for top, files in by_directory.items():
            sources.append(directory_source(f"{package}/{top}".rstrip("/"), include, files,
                                            version=metadata["Version"], licence=licence))
    return sources


def _walk(directory):
    """Returns the relative paths of all regular files below `directory`, in a fixed order.

    Symbolic links and hidden directories are left out.
    """
    files = []
    for parent, directories, names in os.walk(directory):
        directories[:] = sorted(name for name in directories if not name.startswith("."))
        files += [path for path in (os.path.join(parent, name) for name in sorted(names)) if _is_regular(path)]
    return [os.path.relpath(path, directory) for path in files]


def _is_regular(path):
    return os.path.isfile(path) and not os.path.islink(path)


def _git_files(directory):
    """Returns (relative paths of the tracked files, short hash of HEAD), or None if git fails."""
    git = ["git", "-c", "safe.directory=*", "-C", str(directory)]
    try:
        listing = subprocess.run([*git, "ls-files", "-z"], capture_output=True, check=True, timeout=600).stdout
        head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    files = sorted(os.fsdecode(name) for name in listing.split(b"\0") if name)
    return [file for file in files if _is_regular(directory / file)], head.stdout.strip()


# -----------------------------------------------------------------------------
# Reading


def iter_files(source):
    """Yields (path, nbytes, read) for every regular file of `source`.

    `read()` returns the bytes of the file; it must be called before the next file is asked for. Both raise BadInput if
    an archive cannot be read to its end.
    """
    for file in source.files:
        path = Path(source.directory, file)
        yield file, path.stat().st_size, path.read_bytes
    for archive in source.archives:
        with _archive_errors(archive), open(archive, "rb") as raw:
            if archive.endswith(".diff.gz"):
                yield from _iter_debian_diff(raw)
            else:
                component = re.search(r"\.orig-([\w-]+)\.tar|\.(debian)\.tar", archive)
                yield from _iter_tar(archive, raw, f"{component[1] or component[2]}/" if component else "")


@contextmanager
def _archive_errors(archive):
    try:
        yield
    except (tarfile.TarError, lzma.LZMAError, zlib.error, pa.ArrowException, EOFError, OSError) as error:
        raise BadInput(f"{archive} is truncated or corrupt ({error}): delete it and fetch it again") from None


def _iter_tar(archive, raw, prefix, nested_name=None):
    """Yields the files of a tarball as iter_files does. In their paths `prefix` replaces the directory NAME-VERSION/.

    Some source packages contain the real tarball: one in the outermost directory is read as if it were unpacked there.
    """
    with _decompressed(nested_name or archive, raw) as stream, tarfile.open(fileobj=stream, mode="r|") as tar:
        for member in tar:
            if not member.isfile():
                continue
            path = member.name.removeprefix("./").split("/", 1)[-1]
            if not nested_name and "/" not in path and TARBALL.search(path):
                yield from _iter_tar(archive, tar.extractfile(member), prefix, nested_name=path)
                continue

            def read(member=member):
                with _archive_errors(archive):
                    return tar.extractfile(member).read()
            yield prefix + path, member.size, read


def _decompressed(name, raw):
    kind = TARBALL.search(name)[1]
    if kind == "gz":
        return gzip.open(raw)
    if kind == "bz2":
        return bz2.open(raw)
    if kind in ("xz", "lzma"):
        return lzma.open(raw)
    if kind == "zst":
        return pa.CompressedInputStream(pa.PythonFile(raw), "zstd")
    return raw


def _iter_debian_diff(raw):
    """Yields debian/copyright, from the diff that contains debian/ in source packages of format 1.0."""
    copyright_lines, inside = [], False
    for line in gzip.open(raw):
        if line.startswith(b"+++ "):
            inside = line.split()[1].split(b"/", 1)[-1] == b"debian/copyright"
        elif inside and line.startswith(b"+"):
            copyright_lines.append(line[1:])
    text = b"".join(copyright_lines)
    yield "debian/copyright", len(text), lambda: text


# -----------------------------------------------------------------------------
# Licences

# Debian's short names of licences, and the phrases by which their texts are recognised. The phrase that comes first in
# a text decides; of two that begin at the same character, the one that comes first in this list.
_LICENCE_PHRASES = [(name, re.compile(phrase, re.IGNORECASE)) for name, phrase in [
    ("AGPL-3", r"GNU AFFERO GENERAL PUBLIC"),
    ("LGPL-3", r"GNU LESSER GENERAL PUBLIC LICENSE(?s:.{0,120}?)version 3"),
    ("LGPL-2.1", r"GNU LESSER GENERAL PUBLIC LICENSE"),
    ("LGPL-2", r"GNU LIBRARY GENERAL PUBLIC LICENSE"),
    ("GPL-3", r"GNU GENERAL PUBLIC LICENSE(?s:.{0,120}?)version 3"),
    ("GPL-2", r"GNU GENERAL PUBLIC LICENSE"),
    ("Apache-2.0", r"Apache License"),
    ("MPL-2.0", r"Mozilla Public License"),
    ("BSL-1.0", r"Boost Software License"),
    ("Expat", r"Permission is hereby granted, free of charge"),
    ("BSD-3-clause", r"Redistribution and use in source and binary(?s:.{0,1200}?)(?:Neither the|used to endorse)"),
    ("BSD-2-clause", r"Redistribution and use in source and binary"),
    ("Zlib", r"without any express or implied\s+warranty(?s:.{0,600}?)altered source versions"),
    ("public-domain", r"public domain|free and unencumbered"),
]]


def licence_finder(source):
    """Returns a function that maps the path of a file to the short name of its licence, or to "unknown".

    The licence is that of the source if it is known. Otherwise it is read from the first file that is either a LICENSE
    or COPYING at the top level or debian/copyright.
    """
    rules = [("*", source.licence or "unknown")]
    if not source.licence:
        for path, _, read in iter_files(source):
            if LICENCE_FILE.fullmatch(path):
                rules += _licence_rules(read().decode("utf-8", "replace"))
                break
    # The last rule that matches applies. Plain paths are looked up: boost has 39,000, and 173 rules with wildcards.
    last_rule = {glob: order for order, (glob, _) in enumerate(rules)}
    wildcards = [(order, re.compile(re.escape(glob).replace(r"\*", ".*").replace(r"\?", "."), re.DOTALL))
                 for glob, order in last_rule.items() if "*" in glob or "?" in glob]
    wildcards.sort(key=lambda wildcard: -wildcard[0])

    def licence_of(path):
        order = next(order for order, pattern in wildcards if pattern.fullmatch(path))
        return rules[max(order, last_rule.get(path, 0))][1]
    return licence_of


def _licence_rules(text):
    """Returns [(path with wildcards, short name)] for a licence text or a machine-readable debian/copyright."""
    rules = []
    for paragraph in re.split(r"\n\s*\n", text):
        fields = dict(re.findall(r"^(Files|License):[ \t]*(.*(?:\n[ \t].*)*)", paragraph, re.MULTILINE))
        if "Files" in fields and fields.get("License", "").strip():
            rules += [(glob, fields["License"].splitlines()[0].strip()) for glob in fields["Files"].split()]
    found = [(match.start(), order, name) for order, (name, phrase) in enumerate(_LICENCE_PHRASES)
             if (match := phrase.search(text))]
    if not rules and found:
        rules = [("*", min(found)[2])]
    return rules
