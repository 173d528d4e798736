"""The flags of puzzle_train, and the plan that follows from them."""
from dataclasses import dataclass, field

import torch

from nanochat.common import BadInput, flag, get_base_dir, read_flags
from nanochat.model.rates import AdamW, Rules
from nanochat.puzzles import trm
from nanochat.puzzles.trm import Block, TRMConfig
from nanochat.train.flags import MAX_STEPS, DeviceFlags, FlagGroups, RecordFlags, RunFlags, path_text

BETAS = (0.9, 0.95)
OTHERS = ("embedding", "prefix", "head", "halt", "halt_bias")  # parameters besides the stacks


@dataclass(frozen=True)
class PuzzleFlags:
    data_dir: str | None = flag(None, "folder of puzzles; default: $NANOCHAT_BASE_DIR/puzzles", of=path_text)
    num_iterations: int = flag(1000, "optimizer steps, which are supervision steps", at_least=1, at_most=MAX_STEPS)
    total_batch_size: int = flag(64, "puzzles in a step", at_least=1, at_most=2**20)
    supervision_steps: int = flag(16, "most steps of an episode; in evaluation, all", at_least=1, at_most=1000)
    explore: float = flag(0.1, "share of episodes with a random minimum of steps", at_least=0, at_most=1)
    loss: str = flag("stablemax", "stablemax or softmax", choices=("stablemax", "softmax"))
    eval_puzzles: int = flag(1024, "puzzles of an evaluation, at most", at_least=1, at_most=10**6)


@dataclass(frozen=True)
class RecursionFlags:
    hidden: int = flag(512, "width", at_least=2, at_most=2**16)
    layers: int = flag(2, "layers of the network", at_least=1, at_most=1000)
    heads: int = flag(8, "attention heads", at_least=1, at_most=2**10)
    mixer: str = flag("attention", "over the positions: attention or mlp", choices=("attention", "mlp"))
    recursions: int = flag(6, "updates of the latent in a cycle (n)", at_least=1, at_most=1000)
    cycles: int = flag(3, "cycles in a supervision step; the last has a gradient (T)", at_least=1, at_most=1000)
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
    final_lr_frac: float = flag(0.05, "final fraction of the learning rates", at_least=0, at_most=1)
    ema: float = flag(0.999, "decay of the averaged weights, which are evaluated", above=0, below=1)


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
    """See Task.plan (train/task.py)."""
    config: TRMConfig
    num_iterations: int
    total_batch_size: int
    dtype: torch.dtype
    shard_optimizer: bool
    device_type: str
    world_size: int
    unit = "puzzles"  # one for each supervision step of a puzzle
    kernel = "current"
    micro_steps = 1
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

    @property
    def stages(self):
        return ((0, self.num_iterations, "micro_step"),)

    def units(self, begin, end):
        return self.total_batch_size * (end - begin)

    def flops(self, begin, end):
        return self.flops_per_unit * self.units(begin, end)

    def describe(self, supervision_steps):
        """Returns lines for a person. supervision_steps: of an episode."""
        config = self.config
        dtype = str(self.dtype).removeprefix("torch.")
        lines = {
            "devices": f"{self.world_size} × {self.device_type}, {dtype} compute",
            "model": f"{config.layers} layers of {config.mixer}, width {config.hidden}, {config.positions} positions; "
                     f"{config.recursions} recursions × {config.cycles} cycles",
            "parameters": f"{sum(self.parameters.values()):,}",
            "batch": f"{self.total_batch_size:,} puzzles = {self.slots} × {self.world_size} devices, up to "
                     f"{supervision_steps} steps each",
            "horizon": f"{self.num_iterations:,} steps",
            "compute": f"{self.flops_per_unit:.3e} FLOPs per puzzle and step, {self.flops(0, self.num_iterations):.3e} "
                       "in all"}
        return [f"{name:>11}  {text}" for name, text in lines.items()]


def make_plan(flags, puzzles, device_type, world_size):
    """Returns the PuzzlePlan. Raises BadInput for flags that do not fit together. puzzles: the Puzzles to train on."""
    model = flags.model
    total = flags.puzzles.total_batch_size
    if total % world_size:
        below = max(total // world_size, 1) * world_size
        above = (total // world_size + 1) * world_size
        raise BadInput(f"--total_batch_size={total} does not divide by {world_size} devices: use {below} or {above}")
    if device_type == "cuda" and world_size > 1:
        raise BadInput(f"puzzles train on one GPU, not on {world_size}: start without torchrun")
    config = TRMConfig(puzzles.vocab_size, puzzles.side ** 2, model.hidden, model.layers, model.heads, model.mixer,
                       model.recursions, model.cycles, model.prefix)
    return PuzzlePlan(config, flags.puzzles.num_iterations, total, flags.devices.dtype_on(device_type),
                      flags.devices.is_sharded_on(device_type), device_type, world_size)


def atan2_step(lr, average, root):
    """Returns the step of AdamW-atan2 (arXiv 2407.05872), equal for gradients of any scale."""
    return lr * torch.atan2(average, root)


def make_rules(flags, plan):
    """Returns the Rules of the optimizer for UpdateFlags and a PuzzlePlan."""
    if flags.optimizer == "atan2":
        adam = dict.fromkeys((*Block._fields, *OTHERS), AdamW(flags.lr, flags.weight_decay, atan2_step))
        matrix_lr = 0.0
    else:
        adam = dict.fromkeys(OTHERS, AdamW(flags.lr))
        matrix_lr = flags.matrix_lr
    return Rules(adam, matrix_lr, 0.0, flags, plan.num_iterations, BETAS, average_decay=flags.ema,
                 matrix_dtype=plan.dtype)
