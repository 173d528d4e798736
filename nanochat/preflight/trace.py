"""Traces the programs of a training run without running them.

trace() runs a function on placeholders, which are tensors of XLA's CPU device without memory, and keeps each program
that torch_xla would have compiled and run. compile.py then compiles these programs for a TPU.
"""
import gc
import os
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from nanochat.preflight import hlo
from nanochat.preflight.source_lines import IN_TRACEBACK


def prepare_environment():
    """Sets the environment variables that torch_xla reads. Must run before torch_xla is imported.

    One CPU device traces for all chips, so all-reduces must appear although there is only one device. Every operation
    keeps the Python line that it comes from.
    """
    os.environ.update(PJRT_DEVICE="CPU", CPU_NUM_DEVICES="1", XLA_ALWAYS_ALLREDUCE="1", XLA_IR_DEBUG="1",
                      XLA_HLO_DEBUG="1", JAX_PLATFORMS="cpu")


# -----------------------------------------------------------------------------
# Placeholders


def placeholder(shape, dtype):
    """Returns a tensor on the XLA device that has a shape but no memory: others can be computed from it, but its value
    cannot be read."""
    from torch_xla.core.xla_builder import create_placeholder_tensor
    return create_placeholder_tensor(tuple(shape), dtype)


def pending_tensors():
    """Returns the tensors that torch_xla.sync() would compute: all of the XLA device that are not computed yet, oldest
    first."""
    import torch_xla
    device = torch_xla.device()
    # Only the garbage collector knows every tensor. isinstance() would ask each of its objects for a __class__, and
    # that runs code in proxies. Several Python objects may be one tensor, so its number is the key. In the order of the
    # numbers the traced program's results are in the order of a run's.
    pending = {}
    for tensor in gc.get_objects():
        if issubclass(type(tensor), torch.Tensor) and tensor.device == device \
                and torch_xla._XLAC._check_tensor_need_materialization([tensor])[0]:
            pending.setdefault(torch_xla._XLAC._xla_get_tensor_id(tensor), tensor)
    return [pending[number] for number in sorted(pending)]


def make_placeholders(tensors=None):
    """Replaces `tensors`, by default all pending ones, by placeholders, as if they had been computed."""
    for tensor in pending_tensors() if tensors is None else tensors:
        # Only through .data do the views of a tensor follow: torch_xla's _replace_xla_tensor leaves them on the old
        # graph.
        tensor.data = placeholder(tensor.shape, tensor.dtype)


def fill_with_placeholders(model):
    """Replaces the parameters and buffers of a model on the meta device by placeholders on the XLA device."""
    for module in model.modules():
        for name, p in module._parameters.items():
            module._parameters[name] = torch.nn.Parameter(placeholder(p.shape, p.dtype))
        for name, buffer in module._buffers.items():
            module._buffers[name] = placeholder(buffer.shape, buffer.dtype)
    return model


# -----------------------------------------------------------------------------
# Tracing


@dataclass(frozen=True)
class TracedProgram:
    """A program as torch_xla gives it to the compiler."""
    name: str
    hlo_proto: bytes  # a serialised HloModuleProto
    hlo_hash: str  # hlo.hash_of_program: equal for the same program, wherever it was traced
    instructions: int
    arguments: tuple  # the name of each; "" for constants that torch_xla passes as arguments
    donated: frozenset  # indices of the arguments whose memory an output may reuse


def trace(names, function, state):
    """Runs `function` and returns {name: TracedProgram} of the programs that its calls of torch_xla.sync() would run.

    names: of these programs, in the order of the calls. Of several programs with the same name the last is kept.
    state: {name: tensor} of the arguments that have a name. A tensor that a program updates in place is donated, as
        torch_xla does it: its new value may reuse the memory of the old one.
    Nothing is computed: the results of a program are placeholders afterwards, so `function` must not read a value
    before the last of these calls, which ends it. Raises RuntimeError if there are fewer calls than names.
    """
    import torch_xla
    if pending_tensors():
        raise RuntimeError(f"some tensors are still to be computed before {names[0]} is traced")
    sync = torch_xla.sync
    left = list(names)
    programs = {}
    state = dict(state)
    names_by_id = _names_by_id(state)

    def capture_instead(*args, **kwargs):
        nonlocal names_by_id
        name = left.pop(0)
        # The order matters: the program takes its arguments under the numbers that they had before it, and an update in
        # place gives a tensor a new number.
        outputs = pending_tensors()
        if name not in left:
            programs[name] = _program(name, outputs, state, names_by_id)
        make_placeholders(outputs)
        _add_computed(state, outputs)
        torch_xla._XLAC._set_all_reduce_token(str(torch_xla.device()), None)  # as sync() does
        names_by_id = _names_by_id(state)
        if not left:
            raise _Traced

    torch_xla.sync = capture_instead
    try:
        with _lowering_for_tpu(), _named_backward_pass():
            function()
    except _Traced:
        return programs
    finally:
        torch_xla.sync = sync
    raise RuntimeError(f"these programs were not reached: {left}")


class _Traced(BaseException):
    """Ends a function that is being traced. No `except Exception` on the way catches it."""


def _add_computed(state, outputs):
    """Adds what a program has computed to {name: tensor}, so that a running sum that the traced function made itself is
    donated, too."""
    known = {id(tensor) for tensor in state.values()}
    for tensor in outputs:
        if id(tensor) not in known:
            state[f"computed{id(tensor)}"] = tensor


def _names_by_id(state):
    import torch_xla
    return {torch_xla._XLAC._xla_get_tensor_id(tensor): name for name, tensor in state.items()}


def _program(name, outputs, state, names):
    """Returns the TracedProgram that computes `outputs`; names: {id of a tensor: its name}, before the program."""
    import torch_xla
    torch_xla_c = torch_xla._XLAC
    updated = {key for key, tensor in state.items() if any(tensor is output for output in outputs)}
    argument_ids, _ = torch_xla_c._get_tensors_xla_device_data_node(outputs)
    arguments = tuple(names.get(number, "") for number in argument_ids)
    text = torch_xla_c._get_xla_tensors_hlo(outputs)
    return TracedProgram(
        name, torch_xla_c._get_xla_tensors_hlo_proto(outputs), hlo.hash_of_program(text),
        hlo.parse(text).instruction_count(), arguments,
        frozenset(index for index, argument in enumerate(arguments) if argument in updated))


@contextmanager
def _lowering_for_tpu():
    """Lowers Pallas kernels for a TPU, which JAX otherwise refuses in a process whose device is the CPU."""
    from jax._src.stages import Traced
    lower = Traced.lower

    def lower_for_tpu(self, *, lowering_platforms=("tpu",), **kwargs):
        return lower(self, lowering_platforms=lowering_platforms, **kwargs)

    Traced.lower = lower_for_tpu
    try:
        yield
    finally:
        Traced.lower = lower


@contextmanager
def _named_backward_pass():
    """Names each operation of the backward pass after the line whose derivative it computes (source_lines.IN_SCOPE).

    C++ calls the backward pass, so these operations have no Python line of their own. The program stays the same.
    """
    import torch_xla
    backward = torch.autograd.backward

    def named_backward(tensors, *args, **kwargs):
        outputs = [tensors] if torch.is_tensor(tensors) else tensors
        todo = [tensor.grad_fn for tensor in outputs]
        seen = set()
        while todo:
            node = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            todo += [function for function, _ in node.next_functions]
            lines = IN_TRACEBACK.findall("".join(node.metadata.get("traceback_", [])))
            if lines:
                _run_in_scope(node, "{}_{} backward".format(*lines[-1]))
        return backward(tensors, *args, **kwargs)

    def _run_in_scope(node, name):
        # A scope lasts as long as the object that scope_pusher returns, so dropping it after the node ends the scope.
        # It changes neither the graph's hash nor the HLO.
        scopes = []
        node.register_prehook(lambda *_: scopes.append(torch_xla._XLAC.profiler.scope_pusher(name)))
        node.register_hook(lambda *_: scopes.clear())

    torch.autograd.backward = named_backward
    try:
        # check_nan would read values, and a placeholder has none.
        with torch.autograd.set_detect_anomaly(True, check_nan=False):  # autograd's nodes then keep their call stack
            yield
    finally:
        torch.autograd.backward = backward


# -----------------------------------------------------------------------------
# The programs of a run


class Programs:
    """The programs of a run as the compiler gets them, and what stays in a chip's memory between them."""

    def __init__(self, plan, training, name_buffer=lambda shape: "", branch_shares=None):
        """plan: of a Task; training: its TrainingStep, whose model has gone through fill_with_placeholders, and whose
        carry is of placeholders. name_buffer("bf16[8192,65536]") says in words what an array of this shape holds.
        branch_shares: {name of a program: as in ops_of}."""
        self.plan = plan
        self.training = training
        self.name_buffer = name_buffer
        self.branch_shares = branch_shares or {}
        make_placeholders()  # what the optimizer has set to zero so far

    def resident_bytes(self):
        """Returns {name: bytes} of the tensors that stay on the chip."""
        return {name: tensor.numel() * tensor.element_size() for name, tensor in self.training.state().items()}

    def memory_groups(self):
        """Returns the bytes of weights, gradients, optimizer state and the rest, as {name: bytes}."""
        groups = {"weights": 0, "gradients": 0, "optimizer": 0}
        if self.training.teacher:
            groups["teacher"] = 0
        if self.training.carry:
            groups["carry"] = 0
        groups["other"] = 0
        for name, size in self.resident_bytes().items():
            groups[self._group_of(name)] += size
        return groups

    def _group_of(self, name):
        optimizer = self.training.optimizer
        if name.endswith(".main_grad"):
            return "gradients"
        if name in optimizer.parameters:
            return "weights"
        if name in optimizer.state or name.endswith(".master"):
            return "optimizer"
        group = name.partition(".")[0]
        return group if group in ("teacher", "carry") else "other"

    def checkpoint_bytes(self):
        """Returns the bytes of a checkpoint: the weights and the state of all chips."""
        weights, state = self.training.sizes()
        return sum(weights.values()) + sum(state.values())

    def trace(self, batches, evaluate):
        """Returns {name: TracedProgram} of the micro-steps, update and evaluate.

        batches: {name of the micro-step: {name: CPU tensor}}, a micro-batch for each stage of the run; evaluate(): runs
        an evaluation of two batches.
        """
        # Every program is traced twice, and trace() keeps the second one: the first may differ, because caches are
        # filled while it is traced.
        micro_steps = min(self.plan.micro_steps(0), 2)
        # In a run the scale is a buffer on the device. One of exactly 1.0 that was made here would be a constant, and
        # the program another one.
        self.training.loss_scales = {micro_steps: placeholder((), torch.float32)}
        names = []
        for name in batches:
            names += 2 * ([name] * micro_steps + ["update"])

        def train():
            for name, batch in batches.items():
                self.training.micro_step_name = name
                for _ in range(2):
                    self.training.run(iter([batch] * micro_steps), micro_steps, self.training.optimizer.scheduled(1))

        programs = trace(names, train, self.training.state())
        return programs | trace(["evaluate", "evaluate"], evaluate, self.training.state())
