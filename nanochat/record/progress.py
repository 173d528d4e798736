"""Shows how far long work is."""
import sys
import time
from functools import partial

from tqdm import tqdm

from nanochat.common import say, work


class Progress:
    """Shows progress on stderr: a bar on a terminal, otherwise a line every ten seconds at most. A context manager."""

    def __init__(self, label, total, unit="B"):
        self._meter = partial(tqdm.format_meter, total=total, ncols=0, prefix=label, unit=unit, unit_scale=True)
        self._total = total
        self._done = 0
        self._begun = time.monotonic()
        self._printed = self._begun
        self._bar = None
        if sys.stderr.isatty():
            self._bar = tqdm(total=total, desc=label, unit=unit, unit_scale=True)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if self._bar:
            self._bar.close()
        else:
            self._print()

    def update(self, amount):
        self._done += amount
        if self._bar:
            self._bar.update(amount)
            work.said()
        elif self._done < self._total and time.monotonic() - self._printed > 10:
            self._print()

    def _print(self):
        self._printed = time.monotonic()
        say(self._meter(self._done, elapsed=self._printed - self._begun), sys.stderr)
