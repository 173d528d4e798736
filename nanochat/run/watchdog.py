"""The watchdog: the parent process notices that a rank has died or hangs, says why, and ends the run with status 1.

Each rank writes its phase and the deadline of the phase into a small memory-mapped file. The parent reads the file four
times a second, so it also notices a rank that holds the GIL or waits for the device.
"""
import faulthandler
import math
import multiprocessing
import os
import signal
import sys
import threading
import time

import numpy as np

from nanochat.common import say, work
from nanochat.record.alerts import alert

MAX_RANKS = 2**14  # of a run: the largest slice, of v5p, has 8,960 chips
POLL_S = 0.25
STACKS_S, MAIN_THREAD_S = 1, 20
PHASES = ("step", "compile", "evaluate", "sample", "save", "end")
SLOW_PHASE_TIMEOUT_S = 3600  # of every phase except an ordinary step and the end, and of everything before the first
END_TIMEOUT_S = 7200  # of the end: up to half an hour for the disk and another for the mirror
STEP_FACTOR = 20  # a step is late once it takes this many times the usual time
_PID, _PHASE, _STEP, _DEADLINE = range(4)  # the deadline is a time of CLOCK_MONOTONIC, which all processes share


class Heartbeats:
    """The memory-mapped file with the phases and deadlines of a host's ranks."""

    def __init__(self, path, create=False):
        """create: whether to replace the file; one process does so before the others open it."""
        if create:
            np.zeros((MAX_RANKS, 4)).tofile(path)
        self._shared = np.memmap(path, np.float64, "r+", shape=(MAX_RANKS, 4))

    def beat(self, rank, phase, step, limit_s):
        """Notes that this rank begins `phase`, one of PHASES, which must end within `limit_s` seconds."""
        # The write is not atomic. A reader may see the new phase with the old deadline, which has passed only if the
        # rank was late anyway; or, in a rank's first row, no deadline yet (0).
        self._shared[rank] = os.getpid(), PHASES.index(phase), step, time.monotonic() + limit_s

    def ranks_of(self, pid):
        """Returns the ranks that run in process `pid`."""
        return np.flatnonzero(self._shared[:, _PID] == pid).tolist()

    def have_begun(self):
        """Returns whether a rank has reached its first phase."""
        return bool(self._shared[:, _PID].any())

    def late(self, seconds):
        """Returns one line about a rank that is over its limit, or about a late first step, or None. seconds: since the
        ranks were spawned."""
        ranks = np.flatnonzero(self._shared[:, _PID])
        if not len(ranks) and seconds > SLOW_PHASE_TIMEOUT_S:
            return f"no rank has reached its first step after {seconds:.0f} s"
        for rank in ranks:
            pid, phase, step, deadline = self._shared[rank]
            if deadline and time.monotonic() > deadline:
                return (f"rank {rank} (process {int(pid)}) has not finished a {PHASES[int(phase)]} at step "
                        f"{int(step)}: it is {time.monotonic() - deadline:.0f} s over its limit")
        return None


def limit_s(phase, step_timeout_s, usual_s):
    """Returns the limit of a phase, in seconds. step_timeout_s: the smallest limit of an ordinary step; 0 or less: no
    limit for any phase. usual_s: the usual time of the slowest ordinary steps, those that wait for the device."""
    if step_timeout_s <= 0:
        return math.inf
    if phase == "step":
        return max(step_timeout_s, STEP_FACTOR * usual_s)
    return END_TIMEOUT_S if phase == "end" else SLOW_PHASE_TIMEOUT_S


# This signal makes a process print the stacks of all its threads, even while one of them holds the GIL. Stacks of
# threads that run change while they are read, which may crash the process: so it is sent only before a kill.
ALL_STACKS = signal.SIGRTMIN


def print_stacks_on_signal():
    """Makes SIGUSR1 print the stack of the main thread, which waits meanwhile, and ALL_STACKS those of all threads."""
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=False)
    faulthandler.register(ALL_STACKS, file=2)


# A rank that dies leaves the others waiting in a collective for ever, and neither they nor the main thread of this
# process, which waits for them, can be interrupted. So a thread watches, and ends the whole process. Once its children
# are gone, the main thread has MAIN_THREAD_S to return and clean up.
class Watchdog:
    """Watches, from a thread, the processes that this process spawns in the block `with Watchdog(heartbeats):`.

    If a process is killed, a rank is late, or the run has failed on another host, the thread says so, kills all
    processes (a late rank's after all have printed their stacks), and ends this process with status 1 unless the block
    ends first.
    """

    def __init__(self, heartbeats, pod=None):
        """pod: the Pod, if there are several hosts."""
        self.reason = ""  # why the run ends, once the watchdog has said it
        self.has_reported = threading.Event()
        self._heartbeats = heartbeats
        self._pod = pod
        self._children = {}  # pid -> process; its object keeps the exit code, whoever waited for it
        self._is_over = threading.Event()

    def __enter__(self):
        threading.Thread(target=self._work, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *error):
        self._is_over.set()

    def _work(self):
        started = time.monotonic()
        while not self._is_over.wait(POLL_S):
            # active_children forgets a process that has ended, so each is kept once it is seen.
            for child in multiprocessing.active_children():
                self._children[child.pid] = child
            # SIGTERM is never the cause: the executor ends the other processes with it.
            codes = {pid: child.exitcode for pid, child in self._children.items()}
            ended = {pid: code for pid, code in codes.items() if code not in (None, 0, -signal.SIGTERM)}
            if self._children and self._heartbeats.have_begun():
                work.begin("")  # rank 0 says what it does
            failure = self._pod.failure if self._pod else None
            late = self._heartbeats.late(time.monotonic() - started)
            # The nearest cause comes first: after a kill, other ranks are late because of it.
            if ended:
                self._report_killed(ended)
            elif failure:
                self._report(f"{failure}: the run ends")
            elif late:
                self._report(f"{late}. The stacks of all processes follow, then the run ends")
                faulthandler.dump_traceback(all_threads=True)
                for pid in self._alive():
                    os.kill(pid, ALL_STACKS)
                    time.sleep(STACKS_S)  # one process at a time, or their lines would mix
            else:
                continue
            return self._end()

    def _report_killed(self, ended):
        """Reports the processes that a signal has ended. ended: {pid: exit code}. A rank that fails reports it
        itself."""
        for pid, code in ended.items():
            if code < 0:
                ranks = ", ".join(map(str, self._heartbeats.ranks_of(pid))) or "?"
                cause = " (did the machine run out of memory?)" if code == -signal.SIGKILL else ""
                self._report(f"rank {ranks} (process {pid}) was ended by {signal.Signals(-code).name}{cause}: the run "
                             "ends")

    def _report(self, reason):
        self.reason = reason
        say(f"error: {reason}", sys.stderr)
        alert(f"a run ends: {reason}")

    def _end(self):
        self.has_reported.set()
        for pid in self._alive():
            os.kill(pid, signal.SIGKILL)
        # Without children (cpu, cuda) this process is a rank itself. Its main thread is late, or waits for a rank that
        # is, and would not come to clean up.
        if not self._is_over.wait(MAIN_THREAD_S if self._children else 0):  # so that the main thread can clean up
            os._exit(1)

    def _alive(self):
        return [pid for pid, child in self._children.items() if child.exitcode is None]
