"""Communication between the ranks of a run: collectives, and a barrier for threads."""
import threading
from contextlib import contextmanager
from functools import cache, partial

import torch

from nanochat.device.xla_ops import without_token


def all_reduce_sum(tensors, dist):
    """Sums every tensor of the list over all ranks, in place, by one all-reduce for the whole list."""
    # The caller averages, because torch_xla ignores a scale with one rank.
    if dist.world_size == 1:
        return
    import torch_xla.core.xla_model as xm
    xm.all_reduce(xm.REDUCE_SUM, tensors)


def reduce_scatter_sum(tensor, dist):
    """Returns this rank's part, (n, …), of the sum of `tensor` (world_size × n, …) over all ranks. On XLA only."""
    # Divided so that nothing moves in memory. As rows, because XLA would give matrices the order that suits Muon's
    # products, and copy the whole tensor for it before the sum. With torch_xla's token, XLA reads and writes all
    # gradients once more: the update of a model of depth 16 takes 28.7 ms on v5e-8, without it 25.8 ms.
    parts = tensor.flatten(0, -2).unflatten(0, (dist.world_size, -1))
    return without_token(_scatter_sum(dist.world_size), parts)[0].unflatten(0, (-1, *tensor.shape[1:-1]))


@cache
def _scatter_sum(world_size):
    import torch_xla.core.xla_model as xm
    return partial(xm.reduce_scatter, xm.REDUCE_SUM, scale=1.0, scatter_dim=0, shard_count=world_size,
                   pin_layout=False)


def all_gather(part, dist):
    """Returns the parts (n, …) of all ranks as one tensor (world_size × n, …). On XLA only."""
    import torch_xla.core.xla_model as xm
    # With pinned layouts it would become an all-reduce of padded tensors, and another program on every rank. The group
    # gives the number of ranks, because the runtime of a process that only traces would count its own devices.
    # Gathers keep torch_xla's token and with it their order: without an order, fewer of them overlap with products.
    groups = [list(range(dist.world_size))]
    return xm.all_gather(part[None], 0, groups=groups, pin_layout=False).flatten(0, 1)


_barriers_lock = threading.Lock()
_thread_barriers = {}  # number of threads -> threading.Barrier
BARRIER_TIMEOUT_S = 900


def thread_barrier(dist):
    """Waits for the other ranks if ranks are threads of this process, that is, several XLA devices on a CPU. Raises
    TimeoutError.

    On other devices it does nothing, and an early rank waits inside the all-reduce. On a CPU the all-reduce times out
    after some 15 s, which is too short while another rank saves a checkpoint.
    """
    if dist.num_threads > 1:
        with _barriers_lock:
            barrier = _thread_barriers.setdefault(dist.num_threads, threading.Barrier(dist.num_threads))
        try:
            barrier.wait(BARRIER_TIMEOUT_S)
        except threading.BrokenBarrierError:
            raise TimeoutError(f"rank {dist.rank} waited {BARRIER_TIMEOUT_S} s for the other ranks") from None


# Collectives within groups of ranks, ((rank, …), …), on XLA. The body of a loop of the program may use them.


def gather_in_groups(part, groups):
    """Returns the parts (n, …) of the ranks of this rank's group as one tensor (ranks × n, …)."""
    import torch_xla.core.xla_model as xm
    with _no_token():
        return xm.all_gather(part, 0, groups=_lists(groups), pin_layout=False)


def exchange_in_groups(tensor, groups, split, concat):
    """Returns the parts that this rank receives when each rank sends the r-th part of its `tensor` along dimension
    `split` to rank r of its group, concatenated along dimension `concat`."""
    import torch_xla.core.xla_model as xm
    if split:
        # Makes each part a whole block of memory first. The compiler's own copy, for the exchange of a single layer,
        # has so many instructions that it did not compile for 32 chips.
        tensor = tensor.unflatten(split, (len(groups[0]), -1)).movedim(split, 0).flatten(0, 1)
    with _no_token():
        return xm.all_to_all(tensor, 0, concat, len(groups[0]), _lists(groups), pin_layout=False)


def scatter_sum_in_groups(tensor, groups):
    """Returns this rank's part, (n, …) in fp32, of the sum of `tensor` (ranks × n, …) over the ranks of its group.

    The parts travel in the dtype of `tensor` and are summed in fp32. On 16 chips and more, the TPU compiler turns a
    reduce-scatter into an all-reduce, which moves twice the bytes; an exchange it overlaps with products.
    """
    # Divided after the exchange: before it, the products that make the tensor would get another order in memory.
    return exchange_in_groups(tensor, groups, 0, 0).unflatten(0, (len(groups[0]), -1)).float().sum(0)


def all_reduce_in_groups(operation, tensor, groups):
    """Returns the "sum" or "max" of `tensor` over this rank's group, by element: the same bits on each."""
    import torch_xla.core.xla_model as xm
    with _no_token():
        return xm.all_reduce(operation, tensor, groups=_lists(groups), pin_layout=False)


def place_in_group(groups, device):
    """Returns this rank's place in its group, int32 ()."""
    # By an exchange: each rank sends the number r to rank r of its group. A constant for each rank would make different
    # programs, whose collectives do not meet.
    return exchange_in_groups(torch.arange(len(groups[0]), dtype=torch.int32, device=device), groups, 0, 0)[0]


def _lists(groups):  # torch_xla takes no tuples
    return [list(group) for group in groups]


@contextmanager
def _no_token():
    """Makes the collective in the block independent of others. torch_xla chains them by a token that it adds to their
    tensors; in the body of a loop, the token from outside would be a tensor that is not an argument."""
    import torch_xla
    device = str(torch_xla.device())
    torch_xla._XLAC._set_all_reduce_token(device, None)
    yield
    torch_xla._XLAC._set_all_reduce_token(device, None)
