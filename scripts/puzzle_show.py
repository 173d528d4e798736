"""Draws a held-out puzzle being solved, supervision step by supervision step, as an animated SVG:

    python3 -m scripts.puzzle_show --run=sudoku4 --out=solved.svg

Given cells are black, right answers green, wrong ones red. The weights are the averaged ones of the newest checkpoint.
"""
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

import numpy as np
import torch

from nanochat.checkpoint.format import META, OPTIMIZER, find_checkpoint, find_problem, load_meta, read_config
from nanochat.checkpoint.pieces import load_tensors
from nanochat.common import BadInput, expand_path, flag, get_base_dir, read_flags, run_script
from nanochat.device.ranks import Dist
from nanochat.puzzles.episodes import solve
from nanochat.puzzles.puzzle_data import read_puzzles
from nanochat.puzzles.trm import TRM, TRMConfig

CELL, MARGIN, TOP = 32, 8, 24  # in SVG's pixels
COLOURS = {"given": "#000000", "right": "#1a7f37", "wrong": "#cf222e"}


@dataclass(frozen=True)
class Flags:
    run: str = flag("", "a run of puzzle_train (its newest checkpoint), RUN/step_000100 or a path", required=True)
    data_dir: Path | None = flag(None, "folder of puzzles; default: the one it was trained on", of=expand_path)
    puzzle: int = flag(0, "number of the held-out puzzle", at_least=0)
    supervision_steps: int = flag(16, "supervision steps", at_least=1, at_most=1000)
    step_s: float = flag(0.7, "seconds that an answer is shown", at_least=0.05, at_most=60)
    out: Path = flag(Path("puzzle.svg"), "the file to write", of=expand_path)


def load_averaged(path):
    """Returns a TRM with the averaged weights of a checkpoint, and its Meta. Raises BadInput."""
    meta = load_meta(path)
    if meta.task != "puzzles":
        raise BadInput(f"--run: {path} is of the task {meta.task}: give a run of puzzle_train")
    if problem := find_problem(path):
        raise BadInput(f"--run: {path} is damaged ({problem}): use another checkpoint")
    if not isinstance(seed := meta.flags.get("seed"), int):
        raise BadInput(f"--run: {path} cannot be used: the flags in its {META} have no seed: use another checkpoint")
    model = TRM(read_config(path, meta, TRMConfig)).init_weights(seed)
    state = load_tensors(path, OPTIMIZER)
    model.load_state_dict({name: state[f"{name}.average"] for name, _ in model.named_parameters()}, strict=False)
    return model, meta


def draw(puzzles, number, answers, step_s):
    """Returns an SVG of the answers to a puzzle, a list of arrays (cells,), which are shown one after the other."""
    side, solution = puzzles.side, puzzles.solutions[number]
    puzzle = puzzles.puzzles[number] if not puzzles.tasks else np.zeros_like(solution)  # no part of a task's answer
    size = side * CELL + 2 * MARGIN
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size} {size + TOP}" width="{size}" '
             f'height="{size + TOP}" font-family="monospace" font-size="18" text-anchor="middle">',
             f'<rect width="{size}" height="{size + TOP}" fill="#ffffff"/>']
    letters = "".join(puzzles.text(puzzle))
    given = "".join(_text(at, side, letter, "given") for at, letter in enumerate(letters) if puzzle[at])
    rows, columns = puzzles.shape if puzzles.kind == "sudoku" else (1, 1)
    begin, end = MARGIN, size - MARGIN
    for line in range(side + 1):
        at = MARGIN + line * CELL
        for path, per_box in ((f"M{at} {begin + TOP}V{end + TOP}", columns), (f"M{begin} {at + TOP}H{end}", rows)):
            lines.append(f'<path d="{path}" stroke="#57606a" stroke-width="{0.5 if line % per_box else 2}"/>')
    lines.append(f"<g>{given}</g>")
    frames = len(answers) + 2  # the last one is shown for longer
    for step, answer in enumerate(answers):
        shown = ["inline" if frame == step or step == len(answers) - 1 <= frame else "none" for frame in range(frames)]
        cells = "".join(_text(at, side, letter, "right" if answer[at] == solution[at] else "wrong")
                        for at, letter in enumerate("".join(puzzles.text(answer))) if not puzzle[at])
        right = int((answer == solution).sum())
        title = f"step {step + 1}: {right} of {len(solution)} cells"
        lines.append(f'<g display="none"><animate attributeName="display" calcMode="discrete" '
                     f'dur="{frames * step_s:g}s" repeatCount="indefinite" values="{";".join(shown)}"/>'
                     f'<text x="{size / 2}" y="18" font-size="13">{title}</text>{cells}</g>')
    return "\n".join([*lines, "</svg>", ""])


def _text(at, side, letter, kind):
    row, column = divmod(at, side)
    return (f'<text x="{MARGIN + (column + 0.5) * CELL:g}" y="{TOP + MARGIN + (row + 0.7) * CELL:g}" '
            f'fill="{COLOURS[kind]}">{escape(letter)}</text>')


def main(argv=None):
    (flags,) = read_flags(argv, __doc__, {Flags: "flags"})
    if not flags.out.parent.is_dir() or flags.out.is_dir():
        raise BadInput(f"--out={flags.out} is a folder, or its folder does not exist: name a file")
    model, meta = load_averaged(find_checkpoint(flags.run))
    puzzles = read_puzzles(flags.data_dir or meta.flags.get("data_dir") or get_base_dir() / "puzzles", "val")
    of_model = model.config.cells, model.config.vocab_size, model.config.tasks
    of_puzzles = puzzles.side ** 2, puzzles.vocab_size, puzzles.tasks
    if of_model != of_puzzles:
        raise BadInput("--run={} solves grids of {} cells with {} tokens of {} tasks, and the puzzles have {}, {} and "
                       "{}: give its own --data_dir".format(flags.run, *of_model, *of_puzzles))
    if flags.puzzle >= len(puzzles.puzzles):
        raise BadInput(f"--puzzle={flags.puzzle}: the held-out puzzles are number 0 to {len(puzzles.puzzles) - 1}")
    answers = solve(model, puzzles.puzzles[flags.puzzle:flags.puzzle + 1], flags.supervision_steps,
                    Dist("cpu", torch.device("cpu")))
    answers = [answer[0] for answer in answers]
    try:
        flags.out.write_text(draw(puzzles, flags.puzzle, answers, flags.step_s), encoding="utf-8")
    except OSError as error:
        raise BadInput(f"--out={flags.out} cannot be written ({error.strerror}): name another file") from None
    is_solved = (answers[-1] == puzzles.solutions[flags.puzzle]).all()
    print(f"{flags.out}: {'solved' if is_solved else 'not solved'} after {len(answers)} supervision steps")


if __name__ == "__main__":
    run_script(main)
