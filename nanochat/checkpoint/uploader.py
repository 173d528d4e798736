"""Copies a run's checkpoints to its mirror in the background, while the run trains.

The scripts that watch the run from outside (deploy/) read <run dir>/mirror.json:
    {"mirror": URL of the run's folder there, "newest_saved": "step_000200" or null,
     "newest_copied": "step_000100" or null, "behind_since": Unix time in s or null, "error": text or null}
"""
import json
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from nanochat.checkpoint.mirror import TRY_TIMEOUT_S
from nanochat.common import BadInput, say, written_whole
from nanochat.data.remote import Interruption
from nanochat.record.metrics import METRICS_FILE

STATE_FILE = "mirror.json"
FIRST_RETRY_S = 5  # the first pause between attempts to copy, which doubles
RETRY_S = 60  # the longest
END_TIMEOUT_S = 1800  # for the mirror at the end of a run
POLL_S = 0.25


@dataclass
class MirrorState:
    """The contents of mirror.json."""
    mirror: str
    newest_saved: str | None = None
    newest_copied: str | None = None
    behind_since: float | None = None  # the mirror lacks the checkpoints since then
    error: str | None = None  # of the last attempt

    @classmethod
    def read(cls, run_dir):
        return cls(**json.loads((Path(run_dir) / STATE_FILE).read_text()))

    def write(self, run_dir):
        """Replaces the file in one step. Ignores a full disk: the next call writes it."""
        with suppress(OSError), written_whole(Path(run_dir) / STATE_FILE) as unfinished:
            unfinished.write_text(json.dumps(asdict(self)) + "\n")

    def saved(self, name):
        """Notes that the checkpoint `name` is on this machine's disk."""
        self.newest_saved = name
        if name != self.newest_copied and not self.behind_since:
            self.behind_since = time.time()

    def copied(self, name):
        """Notes that the checkpoint `name` is in the mirror."""
        self.newest_copied = name
        self.error = None
        if name == self.newest_saved:
            self.behind_since = None


# At most one checkpoint waits, `_waiting`, the newest. An older one, `_copying`, may be on its way: it stays on this
# machine's disk until its copy ends, so that a mirror slower than the saves gets whole copies, too. `_refused` is the
# last that the mirror refused for good, for which `finish` does not wait. Methods note what they want under the lock
# and wake the thread. The thread copies without the lock, so the Saver never waits for a bucket. It notes a copy once
# the mirror has all of it: after a kill, mirror.json may say too little, and never too much.
class Uploader:
    """Copies the newest checkpoint to a Mirror in the background. A copy that fails never stops the run: the Uploader
    reports it and retries, with a newer checkpoint once there is one."""

    def __init__(self, mirror, run_dir, first_retry_s=FIRST_RETRY_S):
        """run_dir: with a mirror.json."""
        self._mirror = mirror
        self._run_dir = run_dir
        self._state = MirrorState.read(run_dir)
        self._waiting = None  # the path of the newest checkpoint, while it is not in the mirror
        self._copying = None  # the path of the one that is on its way there
        self._refused = None  # the last one that the mirror has refused for good
        self._first_retry_s = self._retry_s = first_retry_s
        self._is_over = False
        self._condition = threading.Condition()  # guards all of these
        self._note()
        threading.Thread(target=self._work, name="mirror", daemon=True).start()

    def upload(self, path):
        """Copies the checkpoint at `path` in the background, unless it is the newest in the mirror already. Replaces a
        waiting one."""
        with self._condition:
            self._state.saved(path.name)
            if self._state.behind_since:
                self._waiting = path
            self._note()

    def on_their_way(self):
        """Returns the paths of the checkpoints that must stay on this machine's disk for now."""
        with self._condition:
            return [path for path in (self._copying, self._waiting) if path]

    def finish(self, is_told_to_end=lambda: False):
        """Waits until the newest checkpoint is in the mirror, or the mirror refuses it for good, or is_told_to_end(),
        or END_TIMEOUT_S have passed. Returns whether it is there. Then copies the metrics once more, because the last
        evaluation comes after the last checkpoint."""
        is_there = self._wait_for_newest(is_told_to_end)
        if is_there:
            copying = threading.Thread(target=self._copy_metrics, name="metrics", daemon=True)
            copying.start()
            while copying.is_alive() and not is_told_to_end():
                copying.join(POLL_S)
        return is_there

    def _copy_metrics(self):
        try:
            self._mirror.copy_metrics(self._run_dir / METRICS_FILE, TRY_TIMEOUT_S)
        except (Interruption, BadInput) as error:
            say(f"warning: the last lines of {METRICS_FILE} are not in {self._mirror.url}: {error}")

    def _wait_for_newest(self, is_told_to_end):
        """Waits and returns as `finish` does."""
        deadline = time.monotonic() + END_TIMEOUT_S
        has_said = False
        with self._condition:
            while self._waiting and self._refused != self._waiting and time.monotonic() < deadline:
                if is_told_to_end():
                    break
                if not has_said and self._state.behind_since:
                    say(f"waiting until {self._waiting.name} is in {self._mirror.url}, for up to "
                        f"{END_TIMEOUT_S / 60:.0f} minutes. It is on this machine's disk: Ctrl-C or SIGTERM ends the "
                        "wait at once")
                    has_said = True
                self._condition.wait(POLL_S)
            self._is_over = True
            self._condition.notify_all()
            if not self._state.behind_since:
                return True
            why = f" ({self._state.error})" if self._state.error else ""
            there = f"{self._mirror.url}{why}"
            if not self._state.newest_copied:
                there += ", where there is no checkpoint of this run"
            say(f"warning: {self._waiting.name} is on this machine's disk only, and not in {there}")
            return False

    def _note(self):
        with self._condition:
            self._state.write(self._run_dir)
            self._condition.notify_all()

    # The thread copies the waiting checkpoint. Meanwhile `upload` may replace it, and the next turn takes the newest:
    # however slow the mirror is, no queue grows.
    def _work(self):
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._waiting or self._is_over)
                if self._is_over:
                    return
                path = self._copying = self._waiting
            try:
                self._copy(path)
            except (Interruption, BadInput, OSError) as error:  # an OSError is of this machine's disk
                self._failed(path, error)
            self._copying = None

    def _copy(self, path):
        started = time.monotonic()
        self._mirror.copy(path, path.parent / METRICS_FILE)
        say(f"copied {path.name} to {self._mirror.url} in {time.monotonic() - started:.0f} s")
        self._state.copied(path.name)
        self._retry_s = self._first_retry_s
        self._note()
        try:
            self._mirror.prune(path.name)
        except (Interruption, BadInput) as error:
            say(f"warning: old checkpoints stay in {self._mirror.url}: {error}")
        with self._condition:
            # A newer one that `upload` has named meanwhile stays.
            if self._waiting == path:
                self._waiting = None
            self._note()

    def _failed(self, path, error):
        if not path.is_dir():
            error = Interruption("it was deleted on this machine, whose disk was full")
        with self._condition:
            if self._is_over:
                return
            if str(error) != self._state.error:
                say(f"warning: {path.name} is not in {self._mirror.url}: {error}; trying again")
            self._state.error = str(error)
            if isinstance(error, BadInput):
                self._refused = path
            self._note()
            # Not for as long if a newer checkpoint is to be copied by now.
            self._condition.wait_for(lambda: self._is_over or self._waiting != path, self._retry_s)
            self._retry_s = min(2 * self._retry_s, RETRY_S)
