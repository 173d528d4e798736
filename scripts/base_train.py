"""Pre-trains a GPT, on every chip of a TPU VM or on the devices that this machine has:

    python3 -m scripts.base_train --depth=16 --run=NAME

On a laptop, the same program runs over two XLA devices of its CPU:

    CPU_NUM_DEVICES=2 python3 -m scripts.base_train --config=configs/two_devices.toml

A run whose name has a checkpoint resumes from it. docs/training.md says more.
"""
# No line at module level touches the XLA runtime: each chip needs a process of its own, which starts it.
from nanochat.common import run_script
from nanochat.device.ranks import resolve_device_type
from nanochat.train.flags import parse_flags


def main(argv=None):
    flags = parse_flags(argv, __doc__)
    from nanochat.train.language import make_task
    from nanochat.train.launch import launch
    return launch(flags, resolve_device_type(flags.devices.device_type), make_task)


if __name__ == "__main__":
    run_script(main, "preparing the run")
