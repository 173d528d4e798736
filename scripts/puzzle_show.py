"""Draws a held-out puzzle being solved, supervision step by supervision step, as an animated SVG:

    python3 -m scripts.puzzle_show --run=sudoku4 --out=solved.svg

Given cells are black, right answers green, wrong ones red. It uses the averaged weights of the newest checkpoint.
"""
from dataclasses import dataclass
from pathlib import Path

import torch

from nanochat.checkpoint.on_disk import find_checkpoint
from nanochat.common import BadInput, expand_path, flag, get_base_dir, read_flags, run_script
from nanochat.device.ranks import Dist
from nanochat.puzzles.episodes import solve
from nanochat.puzzles.puzzle_data import read_puzzles
from nanochat.puzzles.show import draw, load_averaged


@dataclass(frozen=True)
class Flags:
    run: str = flag("", "a run of puzzle_train (its newest checkpoint), RUN/step_000100 or a path", required=True)
    data_dir: Path | None = flag(None, "folder of puzzles; default: that of its training", of=expand_path)
    puzzle: int = flag(0, "number of the held-out puzzle", at_least=0)
    supervision_steps: int = flag(16, "supervision steps", at_least=1, at_most=1000)
    step_s: float = flag(0.7, "seconds that an answer is shown", at_least=0.05, at_most=60)
    out: Path = flag(Path("puzzle.svg"), "the file to write", of=expand_path)


def main(argv=None):
    (flags,) = read_flags(argv, __doc__, {Flags: "flags"})
    if not flags.out.parent.is_dir() or flags.out.is_dir():
        raise BadInput(f"--out={flags.out} is a folder, or in none: name a file in a folder that exists")
    model, meta = load_averaged(find_checkpoint(flags.run))
    puzzles = read_puzzles(flags.data_dir or meta.flags.get("data_dir") or get_base_dir() / "puzzles", "val")
    config = model.config
    if (config.cells, config.vocab_size, config.tasks) != (puzzles.side ** 2, puzzles.vocab_size, puzzles.tasks):
        raise BadInput(f"--run={flags.run} solves grids of {config.cells} cells with {config.vocab_size} tokens and "
                       f"{config.tasks} tasks, and the puzzles have {puzzles.side ** 2}, {puzzles.vocab_size} and "
                       f"{puzzles.tasks}: give its own --data_dir")
    if flags.puzzle >= len(puzzles.puzzles):
        raise BadInput(f"--puzzle={flags.puzzle}: the held-out puzzles are number 0 to {len(puzzles.puzzles) - 1}")
    one = puzzles.puzzles[flags.puzzle:flags.puzzle + 1]
    answers = [answer[0] for answer in solve(model, one, flags.supervision_steps, Dist("cpu", torch.device("cpu")))]
    try:
        flags.out.write_text(draw(puzzles, flags.puzzle, answers, flags.step_s), encoding="utf-8")
    except OSError as error:
        raise BadInput(f"--out={flags.out} cannot be written ({error.strerror}): name another file") from None
    is_solved = (answers[-1] == puzzles.solutions[flags.puzzle]).all()
    print(f"{flags.out}: {'solved' if is_solved else 'not solved'} after {len(answers)} supervision steps")


if __name__ == "__main__":
    run_script(main)
