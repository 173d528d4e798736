"""The training loop of one rank. It knows when something happens, and the task (task.py) what happens.

launch.py makes a Trainer in each rank and calls train(). Its loop runs train_step until the end of the run, and between
two steps it logs, saves and evaluates. A lane (data/lanes.py) is one of --num_lanes streams of rows; its state is its
position in the data. train_step hands over to TrainingStep.run (step.py), where forward pass,
backward pass and update are.
"""
import math
import time
from dataclasses import asdict, dataclass

from nanochat.checkpoint.meta import Meta, restore_rng, rng_state
from nanochat.checkpoint.on_disk import latest
from nanochat.checkpoint.pieces import load_checkpoint
from nanochat.common import work
from nanochat.device.ranks import print0
from nanochat.record.alerts import alert
from nanochat.record.goodput import Goodput
from nanochat.run import stopping
from nanochat.train.liveness import Liveness
from nanochat.train.saves import Saves
from nanochat.train.step_log import NonfiniteSteps, StepLog


class Trainer:
    """One rank's part of a run: Trainer(run, dist).train()."""
    def __init__(self, run, dist):
        """run: a Run, from prepare; dist: this rank's Dist."""
        run.check_ranks(dist)
        self.run = run
        self.task = run.task
        self.dist = dist
        restored = meta = lane_states = None
        if run.checkpoint:
            restored = load_checkpoint(run.checkpoint)
            meta = restored.meta
            lane_states = restored.lane_states
        self.restore(meta)
        # The loader comes first: it prefetches while the weights are restored and the first program is compiled, so the
        # first batch takes 0.00 s instead of 1.5 to 2.1 s (dev/log). The run's folder changes only once everything
        # is on the device: a start that finds the TPU in use leaves it unchanged.
        with self.goodput.span("load"):
            self.batches = self.task.open_batches(dist, self.step, lane_states)
            self.training = self.task.restore_training(dist, self.step, restored)
        if dist.rank == 0:
            run.begin()
            alert(f"run {run.flags.run.run} started at step {self.step}")
        self.liveness = Liveness(run, dist, self.step)
        print0("\n".join(self.task.describe()))
        if restored:
            print0(f"resuming from {run.checkpoint}")
        else:
            print0(f"a new run, in {run.directory}")
        self.is_validation_finite = True
        self.log = StepLog(run, dist, self.training, self.nonfinite, self.step, meta)
        self.saves = Saves(run, dist, self.step, self.log)

    def restore(self, meta):
        """Continues from the Meta of a checkpoint, or begins a run if it is None. The inverse of `meta`."""
        if meta is None:
            self.step = 0
            self.interruptions = 0
            self.nonfinite = NonfiniteSteps()
            self.goodput = Goodput()
            return
        self.step = meta.step
        self.nonfinite = NonfiniteSteps(**meta.nonfinite_steps)
        restore_rng(meta.rng)
        # The time since a pause is nobody's loss: the run was told to stop, or had ended. After a kill or a preemption
        # the time since the checkpoint is lost: nothing ran, or ran steps that are trained again.
        if meta.is_pause:
            self.interruptions = meta.interruptions
            self.goodput = Goodput(meta.seconds)
        else:
            self.interruptions = meta.interruptions + 1
            self.goodput = Goodput(meta.seconds, meta.time)

    def meta(self):
        """Returns the Meta of a checkpoint at this step."""
        run = self.run
        return Meta(
            step=self.step, interruptions=self.interruptions,
            nonfinite_steps=asdict(self.nonfinite), seconds=self.goodput.seconds(), time=time.time(),
            rng=rng_state(), task=self.task.name, data_fingerprint=self.batches.fingerprint, flags=run.flags.as_dict(),
            wandb_id=self.log.wandb_id, **self.task.identity(), mesh=asdict(self.training.optimizer.mesh),
            is_pause=self.step >= run.plan.num_iterations
            or self.liveness.is_stopping and not self.liveness.is_preempted)

    def train(self):
        """Trains to the end. Returns the exit status: 0, stopping.EXIT_STATUS if the run was asked to stop and its
        state is saved, or 1 after too many non-finite steps in a row, if the last state could not be saved, or if the
        last validation is not finite. Ranks other than 0 return 0."""
        first_step = self.step
        record = self.run.flags.record
        events = self.task.events()
        # The order between two steps matters. The ranks agree first, because it decides what is due. The log comes
        # next, see write_log. A checkpoint comes before evaluations and samples, so that their failure costs no steps.
        # Non-finite steps do not change the weights, so a series of them saves none, unless the run ends there.
        while True:
            self.agree("step")
            due = events_due(events, record, self.step, first_step, self.run.plan.num_iterations,
                             self.liveness.is_stopping)
            if due.log:
                self.write_log()
            if self.nonfinite.are_too_many:
                break
            if due.save and (due.end or not self.nonfinite.in_a_row):
                self.save()
            for event in due.events:
                if not self.liveness.is_stopping:
                    self.run_event(event)
            if due.end or self.liveness.is_stopping:
                break
            self.train_step()
        status = self.finish()
        work.begin("")
        return status

    def train_step(self):
        """Runs one optimizer step, without waiting for the device."""
        self.task.before_step(self.training, self.step)
        self.log.begin_step()
        self.liveness.beat("step", self.step)
        with self.goodput.span("train"):
            result = self.training.run(self.batches, self.training.optimizer.scheduled(self.step))
            self.log.add(result)
        self.step += 1

    def agree(self, phase):
        """Lets the ranks agree whether to stop, and returns whether all do. Every rank calls it at the same points of
        the program."""
        self.saves.check()
        self.liveness.agree(phase, self.step)
        return self.liveness.is_stopping

    def write_log(self):
        """Fetches the results of the steps since the last line, where alone the loop waits for the device, and logs
        them (step_log.py). It comes first between two steps: saves and events must not count as time
        of a step, and a checkpoint must not be ahead of metrics.jsonl."""
        seconds = self.log.write(self.step, self.goodput, self.batches, self.interruptions)
        if seconds is not None:
            self.liveness.note_step_seconds(seconds)

    def save(self):
        """Begins to save a checkpoint of this step."""
        self.liveness.beat("save", self.step)
        with self.goodput.span("save"):
            meta = self.meta() if self.dist.rank == 0 else None
            self.saves.save(self.step, self.batches.state, self.training, meta)

    def run_event(self, event):
        """Runs one of the task's events, and logs its result. A stop cuts it short."""
        with self.goodput.span(event.phase):
            found = event.run(self.training, self.dist, self.step, lambda: self.agree(event.phase))
        if "val_bpb" in found:
            self.is_validation_finite = math.isfinite(found["val_bpb"])
        self.log.write_event(self.step, found)

    def finish(self):
        """Ends the work in the background. Returns the exit status, as train does."""
        # The order protects the most valuable state from a machine that ends meanwhile. The last state is handed over
        # first, and all wait until it is on disk. Only then does rank 0 let a further signal end the process, close the
        # log, which may wait for WandB, and wait for the mirror. The parent waits for rank 0, so the others return.
        is_stopped = self.liveness.is_stopping
        self.liveness.finish(self.step)
        if self.nonfinite.are_too_many:
            print0(f"error: {self.nonfinite.in_a_row} steps in a row had a non-finite loss or gradient: the run ends "
                   f"at step {self.step}; go on from an earlier checkpoint, or with lower learning rates")
        elif is_stopped:
            self.save()  # once per step, see Saves
        self.batches.close()
        is_saved = self.saves.finish(self.liveness.asked_from_now_on())
        if self.dist.rank > 0:
            return 0
        is_told_to_end = self.liveness.begin_to_wait_for_mirror()
        self.log.close(timeout_s=5 if is_stopped else 60)
        is_mirrored = self.saves.finish_mirror(is_told_to_end)
        if self.nonfinite.are_too_many:
            return 1
        if not is_saved:
            print0(f"error: the state of step {self.step} is not saved: the run ends with "
                   f"{latest(self.run.directory) or 'no checkpoint'}")
            return 1
        if is_stopped:
            return self.finish_stopped()
        return self.finish_whole(is_mirrored)

    def finish_stopped(self):
        """Says what the same command does now. Returns the exit status."""
        if self.step:
            print0(f"stopped and saved: the same command resumes at step {self.step}")
        else:
            print0("stopped before step 1, so nothing is saved: the same command begins the run")
        return stopping.EXIT_STATUS

    def finish_whole(self, is_mirrored):
        """Reports the faults of a run that has reached its end, or where its model is. Returns the exit status."""
        if self.nonfinite.in_a_row:
            print0(f"warning: the last {self.nonfinite.in_a_row} steps of the run were skipped: their loss or gradient "
                   "was not finite")
        if not self.is_validation_finite:
            print0(f"error: the validation after step {self.step} is not finite: the model is broken. Resume from an "
                   "earlier checkpoint, or train again with lower learning rates")
            return 1
        if is_mirrored:  # otherwise the same command copies the last checkpoint
            self.run.mark_finished()
        path = latest(self.run.directory)
        print0(f"finished: the model is {path}{self.task.to_use_it}" if path else
               "finished: --save_every=-1 saved nothing")
        return 0


@dataclass(frozen=True)
class EventsDue:
    """What happens between two steps."""
    log: bool
    save: bool
    events: list  # of the task, in their order
    end: bool


def events_due(events, record, step, first_step, num_iterations, is_stopping):
    """Returns the EventsDue after `step` optimizer steps.

    events: the task's; record: the RecordFlags; first_step: where this process began; is_stopping: all ranks have
    agreed to stop, which includes a save.
    """
    is_last = step >= num_iterations

    def is_due(every):
        return every > 0 and (is_last or step % every == 0)

    # The first step of a process has its own line, because it compiles. A line comes before every save and event, whose
    # time must not count as a step's.
    save = is_stopping or is_due(record.save_every)
    found = []
    for event in events:
        may_run = step > 0 or event.is_due_at_start
        if is_due(event.every) and may_run and not is_stopping:
            found.append(event)
    log = save or bool(found) or is_due(record.log_every) or step == first_step + 1
    return EventsDue(log, save, found, end=is_last or is_stopping)
