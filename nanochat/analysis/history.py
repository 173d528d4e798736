"""Reads a run's metrics.jsonl:

    run = read_run("d16")
    steps, losses = run.series("loss")
    tokens, seconds = run.work(steps), run.elapsed_s(steps)
"""
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nanochat.common import BadInput, expand_path, get_base_dir
from nanochat.record.metrics import METRICS_FILE

SECONDS = "seconds_"  # the prefix of seconds_train, seconds_compile, …


@dataclass(frozen=True)
class History:
    name: str
    directory: Path
    records: list  # the file's JSON objects in their order

    def series(self, name):
        """Returns two arrays: the steps and the values of `name`, of all records that have it."""
        records = [record for record in self.records if record.get(name) is not None]
        steps = [record["step"] for record in records]
        return np.array(steps, dtype=np.int64), np.array([record[name] for record in records], dtype=np.float64)

    def last(self, name):
        """Returns the newest value of `name`, or None if no record has it."""
        values = self.series(name)[1]
        return values[-1] if len(values) else None

    def median(self, name):
        """Returns the median of `name` since the newest process started, and since rows became longer (--seq_len_ramp),
        or None if no record has it.

        The first record of these is left out, because its steps include compiling, or shorter rows.
        """
        interruptions = self.interruptions()
        start = interruptions[-1]["step"] if interruptions else self.records[0]["step"]
        if lengths := self.lengths():
            start = max(start, lengths[-1][0])
        steps, values = self.series(name)
        values = values[steps >= start]
        return float(np.median(values[1:] if len(values) > 1 else values)) if len(values) else None

    def lengths(self):
        """Returns [(step, positions per row)]: the first record of each length; [] for rows of one length."""
        steps, values = self.series("seq_len")
        return [(int(step), int(value)) for i, (step, value) in enumerate(zip(steps, values, strict=True))
                if i == 0 or values[i - 1] != value]

    @property
    def unit(self):
        """The unit in which the run's task counts its work, such as "tokens"."""
        for record in self.records:
            for name in record:
                if name.endswith("_per_s"):
                    return name.removesuffix("_per_s")
        return "tokens"

    def work(self, steps):
        """Returns the tokens (or other units) seen until each of these steps, interpolated where a record lacks
        them."""
        known_steps, known = self.series(self.unit)
        return np.interp(steps, [0, *known_steps], [0, *known])

    def elapsed_s(self, steps):
        """Returns the wall time of each of these steps, in seconds since the first record.

        It is interpolated, because the losses of all steps since the last console line are written at once.
        """
        # A record that has the task's unit, or an evaluation, is written when its step is done; the first such record
        # of a step counts.
        times = {}
        unit = self.unit
        for record in self.records:
            if any(name == unit or name.startswith("val_") for name in record):
                times.setdefault(record["step"], record["time"] - self.records[0]["time"])
        return np.interp(steps, list(times), list(times.values())) if times else np.zeros(len(steps))

    def wall_s(self):
        """Returns the seconds from the first record to the newest, the time between two VMs among them."""
        return self.records[-1]["time"] - self.records[0]["time"]

    def interruptions(self):
        """Returns the first record of each process but the first.

        There `interruptions` grows or `compile_s`, the seconds that one process has spent compiling, shrinks.
        """
        found = []
        # Both are needed. A run that was told to stop goes on without a count, so that only the compile time begins
        # anew; and a process that compiles nothing shows in the count alone.
        interruptions = compile_s = None  # of the same process before
        for record in self.records:
            now = record.get("interruptions", interruptions)
            compiled = record.get("compile_s", compile_s)
            has_grown = interruptions is not None and now > interruptions
            has_shrunk = compile_s is not None and compiled < compile_s
            if has_grown or has_shrunk:
                found.append(record)
                now = record.get("interruptions")
                compiled = record.get("compile_s")
            interruptions = now
            compile_s = compiled
        return found

    def seconds(self):
        """Returns the newest {kind: seconds} of Goodput, or {} if no record has them."""
        newest = next((record for record in reversed(self.records) if SECONDS + "train" in record), {})
        return {name.removeprefix(SECONDS): value for name, value in newest.items() if name.startswith(SECONDS)}


def read_run(name):
    """Returns the History of a run. name: under $NANOCHAT_BASE_DIR/checkpoints; or of its directory or metrics.jsonl.

    Raises BadInput if there is no such file or it has no records.
    """
    path = expand_path(name)
    if not path.exists():
        path = get_base_dir() / "checkpoints" / name
    path = path / METRICS_FILE if path.is_dir() else path
    if not path.is_file():
        raise BadInput(f"no run {name}: {path} is not there; give the name of a run, its directory, or its "
                       f"{METRICS_FILE}")
    records = []
    for line in path.read_text(errors="replace").splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            continue  # a crash left an incomplete line
    records = [record for record in records if isinstance(record, dict) and {"step", "time"} <= record.keys()]
    if not records:
        raise BadInput(f"{path} has no records yet: wait for the first line of the log")
    return History(path.resolve().parent.name, path.resolve().parent, records)
