"""Episodes: the model solves puzzles supervision step by supervision step, in training and in evaluation."""
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from nanochat.device.collectives import all_reduce_sum
from nanochat.device.programs import one_program

LOSSES = ("loss", "cell_loss", "halt_loss", "exact", "halted", "episode_steps")  # of EpisodeLoss


def empty_carry(config, slots, dtype, device):
    """Returns the state of the episodes of so many free slots, {name: tensor (slots, …)}. dtype: of y and z."""
    def whole_numbers(*shape):
        return torch.zeros(slots, *shape, dtype=torch.int32, device=device)

    state = torch.zeros(slots, config.positions, config.hidden, dtype=dtype, device=device)
    return {"y": state, "z": state.clone(), "puzzle": whole_numbers(config.cells),
            "solution": whole_numbers(config.cells), "min_steps": whole_numbers(), "steps": whole_numbers(),
            "is_free": whole_numbers() + 1}


@dataclass(frozen=True)
class EpisodeLoss:
    """One supervision step of all slots, as the loss of an Objective (train/step.py)."""
    max_steps: int  # of an episode

    def __call__(self, model, carry, puzzle, solution, min_steps):
        # The feed brings a new puzzle for every slot at every step; free slots take it. So all shapes are fixed, and
        # the host never asks which slots are free.
        is_free = carry["is_free"] > 0

        def begun(name, new):
            """Returns `new` for a free slot, and for the others what they carry."""
            return torch.where(is_free[(..., *[None] * (new.dim() - 1))], new, carry[name])

        puzzle = begun("puzzle", puzzle)
        solution = begun("solution", solution)
        min_steps = begun("min_steps", min_steps)
        steps = torch.where(is_free, 0, carry["steps"]) + 1
        first_y, first_z = model.starts(len(puzzle))
        y, z, logits, halt = model(puzzle, begun("y", first_y), begun("z", first_z))
        is_right = (logits.argmax(-1) == solution).all(-1)
        one_hot = F.one_hot(solution.long(), logits.size(-1)).to(logits.dtype)  # no gather, which would scatter back
        cell_loss = (logits.logsumexp(-1) - (logits * one_hot).sum(-1)).mean(-1)  # (slots,), in nats
        halt_loss = F.binary_cross_entropy_with_logits(halt, is_right.float(), reduction="none")
        loss = cell_loss + 0.5 * halt_loss
        # `halt` is a logit: above 0, the model thinks that the answer is probably right. A loss that is not finite also
        # ends the episode: the update skips it, but the slot would carry its y and z on.
        ends = (steps >= self.max_steps) | ((halt > 0) & (steps >= min_steps)) | ~loss.detach().isfinite()
        losses = {"loss": loss, "cell_loss": cell_loss, "halt_loss": halt_loss, "exact": is_right.float(),
                  "halted": ends.float(), "episode_steps": steps.float()}
        # No gradient flows into the supervision step before.
        carry = {"y": y.detach(), "z": z.detach(), "puzzle": puzzle, "solution": solution, "min_steps": min_steps,
                 "steps": steps, "is_free": ends.int()}
        return {name: values.mean() for name, values in losses.items()}, carry


@torch.no_grad()
def solve(model, puzzles, steps, dist):
    """Returns a list of the answers to puzzles, int (N, cells), after each of `steps` supervision steps."""
    puzzle = torch.from_numpy(puzzles).int().to(dist.device)
    # Computed first, so that y and z are plain buffers at every step, and all steps are one program.
    with one_program(dist, f"solve starts {len(puzzles)}"):
        y, z = (start.clone() for start in model.starts(len(puzzles)))
    answers = []
    for _ in range(steps):
        with one_program(dist, f"solve {len(puzzles)}"):
            y, z, logits, _ = model(puzzle, y, z)
            answers.append(logits.argmax(-1))
    return [answer.cpu().numpy() for answer in answers]


@torch.no_grad()
def solve_held_out(model, puzzles, dist, plan, steps, limit, is_cut_short):
    """Returns {metric: value}: the share of at most `limit` held-out puzzles that are solved after 1, 4, … of `steps`
    supervision steps, and the share of right cells; {} once is_cut_short() returns True. Every rank must call it."""
    number = min(limit, len(puzzles.puzzles))
    slots = plan.slots
    # The counts stay on the device until the end, so nothing waits between two batches. The ranks' rows interleave, and
    # all ranks run the same number of batches.
    exact = [torch.zeros((), device=dist.device) for _ in range(steps)]
    cells = torch.zeros((), device=dist.device)
    for begin in range(0, number, slots * dist.world_size):
        if is_cut_short():
            return {}
        rows = begin + dist.rank + dist.world_size * torch.arange(slots)
        counts = (rows < number).float().to(dist.device)  # the last batch is filled up
        rows = rows.clamp(max=number - 1).numpy()
        puzzle = torch.from_numpy(puzzles.puzzles[rows]).int().to(dist.device)
        solution = torch.from_numpy(puzzles.solutions[rows]).int().to(dist.device)
        with one_program(dist, "evaluate starts"):
            y, z = (start.clone() for start in model.starts(slots))
        for step in range(steps):
            with one_program(dist, "evaluate"):
                y, z, logits, _ = model(puzzle, y, z)
                is_right = (logits.argmax(-1) == solution).float()
                exact[step] += (is_right.amin(-1) * counts).sum()
                if step == steps - 1:
                    cells += (is_right.mean(-1) * counts).sum()
    with one_program(dist, "evaluate_reduce", collective=True):
        all_reduce_sum([*exact, cells], dist)
    shares = [total.item() / number for total in exact]
    found = {"val_exact": shares[-1], "val_cells": cells.item() / number, "val_puzzles": number}
    for after in (1, 4, 16, 64, 256):
        if after < steps:
            found[f"val_exact_{after}"] = shares[after - 1]
    return found
