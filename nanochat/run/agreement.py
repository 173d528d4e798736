"""How all ranks agree on the step at which they stop, without asking the device.

Signals and Google Cloud's metadata server ask for a stop. All ranks must obey before the same step, but they are at
different steps when the request comes. So they agree through a small memory-mapped file. Each rank reads it at fixed
points of its program, its ticks: before each step and during evaluations. A request is published, and from then on each
rank waits at its next tick. It is due at the tick after the highest that any rank has reached, which none has passed
yet. Whoever decides that waits for no rank, so there is no deadlock, although a rank may need the gradients of one that
waits. Without a request, a tick writes one number to memory and reads one.

On one host, rank 0 publishes and decides. If the run has several, their parent processes do, through their channel
(pod.py): each publishes the request to its ranks and tells the others their highest tick.
"""
import itertools
import math
import threading
import time

import numpy as np

from nanochat.run.pod import PodError
from nanochat.run.watchdog import MAX_RANKS

AGREE_TIMEOUT_S = 900
_NEVER = 2**62
# Offsets of the fields in the file, in numbers of 64 bits. _STOP_ASKED counts how often a stop was asked for.
# _IS_PUBLISHED says that each rank waits at its next tick. _DUE_TICK is the tick at which they stop, 0 until that is
# decided. Each rank has a field for the tick that it is at.
_STOP_ASKED, _IS_PREEMPTED, _WAITS_FOR_MIRROR, _IS_PUBLISHED, _DUE_TICK = range(5)
_TICK = 5
_END = _TICK + MAX_RANKS
HOLD_S = 0.01  # within which a process sees what another has written
POLL_S = 0.1


class Requests:
    """The requests to the ranks of one host, in a memory-mapped file that all its processes open."""

    def __init__(self, path, create=False):
        """create: whether to replace the file; one process does so before the others open it."""
        if create:
            np.zeros(_END, np.int64).tofile(path)
        self.shared = np.memmap(path, np.int64, "r+")

    def ask_to_stop(self, is_preempted=False):
        """Asks all ranks to stop soon. is_preempted: because this machine is about to end."""
        # The reason before the count, which others poll. Two processes that ask at the same moment may count as one,
        # which also stops the run.
        self.shared[_IS_PREEMPTED] |= is_preempted
        self.shared[_STOP_ASKED] += 1

    @property
    def times_asked(self):
        return int(self.shared[_STOP_ASKED])

    @property
    def is_preempted(self):
        """Whether a stop was asked for because a machine of the run is about to end."""
        return bool(self.shared[_IS_PREEMPTED])

    def note_preemption(self):
        """Makes is_preempted true: another host of the run is about to end."""
        self.shared[_IS_PREEMPTED] = 1

    @property
    def waits_for_mirror(self):
        """Whether the ranks have ended, and the run only waits for its mirror: ending at once loses nothing."""
        return bool(self.shared[_WAITS_FOR_MIRROR])

    def begin_to_wait_for_mirror(self):
        self.shared[_WAITS_FOR_MIRROR] = 1

    # For the process that decides

    def hold(self):
        """Publishes the request to this host's ranks, and returns the highest tick that any of them has reached. None
        passes its next tick until `decide` says when the request is due."""
        self.shared[_IS_PUBLISHED] = 1
        # A rank writes its tick before it reads this. So one that saw no request has written its tick, and all
        # others stop at theirs.
        time.sleep(HOLD_S)
        return int(self.shared[_TICK:_TICK + MAX_RANKS].max())

    def decide(self, tick):
        """Says that the request is due at this tick."""
        self.shared[_DUE_TICK] = tick


# An example: rank 0 is before its tick 6 and rank 1 before its tick 8 when a signal comes. Rank 0 publishes the request
# at its tick 6. Rank 1, which has just begun its tick 8, does not see it there, but at its tick 9, and waits for the
# decision. Rank 0 finds that the highest tick is 9, and decides on 10. Rank 1 goes on to its tick 10 and stops there,
# and so does rank 0, four ticks later. Rank 1 has waited once, for about HOLD_S, and for no step of rank 0.
class RankAgreement:
    """One rank's part in agreeing on when all ranks stop."""

    def __init__(self, requests, rank, spans_hosts=False, timeout_s=AGREE_TIMEOUT_S):
        """requests: the Requests of this host. spans_hosts: the ranks are on several hosts, whose parents decide.
        timeout_s: how long to wait for a decision."""
        self.is_stopping = False  # from the agreed tick on
        self._requests = requests
        self._shared = requests.shared
        self._rank = rank
        self._spans_hosts = spans_hosts
        self._timeout_s = timeout_s
        self._tick = 0
        self._due_tick = 0  # of the request, once this rank knows it

    def agreed_to_stop(self):
        """Returns whether all ranks stop at this tick. All get the same answer at the same tick, provided that every
        rank calls it at the same points of its program. Raises TimeoutError if nobody decides when a request is due."""
        self._tick += 1
        self._shared[_TICK + self._rank] = self._tick
        requests = self._requests
        decides = self._rank == 0 and not self._spans_hosts
        if decides and requests.times_asked and not self._shared[_IS_PUBLISHED]:
            requests.decide(requests.hold() + 1)
        if self._shared[_IS_PUBLISHED] and not self._due_tick:
            self._wait_until_decided()
        if self._tick == self._due_tick:
            self.is_stopping = True
        return self._tick == self._due_tick

    def finish(self):
        """Marks this rank's last tick: later requests have no effect."""
        # As if this rank had reached a tick that no other reaches: later requests are never due.
        self._shared[_TICK + self._rank] = _NEVER

    def _wait_until_decided(self):
        deadline = time.monotonic() + self._timeout_s
        while not self._shared[_DUE_TICK]:
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {self._rank} waited {self._timeout_s} s for the decision on when to stop")
            time.sleep(0.002)
        self._due_tick = int(self._shared[_DUE_TICK])


def agree_with_hosts(pod, requests):
    """Lets this host, in a thread of its parent process, agree with the others of the Pod on when all ranks stop.
    requests: the Requests of this host's ranks."""
    threading.Thread(target=_agree_with_hosts, args=(pod, requests), name="agreement", daemon=True).start()


# All hosts make the same rounds. In each they say what was asked of them, and decide the same from all answers.
def _agree_with_hosts(pod, requests):
    is_decided = False
    try:
        for rounds in itertools.count():
            wishes = [requests.times_asked > 0, requests.is_preempted]
            found = pod.gather(f"what they ask for ({rounds})", wishes, math.inf)
            stop, is_preempted = map(any, zip(*found, strict=True))
            if is_preempted:
                requests.note_preemption()
            if stop and not is_decided:
                ticks = pod.gather("the tick of the stop", requests.hold(), math.inf)
                requests.decide(max(ticks) + 1)
                is_decided = True
            time.sleep(POLL_S)
    except PodError:  # the watchdog ends the run
        return
