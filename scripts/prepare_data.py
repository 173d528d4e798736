"""Makes a corpus of C and C++: parquet shards of some projects for training, and of others for validation.

    python3 -m scripts.prepare_data --installed_headers
    python3 -m scripts.prepare_data --debian_source=fmtlib,abseil,re2 --source=~/src/my_project,foo-1.2.tar.xz

It may be killed at any time: the same command resumes and makes the same shards, byte for byte.
"""
import errno
import hashlib
import json
import os
import shutil
from collections import Counter
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout

from nanochat.common import BadInput, expand_path, flag, get_base_dir, read_flags, require_writable_dir, run_script
from nanochat.corpus import corpus
from nanochat.corpus.contamination import telling_sequences
from nanochat.corpus.debian import check_names, debian_sources
from nanochat.corpus.duplicates import find_duplicates, load_index, shuffle_duplicates
from nanochat.corpus.progress import Progress
from nanochat.corpus.ray_cluster import RayRun, find_address, ray_cluster
from nanochat.corpus.sources import distinguish, installed_headers, open_projects, open_source
from nanochat.corpus.workers import worker_pool
from nanochat.judge.problems import digest, read_excluded

TRAIN_DIR, VAL_DIR, MANIFEST, LOCK_FILE = "base_data_v3", "val", "manifest.json", ".prepare_data.lock"


def names(text):
    return [name.strip() for name in text.split(",") if name.strip()]


@dataclass(frozen=True)
class SourceFlags:
    source: list = flag((), "directories, git checkouts and tarballs, separated by commas; each is one project",
                        of=names)
    projects_dir: Path | None = flag(None, "every subdirectory and tarball of this directory is a project",
                                     of=expand_path)
    debian_source: list = flag((), "names of source packages of Debian or Ubuntu, separated by commas", of=names)
    installed_headers: bool = flag(False, "the headers that pyarrow and torch install")


@dataclass(frozen=True)
class CorpusFlags:
    max_file_bytes: int = flag(1_000_000, "longer files are dropped", at_least=1, at_most=100_000_000)
    val_fraction: float = flag(0.05, "fraction of the bytes that is held out for validation, in whole projects",
                               above=0, below=1)
    val_projects: list = flag((), "hold out these projects instead, separated by commas", of=names)
    exclude_problems: list = flag((), "drop documents that contain a part of a prompt of these problems: files for "
                                  "code_eval --problems, or own (the project's), separated by commas", of=names)
    eval_only: bool = flag(False, f"make an evaluation corpus: only {VAL_DIR}/")
    pack: str = flag("file", "what a document is: a file, or a project's files in the order in which they include each "
                     "other", choices=("file", "project"))
    shard_bytes: int = flag(100_000_000, "bytes of text in one shard", at_least=1, at_most=1_000_000_000)
    seed: int = flag(1337, "seed of the split and of the order of documents", at_least=0)


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
    ray_address: str | None = flag(None, "HOST:PORT of the Ray cluster, auto (the one of this machine) or local (start "
                                   "one here); default: $RAY_ADDRESS")


# -----------------------------------------------------------------------------
# The steps


def find_sources(flags, eval_only, cache_dir):
    """Returns all Sources that the SourceFlags name, in an order that does not depend on the order of the flags."""
    check_names(flags.debian_source, eval_only=eval_only)
    sources = [open_source(expand_path(name)) for name in flags.source]
    if flags.projects_dir:
        sources += open_projects(flags.projects_dir)
    sources = distinguish(sources)
    if flags.installed_headers:
        sources += installed_headers()
    if flags.debian_source:
        sources += debian_sources(flags.debian_source, require_writable_dir(cache_dir / "debian"), Progress)
    if not sources:
        raise BadInput("no sources: name some with --source, --projects_dir, --debian_source or --installed_headers")
    return sorted(sources, key=lambda source: (source.label, source.directory, source.archives))


def check_apart(sources, projects_dir, out_dir):
    """Raises BadInput if `out_dir`, in which the lock file is, is a source too: the next run would read its shards."""
    lock_file = out_dir.resolve() / LOCK_FILE
    around = [source.directory for source in sources
              if source.directory and os.path.relpath(lock_file, source.directory) in source.files]
    if around or projects_dir and projects_dir.resolve() == out_dir.resolve():
        raise BadInput(f"--out_dir={out_dir} is in {(around or [projects_dir])[0]}, which is read as a source: choose "
                       "another --out_dir")


def require_disk(directory, nbytes, what):
    """Raises BadInput unless `nbytes` are free in `directory`."""
    free = shutil.disk_usage(directory).free
    if free < nbytes:
        raise BadInput(f"{what} needs about {nbytes / 1e6:.0f} MB in {directory}, which has {free / 1e6:.0f} MB free: "
                       "free some space or choose another --out_dir")


def choose_engine(places):
    """Returns a function of the bytes of memory that a task may take, whose result is a context manager of run(…), as
    worker_pool. Raises BadInput if the cluster cannot be reached."""
    if places.engine == "local":
        if places.ray_address:
            raise BadInput("--ray_address needs --engine=ray: give both, or neither")
        return lambda task_bytes: worker_pool(min(os.cpu_count(), 8) if places.workers == -1 else places.workers)
    return partial(ray_cluster, find_address(places.ray_address), None if places.workers == -1 else places.workers)


def task_bytes(sources, flags):
    """Returns the memory in bytes that a task of this corpus may take, well above what was measured."""
    project = max(source.nbytes * (8 if source.archives else 1) for source in sources) if flags.pack == "project" else 0
    return 600_000_000 + 6 * max(flags.shard_bytes, flags.max_file_bytes, project)


def scan_all(sources, flags, work_dir, run):
    """Scans every source. Returns the directories of their runs and their statistics, in the order of `sources`."""
    directories = [None] * len(sources)
    largest_first = sorted(range(len(sources)), key=lambda i: -sources[i].nbytes)
    bar = Progress(f"reading {len(sources)} sources", sum(source.nbytes for source in sources))

    def done(i, directory):
        directories[largest_first[i]] = directory
        bar.update(sources[largest_first[i]].nbytes)

    excluded = telling_sequences(problem.prompt for problem in read_excluded(flags.exclude_problems))
    run(corpus.scan, [(sources[i], work_dir / "scans", flags.seed, flags.max_file_bytes, excluded)
                      for i in largest_first], done)
    bar.close()
    return directories, [json.loads((directory / "stats.json").read_text()) for directory in directories]


def split_projects(sources, stats, flags):
    """Returns the names of the projects that are held out for validation. Raises BadInput if a side would be empty."""
    bytes_by_project = Counter()
    for source, stat in zip(sources, stats, strict=True):
        if stat["documents"]:
            bytes_by_project[source.project] += stat["bytes"]
    if not bytes_by_project:
        dropped = sum((Counter(stat["dropped"]) for stat in stats), Counter())
        raise BadInput(f"no C or C++ file is left of {sum(stat['files'] for stat in stats)} (dropped: "
                       f"{counts(dropped)}): check the sources")
    if flags.eval_only:
        return set(bytes_by_project)
    if len(bytes_by_project) == 1:
        raise BadInput(f"all files are of one project ({next(iter(bytes_by_project))}), which cannot be both for "
                       "training and for validation: add another source, or name a directory of several with "
                       "--projects_dir")
    if unknown := set(flags.val_projects) - set(bytes_by_project):
        raise BadInput(f"--val_projects: no project is called {', '.join(sorted(unknown))}; "
                       f"there are {', '.join(sorted(bytes_by_project))}")
    if set(flags.val_projects) == set(bytes_by_project):
        raise BadInput("--val_projects names every project: leave one to train on, or use --eval_only")
    return set(flags.val_projects) or corpus.choose_validation(bytes_by_project, flags.val_fraction, flags.seed)


def remove_leftovers(work_dir):
    """Removes what a killed run had begun; moved away first, because a task of it may still run on another machine."""
    for leftover in [*work_dir.rglob("*.partial"), *work_dir.rglob("*.gone"), *work_dir.glob("probe_*")]:
        gone = leftover.rename(leftover.with_suffix(".gone"))
        shutil.rmtree(gone) if gone.is_dir() else gone.unlink()


def build(sources, flags, engine, work_dir, staging):
    """Makes the shards in `staging` and returns the manifest, a dict. engine: what choose_engine returns."""
    remove_leftovers(work_dir)
    with engine(task_bytes(sources, flags)) as run:
        if on_cluster := isinstance(run, RayRun):
            run.check(work_dir, sources)
        directories, stats = scan_all(sources, flags, work_dir, run)
        val_projects = split_projects(sources, stats, flags)
        validates = [source.project in val_projects for source in sources]

        # Of several copies the first is kept. Validation comes first, so it stays whole and training loses the copies.
        order = sorted(range(len(sources)), key=lambda i: not validates[i])
        runs = [(i, path) for i in order for path in sorted(directories[i].glob("run_*.parquet"))]
        paths = [path for _, path in runs]
        index = load_index(paths, with_signatures=not on_cluster)
        if on_cluster:
            require_disk(staging, 1000 * len(index.key), "looking for duplicates")
            bar = Progress("looking for duplicates", 100, "%")
            exact, near = shuffle_duplicates(paths, np.bincount(index.run), staging / "duplicates", run,
                                             lambda fraction: bar.update(100 * fraction))
            bar.close()
        else:
            exact, near = find_duplicates(index)
        source_of = np.array([i for i, _ in runs])[index.run]
        for i, stat in enumerate(stats):
            stat["dropped"]["exact_duplicate"] = int(exact[source_of == i].sum())
            stat["dropped"]["near_duplicate"] = int(near[source_of == i].sum())

        kept, is_val = ~exact & ~near, np.array(validates)[source_of]
        sides = {VAL_DIR: kept & is_val} if flags.eval_only else {TRAIN_DIR: kept & ~is_val, VAL_DIR: kept & is_val}
        if not all(side.any() for side in sides.values()):
            raise BadInput("every training document is a copy of a validation document: add sources")
        num_files = {name: int(side.sum()) for name, side in sides.items()}
        if flags.pack == "project":
            index, sides = pack_projects(index, sides, source_of, staging, flags, run)
        calls = []
        for name, side in sides.items():
            (staging / name).mkdir(parents=True, exist_ok=True)
            calls += [(staging / name / f"shard_{number:05d}.parquet", pieces, flags.pack == "project")
                      for number, pieces in enumerate(corpus.plan_shards(index, side, flags.shard_bytes))]
        nbytes = int(sum(index.nbytes[side].sum() for side in sides.values()))
        require_disk(staging, nbytes // 3, "writing the shards")
        bar, shards = Progress(f"writing {len(calls)} shards", nbytes), {}
        index.signature = None  # the largest part by far, and not needed any more

        def done(i, description):
            path = calls[i][0]
            shards[f"{path.parent.name}/{path.name}"] = description
            bar.update(nbytes // len(calls))
        run(corpus.write_shard, calls, done)
        bar.close()
        if on_cluster:
            print(run.cost(sum(source.nbytes for source in sources)), flush=True)
    totals = {name: {"documents": int(side.sum()), "bytes": int(index.nbytes[side].sum()),
                     "shards": sum(path.parent.name == name for path, *_ in calls)} for name, side in sides.items()}
    if flags.pack == "project":
        for name, total in totals.items():
            total["files"] = num_files[name]
    return {**make_manifest(flags, sources, stats, val_projects, totals), "shards": dict(sorted(shards.items()))}


def pack_projects(index, sides, source_of, staging, flags, run):
    """Joins the files of each source. Returns the Index of the documents, and which of them are on each side, as build
    has them for files. Sources are on one side each, and stay in their order."""
    require_disk(staging, int(sum(index.nbytes[side].sum() for side in sides.values())) // 3, "joining the files")
    calls, names = [], []
    for name, side in sides.items():
        (staging / "packed" / name).mkdir(parents=True, exist_ok=True)
        for source in np.unique(source_of[side]):
            parts = corpus.parts_of(index, side & (source_of == source))
            calls.append((staging / "packed" / name / f"{source:06d}.parquet", parts, flags.seed))
            names.append(name)
    bar = Progress(f"ordering the files of {len(calls)} sources", len(calls), " sources")
    run(corpus.pack, calls, lambda i, _: bar.update(1))
    bar.close()
    packed = load_index([path for path, *_ in calls], with_signatures=False)
    return packed, {name: np.array([names[number] == name for number in packed.run]) for name in sides}


def make_manifest(flags, sources, stats, val_projects, totals):
    """Returns the manifest: flags, held-out projects, totals, and for each source its version, licences and counts."""
    return {
        "flags": {**asdict(flags), "val_projects": list(flags.val_projects)},
        "val_projects": sorted(val_projects),
        "totals": totals,
        "dropped": dict(sum((Counter(stat["dropped"]) for stat in stats), Counter())),
        "sources": [{"name": source.name, "version": source.version, "project": source.project,
                     "side": VAL_DIR if source.project in val_projects else TRAIN_DIR, **stat}
                    for source, stat in zip(sources, stats, strict=True)],
    }


def publish(staging, out_dir):
    """Moves a finished corpus to the directories in which training looks for it. If killed, it can be called again."""
    for name in (TRAIN_DIR, VAL_DIR, MANIFEST):
        if (staging / name).exists():
            os.replace(staging / name, out_dir / name)


def read_manifest(out_dir):
    """Returns the manifest in `out_dir`, or {} if there is none. Raises BadInput if it is damaged."""
    path = out_dir / MANIFEST
    try:
        manifest = json.loads(path.read_text())
        if isinstance(manifest, dict) and "identity" in manifest and "totals" in manifest:
            return manifest
        reason = "another program's"
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        reason = str(error)
    raise BadInput(f"{path} is not a manifest of this script ({reason}): move it away, or choose another --out_dir")


def missing_shards(manifest, out_dir):
    """Returns the paths in `out_dir` of the shards of the manifest that are not there, or not as they were written.

    Manifests of earlier versions have no sizes and sums, but only the numbers of shards.
    """
    expected = manifest.get("shards") or {f"{name}/shard_{number:05d}.parquet": None for name, total in
                                          manifest["totals"].items() for number in range(total["shards"])}
    missing = []
    for name, description in expected.items():
        try:
            found = corpus.describe_shard(out_dir / name)
        except OSError:
            found = {}
        if not found or description and found != description:
            missing.append(name)
    return missing


def check_out_dir(out_dir):
    """Raises BadInput if the corpus cannot be put into `out_dir`, because something else is there."""
    for name in (TRAIN_DIR, VAL_DIR):
        path = out_dir / name
        if path.is_symlink() or path.exists() and not path.is_dir():
            raise BadInput(f"{path} is {'a symbolic link' if path.is_symlink() else 'not a directory'}, where a "
                           "directory must be made: move it away, or choose another --out_dir")
        if path.exists() and any(path.iterdir()):
            raise BadInput(f"{path} holds other data: move it away, or choose another --out_dir")


def main(argv=None):
    sources, flags, places = read_flags(argv, __doc__, {
        SourceFlags: "sources, in any combination", CorpusFlags: "the corpus", PlaceFlags: "directories and processes"})
    if flags.eval_only and flags.val_projects:
        raise BadInput("--val_projects and --eval_only exclude each other: an evaluation corpus has no training part")
    read_excluded(flags.exclude_problems)  # before any work
    out_dir = require_writable_dir(places.out_dir or get_base_dir() / "parquet").absolute()  # for nodes of a cluster
    engine, cache_dir = choose_engine(places), (places.cache_dir or get_base_dir() / "downloads").absolute()
    try:
        with FileLock(out_dir / LOCK_FILE, timeout=0):
            found = find_sources(sources, flags.eval_only, cache_dir)
            check_apart(found, sources.projects_dir, out_dir)
            return prepare(found, flags, engine, out_dir)
    except Timeout:
        raise BadInput(f"another prepare_data is writing to {out_dir}: wait for it or choose another --out_dir"
                       ) from None
    except BrokenProcessPool:
        raise BadInput("a worker process was killed, perhaps because memory ran out: give fewer --workers and run the "
                       "same command again, which resumes") from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise BadInput(f"the disk is full ({error}): free some space and run the same command again, which "
                           "resumes") from None
        raise BadInput(f"{error}: mend this and run the same command again, which resumes") from None


def prepare(sources, flags, engine, out_dir):
    """Makes the corpus, or resumes making it; does nothing if `out_dir` already holds it."""
    recipe = [flags.seed, flags.max_file_bytes, flags.val_fraction, list(flags.val_projects), flags.eval_only,
              flags.shard_bytes, *([digest(excluded)] if (excluded := read_excluded(flags.exclude_problems)) else []),
              *([flags.pack] if flags.pack != "file" else [])]
    identity = json.dumps([corpus.RECIPE, recipe, [source.identity() for source in sources]])
    identity = hashlib.blake2b(identity.encode(), digest_size=12).hexdigest()
    work_dir = out_dir / ".work"
    staging = work_dir / identity

    if not (staging / MANIFEST).exists():
        manifest = read_manifest(out_dir)
        if manifest.get("identity") == identity:
            missing = missing_shards(manifest, out_dir)
            if not missing:
                shutil.rmtree(work_dir, ignore_errors=True)  # what is left of it if publishing was interrupted
                print(f"{out_dir} already holds this corpus")
                return
            if any(path.is_file() for name in (TRAIN_DIR, VAL_DIR) for path in out_dir.glob(f"{name}/*")):
                raise BadInput(f"{out_dir} holds this corpus, but {len(missing)} of its shards are missing or damaged "
                               f"({', '.join(missing[:3])}{' …' if len(missing) > 3 else ''}): move {TRAIN_DIR}/ and "
                               f"{VAL_DIR}/ away and run the same command again, which makes them")
        check_out_dir(out_dir)
        staging.mkdir(parents=True, exist_ok=True)
        require_disk(staging, sum(source.nbytes for source in sources), "the corpus")
        manifest = build(sources, flags, engine, work_dir, staging)
        (staging / ".manifest.partial").write_text(json.dumps({"identity": identity, **manifest}, indent=1))
        os.replace(staging / ".manifest.partial", staging / MANIFEST)
    publish(staging, out_dir)
    shutil.rmtree(work_dir)
    report(json.loads((out_dir / MANIFEST).read_text()), out_dir)


def counts(dropped):
    """Returns the numbers of dropped files as text, such as "46 generated, 7 empty"."""
    return ", ".join(f"{count} {reason}" for reason, count in Counter(dropped).most_common() if count) or "none"


def report(manifest, out_dir):
    print(f"read {sum(source['files'] for source in manifest['sources'])} files of {len(manifest['sources'])} sources; "
          f"dropped {counts(manifest['dropped'])}")
    for name, total in manifest["totals"].items():
        files = f"{total['files']} files in " if "files" in total else ""
        print(f"{out_dir / name}: {files}{total['documents']} documents, {total['bytes'] / 1e6:.1f} MB of text, "
              f"{total['shards']} shards")
    print(f"projects held out for validation: {', '.join(manifest['val_projects'])}")
    print(f"versions, licences and numbers of files: {out_dir / MANIFEST}")


if __name__ == "__main__":
    run_script(main)
