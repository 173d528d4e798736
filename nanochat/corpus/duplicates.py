"""Which documents are copies of an earlier one: exact by their key, near by their MinHash signature.

Near copies are found by locality-sensitive hashing: a document is compared with the first document whose signature
agrees with its own in a whole band. The fraction of equal values in two signatures estimates the Jaccard similarity of
the documents.
"""
import re

import numpy as np
from rensa import RMinHash

from nanochat.corpus.runs import BANDS, NUM_PERMUTATIONS, VALUES_PER_BAND, parts_of, read_column, read_parts

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


def find_duplicates(index, run, done):
    """Returns two (N,) bool arrays: the documents equal to an earlier one in the Index, and those similar to one.

    run: as worker_pool yields it, here or on other machines that see the runs. done(fraction): is called with each part
    of the whole work.
    """
    own = np.arange(len(index.key))
    exact = _first_alike(index.key) != own
    pairs = np.empty(0, np.int64)  # first document × N + document; one that several bands have found is compared once
    # This process reads one band at a time, and holds about 0.1 kB for each document. The signatures, 0.5 kB each, are
    # read by the tasks that compare them.
    for band in BANDS:
        first = _first_alike(np.concatenate(read_column(index.runs, band)))
        chosen = np.flatnonzero((first != own) & ~exact)
        pairs = np.union1d(pairs, first[chosen] * len(own) + chosen)
        done(0.5 / len(BANDS))
    first, document = np.divmod(pairs, len(own))
    calls = []
    for begin in range(0, len(pairs), COMPARED_AT_ONCE):
        some = slice(begin, begin + COMPARED_AT_ONCE)
        calls.append((*_places(index, first[some]), *_places(index, document[some])))
    near = np.zeros(len(own), bool)

    def note(i, is_similar):
        near[document[i * COMPARED_AT_ONCE:][:len(is_similar)][is_similar]] = True
        done(0.5 / len(calls))

    run(are_similar, calls, note)
    if not calls:
        done(0.5)
    return exact, near


def _first_alike(numbers):
    """Returns for each of these numbers (N,) the index of the first that is equal, (N,)."""
    _, first, group = np.unique(numbers, return_index=True, return_inverse=True)
    return first[group]


def _places(index, documents):
    """Returns the different ones of `documents` as parts_of, and the place of each document among them."""
    different, place = np.unique(documents, return_inverse=True)
    return parts_of(index, different), place


def are_similar(first_parts, first_place, other_parts, other_place):
    """Returns for each pair of documents whether their signatures are similar. parts, place: as _places returns."""
    first = _signatures(first_parts)[first_place]
    other = _signatures(other_parts)[other_place]
    return (first == other).mean(axis=1) >= NEAR_DUPLICATE_SIMILARITY


def _signatures(parts):
    column = read_parts(parts, ["signature"])["signature"]
    return np.frombuffer(b"".join(column.to_pylist()), np.uint32).reshape(-1, NUM_PERMUTATIONS)
