"""Copies a run's checkpoints to its mirror in the background, and says in mirror.json how far that has come.

<run dir>/mirror.json is read by the scripts that look after the run from outside (deploy/):
    {"mirror": URL of the run's folder there, "newest_saved": "step_000200" or null,
     "newest_copied": "step_000100" or null, "behind_since": Unix time in s or null, "error": text or null}
"""
import json
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from nanochat.checkpoint.mirror import MirrorError
from nanochat.common import BadInput
from nanochat.data.gcloud import end_all

STATE_FILE = "mirror.json"
FIRST_RETRY_S, RETRY_S = 5, 60  # the first pause between attempts to copy, which doubles, and the longest
WAIT_S = 1800  # for the mirror at the end of a run
POLL_S = 0.25


@dataclass
class MirrorState:
    """The contents of mirror.json."""
    mirror: str
    newest_saved: str | None = None
    newest_copied: str | None = None
    behind_since: float | None = None  # the mirror lacks what was saved since then
    error: str | None = None  # of the last attempt

    @classmethod
    def read(cls, run_dir):
        """Returns the MirrorState that `write` has written."""
        return cls(**json.loads((Path(run_dir) / STATE_FILE).read_text()))

    def write(self, run_dir):
        """Replaces the file in one step. A full disk is ignored: the next call writes it."""
        unfinished = Path(run_dir) / f".{STATE_FILE}.unfinished"
        try:
            unfinished.write_text(json.dumps(asdict(self)) + "\n")
            unfinished.replace(Path(run_dir) / STATE_FILE)
        except OSError:
            unfinished.unlink(missing_ok=True)

    def saved(self, name):
        """Notes that the checkpoint `name` is on this machine's disk."""
        self.newest_saved = name
        if name != self.newest_copied and not self.behind_since:
            self.behind_since = time.time()

    def copied(self, name):
        """Notes that the checkpoint `name` is in the mirror."""
        self.newest_copied, self.error = name, None
        if name == self.newest_saved:
            self.behind_since = None


class Uploader:
    """Copies the newest checkpoint to a Mirror in the background. A copy that fails never stops the run: it is reported
    and tried again, with a newer checkpoint once there is one."""

    def __init__(self, mirror, run_dir, starts_over=False, report=print):
        """run_dir: that has a mirror.json; starts_over: sets aside all copies that are there; report: called with each
        message."""
        self._mirror, self._run_dir, self._report = mirror, run_dir, report
        self._state = MirrorState(mirror.url) if starts_over else MirrorState.read(run_dir)
        self._starts_over = starts_over
        self._wanted = None  # the path of the checkpoint that is not in the mirror yet
        self._refused = None  # the last that the mirror has refused for good
        self._retry_s, self._is_over = FIRST_RETRY_S, False
        self._condition = threading.Condition()  # guards all these
        self._note()
        threading.Thread(target=self._work, name="mirror", daemon=True).start()

    def upload(self, path):
        """Copies the checkpoint at `path` in the background, unless it is the newest in the mirror already. It replaces
        one that is still waiting for its turn."""
        with self._condition:
            self._state.saved(path.name)
            if self._state.behind_since:
                self._wanted = path
            self._note()

    def behind_s(self):
        """Returns for how many seconds the mirror has lacked the newest checkpoint; 0 if it has it."""
        since = self._state.behind_since
        return max(time.time() - since, 0.0) if since else 0.0

    def finish(self, is_told_to_end=lambda: False):
        """Waits until the newest checkpoint is in the mirror, or the mirror refuses it for good, or is_told_to_end(),
        or WAIT_S have passed. Returns whether it is there."""
        deadline, said = time.monotonic() + WAIT_S, False
        with self._condition:
            while self._wanted and self._refused != self._wanted and time.monotonic() < deadline:
                if is_told_to_end():
                    break
                if not said and self._state.behind_since:
                    self._report(f"waiting until {self._wanted.name} is in {self._mirror.url}, for up to "
                                 f"{WAIT_S / 60:.0f} minutes. It is safe on this machine's disk: Ctrl-C or SIGTERM "
                                 "ends the wait at once")
                    said = True
                self._condition.wait(POLL_S)
            self._is_over = True
            end_all()
            if not self._state.behind_since:
                return True
            self._report(f"warning: {self._wanted.name} is on this machine's disk only, and not in {self._mirror.url}"
                         + (f" ({self._state.error})" if self._state.error else ""))
            return False

    def _note(self):
        with self._condition:
            self._state.write(self._run_dir)
            self._condition.notify_all()

    def _work(self):
        while not self._is_over:
            with self._condition:
                self._condition.wait_for(lambda: self._wanted or self._starts_over)
                path = self._wanted
            try:
                self._copy(path)
            except (MirrorError, BadInput) as error:
                self._failed(path, error)

    def _copy(self, path):
        started = time.monotonic()
        if self._starts_over:
            self._mirror.set_aside()
            self._starts_over = False
        if not path:
            return
        self._mirror.copy(path)
        self._report(f"copied {path.name} to {self._mirror.url} in {time.monotonic() - started:.0f} s")
        self._state.copied(path.name)
        self._retry_s = FIRST_RETRY_S
        self._note()
        try:
            self._mirror.prune(path.name)
        except (MirrorError, BadInput) as error:
            self._report(f"warning: old checkpoints stay in {self._mirror.url}: {error}")
        with self._condition:
            if self._wanted == path:
                self._wanted = None
            self._note()

    def _failed(self, path, error):
        with self._condition:
            if self._is_over:
                return
            if str(error) != self._state.error:
                self._report(f"warning: {path.name if path else 'the old run'} is not "
                             f"{'in' if path else 'set aside in'} {self._mirror.url}: {error}; trying again")
            self._state.error = str(error)
            if isinstance(error, BadInput):
                self._refused = path
            self._note()
            self._condition.wait_for(lambda: self._wanted != path, self._retry_s)
            self._retry_s = min(2 * self._retry_s, RETRY_S)
