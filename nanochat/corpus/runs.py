"""Runs: small parquet files of documents, sorted by a 64-bit key, the seeded hash of a document's text."""
import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nanochat.corpus.workers import whole_file

NUM_PERMUTATIONS = 128  # of a signature, see duplicates.py
VALUES_PER_BAND = 8
BANDS = [f"band_{number}" for number in range(NUM_PERMUTATIONS // VALUES_PER_BAND)]
ROW_GROUP_DOCUMENTS = 64
SCHEMA = pa.schema([("text", pa.string()), ("path", pa.string()), ("source", pa.string()), ("licence", pa.string())])
RUN_SCHEMA = pa.schema([*SCHEMA, ("key", pa.uint64()), ("nbytes", pa.int64()),
                        ("signature", pa.binary(4 * NUM_PERMUTATIONS)), *((band, pa.uint64()) for band in BANDS)])


def key_of(text, seed):
    """Returns the number by which the corpus orders a document. Equal texts have equal keys."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8, key=seed.to_bytes(8, "little")).digest(), "little")


def write_run(path, documents):
    """Writes a list of documents, dicts with the columns of RUN_SCHEMA, sorted by their key."""
    documents.sort(key=lambda document: document["key"])
    row_groups = (pa.Table.from_pylist(documents[start:start + ROW_GROUP_DOCUMENTS], RUN_SCHEMA)
                  for start in range(0, len(documents), ROW_GROUP_DOCUMENTS))
    write_parquet(path, RUN_SCHEMA, row_groups, compression_level=1)


def write_parquet(path, schema, row_groups, compression_level=None):
    """Writes a parquet file with a row group for each of these tables. `path` appears once the file is whole."""
    # shards.py verifies the checksums of the pages.
    with whole_file(path) as file, pq.ParquetWriter(
            file, schema, compression="zstd", compression_level=compression_level,
            use_dictionary=["source", "licence"], write_statistics=False, write_page_checksum=True) as writer:
        for table in row_groups:
            writer.write_table(table)


@dataclass
class Index:
    """Describes all N documents. Of several copies, the one that comes first in this order is kept."""
    runs: list[Path]
    run: np.ndarray  # (N,) index into runs
    document: np.ndarray  # (N,) number of the document in its run
    key: np.ndarray  # (N,) uint64
    nbytes: np.ndarray  # (N,)


def load_index(runs):
    """Returns the Index of all documents in `runs`, a list of paths, in their order."""
    keys = read_column(runs, "key")
    lengths = list(map(len, keys))
    return Index(runs, np.repeat(np.arange(len(runs)), lengths), np.concatenate(list(map(np.arange, lengths))),
                 np.concatenate(keys), np.concatenate(read_column(runs, "nbytes")))


def read_column(runs, name):
    """Returns a column of numbers, a list with an array (documents,) for each of the runs."""
    return [pq.read_table(path, columns=[name])[name].to_numpy() for path in runs]


def parts_of(index, documents):
    """Returns [(path of a run, numbers of documents in it)] of these documents, numbers in the index."""
    # Numbers in the index rise with the runs, so each run's documents become one slice.
    documents = np.sort(documents)  # by run, and in each run
    run, starts = np.unique(index.run[documents], return_index=True)
    in_runs = np.split(index.document[documents], starts[1:])
    return [(index.runs[number], in_run) for number, in_run in zip(run, in_runs, strict=True)]


def read_parts(parts, columns):
    """Returns a table of these `columns`, with the documents `parts` = [(path of a run, numbers)]."""
    tables = []
    for run, documents in parts:
        # All row groups except a run's last have ROW_GROUP_DOCUMENTS documents, so a document's number gives its row
        # group. `groups` are read, and row_group counts among these.
        groups, row_group = np.unique(documents // ROW_GROUP_DOCUMENTS, return_inverse=True)
        table = pq.ParquetFile(run).read_row_groups(groups, columns=columns)
        tables.append(table.take(row_group * ROW_GROUP_DOCUMENTS + documents % ROW_GROUP_DOCUMENTS))
    return pa.concat_tables(tables).combine_chunks()
