"""Draws the solving of a held-out puzzle as an animated picture (SVG)."""
from xml.sax.saxutils import escape

import numpy as np

from nanochat.checkpoint.format import META, OPTIMIZER, find_problem
from nanochat.checkpoint.meta import load_meta, read_config
from nanochat.checkpoint.pieces import load_tensors
from nanochat.common import BadInput
from nanochat.puzzles.trm import TRM, TRMConfig

CELL = 32  # in SVG's pixels, as the next two
MARGIN = 8
TOP = 24
COLOURS = {"given": "#000000", "right": "#1a7f37", "wrong": "#cf222e"}


def load_averaged(path):
    """Returns a TRM with the averaged weights of a checkpoint, and its Meta. Raises BadInput."""
    meta = load_meta(path)
    if meta.task != "puzzles":
        raise BadInput(f"--run: {path} belongs to the task {meta.task}: give a run of puzzle_train")
    problem = find_problem(path)
    if problem:
        raise BadInput(f"--run: {path} is damaged ({problem}): use another checkpoint")
    seed = meta.flags.get("seed")
    if not isinstance(seed, int):
        raise BadInput(f"--run: {path} has no seed in the flags of its {META}: use another checkpoint")
    model = TRM(read_config(path, meta, TRMConfig)).init_weights(seed)
    state = load_tensors(path, OPTIMIZER)
    model.load_state_dict({name: state[f"{name}.average"] for name, _ in model.named_parameters()}, strict=False)
    return model, meta


def draw(puzzles, number, answers, step_s):
    """Returns an SVG that shows the answers to a puzzle, a list of arrays (cells,), each for `step_s` seconds."""
    side = puzzles.side
    solution = puzzles.solutions[number]
    puzzle = puzzles.puzzles[number]
    if puzzles.tasks:
        puzzle = np.zeros_like(solution)  # the question is no part of a task's answer
    size = side * CELL + 2 * MARGIN
    letters = "".join(puzzles.text(puzzle))
    given = [_text(at, side, letters[at], "given") for at in np.flatnonzero(puzzle)]
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size} {size + TOP}" width="{size}" '
             f'height="{size + TOP}" font-family="monospace" font-size="18" text-anchor="middle">',
             f'<rect width="{size}" height="{size + TOP}" fill="#ffffff"/>',
             *_lines(puzzles), f"<g>{''.join(given)}</g>"]
    frames = len(answers) + 2
    for step, answer in enumerate(answers):
        shown = ["none"] * frames
        shown[step] = "inline"
        if step == len(answers) - 1:  # two frames longer
            shown[step:] = ["inline"] * 3
        letters = "".join(puzzles.text(answer))
        cells = []
        for at in np.flatnonzero(puzzle == 0):
            kind = "right" if answer[at] == solution[at] else "wrong"
            cells.append(_text(at, side, letters[at], kind))
        title = f"step {step + 1}: {(answer == solution).sum()} of {len(solution)} cells"
        lines.append(f'<g display="none"><animate attributeName="display" calcMode="discrete" '
                     f'dur="{frames * step_s:g}s" repeatCount="indefinite" values="{";".join(shown)}"/>'
                     f'<text x="{size / 2}" y="18" font-size="13">{title}</text>{"".join(cells)}</g>')
    return "\n".join([*lines, "</svg>", ""])


def _lines(puzzles):
    """Returns the lines between cells; those between a Sudoku's boxes are thicker."""
    rows, columns = puzzles.shape if puzzles.kind == "sudoku" else (1, 1)
    begin = MARGIN
    end = MARGIN + puzzles.side * CELL
    found = []
    for line in range(puzzles.side + 1):
        at = MARGIN + line * CELL
        for path, per_box in ((f"M{at} {begin + TOP}V{end + TOP}", columns), (f"M{begin} {at + TOP}H{end}", rows)):
            width = 0.5 if line % per_box else 2
            found.append(f'<path d="{path}" stroke="#57606a" stroke-width="{width}"/>')
    return found


def _text(at, side, letter, kind):
    row, column = divmod(at, side)
    return (f'<text x="{MARGIN + (column + 0.5) * CELL:g}" y="{TOP + MARGIN + (row + 0.7) * CELL:g}" '
            f'fill="{COLOURS[kind]}">{escape(letter)}</text>')
