"""The task of base_train: predict the next token of C++.

It brings together the flags (flags.py), the plan (plan.py), micro-batches of rows (row_feed.py), the model, its
optimizer and the loss. The trainer (trainer.py) calls LanguageTask through the interface in task.py; make_task, at the
end, makes one from the flags. evaluation.py has what it does between two steps.
"""
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import torch

from nanochat.checkpoint.meta import read_language_config
from nanochat.checkpoint.on_disk import SOURCE
from nanochat.checkpoint.pieces import state_bytes
from nanochat.common import BadInput
from nanochat.data.fim import Infilling, check_fim
from nanochat.data.loader import DataLoader, RankRows, SyntheticLoader
from nanochat.data.mixture import MixtureLoader, open_mixture, read_mixture
from nanochat.data.shards import open_text
from nanochat.data.tokenizer import Tokenizer
from nanochat.kernels.choose import get_kernels
from nanochat.kernels.sharded import Sharding
from nanochat.model.decoder import initial_weights
from nanochat.model.models import require_as_saved
from nanochat.model.optim import MuonAdamW
from nanochat.model.parts import Parts
from nanochat.train.describe import describe_plan, require_time
from nanochat.train.evaluation import evaluate, sample
from nanochat.train.flags import Flags
from nanochat.train.plan import Plan, make_plan
from nanochat.train.row_feed import RowFeed
from nanochat.train.start import StartingPoint, find_beginning, require_same_rows, run_tokenizer, saved_meta
from nanochat.train.step import Objective, TrainingStep
from nanochat.train.task import Event
from nanochat.train.teacher import DistillationLoss, Teacher, find_teacher, load_teacher
from nanochat.train.text import check_data, stage_rows

EVAL_TOKENS = (2**16, 10 * 2**20)  # the fewest and the most, unless --eval_tokens is given


def next_token_loss(model, carry, rows):
    """Returns {"loss": the mean loss in nats per token} of rows (B, T + 1), and the carry."""
    return {"loss": model(rows[:, :-1], rows[:, 1:], reduction="mean")}, carry


NEXT_TOKEN = Objective(next_token_loss)


def make_model(plan):
    """Returns a Plan's model, on torch's default device and without initial weights."""
    sharding = Sharding.of_mesh(plan.mesh, plan.config.vocab_size)
    kernels = get_kernels(plan.kernel, plan.device_type, sharding, products=plan.products)
    return plan.config.new_model(kernels, plan.dtype, plan.activation_checkpointing)


def make_optimizer(plan, model, dist=None, weights=None):
    """Returns the MuonAdamW of a Plan. dist, weights: see there."""
    parts = None
    if plan.shard_optimizer and dist and dist.world_size > 1:
        parts = Parts(dist, plan.mesh)
    return MuonAdamW(model, plan.rules, dist, parts, weights)


def make_step(plan, model, dist, objective=NEXT_TOKEN, weights=None):
    """Returns the TrainingStep of a Plan. The model's weights are on the device of `dist`, or come from `weights` (see
    MuonAdamW)."""
    optimizer = make_optimizer(plan, model, dist, weights)
    return TrainingStep(model, optimizer, objective, dist, plan.micro_steps, use_compile=plan.use_compile)


@dataclass(frozen=True)
class LanguageTask:
    """The Task (task.py) of base_train."""
    flags: Flags
    plan: Plan
    tokenizer: Tokenizer
    teacher: Teacher | None
    data_fingerprint: str | None  # None for synthetic data
    about_data: tuple = ()  # lines, in the format of describe_plan
    start: StartingPoint | None = None  # of a run that has not begun yet
    validation_sets: dict = field(default_factory=dict)  # as in DataFlags; read once: a mixture may be edited later
    mixture_names: tuple = ()  # of its sources
    origin_of_weights: dict = field(default_factory=dict)  # of a public model: see Meta.source
    source_zip: Path | None = None  # see Task
    name = "language"

    @property
    def num_lanes(self):
        return self.flags.data.num_lanes

    @property
    def console(self):
        found = {f"val_bpb_{name}": f"{name} {{:.4f}}" for name in self.validation_sets if name}
        return found | {f"tokens_{name}": f"{name} {{:,.0f}} tokens" for name in self.mixture_names}

    @property
    def to_use_it(self):
        return f"; python3 -m scripts.generate --checkpoint={self.flags.run.run} --prompt='int main(' completes with it"

    @property
    def origin(self):
        return self.start.digest if self.start else None

    def describe(self):
        lines = describe_plan(self.plan, self.tokenizer)
        if self.flags.data.fim_rate and self.tokenizer.lent:
            meanings = [f"{theirs} means {ours}" for ours, theirs in self.tokenizer.lent.items()]
            lines.append(f"       gaps  the tokenizer has no tokens for them, so {', '.join(meanings)}")
        lines += self.about_data
        if self.teacher:
            lines.append(self.teacher.describe())
        if self.start:
            lines.append(self.start.describe())
        return lines

    def identity(self):
        return {"config": asdict(self.plan.config), "tokenizer_sha256": self.tokenizer.sha256,
                "total_batch_size": self.plan.total_batch_size, "source": self.origin_of_weights}

    def state_bytes(self):
        with torch.device("meta"):  # shapes without memory
            optimizer = make_optimizer(self.plan, self.plan.config.new_model(kernels=None))
        return state_bytes(optimizer.masters, optimizer.state)

    # Data

    def open_batches(self, dist, step, lane_states=None):
        plan = self.plan
        # The lanes' states fit rows of any length, so it may change at this step. They name that of the step before,
        # which must still be the plan's: the loader compares it.
        rows = self.rank_rows(dist, batch_size=plan.rows(step), seq_len=plan.seq_len(step), seed=self.flags.run.seed,
                          seq_len_before=plan.seq_len(max(step - 1, 0)))
        data = self.flags.data
        if data.mixture:
            loader = self._open_mixture(rows, step, lane_states)
        else:
            loader = self.open_rows("train", data, rows, data.fim_rate, state=lane_states)
        if self.data_fingerprint not in (None, loader.fingerprint):  # a bucket is listed again in this process
            loader.close()
            raise BadInput(f"{data.data_dir}: the shards have changed since this command started: start it again")
        return RowFeed(loader, plan, step, dist.rank)

    def rank_rows(self, dist, **options):
        # Chips along the axis tensor read the same rows: together they are one of its readers.
        mesh = self.plan.mesh
        return RankRows(reader=mesh.reader(dist.rank), readers=mesh.readers, num_lanes=self.num_lanes, **options)

    def _open_mixture(self, rows, step, lane_states):
        data = self.flags.data
        mixture = open_mixture(data)
        infilling = Infilling(data.fim_rate, rows.seed) if data.fim_rate else None
        return MixtureLoader(mixture, self.tokenizer, rows, stage_rows(mixture, self.plan, step, lane_states),
                             state=lane_states, infilling=infilling)

    def open_rows(self, split, data, rows, fim_rate, **options):
        if data.synthetic_data:
            return SyntheticLoader(self.tokenizer.n_vocab, rows, **options)
        infilling = Infilling(fim_rate, rows.seed) if fim_rate else None
        return DataLoader(open_text(data, split), self.tokenizer, rows, infilling=infilling, **options)

    # The training step

    def restore_training(self, dist, step, restored=None):
        plan = self.plan
        weights = state = None
        if restored:
            weights = restored.model_state
            state = restored.optimizer_state
        elif self.start:
            weights, state = self.start.load()
        objective = NEXT_TOKEN
        if self.teacher:
            teacher = load_teacher(self.teacher, plan, dist)
            objective = Objective(DistillationLoss(self.teacher, teacher), teacher=teacher)
        model = make_model(plan)
        if plan.mesh.divides_weights:  # in slices: the whole model may not fit into a device
            training = make_step(plan, model, dist, objective, self._slices(weights))
        else:
            if weights:
                model.load_state_dict(weights)
            else:
                model.init_weights(self.flags.run.seed)
            training = make_step(plan, model.to(dist.device), dist, objective)
        if state:
            training.load_state(state)
        # A pending buffer would become part of the first micro-step's program, and the second would compile another.
        # Longer rows are rehearsed: the run must not compile, or run out of memory, in the middle.
        training.materialise()
        if plan.switches and plan.device_type != "cpu":
            training.rehearse(self._empty_batches(step))
        return training

    def _slices(self, weights):
        """Returns an iterator of (name, index, tensor) over the weights, {name: tensor}, or over initial ones."""
        if not weights:
            return initial_weights(self.plan.config, self.flags.run.seed)
        return ((name, None, tensor) for name, tensor in weights.items())

    def _empty_batches(self, step):
        """Returns {name of the micro-step: its batch} of the stages of the run that end after `step`."""
        batches = {}
        for first, last, name in self.plan.stages:
            if last > step:
                shape = self.plan.rows(first), self.plan.seq_len(first) + 1
                batches[name] = {"rows": torch.zeros(shape, dtype=torch.int32)}
        return batches

    def before_step(self, training, step):
        if self.plan.switches:
            training.micro_step_name = self.plan.micro_step_name(step)

    # What happens between two steps

    def events(self):
        record = self.flags.record
        found = [Event("evaluate", record.eval_every, partial(evaluate, self), is_due_at_start=True)]
        if not self.plan.mesh.divides_weights:  # samples need whole weights: generate makes them of a checkpoint
            found.append(Event("sample", record.sample_every, partial(sample, self)))
        return found


# The commits of data on the Hub are looked up first, then what the run begins with, then its plan. All of it goes into
# the flags, so that a resumed run has the same.
def make_task(flags, device_type, world_size, directory, checkpoint=None):
    """Returns the LanguageTask for base_train's Flags. Raises BadInput.

    directory: of the run; checkpoint: the path of its own, from which it resumes, or None.
    """
    if flags.data.mixture:
        read_mixture(flags.data.mixture)  # refuses wrong names and weights before any work
    asked = asdict(flags.model)
    saved = saved_meta(checkpoint, "language")
    tokenizer = run_tokenizer(flags)
    if saved:
        require_as_saved(asked, read_language_config(checkpoint, saved), checkpoint)
    flags, start = find_beginning(flags.at_commits(saved.flags if saved else {}), saved, tokenizer, directory)
    plan = make_plan(flags, tokenizer.n_vocab, device_type, world_size, saved)
    flags = flags.settled(plan.config)
    if not saved:
        require_time(plan, flags.batch.num_iterations)
    data_fingerprint, about_data = check_data(flags)
    if saved:
        require_same_rows(checkpoint, saved, flags, tokenizer, data_fingerprint)
    teacher = find_teacher(flags, plan, tokenizer, directory)
    if flags.data.fim_rate:
        check_fim(f"--fim_rate={flags.data.fim_rate:g}", tokenizer, plan.config.max_seq_len)
    flags = flags.replace(eval_tokens=_eval_tokens(flags.record.eval_tokens, plan),
                          teacher=str(teacher.path) if teacher else "")
    begun_with = checkpoint or (start.path if start else None)
    origin_of_weights = (saved or start.meta).source if begun_with else {}
    source_zip = begun_with / SOURCE if origin_of_weights else None
    return LanguageTask(flags, plan, tokenizer, teacher, data_fingerprint, about_data, start,
                        flags.data.validation_sets(), flags.data.source_names(), origin_of_weights, source_zip)


def _eval_tokens(asked, plan):
    """Returns the tokens of an evaluation. asked: --eval_tokens."""
    if asked != -1:
        return asked
    fewest, most = EVAL_TOKENS
    return min(max(plan.tokens(0, plan.num_iterations) // 20, fewest), most)
