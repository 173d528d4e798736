"""XLA programs: where one begins and ends, how many were compiled, what they take."""
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
    """What is known of one run of an XLA program once it is dispatched."""
    host_s: float = 0.0  # that the host spent tracing and dispatching it; what waits for the device does not count
    is_compiled: bool = False  # had to be compiled first; what the host spent is then not told apart


@contextmanager
def one_program(dist, name, collective=False):
    """What is computed inside the block becomes one XLA program, dispatched when the block ends.

    `collective`: it contains an all-reduce. On other devices nothing happens. Gives a ProgramRun, which is filled in
    at the end.

    Two ranks that are threads of one process and compile at the same time would get two executables, whose
    all-reduces never meet: the first runs of each program are therefore traced and compiled one rank after the other.
    Before a rank takes the lock, it waits for its programs in flight, because these may need a rank that waits for the
    lock.
    """
    run = ProgramRun()
    if not dist.is_xla:
        yield run
        return
    import torch_xla
    import torch_xla.core.xla_model as xm
    ranks_are_threads = dist.device_type == "xla" and dist.world_size > 1
    runs = dist.program_runs[name] = dist.program_runs.get(name, 0) + 1
    one_at_a_time = ranks_are_threads and runs <= 2
    if ranks_are_threads and (collective or one_at_a_time):
        xm.wait_device_ops(xm.xla_real_devices([dist.device]))  # waiting for all of them would hold them up
        if collective:
            thread_barrier(dist)
    with _trace_lock if one_at_a_time else nullcontext():
        compiled, begun = compilations(), time.monotonic()
        yield run
        traced, cpu_begun = time.monotonic(), time.thread_time()
        torch_xla.sync()
        # Tracing never waits for the device. sync() does where the device is busy, and then takes no CPU time; what
        # runs on XLA's own threads holds up nobody here.
        run.is_compiled = compilations() > compiled
        if not run.is_compiled:
            run.host_s = traced - begun + time.thread_time() - cpu_begun


def synchronize(dist):
    """Waits until the device has finished all that was dispatched to it."""
    if dist.is_xla:
        import torch_xla.core.xla_model as xm
        xm.wait_device_ops()
    elif dist.device_type == "cuda":
        torch.cuda.synchronize()


@contextmanager
def device_trace(dist, folder):
    """Records what host and device do in the block, and waits for the device at its end.

    Leaves files in `folder` for TensorBoard: xprof's from XLA, torch.profiler's from cuda and cpu.
    """
    if not dist.is_xla:
        with torch.profiler.profile(on_trace_ready=torch.profiler.tensorboard_trace_handler(str(folder))):
            yield
            synchronize(dist)
        return
    import torch_xla.debug.profiler as xp
    xp.start_trace(folder)
    try:
        yield
        synchronize(dist)
    finally:
        xp.stop_trace()


def compilations():
    """How many XLA programs this process has compiled; 0 where XLA is not in use."""
    return _compile_time()[0]


def compile_seconds():
    """Seconds that this process has spent compiling XLA programs; 0 where XLA is not in use."""
    return _compile_time()[1] / 1e9


def _compile_time():
    """(programs, nanoseconds in all): torch_xla's own count."""
    if "torch_xla" not in sys.modules:
        return 0, 0.0
    import torch_xla.debug.metrics as met
    return (met.metric_data("CompileTime") or (0, 0.0))[:2]


def device_memory(dist):
    """{name: bytes}: what is in use on a TPU, the most that ever was, and what there is. Empty on other devices."""
    if dist.device_type != "tpu":  # not implemented for XLA's CPU devices
        return {}
    import torch_xla.core.xla_model as xm
    info = xm.get_memory_info(dist.device)
    return {"device_memory_bytes": info["bytes_used"], "device_memory_peak_bytes": info["peak_bytes_used"],
            "device_memory_limit_bytes": info["bytes_limit"]}
