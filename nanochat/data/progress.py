"""How far a long piece of work is."""
import sys
import time

from tqdm import tqdm


class Progress:
    """Shows progress: a tqdm bar on a terminal, otherwise plain lines, at most one in ten seconds."""

    def __init__(self, label, total_bytes):
        self.label, self.total, self.done = label, total_bytes, 0
        self.started = self.printed = time.monotonic()
        self.bar = tqdm(total=total_bytes, desc=label, unit="B", unit_scale=True) if sys.stderr.isatty() else None

    def update(self, nbytes):
        self.done += nbytes
        if self.bar:
            self.bar.update(nbytes)
        elif self.done < self.total and time.monotonic() - self.printed > 10:
            self._print()

    def _print(self):
        self.printed = time.monotonic()
        print(tqdm.format_meter(self.done, self.total, self.printed - self.started, ncols=0, prefix=self.label,
                                unit="B", unit_scale=True), flush=True)

    def close(self):
        if self.bar:
            self.bar.close()
        else:
            self._print()
