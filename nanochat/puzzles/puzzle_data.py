"""Puzzles on disk, and the puzzles of a step, which only seed, step and slot determine.

A folder of puzzles has train.parquet and val.parquet with the columns `puzzle` and `solution` (lists of tokens of one
length), and puzzles.json, which describes them. Token 0 is an empty cell.
"""
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from nanochat.common import BadInput, written_whole
from nanochat.device.ranks import Dist
from nanochat.puzzles import sudoku

DESCRIPTION = "puzzles.json"
COLUMNS = ("puzzle", "solution")
KIND = "sudoku"
LETTERS = ".123456789ABCDEFG"  # of an empty cell and the digits, for a person


@dataclass(frozen=True)
class Puzzles:
    box: tuple  # (rows, columns)
    puzzles: np.ndarray  # whole numbers (N, cells)
    solutions: np.ndarray  # (N, cells)
    fingerprint: str  # of the file

    @property
    def side(self):
        return self.box[0] * self.box[1]

    @property
    def vocab_size(self):
        return self.side + 1

    def text(self, cells):
        """Returns a grid of cells (cells,) as lines of text."""
        lines = []
        for row in np.reshape(cells, (self.side, self.side)):
            lines.append("".join(LETTERS[token] for token in row))
        return lines


def write_puzzles(folder, box, splits):
    """Writes {"train": [(puzzle, solution), …], "val": …} to a folder."""
    folder = Path(folder)
    # Each file is whole before it gets its name, and the description comes last: a folder without it has no puzzles. So
    # a kill never leaves new puzzles under the old description.
    (folder / DESCRIPTION).unlink(missing_ok=True)
    for name, rows in splits.items():
        table = pa.table(dict(zip(COLUMNS, map(list, zip(*rows, strict=True)), strict=True)))
        with written_whole(folder / f"{name}.parquet") as unfinished:
            pq.write_table(table, unfinished, compression="zstd")
    description = {"kind": KIND, "shape": box, "puzzles": {name: len(rows) for name, rows in splits.items()}}
    (folder / DESCRIPTION).write_text(json.dumps(description, indent=1))


def read_puzzles(folder, split):
    """Returns the Puzzles of a split, "train" or "val". Raises BadInput."""
    folder = Path(folder)
    path = folder / f"{split}.parquet"
    advice = "make them with python3 -m scripts.prepare_puzzles"
    try:
        found = json.loads((folder / DESCRIPTION).read_text())
        table = pq.read_table(path, columns=list(COLUMNS))
        values = [np.stack(column.to_numpy()) for column in table.columns]
        if found["kind"] != KIND:
            raise ValueError(f"the kind {found['kind']} is unknown")
        rows, columns = found["shape"]
        puzzles = Puzzles((rows, columns), *values, fingerprint=hashlib.sha256(path.read_bytes()).hexdigest())
        _check(puzzles, path.name)
        return puzzles
    except FileNotFoundError:
        raise BadInput(f"--data_dir={folder} has no {DESCRIPTION} and {path.name}: {advice}") from None
    except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError, pa.ArrowException) as error:
        raise BadInput(f"--data_dir={folder} has no readable puzzles ({error!r}): {advice}") from None


def _check(puzzles, name):
    """Raises ValueError if the Puzzles of a file called `name` are no grids, or have unknown tokens."""
    cells = puzzles.side ** 2
    for tokens in (puzzles.puzzles, puzzles.solutions):
        if tokens.shape[1:] != (cells,):
            raise ValueError(f"{name} has no grids of {cells} cells")
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < puzzles.vocab_size:
            raise ValueError(f"{name} has tokens that are not 0 to {puzzles.vocab_size - 1}")


@dataclass
class PuzzleFeed:
    """Iterates over this rank's micro-batches from a step on, {name: CPU tensor} with a row for each of its slots.
    puzzle, solution: int32 (slots, cells), for the slot if it is free. min_steps: int32 (slots,), the least steps of
    that puzzle's episode. They are drawn for all slots of the run, free or not, so they depend on seed and step only,
    not on the ranks nor on the model."""

    puzzles: Puzzles
    dist: Dist
    step: int  # the next one
    seed: int
    total_batch_size: int
    explore: float  # share of episodes with a random minimum of 2 to max_steps steps; the others have no minimum
    max_steps: int
    state: dict = field(default_factory=dict)  # always empty: seed and step determine the rest

    @property
    def fingerprint(self):
        return self.puzzles.fingerprint

    def __iter__(self):
        return self

    def __next__(self):
        own = slice(self.dist.rank, None, self.dist.world_size)
        batch = {}
        for name, values in self.draw(self.step).items():
            batch[name] = torch.from_numpy(values[own].astype(np.int32))
        self.step += 1
        return batch

    def draw(self, step):
        """Returns {name: array} of all slots of the run at `step`."""
        # A generator for each step, keyed by seed and step: a resumed run needs no state, and every rank draws for all
        # slots. Another order of the draws below would change every run.
        generator = np.random.Generator(np.random.Philox(key=[self.seed, step]))
        numbers = generator.integers(len(self.puzzles.puzzles), size=self.total_batch_size)
        puzzle, solution = sudoku.draw_symmetries(
            [self.puzzles.puzzles[numbers], self.puzzles.solutions[numbers]], *self.puzzles.box, generator)
        explores = generator.random(self.total_batch_size) < self.explore
        minimum = generator.integers(2, max(self.max_steps, 2) + 1, size=self.total_batch_size)
        return {"puzzle": puzzle, "solution": solution, "min_steps": np.where(explores, minimum, 0)}

    def metrics(self):
        return {"puzzles": self.step * self.total_batch_size}

    def close(self):
        pass
