"""The checkpoint from which a run goes on, its own or another's: base_train --init_from and --decay_from."""
import hashlib
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

from nanochat.checkpoint import on_disk
from nanochat.checkpoint.meta import Meta, load_meta, read_config, require_same
from nanochat.checkpoint.pieces import load_lane_states, load_tensors
from nanochat.common import BadInput
from nanochat.data.tokenizer import load_tokenizer
from nanochat.model.config import GPTConfig, config_as_flags, require_as_saved
from nanochat.model.rates import OptimConfig, lr_multiplier
from nanochat.train.flags import BatchFlags, DataFlags, DistillationFlags, StartFlags, require_not_gone
from nanochat.train.plan import plan_horizon, plan_rates
from nanochat.train.prepare import run_directory
from nanochat.train.stages import length_schedule

# What a run with --decay_from has in common with the one before it, unless its command says otherwise.
INHERITED = (DataFlags, BatchFlags, OptimConfig, DistillationFlags)
OWN = {"num_iterations"}
# With another value of one of these, the saved positions in the data would mean other rows.
ROW_FLAGS = ("seq_len_ramp", "fim_rate", "fim_context", "num_lanes")


class Start(NamedTuple):
    """Another run's checkpoint, with which a run begins."""
    path: Path
    meta: Meta
    name: str  # RUN/step_000100
    has_optimizer: bool  # the run takes the optimizer's state, too
    is_decay: bool  # the run goes on with steps and, if the data is the same, with its rows

    @property
    def digest(self):
        """The name and the beginning of a hash of the checkpoint's files."""
        return f"{self.name} ({hashlib.sha256(on_disk.read_text(self.path / on_disk.SUMS).encode()).hexdigest()[:12]})"

    def load(self):
        """Returns {name: weight} and the optimizer's {name: tensor}, None if the run does not take it."""
        weights = load_tensors(self.path, on_disk.MODEL)
        if self.has_optimizer:
            return weights, load_tensors(self.path, on_disk.OPTIMIZER)
        return weights, None

    def lane_states(self, data_fingerprint):
        """Returns the positions in the data with which the run begins; None: at its beginning."""
        return load_lane_states(self.path) if self.goes_on(data_fingerprint) else None

    def goes_on(self, data_fingerprint):
        """Returns whether the run continues with the data where the checkpoint was."""
        return self.is_decay and self.meta.data_fingerprint == data_fingerprint

    def describe(self, data_fingerprint):
        """Returns a line for a person, in the format of describe_plan."""
        parts = "weights"
        if self.has_optimizer:
            parts = "weights and optimizer"
        place = "its beginning"
        if self.goes_on(data_fingerprint):
            place = "where it was"
        return f"      start  {parts} of {self.name}, data from {place}"


def saved_meta(flags, directory):
    """Returns the Meta of the checkpoint in a run's directory from which it resumes, or None. Raises BadInput for a
    whole checkpoint that this program cannot read."""
    if flags.run.starts_over or directory is None:
        return None
    for path in reversed(on_disk.list_checkpoints(directory)):
        # Prepare checks all files later, sets damaged checkpoints aside, and takes the one before.
        if on_disk.meta_is_whole(path):
            meta = load_meta(path)
            if meta.task != "language":  # prepare refuses it
                return None
            read_config(path, meta, GPTConfig)
            return meta
    return None


def kept_flags(flags, directory):
    """Returns the flags of the model that are not given and that the checkpoint has, as arguments."""
    meta = saved_meta(flags, directory)
    if meta is None:
        return []
    saved = config_as_flags(meta.config_as(GPTConfig))
    found = []
    for name, value in saved.items():
        if getattr(flags.model, name) is None:
            found.append(f"--{name}={value}")
    return found


def with_start(flags):
    """Returns the Flags with the model and the rates that --init_from or --decay_from gives them. Raises BadInput."""
    if not (flags.start.init_from or flags.start.decay_from):
        return flags
    directory = run_directory(flags)
    tokenizer = load_tokenizer(flags.data.tokenizer_dir)
    return find_start(flags, saved_meta(flags, directory), tokenizer, directory)[0]


# A run begins with nothing; or with the weights of another one (--init_from), and with --init_optimizer its optimizer;
# or as an ending of another one (--decay_from), with its weights, optimizer, steps, place in the data and flags. A run
# that has a checkpoint of its own does not begin: it goes on as it once began, and the command need not repeat how.
def find_start(flags, saved, tokenizer, directory):
    """Returns base_train's Flags with what follows from --init_from and --decay_from, the Start or None, and why the
    run lacks it or None. Raises BadInput. saved: the Meta from which the run resumes, or None; directory: of the
    run."""
    asked = flags.start
    name = asked.init_from or asked.decay_from
    if saved:
        return as_begun(flags, saved), None, None
    if asked.init_from and asked.decay_from:
        raise BadInput(f"--init_from={asked.init_from} and --decay_from={asked.decay_from} exclude each other: leave "
                       "one of them out")
    if asked.init_optimizer and not asked.init_from:
        raise BadInput("--init_optimizer needs --init_from=RUN: give both, or leave it out")
    if not name:
        return flags, None, None
    what = f"--{'init_from' if asked.init_from else 'decay_from'}={name}"
    try:
        path = on_disk.find_checkpoint(name)
    except BadInput as error:
        if flags.record.checkpoint_mirror is None:
            raise
        # The machine may be new, and the mirror may have a checkpoint of this run.
        return flags.replace(**vars(StartFlags())), None, f"{what}: {error}"
    meta, config = other_model(what, path, directory)
    start = Start(path, meta, f"{meta.flags.get('run', path.absolute().parent.name)}/step_{meta.step:06d}",
                  bool(asked.decay_from) or asked.init_optimizer, bool(asked.decay_from))
    _require_start(what, start, flags, config, tokenizer)
    flags = flags.settled(config)
    if start.has_optimizer:
        flags = flags.replace(steps_before=saved_flags(StartFlags, meta.flags).earlier_steps)
    if start.is_decay:
        return _with_decay(what, flags, start, config), start, None
    return flags.replace(init_from=start.name), start, None


def as_begun(flags, meta):
    """Returns the Flags with the start that the run of a checkpoint's Meta had: it is not started again. Raises
    BadInput."""
    require_not_gone(meta.flags, flags.run.run)
    begun = saved_flags(StartFlags, meta.flags)
    asked = flags.start.init_from or flags.start.decay_from
    if asked and not (begun.init_from or begun.decay_from):
        raise BadInput(f"--run={flags.run.run} has a checkpoint and did not begin with {asked}: choose another --run, "
                       "or leave the flag out")
    if begun.decay_from:
        flags = _inherit(flags, meta).replace(rate_horizon=meta.flags["rate_horizon"])
    return flags.replace(**vars(begun))


def require_same_rows(path, meta, flags):
    """Raises BadInput if the Flags make other rows of the same data than the checkpoint at `path`."""
    now = flags.as_dict()
    for name in ROW_FLAGS:
        require_same(path, {f"--{name}": (meta.flags.get(name), now[name])})


def saved_flags(group, saved):
    """Returns a data class of flags with the values of a checkpoint, {name: value} of all its flags."""
    return group(**{each.name: saved[each.name] for each in fields(group) if each.name in saved})


def other_model(what, path, directory):
    """Returns the Meta and the GPTConfig of another run's checkpoint. Raises BadInput if it is of the run in
    `directory`, or holds no model of text."""
    meta = load_meta(path)
    if meta.task != "language":
        raise BadInput(f"{what} is of the task {meta.task} and no model of text: give a run of base_train")
    config = read_config(path, meta, GPTConfig)
    if path.resolve().parent == directory.resolve():
        raise BadInput(f"{what} is a checkpoint of this run: give another run, or choose another --run")
    return meta, config


def _require_start(what, start, flags, config, tokenizer):
    """Raises BadInput if a run with the Flags cannot begin with a Start, whose model has this GPTConfig."""
    if start.has_optimizer and not start.meta.flags:
        raise BadInput(f"{what} was imported and holds only weights: use --init_from without --init_optimizer")
    require_same(start.path, {"the hash of the tokenizer": (start.meta.tokenizer_sha256, tokenizer.sha256)})
    require_as_saved(vars(flags.model), config, start.path, otherwise="")
    problem = on_disk.find_problem(start.path, weights_only=not start.has_optimizer)
    if problem:
        raise BadInput(f"{what} is damaged ({problem}): use another checkpoint")


def _with_decay(what, flags, start, config):
    """Returns the Flags of a run that continues a Start while its rates fall. Raises BadInput."""
    saved = start.meta.flags
    if flags.batch.num_iterations < 0:
        raise BadInput(f"{what} does not say for how long: add --num_iterations=+2000, for example")
    batch = saved_flags(BatchFlags, saved)
    begun = saved_flags(StartFlags, saved)
    lengths = length_schedule(batch.seq_len_ramp, config.max_seq_len)
    horizon = plan_horizon(batch, config, start.meta.total_batch_size, lengths, begun)
    rates = plan_rates(saved_flags(OptimConfig, saved), begun, horizon)
    height = lr_multiplier(start.meta.step, horizon, rates)
    if height < 1:
        raise BadInput(f"{what} has learning rates at {height:.3f} of their height, because they rise or fall there: "
                       "give a checkpoint with full rates")
    flags = _inherit(flags, start.meta)
    if flags.optimizer.rate_horizon < 0:
        flags = flags.replace(rate_horizon=horizon)
    return flags.replace(decay_from=start.name)


# Parsed flags do not tell what the command line named. So a flag counts as given if it differs from its default: an
# ending cannot return to a default from which the run before it deviated.
def _inherit(flags, meta):
    """Returns the Flags with a checkpoint's values of those that have their defaults."""
    found = {"seed": meta.flags["seed"]} if flags.run.seed == 0 else {}
    now = flags.as_dict()
    for group in INHERITED:
        for each in fields(group):
            if each.name not in OWN and each.name in meta.flags and now[each.name] == each.default:
                found[each.name] = meta.flags[each.name]
    if now["data_dir"] or now["data_mix"]:  # one replaces the other
        found.pop("data_dir", None)
        found.pop("data_mix", None)
    return flags.replace(**found)
