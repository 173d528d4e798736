"""The training step: the state on the device, and the two programs that change it.

    training = TrainingStep(model, optimizer, Objective(loss), dist)
    measured = training.run(batches, training.optimizer.scheduled(step))

For the task of C++ (language.py), run() does this:

    for _ in range(micro_steps):
        rows = next(batches)["rows"].to(device)                    # (B, T + 1)
        loss = model(rows[:, :-1], rows[:, 1:])                    # forward
        (loss / (micro_steps × readers)).backward()                # adds to each weight's main_grad
    optimizer.update(scheduled, sums)    # main_grad and the losses in `sums`, over all ranks; Muon and AdamW

A mesh is data × fsdp × tensor ranks: along the last two they divide the weights. Readers are the ranks that read
different rows: all of them without --mesh_tensor. On XLA, operations are only recorded until a block
`with observer.program(name)` ends. They are then a program, which is compiled once, and the device runs it while the
host goes on (device/programs.py).

The trainer (trainer.py), preflight and benches run this class. A task brings the model, optimizer, objective and
batches.
"""
from collections.abc import Callable
from dataclasses import dataclass

import torch

from nanochat.device.collectives import all_gather
from nanochat.device.programs import one_program
from nanochat.record.observe import Observer


@dataclass(frozen=True)
class Objective:
    """What a micro-step computes. loss(model, carry, **batch) -> ({name: mean over the micro-batch, a scalar tensor},
    the new carry): a pure function. The losses have all of `names`; the gradients come from the first. The carry is
    what a task hands from one micro-step to the next, {} for C++."""
    loss: Callable
    names: tuple = ("loss",)
    teacher: torch.nn.Module | None = None  # read-only


class TrainingStep:
    """One rank's optimizer step.

    First program, for each micro-batch: micro_step, forward and backward, adds to the gradients and to `sums`, and may
    change `carry`. Second program: update sums gradients and `sums` over the ranks, updates the weights and clears
    both.
    """

    def __init__(self, model, optimizer, objective, dist, micro_steps=1, carry=None, use_compile=False):
        """
        model, optimizer: with their state on the device of `dist`, and like GPT and MuonAdamW.
        micro_steps: of an optimizer step.
        carry: {name: tensor (slots, …)} on the device, which the objective carries from one micro-step to the next. A
            slot is a row of the global batch; rank r of W has the slots r, r + W, …
        use_compile: torch.compile the model.
        """
        self.model = model
        self.compiled_model = torch.compile(model, dynamic=False) if use_compile else model
        self.optimizer = optimizer
        self.objective = objective
        self.dist = dist
        self.carry = carry or {}
        self.micro_step_name = "micro_step"  # of the program; rows of another length have another
        self.observer = Observer(dist)
        self.sums = {name: torch.zeros((), device=dist.device) for name in objective.names}
        self.micro_steps = micro_steps
        # A tensor: a Python number would be a constant of the program, which would depend on the number of micro-steps.
        self.loss_scale = torch.tensor(1 / (micro_steps * optimizer.mesh.readers)).to(dist.device)
        model.after_update()

    def run(self, batches, scheduled):
        """Runs one optimizer step on the next micro-batches of the iterator `batches` over {name: CPU tensor}. Returns
        the result of update, still on the device, without waiting for it."""
        for _ in range(self.micro_steps):
            with self.observer.data_wait():
                batch = next(batches)
            self._run_micro_step(self.micro_step_name, batch)
        scheduled = scheduled.to(self.dist.device)
        with self.observer.program("update", collective=True):
            return self.update(scheduled)

    def _run_micro_step(self, name, batch):
        batch = {key: tensor.to(self.dist.device) for key, tensor in batch.items()}
        # A micro-step has collectives only if the mesh divides the weights. Otherwise only the update has, and ranks
        # may run apart within a step.
        with self.observer.program(name, self.optimizer.mesh.divides_weights):
            self.micro_step(batch)

    # The two programs

    def micro_step(self, batch):
        """Adds the gradients of one micro-batch, and its losses × loss_scale to `sums`. batch: {name: tensor}."""
        losses, carry = self.objective.loss(self.compiled_model, self.carry, **batch)
        # In place: the carry stays the same tensor from one micro-step to the next, an argument and a result of the
        # program, as the sums of the gradients.
        for name, tensor in self.carry.items():
            tensor.copy_(carry[name])
        losses = {name: losses[name] * self.loss_scale for name in self.sums}
        next(iter(losses.values())).backward()  # into main_grad, see Decoder.create_main_grads
        for name, total in self.sums.items():
            total += losses[name].detach()

    def update(self, scheduled):
        """Updates the weights from the gradients of all ranks.

        scheduled: from optimizer.scheduled, on the device. Returns Measured (optim.py): the means of `sums` over the
        global batch, by name, and the optimizer's measurements.
        """
        measured = self.optimizer.update(scheduled, self.sums)
        self.model.after_update()  # which rounds weights for --products=int8
        return measured

    # What stays on the device

    @property
    def teacher(self):
        return self.objective.teacher

    def materialise(self):
        """Computes all pending state, so that the programs of a step begin with plain buffers."""
        # The end of the empty block makes a program of everything traced before. Otherwise a pending scalar of exactly
        # 1.0, such as the scale of a loss, would be a constant of the first micro-step, and the second would
        # compile another program.
        with one_program(self.dist, "initialise"):
            pass

    def state(self):
        """Returns {name: tensor} of everything that stays on the device between two programs."""
        optimizer = self.optimizer
        found = dict(optimizer.parameters)
        for name, p in optimizer.parameters.items():
            found[f"{name}.main_grad"] = p.main_grad
        for name, p in optimizer.parameters.items():
            if optimizer.masters[name] is not p:
                found[f"{name}.master"] = optimizer.masters[name]
            for part, tensor in enumerate(getattr(p, "rounded", ())):  # see int8.keep_rounded
                found[f"{name}.rounded.{part}"] = tensor
        found |= dict(self.model.named_buffers())
        found |= optimizer.state
        for name, tensor in self.sums.items():
            found[f"{name}_sum"] = tensor
        found["loss_scale"] = self.loss_scale
        if self.teacher:
            for name, tensor in [*self.teacher.state_dict().items(), *self.teacher.named_buffers()]:
                found[f"teacher.{name}"] = tensor
        for name, tensor in self.carry.items():
            found[f"carry.{name}"] = tensor
        return found

    def rehearse(self, batches):
        """Compiles the micro-steps of {name of the program: {name: CPU tensor}} by running them, and clears the sums to
        which they have added. No update: weights and the optimizer's state stay."""
        for name, batch in batches.items():
            self._run_micro_step(name, batch)
        with one_program(self.dist, "clear"), torch.no_grad():
            self.optimizer.clear(self.sums.values())

    # Checkpoints. The carry is among the optimizer's state, in the order of the slots, whatever the number of ranks.

    def sizes(self):
        """Returns ({name: bytes}, {name: bytes}) of what host_state returns."""
        weights, state = self.optimizer.sizes()
        for name, tensor in self.carry.items():
            state[f"carry.{name}"] = tensor.nbytes * self.dist.world_size
        return weights, state

    @torch.no_grad()
    def host_state(self, names=None):
        """Returns ({name: weight}, {name: state}) of the optimizer's host_state and the carry. Every rank must call
        it."""
        weights, state = self.optimizer.host_state(names)
        ranks = self.dist.world_size
        for name, tensor in self.carry.items():
            if ranks > 1:
                with one_program(self.dist, f"gather {name}", collective=True):
                    # (W × n, …), rank after rank. Slot s is row s // W of rank s % W: transpose the two.
                    tensor = all_gather(tensor, self.dist).unflatten(0, (ranks, -1)).transpose(0, 1).flatten(0, 1)
            if names is None or f"carry.{name}" in names:
                state[f"carry.{name}"] = tensor.detach().to("cpu", copy=True)
        return weights, state

    @torch.no_grad()
    def load_state(self, state):
        """Restores the state, the second result of host_state. The model already has its weights."""
        self.optimizer.load_state_dict(state)
        for name, tensor in self.carry.items():
            tensor.copy_(state[f"carry.{name}"][self.dist.rank::self.dist.world_size])
