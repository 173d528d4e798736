"""Steps whose loss or gradient was not finite. The optimizer skips them on the device; here they are counted, and after
too many in a row the batch of the first is written to disk for inspection."""
import math
from pathlib import Path

import numpy as np
import torch


class NonfiniteSteps:
    """Counts a run's non-finite steps. Every rank counts, and all come to the same numbers."""

    def __init__(self, limit, total=0, in_a_row=0):
        """limit: how many in a row are too many (0 or less: no limit); the rest: the counts of a resumed run."""
        self.limit = limit
        self.total = total
        self.in_a_row = in_a_row
        self._first_step = self._first_rows = None  # of the first in a row

    def counts(self):
        """Returns the counts for a checkpoint, as __init__ takes them."""
        return {"total": self.total, "in_a_row": self.in_a_row}

    def add(self, step, loss, gradient_norm, rows):
        """Counts step number `step` (from 1) if it was non-finite, and returns whether it was.

        rows: a list of int32 (B, T + 1), the rows of this rank's micro-steps.
        """
        if math.isfinite(loss) and math.isfinite(gradient_norm):
            self.in_a_row = 0
            self._first_rows = None
            return False
        self.total += 1
        self.in_a_row += 1
        # Only the first of a series: no update was made since, so the batches after it met the same weights.
        if self._first_rows is None:
            self._first_step = step
            self._first_rows = rows
        return True

    @property
    def are_too_many(self):
        return 0 < self.limit <= self.in_a_row

    def write_first_batch(self, run_dir, rank):
        """Writes this rank's rows, int32 (rows, T + 1), of the first of the non-finite steps in a row.

        Returns the path of the directory, which gets those of all ranks, or None if no step of this process was one: a
        run may resume with a lower limit than its count.
        """
        if self._first_rows is None:
            return None
        directory = Path(run_dir) / f"bad_step_{self._first_step:06d}"
        directory.mkdir(exist_ok=True)
        np.save(directory / f"rank_{rank:03d}.npy", torch.cat(self._first_rows).numpy())
        return directory
