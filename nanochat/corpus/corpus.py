"""Makes shards of runs: holds out projects for validation, shuffles.

The shuffle is an external merge sort. scan.py writes runs, sorted by a key. After that only the keys and the MinHash
signatures are read, to find duplicates (duplicates.py) and to plan the shards. `write_shard` collects the documents of
one range of keys from all runs. So the order is a uniform shuffle of the whole corpus, and depends only on the texts
and the seed.
"""
import hashlib

import numpy as np

from nanochat.corpus.runs import SCHEMA, parts_of, read_parts, write_parquet

MAX_SHARDS = 100_000  # their names have five digits
SHARD_ROW_GROUP_DOCUMENTS = 256  # about 2 MB of text, so that many row groups can be read concurrently in little memory


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
    Returns what describe_shard does."""
    if path.exists():
        return describe_shard(path)
    table = read_parts(parts, [*SCHEMA.names, "key"])
    order = np.argsort(table["key"].to_numpy())
    table = table.select(SCHEMA.names)
    row_groups = (table.take(order[start:start + SHARD_ROW_GROUP_DOCUMENTS])
                  for start in range(0, len(order), SHARD_ROW_GROUP_DOCUMENTS))
    write_parquet(path, SCHEMA, row_groups)
    return describe_shard(path)


def describe_shard(path):
    """Returns {"bytes": size, "sha256": hexadecimal} of a file. Raises OSError."""
    digest = hashlib.sha256()
    nbytes = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
            nbytes += len(block)
    return {"bytes": nbytes, "sha256": digest.hexdigest()}
