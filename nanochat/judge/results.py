"""The file of an evaluation's results, which grows by a record at a time."""
import hashlib
import json
import os
from contextlib import contextmanager

from nanochat.common import BadInput, get_base_dir, locked, require_writable_dir, written_whole

FIELDS = {  # of a record, which scores and pages read
    "name": str, "group": str, "text": str, "status": str | None, "message": str, "sample": int, "exact": bool,
    "similarity": int | float, "bits": int | float, "bytes": int, "bits_without_suffix": int | float, "method": str,
    "budget": int, "tokens": int, "calls": int}
REQUIRED = {"name", "group", "text", "status"}


def results_dir(out_dir, kind, name, settings):
    """Makes and returns the folder of the results: `out_dir`, or one in $NANOCHAT_BASE_DIR/`kind`. Raises BadInput."""
    if out_dir is None:
        digest = hashlib.sha256(repr(settings).encode()).hexdigest()[:8]
        out_dir = get_base_dir() / kind / f"{name}_{digest}"
    return require_writable_dir(out_dir)


@contextmanager
def open_results(path, settings):
    """Yields the Results in the file `path`. Raises BadInput if another process writes to its folder."""
    refusal = f"another evaluation is writing to {path.parent}: wait for it, or choose another --out_dir"
    with locked(path.parent / ".lock", refusal), Results(path, settings) as results:
        yield results


# The file is JSON lines: the settings, then a record for each sample. The settings alone determine its lines and their
# order, so a killed evaluation continues after the last whole line.
class Results:
    """The records of an evaluation, in a file. A context manager."""

    def __init__(self, path, settings):
        """Opens the file `path`, or makes it. Raises BadInput if it holds the results of other settings."""
        if not path.exists():
            with written_whole(path) as unfinished:
                unfinished.write_text(json.dumps(settings) + "\n")
        found, self.records, length = read_results(path)
        if found != settings:
            raise BadInput(f"{path} holds results of another evaluation ({difference(found, settings)}): choose "
                           "another --out_dir")
        # Each line is flushed, so a kill cuts the last one at most. It is written again.
        os.truncate(path, length)
        self._file = open(path, "a", encoding="utf-8")

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._file.close()

    def add(self, record):
        self.records.append(record)
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()


def read_results(path):
    """Returns (settings, records, length in bytes) of a file of results up to its last whole line. Raises BadInput."""
    try:
        data = path.read_bytes()
        data = data[:data.rfind(b"\n") + 1]
        lines = [json.loads(line) for line in data.splitlines()]
        if not all(isinstance(line, dict) for line in lines) or not lines or "format" not in lines[0]:
            raise ValueError("it has no settings in its first line")
        for number, record in enumerate(lines[1:], 2):
            if not REQUIRED <= record.keys():
                raise ValueError(f"line {number} is no sample with its verdict")
            for key in record.keys() & FIELDS.keys():
                if not isinstance(record[key], FIELDS[key]):
                    raise ValueError(f"line {number} has {key} = {json.dumps(record[key])[:40]}")
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(f"{path} is not a file of results of code_eval ({error}): name another") from None
    return lines[0], lines[1:], len(data)


def records_of(path, checkpoint, weights):
    """Returns the records of a file of results. Raises BadInput if other weights of the checkpoint made them."""
    settings, records, _ = read_results(path)
    if settings["weights"] != weights:
        raise BadInput(f"checkpoint {checkpoint} was replaced meanwhile: start again, with another --out_dir")
    return records


def difference(settings, others):
    """Returns in words the first setting that differs."""
    for key in {**settings, **others}:
        if settings.get(key) != others.get(key):
            return f"{key} is {settings.get(key)} there and {others.get(key)} here"
    return "the order of the settings"
