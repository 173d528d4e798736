"""Must we stop, or save? All ranks of a host learn of it before the same step, and the device is not asked.

Signals and Google Cloud's metadata server ask for a stop, rank 0's clock for a save. Ranks differ in how far they are
and in what they see first, so they agree through one small memory-mapped file. Each rank looks there at fixed points of
its program, its ticks: before each step and within evaluations. Rank 0 publishes a request; from then on every rank
answers with the number of its tick, and when the last one has answered, all do what was asked at the tick after the
highest of these. A rank that has answered waits for those that are behind it, but not for one that is ahead or beside
it and has not seen the request yet: that one may itself be waiting for this rank's gradients. Without a request a tick
writes one number to memory and reads two.
"""
import fcntl
import os
import signal
import threading
import time
import urllib.request
from contextlib import contextmanager
from multiprocessing import resource_tracker

import numpy as np

EXIT_STATUS = 75  # EX_TEMPFAIL: the state is saved, start me again
STOP, SAVE = 1, 2  # kinds of request
AGREE_TIMEOUT_S = 900
MAX_RANKS = 256
_NEVER = 2**62
# Offsets of the fields in the file, in numbers of 64 bits. Requests are numbered from 1. Each rank has four fields: the
# tick it is at, the last request that it answered, the tick it answered with, the last request whose outcome it read.
_STOP_ASKED, _NUMBER, _KIND, _AGREED_NUMBER, _AGREED_TICK, _TICK = range(6)
_ANSWERED, _ANSWER, _READ, _END = (_TICK + i * MAX_RANKS for i in range(1, 5))


class Requests:
    """What the processes of one host that open the same file ask of the ranks. `create`: by one process, before the
    others open it. Ranks give their rank and the number of ranks."""

    def __init__(self, path, rank=None, world_size=0, create=False):
        if create:
            np.zeros(_END, np.int64).tofile(path)
        self.is_stopping = False  # once agreed_action has returned STOP
        self._file = open(path, "r+b")
        self._shared = np.memmap(self._file, np.int64, "r+")
        self._rank, self._world_size = rank, world_size
        self._tick, self._number, self._kind, self._due_tick = 0, 0, 0, 0

    def ask_to_stop(self):
        """Asks all ranks to stop soon."""
        self._shared[_STOP_ASKED] = 1

    def agreed_action(self, wants_save=False):
        """Returns what all ranks do at this tick: STOP, SAVE or 0. All get the same answer at the same tick, provided
        that every rank calls it at the same points of its program.

        wants_save: whether rank 0 asks all ranks to save. Raises TimeoutError if the other ranks do not reach their
        next tick.
        """
        shared = self._shared
        self._tick += 1
        shared[_TICK + self._rank] = self._tick
        if self._rank == 0 and (wants_save or shared[_STOP_ASKED]) and not self.is_stopping:
            self._publish(STOP if shared[_STOP_ASKED] else SAVE)
        if not self._due_tick and shared[_NUMBER] > self._number:
            self._agree(int(shared[_NUMBER]))
        if self._tick != self._due_tick:
            return 0
        self._due_tick = 0
        self.is_stopping = self._kind == STOP
        return self._kind

    def finish(self):
        """Says that this rank comes to no further tick: what is asked from now on is too late."""
        with self._lock():
            for field, value in ((_ANSWERED, _NEVER), (_ANSWER, _NEVER), (_READ, _NEVER)):
                self._shared[field + self._rank] = value

    def _publish(self, kind):
        shared = self._shared
        if not self._due_tick and (self._of_ranks(_READ) >= shared[_NUMBER]).all():  # none is under way
            shared[_KIND] = kind
            shared[_NUMBER] += 1

    def _agree(self, number):
        """Answers request `number`. Returns when it is known at which tick it is due, or this rank must go on."""
        shared, deadline = self._shared, time.monotonic() + AGREE_TIMEOUT_S
        while True:
            with self._lock():
                if shared[_AGREED_NUMBER] < number:
                    shared[_ANSWER + self._rank], shared[_ANSWERED + self._rank] = self._tick, number
                missing = self._of_ranks(_ANSWERED) < number
                if shared[_AGREED_NUMBER] < number and not missing.any():
                    shared[_AGREED_TICK], shared[_AGREED_NUMBER] = self._of_ranks(_ANSWER).max() + 1, number
                if shared[_AGREED_NUMBER] == number:
                    self._number, self._kind = number, int(shared[_KIND])
                    self._due_tick = int(shared[_AGREED_TICK])
                    shared[_READ + self._rank] = number
                    return
            if (self._of_ranks(_TICK)[missing] >= self._tick).any():
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {self._rank} waited {AGREE_TIMEOUT_S} s for ranks "
                                   f"{np.flatnonzero(missing).tolist()} to agree on when to stop or save")
            time.sleep(0.002)

    def _of_ranks(self, field):
        return self._shared[field:field + self._world_size]

    @contextmanager
    def _lock(self):
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)


# -----------------------------------------------------------------------------
# Who asks

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def stop_on_signals(requests, report=print):
    """SIGTERM and SIGINT ask for a stop; a second SIGINT ends the process at once. Call in the main thread.

    Processes started from now on inherit that the two are blocked: a signal to the whole group, as Ctrl-C sends it, is
    the parent's business.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    for number in _SIGNALS:  # the wake-up file descriptor does the work, whatever the main thread is waiting for
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    resource_tracker.ensure_running()  # which would unblock them at the first process that multiprocessing starts
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)

    def work():
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        is_asked = False
        while True:
            for number in os.read(read_end, 64):
                if number not in _SIGNALS:
                    continue
                if number == signal.SIGINT and is_asked:
                    os._exit(130)
                is_asked = True
                requests.ask_to_stop()
                report(f"{signal.Signals(number).name}: the run stops after a few steps and saves a checkpoint"
                       + (" (again: it ends at once)" if number == signal.SIGINT else ""))

    threading.Thread(target=work, name="signals", daemon=True).start()


def stop_on_signal_to_rank(requests):
    """SIGTERM to a process that inherited it as blocked asks for a stop as well."""
    def work():
        signal.sigwait({signal.SIGTERM})
        requests.ask_to_stop()

    threading.Thread(target=work, name="signals", daemon=True).start()


def stop_on_preemption_notice(requests, report=print, poll_s=1.0):
    """Watches Google Cloud's metadata server in the background, and asks for a stop once the VM is to go.

    For the 30 s at most that are left, instance/preempted is TRUE, and before maintenance that the VM does not live
    through, instance/maintenance-event is TERMINATE_ON_HOST_MAINTENANCE (the other values: NONE, and
    MIGRATE_ON_HOST_MAINTENANCE, which TPU VMs do not know). $GCE_METADATA_HOST is where the server is, as in Google's
    own libraries. One that cannot be reached is asked again.
    """
    host = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")

    def ask(key):
        request = urllib.request.Request(f"http://{host}/computeMetadata/v1/instance/{key}",
                                         headers={"Metadata-Flavor": "Google"})
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                return answer.read().strip().decode(errors="replace")
        except OSError:  # URLError is one
            return ""

    def watch():
        while True:
            for key, what in (("preempted", "TRUE"), ("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE")):
                if ask(key) == what:
                    report(f"this VM is about to go (instance/{key} is {what}): the run stops after a few steps and "
                           "saves a checkpoint")
                    return requests.ask_to_stop()
            time.sleep(poll_s)

    threading.Thread(target=watch, name="preemption", daemon=True).start()
