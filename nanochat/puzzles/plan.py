"""The plan that follows from the flags of puzzle_train."""
from dataclasses import dataclass

import torch

from nanochat.common import BadInput
from nanochat.model.rates import AdamW, Rules
from nanochat.puzzles import trm
from nanochat.puzzles.trm import TRMConfig

BETAS = (0.9, 0.95)
OTHERS = ("embedding", "prefix", "head", "halt", "halt_bias")  # parameters besides the stacks


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
            "model": f"{config.layers} layers, width {config.hidden}, {config.positions} positions; "
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
    config = TRMConfig(puzzles.vocab_size, puzzles.side ** 2, **vars(model))
    return PuzzlePlan(config, flags.puzzles.num_iterations, total, flags.devices.dtype_on(device_type),
                      flags.devices.is_sharded_on(device_type), device_type, world_size)


def make_rules(flags, plan):
    """Returns the Rules of the optimizer for UpdateFlags and a PuzzlePlan."""
    return Rules(dict.fromkeys(OTHERS, AdamW(flags.lr)), flags.matrix_lr, 0.0, flags, plan.num_iterations, BETAS,
                 average_decay=flags.ema, matrix_dtype=plan.dtype)
