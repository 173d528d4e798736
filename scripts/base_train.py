"""Pre-trains a GPT, on every chip of a TPU VM or on the devices that this machine has:

    python3 -m scripts.base_train --depth=16 --run=NAME

On a laptop, the same program runs over two XLA devices of its CPU:

    CPU_NUM_DEVICES=2 python3 -m scripts.base_train --depth=4 --num_iterations=100 --device_batch_size=4 \
        --max_seq_len=256 --total_batch_size=4096 --device_type=xla

On GPUs: torchrun --nproc_per_node=8 -m scripts.base_train … A run whose name has a checkpoint resumes from it.
No line at module level touches the XLA runtime: xmp.spawn starts a process for each chip, and they start theirs.
"""
import os
import subprocess
import sys
import tempfile
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from pathlib import Path

import torch

from nanochat.common import BadInput, run_script
from nanochat.device import tpu
from nanochat.device.ranks import compute_cleanup, compute_init, prepare_xla_environment, resolve_device_type
from nanochat.run.mirror import MirrorError
from nanochat.run.processes import begin_as_rank, end_process_on_error, exclusive_use, require_one_host
from nanochat.run.stopping import (
    EXIT_STATUS,
    Requests,
    stop_on_preemption_notice,
    stop_on_signal_to_rank,
    stop_on_signals,
)
from nanochat.run.watchdog import Heartbeats, watching
from nanochat.train.flags import parse_flags
from nanochat.train.prepare import prepare, run_directory
from nanochat.train.trainer import Trainer


def main(argv=None):
    flags = parse_flags(argv, __doc__)
    device_type = resolve_device_type(flags.devices.device_type)
    require_one_host(device_type)
    if flags.run.preflight:
        status = run_preflight(sys.argv[1:] if argv is None else argv)
        if status:
            return status
    train_here = train_on_xla if device_type in ("tpu", "xla") else train_without_parent
    try:
        return train_here(flags, device_type)
    except MirrorError as error:  # an outage, before training began
        print(f"error: {error}", file=sys.stderr, flush=True)
        return EXIT_STATUS
    except KeyboardInterrupt:  # before training began, for example while waiting for the mirror
        return 130


def run_preflight(argv):
    """Runs tpu_preflight with base_train's flags `argv` in another process, which does not touch the TPU. Returns its
    exit status: 0 if the run's programs fit into the device's memory, 3 if they do not."""
    accelerator = tpu.detect_accelerator()
    if accelerator is None:
        raise BadInput("--preflight: no known TPU here: set TPU_ACCELERATOR_TYPE, to v5litepod-8 for example")
    return subprocess.run([sys.executable, "-m", "scripts.tpu_preflight", f"--accelerator={accelerator}",
                           "--programs=micro_step,update", *argv]).returncode


def train_on_xla(flags, device_type):
    """Prepares the run in this process, and trains in the processes that it spawns. Returns the exit status."""
    prepare_xla_environment(device_type)
    accelerator = tpu.detect_accelerator() if device_type == "tpu" else None
    if accelerator:
        os.environ["LIBTPU_INIT_ARGS"] = tpu.libtpu_init_args(tpu.parse_accelerator(accelerator).tpu)
    with exclusive_use(run_directory(flags)):
        run = prepare(flags, device_type)
        if run.finished_step:
            return say_finished(run)
        requests = Requests(run.requests_file)
        stop_on_signals(requests)
        if device_type == "tpu":
            stop_on_preemption_notice(requests)
        return spawn(run)


def spawn(run):
    """Trains in a process for each chip, or in a thread for each XLA device of a CPU. Returns the exit status."""
    import torch_xla.distributed.xla_multiprocessing as xmp
    with watching(Heartbeats(run.heartbeats_file)) as has_reported, tempfile.TemporaryDirectory() as scratch:
        status_path = Path(scratch) / "status"
        status_path.write_text("0")
        try:
            xmp.spawn(_mp_fn, args=(run, str(status_path)), nprocs=None)
        except BrokenProcessPool:  # a rank ended its process; one that was killed could leave no status
            has_reported.wait(timeout=10)
            return int(status_path.read_text()) or 1
        return int(status_path.read_text())


def _mp_fn(index, run, status_path):
    """Runs in every spawned process."""
    begin_as_rank(run.directory)
    stop_on_signal_to_rank(Requests(run.requests_file))
    end_process_on_error(lambda: train(run), status_path)


def train(run):
    """Trains as one rank of the run. Returns the exit status."""
    dist = compute_init(run.plan.device_type)
    status = Trainer(run, dist).train()
    compute_cleanup(dist)
    return status


def train_without_parent(flags, device_type):
    """Trains on CUDA or cpu, where rank 0 does what on XLA the parent of the ranks does. Returns the exit status."""
    dist = compute_init(device_type)
    with exclusive_use(run_directory(flags)) if dist.rank == 0 else nullcontext():
        found = [prepare(flags, device_type) if dist.rank == 0 else None]
        if dist.world_size > 1:
            torch.distributed.broadcast_object_list(found)
        run = found[0]
        if run.finished_step:
            return say_finished(run) if dist.rank == 0 else 0
        stop_on_signals(Requests(run.requests_file))
        with watching(Heartbeats(run.heartbeats_file)) if dist.rank == 0 else nullcontext():
            status = Trainer(run, dist).train()
    compute_cleanup(dist)
    return status


def say_finished(run):
    """Says that there is nothing to train, and returns the exit status for that."""
    print(f"run {run.flags.run.run} has reached step {run.finished_step} ({run.checkpoint}): nothing left to do. "
          "Raise --num_iterations, choose another --run, or start over with --resume=never")
    return 0


if __name__ == "__main__":
    run_script(main)
