"""The process that watches the budget.

It needs nobody's answer: it multiplies time by price. At the end of the budget it ends the worker, whatever that is
doing, saves the run and deletes the VM.
"""
import subprocess
import time

from deploy.lib.actions import DELETE_S, GONE, LOOK_S
from deploy.lib.calls import end_group
from deploy.lib.state import Known, steady_time

# When the worker has ended the watch, its status is ENDED plus that of watch.sh. After any other, such as the 1 of
# Python's own errors, it is started again.
ENDED = 40
WORKER_PATIENCE_S = 10
COUNT_S = 5  # between two counts of the spending
BACKOFF_S = (1, 10, 60, 300, 600)  # pauses before that


class Keeper:
    """`start_worker()` returns a Popen, or None where only the budget is to be watched. `usd_at(zone)` is the price."""

    def __init__(self, settings, actions, books, usd_at, start_worker, pause=time.sleep, now=steady_time):
        self.settings, self.actions, self.books, self.usd_at = settings, actions, books, usd_at
        self.start_worker, self.pause, self.now = start_worker, pause, now
        self.known, self.note = actions.known, actions.journal.note
        self.worker = None

    def usd(self):
        return self.usd_at(self.known.zone)

    def read_known(self):
        """Takes over what the worker knows."""
        path = self.settings.state / "known.json"
        if path.exists():  # somebody may have deleted it, and the VM costs money nevertheless
            self.actions.known = self.known = Known.load(path)

    def count(self):
        """Counts the spending and returns the seconds that are left before the part that is reserved for the end."""
        if not self.books.count(self.known, self.usd(), self.now()):
            self.actions.journal.note_change(
                "disk", f"cannot write to {self.settings.state}: is the disk full?")
        return self.books.left_s(self.usd()) - self.actions.reserve_s()

    def run(self):
        """Returns the exit status of watch.sh."""
        starts = 0
        self.read_known()
        if self.count() > 0:
            self.worker = self.start_worker()
        while True:
            self.read_known()
            left_s = self.count()
            if left_s <= 0:
                self.end_worker()
                return self.end_budget()
            status = self.worker.poll() if self.worker else None
            if status in range(ENDED, ENDED + 10):
                self.read_known()
                self.count()
                return status - ENDED
            if status is not None:
                wait_s = BACKOFF_S[min(starts, len(BACKOFF_S) - 1)]
                self.note(f"the watch itself failed (status {status}); it is started again after {wait_s} s")
                self.pause(min(wait_s, left_s))
                self.worker, starts = self.start_worker(), starts + 1
            else:
                self.wait_for_worker(max(0.1, min(COUNT_S, left_s)))

    def wait_for_worker(self, seconds):
        try:
            if self.worker:
                self.worker.wait(timeout=seconds)
            else:
                self.pause(seconds)
        except subprocess.TimeoutExpired:
            pass

    def end_worker(self):
        """Ends the worker and the script that it runs. The worker gets some seconds to do so itself."""
        if self.worker and self.worker.poll() is None:
            end_group(self.worker.pid, self.worker, WORKER_PATIENCE_S)
        self.actions.end_orphan()
        self.read_known()

    def end_budget(self):
        """Stops the run, brings home what is on the VM alone, and deletes the VM. Returns 7."""
        self.note(f"budget: {self.books} are spent, and the rest is needed to stop, fetch and delete")
        # If nobody counted for a while, the budget may be overrun already; a checkpoint is still worth the margin.
        deadline = self.now() + max(self.books.left_s(self.usd()), self.settings.margin_s)
        last = deadline - min(DELETE_S, self.settings.margin_s / 4)
        state = self.actions.look_up(min(LOOK_S, (last - self.now()) / 4))
        if state == "unknown":
            self.note(f"gcloud does not answer; the VM is asked itself: {self.actions.error}")
        if state != "absent" and state not in GONE:
            self.save_until(last)
        self.count()
        self.actions.delete_until_absent(self.pause_and_count)
        self.count()
        return 7

    def save_until(self, last):
        """Tries to save the run until the time `last`."""
        while reason := self.actions.rescue(max(10, last - self.now())):
            self.actions.journal.note_change("kept", reason)
            if self.now() + self.settings.poll_s + 15 >= last:
                self.note(f"the last of the budget is needed to delete the VM. LOST: {reason}")
                return
            self.pause_and_count(self.settings.poll_s)
            if self.actions.look_up(min(LOOK_S, (last - self.now()) / 4)) in ("absent", *GONE):
                return

    def pause_and_count(self, seconds):
        self.pause(seconds)
        self.count()
