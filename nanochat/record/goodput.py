"""Goodput: how the wall time of a run divides into training, compiling, saving and the rest."""
import time
from contextlib import contextmanager

from nanochat.device.programs import compile_seconds


class Goodput:
    """The seconds of a run's wall time by name. Each second counts once: for the innermost open span, or "other".

        goodput = Goodput(meta.seconds, None if meta.is_pause else meta.time)  # resumes from a checkpoint
        with goodput.span("train"):
            ...

    The seconds spent compiling inside a span count as "compile" instead. The seconds between the saved state and the
    start of the new process count as "lost": steps after the checkpoint that must be trained again, and the time in
    which no process ran. Therefore all seconds together are the time since the run began, without the pauses after it
    was told to stop or had finished.
    """

    def __init__(self, seconds=None, saved_at=None, compile_seconds=compile_seconds):
        """Resumes from `seconds`, the result of seconds() in a checkpoint. saved_at: the Unix time since which time was
        lost, or None.

        compile_seconds() returns how many seconds this process has spent compiling so far.
        """
        self._seconds = dict(seconds or {})
        if saved_at:
            self._seconds["lost"] = self._seconds.get("lost", 0.0) + max(time.time() - saved_at, 0.0)
        self._name = "other"
        self._since = time.monotonic()
        self._compile_seconds = compile_seconds
        self._compiled = compile_seconds()

    @contextmanager
    def span(self, name):
        """Counts the time inside the block for `name`."""
        # Spans may lie in each other: the time inside counts for the inner one only, and the outer one goes on after
        # it.
        outer = self._name
        self._switch(name)
        try:
            yield
        finally:
            self._switch(outer)

    def seconds(self):
        """Returns {name: seconds} up to now."""
        # Closes the open span and begins it again, so that its time up to now counts.
        self._switch(self._name)
        return dict(self._seconds)

    def fraction(self, useful="train"):
        """Returns the fraction of the time that went into `useful`, 0 to 1."""
        seconds = self.seconds()
        return seconds.get(useful, 0.0) / max(sum(seconds.values()), 1e-9)

    def _switch(self, name):
        now = time.monotonic()
        compiled = self._compile_seconds()
        # XLA counts the seconds that it compiles for the whole process. What was added since the last switch is taken
        # from the span that is open; never more than the span is long, because ranks that are threads may compile
        # beside it.
        compiling = min(compiled - self._compiled, now - self._since)
        self._seconds[self._name] = self._seconds.get(self._name, 0.0) + now - self._since - compiling
        if compiling:
            self._seconds["compile"] = self._seconds.get("compile", 0.0) + compiling
        self._name = name
        self._since = now
        self._compiled = compiled
