"""Checks of a chip with a fault in the program, as functions of a Setting."""
import time
from functools import partial

import torch

from nanochat.kernels import pallas_attention
from nanochat.preflight import chip, chip_runs
from nanochat.run.processes import begin_with_parent


def begin_with(fault):
    """Begins the process of the ranks, with an all-reduce that has a fault on rank 1."""
    begin_with_parent()
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as xr
    all_reduce = xm.all_reduce

    def faulty(operation, tensors, *arguments, **options):
        fault(xr.global_ordinal(), tensors)
        return all_reduce(operation, tensors, *arguments, **options)

    xm.all_reduce = faulty


def drop(rank, tensors):
    if isinstance(tensors, list):
        for tensor in tensors:  # the same program on each rank: others would not meet
            tensor.mul_(torch.full(tensor.shape[-1:], float(rank != 1)).to(tensor.device))


def hang(rank, tensors):
    if rank == 1:
        time.sleep(10_000)


def begin_failing():
    raise RuntimeError("TPU initialization failed: No ba16c7433 device found.")  # in libtpu, on a wrong image of a VM


def begin_dropping():
    begin_with(drop)


def begin_hanging():
    begin_with(hang)


def collectives_after(begin, setting):
    """chip.collectives, whose ranks begin with this function."""
    chip.begin_with_parent = begin
    return chip.collectives(setting)


failing_collectives = partial(collectives_after, begin_failing)
dropping_collectives = partial(collectives_after, begin_dropping)
hanging_collectives = partial(collectives_after, begin_hanging)


def kernels_with_wrong_sign(setting):
    backward = pallas_attention.backward

    def wrong(*arrays, **options):
        d_q, *others = backward(*arrays, **options)
        return (-d_q, *others)

    pallas_attention.backward = wrong
    chip.SHAPES_ON_CPU.pop("heads of 64")
    return chip.kernels(setting)


def slow_host(setting):
    batch = chip_runs.DataLoader.__next__

    def late(loader):
        time.sleep(0.1)
        return batch(loader)

    chip_runs.DataLoader.__next__ = late
    return quick_host(setting)


class NotThere:
    """A check that the process of its own cannot even load."""

    def __reduce__(self):
        return int, ("no number",)


def quick_host(setting):
    chip_runs.MOST_HEADERS = 200
    chip_runs.LOADER_S = 1
    return chip_runs.host(setting)
