"""Which documents are copies of an earlier one: exact by their key, near by their MinHash signature.

`find_duplicates` does it in the memory of one process. `shuffle_duplicates` finds the same in four rounds of tasks that
read and write files of one shared folder, so that no process holds more than a part:

1. write_keys       each chunk of documents writes its keys, one of the text and one of each band of the signature, and
                    the first document that has each. They are cut into parts by the key.
2. write_firsts     each part looks up the first document of all that has each of its keys.
3. write_pairs      each chunk sends those of its documents that have an earlier one, with their signatures, to the
                    chunk that has that one.
4. write_near       each chunk compares what it got with its own signatures.

That the bands do not wait for each other changes nothing: find_duplicates leaves out of later bands what it has found
already, only to save time, and the first document of a group is the first of all, a copy or not.
"""
import os
import re
import uuid
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rensa import RMinHash

NUM_PERMUTATIONS, VALUES_PER_BAND = 128, 8  # 16 bands: pairs of similarity 0.8 are found with probability 0.95
NEAR_DUPLICATE_SIMILARITY = 0.8  # estimated Jaccard similarity of the sets of 5-word sequences
CHUNK_DOCUMENTS, PART_KEYS = 100_000, 2_000_000  # of one task: 50 MB of signatures, 32 MB of keys


def signature(data):
    """Returns the MinHash signature of the set of all sequences of 5 words, as 4 * NUM_PERMUTATIONS bytes.

    Punctuation and white space are ignored. MinHash: Broder, "On the resemblance and containment of documents", 1997.
    """
    words = re.findall(rb"\w+", data)
    minhash = RMinHash(NUM_PERMUTATIONS, 0)
    sequences = [b" ".join(five) for five in zip(*(words[i:] for i in range(5)), strict=False)]
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
    signature: np.ndarray  # (N, NUM_PERMUTATIONS) uint32


def load_index(runs, with_signatures=True):
    """Returns the Index of all documents in `runs`, a list of paths, in their order; without signatures there are none
    in it."""
    columns = {"run": [], "document": [], "key": [], "nbytes": [], "signature": []}
    for number, path in enumerate(runs):
        names = ["key", "nbytes", *(["signature"] if with_signatures else [])]
        table = pq.read_table(path, columns=names).combine_chunks()
        columns["run"].append(np.full(len(table), number))
        columns["document"].append(np.arange(len(table)))
        columns["key"].append(table["key"].to_numpy())
        columns["nbytes"].append(table["nbytes"].to_numpy())
        signature_bytes = b"".join(table["signature"].to_pylist()) if with_signatures else b""
        columns["signature"].append(np.frombuffer(signature_bytes, np.uint32).reshape(-1, NUM_PERMUTATIONS))
    return Index(runs, **{name: np.concatenate(parts) for name, parts in columns.items()})


def band_hashes(index):
    """Yields for each band a (N,) uint64 array: equal numbers stand for equal values in the band."""
    weights = np.random.default_rng(0).integers(1, 2**63, VALUES_PER_BAND, dtype=np.uint64)
    for band in range(0, NUM_PERMUTATIONS, VALUES_PER_BAND):
        # The eight values of a band become one number by a random linear combination, so that one sort groups all
        # documents.
        yield index.signature[:, band:band + VALUES_PER_BAND] @ weights  # modulo 2^64


def find_duplicates(index):
    """Returns two (N,) bool arrays: the documents equal to an earlier one in the index, and those similar to one.

    This is locality-sensitive hashing: documents whose signatures agree in a whole band are compared with the first of
    them. The fraction of equal values in two signatures estimates the Jaccard similarity of the documents.
    """
    exact = np.ones(len(index.key), bool)
    # np.unique gives the first index of each key: that document is the original, the others are copies.
    exact[np.unique(index.key, return_index=True)[1]] = False
    near = np.zeros(len(index.key), bool)
    for band_hash in band_hashes(index):
        _, first, group = np.unique(band_hash, return_index=True, return_inverse=True)
        # (N,): the first document with the same band. A document is compared with this one alone, so a band takes N
        # comparisons at most, however many documents share it.
        earliest = first[group]
        candidates = np.flatnonzero((earliest != np.arange(len(earliest))) & ~exact & ~near)
        for part in np.array_split(candidates, len(candidates) // 65536 + 1):  # to limit memory
            similarity = (index.signature[part] == index.signature[earliest[part]]).mean(axis=1)
            near[part[similarity >= NEAR_DUPLICATE_SIMILARITY]] = True
    return exact, near


# -----------------------------------------------------------------------------
# The same by a shuffle

_FIRST = pa.field("first", pa.int64())  # number of a document in the whole index, as everywhere below
_KEYS = pa.schema([pa.field("key", pa.uint64()), _FIRST])
_FIRSTS = pa.schema([_FIRST])
_PAIRS = pa.schema([pa.field("document", pa.int64()), pa.field("sent", pa.int32()), _FIRST])
_SENT = pa.schema([pa.field("signature", pa.binary(4 * NUM_PERMUTATIONS))])


@dataclass(frozen=True)
class Shuffle:
    """The files of a shuffle. The same chunks and parts have the same files, so a task that ended is not done again."""
    folder: Path
    starts: np.ndarray  # (chunks + 1,) number of the first document of each chunk, and of all documents
    cuts: int  # parts into which the keys of a kind (the text, or a band) are cut

    @property
    def num_parts(self):
        return (1 + NUM_PERMUTATIONS // VALUES_PER_BAND) * self.cuts

    def paths(self, kind):
        """Returns the paths of the files `kind` of all chunks or parts."""
        return [self.folder / f"{kind}_{number:06d}"
                for number in range(self.num_parts if kind == "firsts" else len(self.starts) - 1)]

    def chunk_keys(self, index):
        """Yields for the keys of a chunk, one kind after the other: (different keys (K,) sorted by their part, number
        in the chunk of the first document of each (K,), place in keys of each document's key (N,), bounds of the parts
        (cuts + 1,))."""
        for keys in (index.key, *band_hashes(index)):
            unique, first, group = np.unique(keys, return_index=True, return_inverse=True)
            # The part is chosen by the high bits. In a sum of products the low bits depend on the factors' low bits
            # alone, and the high bits on all of them.
            part = (unique >> np.uint64(33)) % np.uint64(self.cuts)
            order = np.argsort(part, kind="stable")
            place = np.empty_like(order)
            # The inverse of `order`: where each key stands once the keys are sorted by part.
            place[order] = np.arange(len(order))
            yield (unique[order], first[order], place[group],
                   np.searchsorted(part[order], np.arange(self.cuts + 1, dtype=np.uint64)))


def shuffle_duplicates(runs, num_documents, folder, run, done, chunk_documents=CHUNK_DOCUMENTS, part_keys=PART_KEYS):
    """Returns what find_duplicates does for the Index of `runs`, a list of paths, without their signatures in memory.

    num_documents: (len(runs),) in each of the runs. folder: for files, of about 0.3 kB per document and 0.6 kB per pair
    that is compared. run: as worker_pool yields it, here or on other machines that see the folder. done(fraction): is
    called after each task, with its part of the whole work.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ends = np.cumsum(num_documents)
    chunk_of = (ends - num_documents) // chunk_documents  # whole runs, so a chunk may be a run longer
    bounds = [*np.unique(chunk_of, return_index=True)[1], len(runs)]
    starts = np.array([0, *ends[np.array(bounds[1:]) - 1]])
    shuffle = Shuffle(folder, starts, max(1, -(-int(ends[-1]) // part_keys)))
    chunks = [(shuffle, number, runs[begin:end]) for number, (begin, end) in
              enumerate(zip(bounds, bounds[1:], strict=False))]
    # Each round reads files of all tasks of the round before, so it begins when these have ended.
    for task, calls in ((write_keys, chunks), (write_firsts, [(shuffle, part) for part in range(shuffle.num_parts)]),
                        (write_pairs, chunks), (write_near, chunks)):
        run(task, calls, lambda *_, calls=calls: done(1 / 4 / len(calls)))
    near = np.zeros(ends[-1], bool)
    for path in shuffle.paths("near"):
        near[np.load(path)] = True
    return np.concatenate([np.load(path) for path in shuffle.paths("exact")]), near


def write_keys(shuffle, chunk, runs):
    """Writes the file keys of a chunk, whose documents are in `runs`: a batch for each part."""
    path = shuffle.paths("keys")[chunk]
    if not path.exists():
        kinds = shuffle.chunk_keys(load_index(runs))
        _write_batches(path, _KEYS, ((keys[begin:end], first[begin:end] + shuffle.starts[chunk])
                                     for keys, first, _, bounds in kinds
                                     for begin, end in zip(bounds, bounds[1:], strict=False)))


def write_firsts(shuffle, part):
    """Writes the file firsts of a part: for each chunk a batch, beside its keys, of the first document of all."""
    path = shuffle.paths("firsts")[part]
    if not path.exists():
        batches = [_read_batch(file, part) for file in shuffle.paths("keys")]
        # The chunks are in the order of their documents, so the first that has a key has the first document.
        _, first, group = np.unique(np.concatenate([keys for keys, _ in batches]), return_index=True,
                                    return_inverse=True)
        firsts = np.concatenate([numbers for _, numbers in batches])[first][group]
        ends = np.cumsum([len(keys) for keys, _ in batches])
        _write_batches(path, _FIRSTS, ((numbers,) for numbers in np.split(firsts, ends[:-1])))


def write_pairs(shuffle, chunk, runs):
    """Writes which documents of a chunk are exact copies, and files with a batch for each chunk: what to compare with
    its documents, and the signatures for that."""
    path = shuffle.paths("pairs")[chunk]
    if path.exists():
        return
    index, firsts = load_index(runs), shuffle.paths("firsts")
    own = np.arange(len(index.key)) + shuffle.starts[chunk]
    exact, pairs = None, []
    for kind, (_, _, place, _) in enumerate(shuffle.chunk_keys(index)):
        files = firsts[kind * shuffle.cuts:(kind + 1) * shuffle.cuts]
        earliest = np.concatenate([_read_batch(file, chunk)[0] for file in files])[place]
        # The first kind is the key of the text, which needs no comparison. All others are bands.
        if exact is None:
            exact = earliest != own
        else:
            chosen = np.flatnonzero((earliest != own) & ~exact)
            pairs.append(np.stack([earliest[chosen], chosen], 1))
    # A pair that several bands have found is compared once.
    pairs = np.unique(np.concatenate(pairs), axis=0)  # sorted by the earlier document; (pairs, 2)
    parts = np.split(pairs, np.searchsorted(pairs[:, 0], shuffle.starts[1:-1]))
    # A signature of 512 bytes is sent to a chunk once, in however many pairs it is. The inverse says which one a pair
    # means.
    sent = [np.unique(part[:, 1], return_inverse=True) for part in parts]
    # The file of pairs is written last: it is the one that says that this task was done.
    _write(shuffle.paths("exact")[chunk], lambda file: np.save(file, exact))
    _write_batches(shuffle.paths("sent")[chunk], _SENT, ((index.signature[documents],) for documents, _ in sent))
    _write_batches(path, _PAIRS, ((own[part[:, 1]], place.astype(np.int32), part[:, 0])
                                  for part, (_, place) in zip(parts, sent, strict=True)))


def write_near(shuffle, chunk, runs):
    """Writes the numbers of the documents, of any chunk, that are similar to one of this chunk."""
    path = shuffle.paths("near")[chunk]
    if path.exists():
        return
    signatures, found = load_index(runs).signature, []
    for pairs, sent in zip(shuffle.paths("pairs"), shuffle.paths("sent"), strict=True):
        documents, place, firsts = _read_batch(pairs, chunk)
        if len(documents):
            others = _read_batch(sent, chunk)[0]
            for begin in range(0, len(documents), 65536):  # to limit memory
                part = slice(begin, begin + 65536)
                similarity = (others[place[part]] == signatures[firsts[part] - shuffle.starts[chunk]]).mean(axis=1)
                found.append(documents[part][similarity >= NEAR_DUPLICATE_SIMILARITY])
    _write(path, lambda file: np.save(file, np.unique(np.concatenate([np.empty(0, np.int64), *found]))))


def _write(path, write):
    """Calls write(file) for a file that becomes `path` when it is whole."""
    # The name is another one for each try, because a task whose node was believed lost may still run beside its
    # repetition.
    partial = path.with_name(f"{path.name}.{os.getpid()}_{uuid.uuid4().hex}.partial")
    with open(partial, "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)


def _write_batches(path, schema, batches):
    """Writes an Arrow file of record batches; each is a tuple of arrays, one per column."""
    def write(file):
        with pa.ipc.new_file(file, schema) as writer:
            for columns in batches:
                arrays = [pa.FixedSizeBinaryArray.from_buffers(kind, len(column), [None, pa.py_buffer(column)])
                          if pa.types.is_fixed_size_binary(kind) else pa.array(column, kind)
                          for column, kind in zip(columns, schema.types, strict=True)]
                writer.write_batch(pa.record_batch(arrays, schema))
    _write(path, write)


def _read_batch(path, number):
    """Returns the columns of a record batch as arrays; signatures are (N, NUM_PERMUTATIONS)."""
    with pa.OSFile(str(path)) as file:
        batch = pa.ipc.open_file(file).get_batch(number)
    return [np.frombuffer(column.buffers()[1] or b"", np.uint32).reshape(-1, NUM_PERMUTATIONS)[:len(column)]
            if pa.types.is_fixed_size_binary(column.type) else column.to_numpy() for column in batch.columns]
