"""Sources of C and C++ text: directories, git checkouts, tarballs, and the headers of installed packages.

A Source has the name and the version of a project, and its archive or a list of its files. `iter_files` reads it as a
stream.
"""
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import subprocess
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from nanochat.common import SUFFIXES, BadInput, say
from nanochat.corpus.archives import TARBALL, iter_archive

LICENCE_FILE = re.compile(r"(?:licen[cs]e|copying)[^/]*", re.IGNORECASE)


@dataclass(frozen=True)
class Source:
    """A project to read: a directory with a list of files in it, or an archive."""
    name: str
    version: str = ""
    licence: str = ""  # if it is known; otherwise scan.licence_of looks for it among the files
    directory: str = ""
    files: tuple[str, ...] = ()
    archive: str = ""
    nbytes: int = 0  # size of the files or the archive on disk
    fingerprint: str = ""  # hash of names, sizes and times of change
    is_own: bool = False  # named with --source: validation gets its project only if that is named, too
    columns: tuple[tuple[str, str], ...] = ()  # of a table: (role, column), such as ("text", "content"); see tables.py
    origin: str = ""  # the URL with the commit, if it was copied from the Hub

    @property
    def label(self):
        """The value for the column `source`: NAME=VERSION or NAME."""
        return f"{self.name}={self.version}" if self.version else self.name

    @property
    def project(self):
        """The name without a trailing version: llvm-toolchain-14 and llvm-toolchain-15 are one project."""
        # The version is a number after a separator (-14, _v2.1), or one with a dot right after the name (boost1.74).
        return re.sub(r"(?:[-_]v?\d[\w.+~-]*|(?<=[a-z+])\d+\.[\d.]+)$", "", self.name)

    def identity(self):
        """Returns everything that decides the documents of this source, as a dict."""
        return {name: value for name, value in asdict(self).items() if name not in ("is_own", "origin")}


@contextmanager
def readable():
    """Turns an OSError into a BadInput that names the file or folder."""
    try:
        yield
    except OSError as error:
        reason = f"{error.filename!s} cannot be read ({error.strerror})"
        raise BadInput(f"{reason}: give yourself the right to read it, or leave it out") from None


def _fingerprint(paths):
    """Returns (number of bytes of all files, hex hash that changes when one of them does)."""
    # Sizes and times, not contents: reading all files to resume would take as long as scanning them.
    digest = hashlib.blake2b(digest_size=16)
    nbytes = 0
    for path in paths:
        stat = os.stat(path)
        digest.update(f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode(errors="surrogateescape"))
        nbytes += stat.st_size
    return nbytes, digest.hexdigest()


def directory_source(name, directory, files, **fields):
    """Returns a Source for `files`, paths relative to `directory`; `fields` are further fields of Source."""
    with readable():
        nbytes, fingerprint = _fingerprint(os.path.join(directory, file) for file in files)
    return Source(_as_text(name), directory=str(directory), files=tuple(files), nbytes=nbytes, fingerprint=fingerprint,
                  **fields)


def archive_source(path):
    """Returns a Source for the tarball `path`."""
    with readable(), open(path, "rb"):  # which may be refused
        nbytes, fingerprint = _fingerprint([path])
    return Source(_as_text(TARBALL.sub("", path.name)), archive=str(path), nbytes=nbytes, fingerprint=fingerprint)


def _as_text(name):
    return os.fsencode(name).decode("utf-8", "replace")  # it is a column of the corpus


def open_source(path):
    """Returns a Source for one directory, git checkout or tarball, the same for every way to write its path. Prints the
    files of a checkout that are left out. Raises BadInput if `path` is none of these or cannot be read."""
    path = Path(path)
    with readable():
        if path.is_dir():
            path = path.resolve()
            found = None
            if (path / ".git").exists():
                found = _git_files(path)
            files, version = found or (list(walk(path)), "")
            return directory_source(path.name or "root", path, files, version=version)
        if path.is_file() and TARBALL.search(path.name):
            return archive_source(path.parent.resolve() / path.name)
    raise BadInput(f"{path} is not a directory, a git checkout or a tarball (.tar, .tar.gz, .bz2, .xz, .zst), nor a "
                   "file of documents (.parquet, .jsonl, .jsonl.gz, .jsonl.zst): check --source")


def open_projects(directory):
    """Returns a list of Sources, one for every subdirectory and every tarball of `directory`. Prints the other files.
    Raises BadInput if `directory` is not a directory or has neither."""
    with readable():
        if not directory.is_dir():
            raise BadInput(f"--projects_dir={directory} is not a directory")
        paths = [path for path in sorted(directory.iterdir()) if not path.name.startswith(".")]
        projects = [path for path in paths if path.is_dir() or TARBALL.search(path.name)]
    if not projects:
        raise BadInput(f"--projects_dir={directory} has neither subdirectories nor tarballs")
    others = {path.name for path in paths} - {path.name for path in projects}
    _say_left_out(directory, "files that are neither subdirectories nor tarballs", others)
    return [open_source(path) for path in projects]


def distinguish(sources):
    """Returns the sources with each place once. Sources of one name get the names of the folders too by which they
    differ: /x/lib and /y/lib become the projects x/lib and y/lib."""
    by_place = {(source.directory, source.files, source.archive): source for source in sources}
    by_name = defaultdict(list)
    for source in by_place.values():
        by_name[source.name].append(source)
    found = []
    for name, same in by_name.items():
        folders = [Path(source.directory or source.archive).parent for source in same]
        common = os.path.commonpath(folders)
        for source, folder in zip(same, folders, strict=True):
            found.append(replace(source, name=_as_text(str(folder.relative_to(common) / name))))
    return found


def installed_headers():
    """Returns Sources for the C++ headers that pyarrow and torch install, one per top-level include directory. The
    generated headers of torch are left out: 30 of its 36 MB, and nearly identical. Raises BadInput if one of the
    packages is not installed."""
    sources = []
    for package in ("pyarrow", "torch"):
        spec = importlib.util.find_spec(package)
        include = Path(spec.submodule_search_locations[0], "include") if spec else None
        if include is None or not include.is_dir():
            raise BadInput(f"--installed_headers: this Python has no {package} with headers; pip install {package}")
        metadata = importlib.metadata.metadata(package)
        licence = metadata.get("License-Expression") or metadata.get("License") or "unknown"
        by_directory = {}
        for file in walk(include):
            if not re.search(r"^ATen/ops/|/generated/|^ATen/RegistrationDeclarations\.h$", file):
                by_directory.setdefault(file.split("/")[0] if "/" in file else "", []).append(file)
        for top, files in by_directory.items():
            sources.append(directory_source(f"{package}/{top}".rstrip("/"), include, files,
                                            version=metadata["Version"], licence=licence))
    return sources


def walk(directory, with_links=False):
    """Yields the relative paths of all regular files below `directory`, in a fixed order, except those in hidden
    directories. with_links: also of links and of special files. Raises OSError for a directory that cannot be read."""
    for parent, directories, names in os.walk(directory, onerror=_fail):
        directories[:] = sorted(name for name in directories if not name.startswith("."))
        for path in (os.path.join(parent, name) for name in sorted(names)):
            if with_links or _is_regular(path):
                yield os.path.relpath(path, directory)


def _fail(error):
    raise error


def _is_regular(path):
    return os.path.isfile(path) and not os.path.islink(path)


# Git checkouts

# A checkout may come from anywhere, and its .git/config may name programs: git must run none of them. Neither may the
# environment, such as GIT_DIR, choose another repository, nor the configuration of this user other files.
_GIT = ["git", "-c", "core.fsmonitor=false", "-c", f"core.hooksPath={os.devnull}", "--git-dir=.git", "--work-tree=."]
_GIT_ENVIRONMENT = {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull, "HOME": os.devnull,
                    "XDG_CONFIG_HOME": os.devnull, "GIT_ALLOW_PROTOCOL": "none", "GIT_NO_LAZY_FETCH": "1",
                    "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
GIT_TIMEOUT_S = 600


def _git(directory, *arguments):
    """Returns what git prints, as bytes. Raises CalledProcessError, TimeoutExpired or OSError."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")} | _GIT_ENVIRONMENT
    return subprocess.run([*_GIT, *arguments], cwd=directory, env=env, stdin=subprocess.DEVNULL, capture_output=True,
                          check=True, timeout=GIT_TIMEOUT_S).stdout


def _git_files(directory):
    """Returns (relative paths of the tracked files, short hash of HEAD), or None if git fails, which it prints. It
    leaves out submodules, which are other projects, and untracked files, which are often made by a compiler and not
    covered by the hash. It prints how many these are."""
    try:
        tracked = set()
        submodules = []
        for entry in _git(directory, "ls-files", "-s", "-z").split(b"\0")[:-1]:  # "MODE HASH STAGE<tab>PATH"
            about, name = entry.split(b"\t", 1)
            tracked.add(os.fsdecode(name))
            if about.startswith(b"160000"):
                submodules.append(os.fsdecode(name))
        others = _git(directory, "ls-files", "-z", "--others", "--exclude-standard").split(b"\0")[:-1]
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        reason = (getattr(error, "stderr", None) or str(error).encode()).decode("utf-8", "replace").split("\n")[0]
        say(f"{directory}: git cannot read this checkout ({reason}), so all files in it are read")
        return None
    try:
        head = _git(directory, "rev-parse", "--short=12", "HEAD").decode().strip()
    except (OSError, subprocess.SubprocessError):
        head = ""  # no commit yet
    # An index from elsewhere may name paths outside of the checkout, and a folder in it may be a symbolic link.
    files = []
    for name in sorted(tracked):
        if os.path.realpath(directory / name) == f"{directory}/{name}" and _is_regular(directory / name):
            files.append(name)
    _say_left_out(directory, "submodules (name their folders with --source, too)", submodules)
    _say_left_out(directory, "C and C++ files that git does not track",
                  [name for name in map(os.fsdecode, others) if name.lower().endswith(SUFFIXES)])
    return files, head


def _say_left_out(directory, what, names):
    """Prints how many and which, such as "5 files that … (a, b, c …)"."""
    if names:
        listed = ", ".join(map(_as_text, sorted(names)[:3]))
        more = " …" if len(names) > 3 else ""
        say(f"{_as_text(directory)}: left out {len(names)} {what}: {listed}{more}")


# Reading


def iter_files(source):
    """Yields (path, nbytes, read) for every regular file of `source`. `read()` returns the bytes of the file, at most
    `nbytes`, before the next file is requested. For a file in a directory it raises OSError. Raises BadInput if a file
    has vanished or an archive is damaged."""
    for file in source.files:
        path = Path(source.directory, file)
        with readable():
            nbytes = path.stat().st_size
        yield file, nbytes, partial(_read_file, path, nbytes)
    if source.archive:
        yield from iter_archive(source.archive)


def _read_file(path, nbytes):
    with open(path, "rb") as file:
        return file.read(nbytes)


def check_unchanged(source):
    """Raises BadInput if the files of `source`, as this machine sees them, are not those of its fingerprint."""
    paths = [source.archive] if source.archive else [os.path.join(source.directory, file) for file in source.files]
    with readable():
        if source.fingerprint and _fingerprint(paths)[1] != source.fingerprint:
            raise BadInput(f"{source.directory or source.archive} has changed since the command began, or another "
                           "machine of the cluster sees other files there: run the same command again, or put the "
                           "sources where all machines share them")
