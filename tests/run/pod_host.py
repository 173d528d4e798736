"""base_train on one of several "hosts" of this machine, which has an XLA device of its CPU:

    NANOCHAT_HOSTS=127.0.0.1,127.0.0.2 NANOCHAT_HOST_INDEX=1 python -m tests.run.pod_host --run=…

XLA cannot join CPU devices of several processes. So here a rank is told that it is one of the run's, and what a TPU's
chips exchange (sums, parts and copies of tensors) goes through the processors: every rank sends its tensors to that of
the first host, at the channel's port + 1, and gets those of all. Everything else is the program as it is.

POD_CLOCK_S is added to the clock, so that hosts disagree about the time.
"""
import functools
import os
import threading
import time
from multiprocessing.connection import Client, Listener

import nanochat.device.collectives as collectives

if "POD_CLOCK_S" in os.environ:
    true_time, skew_s = time.time, float(os.environ["POD_CLOCK_S"])
    time.time = lambda: true_time() + skew_s

HOSTS = os.environ["NANOCHAT_HOSTS"].split(",")
INDEX, PORT = int(os.environ["NANOCHAT_HOST_INDEX"]), int(os.environ["NANOCHAT_POD_PORT"]) + 1


@functools.cache
def connections():
    """Returns the connections of this rank: on the first host to all others, in their order, else to the first."""
    if INDEX:
        while True:
            try:
                connection = Client((HOSTS[0], PORT))
                connection.send(INDEX)
                return [connection]
            except OSError:
                time.sleep(0.05)
    with Listener((HOSTS[0], PORT)) as listener:
        found = [listener.accept() for _ in HOSTS[1:]]
    by_index = {connection.recv(): connection for connection in found}
    return [by_index[index] for index in sorted(by_index)]


def of_all_ranks(tensor):
    """Returns the tensors that all ranks give, in their order, on the CPU."""
    import torch
    own = tensor.detach().cpu().contiguous()
    data = own.reshape(-1).view(torch.uint8).numpy().tobytes()
    try:
        if INDEX:
            connections()[0].send_bytes(data)
            everything = connections()[0].recv_bytes()
        else:
            everything = data + b"".join(connection.recv_bytes() for connection in connections())
            for connection in connections():
                connection.send_bytes(everything)
    except (EOFError, ConnectionError):  # another rank has ended: a chip waits for it for ever
        threading.Event().wait()
    return [torch.frombuffer(bytearray(everything[at:at + len(data)]), dtype=own.dtype).view(own.shape)
            for at in range(0, len(everything), len(data))]


def all_reduce_sum(tensors, dist):
    for tensor in tensors:
        tensor.copy_(sum(of_all_ranks(tensor)))


def reduce_scatter_sum(tensor, dist):
    return sum(of_all_ranks(tensor)).unflatten(0, (dist.world_size, -1))[dist.rank].to(tensor.device)


def all_gather(part, dist):
    import torch
    return torch.cat(of_all_ranks(part)).to(part.device)


collectives.all_reduce_sum, collectives.reduce_scatter_sum, collectives.all_gather = \
    all_reduce_sum, reduce_scatter_sum, all_gather

from nanochat.common import run_script  # noqa: E402
from nanochat.device import ranks  # noqa: E402
from scripts.base_train import main  # noqa: E402


def compute_init(device_type, hosts=1):
    import torch_xla
    dist = ranks.Dist(device_type, torch_xla.device(), INDEX, hosts, hosts)
    ranks._this_thread.dist = dist
    return dist


ranks.compute_init = compute_init

if __name__ == "__main__":
    run_script(main)
