"""Measures the host's time in training, and finds the inputs that make a program compile again.

Nothing here waits for the device, except the end of a trace.
"""
import re
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

from nanochat.common import BadInput, say
from nanochat.device.programs import compilations, compile_seconds, device_memory, device_trace, one_program


class Observer:
    """Watches one rank's training steps in windows; a window is the steps between two console lines."""

    def __init__(self, dist):
        self.dist = dist
        self._warned = False
        self._first_inputs = {}  # program -> {input: its type and shape}, when it first ran
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
    def program(self, name, collective=False, **inputs):
        """Makes the block an XLA program, as one_program does, and reports its recompilations. inputs: its tensors."""
        with one_program(self.dist, name, collective) as run:
            yield
        self._host_s += run.host_s
        # The first run of a program must compile it. A later compilation is lost time, and is reported with the inputs
        # that changed.
        if name not in self._first_inputs:
            self._first_inputs[name] = describe(inputs)
        elif run.is_compiled:
            self._recompiled.append(f"{name}: {difference(describe(inputs), self._first_inputs[name])}")

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


def host_memory(path="/proc/meminfo"):
    """Returns the bytes of the host's memory that all its processes use, and its size, as {metric: bytes}."""
    found = {}
    for line in Path(path).read_text().splitlines():
        name, value, *_ = line.split()
        found[name] = 1024 * int(value)
    return {"host_memory_bytes": found["MemTotal:"] - found["MemAvailable:"],
            "host_memory_limit_bytes": found["MemTotal:"]}


def describe(inputs):
    """Returns {name: "int32 (8, 1025)"} of {name: tensor}."""
    found = {}
    for name, tensor in inputs.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        found[name] = f"{dtype} {tuple(tensor.shape)}"
    return found


def difference(now, first):
    """Returns a text with the inputs whose type or shape has changed since the first run of a program."""
    changed = []
    for name, shape in now.items():
        if shape != first[name]:
            changed.append(f"{name} is {shape} and was {first[name]}")
    return ", ".join(changed) or "its inputs are as before, so a number or a branch inside it has changed"


class Profile:
    """Traces --profile_steps on rank 0. A run that resumes in the middle of them traces the rest."""

    def __init__(self, steps, folder, dist):
        """steps: (begin, end) from parse_profile_steps; folder: of the trace."""
        self._begin, self._end = steps if dist.rank == 0 else (0, 0)
        self._folder = folder
        self._dist = dist
        self._trace = None

    def before_step(self, step):
        """Begins the trace if it is due. step: the number of steps completed."""
        if self._begin <= step < self._end and self._trace is None:
            self._trace = ExitStack()
            self._trace.enter_context(device_trace(self._dist, self._folder))

    def after_step(self, step):
        """Ends the trace if it is due. step: the number of steps completed, this one included."""
        if step >= self._end:
            self.close()

    def close(self):
        """Ends the trace, if there is one, and writes its files."""
        if self._trace:
            self._trace.close()
            self._trace = None
            say(f"wrote a trace: tensorboard --logdir={self._folder}")


def parse_profile_steps(text, num_iterations):
    """Returns (10, 13) for "10:13", the steps after the 10th up to the 13th, and (0, 0) for "". Raises BadInput for
    other texts, and if the run has fewer steps."""
    if not text:
        return 0, 0
    match = re.fullmatch(r"([0-9]{1,10}):([0-9]{1,10})", text)
    if match and int(match[1]) < int(match[2]) <= num_iterations:
        return int(match[1]), int(match[2])
    raise BadInput(f"--profile_steps={text} is not BEGIN:END with BEGIN < END, END at most the run's {num_iterations} "
                   "steps: give for example 10:13")
