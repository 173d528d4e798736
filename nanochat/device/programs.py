"""XLA programs: where one begins and ends, how many were compiled, and how long that took."""
import sys
import threading
import time
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch

from nanochat.device.collectives import thread_barrier

_trace_lock = threading.Lock()


@dataclass
class ProgramRun:
    """Measurements of one run of an XLA program, made when it is dispatched."""
    host_s: float = 0.0  # seconds that the host spent tracing and dispatching it, without waiting for the device
    is_compiled: bool = False  # it had to be compiled first; host_s is not known then


@contextmanager
def one_program(dist, name, collective=False):
    """Makes the computation inside the block one XLA program, dispatched at the end of the block. Does nothing on other
    devices. Yields a ProgramRun, filled in at the end.

    name: of the program; collective: whether it contains a collective. Ranks that are threads of one process trace and
    compile the first two runs of each program in turn.
    """
    run = ProgramRun()
    if not dist.is_xla:
        yield run
        return
    import torch_xla
    import torch_xla.core.xla_model as xm
    # Two threads that compile a program at the same time get two executables whose all-reduces never meet: hence the
    # lock. Before a rank takes it, it waits for its programs in flight, which may need a rank that waits for the lock.
    ranks_are_threads = dist.num_threads > 1
    runs = dist.program_runs[name] = dist.program_runs.get(name, 0) + 1
    one_at_a_time = ranks_are_threads and runs <= 2
    if ranks_are_threads and (collective or one_at_a_time):
        xm.wait_device_ops(xm.xla_real_devices([dist.device]))  # not for the devices of the other ranks
        if collective:
            thread_barrier(dist)
    turn = _trace_lock if one_at_a_time else nullcontext()
    with turn:
        compiled = compilations()
        begun = time.monotonic()
        yield run
        traced = time.monotonic()
        cpu_begun = time.thread_time()
    if one_at_a_time and collective:
        # All ranks trace before any of them dispatches: a collective may time out while the others trace. The lock is
        # free meanwhile, because they need it to come here.
        thread_barrier(dist)
    with turn:
        torch_xla.sync()
        # Tracing never waits for the device. sync() does if the device is busy, but uses no CPU time for it, so its CPU
        # time counts.
        run.is_compiled = compilations() > compiled
        if not run.is_compiled:
            run.host_s = traced - begun + time.thread_time() - cpu_begun


def synchronize(dist):
    """Waits until the device has finished all dispatched programs."""
    if dist.is_xla:
        import torch_xla.core.xla_model as xm
        xm.wait_device_ops()
    elif dist.device_type == "cuda":
        torch.cuda.synchronize()


def compilations():
    """Returns the number of XLA programs that this process has compiled; 0 if XLA is not in use."""
    return _compile_time()[0]


def compile_seconds():
    """Returns the seconds that this process has spent compiling XLA programs; 0 if XLA is not in use."""
    return _compile_time()[1] / 1e9


def _compile_time():
    """Returns (number of programs, nanoseconds), by torch_xla's own count."""
    if "torch_xla" not in sys.modules:
        return 0, 0.0
    import torch_xla.debug.metrics as met
    return (met.metric_data("CompileTime") or (0, 0.0))[:2]


def device_memory(dist):
    """Returns the bytes of a TPU's memory in use, their peak, and the limit, as {metric: bytes}; {} on other devices,
    and if the runtime does not know them."""
    if dist.device_type != "tpu":  # not implemented for XLA's CPU devices
        return {}
    import torch_xla.core.xla_model as xm
    try:
        info = xm.get_memory_info(dist.device)
    except RuntimeError:  # a missing metric does not end a run
        return {}
    return {"device_memory_bytes": info["bytes_used"], "device_memory_peak_bytes": info["peak_bytes_used"],
            "device_memory_limit_bytes": info["bytes_limit"]}
