"""Sums, parts and copies of tensors across the ranks of a run."""
import threading

import torch


def all_reduce_sum(gradients, dist):
    """Sums every tensor of the list over all ranks, in place: one all-reduce for the whole list.

    The caller divides: torch_xla ignores a scale when there is one rank.
    """
    if dist.world_size == 1:
        return
    if dist.is_xla:
        import torch_xla.core.xla_model as xm
        xm.all_reduce(xm.REDUCE_SUM, gradients)
    else:
        for gradient in gradients:
            torch.distributed.all_reduce(gradient)


def reduce_scatter_sum(tensor, dist):
    """This rank's part, (n, …), of the sum of `tensor` (world_size × n, …) over all ranks. On XLA only."""
    import torch_xla
    import torch_xla.core.xla_model as xm
    # Without the token of an earlier collective, which torch_xla would add to the tensor in a pass of its own.
    torch_xla._XLAC._set_all_reduce_token(str(dist.device), None)
    parts = tensor.unflatten(0, (dist.world_size, -1))  # cut so, that nothing has to be moved within it
    return xm.reduce_scatter(xm.REDUCE_SUM, parts, 1.0, 0, dist.world_size, pin_layout=False)[0]


def all_gather(part, dist):
    """The parts (n, …) of all ranks as one tensor (world_size × n, …). On XLA only."""
    import torch_xla.core.xla_model as xm
    # Layouts that are pinned would make it an all-reduce of padded tensors, another program on every rank. The group
    # says how many ranks there are; the runtime would count those of this process when a program is only traced.
    groups = [list(range(dist.world_size))]
    return xm.all_gather(part[None], 0, groups=groups, pin_layout=False).flatten(0, 1)


_barriers_lock, _thread_barriers = threading.Lock(), {}
BARRIER_TIMEOUT_S = 900


def thread_barrier(dist):
    """Waits for the other ranks where ranks are threads of this process (several XLA devices on a CPU).

    Elsewhere it does nothing: there a rank that is early waits inside the all-reduce. On a CPU the all-reduce gives up
    after some 15 s, so a rank that saves a checkpoint must not be waited for in it.
    """
    if dist.device_type == "xla" and dist.world_size > 1:
        with _barriers_lock:
            barrier = _thread_barriers.setdefault(dist.world_size, threading.Barrier(dist.world_size))
        try:
            barrier.wait(BARRIER_TIMEOUT_S)
        except threading.BrokenBarrierError:
            raise TimeoutError(f"rank {dist.rank} waited {BARRIER_TIMEOUT_S} s for the other ranks") from None
