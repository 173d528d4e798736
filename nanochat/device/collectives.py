"""Communication between the ranks of a run: sums, parts and copies of tensors, and a barrier for threads."""
import threading

import torch


def all_reduce_sum(tensors, dist):
    """Sums every tensor of the list over all ranks, in place, by one all-reduce for the whole list.

    Averaging is left to the caller, because torch_xla ignores a scale when there is one rank.
    """
    if dist.world_size == 1:
        return
    if dist.is_xla:
        import torch_xla.core.xla_model as xm
        xm.all_reduce(xm.REDUCE_SUM, tensors)
    else:
        for tensor in tensors:
            torch.distributed.all_reduce(tensor)


def reduce_scatter_sum(tensor, dist):
    """Returns this rank's part, (n, …), of the sum of `tensor` (world_size × n, …) over all ranks. On XLA only."""
    import torch_xla
    import torch_xla.core.xla_model as xm
    # Remove the token of an earlier collective, which torch_xla would add to the tensor in a pass over memory.
    torch_xla._XLAC._set_all_reduce_token(str(dist.device), None)
    parts = tensor.unflatten(0, (dist.world_size, -1))  # divided so that nothing moves in memory
    return xm.reduce_scatter(xm.REDUCE_SUM, parts, 1.0, 0, dist.world_size, pin_layout=False)[0]


def all_gather(part, dist):
    """Returns the parts (n, …) of all ranks as one tensor (world_size × n, …). On XLA only."""
    import torch_xla.core.xla_model as xm
    # With pinned layouts it would become an all-reduce of padded tensors, and another program on every rank. The group
    # gives the number of ranks, because the runtime of a process that only traces would count its own devices.
    groups = [list(range(dist.world_size))]
    return xm.all_gather(part[None], 0, groups=groups, pin_layout=False).flatten(0, 1)


_barriers_lock, _thread_barriers = threading.Lock(), {}
BARRIER_TIMEOUT_S = 900


def thread_barrier(dist):
    """Waits for the other ranks if ranks are threads of this process, that is, several XLA devices on a CPU.

    On other devices it does nothing, and an early rank waits inside the all-reduce. On a CPU the all-reduce gives up
    after some 15 s, which is too short while another rank saves a checkpoint. Raises TimeoutError.
    """
    if dist.device_type == "xla" and dist.world_size > 1:
        with _barriers_lock:
            barrier = _thread_barriers.setdefault(dist.world_size, threading.Barrier(dist.world_size))
        try:
            barrier.wait(BARRIER_TIMEOUT_S)
        except threading.BrokenBarrierError:
            raise TimeoutError(f"rank {dist.rank} waited {BARRIER_TIMEOUT_S} s for the other ranks") from None
