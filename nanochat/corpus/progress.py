"""How far a long piece of work is."""
import sys
import time

from tqdm import tqdm


class Progress:
    """Shows progress: a tqdm bar on a terminal, otherwise plain lines, at most one in ten seconds."""

    def __init__(self, label, total, unit="B"):
        self.label, self.total, self.unit, self.done = label, total, unit, 0
        self.started = self.printed = time.monotonic()
        self.bar = tqdm(total=total, desc=label, unit=unit, unit_scale=True) if sys.stderr.isatty() else None

    def update(self, amount):
        self.done += amount
        if self.bar:
            self.bar.update(amount)
        elif self.done < self.total and time.monotonic() - self.printed > 10:
            self._print()

    def _print(self):
        self.printed = time.monotonic()
        print(tqdm.format_meter(self.done, self.total, self.printed - self.started, ncols=0, prefix=self.label,
                                unit=self.unit, unit_scale=True), flush=True)

    def close(self):
        if self.bar:
            self.bar.close()
        else:
            self._print()
