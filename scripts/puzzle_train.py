"""Trains a Tiny Recursive Model (arXiv 2510.04871) to solve Sudokus, on every chip of a TPU VM or on this machine:

    python3 -m scripts.prepare_puzzles --box=2x2
    python3 -m scripts.puzzle_train --run=sudoku4 --hidden=64 --supervision_steps=4 --ema=0.95 --num_iterations=300

A run whose name has a checkpoint resumes from it, in the middle of its episodes. docs/puzzles.md says more.
"""
from nanochat.common import run_script
from nanochat.device.ranks import resolve_device_type
from nanochat.puzzles.flags import parse_flags


def main(argv=None):
    flags = parse_flags(argv, __doc__)
    from nanochat.puzzles.task import make_task
    from nanochat.train.launch import launch
    return launch(flags, resolve_device_type(flags.devices.device_type), make_task)


if __name__ == "__main__":
    run_script(main, "preparing the run")
