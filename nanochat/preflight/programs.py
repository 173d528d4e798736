"""The programs of a training run as the compiler gets them: a training step whose tensors are placeholders."""
import torch

from nanochat.preflight.trace import make_placeholders, placeholder, trace


def fill_with_placeholders(model):
    """Replaces the parameters and buffers of a model on the meta device by placeholders on the XLA device."""
    for module in model.modules():
        for name, p in module._parameters.items():
            module._parameters[name] = torch.nn.Parameter(placeholder(p.shape, p.dtype))
        for name, buffer in module._buffers.items():
            module._buffers[name] = placeholder(buffer.shape, buffer.dtype)
    return model


class Programs:
    """The programs of a run, and what stays in a chip's memory between them."""

    def __init__(self, plan, training, name_buffer=lambda shape: "", branch_shares=None):
        """plan: of a Task; training: its TrainingStep, whose model has gone through fill_with_placeholders, and whose
        carry is of placeholders. name_buffer("bf16[8192,65536]") says in words what an array of this shape holds.
        branch_shares: {name of a program: as in hlo.Module.ops}."""
        self.plan, self.training, self.name_buffer = plan, training, name_buffer
        self.branch_shares = branch_shares or {}
        make_placeholders()  # what the optimizer has set to zero so far

    def resident_bytes(self):
        """Returns {name: bytes} of the tensors that stay on the chip."""
        return {name: tensor.numel() * tensor.element_size() for name, tensor in self.training.state().items()}

    def memory_groups(self):
        """Returns the bytes of weights, gradients, optimizer state and the rest, as {name: bytes}."""
        optimizer = self.training.optimizer
        names = ("weights", "gradients", "optimizer", *(["teacher"] if self.training.teacher else []),
                 *(["carry"] if self.training.carry else []), "other")
        groups = dict.fromkeys(names, 0)
        for name, size in self.resident_bytes().items():
            group = "gradients" if name.endswith(".main_grad") else "weights" if name in optimizer.parameters \
                else "optimizer" if name in optimizer.state or name.endswith(".master") \
                else "teacher" if name.startswith("teacher.") else "carry" if name.startswith("carry.") else "other"
            groups[group] += size
        return groups

    def trace(self, batches, evaluate):
        """Returns {name: TracedProgram} of the micro-steps, update and evaluate.

        batches: {name of the micro-step: {name: CPU tensor}}, a micro-batch for each stage of the run; evaluate(): runs
        an evaluation of two batches. Every program is traced twice and the second one is taken: the first may differ,
        because caches are filled while it is traced.
        """
        micro_steps = min(self.plan.micro_steps(0), 2)
        self.training.loss_scales = {micro_steps: placeholder((), torch.float32)}
        names = [program for name in batches for program in 2 * [*[name] * micro_steps, "update"]]

        def train():
            for name, batch in batches.items():
                self.training.micro_step_name = name
                for _ in range(2):
                    self.training.run(iter([batch] * micro_steps), micro_steps, self.training.optimizer.scheduled(1))

        programs = trace(names, train, self.training.state())
        return programs | trace(["evaluate", "evaluate"], evaluate, self.training.state())
