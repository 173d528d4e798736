"""Saves checkpoints in the background, one at a time. If the disk is full, the run goes on, and the same state is tried
again until there is a newer one."""
import shutil
import threading
import time
from pathlib import Path

from nanochat.checkpoint import checkpoint
from nanochat.checkpoint.checkpoint import NotFinite
from nanochat.checkpoint.checkpoint_files import partial_dir
from nanochat.common import Failure, is_disk_full

SAVE_TIMEOUT_S = 1800


class PartSaver:
    """Writes a rank's part of each checkpoint; on the ranks that write one, but for rank 0, which has a Saver.

    The next call of a method raises any error but a full disk.
    """

    def __init__(self, run_dir):
        self._run_dir = Path(run_dir)
        self._error, self._thread = None, None
        self._superseded = threading.Event()

    def save(self, step, layout, model_state, optimizer_state):
        """Waits for the part that is being written, and begins to write this one; see checkpoint.write_part.

        The states are {name: tensor} in host memory, never changed again (see MuonAdamW.host_state)."""
        self._begin(self._work, step, layout, model_state, optimizer_state)

    def check(self):
        """Raises the error that ended saving in the background, if there was one."""
        if self._error:
            raise self._error

    def finish(self, is_told_to_end=lambda: False, timeout_s=SAVE_TIMEOUT_S):
        """Waits until the last state is on disk. Once is_told_to_end() returns True, a full disk is not tried again.
        Raises Failure after `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        while self._thread and self._thread.is_alive():
            if is_told_to_end():
                self._superseded.set()
            if time.monotonic() > deadline:
                raise Failure(f"the last checkpoint in {self._run_dir} is not on disk after {timeout_s} s: see to the "
                              "disk, and run the same command again")
            self._thread.join(1)
        self.check()

    def _begin(self, work, *args):
        self._superseded.set()
        self.finish()
        self._superseded.clear()
        self._thread = threading.Thread(target=work, args=args, name="save", daemon=True)
        self._thread.start()

    def _work(self, step, *part):
        while True:
            try:
                return checkpoint.write_part(self._run_dir, step, *part)
            except NotFinite:  # rank 0 says so
                return
            except BaseException as error:
                if not is_disk_full(error):
                    if partial_dir(self._run_dir, step).is_dir():  # otherwise rank 0 has given this checkpoint up
                        self._error = error
                    return
            if self._superseded.wait(checkpoint.RETRY_S):
                return


class Saver(PartSaver):
    """Saves checkpoints; rank 0 only. `saved_step` is the step of the newest checkpoint on disk. A state whose weights
    are not finite is not saved."""

    def __init__(self, run_dir, *, num_lanes, keep, saved_step=0, keep_every=-1, before_rename=lambda: None,
                 on_saved=lambda path: None, report=print):
        """saved_step: that of the checkpoint that the run resumes from. on_saved: called with the path of each finished
        checkpoint, in the background. report: called with each message. The other arguments are those of
        checkpoint.save."""
        super().__init__(run_dir)
        self.saved_step = saved_step
        self._options = dict(num_lanes=num_lanes, keep=keep, keep_every=keep_every, before_rename=before_rename)
        self._on_saved, self._report = on_saved, report

    def save(self, model_state, optimizer_state, meta, layout=None):
        """Waits for the checkpoint that is being written, and begins to save this one; see checkpoint.save.

        The states are {name: tensor} in host memory, never changed again (see MuonAdamW.host_state)."""
        self._begin(self._work, model_state, optimizer_state, meta, layout)

    def _work(self, model_state, optimizer_state, meta, layout):
        started = time.monotonic()
        while True:
            try:
                checkpoint.require_finite(model_state)
                path = checkpoint.save(self._run_dir, model_state, optimizer_state, meta, layout=layout,
                                       **self._options)
                self.saved_step = meta.step
                self._report(f"saved {path} (in {time.monotonic() - started:.1f} s)")
                return self._on_saved(path)
            except NotFinite:
                self._report(f"warning: step {meta.step} is not saved: its weights are not finite")
                return self._give_up(meta.step)
            except BaseException as error:
                if not is_disk_full(error):
                    self._error = error
                    return
                self._report(f"warning: the disk is full ({error}): step {meta.step} is not saved; the run continues, "
                             f"trying again every {checkpoint.RETRY_S} s")
            if self._superseded.wait(checkpoint.RETRY_S):
                return self._give_up(meta.step)

    def _give_up(self, step):
        shutil.rmtree(partial_dir(self._run_dir, step), ignore_errors=True)
