"""Goodput: how the wall time of a run divides into training, compiling, saving and the rest."""
import time
from contextlib import contextmanager

from nanochat.device.programs import compile_seconds


class Goodput:
    """The seconds of a run's wall time by name. Each second counts once: for the innermost open span, or "other".

        goodput = Goodput(meta.seconds, None if meta.is_pause else meta.time)  # resumes from a checkpoint
        with goodput.span("train"):
            ...

    Seconds of compiling inside a span count as "compile". The seconds between the saved state and the start of the new
    process count as "lost": steps that must be trained again, and time without a process. So all seconds add up to the
    time since the run began, without the pauses after it was told to stop or had finished.
    """

    def __init__(self, seconds=None, saved_at=None):
        """seconds: the result of seconds() in a checkpoint; saved_at: the Unix time since which time was lost, or
        None."""
        self._seconds = dict(seconds or {})
        if saved_at:
            self._seconds["lost"] = self._seconds.get("lost", 0.0) + max(time.time() - saved_at, 0.0)
        self._name = "other"
        self._since = time.monotonic()
        self._compiled = compile_seconds()

    @contextmanager
    def span(self, name):
        """Counts the time inside the block for `name`. An inner span interrupts an outer one."""
        outer = self._name
        self._switch(name)
        try:
            yield
        finally:
            self._switch(outer)

    def seconds(self):
        """Returns {name: seconds} up to now."""
        self._switch(self._name)  # counts the open span up to now
        return dict(self._seconds)

    def fraction(self):
        """Returns the fraction of the time spent in training, 0 to 1."""
        seconds = self.seconds()
        return seconds.get("train", 0.0) / max(sum(seconds.values()), 1e-9)

    def _switch(self, name):
        now = time.monotonic()
        compiled = compile_seconds()
        # XLA counts the compiling seconds of the whole process. Those since the last switch are taken from the open
        # span, at most its length, because other ranks may be threads that compile at the same time.
        compiling = min(compiled - self._compiled, now - self._since)
        self._seconds[self._name] = self._seconds.get(self._name, 0.0) + now - self._since - compiling
        if compiling:
            self._seconds["compile"] = self._seconds.get("compile", 0.0) + compiling
        self._name = name
        self._since = now
        self._compiled = compiled
