"""The record of the training steps: results are collected on the device, fetched together, and logged on rank 0."""
import math
import time
from statistics import fmean

from nanochat.device import tpu
from nanochat.device.ranks import print0
from nanochat.model.flops import mfu
from nanochat.record.metrics import MetricsLogger
from nanochat.record.observe import describe_compiling


def mean_of_finite(values):
    """Returns the mean of those values that are finite, or NaN if there is none."""
    finite = list(filter(math.isfinite, values))
    return fmean(finite) if finite else math.nan


def summarise(results, averaged):
    """Returns {metric: number} of some steps: the loss of the last one and the mean of all, the means of the others
    that are `averaged`, and what else was measured, whatever its name, as it was in the last step.

    results: {name: number} of each step, all with the same names; averaged: names.
    """
    found = {"loss": results[-1]["loss"]}
    for name in results[-1]:
        mean = mean_of_finite([result[name] for result in results])
        if name == "loss":
            found["mean_loss"] = mean
        else:
            found[name] = mean if name in averaged else results[-1][name]
    return found


class StepLog:
    """The steps of a rank since the last console line; on rank 0 also metrics.jsonl, the console and WandB."""

    def __init__(self, run, dist, training, nonfinite, first_step, meta=None):
        """training: the TrainingStep; nonfinite: NonfiniteSteps; first_step: the step with which this process begins;
        meta: the Meta of the checkpoint that the run resumes from."""
        self._plan = run.plan
        self._dist = dist
        self._training = training
        self._nonfinite = nonfinite
        self._first_step = first_step
        self._waiting = []  # (Measured, rows) of each step
        self._begun_at = time.monotonic()
        self._logger = None
        if dist.rank == 0:
            flags, mesh = run.flags, training.optimizer.mesh  # which --mesh_fsdp=auto and variables do not say
            self._logger = MetricsLogger(
                run.directory, flags.run.run, flags.as_dict() | {"mesh": mesh.as_dict()},
                total_steps=self._plan.num_iterations,
                resume_step=meta.step if meta else None, wandb_project=flags.run.wandb_project,
                wandb_id=meta.wandb_id if meta else None, of_task=run.task.console)

    def begin_step(self):
        """Says that a step begins. The first one after a console line begins the time of the next line."""
        if not self._waiting:
            self._begun_at = time.monotonic()
            self._training.observer.begin_window()

    def add(self, measured, rows):
        """Adds a step. measured: what TrainingStep.run returned, on the device; rows: a list of tensors, this rank's
        micro-batches."""
        self._waiting.append((measured, rows))

    def write(self, step, goodput, batches, interruptions, mirror_behind_s=None):
        """Fetches the results of the steps since the last line, which waits for the device, and logs them.

        step: the last of these steps; batches: see Task.open_batches; mirror_behind_s: see Saves, on rank 0.
        Returns the seconds per step, None if there was no step.
        """
        if not self._waiting:
            return None
        with goodput.span("train"):
            # The one place where the loop of steps waits for the device. All steps of a line are fetched here together:
            # a fetch after each step would leave the chip idle while the host traces and dispatches the next.
            results = [measured.fetch() for measured, _ in self._waiting]
        first = step - len(results) + 1
        self._count_nonfinite(first, results)
        elapsed_s = time.monotonic() - self._begun_at
        if self._logger:
            for number, result in enumerate(results[:-1], first):
                self._logger.log(number, {"loss": result["loss"]}, quiet=True)
            record = summarise(results, averaged=self._training.sums)
            record |= self._speed(first, step, elapsed_s)
            record |= batches.metrics()
            record |= self._of_the_run(goodput, interruptions, mirror_behind_s)
            record |= self._training.observer.record(elapsed_s)
            self._logger.log(step, record)
            if first == self._first_step + 1 and self._dist.is_xla:
                print0(describe_compiling())
        return elapsed_s / len(results)

    def _count_nonfinite(self, first, results):
        """Counts the non-finite ones among the steps from `first` on, with a warning for each, and forgets them all."""
        for number, (result, (_, rows)) in enumerate(zip(results, self._waiting, strict=True), first):
            loss, gradient_norm = result["loss"], result["grad_norm"]
            if self._nonfinite.add(number, loss, gradient_norm, rows):
                print0(f"warning: step {number} is left out, its loss is {loss} and its gradient's norm "
                       f"{gradient_norm} ({self._nonfinite.in_a_row} in a row)")
        self._waiting = []

    def _speed(self, first, step, elapsed_s):
        plan = self._plan
        units, flops = plan.units(first - 1, step), plan.flops(first - 1, step)
        rules = self._training.optimizer.rules
        return {"lr_multiplier": rules.lr_multiplier(step - 1, plan.batch_growth(step - 1)),
                "step_ms": 1000 * elapsed_s / (step - first + 1),
                f"{plan.unit}_per_s": units / elapsed_s,
                "mfu": mfu(units / elapsed_s, flops / units, tpu.peak_flops_here(plan.device_type), plan.world_size),
                # By FLOPs and not by steps: the batches and rows that are still to come may be larger.
                "time_left_s": elapsed_s * plan.flops(step, plan.num_iterations) / flops}

    def _of_the_run(self, goodput, interruptions, mirror_behind_s):
        """Returns the metrics that count from the run's beginning."""
        record = {"bad_steps": self._nonfinite.total, "interruptions": interruptions}
        if mirror_behind_s is not None:
            record["mirror_behind_s"] = round(mirror_behind_s)
        seconds = goodput.seconds()
        record |= {"goodput": goodput.fraction(), "seconds": sum(seconds.values())}
        return record | {f"seconds_{name}": value for name, value in seconds.items()}

    def write_event(self, step, found):
        """Logs {metric: value} of an event after `step` steps, if it has any."""
        if self._logger and found:
            self._logger.log(step, found)

    @property
    def wandb_id(self):
        """WandB's id of the run, for the checkpoint; on rank 0."""
        return self._logger.wandb_id

    def flush(self):
        """Writes the records that wait in memory for a full disk."""
        if self._logger:
            self._logger.flush()

    def close(self, timeout_s):
        """Closes the record; WandB has `timeout_s` seconds to take it."""
        if self._logger:
            self._logger.close(timeout_s)
