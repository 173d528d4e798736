"""What the trainer asks of a task.

A task says what is learnt: its data, model, loss and evaluations. The trainer and all around it (checkpoints, stopping,
watchdog, log, preflight) know when something happens and nothing of what it is. LanguageTask (language.py) is one.
"""
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Protocol


def flags_of(groups, but):
    """Returns the names of the flags in some groups, data classes, without those in `but`."""
    return tuple(field.name for group in groups for field in fields(group) if field.name not in but)


@dataclass(frozen=True)
class Event:
    """What a task does between two steps. Every rank does it."""
    phase: str  # for the watchdog and for goodput: "evaluate" or "sample"
    every: int  # steps between two, and one at the end; -1: never
    run: Callable  # run(training, dist, step, is_cut_short) -> {metric: value} for the log, or {}
    is_due_at_start: bool = False  # also before the first step of a run


class Task(Protocol):
    """The parent process makes a task and hands it to the ranks, so it can be pickled and holds no device's memory.

    flags: groups of flags, among them `run`, `devices` and `record` (flags.py), with `as_dict()`.
    name: as in a checkpoint's Meta. changing_flags: names of the flags whose change is told when a run resumes.
    console: {metric: how the console shows it} of those that only this task has, such as {"exact": "{:.1%} solved"}.
    plan: `num_iterations`; `micro_steps(step)` and `all_micro_steps`, the numbers of micro-steps; `batch_growth(step)`,
        the batch of a step over that of the first; `device_type`, `world_size`; and the unit in which work is counted:
        `unit` ("tokens"), `units(begin, end)` of these steps, `flops(begin, end)`, and `flops_per_unit`, in the end;
        `switches`, the steps with which the shape of a batch changes. For the preflight also `kernel`, a name,
        `parameters`, {group: number}, and `stages`, ((first step, step after the last, name of the micro-step), …).
    data_fingerprint: of the training data; None if they are made up.
    num_lanes: how many states a checkpoint has of the data, from all ranks together.
    """

    def describe(self):
        """Returns the plan as lines for a person."""

    def identity(self):
        """Returns {field: value} for a checkpoint's Meta: what a run that resumes must have in common with it."""

    def resumed(self, path, meta):
        """Returns the task as it resumes from the checkpoint at `path`, whose Meta is `meta`. Raises BadInput if it
        cannot."""

    def state_bytes(self):
        """Returns the bytes of weights and state in a checkpoint."""

    def open_batches(self, dist, step, lane_states=None):
        """Returns the iterator over this rank's micro-batches, {name: CPU tensor}, from `step` on. lane_states: of all
        lanes, from a checkpoint. It has `fingerprint` of the data, `state` ({lane: JSON value} of this rank after the
        last micro-batch), `taken()` (a list of tensors: the micro-batches since its last call), `metrics()` for the
        log, and `close()`."""

    def restore_training(self, dist, step, restored=None):
        """Returns the TrainingStep (step.py) after `step` steps, with the state of a Checkpoint or an initial one."""

    def before_step(self, training, step):
        """Changes `training`, if something changes in it at `step`."""

    def events(self):
        """Returns the Events, in their order."""
