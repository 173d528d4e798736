"""Makes Sources of the source packages of Debian and Ubuntu.

apt-get downloads the packages, with a configuration of its own: that of the system is only read.
"""
import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from nanochat.common import BadInput, locked
from nanochat.corpus.archives import TARBALL
from nanochat.corpus.sources import archive_source, readable
from nanochat.record.progress import Progress

RESERVED_INITIALS = "oz"  # packages with these initials are reserved for evaluation and must not be trained on
UPDATE_TIMEOUT_S = 600
DOWNLOAD_TIMEOUT_S = 3600  # per package
PARALLEL_DOWNLOADS = 3


def check_names(names, *, eval_only):
    """Raises BadInput for a malformed name, and unless `eval_only` for a package that is reserved for evaluation."""
    for name in names:
        if not re.fullmatch(r"[a-z0-9][a-z0-9+.-]{1,99}(=[\w.+~:-]{1,99})?", name):
            raise BadInput(f"--debian_source: {name!r} is not the name of a source package (NAME or NAME=VERSION)")
        if name[0] in RESERVED_INITIALS and not eval_only:
            raise BadInput(f"--debian_source: {name} is reserved for evaluation, as are all packages whose names begin "
                           "with o or z: leave it out, or make an evaluation corpus with --eval_only")


def debian_sources(names, cache_dir):
    """Returns Sources for the packages `names` (NAME or NAME=VERSION), and downloads those that are not in `cache_dir`.
    A cached package is never looked up again, so the same command gives the same versions. Raises BadInput if apt
    fails, or if another process is downloading into `cache_dir`."""
    names = sorted(set(names))
    cache_dir = Path(cache_dir)
    missing = [name for name in names if not (cache_dir / name).is_dir()]
    if missing:
        cache_dir.mkdir(parents=True, exist_ok=True)
        busy = f"another process is downloading into {cache_dir}: wait for it or choose another --cache_dir"
        with locked(cache_dir / ".lock", busy):
            _download(missing, cache_dir)
    return [_package_source(cache_dir / name) for name in names]


def _package_source(directory):
    """Returns a Source for one downloaded package. Its archive with debian/copyright comes first. Raises BadInput if an
    archive is missing that the package's description (.dsc) lists."""
    with readable():
        there = {path.name for path in directory.iterdir()}
        descriptions = list(directory.glob("*.dsc"))
        text = descriptions[0].read_text(errors="replace") if len(descriptions) == 1 else ""
    fields = dict(re.findall(r"^(Source|Version): (\S+)", text, re.MULTILINE))
    sums = {name: sha256 for sha256, name in re.findall(r"^ ([0-9a-f]{64}) \d+ (\S+)$", text, re.MULTILINE)}
    if len(fields) != 2 or sums.keys() - there:
        lacking = ", ".join(sorted(sums.keys() - there)) or "its .dsc"
        raise BadInput(f"{directory} is not a whole source package ({lacking} is missing or damaged): delete it, and "
                       "the same command downloads it")
    archives = [directory / name for name in there if TARBALL.search(name) or name.endswith(".diff.gz")]
    # False sorts first, so debian.tar or .diff.gz, which has the licences, comes before the upstream tarballs.
    archives.sort(key=lambda path: (".orig" in path.name, path.name))
    return archive_source(fields["Source"], archives, version=fields["Version"],
                          sha256s=tuple(sums.get(path.name, "") for path in archives))


def _download(names, cache_dir):
    options = _private_apt(cache_dir / ".apt")
    listing = _apt(["source", "--print-uris", "--only-source", *names], options, timeout_s=UPDATE_TIMEOUT_S)
    nbytes = sum(int(size) for size in re.findall(r"^'\S+' \S+ (\d+)", listing, re.MULTILINE))
    free = shutil.disk_usage(cache_dir).free
    if nbytes > free:
        raise BadInput(f"downloads of {nbytes / 1e6:.0f} MB do not fit into {cache_dir}, which has {free / 1e6:.0f} MB "
                       "free: choose another --cache_dir")

    def download(name):
        partial = cache_dir / f".{name}.partial"
        shutil.rmtree(partial, ignore_errors=True)  # it may hold parts of an older version
        partial.mkdir()
        _apt(["source", "--download-only", "--only-source", name], options, cwd=partial, timeout_s=DOWNLOAD_TIMEOUT_S)
        # debian_sources takes a folder of this name for whole, so it gets the name once apt has ended.
        partial.rename(cache_dir / name)
        return sum(path.stat().st_size for path in (cache_dir / name).iterdir())

    with (Progress(f"apt: downloading {len(names)} source packages", nbytes) as bar,
          ThreadPoolExecutor(PARALLEL_DOWNLOADS) as pool):
        for size in pool.map(download, names):
            bar.update(size)


def _private_apt(apt_dir):
    """Returns options for apt-get to use package lists below `apt_dir` instead of the system's. They list the system's
    repositories, with deb-src instead of deb."""
    derived = _source_repositories()
    sources_dir = apt_dir / "sources.list.d"
    lists_dir = apt_dir / "lists"
    cache_dir = apt_dir / "cache"
    options = ["-o", "Dir::Etc::sourcelist=/dev/null", "-o", f"Dir::Etc::sourceparts={sources_dir}",
               "-o", f"Dir::State::Lists={lists_dir}", "-o", f"Dir::Cache={cache_dir}",
               "-o", "Dir::Cache::pkgcache=", "-o", "Dir::Cache::srcpkgcache=",  # concurrent clients would share them
               "-o", "APT::Sandbox::User=root",  # the user _apt cannot write into a private directory
               "-o", "Acquire::Retries=3", "-o", "Acquire::http::Timeout=60", "-o", "Acquire::https::Timeout=60"]
    shutil.rmtree(apt_dir, ignore_errors=True)  # lists of an interrupted update, or of other repositories
    for directory in (sources_dir, lists_dir, cache_dir):
        directory.mkdir(parents=True)
    for name, text in derived.items():
        (sources_dir / name).write_text(text)
    messages = _apt(["update"], options, timeout_s=UPDATE_TIMEOUT_S)
    if not any("_Sources" in path.name for path in lists_dir.iterdir()):
        reason = next((line for line in messages.splitlines() if line.startswith(("Err", "W:", "E:"))), "there is none")
        raise BadInput(f"--debian_source: apt got no index of source packages ({reason.strip()}): check the network")
    return options


def _source_repositories():
    """Returns {name of a .list or .sources file of the system: its text with source repositories}."""
    if not shutil.which("apt-get"):
        raise BadInput("--debian_source needs apt-get: run this on Debian or Ubuntu")
    query = ["apt-config", "shell", "list", "Dir::Etc::sourcelist/f", "parts", "Dir::Etc::sourceparts/d"]
    answer = subprocess.run(query, capture_output=True, text=True, check=True, timeout=60).stdout
    system = {name: Path(path) for name, path in re.findall(r"^(\w+)='(.*)'$", answer, re.MULTILINE)}
    files = [system["list"], *(path for path in system["parts"].glob("*") if path.suffix in (".list", ".sources"))]
    derived = {}
    for path in files:
        text = deb_to_deb_src(path.read_text()) if path.is_file() else ""
        if text:
            derived[path.name] = text
    if not derived:
        raise BadInput(f"--debian_source: apt knows no repository ({system['list']} and {system['parts']} name none)")
    return derived


def deb_to_deb_src(text):
    """Returns the text of a .list or .sources file with source repositories instead of binary ones, without CD-ROMs;
    "" if it names none. A .sources file (deb822 format) has fields, a .list file has one line per repository."""
    if re.search(r"^Types:", text, re.MULTILINE):
        return re.sub(r"^Types:.*", "Types: deb-src", text, flags=re.MULTILINE)
    lines = re.findall(r"^[ \t]*deb(?:-src)?([ \t]+(?!cdrom:).*)", text, re.MULTILINE)
    return "".join(f"deb-src{line}\n" for line in dict.fromkeys(lines))


def _apt(arguments, options, timeout_s, cwd=None):
    """Runs apt-get and returns its output. Raises BadInput with apt's own error message if it fails."""
    try:
        run = subprocess.run(["apt-get", *options, *arguments], cwd=cwd, timeout=timeout_s, text=True,
                             env={**os.environ, "LC_ALL": "C"}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                             stderr=subprocess.STDOUT)
    except subprocess.TimeoutExpired:
        raise BadInput(f"apt-get {arguments[0]} took more than {timeout_s} s: check the network, run again") from None
    if run.returncode:
        complaint = next((line for line in run.stdout.splitlines() if line.startswith("E:")), run.stdout.strip()[-200:])
        raise BadInput(f"apt-get {arguments[0]} failed ({complaint}): check the names of the packages and the network")
    return run.stdout
