"""The interface between the trainer and a task.

A task defines its data, model, loss and evaluations. The trainer, checkpoints, stopping, watchdog, log and preflight
know only this interface. LanguageTask (language.py) is one, the Sudokus of puzzles/ are another.
"""
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class Event:
    """An action of a task between two steps, on every rank."""
    phase: str  # for the watchdog and for goodput: "evaluate" or "sample"
    every: int  # steps from one to the next; one more at the end; -1: never
    run: Callable  # run(training, dist, step, is_cut_short) -> {metric: value} for the log, or {}
    is_due_at_start: bool = False  # also before the first step of a run


class TaskPlan(Protocol):
    """What follows from the flags and the number of devices."""
    num_iterations: int
    micro_steps: int  # of an optimizer step
    device_type: str
    world_size: int
    unit: str  # of work, such as "tokens"; not of data/units.py
    flops_per_unit: float  # at the end of the run
    switches: tuple  # the steps at which the shape of a batch changes

    def units(self, begin, end):
        """Returns the units of work of steps `begin` to `end` - 1."""

    def flops(self, begin, end):
        """Returns the FLOPs of the same steps."""


class Task(Protocol):
    """The parent process makes a task and hands it to the ranks: it can be pickled and holds no device's memory."""

    flags: Any  # groups of flags, among them `run`, `devices` and `record` (flags.py), with as_dict()
    name: str  # as in a checkpoint's Meta
    console: dict  # {metric that only this task has: its format on the console}, {"exact": "{:.1%} solved"}
    plan: TaskPlan
    data_fingerprint: str | None  # of the training data; None if synthetic
    origin: str | None  # the checkpoint with which a new run begins, as text that all hosts must agree on
    source_zip: Path | None  # the on_disk.SOURCE that every checkpoint of the run holds, too
    to_use_it: str  # the end of a line that says where the model is: a command that uses it, or ""
    num_lanes: int  # how many lanes (docs/glossary.md) there are, whose states a checkpoint has

    def describe(self):
        """Returns the plan as lines for a person."""

    def identity(self):
        """Returns {field: value} of a checkpoint's Meta, those fields that only the task knows."""

    def state_bytes(self):
        """Returns the bytes of weights and optimizer state in a checkpoint."""

    def open_batches(self, dist, step, lane_states=None):
        """Returns an iterator over this rank's micro-batches, {name: CPU tensor}, from `step` on. lane_states: of all
        lanes, from a checkpoint. The iterator has `fingerprint` of the data, `state` ({lane: JSON value} of this rank
        after the last micro-batch), `metrics()` for the log, and `close()`."""

    def restore_training(self, dist, step, restored=None):
        """Returns the TrainingStep (step.py) after `step` steps, from a Checkpoint or in its initial state."""

    def before_step(self, training, step):
        """Adapts `training` to `step`, if something changes there."""

    def events(self):
        """Returns the Events, in their order."""
