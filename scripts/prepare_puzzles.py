"""Makes puzzles for puzzle_train: train.parquet and val.parquet. No puzzle of one is in the other, not even turned,
mirrored or renamed.

    python3 -m scripts.prepare_puzzles --puzzle=sudoku --box=2x2
    python3 -m scripts.prepare_puzzles --puzzle=sudoku --box=3x3 --train=2000 --qqwing
    python3 -m scripts.prepare_puzzles --puzzle=maze --side=15 --min_path=30
    python3 -m scripts.prepare_puzzles --puzzle=arc1

Sudokus are minimal: without any one of its digits a puzzle would have several solutions. The same flags make the same
puzzles, but for --qqwing, which draws its own.
"""
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout
from tqdm import tqdm

from nanochat.common import (
    BadInput,
    end_with_parent,
    expand_path,
    flag,
    get_base_dir,
    read_flags,
    require_writable_dir,
    run_script,
)
from nanochat.puzzles import arc, mazes, sudoku
from nanochat.puzzles.puzzle_data import write_puzzles

ROUNDS = 20  # of which each makes as many puzzles as are still missing
SHARES = {"train": 0.75, "val": 0.25}  # of the really different puzzles


@dataclass(frozen=True)
class Flags:
    puzzle: str = flag("sudoku", "sudoku, maze, or the tasks of ARC-AGI-1 or 2", choices=("sudoku", "maze",
                                                                                           *arc.VERSIONS))
    box: str = flag("2x2", "ROWSxCOLUMNS of a Sudoku's box: 2x2 is the 4 × 4 Sudoku, 2x3 the 6 × 6, 3x3 the usual one")
    side: int = flag(15, "rows and columns of a maze", at_least=5, at_most=99)
    min_path: int = flag(20, "a maze's shortest path is longer than so many cells", at_least=1, at_most=10_000)
    train: int = flag(-1, "puzzles to train on; -1: 2,000. Of ARC: training tasks; -1: all", at_least=1, at_most=10**7,
                      unset=-1)
    val: int = flag(-1, "held-out puzzles; -1: 300. Of ARC: evaluation tasks; -1: all", at_least=1, at_most=10**6,
                    unset=-1)
    forms: int = flag(8, "forms of each task of ARC to train on", at_least=1, at_most=64)
    seed: int = flag(0, "of the puzzles", at_least=0)
    qqwing: bool = flag(False, "9 × 9 Sudokus by Debian's qqwing, which is much faster")
    out_dir: Path | None = flag(None, "default: $NANOCHAT_BASE_DIR/puzzles", of=expand_path)


def require_own_flags(flags):
    """Raises BadInput if a flag is given that is for other puzzles."""
    for name, puzzles in (("box", ["sudoku"]), ("qqwing", ["sudoku"]), ("side", ["maze"]), ("min_path", ["maze"]),
                          ("forms", [*arc.VERSIONS])):
        if flags.puzzle not in puzzles and getattr(flags, name) != getattr(Flags, name):
            raise BadInput(f"--{name} is for --puzzle={' or '.join(puzzles)}, and this is --puzzle={flags.puzzle}: "
                           "leave one of them out")


def read_shape(flags):
    """Returns the shape of the puzzles as Puzzles has it. Raises BadInput."""
    if flags.puzzle == "maze":
        return (flags.side,)
    match = re.fullmatch(r"([2-4])x([2-4])", flags.box)
    if not match or int(match[1]) * int(match[2]) > 9:  # the solver needs minutes for a puzzle of 12 × 12
        raise BadInput(f"--box={flags.box} is not ROWSxCOLUMNS with at least 2 of each and at most 9 cells: give 2x2, "
                       "2x3, 2x4 or 3x3")
    if flags.qqwing and flags.box != "3x3":
        raise BadInput(f"--qqwing makes 9 × 9 Sudokus, and --box={flags.box}: add --box=3x3, or leave --qqwing out")
    if flags.qqwing and not shutil.which("qqwing"):
        raise BadInput("--qqwing: there is no qqwing: apt-get install qqwing, or leave --qqwing out")
    return int(match[1]), int(match[2])


def make_arc(flags):
    """Returns {"train": puzzles, "val": puzzles} of the tasks of ARC, and the number of the tasks' forms. Raises
    BadInput."""
    training, evaluation = arc.read_tasks(flags.puzzle)
    for name, wanted, tasks in (("train", flags.train, training), ("val", flags.val, evaluation)):
        if wanted > len(tasks):
            raise BadInput(f"--{name}={wanted}: {flags.puzzle} has {len(tasks)} such tasks: ask for fewer")
    training, evaluation = (tasks[:wanted] if wanted > 0 else tasks
                            for wanted, tasks in ((flags.train, training), (flags.val, evaluation)))
    return arc.make_splits(training, evaluation, flags.forms, flags.seed)


def begin_worker():
    """Leaves Ctrl-C to the parent process, and ends with it: a worker whose parent was killed would wait for ever."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(multiprocessing.parent_process().pid)


def make(flags, shape, number):
    """Returns puzzle `number` as (puzzle, solution, guesses), or None if there is none."""
    if flags.puzzle == "sudoku":
        return sudoku.generate(*shape, f"{flags.seed} {number}")
    found = mazes.generate(*shape, flags.min_path, f"{flags.seed} {number}")
    return found and (*found, 0)


def by_qqwing(count):
    """Returns `count` 9 × 9 Sudokus made by qqwing, as `make` does."""
    output = subprocess.run(["qqwing", "--generate", str(count), "--solution", "--csv"], check=True, text=True,
                            preexec_fn=partial(end_with_parent, os.getpid()),
                            capture_output=True).stdout
    rows = re.findall(r"([1-9.]{81}),([1-9]{81})", output)
    grids = [[[int(letter) for letter in text.replace(".", "0")] for text in row] for row in rows]
    return [(puzzle, solution, sudoku.solve(puzzle, 3, 3, limit=1)[1]) for puzzle, solution in grids]


def fingerprints(flags, shape, found):
    """Returns a number for each of the puzzles, the same for all forms of a puzzle."""
    module = sudoku if flags.puzzle == "sudoku" else mazes
    return module.fingerprints(np.array([puzzle for puzzle, _, _ in found]), *shape)


def make_all(flags, shape):
    """Returns {"train": puzzles, "val": puzzles}. Puzzles that a symmetry turns into each other are all in one of them.
    Raises BadInput if there are not enough.

    There are few really different small puzzles: of the minimal 4 × 4 Sudokus, 36. So what is held out are not single
    puzzles but all forms of some, which are chosen by their fingerprint.
    """
    wanted, found, made = {"train": flags.train, "val": flags.val}, {"train": {}, "val": {}}, 0
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), initializer=begin_worker) as pool, \
            tqdm(total=sum(wanted.values()), unit="puzzle", disable=not sys.stderr.isatty()) as progress:
        if flags.puzzle == "maze" and not any(pool.map(partial(make, flags, shape), range(4))):
            raise BadInput(f"--min_path={flags.min_path}: thousands of mazes of --side={flags.side} were drawn, and "
                           "none has so long a path: give a smaller --min_path")
        for _ in range(ROUNDS):
            missing = max(round((wanted[name] - len(found[name])) / share) for name, share in SHARES.items())
            if missing <= 0:
                break
            if flags.qqwing:
                new = by_qqwing(missing)
            else:
                new = list(filter(None, pool.map(partial(make, flags, shape), range(made, made + missing),
                                                 chunksize=16)))
                made += missing
            for puzzle, key in zip(new, fingerprints(flags, shape, new) if new else (), strict=True):
                name = "val" if key % 1000 < 1000 * SHARES["val"] else "train"
                if len(found[name]) < wanted[name]:
                    found[name][tuple(puzzle[0])] = puzzle
            progress.n = sum(map(len, found.values()))
            progress.refresh()
    if any(len(found[name]) < wanted[name] for name in wanted):
        raise BadInput(f"--train={flags.train} and --val={flags.val}: only {len(found['train'])} and "
                       f"{len(found['val'])} different puzzles were found: ask for fewer, or for larger ones")
    return {name: list(puzzles.values()) for name, puzzles in found.items()}


def main(argv=None):
    (flags,) = read_flags(argv, __doc__, {Flags: "flags"})
    require_own_flags(flags)
    is_arc = flags.puzzle in arc.VERSIONS
    if not is_arc:
        flags = replace(flags, train=2000 if flags.train < 0 else flags.train, val=300 if flags.val < 0 else flags.val)
    shape = (arc.SIDE,) if is_arc else read_shape(flags)
    out_dir = require_writable_dir(flags.out_dir or get_base_dir() / "puzzles")
    try:
        with FileLock(out_dir / ".lock", timeout=0):
            splits, tasks = make_arc(flags) if is_arc else (make_all(flags, shape), 0)
            write_puzzles(out_dir, "arc" if is_arc else flags.puzzle, shape, splits, tasks)
    except Timeout:
        raise BadInput(f"another prepare_puzzles is writing to {out_dir}: wait for it, or choose another --out_dir"
                       ) from None
    guesses = np.array([guesses for _, _, guesses in splits["val"]])
    filled = np.mean([np.count_nonzero(puzzle) for puzzle, _, _ in splits["val"]])
    about = f": {filled:.1f} digits and {guesses.mean():.1f} guesses on average, {np.mean(guesses > 0):.0%} need some" \
        if flags.puzzle == "sudoku" else f"; {tasks:,} forms of tasks" if is_arc else ""
    print(f"{out_dir}: {len(splits['train']):,} puzzles to train on, {len(splits['val']):,} held out{about}")


if __name__ == "__main__":
    run_script(main)
