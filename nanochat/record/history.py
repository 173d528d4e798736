"""Reads a run's metrics.jsonl:

    run = read_run("d16")
    steps, losses = run.series("loss")
    tokens = run.work(steps)
"""
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nanochat.common import BadInput, expand_path, get_base_dir
from nanochat.record.metrics import METRICS_FILE, parse_record

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
        or None if no record has it."""
        start = self.records[0]["step"]
        for record in self.interruptions():
            start = record["step"]
        for step, _ in self.lengths():
            start = max(start, step)
        steps, values = self.series(name)
        values = values[steps >= start]
        if not len(values):
            return None
        # The steps of the first record include compiling, or shorter rows.
        if len(values) > 1:
            values = values[1:]
        return float(np.median(values))

    def lengths(self):
        """Returns [(step, positions per row)]: the first record of each length; [] for rows of one length."""
        found = []
        for step, length in zip(*self.series("seq_len"), strict=True):
            if not found or length != found[-1][1]:
                found.append((int(step), int(length)))
        return found

    @property
    def unit(self):
        """The unit in which the run's task counts its work, such as "tokens"."""
        for record in self.records:
            for name in record:
                if name.endswith("_per_s"):
                    return name.removesuffix("_per_s")
        return "tokens"

    # Records are sparse and of several kinds: a loss at every step, the task's count at every console line, validation
    # at some steps. So a quantity at a step is read off a straight line between the records that have it.
    def work(self, steps):
        """Returns the tokens (or other units) seen until each of these steps, interpolated between records."""
        known_steps, known = self.series(self.unit)
        return np.interp(steps, [0, *known_steps], [0, *known])

    def wall_s(self):
        """Returns the seconds that the run counted: those of its processes, which do not follow the clock, and those
        that it lost between them. Where it recorded none: the time from the first record to the newest."""
        return sum(self.seconds().values()) or max(0.0, self.records[-1]["time"] - self.records[0]["time"])

    def interruptions(self):
        """Returns the first record of each process except the first."""
        # There `interruptions` grows, or `compile_s`, the seconds that one process has spent compiling, shrinks. Both
        # count: a run that was told to stop resumes without an interruption, and a process may compile nothing.
        found = []
        interruptions = None  # the last value of the same process
        compile_s = None
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
        for record in reversed(self.records):
            if SECONDS + "train" in record:
                return {name.removeprefix(SECONDS): value for name, value in record.items() if name.startswith(SECONDS)}
        return {}


def read_run(name):
    """Returns the History of a run. name: of its folder under $NANOCHAT_BASE_DIR/checkpoints, or the path of its folder
    or metrics.jsonl. Raises BadInput if there is no such file or it has no records."""
    path = expand_path(name)
    if not path.exists():
        path = get_base_dir() / "checkpoints" / name
    if path.is_dir():
        path /= METRICS_FILE
    if not path.is_file():
        raise BadInput(f"no run {name}: {path} is not there; give a run's name, its directory, or its {METRICS_FILE}")
    records = list(filter(None, map(parse_record, path.read_text(errors="replace").splitlines())))
    if not records:
        raise BadInput(f"{path} has no records yet: wait for the first line of the log")
    return History(path.resolve().parent.name, path.resolve().parent, records)
