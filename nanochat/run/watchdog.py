"""The watchdog: the parent process notices that a rank has died or hangs, says why, and ends the run with status 1.

Each rank writes into a small memory-mapped file what it is doing and by when it must have finished that. The parent
reads the file four times a second, so it also notices a rank that holds the GIL or waits for the device.
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
SLOW_PHASE_TIMEOUT_S = 3600  # of every phase but an ordinary step and the end, and of everything before the first
END_TIMEOUT_S = 7200  # of the end: up to half an hour for the disk and another for the mirror
STEP_FACTOR = 20  # a step is late once it takes this many times the median
_PID, _PHASE, _STEP, _DEADLINE = range(4)  # the deadline is a time of CLOCK_MONOTONIC, which all processes share


class Heartbeats:
    """The memory-mapped file in which the ranks of a host say what they are doing."""

    def __init__(self, path, create=False):
        """create: makes the file anew; one process does so before the others open it."""
        if create:
            np.zeros((MAX_RANKS, 4)).tofile(path)
        self._shared = np.memmap(path, np.float64, "r+", shape=(MAX_RANKS, 4))

    def beat(self, rank, phase, step, limit_s):
        """Says that this rank begins `phase`, one of PHASES, which must end within `limit_s` seconds."""
        self._shared[rank] = os.getpid(), PHASES.index(phase), step, time.monotonic() + limit_s

    def ranks_of(self, pid):
        """Returns the ranks that run in process `pid`."""
        return np.flatnonzero(self._shared[:, _PID] == pid).tolist()

    def late(self, seconds):
        """Returns one line about a rank that is over its limit, or about none having begun after `seconds`, or None.

        seconds: since the ranks were spawned.
        """
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
    """Returns how many seconds a phase may take.

    step_timeout_s: the least limit of an ordinary step; 0 or less: no limit for any phase.
    usual_s: the usual time of the slowest ordinary steps, which are those that wait for the device.
    """
    if step_timeout_s <= 0:
        return math.inf
    return {"step": max(step_timeout_s, STEP_FACTOR * usual_s), "end": END_TIMEOUT_S}.get(phase, SLOW_PHASE_TIMEOUT_S)


def print_stacks_on_signal():
    """Makes SIGUSR1 print the stacks of all threads, even while one of them holds the GIL."""
    faulthandler.register(signal.SIGUSR1)


@contextmanager
def watching(heartbeats, report=lambda line: print(line, file=sys.stderr, flush=True), trouble=lambda: None):
    """Watches, from a thread, the processes that this process spawns in the block.

    Once a process is killed or a rank is late, or trouble() returns a line, the thread reports it, kills all processes
    (after they have printed their stacks, if a rank is late), and ends this process with status 1 unless the block ends
    first. The context is an Event that is set after the report.
    """
    children = {}  # pid -> process; its object keeps the exit code, whoever waited for it
    has_reported, is_over, started = threading.Event(), threading.Event(), time.monotonic()

    def work():
        while not is_over.wait(POLL_S):
            children.update((child.pid, child) for child in multiprocessing.active_children())
            ended = {pid: child.exitcode for pid, child in children.items() if child.exitcode}
            if ended:
                # SIGTERM is never the cause: the executor ends the other processes with it.
                for pid in [pid for pid, code in ended.items() if code < 0 and code != -signal.SIGTERM]:
                    report(f"error: rank {', '.join(map(str, heartbeats.ranks_of(pid))) or '?'} (process {pid}) was "
                           f"ended by {signal.Signals(-ended[pid]).name}: the run ends")
                return end()
            if elsewhere := trouble():
                report(f"error: {elsewhere}: the run ends")
                return end()
            if late := heartbeats.late(time.monotonic() - started):
                report(f"error: {late}. The stacks of all processes follow, then the run ends")
                print_all_stacks()
                return end()

    def print_all_stacks():
        faulthandler.dump_traceback(all_threads=True)
        for pid in alive():
            os.kill(pid, signal.SIGUSR1)
            time.sleep(STACKS_S)  # one process after the other, or their lines would mix

    def end():
        has_reported.set()
        for pid in alive():
            os.kill(pid, signal.SIGKILL)
        if not is_over.wait(MAIN_THREAD_S if children else 0):  # so that the main thread can return and clean up
            os._exit(1)

    def alive():
        return [pid for pid, child in children.items() if child.exitcode is None]

    threading.Thread(target=work, name="watchdog", daemon=True).start()
    try:
        yield has_reported
    finally:
        is_over.set()
