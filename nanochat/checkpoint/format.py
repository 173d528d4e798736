"""A run's checkpoints on disk: which exist, whether they are whole, what meta.json says, and which are deleted.

    <base dir>/checkpoints/<run>/step_000100/
        model.safetensors      the weights by name; those of large models are in pieces, see pieces.py
        optimizer.safetensors  the optimizer's state by name, in pieces as well
        lanes.json             the position of each lane in the data, with its buffered documents
        meta.json              everything small, see Meta
        SHA256SUMS             the checksums of these files; `sha256sum -c SHA256SUMS` checks them, too

step_000100.tmp is being written or deleted. step_000100.aside is damaged or superseded: no run resumes from it, and it
is deleted once a new checkpoint of its step or a later one is in place.
"""
import base64
import errno
import hashlib
import json
import math
import os
import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from shlex import quote

import torch

from nanochat.common import BadInput, expand_path, get_base_dir

MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
LANES, META, SUMS = "lanes.json", "meta.json", "SHA256SUMS"
FORMAT = 1  # of a checkpoint. Whoever adds a field to Meta, or changes the meaning of one, raises it
MAX_THREADS = 16  # that read files to compute their checksums


# Finding


def final_dir(run_dir, step):
    """Returns the path of the finished checkpoint of `step`."""
    return Path(run_dir) / f"step_{step:06d}"


def partial_dir(run_dir, step):
    """Returns the path at which the checkpoint of `step` is written before it is finished."""
    return Path(run_dir) / f"step_{step:06d}.tmp"


def step_of(path):
    """Returns the step of a checkpoint's path or name."""
    return int(re.match(r"step_(\d+)", Path(path).name)[1])


def list_checkpoints(run_dir):
    """Returns the paths of a run's finished checkpoints, oldest first."""
    paths = [path for path in Path(run_dir).glob("step_*") if re.fullmatch(r"step_\d+", path.name)]
    return sorted(paths, key=step_of)


def latest(run_dir):
    """Returns the path of a run's newest checkpoint, or None."""
    paths = list_checkpoints(run_dir)
    return paths[-1] if paths else None


def find_checkpoint(name=""):
    """Returns the path of the checkpoint that `name` stands for. Raises BadInput if there is none.

    name: the path of a checkpoint, the path or name of a run (its newest checkpoint), RUN/step_000100, or "" (the
        newest checkpoint of all runs).
    """
    checkpoints_dir = get_base_dir() / "checkpoints"
    if not name:
        newest = [path for path in map(latest, checkpoints_dir.glob("*")) if path]
        if not newest:
            raise BadInput(f"there is no checkpoint in {checkpoints_dir}: train one with python3 -m scripts.base_train")
        return max(newest, key=lambda path: path.stat().st_mtime)
    for path in (expand_path(name), checkpoints_dir / name):
        if (path / META).is_file():
            return path
        if latest(path):
            return latest(path)
    raise BadInput(f"no checkpoint at {name}: give a run in {checkpoints_dir}, or the path of a step_… directory")


def latest_good(run_dir):
    """Returns the path of a run's newest undamaged checkpoint, or None. Sets damaged ones aside, each with a
    warning."""
    for path in reversed(list_checkpoints(run_dir)):
        problem = find_problem(path)
        if problem is None:
            return path
        print(f"warning: checkpoint {path} is damaged ({problem}): it is set aside", flush=True)
        set_aside(path)
    return None


# meta.json


@dataclass(frozen=True)
class Meta:
    step: int  # optimizer steps completed
    config: dict  # the fields of the model's config, a GPTConfig for language
    tokenizer_sha256: str
    data_fingerprint: str
    flags: dict  # of the script that trains, {name: value}; {} of a model that was trained elsewhere
    rng: str  # see rng_state; "" of a model that was trained elsewhere
    wandb_id: str | None = None
    time: float | None = None  # Unix time of the save, s
    batch_schedule: tuple = ()  # ((step, tokens), …) as in Plan
    interruptions: int = 0  # how often the run was resumed
    nonfinite_steps: dict = field(default_factory=dict)  # {"total": …, "in_a_row": …}
    seconds: dict = field(default_factory=dict)  # {name: seconds}, see Goodput
    task: str = "language"
    mesh: dict = field(default_factory=dict)  # {axis: chips} on which it was trained; a resumed run may use another
    is_pause: bool = False  # the run finished or was told to stop here: the time until it resumes is not lost

    def to_json(self):
        """Returns the JSON object that from_json reads."""
        return {"format": FORMAT} | asdict(self)

    @classmethod
    def from_json(cls, found):
        """Returns the Meta of a JSON object. Raises TypeError if a field is missing, unknown or has a value that no run
        writes."""
        meta = cls(**{name: _with_tuples(value) for name, value in found.items() if name != "format"})
        name = _find_wrong_field(meta)
        if name:
            raise TypeError(f"{name} is {json.dumps(getattr(meta, name))[:40]}")
        return meta


def _with_tuples(value):
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value


# A matching checksum says that the file has not changed since it was written, and not that a run wrote it. Without
# these checks a wrong value would be a traceback in every rank.
def _find_wrong_field(meta):
    """Returns the name of a field of a Meta with a value that no run writes, or None."""
    for each in fields(meta):
        if not isinstance(getattr(meta, each.name), each.type):
            return each.name
    is_right = {
        "step": meta.step >= 0,
        "rng": _is_rng_state(meta.rng) or not meta.flags,
        "time": meta.time is None or math.isfinite(meta.time),
        "batch_schedule": _is_schedule(meta.batch_schedule),
        "nonfinite_steps": meta.nonfinite_steps.keys() <= {"total", "in_a_row"} and _are_numbers(meta.nonfinite_steps),
        "seconds": _are_numbers(meta.seconds),
    }
    for name in is_right:
        if not is_right[name]:
            return name
    return None


def _is_rng_state(text):
    try:
        torch.Generator().set_state(_rng_tensor(text))
    except (ValueError, RuntimeError):
        return False
    return True


def _is_schedule(entries):
    """Returns whether the entries are pairs of whole numbers, (step, tokens), with steps that rise from 0."""
    if not all(isinstance(entry, tuple) and [type(number) for number in entry] == [int, int] for entry in entries):
        return False
    steps = [step for step, _ in entries]
    return steps == sorted(set(steps)) and steps[:1] in ([], [0]) and all(tokens > 0 for _, tokens in entries)


def _are_numbers(values):
    return all(type(value) in (int, float) and math.isfinite(value) for value in values.values())


def load_meta(path):
    """Returns the Meta of the checkpoint at `path`. Raises BadInput if it cannot be read or has another format."""
    try:
        found = json.loads((Path(path) / META).read_text())
        if found.get("format") != FORMAT:
            raise BadInput(f"checkpoint {path} has format {found.get('format', 'none')} and this program reads format "
                           f"{FORMAT}: use another checkpoint or --run, or the version of nanochat that wrote it")
        return Meta.from_json(found)
    except (OSError, ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise BadInput(f"{path} is not a checkpoint ({META}: {error}): give a step_… directory") from None


def read_config(path, meta, config_class):
    """Returns the config of the model in the checkpoint at `path`, a `config_class`, which is a data class. Raises
    BadInput if a field is missing or unknown, or has an impossible value."""
    def refuse(problem):
        return BadInput(f"{path} cannot be used: the model's config in its {META} {problem}: use another checkpoint")

    types = {each.name: each.type for each in fields(config_class)}
    for name in [*types, *meta.config]:
        if name not in meta.config:
            raise refuse(f"has no {name}")
        if name not in types:
            raise refuse(f"has {name}, which this program does not know")
        value = meta.config[name]
        is_right = type(value) is types[name] or type(value) is int and types[name] is float
        if not is_right or types[name] is int and value < 0:
            raise refuse(f"has {name} = {json.dumps(value)[:40]}")
    try:
        return config_class(**meta.config)
    except (BadInput, ArithmeticError) as error:
        raise refuse(f"makes no model ({error})") from None


def require_same(path, values):
    """Raises BadInput if the checkpoint at `path` and the run differ in one of `values`, {what: (saved, now)}."""
    for what, (saved, now) in values.items():
        if saved != now:
            raise BadInput(f"{path} does not fit this run: {what} is {_shown(saved)} there and {_shown(now)} here: "
                           "resume with the flags it was trained with, or choose another --run")


def _shown(value):
    return quote(str(value)[:40])


def rng_state():
    """Returns the state of torch's default CPU generator as a string."""
    return base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode()


def restore_rng(state):
    """Sets torch's default CPU generator to a state that rng_state returned."""
    torch.set_rng_state(_rng_tensor(state))


def _rng_tensor(state):
    return torch.frombuffer(bytearray(base64.b64decode(state)), dtype=torch.uint8)


# Whether the files are whole


def index_of(kind):
    """Returns the name of the file that says which piece holds a tensor. kind: MODEL or OPTIMIZER."""
    return f"{kind}.index.json"


def tensor_files(path, kind):
    """Returns the names of the files with the tensors of `kind`, MODEL or OPTIMIZER, in the checkpoint at `path`: one
    file, or an index and its pieces. Raises OSError, also if the index is damaged."""
    index = Path(path) / index_of(kind)
    if not index.exists():
        return [kind]
    try:
        pieces = set(json.loads(index.read_text())["weight_map"].values())
        return [index.name, *sorted(pieces)]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise OSError(errno.EINVAL, "it is no index of pieces", str(index)) from None


def read_sums(path):
    """Returns {file name: checksum} of the checkpoint at `path`. Raises OSError."""
    sums = {}
    for line in (Path(path) / SUMS).read_text(errors="replace").splitlines():
        digest, _, name = line.partition("  ")
        sums[name] = digest
    return sums


def find_problem(path, weights_only=False):
    """Returns what is wrong with a checkpoint's files, in a few words, or None. Reads them whole. weights_only: checks
    the weights and meta.json alone."""
    path = Path(path)
    kinds = [MODEL] if weights_only else [MODEL, OPTIMIZER]
    others = [META] if weights_only else [LANES, META]
    try:
        expected = read_sums(path)
        # The indexes come first: a damaged one names files that do not exist.
        indexes = [index_of(kind) for kind in kinds if (path / index_of(kind)).exists()]
        problem = _find_difference(path, indexes, expected)
        if problem:
            return problem
        files = [name for kind in kinds for name in tensor_files(path, kind)]
        return _find_difference(path, files + others, expected)
    except OSError as error:
        return f"{Path(error.filename).name}: {error.strerror}" if error.filename else str(error)


def _find_difference(path, names, expected):
    for file, digest in sha256_of_files([path / name for name in names]).items():
        if expected.get(file.name) != digest:
            return f"{file.name} does not match its checksum"
    return None


def sha256_of_files(paths):
    """Returns {path: hex digest}. Hashing releases the GIL, so the files are read concurrently."""
    with ThreadPoolExecutor(MAX_THREADS) as pool:
        return dict(zip(paths, pool.map(_sha256, paths), strict=True))


def _sha256(path):
    digest = hashlib.sha256()
    buffer = bytearray(2**22)
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
    return digest.hexdigest()


def sums_text(paths):
    """Returns the content of SUMS for these files, as sha256sum prints it."""
    return "".join(f"{digest}  {path.name}\n" for path, digest in sha256_of_files(paths).items())


# Setting aside and deleting


@dataclass(frozen=True)
class Kept:
    """Which checkpoints stay when there is a new one."""
    newest: int = sys.maxsize  # this many of the newest, at least one
    every: int = -1  # and those whose step is a multiple of this; -1: none

    def outdated(self, paths):
        """Returns the paths or names of checkpoints that may go. paths: oldest first."""
        return [path for path in paths[:-max(self.newest, 1)] if not self.is_for_ever(path)]

    def is_for_ever(self, path):
        """Returns whether the checkpoint is never deleted."""
        return self.every > 0 and step_of(path) % self.every == 0


def set_aside(path):
    """Renames a checkpoint to step_….aside, so that no run resumes from it."""
    aside = Path(path).with_suffix(".aside")
    shutil.rmtree(aside, ignore_errors=True)
    Path(path).rename(aside)


def set_aside_after(run_dir, step):
    """Sets aside all checkpoints after `step`, for a run that returns to an earlier one or (-1) starts over."""
    for path in list_checkpoints(run_dir):
        if step_of(path) > step:
            set_aside(path)


def clean_partial(run_dir):
    """Deletes what interrupted saves left. Call it only while no rank is saving."""
    for path in Path(run_dir).glob("step_*.tmp"):
        shutil.rmtree(path)


def prune(run_dir, step, kept):
    """Deletes what the new checkpoint of `step` makes superfluous. kept: a Kept."""
    for path in Path(run_dir).glob("step_*.tmp"):  # saves that a full disk ended
        if step_of(path) <= step:
            shutil.rmtree(path, ignore_errors=True)
    aside = [path for path in Path(run_dir).glob("step_*.aside") if step_of(path) <= step]
    for path in aside + kept.outdated(list_checkpoints(run_dir)):
        delete(path)


def delete(path):
    """Deletes a checkpoint."""
    # Its files go one by one, and a kill may come in between. So the directory first loses its final name.
    doomed = path.with_suffix(".tmp")
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed)


# The disk


def check_disk_space(run_dir, checkpoint_bytes, copies=2):
    """Raises BadInput unless the disk has room for so many checkpoints, those that the run already has included.

    A run needs two: the new one must be in place before the last old one is deleted.
    """
    own = sum(file.stat().st_size for file in Path(run_dir).glob("step_*/*"))
    free = shutil.disk_usage(run_dir).free
    if own + free < copies * checkpoint_bytes:
        what = "two checkpoints take" if copies == 2 else "a checkpoint takes"
        raise BadInput(f"too little disk in {run_dir}: {what} {copies * checkpoint_bytes / 1e9:.2f} GB and "
                       f"{(own + free) / 1e9:.2f} GB are free: free some, or set NANOCHAT_BASE_DIR to a larger disk")


def sync_to_disk(path):
    """Returns once the file's contents, or the directory's names, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
