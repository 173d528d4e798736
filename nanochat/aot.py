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

REPOSITORY = str(Path(__file__).resolve().parent.parent)
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


@dataclass(frozen=True)
class TracedProgram:
    name: str
    hlo: bytes  # the HloModuleProto that torch_xla hands to the compiler
    graph_hash: str  # of the graph before it became HLO: equal hashes are the same program
    instructions: int
    arguments: tuple  # the name of each, "" for constants that torch_xla passes as arguments
    donated: frozenset  # indices of the arguments whose memory an output may take


def pending_tensors():
    """All tensors of the XLA device that are not computed yet, oldest first: what torch_xla.sync() would compute."""
    import gc

    import torch
    import torch_xla
    pending = {}
    for tensor in gc.get_objects():
        if issubclass(type(tensor), torch.Tensor) and tensor.device.type == "xla" \
                and torch_xla._XLAC._check_tensor_need_materialization([tensor])[0]:
            pending.setdefault(torch_xla._XLAC._xla_get_tensor_id(tensor), tensor)
    return [pending[number] for number in sorted(pending)]


def make_placeholders(tensors=None):
    """Pretends that tensors, by default all that are pending, were computed."""
    for tensor in pending_tensors() if tensors is None else tensors:
        tensor.data = placeholder(tensor.shape, tensor.dtype)


def graph_hash(tensors):
    """Hash, in hexadecimal, of the graph that computes `tensors`. Shapes and operations count, values do not."""
    import torch_xla
    return torch_xla._XLAC._get_graph_hash(tensors).hex()


def trace(name, function, state, at_sync=1):
    """The TracedProgram that the `at_sync`-th torch_xla.sync() in or after `function()` would run.

    state: name -> tensor, for the names of the arguments. Those that are computed anew in place are donated, as
    torch_xla does it: their new value may take the old one's memory. Nothing runs: what the program would compute is a
    placeholder afterwards, so that function() never gets farther than that sync.
    """
    import torch_xla
    if pending_tensors():
        raise RuntimeError(f"there is something left to compute before {name} is traced")
    sync, programs = torch_xla.sync, []
    names = _names_by_id(state)

    def capture_instead(*args, **kwargs):
        nonlocal names
        outputs = pending_tensors()
        programs.append(_program(name, outputs, state, names))
        make_placeholders(outputs)
        torch_xla._XLAC._set_all_reduce_token(str(torch_xla.device()), None)  # as sync() does
        names = _names_by_id(state)
        if len(programs) == at_sync:
            raise _Traced

    torch_xla.sync = capture_instead
    try:
        with lowering_for_tpu():
            result = function()  # kept until the sync: what a function returns is computed too
            torch_xla.sync()
            del result
    except _Traced:
        return programs[-1]
    finally:
        torch_xla.sync = sync
    raise RuntimeError(f"{name} has fewer than {at_sync} syncs")


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
    return TracedProgram(
        name, torch_xla_c._get_xla_tensors_hlo_proto(outputs), graph_hash(outputs),
        count_instructions(torch_xla_c._get_xla_tensors_hlo(outputs)), arguments,
        frozenset(index for index, argument in enumerate(arguments) if argument in updated))


def count_instructions(hlo_text):
    """HLO instructions in a module's text, those inside fusions and loops included, each once."""
    return len(re.findall(r"^\s+(?:ROOT )?%?[\w.-]+ = ", hlo_text, re.MULTILINE))


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
    (folder / "traced.pb").write_bytes(program.hlo)
    (folder / "request.json").write_text(json.dumps({
        "donated": sorted(program.donated), "topology": f"{tpu_slice.tpu.name}:{tpu_slice.topology}",
        "topology_options": _topology_options(tpu_slice)}))
    code = f"from nanochat.tpu_compiler import compile_folder; compile_folder({str(folder)!r})"
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
    """Environment in which libtpu compiles without a TPU, with the options that torch_xla would give it on one."""
    torch_xla_flags = _TORCH_XLA_LIBTPU_FLAGS | (_TORCH_XLA_V5_FLAGS if tpu_slice.tpu.name in ("v5e", "v5p") else {})
    flags = os.environ.get("LIBTPU_INIT_ARGS", "").split()
    flags += [f"--{key}={value}" for key, value in torch_xla_flags.items()
              if not any(flag.startswith(f"--{key}=") for flag in flags)]
    tpu = tpu_slice.tpu
    return os.environ | {
        "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": f"{tpu.accelerator_prefix}-{tpu_slice.chips * tpu.cores_per_chip}",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # libtpu's lock file is for those that use a TPU
        "LIBTPU_INIT_ARGS": " ".join(flags), "TF_CPP_MIN_LOG_LEVEL": "2"}
