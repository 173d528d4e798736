"""Must we stop? Signals and the metadata server ask for it, and all ranks of a host stop before the same step.

Spawned ranks cannot install signal handlers (their function runs in a thread), so the parent process takes the signal.
Parent and ranks share one small memory-mapped file. A rank notes there which step it is about to begin; rank 0 answers
a request with a step that no rank has reached, and every rank stops there. Nothing of this touches the device, so it
costs a step nothing.
"""
import os
import signal
import threading
import time
import urllib.request

import numpy as np

EXIT_STATUS = 75  # EX_TEMPFAIL: the state is saved, start me again
MAX_RANKS = 256
_REQUESTED, _STOP_STEP, _STEPS = 0, 1, 2  # places in the file; the steps of all ranks come last
# Rank 0 reads all steps and then writes the answer: how many steps another rank may begin between the two.
_MARGIN_STEPS = 3


class StopRequest:
    """One request to stop, shared by the processes that open the same file."""

    def __init__(self, path, create=False):
        """`create`: by one process, before the others open it."""
        if create:
            np.zeros(_STEPS + MAX_RANKS, np.int64).tofile(path)
        self._shared = np.memmap(path, np.int64, "r+")

    def ask(self):
        """Asks all ranks to stop soon. Safe in a signal handler."""
        self._shared[_REQUESTED] = 1

    def must_stop_before(self, step, rank):
        """Whether this rank stops now instead of beginning `step`; each rank asks before each of its steps."""
        shared = self._shared
        shared[_STEPS + rank] = step + 1  # from 1, because 0 is a rank that has not come so far
        if rank == 0 and shared[_REQUESTED] and not shared[_STOP_STEP]:
            shared[_STOP_STEP] = shared[_STEPS:].max() + _MARGIN_STEPS
        stop_step = int(shared[_STOP_STEP]) - 1
        if stop_step >= 0 and step > stop_step:
            raise RuntimeError(f"rank {rank} is at step {step}, but all ranks were to stop before step {stop_step}")
        return step == stop_step


def stop_on_signals(stop_request, report=print):
    """SIGTERM and SIGINT ask for a stop; a second SIGINT ends the process at once. Call in the main thread."""

    def handle(number, _frame):
        if number == signal.SIGINT and stop_request.asked_by_signal:
            os._exit(130)
        stop_request.asked_by_signal = True
        stop_request.ask()
        report(f"{signal.Signals(number).name}: the run stops after a few steps and saves a checkpoint"
               + (" (again: it ends at once)" if number == signal.SIGINT else ""))

    stop_request.asked_by_signal = False
    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGINT, handle)


def stop_on_preemption_notice(stop_request, report=print, poll_s=1.0):
    """Watches Google Cloud's metadata server in the background, and asks for a stop once the VM is to be preempted.

    The server answers TRUE at instance/preempted for the 30 s at most that are left. $GCE_METADATA_HOST is where it is,
    as in Google's own libraries. A server that cannot be reached is asked again.
    """
    host = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
    request = urllib.request.Request(f"http://{host}/computeMetadata/v1/instance/preempted",
                                     headers={"Metadata-Flavor": "Google"})

    def watch():
        while True:
            try:
                with urllib.request.urlopen(request, timeout=5) as answer:
                    if answer.read().strip() == b"TRUE":
                        report("this VM is being preempted: the run stops after a few steps and saves a checkpoint")
                        stop_request.ask()
                        return
            except OSError:  # URLError is one
                pass
            time.sleep(poll_s)

    threading.Thread(target=watch, name="preemption", daemon=True).start()
