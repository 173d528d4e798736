"""A run's metrics.jsonl, read again: by scripts/report.py and scripts/tpu_advice.py.

    run = read_run("d16")         # a run's name, its directory, or the file
    run.series("loss")            # (steps, values) of the records that have it
    run.tokens(steps)             # tokens seen by these steps, and
    run.elapsed_s(steps)          # the wall time since the first record
    run.interruptions()           # the first record of each process but the first
"""
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nanochat.common import BadInput, get_base_dir
from nanochat.record.metrics import METRICS_FILE

SECONDS = "seconds_"  # fields that say where the time went: seconds_train, seconds_compile, …


@dataclass(frozen=True)
class Run:
    name: str
    directory: Path
    records: list  # as the lines have them, in their order

    def series(self, name):
        """Arrays of the steps and the values of all records that have a number under `name`."""
        found = [(record["step"], record[name]) for record in self.records if record.get(name) is not None]
        steps, values = zip(*found, strict=True) if found else ((), ())
        return np.array(steps, dtype=np.int64), np.array(values, dtype=np.float64)

    def last(self, name):
        """The newest value of `name`, None if there is none."""
        values = self.series(name)[1]
        return values[-1] if len(values) else None

    def median(self, name):
        """Half of the log's lines since the newest start have less; None if none has it. The first line compiles."""
        interruptions = self.interruptions()
        start = interruptions[-1]["step"] if interruptions else self.records[0]["step"]
        steps, values = self.series(name)
        values = values[steps >= start]
        return float(np.median(values[1:] if len(values) > 1 else values)) if len(values) else None

    def tokens(self, steps):
        """Tokens seen by these steps, also by those whose record does not say."""
        known_steps, tokens = self.series("tokens")
        return np.interp(steps, [0, *known_steps], [0, *tokens])

    def elapsed_s(self, steps):
        """Wall time of these steps, s since the first record: losses between two lines of the log are written late."""
        times = {}
        for record in self.records:
            if "tokens" in record or "val_bpb" in record:
                times.setdefault(record["step"], record["time"] - self.records[0]["time"])
        return np.interp(steps, list(times), list(times.values())) if times else np.zeros(len(steps))

    def interruptions(self):
        """The first record of each process that went on with the run: there the time spent compiling begins anew."""
        found, before = [], {}
        for record in self.records:
            for name, is_new in (("interruptions", lambda now, then: now > then),
                                 ("compile_s", lambda now, then: now < then)):
                if name in record and is_new(record[name], before.get(name, record[name])):
                    found.append(record)
                    before = {}
                    break
            before |= {name: record[name] for name in ("interruptions", "compile_s") if name in record}
        return found

    def seconds(self):
        """{kind: seconds} of where the time went, by the newest record; {} if it does not say."""
        newest = next((record for record in reversed(self.records) if SECONDS + "train" in record), {})
        return {name.removeprefix(SECONDS): value for name, value in newest.items() if name.startswith(SECONDS)}


def read_run(name):
    """The Run of a name under $NANOCHAT_BASE_DIR/checkpoints, of a directory or of a file. Raises BadInput."""
    path = Path(name)
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
            continue  # what a crash left of a line
    records = [record for record in records if isinstance(record, dict) and {"step", "time"} <= record.keys()]
    if not records:
        raise BadInput(f"{path} has no records yet: wait for the first line of the log")
    return Run(path.resolve().parent.name, path.resolve().parent, records)
