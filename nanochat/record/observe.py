"""Measures the host's time in training, and finds the programs that compile again.

Nothing here waits for the device.
"""
import time
from contextlib import contextmanager
from pathlib import Path

from nanochat.common import say
from nanochat.device.programs import compilations, compile_seconds, device_memory, one_program


class Observer:
    """Watches one rank's training steps in windows; a window is the steps between two console lines."""

    def __init__(self, dist):
        self.dist = dist
        self._warned = False
        self._have_run = set()  # names of programs
        self.begin_window()

    def begin_window(self):
        """Clears the measurements of the last window."""
        self._data_wait_s = 0.0
        self._host_s = 0.0
        self._recompiled = []

    @contextmanager
    def data_wait(self):
        """Counts the time inside the block as waiting for data."""
        begun = time.monotonic()
        yield
        self._data_wait_s += time.monotonic() - begun

    @contextmanager
    def program(self, name, collective=False):
        """Makes the block an XLA program, as one_program does, and reports its recompilations."""
        with one_program(self.dist, name, collective) as run:
            yield
        self._host_s += run.host_s
        # The first run of a program must compile it. A later compilation is lost time.
        if name in self._have_run and run.is_compiled:
            self._recompiled.append(name)
        self._have_run.add(name)

    def record(self, window_s):
        """Returns the metrics of a window of `window_s` seconds.

        data_wait, host_dispatch: the fractions that the host spent waiting for data, and tracing and dispatching
        programs. compilations, compile_s: of this process so far. host_memory_…: of all processes of the host.
        recompiled: see metrics.py.
        """
        record = {"data_wait": self._data_wait_s / window_s, "compilations": compilations(),
                  "compile_s": compile_seconds(), **device_memory(self.dist), **host_memory()}
        self._warn_of(record)
        if self.dist.is_xla:
            record["host_dispatch"] = self._host_s / window_s
        if self._recompiled:
            record["recompiled"] = self._recompiled
        return record

    def _warn_of(self, record):
        """Warns once, before Linux kills a rank for want of memory."""
        used, total = record["host_memory_bytes"], record["host_memory_limit_bytes"]
        if used > 0.93 * total and not self._warned and self.dist.rank == 0:
            self._warned = True
            say(f"warning: {used / 2**30:.1f} of this machine's {total / 2**30:.1f} GiB of memory are used, and Linux "
                "kills a process if none is left: end other programs, or give a smaller --device_batch_size")


def host_memory():
    """Returns the bytes of the host's memory that all its processes use, and its size, as {metric: bytes}."""
    found = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, value, *_ = line.split()
        found[name] = 1024 * int(value)
    return {"host_memory_bytes": found["MemTotal:"] - found["MemAvailable:"],
            "host_memory_limit_bytes": found["MemTotal:"]}
