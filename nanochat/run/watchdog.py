"""Who notices that a rank has died or hangs: the parent process, which also ends the run then, with status 1.

Each rank notes in a small memory-mapped file that all share what it is doing and until when it will have finished that
at the latest. The parent reads it four times a second. A rank needs neither the GIL nor a device to be found out.
"""
import faulthandler
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from contextlib import contextmanager

import numpy as np

MAX_RANKS = 256
POLL_S = 0.25
STACKS_S, MAIN_THREAD_S = 1, 20
PHASES = ("step", "compile", "evaluate", "sample", "save", "end")
SLOW_PHASE_TIMEOUT_S = 3600  # of every phase but an ordinary step, and of what comes before
STEP_FACTOR = 20  # a step that takes so many times the median is late
_PID, _PHASE, _STEP, _DEADLINE = range(4)  # the deadline is CLOCK_MONOTONIC's, which all processes share


class Heartbeats:
    """What the ranks of a host are doing. `create`: by one process, before the others open the file."""

    def __init__(self, path, create=False):
        if create:
            np.zeros((MAX_RANKS, 4)).tofile(path)
        self._shared = np.memmap(path, np.float64, "r+", shape=(MAX_RANKS, 4))

    def beat(self, rank, phase, step, limit_s):
        """This rank begins something that takes `limit_s` seconds at most."""
        self._shared[rank] = os.getpid(), PHASES.index(phase), step, time.monotonic() + limit_s

    def ranks_of(self, pid):
        """Numbers of the ranks that run in process `pid`."""
        return np.flatnonzero(self._shared[:, _PID] == pid).tolist()

    def late(self, seconds):
        """What is wrong, in a line, if a rank is late, or none has begun after so many seconds; else None."""
        ranks = np.flatnonzero(self._shared[:, _PID])
        if not len(ranks) and seconds > SLOW_PHASE_TIMEOUT_S:
            return f"no rank has come to its first step after {seconds:.0f} s"
        for rank in ranks:
            pid, phase, step, deadline = self._shared[rank]
            if deadline and time.monotonic() > deadline:
                return (f"rank {rank} (process {int(pid)}) has not come to the end of a {PHASES[int(phase)]} at step "
                        f"{int(step)}: it is {time.monotonic() - deadline:.0f} s over its limit")
        return None


def limit_s(phase, step_timeout_s, usual_s):
    """How long a phase may take, in seconds. step_timeout_s: for an ordinary step, 0 or less: for ever; usual_s: what
    the slowest of the ordinary steps take, which are those that wait for the device."""
    if step_timeout_s <= 0:
        return math.inf
    return max(step_timeout_s, STEP_FACTOR * usual_s) if phase == "step" else SLOW_PHASE_TIMEOUT_S


def print_stacks_on_signal():
    """SIGUSR1 prints the stacks of all threads, also while one of them holds the GIL."""
    faulthandler.register(signal.SIGUSR1)


@contextmanager
def watching(heartbeats, report=lambda line: print(line, file=sys.stderr, flush=True)):
    """Watches the processes that this process spawns in the block, from a thread.

    Once a process is killed or a rank is late, it says so, has every process print its stacks if one is late, kills
    them all, and ends this process with status 1 unless the block ends first. Gives an Event, set once it has said so.
    """
    children = {}  # a child's object keeps what became of it, whoever waited for it
    has_reported, is_over, started = threading.Event(), threading.Event(), time.monotonic()

    def work():
        while not is_over.wait(POLL_S):
            children.update((child.pid, child) for child in multiprocessing.active_children())
            ended = {pid: child.exitcode for pid, child in children.items() if child.exitcode}
            if ended:
                # The executor that started them ends the others with SIGTERM, so that is no cause.
                for pid in [pid for pid, code in ended.items() if code < 0 and code != -signal.SIGTERM]:
                    report(f"error: rank {', '.join(map(str, heartbeats.ranks_of(pid))) or '?'} (process {pid}) was "
                           f"ended by {signal.Signals(-ended[pid]).name}: the run ends")
                return end()
            if late := heartbeats.late(time.monotonic() - started):
                report(f"error: {late}. The stacks of all processes follow, then the run ends")
                print_all_stacks()
                return end()

    def print_all_stacks():
        faulthandler.dump_traceback(all_threads=True)
        for pid in alive():
            os.kill(pid, signal.SIGUSR1)
            time.sleep(STACKS_S)  # one after the other, or their lines mix

    def end():
        has_reported.set()
        for pid in alive():
            os.kill(pid, signal.SIGKILL)
        if not is_over.wait(MAIN_THREAD_S if children else 0):  # the main thread comes back from spawning and cleans up
            os._exit(1)

    def alive():
        return [pid for pid, child in children.items() if child.exitcode is None]

    threading.Thread(target=work, name="watchdog", daemon=True).start()
    try:
        yield has_reported
    finally:
        is_over.set()
