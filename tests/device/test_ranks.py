"""Which device a run trains on, and how its processes start there."""
import os
import pickle
import platform
import subprocess
import sys

import pytest

from nanochat.common import BadInput, Failure
from nanochat.device import ranks
from nanochat.device.programs import device_memory
from nanochat.device.ranks import compute_init, prepare_xla_environment, resolve_device_type, spawn_ranks
from nanochat.device.tpu import count_tpu_chips
from tests.device.test_tpu import write_pci_devices


def test_a_machine_with_tpus_trains_on_them(tmp_path, monkeypatch):
    write_pci_devices(tmp_path, [("0x1ae0", "0x0063")] * 8 + [("0x1ae0", "0x0042")])  # and a network card by Google
    assert count_tpu_chips(tmp_path) == 8
    monkeypatch.delenv("PJRT_DEVICE")
    assert resolve_device_type("auto", tmp_path) == "tpu"
    assert resolve_device_type("xla", tmp_path) == "xla"  # when told to
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    with pytest.raises(BadInput, match="8 .* PJRT_DEVICE=CPU: unset PJRT_DEVICE"):
        resolve_device_type("auto", tmp_path)


@pytest.mark.parametrize("devices", ["²", "٢", "0", "-1", "1.5", "", "99999"])
def test_a_number_of_cpu_devices_that_is_none_is_one_line(devices, monkeypatch):
    for name in ("CPU_NUM_DEVICES", "PJRT_DEVICE", "PJRT_CPU_ASYNC_CLIENT", "XLA_THREAD_POOL_SIZE"):
        monkeypatch.setenv(name, devices)  # so that what is set here is undone
    with pytest.raises(BadInput, match=f"CPU_NUM_DEVICES={devices} .*: set it to 1"):
        prepare_xla_environment("xla")


@pytest.mark.parametrize("name", ["XLA_USE_BF16", "XLA_DOWNCAST_BF16", "XLA_USE_SPMD", "TPU_MESH_CONFIG"])
def test_variables_with_which_torch_xla_computes_something_else_are_refused(name, monkeypatch):
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    monkeypatch.setenv(name, "0")
    prepare_xla_environment("tpu")
    monkeypatch.setenv(name, "1")
    prepare_xla_environment("cpu")  # which has no torch_xla
    with pytest.raises(BadInput, match=f"^{name}=1 .*: unset it$"):
        prepare_xla_environment("tpu")


PAGES = 12288  # 48 MiB


# Prints how many pages the system gives this process for a block of memory, after a larger one was freed: by default,
# and once it keeps what it frees.
COUNT_FAULTS = f"""
import resource
from nanochat.device.ranks import keep_freed_memory
def count_faults():
    b"x" * (2 * {PAGES} * 4096)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    b"x" * ({PAGES} * 4096)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(count_faults())
keep_freed_memory()
print(count_faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has mallopt")
def test_freed_memory_is_kept_where_it_is_asked_for(monkeypatch):
    def faults():
        done = subprocess.run([sys.executable, "-c", COUNT_FAULTS], capture_output=True, text=True, check=True)
        return [int(number) > PAGES // 2 for number in done.stdout.split()]

    for name in ("MALLOC_ARENA_MAX", "MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_", "CPU_NUM_DEVICES", "PJRT_DEVICE",
                 "PJRT_CPU_ASYNC_CLIENT", "XLA_THREAD_POOL_SIZE"):
        monkeypatch.setenv(name, "1")  # so that what is set here is undone
        monkeypatch.delenv(name)
    assert faults() == [True, False]
    prepare_xla_environment("xla")
    assert faults() == [False, False]


# On a TPU, of which the tests replace what they ask


@pytest.fixture
def tpu_environment(monkeypatch):
    """None of the variables that say which chips a process has."""
    for name in ("PJRT_DEVICE", "TPU_PROCESS_ADDRESSES", "CLOUD_TPU_TASK_ID", "TPU_WORKER_ID", "TPU_VISIBLE_CHIPS",
                 "TPU_PROCESS_BOUNDS", "TPU_CHIPS_PER_PROCESS_BOUNDS"):
        monkeypatch.setenv(name, "")  # so that what is set is undone
        monkeypatch.delenv(name)


def test_variables_of_a_single_process_reach_no_rank(tpu_environment, monkeypatch):
    monkeypatch.setenv("TPU_PROCESS_ADDRESSES", "local")
    monkeypatch.setenv("CLOUD_TPU_TASK_ID", "3")
    prepare_xla_environment("tpu")
    assert os.environ["PJRT_DEVICE"] == "TPU" and os.environ["TPU_WORKER_ID"] == "3"
    assert not {"TPU_PROCESS_ADDRESSES", "CLOUD_TPU_TASK_ID"} & os.environ.keys()
    del os.environ["TPU_WORKER_ID"]
    prepare_xla_environment("tpu")
    assert "TPU_WORKER_ID" not in os.environ  # a host of a pod asks the metadata server


def test_a_script_takes_the_first_chip_alone_and_says_in_one_line_if_it_is_taken(tpu_environment, monkeypatch):
    def busy():
        raise RuntimeError("TPU initialization failed:\nopen(/dev/vfio/0): Device or resource busy")

    monkeypatch.setattr("torch_xla._XLAC._xla_runtime_is_initialized", lambda: False)
    monkeypatch.setattr("torch_xla.device", busy)
    with pytest.raises(Failure, match=r"failed: open\(/dev/vfio/0\): Device or resource busy\): if a run is using it"):
        compute_init("tpu")
    assert os.environ["TPU_VISIBLE_CHIPS"] == "0"
    assert os.environ["TPU_PROCESS_BOUNDS"] == os.environ["TPU_CHIPS_PER_PROCESS_BOUNDS"] == "1,1,1"


def test_a_process_whose_runtime_does_not_start_ends_at_once(monkeypatch, capfd):
    """Otherwise the runtimes of the other ranks would wait for it."""
    def fail(local_rank, local_world_size):
        raise RuntimeError(f"no chip for {local_rank} of {local_world_size}")

    def end(status):
        raise SystemExit(status)

    started = []
    monkeypatch.setattr("torch_xla._internal.pjrt.initialize_multiprocess", fail)
    monkeypatch.setattr(ranks.os, "_exit", end)
    with pytest.raises(SystemExit, match="1"):
        ranks._start_runtime(lambda: started.append(True), 3, 8)
    assert started and "RuntimeError: no chip for 3 of 8" in capfd.readouterr().err


def test_spawned_processes_begin_before_their_runtime_starts(monkeypatch):
    spawned = []
    monkeypatch.setattr("torch_xla._internal.pjrt.initialize_multiprocess", None)
    monkeypatch.setattr("torch_xla.distributed.xla_multiprocessing.spawn", lambda *args, **kwargs: spawned.append(args))
    spawn_ranks(print, 1, begin=os.getpid)
    from torch_xla._internal import pjrt
    start = pickle.loads(pickle.dumps(pjrt.initialize_multiprocess))
    assert spawned and start.func is ranks._start_runtime and start.args == (os.getpid,)


def test_chips_that_torch_xla_does_not_see_are_refused_before_anything_starts(monkeypatch):
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    monkeypatch.setattr("torch_xla._internal.tpu.num_available_chips", lambda: 0)
    with pytest.raises(BadInput, match="/sys/bus/pci/devices: give this container"):
        spawn_ranks(print, begin=print)


def test_a_runtime_that_does_not_know_its_memory_ends_no_run(monkeypatch):
    def unknown(device):
        raise RuntimeError("UNIMPLEMENTED")

    monkeypatch.setattr("torch_xla.core.xla_model.get_memory_info", unknown)
    assert device_memory(ranks.Dist("tpu", None)) == {}
