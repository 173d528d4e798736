"""Makes Sudokus for puzzle_train: train.parquet and val.parquet, which share no puzzle, not even turned, mirrored or
renamed.

    python3 -m scripts.prepare_puzzles --box=2x2
    python3 -m scripts.prepare_puzzles --box=3x3 --train=2000    # minutes

They are minimal: without any one of its digits a puzzle has several solutions. The same flags make the same puzzles.
"""
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nanochat import common
from nanochat.common import expand_path, flag
from nanochat.puzzles.make import make_splits


@dataclass(frozen=True)
class Flags:
    box: str = flag("2x2", "ROWSxCOLUMNS of a Sudoku's box; 2x2: a 4 × 4 Sudoku, 2x3: 6 × 6, 3x3: the usual one",
                    choices=("2x2", "2x3", "3x2", "2x4", "4x2", "3x3"))  # a 12 × 12 puzzle takes the solver minutes
    train: int = flag(2000, "puzzles to train on", at_least=1, at_most=10**7)
    val: int = flag(300, "held-out puzzles", at_least=1, at_most=10**6)
    seed: int = flag(0, "of the puzzles", at_least=0)
    out_dir: Path | None = flag(None, "default: $NANOCHAT_BASE_DIR/puzzles", of=expand_path)


def main(argv=None):
    (flags,) = common.read_flags(argv, __doc__, {Flags: "flags"}, gone={"qqwing": "leave it out"})
    box = tuple(map(int, flags.box.split("x")))
    from nanochat.puzzles.puzzle_data import write_puzzles
    out_dir = common.require_writable_dir(flags.out_dir or common.get_base_dir() / "puzzles")
    refusal = f"another prepare_puzzles is writing to {out_dir}: wait for it, or choose another --out_dir"
    with common.locked(out_dir / ".lock", refusal):
        splits = make_splits(box, flags.seed, {"train": flags.train, "val": flags.val})
        write_puzzles(out_dir, box, splits)
    filled = np.mean([np.count_nonzero(puzzle) for puzzle, _ in splits["val"]])
    print(f"{out_dir}: {len(splits['train']):,} puzzles to train on, {len(splits['val']):,} held out, "
          f"{filled:.1f} digits on average")


if __name__ == "__main__":
    common.run_script(main, "preparing the puzzles")
