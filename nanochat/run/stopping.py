"""Early stops of a run: signals, and Google Cloud's notice that the machine is about to end. Both only ask for a stop
(Requests, in agreement.py); the ranks then agree on the step.
"""
import os
import signal
import sys
import threading
import time
from multiprocessing import resource_tracker

from nanochat.common import say
from nanochat.run.hosts import metadata

EXIT_STATUS = 75  # EX_TEMPFAIL: what was trained is saved; start the same command again
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2)  # SIGUSR2: the notice of Slurm


def stop_on_signals(requests):
    """Makes _SIGNALS ask for a stop, but for a SIGHUP that is ignored (nohup). Call it in the main thread.

    A second SIGINT ends the process at once. While the run waits for its mirror, a signal of any kind ends only the
    wait, and the exit status stays EXIT_STATUS. If the machine is about to end, SIGTERM does not end the wait.

    Blocks the signals in this process's main thread and in processes started from now on, so Ctrl-C reaches the parent
    only. Ranks take SIGTERM and SIGHUP by stop_on_signal_to_rank.
    """
    # Python runs a handler in the main thread, between two of its instructions, and that thread may wait in C code for
    # the whole run. The thread that receives the signal writes to the wakeup descriptor at once.
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    for number in _not_ignored(_SIGNALS):  # a thread reads the pipe and acts, even while this one is busy
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    # If this process is killed, Python's resource tracker frees the semaphores of its pool, with a needless warning.
    sys.warnoptions.append("ignore::UserWarning:multiprocessing.resource_tracker")
    resource_tracker.ensure_running()  # now, because starting it later would unblock the signals
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    threading.Thread(target=_obey_signals, args=(read_end, requests), name="signals", daemon=True).start()


def _not_ignored(numbers):
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        return set(numbers) - {signal.SIGHUP}
    return numbers


# The signals are blocked in the main thread, and so in every thread and process that it starts later: they interrupt
# none of them. This thread lets them through, and reads their numbers from the wakeup descriptor.
def _obey_signals(read_end, requests):
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    is_asked = False
    while True:
        for number in os.read(read_end, 64):
            if number not in _SIGNALS:
                continue
            if requests.waits_for_mirror and not requests.is_preempted:
                what = "the run ends now, without waiting for its mirror"
            elif number == signal.SIGINT and is_asked:
                os._exit(130)
            else:
                what = "the run stops after its current step or batch, and saves what it has trained"
                if number == signal.SIGINT:
                    what += " (again: it ends at once)"
            is_asked = True
            requests.ask_to_stop()
            say(f"{signal.Signals(number).name}: {what}")


def stop_on_signal_to_rank(requests):
    """Makes SIGTERM, and SIGHUP unless it is ignored, to this process ask for a stop, too, although the process
    inherits them as blocked."""
    threading.Thread(target=_obey_signal_to_rank, args=(requests,), name="signals", daemon=True).start()


def _obey_signal_to_rank(requests):
    # A blocked signal is queued although it is ignored, so sigwait would return it.
    signal.sigwait(_not_ignored((signal.SIGTERM, signal.SIGHUP)))
    requests.ask_to_stop()


def stop_on_preemption_notice(requests, poll_s=1.0):
    """Polls Google Cloud's metadata server in the background, and asks for a stop before the VM is preempted.

    instance/preempted becomes TRUE at most 30 s before the VM ends. instance/maintenance-event becomes
    TERMINATE_ON_HOST_MAINTENANCE before maintenance that ends the VM; its other values are NONE and, not on TPU VMs,
    MIGRATE_ON_HOST_MAINTENANCE.
    """
    threading.Thread(target=_obey_notices, args=(requests, poll_s), name="preemption", daemon=True).start()


def _obey_notices(requests, poll_s):
    while True:
        for key, value in (("preempted", "TRUE"), ("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE")):
            if metadata(key) == value:
                say(f"this VM is about to end (instance/{key} is {value}): the run stops after a few steps and saves "
                    "a checkpoint")
                return requests.ask_to_stop(is_preempted=True)
        time.sleep(poll_s)
