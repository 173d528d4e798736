"""The runs have the duplicates that a plain reference finds, whatever the documents and however they are divided."""
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from nanochat.corpus import duplicates
from nanochat.corpus.duplicates import NEAR_DUPLICATE_SIMILARITY, bands, find_duplicates
from nanochat.corpus.runs import NUM_PERMUTATIONS, VALUES_PER_BAND, load_index, write_run


def make_runs(folder, seed, sizes, num_keys, num_signatures, changes):
    """Writes runs of documents of which many have one key, and signatures that are variants of a few. Returns their
    paths and all signatures, (N, NUM_PERMUTATIONS), in the order of the runs."""
    rng = np.random.default_rng(seed)
    bases = rng.integers(0, 2**32, (num_signatures, NUM_PERMUTATIONS), dtype=np.uint32)
    paths, found = [], []
    for number, size in enumerate(sizes):
        signatures = bases[rng.integers(0, num_signatures, size)]
        for row, count in enumerate(rng.integers(0, changes + 1, size)):
            places = rng.choice(NUM_PERMUTATIONS, count, replace=False)
            signatures[row, places] = rng.integers(0, 3, count)
        documents = [{"text": "", "path": "", "source": "", "licence": "", "nbytes": 0, "key": key << 50,
                      "signature": row.tobytes(), **bands(row.tobytes())}
                     for key, row in zip(rng.integers(0, num_keys, size).tolist(), signatures, strict=True)]
        paths.append(folder / f"run_{number:05d}.parquet")
        write_run(paths[-1], documents)  # which sorts them
        found += [np.frombuffer(document["signature"], np.uint32) for document in documents]
    return paths, np.stack(found)


def reference(keys, signatures):
    """Returns what find_duplicates returns, found in the memory of one process.

    It leaves out of later bands what it has found already, only to save time: the first document of a group is the
    first of all, a copy or not.
    """
    exact = np.ones(len(keys), bool)
    # np.unique gives the first index of each key: that document is the original, the others are copies.
    exact[np.unique(keys, return_index=True)[1]] = False
    near = np.zeros(len(keys), bool)
    for begin in range(0, NUM_PERMUTATIONS, VALUES_PER_BAND):
        band = signatures[:, begin:begin + VALUES_PER_BAND]
        _, first, group = np.unique(band, axis=0, return_index=True, return_inverse=True)
        earliest = first[group]  # (N,): the first document with the same band
        candidates = np.flatnonzero((earliest != np.arange(len(earliest))) & ~exact & ~near)
        similarity = (signatures[candidates] == signatures[earliest[candidates]]).mean(axis=1)
        near[candidates[similarity >= NEAR_DUPLICATE_SIMILARITY]] = True
    return exact, near


@settings(max_examples=15, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck),
          phases=[Phase.generate])
@given(seed=st.integers(0, 10**6), sizes=st.lists(st.integers(1, 90), min_size=1, max_size=8),
       num_keys=st.sampled_from([1, 5, 60, 10**4]), num_signatures=st.sampled_from([1, 3, 30]),
       changes=st.sampled_from([0, 20, 40, 128]), compared_at_once=st.integers(1, 60))
def test_the_runs_have_the_duplicates_that_the_reference_finds(tmp_path_factory, seed, sizes, num_keys, num_signatures,
                                                               changes, compared_at_once):
    runs, signatures = make_runs(tmp_path_factory.mktemp("runs"), seed, sizes, num_keys, num_signatures, changes)
    index = load_index(runs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(duplicates, "COMPARED_AT_ONCE", compared_at_once)
        exact, near = find_duplicates(index)
    expected = reference(index.key, signatures)
    assert np.array_equal(exact, expected[0]) and np.array_equal(near, expected[1])
