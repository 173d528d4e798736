"""Which documents are copies of an earlier one: exact by their key, near by their MinHash signature.

Near copies are found by locality-sensitive hashing: a document is compared with the first document whose signature
agrees with its own in a whole band. The fraction of equal values in two signatures estimates the Jaccard similarity of
the documents.
"""
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rensa import RMinHash

from nanochat.corpus.workers import whole_file

NUM_PERMUTATIONS, VALUES_PER_BAND = 128, 8  # 16 bands: pairs of similarity 0.8 are found with probability 0.95
NEAR_DUPLICATE_SIMILARITY = 0.8  # estimated Jaccard similarity of the sets of 5-word sequences
CHUNK_DOCUMENTS, PART_KEYS = 100_000, 2_000_000  # of one task: 50 MB of signatures, 32 MB of keys
COMPARED_AT_ONCE = 65536  # pairs of signatures: 64 MB


def signature(data):
    """Returns the MinHash signature of the set of all sequences of 5 words, as 4 * NUM_PERMUTATIONS bytes.

    Punctuation and white space are ignored. MinHash: Broder, "On the resemblance and containment of documents", 1997.
    """
    words = re.findall(rb"\w+", data)
    minhash = RMinHash(NUM_PERMUTATIONS, 0)
    sequences = list(map(b" ".join, zip(words, words[1:], words[2:], words[3:], words[4:], strict=False)))
    minhash.update(sequences or [b" ".join(words)])
    return np.array(minhash.digest(), np.uint32).tobytes()


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
    columns = {"run": [], "document": [], "key": [], "nbytes": []}
    for number, path in enumerate(runs):
        table = pq.read_table(path, columns=["key", "nbytes"])
        columns["run"].append(np.full(len(table), number))
        columns["document"].append(np.arange(len(table)))
        columns["key"].append(table["key"].to_numpy())
        columns["nbytes"].append(table["nbytes"].to_numpy())
    return Index(runs, **{name: np.concatenate(parts) for name, parts in columns.items()})


def load_signatures(runs):
    """Returns the signatures of all documents in `runs`, (N, NUM_PERMUTATIONS) uint32."""
    signatures = []
    for path in runs:
        signatures += pq.read_table(path, columns=["signature"])["signature"].to_pylist()
    return np.frombuffer(b"".join(signatures), np.uint32).reshape(-1, NUM_PERMUTATIONS)


def band_hashes(signatures):
    """Yields for each band a (N,) uint64 array: equal numbers stand for equal values in the band."""
    weights = np.random.default_rng(0).integers(1, 2**63, VALUES_PER_BAND, dtype=np.uint64)
    for band in range(0, NUM_PERMUTATIONS, VALUES_PER_BAND):
        # The eight values of a band become one number by a random linear combination, so that one sort groups all
        # documents.
        yield signatures[:, band:band + VALUES_PER_BAND] @ weights  # modulo 2^64


# The files of the shuffle

_FIRST = pa.field("first", pa.int64())  # number of a document in the whole index, as everywhere below
_KEYS = pa.schema([pa.field("key", pa.uint64()), _FIRST])
_FIRSTS = pa.schema([_FIRST])
_PAIRS = pa.schema([pa.field("document", pa.int64()), pa.field("sent", pa.int32()), _FIRST])
_SENT = pa.schema([pa.field("signature", pa.binary(4 * NUM_PERMUTATIONS))])


@dataclass(frozen=True)
class ChunkKeys:
    """The keys of one kind, the text or a band, of the N documents of a chunk, K of which differ."""
    key: np.ndarray  # (K,) sorted by their part
    first: np.ndarray  # (K,) number in the chunk of the first document that has each
    place: np.ndarray  # (N,) where each document's key stands in `key`
    bounds: np.ndarray  # (cuts + 1,) of the parts in `key`


@dataclass(frozen=True)
class Shuffle:
    """The files of a shuffle. The same chunks and parts have the same files, so a task that ended is not done again."""
    folder: Path
    starts: np.ndarray  # (chunks + 1,) number of the first document of each chunk, and of all documents
    cuts: int  # parts into which the keys of a kind are cut

    @property
    def num_parts(self):
        return (1 + NUM_PERMUTATIONS // VALUES_PER_BAND) * self.cuts

    def paths(self, kind):
        """Returns the paths of the files `kind` of all chunks, or of all parts for "firsts"."""
        count = self.num_parts if kind == "firsts" else len(self.starts) - 1
        return [self.folder / f"{kind}_{number:06d}" for number in range(count)]

    def chunk_keys(self, keys, signatures):
        """Yields the ChunkKeys of each kind, for documents with these keys of their texts (N,) and signatures."""
        for keys_of_kind in (keys, *band_hashes(signatures)):
            unique, first, group = np.unique(keys_of_kind, return_index=True, return_inverse=True)
            # The part is chosen by the high bits. In a sum of products the low bits depend on the factors' low bits
            # alone, and the high bits on all of them.
            part = (unique >> np.uint64(33)) % np.uint64(self.cuts)
            order = np.argsort(part, kind="stable")
            place = np.empty_like(order)
            # The inverse of `order`: where each key stands once the keys are sorted by part.
            place[order] = np.arange(len(order))
            bounds = np.searchsorted(part[order], np.arange(self.cuts + 1, dtype=np.uint64))
            yield ChunkKeys(unique[order], first[order], place[group], bounds)


def _write_batches(path, schema, batches):
    """Writes an Arrow file of record batches; each is a tuple of arrays, one per column."""
    with whole_file(path) as file, pa.ipc.new_file(file, schema) as writer:
        for columns in batches:
            arrays = [_to_arrow(column, kind) for column, kind in zip(columns, schema.types, strict=True)]
            writer.write_batch(pa.record_batch(arrays, schema))


def _read_batch(path, number):
    """Returns the columns of a record batch as arrays; signatures are (N, NUM_PERMUTATIONS)."""
    with pa.OSFile(str(path)) as file:
        batch = pa.ipc.open_file(file).get_batch(number)
    return [_to_numpy(column) for column in batch.columns]


def _to_arrow(column, kind):
    if pa.types.is_fixed_size_binary(kind):
        return pa.FixedSizeBinaryArray.from_buffers(kind, len(column), [None, pa.py_buffer(column)])
    return pa.array(column, kind)


def _to_numpy(column):
    if pa.types.is_fixed_size_binary(column.type):
        return np.frombuffer(column.buffers()[1] or b"", np.uint32).reshape(-1, NUM_PERMUTATIONS)[:len(column)]
    return column.to_numpy()


# The rounds of tasks, which read and write files of one shared folder, so that no process holds more than a part
#
# 1. write_keys       each chunk of documents writes its keys, one of the text and one of each band of the signature,
#                     and the first document that has each. They are cut into parts by the key.
# 2. write_firsts     each part finds the first document of all that has each of its keys.
# 3. write_pairs      each chunk sends those of its documents that have an earlier one, with their signatures, to the
#                     chunk that has that one.
# 4. write_near       each chunk compares the received signatures with its own.


def find_duplicates(index, folder, run, done, chunk_documents=CHUNK_DOCUMENTS, part_keys=PART_KEYS):
    """Returns two (N,) bool arrays: the documents equal to an earlier one in the Index, and those similar to one.

    folder: for files, of about 0.3 kB per document and 0.6 kB per pair that is compared. run: as worker_pool yields it,
    here or on other machines that see the folder. done(fraction): is called after each task, with its part of the whole
    work.
    """
    folder.mkdir(parents=True, exist_ok=True)
    num_documents = np.bincount(index.run)
    ends = np.cumsum(num_documents)
    chunk_of = (ends - num_documents) // chunk_documents  # whole runs, so a chunk may be a run longer
    bounds = [*np.unique(chunk_of, return_index=True)[1], len(index.runs)]
    starts = np.array([0, *ends[np.array(bounds[1:]) - 1]])
    shuffle = Shuffle(folder, starts, max(1, -(-len(index.run) // part_keys)))
    chunks = []
    for number, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        chunks.append((shuffle, number, index.runs[begin:end]))
    parts = [(shuffle, part) for part in range(shuffle.num_parts)]
    rounds = ((write_keys, chunks), (write_firsts, parts), (write_pairs, chunks), (write_near, chunks))
    # Each round reads files of all tasks of the round before, so it begins when these have ended.
    for task, calls in rounds:
        share = 1 / len(rounds) / len(calls)
        run(task, calls, lambda *_, share=share: done(share))
    near = np.zeros(len(index.run), bool)
    for path in shuffle.paths("near"):
        near[np.load(path)] = True
    return np.concatenate([np.load(path) for path in shuffle.paths("exact")]), near


def write_keys(shuffle, chunk, runs):
    """Writes the file keys of a chunk, whose documents are in `runs`: a batch for each part."""
    path = shuffle.paths("keys")[chunk]
    if path.exists():
        return
    batches = []
    for keys in shuffle.chunk_keys(load_index(runs).key, load_signatures(runs)):
        for begin, end in zip(keys.bounds, keys.bounds[1:], strict=False):
            batches.append((keys.key[begin:end], keys.first[begin:end] + shuffle.starts[chunk]))
    _write_batches(path, _KEYS, batches)


def write_firsts(shuffle, part):
    """Writes the file firsts of a part: for each chunk a batch, beside its keys, of the first document of all."""
    path = shuffle.paths("firsts")[part]
    if path.exists():
        return
    keys = []
    numbers = []
    for file in shuffle.paths("keys"):
        keys_of_chunk, firsts_of_chunk = _read_batch(file, part)
        keys.append(keys_of_chunk)
        numbers.append(firsts_of_chunk)
    # The chunks are in the order of their documents, so the first that has a key has the first document.
    _, first, group = np.unique(np.concatenate(keys), return_index=True, return_inverse=True)
    firsts = np.concatenate(numbers)[first][group]
    ends = np.cumsum([len(keys_of_chunk) for keys_of_chunk in keys])
    _write_batches(path, _FIRSTS, ((firsts_of_chunk,) for firsts_of_chunk in np.split(firsts, ends[:-1])))


def write_pairs(shuffle, chunk, runs):
    """Writes which documents of a chunk are exact copies, and files with a batch for each chunk: what to compare with
    its documents, and the signatures for that."""
    path = shuffle.paths("pairs")[chunk]
    if path.exists():
        return
    signatures = load_signatures(runs)
    own = np.arange(len(signatures)) + shuffle.starts[chunk]
    files = shuffle.paths("firsts")
    earliest = []  # for each kind: the first document of all with the same key, (N,)
    for kind, keys in enumerate(shuffle.chunk_keys(load_index(runs).key, signatures)):
        parts = files[kind * shuffle.cuts:(kind + 1) * shuffle.cuts]
        earliest.append(np.concatenate([_read_batch(file, chunk)[0] for file in parts])[keys.place])
    # The first kind is the key of the text, which needs no comparison. All others are bands.
    exact = earliest[0] != own
    pairs = []
    for earliest_in_band in earliest[1:]:
        chosen = np.flatnonzero((earliest_in_band != own) & ~exact)
        pairs.append(np.stack([earliest_in_band[chosen], chosen], 1))
    # A pair that several bands have found is compared once.
    pairs = np.unique(np.concatenate(pairs), axis=0)  # sorted by the earlier document; (pairs, 2)
    parts = np.split(pairs, np.searchsorted(pairs[:, 0], shuffle.starts[1:-1]))
    # A signature of 512 bytes is sent to a chunk once, in however many pairs it is. The inverse says which one a pair
    # means.
    sent = [np.unique(part[:, 1], return_inverse=True) for part in parts]
    # The file of pairs is written last: it is the one that says that this task was done.
    with whole_file(shuffle.paths("exact")[chunk]) as file:
        np.save(file, exact)
    _write_batches(shuffle.paths("sent")[chunk], _SENT, ((signatures[documents],) for documents, _ in sent))
    _write_batches(path, _PAIRS, ((own[part[:, 1]], place.astype(np.int32), part[:, 0])
                                  for part, (_, place) in zip(parts, sent, strict=True)))


def write_near(shuffle, chunk, runs):
    """Writes the numbers of the documents, of any chunk, that are similar to one of this chunk."""
    path = shuffle.paths("near")[chunk]
    if path.exists():
        return
    signatures = load_signatures(runs)
    found = [np.empty(0, np.int64)]
    for pairs, sent in zip(shuffle.paths("pairs"), shuffle.paths("sent"), strict=True):
        documents, place, firsts = _read_batch(pairs, chunk)
        others = _read_batch(sent, chunk)[0]
        for begin in range(0, len(documents), COMPARED_AT_ONCE):
            part = slice(begin, begin + COMPARED_AT_ONCE)
            similarity = (others[place[part]] == signatures[firsts[part] - shuffle.starts[chunk]]).mean(axis=1)
            found.append(documents[part][similarity >= NEAR_DUPLICATE_SIMILARITY])
    with whole_file(path) as file:
        np.save(file, np.unique(np.concatenate(found)))
