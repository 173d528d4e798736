"""Refuses flags of a run that base_train would refuse when it starts, as far as that needs no TPU and no data:

    python3 -m deploy.lib.check_flags TYPE FLAGS …

TYPE is the TPU's, or "" if it is not known: then the batch is not compared with its number of chips.
"""
import sys

from nanochat.common import run_script
from nanochat.data.tokenizer import load_tokenizer
from nanochat.device.tpu import parse_accelerator
from nanochat.train.flags import parse_flags
from nanochat.train.plan import make_plan
from nanochat.train.prepare import run_directory


def main():
    accelerator = sys.argv[1]
    flags = parse_flags(sys.argv[2:])
    run_directory(flags)
    if accelerator and flags.devices.device_type in ("auto", "tpu") and not flags.data.tokenizer_dir:
        make_plan(flags, load_tokenizer().n_vocab, "tpu", parse_accelerator(accelerator).chips)


if __name__ == "__main__":
    run_script(main)
