"""The checkpoint from which a run goes on, its own or another's: base_train --init_from."""
import hashlib
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

from nanochat.checkpoint import on_disk
from nanochat.checkpoint.meta import Meta, load_meta, read_language_config, require_same
from nanochat.checkpoint.pieces import load_tensors
from nanochat.common import SOURCE, BadInput
from nanochat.data.tokenizer import load_tokenizer
from nanochat.model.models import is_given, require_as_saved
from nanochat.train.flags import StartFlags, require_not_gone
from nanochat.train.prepare import run_directory

# With another value of one of these, the saved positions in the data would mean other rows.
ROW_FLAGS = ("seq_len_ramp", "fim_rate", "num_lanes")


class StartingPoint(NamedTuple):
    """Another run's checkpoint, with which a run begins."""
    path: Path
    meta: Meta
    name: str  # RUN/step_000100

    @property
    def has_optimizer(self):
        return bool(self.meta.flags)  # an imported model has none

    @property
    def digest(self):
        """The name and the beginning of a hash of the checkpoint's files."""
        return f"{self.name} ({hashlib.sha256(on_disk.read_text(self.path / on_disk.SUMS).encode()).hexdigest()[:12]})"

    def load(self):
        """Returns {name: weight} and the optimizer's {name: tensor}, None if there is none."""
        weights = load_tensors(self.path, on_disk.MODEL)
        if self.has_optimizer:
            return weights, load_tensors(self.path, on_disk.OPTIMIZER)
        return weights, None

    def describe(self):
        """Returns a line for a person, in the format of describe_plan."""
        parts = "weights and optimizer" if self.has_optimizer else "weights"
        return f"      start  {parts} of {self.name}"


def saved_meta(path, task):
    """Returns the Meta of the run's own checkpoint at `path`, from which it resumes; None for None. Raises BadInput if
    a run of the task, a name, cannot resume from it."""
    if path is None:
        return None
    meta = load_meta(path)
    if meta.task != task:
        raise BadInput(f"{path} is of the task {meta.task}, not {task}: choose another --run")
    if not meta.flags:
        raise BadInput(f"{path} was imported and holds only weights, so no run resumes from it: choose another --run, "
                       f"with --init_from={path.parent.name}")
    return meta


def with_start(flags):
    """Returns the Flags with the model and the rates that --init_from gives them. Raises BadInput."""
    if not flags.start.init_from:
        return flags
    directory = run_directory(flags)
    saved = saved_meta(on_disk.latest(directory), "language")
    flags, point = find_beginning(flags, saved, run_tokenizer(flags), directory)
    return flags.replace(init_from=str(point.path)) if point else flags  # run_tokenizer finds a path again, anywhere


def run_tokenizer(flags):
    """Returns the tokenizer of a run: of --tokenizer_dir, else the one that came with the imported weights with which
    it began or begins, else the default. Raises BadInput."""
    checkpoints = on_disk.list_checkpoints(run_directory(flags))
    if not checkpoints and flags.start.init_from:
        with suppress(BadInput):  # find_beginning says what is wrong
            checkpoints = [on_disk.find_checkpoint(flags.start.init_from)]
    of_source = [path for path in checkpoints if (path / SOURCE).exists()]  # a damaged one may lack it
    return load_tokenizer(flags.data.tokenizer_dir, of_source[-1] if of_source else None)


# A run that has a checkpoint of its own does not begin: it goes on as it once began, and the command need not repeat
# how.
def find_beginning(flags, saved, tokenizer, directory):
    """Returns base_train's Flags, with what follows from how the run begins or once began, and the StartingPoint of a
    run that begins with another's checkpoint, else None. Raises BadInput.

    saved: the Meta from which the run resumes, or None; directory: of the run."""
    name = flags.start.init_from
    if saved:
        return as_begun(flags, saved), None
    if not name:
        return flags, None
    what = f"--init_from={name}"
    try:
        path = on_disk.find_checkpoint(name)
    except BadInput as error:
        raise BadInput(f"{what}: {error}") from None
    meta, config = other_model(what, path, directory)
    if is_given(flags.model.max_seq_len):
        config = config.with_rows(flags.model.max_seq_len)
    point = StartingPoint(path, meta, f"{meta.flags.get('run', path.absolute().parent.name)}/step_{meta.step:06d}")
    require_same(path, {"the hash of the tokenizer": (meta.tokenizer_sha256, tokenizer.sha256)})
    require_as_saved(vars(flags.model), config, path, otherwise="")
    problem = on_disk.find_problem(path, weights_only=not point.has_optimizer)
    if problem:
        raise BadInput(f"{what} is damaged ({problem}): use another checkpoint")
    started = StartFlags(point.name, point.has_optimizer, saved_start(meta).earlier_steps, rate_horizon=0)
    return flags.settled(config).replace(**vars(started)), point


def as_begun(flags, meta):
    """Returns the Flags with the start that the run of a checkpoint's Meta had: it is not started again. Raises
    BadInput."""
    require_not_gone(meta.flags, flags.run.run)
    begun = saved_start(meta)
    asked = flags.start.init_from
    if asked and not begun.init_from:
        raise BadInput(f"--run={flags.run.run} has a checkpoint and did not begin with {asked}: choose another --run, "
                       "or leave the flag out")
    return flags.replace(**vars(begun))


def require_same_rows(path, meta, flags, tokenizer, data_fingerprint):
    """Raises BadInput if a run with the Flags reads other rows than the run of the checkpoint at `path`."""
    require_same(path, {"the hash of the tokenizer": (meta.tokenizer_sha256, tokenizer.sha256)})
    if data_fingerprint:  # synthetic data has none
        what = "the hash of --data_dir's mixture" if flags.data.mixture else "the hash of --data_dir"
        require_same(path, {what: (meta.data_fingerprint, data_fingerprint)})
    now = flags.as_dict()
    for name in ROW_FLAGS:
        require_same(path, {f"--{name}": (meta.flags.get(name), now[name])})


def saved_start(meta):
    """Returns the StartFlags of the run of a checkpoint's Meta."""
    return StartFlags(**{each.name: meta.flags[each.name] for each in fields(StartFlags) if each.name in meta.flags})


def other_model(what, path, directory):
    """Returns the Meta and the config of another run's checkpoint. Raises BadInput if it is of the run in
    `directory`, or holds no model of text."""
    meta = load_meta(path)
    if meta.task != "language":
        raise BadInput(f"{what} is of the task {meta.task} and no model of text: give a run of base_train")
    config = read_language_config(path, meta)
    if path.resolve().parent == directory.resolve():
        raise BadInput(f"{what} is a checkpoint of this run: give another run, or choose another --run")
    return meta, config
