"""The training step: the state that stays on the device, and the two programs that change it.

    training = TrainingStep(model, optimizer, loss, dist)
    sums_and_norm = training.run(batches, plan.micro_steps(step), training.optimizer.scheduled(step))

base_train, puzzle_train, tpu_preflight, and the benches all run this class. It knows neither the model nor
the data: a task brings its model, optimizer, loss and batches.
"""
import torch

from nanochat.device.collectives import all_gather
from nanochat.device.programs import one_program
from nanochat.record.observe import Observer


class TrainingStep:
    """One rank's optimizer step.

    First program, run for each micro-batch: micro_step, forward and backward, which adds to the gradients and to
    `sums`, and may change `carry`. Second program: update, which sums gradients and `sums` over the ranks, updates the
    weights and sets both to zero.
    """

    def __init__(self, model, optimizer, loss, dist, micro_steps=(1,), use_compile=False, teacher=None,
                 sum_names=("loss",), carry=None):
        """
        model, optimizer: with their state on the device of `dist`; the optimizer is like MuonAdamW.
        loss(model, **batch) -> {name: mean over the micro-batch, a scalar tensor}, with all of sum_names; the first of
            them is what the gradients are of.
        micro_steps: all numbers of micro-steps that a step of the run can have.
        use_compile: torch.compile the model.
        teacher: a module that the loss reads and nothing changes.
        carry: {name: tensor (slots, …)} on the device, which the loss changes in place. A slot is a row of the global
            batch; rank r of W has the slots r, r + W, …
        """
        self.model, self.optimizer, self.loss, self.dist = model, optimizer, loss, dist
        self.teacher, self.micro_step_name, self.carry = teacher, "micro_step", carry or {}
        self.compiled_model = torch.compile(model, dynamic=False) if use_compile else model
        self.observer = Observer(dist)
        self.sums = {name: torch.zeros((), device=dist.device) for name in sum_names}
        # Tensors, because a Python number would be part of the program, and another number would compile it again.
        self.loss_scales = {n: torch.tensor(1 / (n * optimizer.mesh.readers)).to(dist.device)
                            for n in set(micro_steps)}

    def materialise(self):
        """Computes what was put on the device so far, so that the programs of a step begin with plain buffers."""
        with one_program(self.dist, "initialise"):
            pass

    def state(self):
        """Returns {name: tensor} of all that stays on the device between two programs."""
        optimizer = self.optimizer
        teacher = self.teacher.state_dict() | dict(self.teacher.named_buffers()) if self.teacher else {}
        return optimizer.parameters \
            | {f"{name}.main_grad": p.main_grad for name, p in optimizer.parameters.items()} \
            | {f"{name}.master": optimizer.masters[name] for name, p in optimizer.parameters.items()
               if optimizer.masters[name] is not p} \
            | dict(self.model.named_buffers()) | optimizer.state \
            | {f"{name}_sum": tensor for name, tensor in self.sums.items()} \
            | {f"loss_scale.{n}": scale for n, scale in self.loss_scales.items()} \
            | {f"teacher.{name}": tensor for name, tensor in teacher.items()} \
            | {f"carry.{name}": tensor for name, tensor in self.carry.items()}

    def dismiss_teacher(self, loss):
        """From now on micro-steps have the loss `loss`, which needs no teacher: they are another program."""
        self.loss, self.teacher, self.micro_step_name = loss, None, "micro_step without teacher"

    def rehearse(self, batches):
        """Runs micro-steps of {name of the program: {name: CPU tensor}}, so that they are compiled, and takes back what
        they have added."""
        scale = next(iter(self.loss_scales.values()))
        for name, batch in batches.items():
            self._run_micro_step(name, batch, scale)
        with one_program(self.dist, "clear"), torch.no_grad():
            self.optimizer.clear(self.sums.values())

    def micro_step(self, batch, scale):
        """Adds the gradients of one micro-batch, and its losses × `scale` to `sums`.

        batch: {name: tensor}; scale: a scalar tensor, one of loss_scales.
        """
        losses = self.loss(self.compiled_model, **batch)
        losses = {name: losses[name] * scale for name in self.sums}
        next(iter(losses.values())).backward()
        for name, total in self.sums.items():
            total += losses[name].detach()

    def update(self, scheduled):
        """Updates the weights from the gradients of all ranks.

        scheduled: as optimizer.scheduled returns it, on the device. Returns a tensor: the means over the global batch
        in the order of `sums`, and the norm of the gradient.
        """
        return self.optimizer.update(scheduled, *self.sums.values())

    def run(self, batches, micro_steps, scheduled):
        """Runs one optimizer step on the next `micro_steps` of the iterator `batches`, which gives {name: CPU tensor}.

        Returns what update returns, still on the device: nothing here waits for it.
        """
        for _ in range(micro_steps):
            with self.observer.data_wait():
                batch = next(batches)
            self._run_micro_step(self.micro_step_name, batch, self.loss_scales[micro_steps])
        scheduled = scheduled.to(self.dist.device)
        with self.observer.program("update", collective=True, scheduled=scheduled):
            return self.update(scheduled)

    def _run_micro_step(self, name, batch, scale):
        batch = {key: tensor.to(self.dist.device) for key, tensor in batch.items()}
        with self.observer.program(name, self.optimizer.mesh.divides_weights, **batch, scale=scale):
            self.micro_step(batch, scale)

    # Checkpoints. The carry is among the optimizer's state, in the order of the slots, whatever the number of ranks.

    def sizes(self):
        """Returns ({name: bytes}, {name: bytes}) of what host_state returns."""
        weights, state = self.optimizer.sizes()
        return weights, state | {f"carry.{name}": tensor.numel() * tensor.element_size() * self.dist.world_size
                                 for name, tensor in self.carry.items()}

    @torch.no_grad()
    def host_state(self, names=None):
        """Returns ({name: weight}, {name: state}) as the optimizer's host_state does, with the carry. Every rank must
        call it."""
        weights, state = self.optimizer.host_state(names)
        ranks = self.dist.world_size
        for name, tensor in self.carry.items():
            if ranks > 1:
                with one_program(self.dist, f"gather {name}", collective=True):
                    tensor = all_gather(tensor, self.dist).unflatten(0, (ranks, -1)).transpose(0, 1).flatten(0, 1)
            if names is None or f"carry.{name}" in names:
                state[f"carry.{name}"] = tensor.detach().to("cpu", copy=True)
        return weights, state

    @torch.no_grad()
    def load_state(self, state):
        """Restores the state, the second result of host_state; the model has its weights already."""
        self.optimizer.load_state_dict(state)
        for name, tensor in self.carry.items():
            tensor.copy_(state[f"carry.{name}"][self.dist.rank::self.dist.world_size])
