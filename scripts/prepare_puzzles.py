"""Makes puzzles for puzzle_train: train.parquet and val.parquet, which share no puzzle, not even turned, mirrored or
renamed.

    python3 -m scripts.prepare_puzzles --puzzle=sudoku --box=2x2
    python3 -m scripts.prepare_puzzles --puzzle=sudoku --box=3x3 --train=2000 --qqwing
    python3 -m scripts.prepare_puzzles --puzzle=maze --side=15 --min_path=30
    python3 -m scripts.prepare_puzzles --puzzle=arc1

Sudokus are minimal: without any one of its digits a puzzle has several solutions. The same flags make the same puzzles,
except with --qqwing.
"""
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nanochat import common
from nanochat.common import BadInput, expand_path, flag
from nanochat.puzzles import arc
from nanochat.puzzles.make import Maker, make_splits
from nanochat.puzzles.puzzle_data import write_puzzles


@dataclass(frozen=True)
class Flags:
    puzzle: str = flag("sudoku", "sudoku, maze, or the tasks of ARC-AGI-1 or 2",
                       choices=("sudoku", "maze", *arc.VERSIONS))
    box: str = flag("2x2", "ROWSxCOLUMNS of a Sudoku's box; 2x2: a 4 × 4 Sudoku, 2x3: 6 × 6, 3x3: the usual one",
                    choices=("2x2", "2x3", "3x2", "2x4", "4x2", "3x3"))  # a 12 × 12 puzzle takes the solver minutes
    side: int = flag(15, "rows and columns of a maze", at_least=5, at_most=99)
    min_path: int = flag(20, "cells that the shortest path of a maze exceeds", at_least=1, at_most=10_000)
    train: int = flag(-1, "puzzles to train on; -1: 2,000. Of ARC: training tasks; -1: all", at_least=1, at_most=10**7,
                      unset=-1)
    val: int = flag(-1, "held-out puzzles; -1: 300. Of ARC: evaluation tasks; -1: all", at_least=1, at_most=10**6,
                    unset=-1)
    forms: int = flag(8, "forms of each task of ARC to train on", at_least=1, at_most=64)
    seed: int = flag(0, "of the puzzles", at_least=0)
    qqwing: bool = flag(False, "9 × 9 Sudokus by Debian's qqwing: much faster")
    out_dir: Path | None = flag(None, "default: $NANOCHAT_BASE_DIR/puzzles", of=expand_path)


OF_PUZZLE = {"box": ("sudoku",), "qqwing": ("sudoku",), "side": ("maze",), "min_path": ("maze",),
             "forms": tuple(arc.VERSIONS)}  # the puzzles of each of these flags


def require_own_flags(flags):
    """Raises BadInput for a flag of other puzzles."""
    for name, puzzles in OF_PUZZLE.items():
        if flags.puzzle not in puzzles and getattr(flags, name) != getattr(Flags, name):
            raise BadInput(f"--{name} is for --puzzle={' or '.join(puzzles)}, not for --puzzle={flags.puzzle}")


def read_maker(flags):
    """Returns the Maker for the flags. Raises BadInput."""
    if flags.puzzle == "maze":
        return Maker("maze", (flags.side,), flags.seed, flags.min_path)
    if flags.qqwing and flags.box != "3x3":
        raise BadInput(f"--qqwing makes 9 × 9 Sudokus, not --box={flags.box}: add --box=3x3, or leave --qqwing out")
    if flags.qqwing and not shutil.which("qqwing"):
        raise BadInput("--qqwing: there is no qqwing: apt-get install qqwing, or leave --qqwing out")
    rows, columns = flags.box.split("x")
    return Maker("sudoku", (int(rows), int(columns)), flags.seed)


def choose_tasks(flags):
    """Returns the tasks of ARC to train on and those to evaluate. Raises BadInput."""
    chosen = []
    for name, tasks in zip(("train", "val"), arc.read_tasks(flags.puzzle), strict=True):
        number = getattr(flags, name)
        if number > len(tasks):
            raise BadInput(f"--{name}={number}: {flags.puzzle} has {len(tasks)} such tasks: ask for fewer")
        chosen.append(tasks[:number] if number > 0 else tasks)
    return chosen


def prepare(flags, maker, out_dir):
    """Writes the puzzles of a maker, or of ARC. Returns {"train": puzzles, "val": puzzles}, and a description."""
    if not maker:
        splits, tasks = arc.make_splits(*choose_tasks(flags), flags.forms, flags.seed)
        write_puzzles(out_dir, "arc", (arc.SIDE,), splits, tasks)
        return splits, f"; {tasks:,} forms of tasks"
    sizes = {"train": 2000 if flags.train < 0 else flags.train, "val": 300 if flags.val < 0 else flags.val}
    splits = make_splits(maker, sizes, flags.qqwing)
    write_puzzles(out_dir, maker.kind, maker.shape, splits)
    if flags.puzzle == "maze":
        return splits, ""
    guesses = np.array([guesses for _, _, guesses in splits["val"]])
    filled = np.mean([np.count_nonzero(puzzle) for puzzle, _, _ in splits["val"]])
    return splits, (f": {filled:.1f} digits and {guesses.mean():.1f} guesses on average, {np.mean(guesses > 0):.0%} "
                    "need some")


def main(argv=None):
    (flags,) = common.read_flags(argv, __doc__, {Flags: "flags"})
    require_own_flags(flags)
    maker = None if flags.puzzle in arc.VERSIONS else read_maker(flags)
    out_dir = common.require_writable_dir(flags.out_dir or common.get_base_dir() / "puzzles")
    refusal = f"another prepare_puzzles is writing to {out_dir}: wait for it, or choose another --out_dir"
    with common.locked(out_dir / ".lock", refusal):
        splits, about = prepare(flags, maker, out_dir)
    print(f"{out_dir}: {len(splits['train']):,} puzzles to train on, {len(splits['val']):,} held out{about}")


if __name__ == "__main__":
    common.run_script(main)
