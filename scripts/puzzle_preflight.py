"""Compiles the programs of puzzle_train for a TPU, on a machine that has none, as tpu_preflight does for base_train:

    python3 -m scripts.prepare_puzzles --puzzle=sudoku --box=3x3 --train=100 --val=20
    python3 -m scripts.puzzle_preflight --accelerator=v5litepod-8 --total_batch_size=768 --num_iterations=65104

All flags of puzzle_train are accepted too (python3 -m scripts.puzzle_train --help). Only the size of the puzzles' grid
and the number of their tokens matter.

Exit status: 0 if the run fits, 3 if it does not, 2 for bad flags, 1 for a failure.
"""
import torch

from nanochat.common import BadInput, run_script
from nanochat.device.ranks import Dist
from nanochat.preflight.describe import deliver
from nanochat.preflight.flags import prepare, read_preflight_flags
from nanochat.preflight.report import make_report
from nanochat.preflight.trace import Programs, fill_with_placeholders
from nanochat.puzzles.plan import TITLES, Flags
from nanochat.puzzles.task import make_task
from nanochat.puzzles.trm import TRM


def trace_run(flags, chips):
    """Returns the Programs of a run on `chips` TPU chips, and its {name: TracedProgram}."""
    import torch_xla
    task = make_task(flags, "tpu", chips, directory=None)
    dist = Dist("tpu", torch_xla.device(), world_size=chips)
    # On the meta device the weights have shapes and no memory. Placeholders of the XLA device replace them.
    with torch.device("meta"):
        model = TRM(task.plan.config, task.plan.dtype)
    training = task.make_step(fill_with_placeholders(model), dist)
    programs = Programs(task.plan, training)
    return programs, programs.trace(
        {"micro_step": next(task.open_batches(dist, 0))},
        lambda: task.solve_held_out(training.model, dist, is_cut_short=lambda: False))


def main(argv=None):
    own, flags = read_preflight_flags(argv, __doc__, TITLES, Flags)
    if own.find_batch:
        raise BadInput("--find_batch is for base_train: give --total_batch_size instead")
    if own.find_mesh:
        raise BadInput("--find_mesh is for base_train: puzzle_train divides no weights, so leave it out")
    say = prepare(own)
    programs, traced = trace_run(flags, own.tpu_slice.chips)
    report = make_report(own, flags.as_dict(), programs, traced, say)
    return deliver(own, report, say)


if __name__ == "__main__":
    run_script(main)
