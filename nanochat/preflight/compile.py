"""Compiling a step for a TPU that is not there: libtpu compiles for a named topology on a machine without a TPU.

trace() runs a function on placeholders, tensors of XLA's CPU device that have no memory, and keeps the program that
torch_xla would have compiled and run at the sync that follows. compile_programs() gives such programs to the real TPU
compiler, in processes of their own: there libtpu takes the place of the CPU client that traced.
"""
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from nanochat.common import BadInput
from nanochat.device import tpu
from nanochat.preflight import hlo

REPOSITORY = str(Path(__file__).resolve().parents[2])
# What torch_xla adds to LIBTPU_INIT_ARGS where it finds a TPU (torch_xla/__init__.py); what is set already counts.
_TORCH_XLA_LIBTPU_FLAGS = {"xla_tpu_use_enhanced_launch_barrier": "false", "xla_latency_hiding_scheduler_rerun": "1",
                           "xla_tpu_prefer_async_allgather_to_allreduce": "true",
                           "xla_tpu_enable_flash_attention": "false"}
_TORCH_XLA_V5_FLAGS = {"xla_enable_async_all_gather": "true", "xla_enable_async_collective_permute": "true"}

# -----------------------------------------------------------------------------
# Tracing


def prepare_environment():
    """Sets what torch_xla reads from the environment; must run before it is imported.

    One CPU device traces for all chips: an all-reduce appears although there is one device. Every operation keeps the
    Python line that it comes from.
    """
    os.environ.update(PJRT_DEVICE="CPU", CPU_NUM_DEVICES="1", XLA_ALWAYS_ALLREDUCE="1", XLA_IR_DEBUG="1",
                      XLA_HLO_DEBUG="1", JAX_PLATFORMS="cpu")


def require_packages():
    """Raises BadInput if what compiles for a TPU is not installed."""
    from importlib.util import find_spec
    missing = [name for name in ("torch_xla", "libtpu", "jax") if not find_spec(name)]
    if missing:
        raise BadInput(f"compiling for a TPU needs {' and '.join(missing)}: pip install '.[tpu]', with Python 3.11 or "
                       "newer on Linux (x86-64)")


def placeholder(shape, dtype):
    """A tensor on the XLA device that has a shape and no memory: it can be computed with, and never read."""
    from torch_xla.core.xla_builder import create_placeholder_tensor
    return create_placeholder_tensor(tuple(shape), dtype)


@contextmanager
def lowering_for_tpu():
    """Pallas kernels are lowered for a TPU, which a process whose device is the CPU otherwise refuses."""
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
def named_backward_pass():
    """Operations of the backward pass, which C++ calls, get the name of the line whose derivative they compute, as
    tpu_compiler reads it. The graph is the same."""
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
            lines = re.findall(rf'File "{re.escape(REPOSITORY)}/(.*?)", line (\d+)',
                               "".join(node.metadata.get("traceback_", [])))
            if lines:
                _run_in_scope(node, "{}_{} backward".format(*lines[-1]))
        return backward(tensors, *args, **kwargs)

    def _run_in_scope(node, name):
        scopes = []
        node.register_prehook(lambda *_: scopes.append(torch_xla._XLAC.profiler.scope_pusher(name)))
        node.register_hook(lambda *_: scopes.clear())

    torch.autograd.backward = named_backward
    try:
        with torch.autograd.set_detect_anomaly(True, check_nan=False):  # nodes know the lines that made them
            yield
    finally:
        torch.autograd.backward = backward


@dataclass(frozen=True)
class TracedProgram:
    name: str
    hlo_proto: bytes  # the HloModuleProto that torch_xla hands to the compiler
    hlo_hash: str  # hlo.hash_of_program: equal for the same program, wherever it was traced
    instructions: int
    arguments: tuple  # the name of each, "" for constants that torch_xla passes as arguments
    donated: frozenset  # indices of the arguments whose memory an output may take


def pending_tensors():
    """All tensors of the XLA device that are not computed yet, oldest first: what torch_xla.sync() would compute."""
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
    """Pretends that tensors, by default all that are pending, were computed."""
    for tensor in pending_tensors() if tensors is None else tensors:
        tensor.data = placeholder(tensor.shape, tensor.dtype)


def trace(names, function, state):
    """name -> TracedProgram of the programs that the torch_xla.sync()s in `function()` would run, in the order `names`;
    of those with the same name the last.

    state: name -> tensor, for the names of the arguments. Those that are computed anew in place are donated, as
    torch_xla does it: their new value may take the old one's memory. Nothing runs: what a program would compute is a
    placeholder afterwards, so function() ends at the last of these syncs and cannot read a value before.
    """
    import torch_xla
    if pending_tensors():
        raise RuntimeError(f"there is something left to compute before {names[0]} is traced")
    sync, left, programs, state = torch_xla.sync, list(names), {}, dict(state)
    state_names = _names_by_id(state)

    def capture_instead(*args, **kwargs):
        nonlocal state_names
        name, outputs = left.pop(0), pending_tensors()
        if name not in left:
            programs[name] = _program(name, outputs, state, state_names)
        make_placeholders(outputs)
        kept = {id(tensor) for tensor in state.values()}  # a running sum of function()'s own is donated too
        state.update({f"computed{id(tensor)}": tensor for tensor in outputs if id(tensor) not in kept})
        torch_xla._XLAC._set_all_reduce_token(str(torch_xla.device()), None)  # as sync() does
        state_names = _names_by_id(state)
        if not left:
            raise _Traced

    torch_xla.sync = capture_instead
    try:
        with lowering_for_tpu(), named_backward_pass():
            function()
    except _Traced:
        return programs
    finally:
        torch_xla.sync = sync
    raise RuntimeError(f"these were not reached: {left}")


class _Traced(BaseException):
    """Ends a function that is traced; no `except Exception` on the way catches it."""


def _names_by_id(state):
    import torch_xla
    return {torch_xla._XLAC._xla_get_tensor_id(tensor): name for name, tensor in state.items()}


def _program(name, outputs, state, names):
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


# -----------------------------------------------------------------------------
# Compiling


@dataclass(frozen=True)
class CompiledProgram:
    """What the TPU compiler made of a program; sizes are per chip. Where it does not fit, only `out_of_memory` is set:
    the compiler's report."""
    seconds: float
    out_of_memory: str = ""
    hlo_text: str = ""  # optimised
    argument_bytes: int = 0
    output_bytes: int = 0
    alias_bytes: int = 0  # of the outputs, those in the memory of donated arguments
    temp_bytes: int = 0
    code_bytes: int = 0
    costs: dict = field(default_factory=dict)  # the compiler's own analysis, which counts the body of a loop once


def compile_programs(programs, tpu_slice, folder, timeout_s=1800, jobs=2):
    """Yields (program, CompiledProgram) for each TracedProgram as it is compiled for `tpu_slice` (a tpu.Slice).

    Each compiles in a process of its own, `jobs` of them at a time; `folder` keeps what they read and wrote. Raises
    RuntimeError if a compiler fails in another way than by a lack of memory, and TimeoutError after `timeout_s`.
    """
    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(_compile_in_subprocess, program, tpu_slice, Path(folder) / program.name, timeout_s)
                   for program in programs]
        for program, future in zip(programs, futures, strict=True):
            yield program, future.result()


def _compile_in_subprocess(program, tpu_slice, folder, timeout_s):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "traced.pb").write_bytes(program.hlo_proto)
    (folder / "request.json").write_text(json.dumps({
        "donated": sorted(program.donated), "topology": f"{tpu_slice.tpu.name}:{tpu_slice.topology}",
        "topology_options": _topology_options(tpu_slice)}))
    code = f"from nanochat.preflight.compiler_process import compile_folder; compile_folder({str(folder)!r})"
    try:
        process = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, timeout=timeout_s, text=True,
                                 env=_compiler_environment(tpu_slice), capture_output=True)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"the TPU compiler took more than {timeout_s} s for {program.name}") from None
    if process.returncode:
        raise RuntimeError(f"the TPU compiler failed on {program.name} ({folder}):\n{process.stderr[-4000:]}")
    return CompiledProgram(**json.loads((folder / "compiled.json").read_text()),
                           hlo_text=(folder / "optimised.hlo").read_text())


def _topology_options(tpu_slice):
    """What libtpu must be told beside the topology's name."""
    options = {}
    if tpu_slice.hosts == 1:  # otherwise libtpu makes hosts of 2x2 chips
        sides = [int(side) for side in tpu_slice.topology.split("x")]
        options["chips_per_host_bounds"] = sides + [1] * (3 - len(sides))
    if tpu_slice.tpu.cores_per_chip == 2:  # both cores of a chip are one device, as in a run
        options["chip_config_name"] = "megacore"
    return options


def _compiler_environment(tpu_slice):
    """Environment in which libtpu compiles without a TPU, with the options that base_train and torch_xla give it."""
    torch_xla_flags = _TORCH_XLA_LIBTPU_FLAGS | (_TORCH_XLA_V5_FLAGS if tpu_slice.tpu.name in ("v5e", "v5p") else {})
    # The topology says all; with this variable libtpu would look for files that are only on a real v6e.
    return {key: value for key, value in os.environ.items() if key != "TPU_ACCELERATOR_TYPE"} | {
        "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # libtpu's lock file is for those that use a TPU
        "LIBTPU_INIT_ARGS": tpu.libtpu_init_args(tpu_slice.tpu, torch_xla_flags), "TF_CPP_MIN_LOG_LEVEL": "2"}
