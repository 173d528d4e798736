"""The task of puzzle_train: a Tiny Recursive Model solves puzzles, supervision step by supervision step.

An optimizer step is one supervision step of every slot of the batch. What a slot's model has thought so far (y and z)
is carried to the next step, with the puzzle, until the episode ends; then the slot takes a new puzzle. All shapes are
fixed, and the device alone knows which slots are free.
"""
from dataclasses import asdict, dataclass, field, fields

import torch
import torch.nn.functional as F

from nanochat.checkpoint.meta import require_match, require_same_flags
from nanochat.checkpoint.pieces import state_bytes
from nanochat.common import BadInput, flag, get_base_dir, read_flags
from nanochat.device.collectives import all_reduce_sum
from nanochat.device.programs import one_program
from nanochat.device.ranks import print0
from nanochat.model.optim import AdamW, MuonAdamW, Rules
from nanochat.puzzles import trm
from nanochat.puzzles.puzzle_data import PuzzleFeed, read_puzzles
from nanochat.puzzles.trm import TRM, Block, TRMConfig
from nanochat.train.flags import MAX_STEPS, DeviceFlags, FlagGroups, RecordFlags, RunFlags, path_text
from nanochat.train.step import TrainingStep
from nanochat.train.task import Event

SUMS = ("loss", "cell_loss", "halt_loss", "exact", "halted", "episode_steps")


@dataclass(frozen=True)
class PuzzleFlags:
    data_dir: str | None = flag(None, "folder of puzzles; default: $NANOCHAT_BASE_DIR/puzzles", of=path_text)
    num_iterations: int = flag(1000, "optimizer steps, which are supervision steps", at_least=1, at_most=MAX_STEPS)
    total_batch_size: int = flag(64, "puzzles in a step", at_least=1, at_most=2**20)
    supervision_steps: int = flag(16, "supervision steps of an episode, at most; in evaluation, exactly", at_least=1,
                                  at_most=1000)
    explore: float = flag(0.1, "share of the episodes that go on for a random number of steps, whatever the model "
                          "thinks of its answer", at_least=0, at_most=1)
    loss: str = flag("stablemax", "stablemax or softmax", choices=("stablemax", "softmax"))
    eval_puzzles: int = flag(1024, "puzzles of an evaluation, at most", at_least=1, at_most=10**6)


@dataclass(frozen=True)
class RecursionFlags:
    hidden: int = flag(512, "width", at_least=2, at_most=2**16)
    layers: int = flag(2, "layers of the network", at_least=1, at_most=1000)
    heads: int = flag(8, "attention heads", at_least=1, at_most=2**10)
    mixer: str = flag("attention", "how positions see each other: attention, or mlp", choices=("attention", "mlp"))
    recursions: int = flag(6, "updates of the latent in a cycle (n)", at_least=1, at_most=1000)
    cycles: int = flag(3, "cycles in a supervision step, of which the last has a gradient (T)", at_least=1,
                       at_most=1000)
    prefix: int = flag(16, "learned positions before the cells", at_least=1, at_most=1000)


@dataclass(frozen=True)
class UpdateFlags:
    optimizer: str = flag("atan2", "atan2: AdamW-atan2 for all; muon: Muon for the matrices, AdamW for the others",
                          choices=("atan2", "muon"))
    lr: float = flag(1e-4, "learning rate of AdamW", at_least=0)
    matrix_lr: float = flag(0.02, "learning rate of Muon", at_least=0)
    weight_decay: float = flag(1.0, "weight decay of AdamW-atan2", at_least=0)
    warmup_steps: int = flag(2000, "steps in which the learning rates rise", at_least=0)
    warmdown_ratio: float = flag(0.0, "fraction of the run in which the learning rates fall", at_least=0, at_most=1)
    final_lr_frac: float = flag(0.05, "fraction of the learning rates that is left at the end", at_least=0, at_most=1)
    ema: float = flag(0.999, "decay of the running average of the weights, which is evaluated", above=0, below=1)


TITLES = {RunFlags: "run", DeviceFlags: "devices", PuzzleFlags: "puzzles", RecursionFlags: "model",
          UpdateFlags: "optimizer", RecordFlags: "evaluation, samples, checkpoints, logs"}


@dataclass(frozen=True)
class Flags(FlagGroups):
    run: RunFlags = field(default_factory=RunFlags)
    devices: DeviceFlags = field(default_factory=DeviceFlags)
    puzzles: PuzzleFlags = field(default_factory=PuzzleFlags)
    model: RecursionFlags = field(default_factory=RecursionFlags)
    optimizer: UpdateFlags = field(default_factory=UpdateFlags)
    record: RecordFlags = field(default_factory=RecordFlags)

    @property
    def data_dir(self):
        return self.puzzles.data_dir or str(get_base_dir() / "puzzles")


def parse_flags(argv=None, description=None):
    """Returns the Flags on a command line. Raises BadInput."""
    return Flags(*read_flags(argv, description, TITLES))


@dataclass(frozen=True)
class PuzzlePlan:
    config: TRMConfig
    num_iterations: int
    total_batch_size: int
    dtype: torch.dtype
    shard_optimizer: bool
    device_type: str
    world_size: int
    unit = "puzzles"  # each supervision step of a puzzle counts
    kernel = "current"
    all_micro_steps = (1,)
    switches = ()

    @property
    def slots(self):
        """Slots of a rank."""
        return self.total_batch_size // self.world_size

    @property
    def parameters(self):
        return trm.parameters_by_group(self.config)

    @property
    def flops_per_unit(self):
        return trm.flops_per_puzzle(self.config)

    def micro_steps(self, step):
        return 1

    def batch_growth(self, step):
        return 1.0

    def flops(self, begin, end):
        return self.flops_per_unit * self.units(begin, end)

    @property
    def stages(self):
        return ((0, self.num_iterations, "micro_step"),)

    def units(self, begin, end):
        return self.total_batch_size * (end - begin)


def make_plan(flags, puzzles, device_type, world_size):
    """Returns the PuzzlePlan. Raises BadInput for flags that do not fit together. puzzles: the Puzzles to train on."""
    model, total = flags.model, flags.puzzles.total_batch_size
    if total % world_size:
        raise BadInput(f"--total_batch_size={total} puzzles do not divide by {world_size} devices: use "
                       f"{max(total // world_size, 1) * world_size} or {(total // world_size + 1) * world_size}")
    if device_type == "cuda" and world_size > 1:
        raise BadInput(f"puzzles train on one GPU, and here are {world_size}: start it without torchrun")
    config = TRMConfig(puzzles.vocab_size, puzzles.side ** 2, model.hidden, model.layers, model.heads, model.mixer,
                       model.recursions, model.cycles, model.prefix, puzzles.tasks)
    is_xla = device_type in ("tpu", "xla")
    if flags.devices.shard_optimizer == "on" and not is_xla:
        raise BadInput(f"--shard_optimizer=on, but this runs on {device_type}: it is for XLA devices, use auto")
    dtype = flags.devices.compute_dtype
    dtype = ("bfloat16" if device_type in ("tpu", "cuda") else "float32") if dtype == "auto" else dtype
    return PuzzlePlan(config, flags.puzzles.num_iterations, total, getattr(torch, dtype),
                      is_xla and flags.devices.shard_optimizer != "off", device_type, world_size)


def make_rules(flags):
    """Returns the Rules of the optimizer for UpdateFlags."""
    others = ("embedding", "prefix", "task_vectors", "head", "halt", "halt_bias")
    if flags.optimizer == "atan2":
        every = AdamW(flags.lr, flags.weight_decay, is_atan2=True)
        return Rules(dict.fromkeys((*Block._fields, *others), every), 0.0, 0.0, betas=(0.9, 0.95), ema_decay=flags.ema)
    return Rules(dict.fromkeys(others, AdamW(flags.lr)), flags.matrix_lr, 0.0, betas=(0.9, 0.95), ema_decay=flags.ema)


class EpisodeLoss:
    """One supervision step of all slots: returns their mean losses, and leaves the state of the episodes in `carry`."""

    def __init__(self, plan, flags, model, device):
        """flags: PuzzleFlags; model: the TRM, for the dtype of its state."""
        config, slots = plan.config, plan.slots
        self.max_steps, self.is_stablemax = flags.supervision_steps, flags.loss == "stablemax"

        def whole_numbers(*shape):
            return torch.zeros(slots, *shape, dtype=torch.int32, device=device)

        state = torch.zeros(slots, config.positions, config.hidden, dtype=model.compute_dtype, device=device)
        self.carry = {
            "y": state, "z": state.clone(), "puzzle": whole_numbers(config.cells + (config.tasks > 0)),
            "solution": whole_numbers(config.cells), "min_steps": whole_numbers(), "steps": whole_numbers(),
            "is_free": whole_numbers() + 1}

    def __call__(self, model, puzzle, solution, min_steps):
        old = self.carry
        is_free = old["is_free"] > 0
        puzzle, solution = (torch.where(is_free[:, None], new, old[name])
                            for name, new in (("puzzle", puzzle), ("solution", solution)))
        min_steps = torch.where(is_free, min_steps, old["min_steps"])
        steps = torch.where(is_free, 0, old["steps"]) + 1
        y, z = (torch.where(is_free[:, None, None], start, old[name])
                for name, start in zip("yz", model.starts(len(puzzle)), strict=True))
        y, z, logits, halt = model(puzzle, y, z)
        is_right = (logits.argmax(-1) == solution).all(-1)
        cell_loss = trm.cross_entropy(logits, solution, self.is_stablemax).mean(-1)  # (slots,)
        halt_loss = F.binary_cross_entropy_with_logits(halt, is_right.float(), reduction="none")
        loss = cell_loss + 0.5 * halt_loss
        ends = (steps >= self.max_steps) | ((halt > 0) & (steps >= min_steps)) | ~loss.detach().isfinite()
        new = {"y": y.detach(), "z": z.detach(), "puzzle": puzzle, "solution": solution, "min_steps": min_steps,
               "steps": steps, "is_free": ends.int()}
        for name, tensor in self.carry.items():
            tensor.copy_(new[name])
        return {"loss": loss.mean(), "cell_loss": cell_loss.mean(), "halt_loss": halt_loss.mean(),
                "exact": is_right.float().mean(), "halted": ends.float().mean(), "episode_steps": steps.float().mean()}


@dataclass(frozen=True)
class PuzzleTask:
    """See Task (task.py), which says what each method is for."""
    flags: Flags
    plan: PuzzlePlan
    data_fingerprint: str  # of the training puzzles
    name = "puzzles"
    # Supervision steps of puzzles a second, and the shares of the puzzles of the last steps, of held-out ones and of
    # their cells that are solved.
    console = {"puzzles_per_s": "{:,.0f} puzzles/s", "exact": "{:.1%} solved",
               "val_exact": "{:.1%} of the held-out puzzles solved", "val_cells": "{:.1%} of their cells"}
    num_lanes = 0
    changing_flags = tuple(field.name for group in (PuzzleFlags, UpdateFlags) for field in fields(group)
                           if field.name != "data_dir")

    def describe(self):
        plan, config = self.plan, self.plan.config
        lines = {
            "devices": f"{plan.world_size} × {plan.device_type}, {str(plan.dtype).removeprefix('torch.')} compute",
            "model": f"{config.layers} layers of {config.mixer}, width {config.hidden}, {config.positions} positions; "
                     f"{config.recursions} recursions × {config.cycles} cycles",
            "parameters": f"{sum(plan.parameters.values()):,}",
            "batch": f"{plan.total_batch_size:,} puzzles = {plan.slots} × {plan.world_size} devices, up to "
                     f"{self.flags.puzzles.supervision_steps} steps each",
            "horizon": f"{plan.num_iterations:,} steps",
            "compute": f"{plan.flops_per_unit:.3e} FLOPs per puzzle and step, "
                       f"{plan.flops_per_unit * plan.units(0, plan.num_iterations):.3e} in all"}
        return [f"{name:>11}  {text}" for name, text in lines.items()]

    def identity(self):
        return {"config": asdict(self.plan.config), "tokenizer_sha256": "",
                "batch_schedule": ((0, self.plan.total_batch_size),)}

    def resumed(self, path, meta):
        require_match(path, meta, config=None, tokenizer_sha256=None, data_fingerprint=self.data_fingerprint)
        require_match(path, meta, config=asdict(self.plan.config), tokenizer_sha256=None, data_fingerprint=None)
        now = self.flags.as_dict()  # the carry and the optimizer's state are of these
        require_same_flags(path, meta, {name: now[name] for name in ("total_batch_size", "optimizer", "seed")})
        return self

    def state_bytes(self):
        with torch.device("meta"):
            optimizer, loss = self.make_training(TRM(self.plan.config, self.plan.dtype), "meta")
        return state_bytes(optimizer.masters, optimizer.state, loss.carry)

    def make_training(self, model, device, dist=None):
        """Returns the optimizer and the EpisodeLoss for a model on `device`."""
        plan = self.plan
        optimizer = MuonAdamW(model, self.flags.optimizer, plan.total_batch_size, plan.num_iterations, plan.dtype, dist,
                              plan.shard_optimizer, make_rules(self.flags.optimizer))
        return optimizer, EpisodeLoss(plan, self.flags.puzzles, model, device)

    def make_step(self, model, dist):
        """Returns the TrainingStep for a model on the device of `dist`."""
        optimizer, loss = self.make_training(model, dist.device, dist)
        use_compile = dist.device_type == "cuda" and not self.flags.devices.no_compile
        return TrainingStep(model, optimizer, loss, dist, sum_names=SUMS, carry=loss.carry, use_compile=use_compile)

    def open_batches(self, dist, step, lane_states=None):
        flags = self.flags.puzzles
        return PuzzleFeed(read_puzzles(self.flags.data_dir, "train"), dist, step, seed=self.flags.run.seed,
                          total_batch_size=self.plan.total_batch_size, explore=flags.explore,
                          max_steps=flags.supervision_steps)

    def restore_training(self, dist, step, restored=None):
        model = TRM(self.plan.config, self.plan.dtype).init_weights(self.flags.run.seed)
        if restored:
            model.load_state_dict(restored.model_state, strict=False)  # the buffers are drawn from the seed
        training = self.make_step(model.to(dist.device), dist)
        if restored:
            training.load_state(restored.optimizer_state)
        training.materialise()
        return training

    def before_step(self, training, step):
        pass

    # What happens between two steps

    def events(self):
        record = self.flags.record
        return (Event("evaluate", record.eval_every, True, self.evaluate),
                Event("sample", record.sample_every, False, self.sample))

    def evaluate(self, training, dist, step, is_cut_short):
        """Returns the share of held-out puzzles that are solved after 1, 4, … supervision steps, with the averaged
        weights, and the share of cells that are right."""
        puzzles = read_puzzles(self.flags.data_dir, "val")
        with training.optimizer.averaged_weights():
            return self.solve_held_out(training.model, puzzles, dist, is_cut_short)

    @torch.no_grad()
    def solve_held_out(self, model, puzzles, dist, is_cut_short):
        """Returns the metrics of `evaluate` for the weights that the model has."""
        number = min(self.flags.puzzles.eval_puzzles, len(puzzles.puzzles))
        max_steps, slots = self.flags.puzzles.supervision_steps, self.plan.slots
        exact = [torch.zeros((), device=dist.device) for _ in range(max_steps)]
        cells = torch.zeros((), device=dist.device)
        for begin in range(0, number, slots * dist.world_size):
            if is_cut_short():
                return {}
            rows = begin + dist.rank + dist.world_size * torch.arange(slots)
            counts = (rows < number).float().to(dist.device)
            rows = rows.clamp(max=number - 1)
            puzzle, solution = (torch.from_numpy(grid[rows.numpy()]).int().to(dist.device)
                                for grid in (puzzles.puzzles, puzzles.solutions))
            with one_program(dist, "evaluate starts"):
                y, z = (start.clone() for start in model.starts(slots))
            for step in range(max_steps):
                with one_program(dist, "evaluate"):
                    y, z, logits, _ = model(puzzle, y, z)
                    is_right = (logits.argmax(-1) == solution).float()
                    exact[step] += (is_right.amin(-1) * counts).sum()
                    if step == max_steps - 1:
                        cells += (is_right.mean(-1) * counts).sum()
        with one_program(dist, "evaluate_reduce", collective=True):
            all_reduce_sum([*exact, cells], dist)
        shares = [total.item() / number for total in exact]
        shown = {2**k for k in range(0, 10, 2)} & set(range(1, max_steps))
        return {"val_exact": shares[-1], "val_cells": cells.item() / number, "val_puzzles": number,
                **{f"val_exact_{steps}": shares[steps - 1] for steps in sorted(shown)}}

    @torch.no_grad()
    def sample(self, training, dist, step, is_cut_short):
        """Prints a held-out puzzle after each of some supervision steps. Every rank solves it."""
        puzzles = read_puzzles(self.flags.data_dir, "val")
        with training.optimizer.averaged_weights():
            answers = solve(training.model, puzzles.puzzles[:1], self.flags.puzzles.supervision_steps, dist)
        shown = sorted({0, min(3, len(answers) - 1), len(answers) - 1})
        grids = [puzzles.text(puzzles.puzzles[0]), *(puzzles.text(answers[at][0]) for at in shown)]
        print0(f"--- a held-out puzzle at step {step}, then after {', '.join(str(at + 1) for at in shown)} supervision "
               f"steps: {'solved' if (answers[-1] == puzzles.solutions[:1]).all() else 'not solved'}")
        print0("\n".join("   ".join(lines) for lines in zip(*grids, strict=True)))
        return {}


@torch.no_grad()
def solve(model, puzzles, steps, dist):
    """Returns the answers to puzzles, int (N, cells), after each of `steps` supervision steps, as a list of arrays of
    that shape. model: a TRM on the device of `dist`."""
    puzzle = torch.from_numpy(puzzles).int().to(dist.device)
    with one_program(dist, f"solve starts {len(puzzles)}"):
        y, z = (start.clone() for start in model.starts(len(puzzles)))
    answers = []
    for _ in range(steps):
        with one_program(dist, f"solve {len(puzzles)}"):
            y, z, logits, _ = model(puzzle, y, z)
            answers.append(logits.argmax(-1))
    return [answer.cpu().numpy() for answer in answers]


def make_task(flags, device_type, world_size, directory):
    """Returns the PuzzleTask for puzzle_train's Flags. Raises BadInput for anything that can be refused now."""
    puzzles, held_out = (read_puzzles(flags.data_dir, split) for split in ("train", "val"))
    if (puzzles.kind, puzzles.shape, puzzles.tasks) != (held_out.kind, held_out.shape, held_out.tasks):
        raise BadInput(f"--data_dir={flags.data_dir}: train.parquet and val.parquet are of different puzzles: make "
                       "them again with python3 -m scripts.prepare_puzzles")
    return PuzzleTask(flags, make_plan(flags, puzzles, device_type, world_size), puzzles.fingerprint)
