"""The record of the training steps: results are collected on the device, fetched together, and logged on rank 0."""
import math
import os
import secrets
import time
from dataclasses import dataclass
from importlib.util import find_spec
from statistics import fmean

from nanochat.common import SILENCE_S
from nanochat.device import tpu
from nanochat.device.programs import compilations, compile_seconds
from nanochat.device.ranks import print0
from nanochat.model.weights import mfu
from nanochat.record.alerts import alert
from nanochat.record.metrics import MetricsLogger, Reader, send_to_wandb, write_for_tensorboard


def mean_of_finite(values):
    """Returns the mean of the finite values, or NaN if none is finite."""
    finite = list(filter(math.isfinite, values))
    return fmean(finite) if finite else math.nan


def summarise(results, averaged):
    """Returns {metric: number} of some steps: `loss` of the last, `mean_loss` of all, the means of the metrics named in
    `averaged`, and the last step's value of all others.

    results: {name: number} of each step, all with the same names.
    """
    found = {"loss": results[-1]["loss"]}
    for name, last in results[-1].items():
        mean = mean_of_finite([result[name] for result in results])
        if name == "loss":
            found["mean_loss"] = mean
        elif name in averaged:
            found[name] = mean
        else:
            found[name] = last
    return found


# A step leaves its measurements on the device, as one tensor, and the next one begins. Those of --log_every steps are
# fetched together. So nobody knows of a bad step before the next line, and the device must refuse its update by itself.

MAX_BAD_STEPS = 10  # non-finite ones in a row, after which a run ends


class StepLog:
    """The steps of a rank since the last console line; on rank 0 also metrics.jsonl, the console and the readers."""

    def __init__(self, run, dist, training, nonfinite, first_step, meta=None):
        """training: the TrainingStep; nonfinite: NonfiniteSteps; first_step: where this process begins; meta: the Meta
        of the checkpoint from which the run resumes."""
        self._name = run.flags.run.run
        self._plan = run.plan
        self._dist = dist
        self._training = training
        self._nonfinite = nonfinite
        self._first_step = first_step
        self._last_step = first_step  # whose result is written
        self._waiting = []  # Measured of each step
        self._begun_at = time.monotonic()
        self._num_recorded = 0  # of those that wait
        self._recorded_at = self._begun_at
        self.wandb_id = None  # of the run, for the checkpoint; on rank 0
        self._logger = None
        if dist.rank == 0:
            self.wandb_id = (meta and meta.wandb_id) or secrets.token_hex(4)
            resume_step = meta.step if meta else None
            self._logger = MetricsLogger(
                run.directory, resume_step=resume_step, total_steps=self._plan.num_iterations,
                readers=self._open_readers(run, resume_step), of_task=run.task.console)

    def _open_readers(self, run, resume_step):
        if self._name == "dummy":
            return []
        readers = []
        if find_spec("tensorboard"):
            readers.append(Reader("TensorBoard", write_for_tensorboard, directory=run.directory / "tensorboard",
                                  resume_step=resume_step))
        if os.environ.get("WANDB_MODE") != "disabled":
            project = os.environ.get("WANDB_PROJECT") or "nanochat"
            readers.append(Reader("WandB", send_to_wandb, project=project, name=self._name, id=self.wandb_id,
                                  dir=str(run.directory), config=run.flags.as_dict()))
        return readers

    def begin_step(self):
        """Says that a step begins. The first one after a console line begins the time of the next line."""
        if not self._waiting:
            self._begun_at = time.monotonic()
            self._training.observer.begin_window()

    def add(self, measured):
        """Adds a step. measured: the result of TrainingStep.run, on the device."""
        self._waiting.append(measured)
        if self._logger and time.monotonic() - self._recorded_at > SILENCE_S:
            self._catch_up()

    # As often as the console has a line in a long silence. It leaves out the newest step, so the device has work while
    # the host waits for the results of those before.
    def _catch_up(self):
        """Records the losses of the waiting steps but the newest."""
        for measured in self._waiting[self._num_recorded:-1]:
            self._num_recorded += 1
            self._logger.log(self._last_step + self._num_recorded, {"loss": measured.fetch()["loss"]}, quiet=True)
        self._recorded_at = time.monotonic()

    def write(self, step, goodput, batches, interruptions):
        """Fetches the results of the steps since the last line, which waits for the device, and logs them.

        step: the last of these steps; batches: see Task.open_batches.
        Returns the seconds per step, None if there was no step.
        """
        if not self._waiting:
            return None
        with goodput.span("train"):
            # Here and in _catch_up alone does the training loop wait for the device. All steps of a line are fetched
            # together: a fetch after each step would leave the chip idle while the host traces and dispatches the next.
            results = [measured.fetch() for measured in self._waiting]
        first = step - len(results) + 1
        self._count_nonfinite(first, results)
        elapsed_s = time.monotonic() - self._begun_at
        if self._logger:
            for number, result in enumerate(results[self._num_recorded:-1], first + self._num_recorded):
                self._logger.log(number, {"loss": result["loss"]}, quiet=True)
            record = summarise(results, averaged=self._training.sums)
            record |= self._speed(first, step, elapsed_s)
            record |= batches.metrics()
            record |= self._totals(goodput, interruptions)
            record |= self._training.observer.record(elapsed_s)
            self._logger.log(step, record)
            if first == self._first_step + 1 and self._dist.is_xla:
                print0(f"compiled {compilations()} programs in {compile_seconds():.1f} s")
        self._last_step, self._num_recorded, self._recorded_at = step, 0, time.monotonic()
        return elapsed_s / len(results)

    def _count_nonfinite(self, first, results):
        """Counts the non-finite steps from `first` on, with a warning for each, and clears the waiting steps."""
        for number, result in enumerate(results, first):
            loss = result["loss"]
            gradient_norm = result["grad_norm"]
            if self._nonfinite.add(loss, gradient_norm):
                print0(f"warning: step {number} is skipped, its loss is {loss} and its gradient's norm "
                       f"{gradient_norm} ({self._nonfinite.in_a_row} in a row)")
                if self._logger and self._nonfinite.in_a_row == 1:
                    alert(f"run {self._name}: step {number} is skipped, because it is not finite")
        self._waiting = []

    def _speed(self, first, step, elapsed_s):
        plan = self._plan
        units = plan.units(first - 1, step)
        flops = plan.flops(first - 1, step)
        rules = self._training.optimizer.rules
        speed = {"lr_multiplier": rules.lr_multiplier(step - 1),
                "step_ms": 1000 * elapsed_s / (step - first + 1),
                f"{plan.unit}_per_s": units / elapsed_s,
                "mfu": mfu(units / elapsed_s, flops / units, tpu.peak_flops_here(plan.device_type), plan.world_size)}
        if step > self._first_step + 1:  # the first one compiles
            # By FLOPs and not by steps: later rows may be longer.
            speed["time_left_s"] = elapsed_s * plan.flops(step, plan.num_iterations) / flops
        return speed

    def _totals(self, goodput, interruptions):
        """Returns the metrics that count from the beginning of the run."""
        record = {"bad_steps": self._nonfinite.total, "interruptions": interruptions}
        seconds = goodput.seconds()
        record |= {"goodput": goodput.fraction(), "seconds": sum(seconds.values())}
        return record | {f"seconds_{name}": value for name, value in seconds.items()}

    def write_event(self, step, found):
        """Logs {metric: value} of an event after `step` steps, if it has any."""
        if self._logger and found:
            self._logger.log(step, found)

    def flush(self):
        """Writes the records that wait in memory for a full disk."""
        if self._logger:
            self._logger.flush()

    def close(self, timeout_s):
        """Closes the record, and waits at most `timeout_s` seconds for WandB."""
        if self._logger:
            self._logger.close(timeout_s)


# The optimizer skips a step on the device if its loss or gradient is not finite. Here such steps are counted, on every
# rank, with equal results. Too many in a row end the run.
@dataclass
class NonfiniteSteps:
    """Counts a run's non-finite steps."""
    total: int = 0
    in_a_row: int = 0

    def add(self, loss, gradient_norm):
        """Counts a step if it was not finite, and returns whether it was."""
        if math.isfinite(loss) and math.isfinite(gradient_norm):
            self.in_a_row = 0
            return False
        self.total += 1
        self.in_a_row += 1
        return True

    @property
    def are_too_many(self):
        return self.in_a_row >= MAX_BAD_STEPS
