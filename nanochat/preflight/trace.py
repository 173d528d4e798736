"""Traces the programs of a training run without running them. trace() runs a function on placeholders, tensors of XLA's
CPU device without memory, and keeps each program that torch_xla would have compiled and run."""
import gc
import os
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from nanochat.preflight import hlo


def prepare_environment():
    """Sets the environment variables that torch_xla reads. Must run before torch_xla is imported."""
    # One CPU device traces for all chips, so all-reduces must appear although there is only one device. Every operation
    # keeps its line of Python.
    os.environ.update(PJRT_DEVICE="CPU", CPU_NUM_DEVICES="1", XLA_ALWAYS_ALLREDUCE="1", XLA_IR_DEBUG="1",
                      XLA_HLO_DEBUG="1", JAX_PLATFORMS="cpu")


# Placeholders


def placeholder(shape, dtype):
    """Returns a tensor on the XLA device without memory: others can be computed from it, but it cannot be read."""
    from torch_xla.core.xla_builder import create_placeholder_tensor
    return create_placeholder_tensor(tuple(shape), dtype)


def pending_tensors():
    """Returns the tensors that torch_xla.sync() would compute, oldest first."""
    import torch_xla
    device = torch_xla.device()
    # Only the garbage collector knows every tensor. isinstance() would ask each of its objects for a __class__, which
    # runs code in proxies. Several Python objects may be one tensor, so its number is the key. Sorted by number, the
    # results of the traced program have the order of a run's.
    pending = {}
    for tensor in gc.get_objects():
        if issubclass(type(tensor), torch.Tensor) and tensor.device == device \
                and torch_xla._XLAC._check_tensor_need_materialization([tensor])[0]:
            pending.setdefault(torch_xla._XLAC._xla_get_tensor_id(tensor), tensor)
    return [pending[number] for number in sorted(pending)]


def make_placeholders(tensors):
    """Replaces `tensors` by placeholders, as if they had been computed."""
    for tensor in tensors:
        # Only .data carries the views of a tensor along: torch_xla's _replace_xla_tensor leaves them on the old graph.
        tensor.data = placeholder(tensor.shape, tensor.dtype)


def fill_with_placeholders(model):
    """Replaces the parameters and buffers of a model on the meta device by placeholders on the XLA device."""
    for module in model.modules():
        for name, p in module._parameters.items():
            module._parameters[name] = torch.nn.Parameter(placeholder(p.shape, p.dtype))
        for name, buffer in module._buffers.items():
            module._buffers[name] = placeholder(buffer.shape, buffer.dtype)
    return model


# Tracing


@dataclass(frozen=True)
class TracedProgram:
    """A program as torch_xla gives it to the compiler."""
    name: str
    hlo_proto: bytes  # a serialised HloModuleProto
    hlo_text: str
    arguments: tuple  # the name of each; "" for constants that torch_xla passes as arguments
    donated: frozenset  # indices of the arguments whose memory an output may reuse


def trace(names, function, state):
    """Runs `function` and returns {name: TracedProgram} of the programs that its calls of torch_xla.sync() would run.

    names: of these programs, in the order of the calls. Of several programs with the same name the last is kept.
    state: {name: tensor} of the arguments that have a name. A tensor that a program updates in place is donated, as
        torch_xla does it: its new value may reuse the memory of the old one.
    Nothing is computed: the results of a program become placeholders, so `function` must not read a value before the
    last of these calls, which ends it. Raises RuntimeError if there are fewer calls than names.
    """
    import torch_xla
    if pending_tensors():
        raise RuntimeError(f"some tensors are still to be computed before {names[0]} is traced")
    capture = _Capture(names, state)
    sync = torch_xla.sync
    torch_xla.sync = capture.sync
    try:
        with _named_backward_pass():
            function()
    except _Traced:
        return capture.programs
    finally:
        torch_xla.sync = sync
    raise RuntimeError(f"these programs were not reached: {capture.left}")


class _Traced(BaseException):
    """Ends a function that is being traced. No `except Exception` on the way catches it."""


class _Capture:
    """Stands in for torch_xla.sync: keeps the program that would run, and makes its results placeholders."""

    def __init__(self, names, state):
        self.left = list(names)
        self.programs = {}
        self.state = dict(state)
        self._number_state()

    def _number_state(self):
        import torch_xla
        self.names_by_id = {torch_xla._XLAC._xla_get_tensor_id(tensor): name for name, tensor in self.state.items()}

    def sync(self, *args, **kwargs):
        import torch_xla
        name = self.left.pop(0)
        outputs = pending_tensors()
        # The order matters: the program takes its arguments under the numbers that they had before it, and an update in
        # place gives a tensor a new number.
        if name not in self.left:
            self.programs[name] = self._program(name, outputs)
        make_placeholders(outputs)
        self._add_computed(outputs)
        torch_xla._XLAC._set_all_reduce_token(str(torch_xla.device()), None)  # as sync() does
        self._number_state()
        if not self.left:
            raise _Traced

    def _add_computed(self, outputs):
        """Adds the results to the state, so that a running sum that the traced function made itself is donated, too."""
        known = {id(tensor) for tensor in self.state.values()}
        for tensor in outputs:
            if id(tensor) not in known:
                self.state[f"computed{id(tensor)}"] = tensor

    def _program(self, name, outputs):
        """Returns the TracedProgram that computes `outputs`."""
        import torch_xla
        torch_xla_c = torch_xla._XLAC
        output_ids = set(map(id, outputs))
        updated = {key for key, tensor in self.state.items() if id(tensor) in output_ids}
        argument_ids, _ = torch_xla_c._get_tensors_xla_device_data_node(outputs)
        arguments = tuple(self.names_by_id.get(number, "") for number in argument_ids)
        donated = frozenset(index for index, argument in enumerate(arguments) if argument in updated)
        return TracedProgram(name, torch_xla_c._get_xla_tensors_hlo_proto(outputs),
                             torch_xla_c._get_xla_tensors_hlo(outputs), arguments, donated)


@contextmanager
def _named_backward_pass():
    """Names the operations of the backward passes in the block; the programs stay the same."""
    backward = torch.autograd.backward

    def named_backward(tensors, *args, **kwargs):
        _name_nodes([tensors] if torch.is_tensor(tensors) else tensors)
        return backward(tensors, *args, **kwargs)

    torch.autograd.backward = named_backward
    try:
        # Autograd's nodes then keep their call stack. check_nan would read values, and a placeholder has none.
        with torch.autograd.set_detect_anomaly(True, check_nan=False):
            yield
    finally:
        torch.autograd.backward = backward


# C++ calls the backward pass, so its operations have no line of Python of their own.
def _name_nodes(outputs):
    """Names each operation of the backward pass of `outputs` after the line whose derivative it computes, in the
    spelling hlo.LINE_IN_SCOPE."""
    todo = [tensor.grad_fn for tensor in outputs]
    seen = {None}
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        todo += [function for function, _ in node.next_functions]
        lines = hlo.LINE_IN_TRACEBACK.findall("".join(node.metadata.get("traceback_", [])))
        if lines:
            _run_in_scope(node, "{}_{} backward".format(*lines[-1]))


def _run_in_scope(node, name):
    import torch_xla
    # A scope lasts as long as the object that scope_pusher returns, so dropping it after the node ends the scope. It
    # changes neither the graph's hash nor the HLO.
    scopes = []
    node.register_prehook(lambda *_: scopes.append(torch_xla._XLAC.profiler.scope_pusher(name)))
    node.register_hook(lambda *_: scopes.clear())


# The programs of a run


class Programs:
    """The programs of a run as the compiler gets them, and what stays in a chip's memory between them."""

    def __init__(self, plan, training, branch_shares):
        """plan: of a LanguageTask; training: its TrainingStep, whose model has gone through fill_with_placeholders.
        branch_shares: {name of a program: as in ops_of}."""
        self.plan = plan
        self.training = training
        self.branch_shares = branch_shares
        make_placeholders(pending_tensors())  # the zeros of the optimizer

    def resident_bytes(self):
        """Returns {name: bytes} of the tensors that stay on the chip."""
        return {name: tensor.numel() * tensor.element_size() for name, tensor in self.training.state().items()}

    def memory_groups(self):
        """Returns the bytes of weights, gradients, optimizer state and the rest, as {name: bytes}."""
        groups = {"weights": 0, "gradients": 0, "optimizer": 0}
        if self.training.teacher:
            groups["teacher"] = 0
        groups["other"] = 0
        for name, size in self.resident_bytes().items():
            groups[self._group_of(name)] += size
        return groups

    def _group_of(self, name):
        optimizer = self.training.optimizer
        if name.endswith(".main_grad"):
            return "gradients"
        if name in optimizer.parameters or ".rounded." in name:
            return "weights"
        if name in optimizer.state or name.endswith(".master"):
            return "optimizer"
        return "teacher" if name.startswith("teacher.") else "other"

    def trace(self, batches, evaluate):
        """Returns {name: TracedProgram} of the micro-steps, update and evaluate. batches: {name of the micro-step:
        {name: CPU tensor}}, a micro-batch for each stage of the run; evaluate(): runs an evaluation of two batches."""
        # Every program is traced twice, and trace() keeps the second one: the first may differ, because it fills
        # caches.
        micro_steps = self.training.micro_steps = min(self.plan.micro_steps, 2)
        # In a run the scale is a buffer on the device. A scale of exactly 1.0 made here would become a constant, and
        # change the program.
        self.training.loss_scale = placeholder((), torch.float32)
        names = []
        for name in batches:
            names += 2 * ([name] * micro_steps + ["update"])

        def train():
            for name, batch in batches.items():
                self.training.micro_step_name = name
                for _ in range(2):
                    self.training.run(iter([batch] * micro_steps), self.training.optimizer.scheduled(1))

        programs = trace(names, train, self.training.state())
        return programs | trace(["evaluate", "evaluate"], evaluate, self.training.state())
