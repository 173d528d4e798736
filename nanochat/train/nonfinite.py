"""Steps whose loss or gradient was not finite. The device skips their updates by itself; here they are counted, and
after too many in a row the batch of the first is written out, to be looked at."""
import math
from pathlib import Path

import numpy as np
import torch


class BadSteps:
    """The count of a run's bad steps; every rank counts, and all come to the same."""

    def __init__(self, limit, total=0, in_a_row=0):
        """limit: how many in a row are too many (0 or less: never)."""
        self.limit, self.total, self.in_a_row = limit, total, in_a_row
        self._first_step = self._first_rows = None

    def add(self, step, loss, gradient_norm, rows):
        """Takes note of step number `step` (from 1), with the rows (B, T + 1) of this rank's micro-steps; returns
        whether it was bad."""
        if math.isfinite(loss) and math.isfinite(gradient_norm):
            self.in_a_row, self._first_rows = 0, None
            return False
        self.total += 1
        self.in_a_row += 1
        if self._first_rows is None:
            self._first_step, self._first_rows = step, rows
        return True

    @property
    def are_too_many(self):
        return 0 < self.limit <= self.in_a_row

    def write_first_batch(self, run_dir, rank):
        """Writes this rank's token rows of the first bad step of the row, int32 (rows, T + 1), and returns the path of
        the directory that has those of all ranks."""
        directory = Path(run_dir) / f"bad_step_{self._first_step:06d}"
        directory.mkdir(exist_ok=True)
        np.save(directory / f"rank_{rank:03d}.npy", torch.cat(self._first_rows).numpy())
        return directory
