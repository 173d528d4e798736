"""Makes a corpus of sources in a folder, step by step. Each step resumes where it was, if the program was killed.

The documents are shuffled by an external merge sort. scan.py writes runs, sorted by a key. After that only the keys and
the MinHash signatures are read, to find duplicates (duplicates.py) and to plan the shards. `write_shard` collects the
documents of one range of keys from all runs. So the order is a uniform shuffle of the whole corpus, and depends only on
the texts and the seed.
"""
import hashlib
import json
import shutil
from collections import Counter
from dataclasses import dataclass

import numpy as np

from nanochat.checkpoint.on_disk import sha256_of_files
from nanochat.common import BadInput, counted, flag, say, written_whole
from nanochat.corpus import manifest
from nanochat.corpus.duplicates import find_duplicates
from nanochat.corpus.filters import parse_filters
from nanochat.corpus.manifest import MANIFEST, TRAIN_DIR, VAL_DIR, all_dropped
from nanochat.corpus.runs import SCHEMA, load_index, parts_of, read_parts, write_parquet
from nanochat.corpus.scan import HELD_OUT, RECIPE, STATS, scan, telling_sequences
from nanochat.record.progress import Progress

MAX_SHARDS = 100_000  # their names have five digits
SHARD_ROW_GROUP_DOCUMENTS = 256  # about 2 MB of text, so that many row groups can be read concurrently in little memory


def names(text):
    return [name.strip() for name in text.split(",") if name.strip()]


@dataclass(frozen=True)
class CorpusFlags:
    max_file_bytes: int = flag(1_000_000, "longer files are dropped", at_least=1, at_most=100_000_000)
    val_fraction: float = flag(0.05, "share of the bytes, or of a table's projects, held out", above=0, below=1)
    val_projects: list = flag((), "hold out these projects instead, separated by commas", of=names)
    exclude_problems: list = flag((), "drop documents that contain prompts of these problems: files, or own, "
                                  "separated by commas; own: the project's", of=names)
    filters: list = flag((), "secrets: drop documents with keys or tokens; emails: replace addresses; or all, for both",
                         of=parse_filters)
    licences: str = flag("any", "keep documents of these licences", choices=("any", "permissive"))
    eval_only: bool = flag(False, f"make an evaluation corpus: only {VAL_DIR}/")
    shard_bytes: int = flag(100_000_000, "bytes of text in one shard", at_least=1, at_most=1_000_000_000)
    seed: int = flag(1337, "seed of the split and of the order of documents", at_least=0)

    @property
    def task_bytes(self):
        """The memory in bytes that a task of this corpus may take, with a margin above measurements."""
        return 600_000_000 + 6 * max(self.shard_bytes, self.max_file_bytes)


def prepare(sources, flags, excluded, engine, out_dir):
    """Makes the corpus, or resumes making it; does nothing if `out_dir` already holds it. flags: CorpusFlags. excluded:
    texts of which no document may contain a part. engine: a context manager of run(function, calls, done), as
    worker_pool."""
    identity = identity_of(sources, flags, excluded)
    work_dir = out_dir / ".work"
    staging = work_dir / identity
    # The identity names the folder in which this corpus is made, so a command resumes only its own work. The manifest
    # comes last: a folder that has it is whole, and only has to be published.
    if not (staging / MANIFEST).exists():
        check_validation(sources, flags)
        if manifest.holds(out_dir, identity):
            shutil.rmtree(work_dir, ignore_errors=True)  # the rest of an interrupted publish
            print(f"{out_dir} already holds this corpus")
            return
        manifest.check_out_dir(out_dir)
        staging.mkdir(parents=True, exist_ok=True)
        for other in set(work_dir.iterdir()) - {staging}:  # the unfinished work of another command
            shutil.rmtree(other, ignore_errors=True)
        require_disk(staging, total_bytes(sources))
        with engine as run:
            made = build(sources, flags, excluded, run, staging)
        with written_whole(staging / MANIFEST) as path:
            path.write_text(json.dumps({"identity": identity, **made}, indent=1))
    manifest.publish(staging, out_dir)
    shutil.rmtree(work_dir)
    manifest.report(json.loads((out_dir / MANIFEST).read_text()), out_dir)


def identity_of(sources, flags, excluded):
    """Returns a hexadecimal hash of all that decides the bytes of the corpus."""
    own = () if flags.eval_only or flags.val_projects else own_projects(sources)  # they limit only the choice
    # "file" is what a document is: earlier versions could make it of several files.
    recipe = [flags.seed, flags.max_file_bytes, flags.val_fraction, list(flags.val_projects), flags.eval_only,
              flags.shard_bytes, excluded, "file", sorted(own), flags.filters, flags.licences]
    identity = json.dumps([RECIPE, recipe, [source.identity() for source in sources]])
    return hashlib.blake2b(identity.encode(), digest_size=12).hexdigest()


def build(sources, flags, excluded, run, staging):
    """Makes the shards in `staging` and returns the manifest, a dict."""
    folders, stats = scan_all(sources, flags, telling_sequences(excluded), staging / "scans", run)
    val_projects = split_projects(sources, stats, flags)
    is_val = np.array([source.project in val_projects for source in sources])
    index, sides = unique_documents(folders, stats, is_val, flags)
    shards = write_shards(index, sides, flags, staging, run)
    totals = {}
    for name, side in sides.items():
        totals[name] = {"documents": int(side.sum()), "bytes": int(index.nbytes[side].sum()),
                        "shards": sum(shard.startswith(f"{name}/") for shard in shards)}
    made = manifest.make_manifest(flags, sources, stats, val_projects, totals)
    return {**made, "shards": dict(sorted(shards.items()))}


def check_validation(sources, flags):
    """Raises BadInput if the projects cannot be divided as the flags say."""
    projects = {source.project for source in sources}
    if unknown := set(flags.val_projects) - projects:
        raise BadInput(f"--val_projects: no project is called {', '.join(sorted(unknown))}; there are "
                       f"{', '.join(sorted(projects))}")
    if set(flags.val_projects) == projects:
        raise BadInput("--val_projects names every project: leave one to train on, or use --eval_only")
    if not (flags.val_projects or flags.eval_only):
        validation_candidates(projects, sources)


def validation_candidates(projects, sources):
    """Returns those of `projects` that may be held out unasked. Raises BadInput if none may, and there is no table."""
    tables = table_projects(sources)
    # Training would see nothing of a project that is held out, so never one of the user's own.
    candidates = projects - own_projects(sources) - tables
    if not tables and (not candidates or len(projects) == 1):
        raise BadInput(f"no project can be held out for validation of {', '.join(sorted(projects))}: add one with "
                       "--projects_dir, name one of several with --val_projects, or unpack an archive: of a single "
                       "folder some files are held out")
    return candidates


def own_projects(sources):
    return {source.project for source in sources if source.is_own}


def table_projects(sources):
    return {source.project for source in sources if source.columns}


def total_bytes(sources):
    return sum(source.nbytes for source in sources)


def require_disk(directory, nbytes):
    """Raises BadInput unless `nbytes` are free in `directory`."""
    free = shutil.disk_usage(directory).free
    if free < nbytes:
        raise BadInput(f"the corpus needs about {nbytes / 1e6:.0f} MB in {directory}, which has {free / 1e6:.0f} MB "
                       "free: free some space or choose another --out_dir")


def require_seen(path):
    """Raises BadInput if what another machine wrote is not here."""
    if not path.exists():
        raise BadInput(f"{path}, which a node of the cluster wrote, is not seen here: name an --out_dir that all nodes "
                       "share")


# The steps


def scan_all(sources, flags, excluded, scans, run):
    """Scans every source. Returns the folders of their runs and their statistics, in the order of `sources`."""
    folders = [scans / f"{i:05d}" for i in range(len(sources))]
    for folder in folders:
        if not (folder / STATS).exists():
            shutil.rmtree(folder, ignore_errors=True)  # of a killed command: its runs could be beside those to come
    stats = [None] * len(sources)
    # Largest first, so that no worker reads a large source at the end while the others are idle.
    largest_first = sorted(range(len(sources)), key=lambda i: -sources[i].nbytes)
    with Progress("reading the sources", total_bytes(sources)) as bar:
        def done(number, found):
            i = largest_first[number]
            require_seen(folders[i] / STATS)
            stats[i] = found
            bar.update(sources[i].nbytes)

        run(scan, [(sources[i], folders[i], flags, excluded) for i in largest_first], done)
    return folders, stats


def split_projects(sources, stats, flags):
    """Returns the names of the held-out projects, and prints those that nobody named. Raises BadInput if there is no
    document."""
    bytes_by_project = Counter()
    for source, stat in zip(sources, stats, strict=True):
        if stat["documents"]:
            bytes_by_project[source.project] += stat["bytes"]
    if not bytes_by_project:
        files = sum(stat["files"] for stat in stats)
        dropped = manifest.counts(all_dropped(stats))
        raise BadInput(f"no C or C++ file is left of {files} (dropped: {dropped}): check the sources")
    if flags.eval_only:
        return set(bytes_by_project)
    if flags.val_projects:
        return set(flags.val_projects)
    candidates = validation_candidates(set(bytes_by_project), sources)
    tables = table_projects(sources)
    if tables:
        say(f"held out for validation, not trained on: {flags.val_fraction:.1%} of the projects or paths "
            f"of {', '.join(sorted(tables))}")
    if len(candidates) < 2 and tables:
        return set()
    divisible = {project: size for project, size in bytes_by_project.items() if project not in tables}
    chosen = choose_validation(divisible, candidates, flags.val_fraction, flags.seed)
    say(f"held out for validation, not trained on: {', '.join(sorted(chosen))} (--val_projects chooses others)")
    return chosen


def choose_validation(bytes_by_project, candidates, fraction, seed):
    """Returns the names of the held-out projects, a set: those of `candidates` that fit into `fraction` of all bytes,
    taken in the order of a seeded hash until half of that is filled. If none fits, it is the smallest candidate."""
    budget = fraction * sum(bytes_by_project.values())
    chosen = []
    nbytes = 0
    for project in sorted(candidates, key=lambda name: hashlib.blake2b(f"{seed}:{name}".encode()).digest()):
        if nbytes + bytes_by_project[project] <= budget and nbytes < budget / 2:
            chosen.append(project)
            nbytes += bytes_by_project[project]
    return set(chosen or [min(candidates, key=lambda name: (bytes_by_project[name], name))])


def unique_documents(folders, stats, is_val, flags):
    """Returns the Index of all documents, and {folder: (N,) bool, which of them are in it}, without duplicates, which
    are counted in `stats`. Raises BadInput if a folder would be empty. is_val: (sources,) bool. Validation comes first:
    it stays whole, and training loses the copies."""
    runs = []  # (not held out, number of the source, path)
    for i, folder in enumerate(folders):
        for path in folder.glob("run_*.parquet"):
            is_held_out = is_val[i] or path.name.endswith(HELD_OUT)
            runs.append((not is_held_out, i, path))
    runs.sort()
    is_train, numbers, paths = map(list, zip(*runs, strict=True))
    index = load_index(paths)
    exact, near = find_duplicates(index)
    source = np.array(numbers)[index.run]  # (documents,)
    for i, stat in enumerate(stats):
        stat["dropped"]["exact_duplicate"] = int(exact[source == i].sum())
        stat["dropped"]["near_duplicate"] = int(near[source == i].sum())
    kept = ~exact & ~near
    sides = {}
    in_training = np.array(is_train)[index.run]
    if not flags.eval_only:
        sides[TRAIN_DIR] = kept & in_training
    sides[VAL_DIR] = kept & ~in_training
    for name, side in sides.items():
        if not side.any():
            raise BadInput(f"of {len(index.key)} documents, without copies of others, none is left for {name}/: add "
                           "sources, or give another --val_fraction or --val_projects")
    return index, sides


def write_shards(index, sides, flags, staging, run):
    """Writes the shards, and returns {name: size and hash}, as write_shard."""
    calls = []
    nbytes = 0
    for name, side in sides.items():
        nbytes += int(index.nbytes[side].sum())
        (staging / name).mkdir(parents=True, exist_ok=True)
        for number, parts in enumerate(plan_shards(index, side, flags.shard_bytes)):
            calls.append((staging / name / f"shard_{number:05d}.parquet", parts))
    shards = {}
    with Progress(f"writing {counted(len(calls), 'shard')}", nbytes) as bar:
        def done(i, description):
            path = calls[i][0]
            require_seen(path)
            shards[f"{path.parent.name}/{path.name}"] = description
            bar.update(nbytes // len(calls))

        run(write_shard, calls, done)
    return shards


def plan_shards(index, kept, shard_bytes):
    """Returns for each shard a list of (path of a run, numbers of documents in it). The documents `kept` (a bool mask)
    are sorted by key and cut into shards of about `shard_bytes` of text. A document is never cut, so shards are larger
    if documents are."""
    chosen = np.flatnonzero(kept)
    chosen = chosen[np.argsort(index.key[chosen])]
    ends = np.cumsum(index.nbytes[chosen])
    num_shards = max(1, min(round(ends[-1] / shard_bytes), len(chosen), MAX_SHARDS))
    # (documents,), never falling. The text is divided into equal spans, and a document belongs to the span of its last
    # byte. A span that a long document leaps over has no shard.
    shard_of = (ends - 1) * num_shards // ends[-1]
    return [parts_of(index, documents) for documents in np.split(chosen, np.flatnonzero(np.diff(shard_of)) + 1)]


def write_shard(path, parts):
    """Writes the shard `path`, unless it exists: the documents `parts` = [(path of a run, numbers)], sorted by key.
    Returns {"bytes": size, "sha256": hexadecimal} of the file."""
    if not path.exists():
        table = read_parts(parts, [*SCHEMA.names, "key"])
        order = np.argsort(table["key"].to_numpy())
        table = table.select(SCHEMA.names)
        row_groups = (table.take(order[start:start + SHARD_ROW_GROUP_DOCUMENTS])
                      for start in range(0, len(order), SHARD_ROW_GROUP_DOCUMENTS))
        write_parquet(path, SCHEMA, row_groups)
    return {"bytes": path.stat().st_size, "sha256": sha256_of_files([path])[path]}
