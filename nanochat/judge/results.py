"""The file of an evaluation's results."""
import hashlib
import json

from nanochat.common import BadInput, get_base_dir, require_writable_dir, written_whole

REQUIRED = {"name", "group", "text", "status"}


def results_dir(out_dir, kind, name, settings):
    """Makes and returns the folder of the results: `out_dir`, or one in $NANOCHAT_BASE_DIR/`kind`. Raises BadInput."""
    if out_dir is None:
        digest = hashlib.sha256(repr(settings).encode()).hexdigest()[:8]
        out_dir = get_base_dir() / kind / f"{name}_{digest}"
    return require_writable_dir(out_dir)


def results_file(out_dir, name, settings):
    """Returns the path of a file of results in `out_dir`. Raises BadInput if it holds those of other settings."""
    path = out_dir / name
    if path.exists():
        found, _ = read_results(path)
        if found != settings:
            raise BadInput(f"{path} holds results of another evaluation ({difference(found, settings)}): choose "
                           "another --out_dir")
    return path


def write_results(path, settings, records):
    """Writes JSON lines: the settings, then a record for each sample."""
    with written_whole(path) as unfinished:
        unfinished.write_text("".join(f"{json.dumps(line)}\n" for line in [settings, *records]))


def read_results(path):
    """Returns (settings, records) of a file of results. Raises BadInput."""
    try:
        lines = [json.loads(line) for line in path.read_bytes().splitlines()]
        if not all(isinstance(line, dict) for line in lines) or not lines or "format" not in lines[0]:
            raise ValueError("it has no settings in its first line")
        for number, record in enumerate(lines[1:], 2):
            if not REQUIRED <= record.keys():
                raise ValueError(f"line {number} is no sample with its verdict")
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(f"{path} is not a file of results of code_eval ({error}): name another") from None
    return lines[0], lines[1:]


def difference(settings, others):
    """Returns in words the first setting that differs."""
    for key in {**settings, **others}:
        if settings.get(key) != others.get(key):
            return f"{key} is {settings.get(key)} there and {others.get(key)} here"
    return "the order of the settings"
