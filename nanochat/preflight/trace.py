"""Traces the programs of a step without running them.

trace() runs a function on placeholders, which are tensors of XLA's CPU device without memory, and keeps each program
that torch_xla would have compiled and run. compile.py then compiles these programs for a TPU.
"""
import os
from contextlib import contextmanager
from dataclasses import dataclass

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
    import gc

    import torch
    import torch_xla
    pending, device = {}, torch_xla.device()
    for tensor in gc.get_objects():
        if issubclass(type(tensor), torch.Tensor) and tensor.device == device \
                and torch_xla._XLAC._check_tensor_need_materialization([tensor])[0]:
            pending.setdefault(torch_xla._XLAC._xla_get_tensor_id(tensor), tensor)
    return [pending[number] for number in sorted(pending)]


def make_placeholders(tensors=None):
    """Replaces `tensors`, by default all pending ones, by placeholders, as if they had been computed."""
    for tensor in pending_tensors() if tensors is None else tensors:
        tensor.data = placeholder(tensor.shape, tensor.dtype)


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
    sync, left, programs, state = torch_xla.sync, list(names), {}, dict(state)
    state_names = _names_by_id(state)

    def capture_instead(*args, **kwargs):
        nonlocal state_names
        name, outputs = left.pop(0), pending_tensors()
        if name not in left:
            programs[name] = _program(name, outputs, state, state_names)
        make_placeholders(outputs)
        kept = {id(tensor) for tensor in state.values()}  # a running sum that `function` made itself is donated too
        state.update({f"computed{id(tensor)}": tensor for tensor in outputs if id(tensor) not in kept})
        torch_xla._XLAC._set_all_reduce_token(str(torch_xla.device()), None)  # as sync() does
        state_names = _names_by_id(state)
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
    import torch
    import torch_xla
    backward = torch.autograd.backward

    def named_backward(tensors, *args, **kwargs):
        seen, todo = set(), [tensor.grad_fn for tensor in ([tensors] if torch.is_tensor(tensors) else tensors)]
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
        scopes = []
        node.register_prehook(lambda *_: scopes.append(torch_xla._XLAC.profiler.scope_pusher(name)))
        node.register_hook(lambda *_: scopes.clear())

    torch.autograd.backward = named_backward
    try:
        with torch.autograd.set_detect_anomaly(True, check_nan=False):  # autograd's nodes then keep their call stack
            yield
    finally:
        torch.autograd.backward = backward
