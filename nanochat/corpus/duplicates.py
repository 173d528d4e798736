"""Which documents are copies of an earlier one: exact by their key, near by their MinHash signature.

Near copies are found by locality-sensitive hashing: a document is compared with the first document whose signature
agrees with its own in a whole band. The fraction of equal values in two signatures estimates the Jaccard similarity of
the documents.
"""
import re

import numpy as np
from rensa import RMinHash

from nanochat.corpus.runs import BANDS, NUM_PERMUTATIONS, VALUES_PER_BAND, parts_of, read_column, read_parts
from nanochat.record.progress import Progress

# With 16 bands of 8 values, pairs of similarity 0.8 are found with probability 0.95.
NEAR_DUPLICATE_SIMILARITY = 0.8  # estimated Jaccard similarity of the sets of 5-word sequences
COMPARED_AT_ONCE = 65536  # pairs of signatures: 64 MB
# The values of a band become one number by a random linear combination, modulo 2^64.
_WEIGHTS = np.random.default_rng(0).integers(1, 2**63, VALUES_PER_BAND, dtype=np.uint64)


def signature(data):
    """Returns the MinHash signature of the set of all sequences of 5 words, as 4 * NUM_PERMUTATIONS bytes.

    Punctuation and white space are ignored. MinHash: Broder, "On the resemblance and containment of documents", 1997.
    """
    words = re.findall(rb"\w+", data)
    minhash = RMinHash(NUM_PERMUTATIONS, 0)
    sequences = list(map(b" ".join, zip(words, words[1:], words[2:], words[3:], words[4:], strict=False)))
    minhash.update(sequences or [b" ".join(words)])
    return np.array(minhash.digest(), np.uint32).tobytes()


def bands(signature):
    """Returns {column: a number for each band of a signature}: equal numbers stand for equal values in the band."""
    numbers = np.frombuffer(signature, np.uint32).reshape(len(BANDS), VALUES_PER_BAND) @ _WEIGHTS
    return dict(zip(BANDS, numbers.tolist(), strict=True))


def find_duplicates(index):
    """Returns two (N,) bool arrays: the documents equal to an earlier one in the Index, and those similar to one."""
    own = np.arange(len(index.key))
    exact = _first_alike(index.key) != own
    near = np.zeros(len(own), bool)
    pairs = np.empty(0, np.int64)  # first document × N + document; one that several bands have found is compared once
    # Memory holds one band at a time, about 0.1 kB for each document, and the signatures, 0.5 kB each, of some pairs.
    with Progress("looking for duplicates", len(BANDS), "") as bar:
        for band in BANDS:
            first = _first_alike(np.concatenate(read_column(index.runs, band)))
            chosen = np.flatnonzero((first != own) & ~exact)
            pairs = np.union1d(pairs, first[chosen] * len(own) + chosen)
            bar.update(1)
    for begin in range(0, len(pairs), COMPARED_AT_ONCE):
        first, document = np.divmod(pairs[begin:begin + COMPARED_AT_ONCE], len(own))
        similarity = (_signatures(index, first) == _signatures(index, document)).mean(axis=1)
        near[document[similarity >= NEAR_DUPLICATE_SIMILARITY]] = True
    return exact, near


def _first_alike(numbers):
    """Returns for each of these numbers (N,) the index of the first that is equal, (N,)."""
    _, first, group = np.unique(numbers, return_index=True, return_inverse=True)
    return first[group]


def _signatures(index, documents):
    """Returns the signatures of documents of the Index, (documents, NUM_PERMUTATIONS)."""
    different, place = np.unique(documents, return_inverse=True)
    column = read_parts(parts_of(index, different), ["signature"])["signature"]
    return np.frombuffer(b"".join(column.to_pylist()), np.uint32).reshape(-1, NUM_PERMUTATIONS)[place]
