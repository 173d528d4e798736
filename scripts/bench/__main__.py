"""Measures how fast one part of nanochat is, beside a reference in the same run:

    python3 -m scripts.bench NAME

    train       training on this CPU: PyTorch's kernels, this project's, XLA
    loader      the loader beside the tokenizer alone, and its packing beside best fit
    kernels     cycles of the attention kernels on a TPU, beside their bound

--help behind a NAME lists the flags of that bench.
"""
import importlib
import sys

from nanochat.common import BadInput, run_script

NAMES = ("train", "loader", "kernels")


def main(argv=None):
    words = sys.argv[1:] if argv is None else argv
    name = words[0] if words else ""
    if name in ("-h", "--help"):
        print(__doc__)
        return 0
    if name not in NAMES:
        raise BadInput(f"no bench is called '{name}': give one of {', '.join(NAMES)}")
    sys.argv[0] = f"bench {name}"  # for its --help
    return importlib.import_module(f"scripts.bench.{name}").main(words[1:])


if __name__ == "__main__":
    run_script(main)
