"""The task of puzzle_train: a Tiny Recursive Model solves puzzles, supervision step by supervision step.

An optimizer step is one supervision step of every slot of the batch. A slot carries y, z and its puzzle to the next
step until the episode ends; then it takes a new puzzle. All shapes are fixed, and only the device knows which slots are
free.
"""
from dataclasses import asdict, dataclass

import torch

from nanochat.checkpoint.meta import require_same
from nanochat.checkpoint.pieces import state_bytes
from nanochat.device.mesh import Mesh
from nanochat.device.ranks import print0
from nanochat.model.optim import MuonAdamW
from nanochat.model.parts import Parts
from nanochat.puzzles.episodes import LOSSES, EpisodeLoss, empty_carry, solve, solve_held_out
from nanochat.puzzles.flags import Flags
from nanochat.puzzles.plan import PuzzlePlan, make_plan, make_rules
from nanochat.puzzles.puzzle_data import PuzzleFeed, Puzzles, read_puzzles
from nanochat.puzzles.trm import TRM
from nanochat.train.start import saved_meta
from nanochat.train.step import Objective, TrainingStep
from nanochat.train.task import Event


@dataclass(frozen=True)
class PuzzleTask:
    """See Task (train/task.py), which explains the methods."""
    flags: Flags
    plan: PuzzlePlan
    data_fingerprint: str  # of the training puzzles
    held_out: Puzzles  # in memory: no evaluation can fail to read them
    name = "puzzles"
    # Supervision steps of puzzles a second, and the solved shares: of the last steps' puzzles, of held-out ones, and of
    # their cells.
    console = {"puzzles_per_s": "{:,.0f} puzzles/s", "exact": "{:.1%} solved",
               "val_exact": "{:.1%} of the held-out puzzles solved", "val_cells": "{:.1%} of their cells"}
    num_lanes = 0
    to_use_it = ""
    origin = source_zip = None

    def describe(self):
        return self.plan.describe(self.flags.puzzles.supervision_steps)

    def identity(self):
        return {"config": asdict(self.plan.config), "tokenizer_sha256": "",
                "total_batch_size": self.plan.total_batch_size}

    def state_bytes(self):
        with torch.device("meta"):
            optimizer = self._make_optimizer(TRM(self.plan.config, self.plan.dtype))
            carry = self._empty_carry("meta")
        return state_bytes(optimizer.masters, optimizer.state, carry)

    def open_batches(self, dist, step, lane_states=None):
        flags = self.flags.puzzles
        return PuzzleFeed(read_puzzles(self.flags.data_dir, "train"), dist, step, seed=self.flags.run.seed,
                          total_batch_size=self.plan.total_batch_size, explore=flags.explore,
                          max_steps=flags.supervision_steps)

    def _make_optimizer(self, model, dist=None):
        parts = None
        if self.plan.shard_optimizer and dist and dist.world_size > 1:
            parts = Parts(dist, Mesh(data=dist.world_size))
        return MuonAdamW(model, make_rules(self.flags.optimizer, self.plan), dist, parts)

    def _empty_carry(self, device):
        return empty_carry(self.plan.config, self.plan.slots, self.plan.dtype, device)

    def make_step(self, model, dist):
        """Returns the TrainingStep for a model on the device of `dist`."""
        flags = self.flags.puzzles
        objective = Objective(EpisodeLoss(flags.supervision_steps), LOSSES)
        use_compile = dist.device_type == "cuda" and not self.flags.devices.no_compile
        return TrainingStep(model, self._make_optimizer(model, dist), objective, dist,
                            carry=self._empty_carry(dist.device), use_compile=use_compile)

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

    def events(self):
        record = self.flags.record
        return (Event("evaluate", record.eval_every, self.evaluate, is_due_at_start=True),
                Event("sample", record.sample_every, self.sample))

    def evaluate(self, training, dist, step, is_cut_short):
        """Returns the metrics of solve_held_out for the averaged weights."""
        flags = self.flags.puzzles
        with training.optimizer.averaged_weights():
            return solve_held_out(training.model, self.held_out, dist, self.plan, flags.supervision_steps,
                                  flags.eval_puzzles, is_cut_short)

    @torch.no_grad()
    def sample(self, training, dist, step, is_cut_short):
        """Prints a held-out puzzle after each of some supervision steps. Every rank solves it."""
        puzzles = self.held_out
        with training.optimizer.averaged_weights():
            answers = solve(training.model, puzzles.puzzles[:1], self.flags.puzzles.supervision_steps, dist)
        last = len(answers) - 1
        shown = sorted({0, min(3, last), last})
        is_solved = (answers[last] == puzzles.solutions[:1]).all()
        print0(f"--- a held-out puzzle at step {step}, then after {', '.join(str(at + 1) for at in shown)} supervision "
               f"steps: {'solved' if is_solved else 'not solved'}")
        grids = [puzzles.text(puzzles.puzzles[0]), *(puzzles.text(answers[at][0]) for at in shown)]
        print0("\n".join("   ".join(lines) for lines in zip(*grids, strict=True)))
        return {}


def make_task(flags, device_type, world_size, directory, checkpoint=None):
    """Returns the PuzzleTask for puzzle_train's Flags. Raises BadInput for anything that can be refused now."""
    puzzles = read_puzzles(flags.data_dir, "train")
    held_out = read_puzzles(flags.data_dir, "val")
    plan = make_plan(flags, puzzles, device_type, world_size)
    saved = saved_meta(checkpoint, PuzzleTask.name)
    if saved:
        # The data comes first: with another vocabulary, a message about the config would hide the reason.
        require_same(checkpoint, {"the hash of --data_dir": (saved.data_fingerprint, puzzles.fingerprint)})
        for name, value in asdict(plan.config).items():
            require_same(checkpoint, {f"the model's {name}": (saved.config.get(name), value)})
        now = flags.as_dict()
        for name in ("total_batch_size", "seed"):  # on which the carry and the optimizer's state depend
            require_same(checkpoint, {f"--{name}": (saved.flags.get(name), now[name])})
        # What older versions had, too.
        require_same(checkpoint, {"--mixer": (saved.config.get("mixer", "mlp"), "mlp"),
                                  "--optimizer": (saved.flags.get("optimizer", "muon"), "muon")})
    return PuzzleTask(flags, plan, puzzles.fingerprint, held_out)
