"""Pre-trains a GPT, on every chip of a TPU VM or on the devices that this machine has:

    python3 -m scripts.base_train --depth=16 --run=NAME

On a laptop, the same program runs over two XLA devices of its CPU:

    CPU_NUM_DEVICES=2 python3 -m scripts.base_train --config=configs/two_devices.toml

On GPUs: torchrun --nproc_per_node=8 -m scripts.base_train … A run whose name has a checkpoint resumes from it.
docs/training.md says more.
"""
# No line at module level touches the XLA runtime: each chip needs a process of its own, which starts it.
import sys

from nanochat.common import BadInput, run_script
from nanochat.device import tpu
from nanochat.device.ranks import resolve_device_type
from nanochat.run.hosts import this_host
from nanochat.run.processes import started_module
from nanochat.train.flags import parse_flags
from nanochat.train.language import make_task
from nanochat.train.launch import launch
from nanochat.train.prepare import run_directory
from nanochat.train.start import kept_flags


def main(argv=None):
    flags = parse_flags(argv, __doc__)
    device_type = resolve_device_type(flags.devices.device_type)
    if flags.run.preflight:
        this_host(device_type)  # a pod that is not whole is refused first; and the preflight learns its type
        given = sys.argv[1:] if argv is None else argv
        status = run_preflight([*given, *kept_flags(flags, run_directory(flags))])
        if status:
            return status
    return launch(flags, device_type, make_task)


def run_preflight(argv):
    """Runs tpu_preflight with base_train's flags `argv` in another process, which does not touch the TPU. Returns its
    exit status, which is 3 if the run's programs do not fit into the device's memory."""
    accelerator = tpu.detect_accelerator()
    if accelerator is None:
        raise BadInput("--preflight: no known TPU here: set TPU_ACCELERATOR_TYPE, to v5litepod-8 for example")
    with started_module("scripts.tpu_preflight", f"--accelerator={accelerator}", "--programs=micro_step,update",
                        *argv) as process:
        return process.wait()


if __name__ == "__main__":
    run_script(main, "preparing the run")
