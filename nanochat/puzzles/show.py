"""Draws the solving of a held-out puzzle as an animated picture (SVG)."""
from pathlib import Path

import numpy as np

from nanochat.checkpoint.meta import load_meta, read_config
from nanochat.checkpoint.on_disk import META, OPTIMIZER, find_problem
from nanochat.checkpoint.pieces import load_tensors
from nanochat.common import BadInput
from nanochat.puzzles.trm import TRM, TRMConfig
from nanochat.record.page import fill


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
    solution = puzzles.solutions[number]
    puzzle = puzzles.puzzles[number]
    if puzzles.tasks:
        puzzle = np.zeros_like(solution)  # the question is no part of a task's answer
    frames = []
    num_steps = len(answers) + 2
    for step, answer in enumerate(answers):
        is_right = answer == solution
        shown = ["none"] * num_steps
        shown[step] = "inline"
        if step == len(answers) - 1:  # for two steps more
            shown[step:] = ["inline"] * 3
        frames.append(("".join(puzzles.text(answer)), is_right.tolist(), is_right.sum(), ";".join(shown)))
    rows, columns = puzzles.shape if puzzles.kind == "sudoku" else (1, 1)
    return fill(Path(__file__).with_name("solving.svg"), side=puzzles.side, rows=rows, columns=columns,
                given="".join(puzzles.text(puzzle)), is_given=(puzzle > 0).tolist(), frames=frames,
                seconds=num_steps * step_s)
