"""The training loop of one rank."""
import time
from dataclasses import asdict, dataclass
from functools import partial

import torch

from nanochat.data.loader import DataLoader, SyntheticLoader
from nanochat.data.shards import list_shards
from nanochat.device.ranks import print0, print_banner
from nanochat.infer.engine import Engine
from nanochat.model.gpt import initial_weights
from nanochat.record.goodput import Goodput
from nanochat.record.observe import Profile
from nanochat.run import checkpoint, stopping
from nanochat.run.meta import Meta, restore_rng, rng_state
from nanochat.train.code_eval import evaluate_code
from nanochat.train.liveness import Liveness
from nanochat.train.loss_eval import bits_per_byte, with_suffixes
from nanochat.train.nonfinite import NonfiniteSteps
from nanochat.train.plan import describe_plan
from nanochat.train.saves import Saves
from nanochat.train.step import make_model, make_step, next_token_loss
from nanochat.train.step_log import StepLog
from nanochat.train.teacher import DistillationLoss, load_teacher

FIM_EVAL_PART = 4  # the middles are evaluated on a row for each of so many rows of the validation text
SAMPLE_PROMPTS = ("#include <", "template <typename T>\nclass", "int main(int argc, char** argv) {")


class Trainer:
    """One rank's part of a run: Trainer(run, dist).train()."""

    def __init__(self, run, dist):
        """run: a Run, from prepare; dist: this rank's Dist."""
        run.check_world_size(dist.world_size)
        self.run, self.dist = run, dist
        restored = checkpoint.load(run.checkpoint) if run.checkpoint else None
        meta = restored.meta if restored else None
        self.restore(meta)
        with self.goodput.span("load"):
            self.rows = RowFeed(open_loader(run, dist, restored.lane_states if restored else None))
            self.training = restore_training(run, dist, self.step, restored)  # while the loader reads ahead
        if dist.rank == 0:
            run.begin()
        self.profile = Profile(run.profile_steps, run.directory / "profile", dist)
        self.liveness = Liveness(run, dist, self.step)
        if dist.rank == 0:
            print_banner()
            print0("\n".join(describe_plan(run.plan, run.tokenizer)))
            if run.teacher:
                print0(run.teacher.describe())
            print0(f"resuming from {run.checkpoint}" if restored else f"a new run, in {run.directory}")
        self.log = StepLog(run, dist, self.training, self.nonfinite, self.step, meta)
        self.saves, self.save_is_asked = Saves(run, dist, self.step, before_rename=self.log.flush), False

    def restore(self, meta):
        """Continues from the Meta of a checkpoint, or begins a run if it is None. The inverse of `meta`; prepare has
        compared config, tokenizer, data, flags and batch schedule."""
        limit = self.run.flags.record.max_bad_steps
        if meta is None:
            self.step = self.interruptions = 0
            self.nonfinite = NonfiniteSteps(limit)
            self.goodput = Goodput()
        else:
            self.step, self.interruptions = meta.step, meta.interruptions + (not meta.is_pause)
            self.nonfinite = NonfiniteSteps(limit, **meta.nonfinite_steps)
            self.goodput = Goodput(meta.seconds, None if meta.is_pause else meta.time)
            restore_rng(meta.rng)

    def meta(self):
        """Returns the Meta of a checkpoint at this step."""
        run = self.run
        return Meta(
            step=self.step, interruptions=self.interruptions,
            nonfinite_steps=self.nonfinite.counts(), seconds=self.goodput.seconds(), time=time.time(),
            rng=rng_state(),
            config=asdict(run.plan.config), tokenizer_sha256=run.tokenizer.sha256,
            data_fingerprint=self.rows.loader.fingerprint, flags=run.flags.as_dict(),
            batch_schedule=run.plan.batch_schedule, wandb_id=self.log.wandb_id,
            is_pause=self.step >= run.plan.num_iterations
            or self.liveness.is_stopping and not self.liveness.is_preempted)

    def train(self):
        """Trains to the end.

        Returns the exit status: 0, stopping.EXIT_STATUS if the run was asked to stop and its state is saved, or 1 after
        too many non-finite steps in a row, or if the last state could not be saved. It is that of rank 0: other ranks
        return 0.
        """
        first_step, record = self.step, self.run.flags.record
        while True:
            self.agree("step")
            due = events_due(record, self.step, first_step, self.run.plan.num_iterations, self.save_is_asked,
                             self.liveness.is_stopping)
            if due.log:
                self.write_log()
            if self.nonfinite.are_too_many:
                break
            if due.save and (due.end or not self.nonfinite.in_a_row):
                self.save()
            if due.evaluate:
                self.evaluate()
            if due.code and not self.liveness.is_stopping:
                self.evaluate_code()
            if due.sample and not self.liveness.is_stopping:
                self.sample()
            if due.end or self.liveness.is_stopping:
                break
            self.train_step()
        return self.finish()

    def train_step(self):
        """Runs one optimizer step, without waiting for the device."""
        plan = self.run.plan
        if self.run.teacher and self.step == self.run.teacher.last_step and self.training.teacher:
            self.training.dismiss_teacher(next_token_loss)
        self.log.begin_step()
        self.liveness.beat("step", self.step)
        self.profile.before_step(self.step)
        with self.goodput.span("train"):
            scheduled = self.training.optimizer.scheduled(self.step, plan.batch_growth(self.step))
            result = self.training.run(self.rows, plan.micro_steps(self.step), scheduled)
            self.log.add(result, self.rows.taken())
        self.step += 1
        self.profile.after_step(self.step)

    def agree(self, phase):
        """Lets the ranks agree on whether to save or stop, and returns whether all stop.

        Every rank calls it at the same points of the program.
        """
        self.saves.check()
        self.save_is_asked |= self.liveness.agree(phase, self.step, self.saves.wants_save())
        return self.liveness.is_stopping

    def write_log(self):
        """Logs the steps since the last line. This comes before everything else between two steps: its time is no
        step's, and a checkpoint must not be past steps that are not in metrics.jsonl."""
        seconds = self.log.write(self.step, self.goodput, self.rows.loader.stats, self.interruptions,
                                 self.saves.mirror_behind_s())
        if seconds is not None:
            self.liveness.note_step_seconds(seconds)

    def save(self):
        """Begins to save a checkpoint of this step."""
        self.liveness.beat("save", self.step)
        self.save_is_asked = False
        with self.goodput.span("save"):
            self.saves.save(self.step, self.rows.state, self.training.optimizer, self.meta)

    def evaluate(self):
        """Logs the bits per byte of the validation text, and of middles in it if the run has --fim_rate. A stop cuts it
        short; the resumed run does it again."""
        tokens, length = self.run.flags.record.eval_tokens, self.run.plan.config.max_seq_len
        num_rows = max(tokens // length, 1)
        with self.goodput.span("evaluate"), open_loader(self.run, self.dist, num_rows=num_rows) as loader:
            found = bits_per_byte(self.training.compiled_model, loader, self.run.tokenizer.token_bytes(), self.dist,
                                  lambda: self.agree("evaluate"))
        if not found:
            return
        if not self.run.flags.data.fim_rate:
            return self.log.write_evaluation(self.step, found)
        with self.goodput.span("evaluate"), open_loader(self.run, self.dist, num_rows=max(num_rows // FIM_EVAL_PART, 1),
                                                        fim_rate=1.0) as loader:
            middles = bits_per_byte(self.training.compiled_model, loader, self.run.tokenizer.token_bytes(), self.dist,
                                    lambda: self.agree("evaluate"), partial(with_suffixes, self.run.tokenizer))
        if middles:
            self.log.write_evaluation(self.step, found, middles)

    def evaluate_code(self):
        """Logs how much of the C++ that the model writes compiles and works."""
        with self.goodput.span("evaluate"), torch.no_grad(), self.training.optimizer.whole_weights():
            found = evaluate_code(self.training.model, self.run.tokenizer, self.dist, lambda: self.agree("evaluate"))
        self.log.write_code_evaluation(self.step, found)

    def sample(self):
        """Prints completions. Every rank makes them, so that none waits for another."""
        engine = Engine(self.training.model, self.run.tokenizer, self.dist)  # it remembers nothing of older weights
        with self.goodput.span("sample"), torch.no_grad(), self.training.optimizer.whole_weights():
            for prompt in SAMPLE_PROMPTS:
                if self.agree("sample"):
                    return
                text = engine.complete(prompt, max_tokens=min(48, self.run.plan.config.max_seq_len // 2),
                                       seed=self.step)
                print0(f"--- sample at step {self.step}\n{prompt}{text}\n---")

    def finish(self):
        """Ends what runs in the background. Returns the exit status, as train does."""
        is_stopped, is_bad = self.liveness.is_stopping, self.nonfinite.are_too_many
        self.profile.close()
        self.liveness.finish(self.step)
        if is_bad:
            path = self.nonfinite.write_first_batch(self.run.directory, self.dist.rank)
            print0(f"error: {self.nonfinite.in_a_row} steps in a row had a loss or gradient that is not finite: the "
                   f"run ends at step {self.step}" + (f"; the batch of the first is in {path}" if path else ""))
        elif is_stopped:
            self.save()
        self.rows.loader.close()
        if self.dist.rank > 0:
            return 0
        is_saved = self.saves.finish()
        is_told_to_end = self.liveness.begin_to_wait_for_mirror()
        self.log.close(timeout_s=5 if is_stopped else 60)
        is_mirrored = self.saves.finish_mirror(is_told_to_end)
        if is_bad:
            return 1
        if not is_saved:
            print0(f"error: the state of step {self.step} is not saved: the run ends with the checkpoint before it")
            return 1
        if is_stopped:
            return stopping.EXIT_STATUS
        if is_mirrored:  # otherwise the same command, started again, copies the last checkpoint
            self.run.mark_finished()
        return 0


# -----------------------------------------------------------------------------
# What happens between two steps


@dataclass(frozen=True)
class EventsDue:
    log: bool
    save: bool
    evaluate: bool
    code: bool
    sample: bool
    end: bool


def events_due(record, step, first_step, num_iterations, save_is_asked, is_stopping):
    """Returns the EventsDue after `step` optimizer steps.

    record: the RecordFlags; first_step: the step with which this process began; save_is_asked: all ranks have agreed to
    save; is_stopping: all have agreed to stop, which includes a save.
    """
    is_last = step >= num_iterations

    def is_due(every):
        return every > 0 and (is_last or step % every == 0)

    save = save_is_asked or is_stopping or is_due(record.save_every)
    evaluate = is_due(record.eval_every) and not is_stopping
    code = is_due(record.code_eval_every) and step > 0 and not is_stopping
    sample = is_due(record.sample_every) and step > 0 and not is_stopping
    log = save or evaluate or code or sample or is_due(record.log_every) or step == first_step + 1
    return EventsDue(log, save, evaluate, code, sample, end=is_last or is_stopping)


# -----------------------------------------------------------------------------
# Data and model of a rank


class RowFeed:
    """Iterates over this rank's micro-batches, {"rows": int32 (B, T + 1)}, and knows where in the data they end."""

    def __init__(self, loader):
        self.loader = loader
        self._last, self._taken = None, []

    def __iter__(self):
        return self

    def __next__(self):
        self._last = next(self.loader)
        self._taken.append(self._last.rows)
        return {"rows": self._last.rows}

    def taken(self):
        """Returns a list of the rows since the last call."""
        rows, self._taken = self._taken, []
        return rows

    @property
    def state(self):
        """{lane: JSON value} of this rank's lanes after the last micro-batch; {} before the first."""
        return self._last.state if self._last else {}


def open_loader(run, dist, lane_states=None, num_rows=None, fim_rate=0.0):
    """Returns the loader of this rank. lane_states: of all lanes, to resume from; num_rows: of the validation text, of
    which `fim_rate` of the documents are rewritten."""
    flags, plan, validation = run.flags, run.plan, num_rows is not None
    common = dict(batch_size=plan.device_batch_size, seq_len=plan.config.max_seq_len, rank=dist.rank,
                  world_size=dist.world_size, seed=flags.run.seed + validation, state=lane_states,
                  num_rows=num_rows)
    if flags.data.synthetic_data:
        return SyntheticLoader(run.tokenizer.n_vocab, **common)
    shards = list_shards(flags.data.val_dir, "val") if validation else list_shards(flags.data.data_dir)
    return DataLoader(shards, run.tokenizer, threads=flags.data.tokenizer_threads,
                      skip_bad=flags.data.skip_bad_shards,
                      fim_rate=fim_rate if validation else flags.data.fim_rate, **common)


def restore_training(run, dist, step, restored=None):
    """Returns the TrainingStep after `step` steps, with the weights and the optimizer's state of a Checkpoint, or with
    initial ones."""
    model, weights = make_model(run.plan), None
    if run.plan.mesh.fsdp > 1:  # the weights come in slices: whole, they may fit into no device
        weights = ((name, None, tensor) for name, tensor in restored.model_state.items()) if restored else \
            initial_weights(run.plan.config, run.flags.run.seed)
    elif restored:
        model.load_state_dict(restored.model_state)
    else:
        model.init_weights(run.flags.run.seed)
    loss, teacher = next_token_loss, None
    if run.teacher and step < run.teacher.last_step:
        teacher = load_teacher(run.teacher, run.plan, dist.device)
        loss = DistillationLoss(run.teacher, teacher)
    training = make_step(run.plan, model if weights else model.to(dist.device), dist, loss, teacher, weights)
    if restored:
        training.optimizer.load_state_dict(restored.optimizer_state)
    training.materialise()
    return training
