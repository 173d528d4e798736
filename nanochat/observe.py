"""What the training loop sees of its own programs: where the host's time goes, and what makes them compile again.

Nothing here waits for the device.
"""
import time
from contextlib import contextmanager

from nanochat.common import compilations, compile_seconds, device_memory, xla_program

WARM_UP_STEPS = 2  # of a process; every program of a step should have been compiled by then


class Observer:
    """Watches one rank's training steps, and says what it saw since the last line of the log."""

    def __init__(self, dist):
        self.dist = dist
        self._steps = 0  # of this process
        self._first_inputs = {}  # program -> {input: its type and shape}, when it first ran
        self.begin_window()

    def begin_window(self):
        self._data_wait_s = self._host_s = 0.0
        self._recompiled = []

    def begin_step(self):
        self._steps += 1

    @contextmanager
    def data_wait(self):
        """Around what waits for data."""
        begun = time.monotonic()
        yield
        self._data_wait_s += time.monotonic() - begun

    @contextmanager
    def program(self, name, collective=False, **inputs):
        """xla_program, watched. `inputs`: tensors whose shapes are named if this is compiled again."""
        with xla_program(self.dist, name, collective) as run:
            yield
        self._host_s += run.host_s
        if name not in self._first_inputs:
            self._first_inputs[name] = describe(inputs)
        elif run.is_compiled and self._steps > WARM_UP_STEPS:
            self._recompiled.append(f"{name}: {difference(describe(inputs), self._first_inputs[name])}")

    def record(self, window_s):
        """{name: value} for the log, of a window that took `window_s` seconds."""
        record = {"data_wait": self._data_wait_s / window_s, "compilations": compilations(),
                  "compile_s": compile_seconds(), **device_memory(self.dist)}
        if self.dist.is_xla:
            record["host_dispatch"] = self._host_s / window_s
        if self._recompiled:
            record["recompiled"] = self._recompiled
        return record


def describe(inputs):
    """{name: "int32 (8, 1025)"} of {name: tensor}."""
    return {name: f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
            for name, tensor in inputs.items()}


def difference(now, first):
    """The inputs that are not what they were the first time, in words."""
    changed = [f"{name} is {shape} and was {first[name]}" for name, shape in now.items() if shape != first[name]]
    return ", ".join(changed) or "its inputs are as before, so a number or a branch inside it has changed"
