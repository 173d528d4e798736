"""Requests to stop or to save, on which all ranks of a host agree without asking the device.

Signals and Google Cloud's metadata server ask for a stop; rank 0's clock asks for a save. All ranks must obey before
the same step, but they are not at the same step when the request comes. So they agree through a small memory-mapped
file. Each rank reads it at fixed points of its program, its ticks: before each step and during evaluations. Rank 0
publishes a request, and every rank that sees it answers with the number of its current tick. Once all have answered,
the request is due at the tick after the highest answer, which no rank has passed yet.

A rank that has answered waits for ranks at lower ticks. It does not wait for a rank at the same or a higher tick that
has not seen the request yet, because that rank may itself be waiting for this one's gradients. Without a request, a
tick writes one number to memory and reads two.

If the run has several hosts, their parent processes agree instead (agreement.py), and a rank waits for them alone.
"""
import fcntl
import os
import signal
import sys
import threading
import time
from contextlib import contextmanager
from multiprocessing import resource_tracker

import numpy as np

from nanochat.run.hosts import metadata

EXIT_STATUS = 75  # EX_TEMPFAIL: the state is saved, start me again
STOP, SAVE = 1, 2  # kinds of request
AGREE_TIMEOUT_S = 900
MAX_RANKS = 256
_NEVER = 2**62
# Offsets of the fields in the file, in numbers of 64 bits. Requests are numbered from 1. Each rank has four fields: the
# tick it is at, the last request that it answered, the tick it answered with, the last request whose outcome it read.
# _STOP_ASKED counts how often a stop was asked for. _SAVE_ASKED: with several hosts, whether rank 0 asks for a save.
_STOP_ASKED, _IS_PREEMPTED, _WAITS_FOR_MIRROR, _SAVE_ASKED, _NUMBER, _KIND, _AGREED_NUMBER, _AGREED_TICK = range(8)
_TICK, _ANSWERED_NUMBER, _ANSWER_TICK, _READ_NUMBER, _END = (8 + i * MAX_RANKS for i in range(5))
HOLD_S = 0.01  # in which what a rank has written is seen by its parent


class Requests:
    """The requests of one host's processes to its ranks, in a file that all of them open."""

    def __init__(self, path, rank=None, world_size=0, create=False, spans_hosts=False):
        """
        rank, world_size: given by the ranks, and not by a process that only asks for a stop. spans_hosts: the ranks are
            on several hosts, whose parents agree.
        create: makes the file anew; one process does so before the others open it.
        """
        if create:
            np.zeros(_END, np.int64).tofile(path)
        self.is_stopping = False  # once agreed_action has returned STOP
        self._file = open(path, "r+b")
        self._shared = np.memmap(self._file, np.int64, "r+")
        self._rank, self._world_size, self._spans_hosts = rank, world_size, spans_hosts
        self._tick, self._number, self._kind, self._due_tick = 0, 0, 0, 0

    def ask_to_stop(self, is_preempted=False):
        """Asks all ranks to stop soon. is_preempted: because this machine is about to end."""
        self._shared[_IS_PREEMPTED] |= is_preempted
        self._shared[_STOP_ASKED] += 1

    @property
    def times_asked(self):
        """How often a stop was asked for so far."""
        return int(self._shared[_STOP_ASKED])

    @property
    def is_preempted(self):
        """Whether a stop was asked for because this machine is about to end."""
        return bool(self._shared[_IS_PREEMPTED])

    @property
    def waits_for_mirror(self):
        """Whether the ranks are done, and the run only waits for its mirror: nothing is lost if it ends at once."""
        return bool(self._shared[_WAITS_FOR_MIRROR])

    def begin_to_wait_for_mirror(self):
        """Makes waits_for_mirror true."""
        self._shared[_WAITS_FOR_MIRROR] = 1

    def agreed_action(self, wants_save=False):
        """Returns what all ranks do at this tick: STOP, SAVE or 0. All get the same answer at the same tick, provided
        that every rank calls it at the same points of its program.

        wants_save: on rank 0, whether to ask all ranks to save; it has no effect on other ranks. Raises TimeoutError if
        another rank does not come to its next tick.
        """
        shared = self._shared
        self._tick += 1
        shared[_TICK + self._rank] = self._tick
        if self._spans_hosts:
            return self._action_of_hosts(wants_save)
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
        """Says that this rank has no further tick, so that requests from now on have no effect."""
        with self._lock():
            for field in (_ANSWERED_NUMBER, _ANSWER_TICK, _READ_NUMBER) + (_TICK,) * self._spans_hosts:
                self._shared[field + self._rank] = _NEVER

    def _publish(self, kind):
        shared = self._shared
        if not self._due_tick and (self._of_ranks(_READ_NUMBER) >= shared[_NUMBER]).all():  # the last request is done
            shared[_KIND] = kind
            shared[_NUMBER] += 1

    def _agree(self, number):
        """Answers request `number`. Returns once its tick is known, or once waiting for it could be a deadlock."""
        shared, deadline = self._shared, time.monotonic() + AGREE_TIMEOUT_S
        while True:
            with self._lock():
                if shared[_AGREED_NUMBER] < number:
                    shared[_ANSWER_TICK + self._rank], shared[_ANSWERED_NUMBER + self._rank] = self._tick, number
                missing = self._of_ranks(_ANSWERED_NUMBER) < number
                if shared[_AGREED_NUMBER] < number and not missing.any():
                    shared[_AGREED_TICK], shared[_AGREED_NUMBER] = self._of_ranks(_ANSWER_TICK).max() + 1, number
                if shared[_AGREED_NUMBER] == number:
                    self._number, self._kind = number, int(shared[_KIND])
                    self._due_tick = int(shared[_AGREED_TICK])
                    shared[_READ_NUMBER + self._rank] = number
                    return
            if (self._of_ranks(_TICK)[missing] >= self._tick).any():
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {self._rank} waited {AGREE_TIMEOUT_S} s for ranks "
                                   f"{np.flatnonzero(missing).tolist()} to agree on when to stop or save")
            time.sleep(0.002)

    # Several hosts

    def _action_of_hosts(self, wants_save):
        shared, number = self._shared, int(self._shared[_NUMBER])
        if self._rank == 0:
            shared[_SAVE_ASKED] = wants_save
        if not self._due_tick and number > self._number:
            deadline = time.monotonic() + AGREE_TIMEOUT_S
            while shared[_AGREED_NUMBER] < number:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"rank {self._rank} waited {AGREE_TIMEOUT_S} s for the hosts to agree on when "
                                       "to stop or save")
                time.sleep(0.002)
            self._number, self._kind, self._due_tick = number, int(shared[_KIND]), int(shared[_AGREED_TICK])
        if self._tick != self._due_tick:
            return 0
        self._due_tick = 0
        self.is_stopping = self._kind == STOP
        if self._rank == 0:
            shared[_SAVE_ASKED] = 0
        shared[_READ_NUMBER + self._rank] = self._number
        return self._kind

    @property
    def save_is_asked(self):
        """Whether rank 0 asks for a save; of a run with several hosts."""
        return bool(self._shared[_SAVE_ASKED])

    def hold(self, number, kind):
        """Publishes the request `number` to this host's ranks, and returns the highest tick that any of them has come
        to. Until `decide` says when it is due, none passes another tick."""
        self._shared[_KIND] = kind
        self._shared[_NUMBER] = number
        time.sleep(HOLD_S)
        return int(self._shared[_TICK:_TICK + MAX_RANKS].max())

    def decide(self, number, tick):
        """Says that the request `number` is due at this tick."""
        self._shared[_AGREED_TICK] = tick
        self._shared[_AGREED_NUMBER] = number

    def is_done(self, number, num_ranks):
        """Returns whether all ranks of this host, so many, have done what the request asks for."""
        return int((self._shared[_READ_NUMBER:_READ_NUMBER + MAX_RANKS] >= number).sum()) >= num_ranks

    def note_preemption(self):
        """Notes that a host of the run is about to end."""
        self._shared[_IS_PREEMPTED] = 1

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
# Signals and preemption notices

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def stop_on_signals(requests, report=print):
    """Makes SIGTERM and SIGINT ask for a stop. Call it in the main thread.

    A second SIGINT ends the process at once. While the run waits for its mirror, a further signal of either kind ends
    the wait only, and the exit status stays EXIT_STATUS. If the machine is about to end, SIGTERM does not end the wait.

    Both signals are blocked in this process's main thread and in processes started from now on: a signal to the whole
    process group, such as Ctrl-C, is for the parent only.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    for number in _SIGNALS:  # this handler does nothing: a thread reads the pipe and acts, even while this one is busy
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    # If this process is killed, Python's resource tracker frees the semaphores of its pool. That needs no warning.
    sys.warnoptions.append("ignore::UserWarning:multiprocessing.resource_tracker")
    resource_tracker.ensure_running()  # now, because starting it later would unblock the signals
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)

    def work():
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        is_asked = False
        while True:
            for number in os.read(read_end, 64):
                if number not in _SIGNALS:
                    continue
                again = ""
                if requests.waits_for_mirror and not requests.is_preempted:
                    what = "the run ends now, without waiting for its mirror"
                elif number == signal.SIGINT and is_asked:
                    os._exit(130)
                else:
                    what = "the run stops after a few steps and saves a checkpoint"
                    again = " (again: it ends at once)" if number == signal.SIGINT else ""
                is_asked = True
                requests.ask_to_stop()
                report(f"{signal.Signals(number).name}: {what}{again}")

    threading.Thread(target=work, name="signals", daemon=True).start()


def stop_on_signal_to_rank(requests):
    """Makes SIGTERM to this process ask for a stop, too, although the process inherited it as blocked."""
    def work():
        signal.sigwait({signal.SIGTERM})
        requests.ask_to_stop()

    threading.Thread(target=work, name="signals", daemon=True).start()


def stop_on_preemption_notice(requests, report=print, poll_s=1.0):
    """Watches Google Cloud's metadata server in the background, and asks for a stop before the VM is preempted.

    instance/preempted becomes TRUE at most 30 s before the VM ends. instance/maintenance-event becomes
    TERMINATE_ON_HOST_MAINTENANCE before maintenance that ends the VM; its other values are NONE and, not on TPU VMs,
    MIGRATE_ON_HOST_MAINTENANCE. A server that cannot be reached is asked again.
    """
    def watch():
        while True:
            for key, what in (("preempted", "TRUE"), ("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE")):
                if metadata(key) == what:
                    report(f"this VM is about to end (instance/{key} is {what}): the run stops after a few steps and "
                           "saves a checkpoint")
                    return requests.ask_to_stop(is_preempted=True)
            time.sleep(poll_s)

    threading.Thread(target=watch, name="preemption", daemon=True).start()
