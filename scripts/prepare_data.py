"""Makes a corpus of C and C++: parquet shards of some projects for training, and of others for validation.

    python3 -m scripts.prepare_data --installed_headers
    python3 -m scripts.prepare_data --projects_dir=~/src --source=~/my_project,foo-1.2.tar.xz
    python3 -m scripts.prepare_data --source=the-stack/data/cpp --filters=all

It may be killed at any time: the same command resumes and makes the same shards, byte for byte.
"""
import hashlib
import os
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from nanochat.common import (
    SUFFIXES,
    BadInput,
    expand_path,
    flag,
    get_base_dir,
    is_disk_full,
    locked,
    not_empty,
    read_flags,
    require_writable_dir,
    run_script,
    say,
)
from nanochat.corpus.build import CorpusFlags, names, prepare
from nanochat.corpus.hub_copies import fetch
from nanochat.corpus.manifest import MANIFEST, TRAIN_DIR, VAL_DIR
from nanochat.corpus.ray_cluster import find_address, ray_cluster
from nanochat.corpus.sources import (
    LICENCE_FILE,
    directory_source,
    distinguish,
    installed_headers,
    open_projects,
    open_source,
)
from nanochat.corpus.tables import open_table, pieces
from nanochat.corpus.workers import worker_pool
from nanochat.data.hub_files import on_hub, pinned
from nanochat.data.storage import data_place
from nanochat.judge.problems import read_problems

LOCK_FILE = ".prepare_data.lock"


def paths(text):
    """Returns the places of --source. A comma does not divide the path of something that is there."""
    found = [text] if os.path.exists(os.path.expanduser(text)) else names(text)
    return [data_place(name) if name.startswith("hf:") else name for name in found]


@dataclass(frozen=True)
class SourceFlags:
    source: list = flag((), "projects (directories, git checkouts, tarballs) or tables (parquet, JSON Lines), "
                        "also hf://datasets/ORG/NAME/PATH, separated by commas", of=paths)
    text_column: str | None = flag(None, "column of the tables' text; default: text, content, code, contents or "
                                   "source_code", of=not_empty)
    projects_dir: Path | None = flag(None, "every subdirectory and tarball of this directory is a project",
                                     of=expand_path)
    installed_headers: bool = flag(False, "the headers that pyarrow and torch install")


@dataclass(frozen=True)
class PlaceFlags:
    out_dir: Path | None = flag(None, f"directory for {TRAIN_DIR}/, {VAL_DIR}/ and {MANIFEST}; default: "
                                "$NANOCHAT_BASE_DIR/parquet", of=expand_path)
    cache_dir: Path | None = flag(None, "directory for downloads; default: $NANOCHAT_BASE_DIR/downloads",
                                  of=expand_path)
    workers: int = flag(-1, "number of processes; -1: one per core, 8 at most, or all of a cluster", at_least=1,
                        at_most=1000, unset=-1)
    engine: str = flag("local", "where the work is done: by processes of this machine, or on a Ray cluster",
                       choices=("local", "ray"))
    ray_address: str | None = flag(None, "HOST:PORT of the Ray cluster, or auto: this machine's; default: "
                                   "$RAY_ADDRESS")


def find_sources(flags, cache_dir):
    """Returns all Sources that the SourceFlags name, in an order independent of the flags' order."""
    sources = open_projects(flags.projects_dir) if flags.projects_dir else []
    for name in flags.source:
        origin = pinned(name) if on_hub(name) else ""
        path = fetch(origin, require_writable_dir(cache_dir / "hub")) if origin else expand_path(name)
        table = open_table(path, flags.text_column)
        sources.append(replace(table or replace(open_source(path), is_own=True), origin=origin))
    if flags.text_column and not any(source.columns for source in sources):
        raise BadInput("--text_column is for tables: name parquet or JSON Lines with --source, too")
    sources = list(chain.from_iterable(map(pieces, distinguish(sources))))
    if flags.installed_headers:
        sources += installed_headers()
    if not sources:
        raise BadInput("no sources: name some with --source, --projects_dir or --installed_headers")
    return sorted(sources, key=lambda source: (source.label, source.directory, source.archive, source.files))


def choose_held_out(sizes, budget):
    """Returns the names of some files, {name: size}, of at most `budget` together, but of one at least."""
    # In the order of a hash: random, and the same at each try. A file that is larger than what is left is not chosen,
    # so that no large one becomes all of the held-out text.
    chosen = []
    for name in sorted(sizes, key=lambda name: hashlib.blake2b(os.fsencode(name)).digest()):
        if sizes[name] <= budget:
            chosen.append(name)
            budget -= sizes[name]
    return chosen or [min(sizes, key=sizes.get)]


def hold_out_files(sources, flags):
    """Returns the Sources and CorpusFlags. If the only source is one project in a folder, which nothing else could
    validate, it becomes two: its files to train on, and those that are held out."""
    source = sources[0]
    sizes = {file: os.path.getsize(os.path.join(source.directory, file)) for file in source.files
             if file.lower().endswith(SUFFIXES)}
    # Without the files that will be dropped: 5% of a large one may be all others.
    sizes = {file: size for file, size in sizes.items() if size <= flags.max_file_bytes}
    if len(sources) > 1 or source.columns or flags.eval_only or flags.val_projects or len(sizes) < 2:
        return sources, flags
    held_out = set(choose_held_out(sizes, flags.val_fraction * sum(sizes.values())))
    say(f"{source.name} is the only project: {len(held_out)} of its {len(sizes)} files are held out for validation, "
        f"not trained on (--val_fraction={flags.val_fraction:g}; add a project to hold it out as a whole)")
    parts = {source.name: [file for file in source.files if file not in held_out],
             f"{source.name} (held out)": [*held_out, *filter(LICENCE_FILE.fullmatch, source.files)]}
    train, val = (directory_source(name, source.directory, sorted(part), version=source.version, is_own=source.is_own,
                                   origin=source.origin)
                  for name, part in parts.items())
    return [train, val], replace(flags, val_projects=[val.project])


def check_apart(sources, flags, out_dir):
    """Raises BadInput if `out_dir` is also a source: the next run would read its shards."""
    lock_file = out_dir.resolve() / LOCK_FILE
    named = {expand_path(name).resolve() for name in flags.source if not on_hub(name)}
    around = {flags.projects_dir and flags.projects_dir.resolve()} & {out_dir.resolve()}
    for source in sources:
        directory = Path(source.directory)
        is_in_table = source.columns and directory in named and directory in lock_file.parents
        if is_in_table or source.directory and os.path.relpath(lock_file, directory) in source.files:
            around.add(directory)
    if around:
        raise BadInput(f"--out_dir={out_dir} is in {min(around)}, which is read as a source: choose another --out_dir")


def choose_engine(places, task_bytes):
    """Returns the engine of build.prepare. Raises BadInput if the cluster cannot be reached. task_bytes: the memory
    that a task may take."""
    workers = None if places.workers == -1 else places.workers
    if places.engine == "ray":
        return ray_cluster(find_address(places.ray_address), workers, task_bytes)
    if places.ray_address:
        raise BadInput("--ray_address needs --engine=ray: give that too, or leave it out")
    return worker_pool(workers or min(os.cpu_count(), 8))


def main(argv=None):
    sources, flags, places = read_flags(argv, __doc__, {
        SourceFlags: "sources, in any combination", CorpusFlags: "the corpus", PlaceFlags: "directories and processes"},
        gone={"ray_open": "a Ray cluster without a token gets a warning: leave it out",
              "debian_source": "get packages with apt-get source, and name their folder with --projects_dir",
              "where": "choose the rows beforehand, as docs/data.md shows"})
    if flags.eval_only and flags.val_projects:
        raise BadInput("--val_projects and --eval_only exclude each other: an evaluation corpus has no training part")
    excluded = []
    for name in flags.exclude_problems:
        excluded += [problem.prompt for problem in read_problems(name, "--exclude_problems")]
    out_dir = require_writable_dir(places.out_dir or get_base_dir() / "parquet").absolute()  # for nodes of a cluster
    cache_dir = (places.cache_dir or get_base_dir() / "downloads").absolute()
    engine = choose_engine(places, flags.task_bytes)
    busy = f"another prepare_data is writing to {out_dir}: wait for it or choose another --out_dir"
    try:
        with locked(out_dir / LOCK_FILE, busy):
            found = find_sources(sources, cache_dir)
            check_apart(found, sources, out_dir)
            found, flags = hold_out_files(found, flags)
            prepare(found, flags, excluded, engine, out_dir)
    except BrokenProcessPool:
        raise BadInput("a worker process was killed, perhaps because memory ran out: give fewer --workers and run the "
                       "same command again, which resumes") from None
    except OSError as error:
        if is_disk_full(error):
            raise BadInput(f"the disk is full ({error}): free some space and run the same command again, which "
                           "resumes") from None
        raise BadInput(f"{error}: mend this and run the same command again, which resumes") from None


if __name__ == "__main__":
    run_script(main, "preparing the data")
