"""What every script needs: flags, one-line errors, the base directory, and the ranks and devices of a run.

torch_xla is imported inside functions only: importing this module touches neither the XLA runtime, nor the network,
nor the disk.
"""
import argparse
import glob
import os
import sys
import threading
import time
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

DEVICE_TYPES = ("auto", "tpu", "xla", "cuda", "cpu")

# -----------------------------------------------------------------------------
# Errors, flags, printing


class BadInput(Exception):
    """The user can mend this: the message is one line with what is wrong, the value, and what to do. Exit status 2."""


def run_script(main):
    """Runs `main()` and ends the process: status main returns (None: 0), or 2 with one line on stderr for BadInput."""
    try:
        sys.exit(main())
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    pass


class ArgumentParser(argparse.ArgumentParser):
    """argparse with two habits: `--help` shows every default, and `--batch-size` means `--batch_size`."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, formatter_class=_HelpFormatter, allow_abbrev=False, **kwargs)

    def parse_known_args(self, args=None, namespace=None):
        normalised = []
        for arg in sys.argv[1:] if args is None else args:
            if arg.startswith("--") and len(arg) > 2:
                name, equals, value = arg.partition("=")
                arg = name.replace("-", "_").replace("__", "--", 1) + equals + value
            normalised.append(arg)
        return super().parse_known_args(normalised, namespace)


def print0(*values, rank=None, **kwargs):
    """Prints on rank 0 only. `rank` defaults to the rank of the calling process or thread."""
    if (get_dist_info()[0] if rank is None else rank) == 0:
        print(*values, flush=True, **kwargs)


def print_banner():
    print0(r"""
                             _           _
   _ __   __ _ _ __   ___ __| |__   __ _| |_
  | '_ \ / _` | '_ \ / _ \ / _| '_ \ / _` | __|
  | | | | (_| | | | | (_) | (__| | | | (_| | |_    C++ code models on TPUs
  |_| |_|\__,_|_| |_|\___/\___|_| |_|\__,_|\__|    with PyTorch/XLA
""")


def get_base_dir():
    """Path under which everything lies that is not code: `$NANOCHAT_BASE_DIR`, else `~/.cache/nanochat`."""
    return Path(os.environ.get("NANOCHAT_BASE_DIR") or Path.home() / ".cache" / "nanochat")


def require_writable_dir(path):
    """Creates directory `path` if need be and returns it as a Path. Raises BadInput if it cannot be written to."""
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".write_test_{os.getpid()}_{threading.get_ident()}"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise BadInput(f"cannot write to {path} ({error.strerror}): "
                       "set NANOCHAT_BASE_DIR to a writable directory") from None
    return path


# -----------------------------------------------------------------------------
# Devices


def count_tpu_chips(pci_devices="/sys/bus/pci/devices"):
    """Number of TPU chips on this machine's PCI bus, found without starting any runtime."""
    chips = 0
    for vendor_path in glob.glob(f"{pci_devices}/*/vendor"):
        if Path(vendor_path).read_text().strip() == "0x1ae0":  # Google
            device_id = Path(vendor_path).with_name("device").read_text().strip()
            # The ids that torch_xla knows; other Google devices (gVNIC, 0x0042) are not TPUs.
            chips += device_id in ("0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076")
    return chips


def resolve_device_type(requested="auto", pci_devices="/sys/bus/pci/devices"):
    """Turns `--device_type` into one of "tpu", "xla", "cuda", "cpu" and says so; raises BadInput if it is not there.

    On a machine with TPU chips `auto` is the TPU, and a PJRT_DEVICE that says otherwise is an error: a run that trains
    on the host's CPU by accident costs as much as one that trains on the TPU.
    """
    chips = count_tpu_chips(pci_devices)
    pjrt_device = os.environ.get("PJRT_DEVICE", "")
    if requested not in DEVICE_TYPES:
        raise BadInput(f"--device_type={requested} is unknown: choose one of {', '.join(DEVICE_TYPES)}")
    if requested == "auto":
        if chips:
            if pjrt_device and pjrt_device != "TPU":
                raise BadInput(f"this machine has {chips} TPU chips but PJRT_DEVICE={pjrt_device}: unset PJRT_DEVICE, "
                               "or ask for the CPU with --device_type=xla")
            return "tpu"
        if torch.cuda.is_available():
            return "cuda"
        print("no TPU and no GPU here: running on XLA CPU devices (as many as CPU_NUM_DEVICES says)", file=sys.stderr)
        return "xla"
    if requested == "tpu" and not chips:
        raise BadInput("--device_type=tpu, but this machine has no TPU chips: use --device_type=xla to run on the CPU")
    if requested == "cuda" and not torch.cuda.is_available():
        raise BadInput("--device_type=cuda, but PyTorch sees no GPU: use --device_type=xla to run on the CPU")
    return requested


def prepare_xla_environment(device_type):
    """Sets what torch_xla reads from the environment. Must run before torch_xla is imported, in the parent process."""
    if device_type == "tpu":
        os.environ["PJRT_DEVICE"] = "TPU"
    elif device_type == "xla":
        os.environ["PJRT_DEVICE"] = "CPU"
        devices = os.environ.setdefault("CPU_NUM_DEVICES", "1")
        if not devices.isdigit() or int(devices) < 1:
            raise BadInput(f"CPU_NUM_DEVICES={devices} is not a number of devices: set it to 1, 2, 4 …")
        # Several CPU devices are threads of one process. Their collectives block the threads that run them, so the
        # pool must hold them all, and the client must run programs in the order in which they were given to it.
        os.environ["PJRT_CPU_ASYNC_CLIENT"] = "0"
        os.environ["XLA_THREAD_POOL_SIZE"] = str(max(int(devices) * 2, os.cpu_count() or 1))


# -----------------------------------------------------------------------------
# Ranks


@dataclass(frozen=True)
class Dist:
    """Where this rank runs."""
    device_type: str  # "tpu", "xla", "cuda" or "cpu"
    device: torch.device
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1

    @property
    def is_xla(self):
        return self.device_type in ("tpu", "xla")


_this_thread = threading.local()  # ranks on CPU XLA devices are threads of one process


def get_dist_info():
    """(rank, local_rank, world_size) of the calling rank; (0, 0, 1) before compute_init."""
    dist = getattr(_this_thread, "dist", None)
    return (dist.rank, dist.local_rank, dist.world_size) if dist else (0, 0, 1)


def compute_init(device_type):
    """Starts the runtime for this rank and returns its Dist. `device_type` as resolve_device_type gave it."""
    if device_type in ("tpu", "xla"):
        import torch_xla
        import torch_xla.runtime as xr
        dist = Dist(device_type, torch_xla.device(), xr.global_ordinal(), xr.local_ordinal(), xr.world_size())
    elif device_type == "cuda":
        local_rank, world_size = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        torch.cuda.set_device(local_rank)
        torch.set_float32_matmul_precision("high")
        device = torch.device("cuda", local_rank)
        if world_size > 1:
            torch.distributed.init_process_group("nccl", device_id=device)
        dist = Dist("cuda", device, int(os.environ.get("RANK", 0)), local_rank, world_size)
    else:
        dist = Dist("cpu", torch.device("cpu"))
    _this_thread.dist = dist
    return dist


def compute_cleanup(dist):
    """Ends what compute_init began."""
    if dist.device_type == "cuda" and dist.world_size > 1:
        torch.distributed.destroy_process_group()
    _this_thread.dist = None


def xla_all_reduce_gradients(gradients, dist):
    """Sums every tensor of the list over all ranks, in place: one all-reduce for the whole list.

    The caller divides: torch_xla ignores a scale when there is one rank.
    """
    if dist.world_size == 1:
        return
    if dist.is_xla:
        import torch_xla.core.xla_model as xm
        xm.all_reduce(xm.REDUCE_SUM, gradients)
    else:
        for gradient in gradients:
            torch.distributed.all_reduce(gradient)


def xla_reduce_scatter(tensor, dist):
    """This rank's part, (n, …), of the sum of `tensor` (world_size × n, …) over all ranks. On XLA only."""
    import torch_xla
    import torch_xla.core.xla_model as xm
    # Without the token of an earlier collective, which torch_xla would add to the tensor in a pass of its own.
    torch_xla._XLAC._set_all_reduce_token(str(dist.device), None)
    parts = tensor.unflatten(0, (dist.world_size, -1))  # cut so, that nothing has to be moved within it
    return xm.reduce_scatter(xm.REDUCE_SUM, parts, 1.0, 0, dist.world_size, pin_layout=False)[0]


def xla_all_gather(part, dist):
    """The parts (n, …) of all ranks as one tensor (world_size × n, …). On XLA only."""
    import torch_xla.core.xla_model as xm
    # Layouts that are pinned would make it an all-reduce of padded tensors, another program on every rank. The group
    # says how many ranks there are; the runtime would count those of this process when a program is only traced.
    groups = [list(range(dist.world_size))]
    return xm.all_gather(part[None], 0, groups=groups, pin_layout=False).flatten(0, 1)


_trace_lock = threading.Lock()
_thread_barriers = {}
BARRIER_TIMEOUT_S = 900


def thread_barrier(dist):
    """Waits for the other ranks where ranks are threads of this process (several XLA devices on a CPU).

    Elsewhere it does nothing: there a rank that is early waits inside the all-reduce. On a CPU the all-reduce gives up
    after some 15 s, so a rank that saves a checkpoint must not be waited for in it.
    """
    if dist.device_type == "xla" and dist.world_size > 1:
        with _trace_lock:
            barrier = _thread_barriers.setdefault(dist.world_size, threading.Barrier(dist.world_size))
        try:
            barrier.wait(BARRIER_TIMEOUT_S)
        except threading.BrokenBarrierError:
            raise TimeoutError(f"rank {dist.rank} waited {BARRIER_TIMEOUT_S} s for the other ranks") from None


@dataclass
class ProgramRun:
    """What is known of one run of an XLA program once it is dispatched."""
    host_s: float = 0.0  # that the host spent tracing and dispatching it; what waits for the device does not count
    is_compiled: bool = False  # had to be compiled first; what the host spent is then not told apart


@contextmanager
def xla_program(dist, name, collective=False):
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
    counts = _this_thread.__dict__.setdefault("program_runs", {})
    counts[name] = counts.get(name, 0) + 1
    one_at_a_time = ranks_are_threads and counts[name] <= 2
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
