"""Compiles small programs written in JAX for one chip, without a TPU, to measure their schedules."""
import os
import subprocess
import sys
from types import SimpleNamespace

from nanochat.common import BadInput, Failure
from nanochat.device import tpu
from nanochat.preflight import hlo
from nanochat.preflight.compile import compile_programs
from nanochat.preflight.ops import ops_of

_WRITE = "\nsys.stdout.buffer.write(lowered.compiler_ir('hlo').as_serialized_hlo_module_proto())\n"


def parse_one_chip(accelerator):
    """Returns the tpu.Slice of --accelerator, one chip whose schedules can be read. Raises BadInput."""
    tpu_slice = tpu.parse_accelerator(accelerator)
    if tpu_slice.chips != 1 or tpu_slice.tpu.name not in ("v5e", "v6e"):
        raise BadInput(f"--accelerator={accelerator} cannot be measured: give v5litepod-1 or v6e-1")
    return tpu_slice


def schedule_of(name, code, arguments, tpu_slice, folder, timeout_s):
    """Compiles a program. Returns the Schedule of its dearest operation, and what the Pallas kernel in it declares,
    {"flops": …, "transcendentals": …}, or {}.

    name: for messages. code: a Python script that takes `arguments` and makes `lowered`, what jax.jit(f).lower()
    returns; it runs in a process of its own, because JAX and torch_xla cannot share one.
    Raises Failure if tracing or compiling fails or times out, or the program does not fit into the chip.
    """
    try:
        traced = subprocess.run([sys.executable, "-c", f"import sys\n{code}{_WRITE}", *map(str, arguments)],
                                env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise Failure(f"tracing the {name} took more than --timeout_s={timeout_s}: give it more time") from None
    if traced.returncode:
        last = traced.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise Failure(f"the {name} cannot be traced: {''.join(last) or f'status {traced.returncode}'}")
    program = SimpleNamespace(name=name, hlo_proto=traced.stdout, donated=set())
    (_, compiled), = compile_programs([program], tpu_slice, folder, timeout_s, with_schedules=True)
    if compiled.out_of_memory:
        raise Failure(f"the {name} does not fit into the chip: {compiled.out_of_memory.splitlines()[0]}")
    dearest = max(compiled.schedules.values(), key=lambda schedule: schedule.cycles)
    for op in ops_of(hlo.parse(compiled.hlo_text)):
        if op.kernel and op.kernel.declared_cost:
            return dearest, op.kernel.declared_cost
    return dearest, {}
