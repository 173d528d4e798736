"""Pods of several hosts in one process, over this machine's loopback addresses."""
import socket
import threading
import time
from contextlib import contextmanager

from nanochat.run.hosts import Host
from nanochat.run.pod import Pod, PodLimits


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def make_pods(count, **limits):
    """Returns a Pod for each host, none of which has joined."""
    addresses, port = tuple(f"127.0.0.{index + 1}" for index in range(count)), free_port()
    limits = PodLimits(**{"grace_s": 3600, **limits})  # so that no failure ends the process of the tests
    return [Pod(Host(index, addresses, f"w{index}", port), limits) for index in range(count)]


def on_all(pods, function, *arguments):
    """Calls function(pod, *arguments) for each pod at the same time, and returns the results, errors among them."""
    results = [None] * len(pods)

    def call(index, pod):
        try:
            results[index] = function(pod, *arguments)
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=call, args=item, daemon=True) for item in enumerate(pods)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "it hangs"
    return results


@contextmanager
def joined_pods(count, **limits):
    pods = make_pods(count, **limits)
    try:
        for found in on_all(pods, lambda pod: pod.join({"host": pod.host.index})):
            assert found == [{"host": index} for index in range(count)]
        yield pods
    finally:
        on_all(pods, Pod.close)


def wait_for_gradients(ticks, rank, tick, ahead, together):
    """Ends the rank's tick as a step that needs the gradients of the others: it waits until they are at most `ahead`
    ticks behind it, or, where `together` divides the tick, until they have all reached it. ticks: the last of each."""
    ticks[rank] = tick
    deadline = time.monotonic() + 60
    while min(ticks) < (tick if tick % together == 0 else tick - ahead):
        assert time.monotonic() < deadline, "a deadlock"
        time.sleep(0.0001)
