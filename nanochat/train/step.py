"""The training step: the state that stays on the device, and the two programs that change it.

    training = make_step(plan, make_model(plan).to(dist.device), dist)
    loss_and_norm = training.run(batches, plan.micro_steps(step), training.optimizer.scheduled(step))

base_train, tpu_preflight, bench_host and bench_train all run this class. It knows neither the model nor the data: a
second task brings another model, optimizer and loss.
"""
import torch

from nanochat.device.programs import one_program
from nanochat.kernels.choose import get_kernels
from nanochat.kernels.sharded import Sharding
from nanochat.model.gpt import GPT
from nanochat.model.optim import MuonAdamW
from nanochat.record.observe import Observer


class TrainingStep:
    """One rank's optimizer step.

    First program, run for each micro-batch: micro_step, forward and backward, which adds to the gradients and to
    `loss_sum`. Second program: update, which sums both over the ranks, updates the weights and sets the sums to zero.
    """

    def __init__(self, model, optimizer, loss, dist, micro_steps=(1,), use_compile=False, teacher=None):
        """
        model, optimizer: with their state on the device of `dist`; the optimizer is like MuonAdamW.
        loss(model, **batch): the mean loss of a micro-batch, a scalar tensor.
        micro_steps: all numbers of micro-steps that a step of the run can have.
        use_compile: torch.compile the model.
        teacher: a module that the loss reads and nothing changes.
        """
        self.model, self.optimizer, self.loss, self.dist = model, optimizer, loss, dist
        self.teacher, self.micro_step_name = teacher, "micro_step"
        self.compiled_model = torch.compile(model, dynamic=False) if use_compile else model
        self.observer = Observer(dist)
        self.loss_sum = torch.zeros((), device=dist.device)
        # Tensors, because a Python number would be part of the program, and another number would compile it again.
        self.loss_scales = {n: torch.tensor(1 / (n * dist.world_size)).to(dist.device) for n in set(micro_steps)}

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
            | {"loss_sum": self.loss_sum} | {f"loss_scale.{n}": scale for n, scale in self.loss_scales.items()} \
            | {f"teacher.{name}": tensor for name, tensor in teacher.items()}

    def dismiss_teacher(self, loss):
        """From now on micro-steps have the loss `loss`, which needs no teacher: they are another program."""
        self.loss, self.teacher, self.micro_step_name = loss, None, "micro_step without teacher"

    def micro_step(self, batch, scale):
        """Adds the gradients of one micro-batch, and its loss × `scale` to loss_sum.

        batch: {name: tensor}; scale: a scalar tensor, one of loss_scales.
        """
        loss = self.loss(self.compiled_model, **batch) * scale
        loss.backward()
        self.loss_sum += loss.detach()

    def update(self, scheduled):
        """Updates the weights from the gradients of all ranks.

        scheduled: as optimizer.scheduled returns it, on the device. Returns a tensor (2,): the mean loss of the global
        batch, and the norm of the gradient.
        """
        return self.optimizer.update(scheduled, self.loss_sum)

    def run(self, batches, micro_steps, scheduled):
        """Runs one optimizer step on the next `micro_steps` of the iterator `batches`, which gives {name: CPU tensor}.

        Returns what update returns, still on the device: nothing here waits for it.
        """
        device, observer = self.dist.device, self.observer
        scale = self.loss_scales[micro_steps]
        for _ in range(micro_steps):
            with observer.data_wait():
                batch = next(batches)
            batch = {name: tensor.to(device) for name, tensor in batch.items()}
            with observer.program(self.micro_step_name, self.optimizer.mesh.fsdp > 1, **batch, scale=scale):
                self.micro_step(batch, scale)
        scheduled = scheduled.to(device)
        with observer.program("update", collective=True, scheduled=scheduled):
            return self.update(scheduled)


# -----------------------------------------------------------------------------
# The task of base_train: predict the next token


def next_token_loss(model, rows):
    """Returns the mean loss of rows (B, T + 1) in nats per token: each token is predicted from those before it."""
    return model(rows[:, :-1], rows[:, 1:], reduction="mean")


def make_model(plan):
    """Returns a Plan's GPT, on torch's default device and without initial weights."""
    kernels = get_kernels(plan.kernel, plan.device_type, Sharding.of_mesh(plan.mesh))
    return GPT(plan.config, kernels, plan.dtype, plan.activation_checkpointing)


def make_step(plan, model, dist, loss=next_token_loss, teacher=None, weights=None):
    """Returns the TrainingStep of a Plan for a model whose weights are on the device of `dist`, or come from `weights`
    (see MuonAdamW), with another loss and the model that it reads, if they are given."""
    optimizer = MuonAdamW(model, plan.optimizer, plan.total_batch_size, plan.num_iterations, plan.dtype, dist,
                          plan.shard_optimizer, plan.mesh, weights)
    return TrainingStep(model, optimizer, loss, dist, [plan.micro_steps(step) for step, _ in plan.batch_schedule],
                        plan.use_compile, teacher)
