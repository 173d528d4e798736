"""Makes many puzzles with all processors of this machine, and divides them into those to train on and held-out ones."""
import multiprocessing
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
from tqdm import tqdm

from nanochat.common import BadInput, end_with_parent
from nanochat.puzzles import mazes, sudoku

ROUNDS = 20  # of which each makes as many puzzles as are still missing
SHARES = {"train": 0.75, "val": 0.25}  # of the really different puzzles


@dataclass(frozen=True)
class Maker:
    """Makes Sudokus or mazes: puzzle `number` is the same on every machine."""
    kind: str  # "sudoku" or "maze"
    shape: tuple  # as in Puzzles
    seed: int
    min_path: int = 0  # of a maze

    def make(self, number):
        """Returns puzzle `number` as (puzzle, solution, guesses), or None if there is none."""
        seed = f"{self.seed} {number}"
        if self.kind == "sudoku":
            return sudoku.generate(*self.shape, seed)
        found = mazes.generate(*self.shape, self.min_path, seed)
        return found and (*found, 0)

    def fingerprints(self, puzzles):
        """Returns a number for each of the puzzles (N, cells), the same for all forms of a puzzle."""
        module = sudoku if self.kind == "sudoku" else mazes
        return module.fingerprints(puzzles, *self.shape)


def begin_worker():
    """Leaves Ctrl-C to the parent process, and ends with it: a worker whose parent was killed would wait for ever."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(multiprocessing.parent_process().pid)


def by_qqwing(count):
    """Returns `count` 9 × 9 Sudokus made by qqwing, as Maker.make does."""
    output = subprocess.run(["qqwing", "--generate", str(count), "--solution", "--csv"], check=True, text=True,
                            preexec_fn=partial(end_with_parent, os.getpid()), capture_output=True).stdout
    puzzles = []
    for row in re.findall(r"([1-9.]{81}),([1-9]{81})", output):
        puzzle, solution = ([int(letter) for letter in text.replace(".", "0")] for text in row)
        _, guesses = sudoku.solve(puzzle, 3, 3, limit=1)
        puzzles.append((puzzle, solution, guesses))
    return puzzles


def make_splits(maker, wanted, uses_qqwing=False):
    """Returns {"train": puzzles, "val": puzzles}, so many of each as `wanted` says, by a Maker or by qqwing. Puzzles
    that a symmetry turns into each other are all in one of them. Raises BadInput if there are not enough.

    There are few really different small puzzles: of the minimal 4 × 4 Sudokus, 36. So what is held out are not single
    puzzles but all forms of some, which are chosen by their fingerprint.
    """
    found = {name: {} for name in wanted}
    made = 0
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), initializer=begin_worker) as pool, \
            tqdm(total=sum(wanted.values()), unit="puzzle", disable=not sys.stderr.isatty()) as progress:
        # Each of these four draws a thousand mazes: a path that none has is refused before all rounds are spent on it.
        if maker.kind == "maze" and not any(pool.map(maker.make, range(4))):
            raise BadInput(f"--min_path={maker.min_path}: thousands of mazes of --side={maker.shape[0]} were drawn, "
                           "and none has so long a path: give a smaller --min_path")
        for _ in range(ROUNDS):
            # The fingerprint decides to which split a puzzle belongs, so a quarter falls to val: what val lacks needs
            # four times as many new puzzles.
            missing = max(round((wanted[name] - len(found[name])) / share) for name, share in SHARES.items())
            if missing <= 0:
                break
            if uses_qqwing:
                new = by_qqwing(missing)
            else:
                new = list(filter(None, pool.map(maker.make, range(made, made + missing), chunksize=16)))
                made += missing
            if new:
                _divide(new, maker.fingerprints(np.array([puzzle for puzzle, _, _ in new])), found, wanted)
            progress.n = sum(map(len, found.values()))
            progress.refresh()
    if any(len(found[name]) < wanted[name] for name in wanted):
        raise BadInput(f"--train={wanted['train']} and --val={wanted['val']}: only {len(found['train'])} and "
                       f"{len(found['val'])} different puzzles were found: ask for fewer, or for larger ones")
    return {name: list(puzzles.values()) for name, puzzles in found.items()}


def _divide(puzzles, fingerprints, found, wanted):
    """Adds puzzles to `found`, {split: {puzzle: …}}, until each split has as many as wanted."""
    for puzzle, fingerprint in zip(puzzles, fingerprints, strict=True):
        name = "val" if fingerprint % 1000 < 1000 * SHARES["val"] else "train"
        if len(found[name]) < wanted[name]:
            found[name][tuple(puzzle[0])] = puzzle
