"""Makes many puzzles with all cores of this machine, and splits them into training and held-out ones."""
import multiprocessing
import os
import signal
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import numpy as np

from nanochat.common import BadInput, end_with_parent
from nanochat.puzzles import sudoku
from nanochat.record.progress import Progress

ROUNDS = 20  # each makes as many puzzles as are still missing
SHARES = {"train": 0.75, "val": 0.25}  # of the fingerprints


def make(box, seed, number):
    """Returns puzzle `number` as (puzzle, solution), the same on every machine. box: (rows, columns)."""
    return sudoku.generate(*box, f"{seed} {number}")


def begin_worker():
    """Makes a worker ignore Ctrl-C, which the parent handles, and end with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(multiprocessing.parent_process().pid)


def make_splits(box, seed, sizes):
    """Returns {"train": puzzles, "val": puzzles} with the numbers in `sizes`. All forms of a puzzle are in one of
    them, because few small puzzles differ: 36 minimal 4 × 4 Sudokus. Raises BadInput if too few are found."""
    # Small puzzles repeat, so nobody knows how many must be made: each round makes the number that is still missing.
    # Puzzle n comes from seed and n, and the rounds go on counting, so the same flags give the same puzzles.
    found = {name: {} for name in sizes}
    made = 0
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), initializer=begin_worker) as pool, \
            Progress("puzzles", sum(sizes.values()), unit="") as progress:
        for _ in range(ROUNDS):
            # The fingerprint puts a quarter of the puzzles into val, so val needs four times its missing number.
            missing = max(round((sizes[name] - len(found[name])) / share) for name, share in SHARES.items())
            if missing <= 0:
                break
            new = list(pool.map(partial(make, box, seed), range(made, made + missing), chunksize=16))
            made += missing
            fingerprints = sudoku.fingerprints(np.array([puzzle for puzzle, _ in new]), *box)
            progress.update(_split(new, fingerprints, found, sizes))
    if any(len(found[name]) < sizes[name] for name in sizes):
        raise BadInput(f"--train={sizes['train']} and --val={sizes['val']}: only {len(found['train'])} and "
                       f"{len(found['val'])} different puzzles were found: ask for fewer, or for larger ones")
    return {name: list(puzzles.values()) for name, puzzles in found.items()}


def _split(puzzles, fingerprints, found, sizes):
    """Adds puzzles to `found`, {split: {puzzle: …}}, up to the numbers in `sizes`, and returns how many are new."""
    num_before = sum(map(len, found.values()))
    for puzzle, fingerprint in zip(puzzles, fingerprints, strict=True):
        name = "val" if fingerprint % 1000 < 1000 * SHARES["val"] else "train"
        if len(found[name]) < sizes[name]:
            found[name][tuple(puzzle[0])] = puzzle
    return sum(map(len, found.values())) - num_before
