"""The ranks of a run and the devices that they run on.

torch and torch_xla are imported inside functions only: a script that imports this module prints its --help at once, and
touches neither the XLA runtime nor the network.
"""
import ctypes
import os
import re
import sys
import threading
import traceback
from dataclasses import dataclass, field
from functools import partial

from nanochat.common import BadInput, Failure, say
from nanochat.device import tpu
from nanochat.device.tpu import count_tpu_chips

DEVICE_TYPES = ("auto", "tpu", "xla", "cuda", "cpu")
_HARMFUL_VARIABLES = {
    "XLA_USE_BF16": "makes torch_xla keep all weights, sums and averages in bfloat16",
    "XLA_DOWNCAST_BF16": "makes torch_xla keep all weights, sums and averages in bfloat16",
    "XLA_USE_SPMD": "makes torch_xla leave out the sums over the ranks",
    "TPU_MESH_CONFIG": "names a mesh, and only --mesh_fsdp and --mesh_tensor do",
}


def resolve_device_type(requested="auto", pci_devices="/sys/bus/pci/devices"):
    """Returns the device type for `--device_type`: "tpu", "xla", "cuda" or "cpu". Raises BadInput if there is no such
    device.

    On a machine with TPU chips, `auto` is the TPU, and another PJRT_DEVICE is an error: training on the host's CPU by
    accident costs as much as training on the TPU.
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
        if has_gpu():
            return "cuda"
        say("no TPU and no GPU here: running on XLA CPU devices (as many as CPU_NUM_DEVICES says)", sys.stderr)
        return "xla"
    if requested == "tpu" and not chips:
        raise BadInput("--device_type=tpu, but this machine has no TPU chips: use --device_type=xla to run on the CPU")
    if requested == "cuda" and not has_gpu():
        raise BadInput("--device_type=cuda, but PyTorch sees no GPU: use --device_type=xla to run on the CPU")
    return requested


def has_gpu():
    import torch
    return torch.cuda.is_available()


def prepare_xla_environment(device_type):
    """Sets the environment variables of torch_xla. Call it in the parent process, before torch_xla is imported. Raises
    BadInput for variables with which torch_xla would compute something else."""
    if not re.fullmatch("[0-9]{0,5}", port := os.environ.get("PROFILE_PORT", "")):
        raise BadInput(f"PROFILE_PORT={port} is not a port: give a number, or unset it")
    for name, what in _HARMFUL_VARIABLES.items():
        if device_type in ("tpu", "xla") and os.environ.get(name, "").lower() not in ("", "0", "false"):
            raise BadInput(f"{name}={os.environ[name]} {what}: unset it")
    if device_type == "tpu":
        os.environ["PJRT_DEVICE"] = "TPU"
        # Kaggle sets these for one process with all chips. Here each chip gets a process, and torch_xla, which does not
        # overwrite them, would give all processes one place (huggingface/transformers issue 28204).
        os.environ.pop("TPU_PROCESS_ADDRESSES", None)
        if task := os.environ.pop("CLOUD_TPU_TASK_ID", ""):
            os.environ.setdefault("TPU_WORKER_ID", task)
    elif device_type == "xla":
        os.environ["PJRT_DEVICE"] = "CPU"
        devices = os.environ.setdefault("CPU_NUM_DEVICES", "1")
        if not re.fullmatch("[1-9][0-9]{0,2}", devices):
            raise BadInput(f"CPU_NUM_DEVICES={devices} is not a number of devices: set it to 1, 2, 4 …")
        # Several CPU devices are threads of one process. A collective blocks its thread, so the pool needs a thread for
        # each device, and the client must run programs in the order in which it gets them.
        os.environ["PJRT_CPU_ASYNC_CLIENT"] = "0"
        os.environ["XLA_THREAD_POOL_SIZE"] = str(max(int(devices) * 2, os.cpu_count() or 1))
        for variable, _, value in KEEP_FREED_MEMORY:  # glibc reads them when the ranks' process starts
            os.environ.setdefault(variable, str(value))


def prepare_libtpu(device_type):
    """Sets the options of libtpu for ranks on several chips of a TPU. Call it after prepare_xla_environment."""
    accelerator = tpu.detect_accelerator() if device_type == "tpu" else None
    if accelerator:
        os.environ["LIBTPU_INIT_ARGS"] = tpu.libtpu_init_args(tpu.parse_accelerator(accelerator))


# variable of glibc, parameter of its mallopt, value
KEEP_FREED_MEMORY = (("MALLOC_ARENA_MAX", -8, 1),  # otherwise each thread keeps its own
                     ("MALLOC_MMAP_MAX_", -4, 0),  # otherwise glibc unmaps a large block as soon as it is freed
                     ("MALLOC_TRIM_THRESHOLD_", -1, 2**31 - 1))


def keep_freed_memory():
    """Makes this process keep the memory that it frees, as prepare_xla_environment does for the spawned ranks. Does not
    override variables that are set, and does nothing without glibc.

    By default glibc returns each large tensor to the operating system, which clears every page of the next one: that
    took a third of the time of training on a CPU. In exchange, a process may need half as much memory again.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        return
    for variable, parameter, value in KEEP_FREED_MEMORY:
        if variable not in os.environ:
            mallopt(parameter, value)


# Ranks


@dataclass(frozen=True)
class Dist:
    """A rank, and the device that it runs on."""
    device_type: str  # "tpu", "xla", "cuda" or "cpu"
    device: object  # a torch.device
    rank: int = 0
    world_size: int = 1
    hosts: int = 1  # of the run; each has the same number of ranks
    local_rank: int = 0  # among those of this host
    program_runs: dict = field(default_factory=dict, compare=False, repr=False)  # name of program -> number of runs

    @property
    def is_xla(self):
        return self.device_type in ("tpu", "xla")

    @property
    def num_local(self):
        """The number of ranks of this host."""
        return self.world_size // self.hosts

    @property
    def num_threads(self):
        """The number of ranks that are threads of this process: on XLA devices of a CPU, all of this host."""
        return self.num_local if self.device_type == "xla" else 1


_this_thread = threading.local()  # ranks on CPU XLA devices are threads of one process


def compute_init(device_type, hosts=1):
    """Starts the runtime for this rank and returns its Dist. device_type: as resolve_device_type returns it; hosts: of
    the run."""
    if device_type in ("tpu", "xla"):
        import torch_xla
        import torch_xla.runtime as xr
        # spawn_ranks has started the runtime on this rank's chip. Other processes take one chip here.
        if device_type == "tpu" and not torch_xla._XLAC._xla_runtime_is_initialized():
            _start_on_one_chip()
        dist = Dist(device_type, torch_xla.device(), xr.global_ordinal(), xr.world_size(), hosts,
                    xr.local_ordinal())
        if dist.rank == 0 and (port := os.environ.get("PROFILE_PORT")):
            import torch_xla.debug.profiler as xp
            _this_thread.profiler = xp.start_server(int(port))  # whoever asks there gets a trace
    elif device_type == "cuda":
        import torch
        torch.set_float32_matmul_precision("high")
        dist = Dist("cuda", torch.device("cuda", 0))
    else:
        import torch
        dist = Dist("cpu", torch.device("cpu"))
    _this_thread.dist = dist
    return dist


def _start_on_one_chip():
    """Starts the runtime of a process that spawn_ranks has not started, on the first chip. With all chips of the host
    it would wait for the other hosts of a pod. Raises Failure."""
    import torch_xla
    torch_xla.tpu.configure_one_chip_topology()
    try:
        torch_xla.device()
    except RuntimeError as error:
        raise Failure(f"the TPU cannot be used ({' '.join(str(error).split())[:300]}): if a run is using it, wait for "
                      "its end, or add --device_type=cpu") from None


def spawn_ranks(function, *args, begin):
    """Calls function(index, *args) in a process for each TPU chip, or in a thread for each XLA device of a CPU, and
    returns when all have ended. Nothing may have started the XLA runtime before.

    begin(): called in every process before its runtime starts. Raises BrokenProcessPool if a process ends by itself,
    and BadInput if torch_xla finds no chips.
    """
    import torch_xla.distributed.xla_multiprocessing as xmp
    from torch_xla._internal import pjrt, tpu
    if os.environ["PJRT_DEVICE"] == "TPU" and not tpu.num_available_chips():
        raise BadInput("torch_xla counts TPU chips on the PCI bus, and sees none in /sys/bus/pci/devices: give this "
                       "container the machine's /sys (docker run --privileged)")
    pjrt.initialize_multiprocess = partial(_start_runtime, begin)  # the processes get this function by its name
    xmp.spawn(function, args=args, nprocs=None)


def _start_runtime(begin, local_rank, local_world_size):
    """Starts the runtime in a spawned process, and ends the process if that fails: otherwise the runtimes of the others
    would wait for this one, and torch_xla's spawn for them."""
    from torch_xla._internal import pjrt
    try:
        begin()
        # torch_xla's own function: spawn_ranks has replaced it in the parent alone, and this process imports pjrt anew.
        pjrt.initialize_multiprocess(local_rank, local_world_size)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def compute_cleanup(dist):
    """Ends this thread's part as a rank."""
    _this_thread.dist = None


def print0(text):
    """Prints on rank 0, and in processes without a rank."""
    dist = getattr(_this_thread, "dist", None)
    if dist is None or dist.rank == 0:
        say(text, keep="\n\t")
