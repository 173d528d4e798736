"""The shuffle finds the duplicates that the reference finds, whatever the documents and however they are cut."""
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from nanochat.corpus.duplicates import (
    NEAR_DUPLICATE_SIMILARITY,
    NUM_PERMUTATIONS,
    band_hashes,
    find_duplicates,
    load_index,
    load_signatures,
)
from nanochat.corpus.scan import RUN_SCHEMA
from nanochat.corpus.workers import worker_pool


def write_runs(folder, seed, sizes, num_keys, num_signatures, changes):
    """Writes runs of documents of which many have one key, and signatures that are variants of a few."""
    rng = np.random.default_rng(seed)
    bases = rng.integers(0, 2**32, (num_signatures, NUM_PERMUTATIONS), dtype=np.uint32)
    paths = []
    for number, size in enumerate(sizes):
        signatures = bases[rng.integers(0, num_signatures, size)]
        for row, count in enumerate(rng.integers(0, changes + 1, size)):
            places = rng.choice(NUM_PERMUTATIONS, count, replace=False)
            signatures[row, places] = rng.integers(0, 3, count)
        table = pa.table({"text": [""] * size, "path": [""] * size, "source": [""] * size, "licence": [""] * size,
                          "key": rng.integers(0, num_keys, size, dtype=np.uint64) << np.uint64(50),
                          "nbytes": [0] * size, "signature": [row.tobytes() for row in signatures]}, RUN_SCHEMA)
        paths.append(folder / f"run_{number:05d}.parquet")
        pq.write_table(table, paths[-1])
    return paths


def reference(keys, signatures):
    """Returns what find_duplicates returns, found in the memory of one process.

    It leaves out of later bands what it has found already, only to save time: the first document of a group is the
    first of all, a copy or not.
    """
    exact = np.ones(len(keys), bool)
    # np.unique gives the first index of each key: that document is the original, the others are copies.
    exact[np.unique(keys, return_index=True)[1]] = False
    near = np.zeros(len(keys), bool)
    for band_hash in band_hashes(signatures):
        _, first, group = np.unique(band_hash, return_index=True, return_inverse=True)
        earliest = first[group]  # (N,): the first document with the same band
        candidates = np.flatnonzero((earliest != np.arange(len(earliest))) & ~exact & ~near)
        similarity = (signatures[candidates] == signatures[earliest[candidates]]).mean(axis=1)
        near[candidates[similarity >= NEAR_DUPLICATE_SIMILARITY]] = True
    return exact, near


@settings(max_examples=15, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck),
          phases=[Phase.generate])
@given(seed=st.integers(0, 10**6), sizes=st.lists(st.integers(1, 40), min_size=1, max_size=8),
       num_keys=st.sampled_from([1, 5, 60, 10**4]), num_signatures=st.sampled_from([1, 3, 30]),
       changes=st.sampled_from([0, 20, 40, 128]), chunk_documents=st.integers(1, 60), part_keys=st.integers(60, 400))
def test_the_shuffle_finds_what_the_reference_finds(tmp_path_factory, seed, sizes, num_keys, num_signatures, changes,
                                                    chunk_documents, part_keys):
    folder, progress = tmp_path_factory.mktemp("shuffle"), []
    runs = write_runs(folder, seed, sizes, num_keys, num_signatures, changes)
    index = load_index(runs)
    exact, near = reference(index.key, load_signatures(runs))
    with worker_pool(1) as run:
        found = find_duplicates(index, folder / "files", run, progress.append, chunk_documents, part_keys)
        by_time = sorted((folder / "files").iterdir(), key=lambda path: path.stat().st_mtime_ns)
        kept = {path: path.stat().st_mtime_ns for path in by_time[:len(by_time) // 2]}
        for path in by_time[len(kept):]:  # as if it had been killed then
            path.unlink()
        again = find_duplicates(index, folder / "files", run, progress.append, chunk_documents, part_keys)
    assert np.array_equal(found[0], exact) and np.array_equal(found[1], near)
    assert np.array_equal(again[0], exact) and np.array_equal(again[1], near)
    assert abs(sum(progress) - 2) < 1e-6
    assert {path: path.stat().st_mtime_ns for path in kept if path.name.startswith(("keys", "firsts", "pairs"))}.items(
        ) <= kept.items()  # they are not made again
    assert len(by_time) == len(list((folder / "files").iterdir()))
