"""Copies finished checkpoints to a bucket (gs://…, with gcloud storage) or to another directory.

    <mirror>/<run>/metrics.jsonl
    <mirror>/<run>/step_000100/…     the files listed in checkpoint_files.py

A bucket cannot rename, so SHA256SUMS is copied last: a copy without it is incomplete. A new VM, whose disk is empty,
resumes from the newest complete copy.
"""
import re
import shutil
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from nanochat.common import BadInput
from nanochat.record.metrics import METRICS_FILE
from nanochat.run.checkpoint_files import SUMMED_FILES, SUMS, find_problem

ATTEMPTS, PAUSE_S = 4, 5
COPY_TIMEOUT_S, LIST_TIMEOUT_S = 1800, 120


class MirrorError(Exception):
    """Copying failed at every attempt."""


def _gcloud_storage(*arguments, timeout_s):
    """Returns the standard output of `gcloud storage …`. Raises MirrorError, with its message, if all attempts fail."""
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(PAUSE_S * 2**attempt)
        try:
            done = subprocess.run(["gcloud", "storage", *arguments], stdin=subprocess.DEVNULL, capture_output=True,
                                  text=True, timeout=timeout_s)
        except FileNotFoundError:
            raise BadInput("--checkpoint_mirror=gs://… needs gcloud, which is not installed here") from None
        except subprocess.TimeoutExpired:
            problem = f"not finished after {timeout_s} s"
            continue
        if done.returncode == 0:
            return done.stdout
        problem = next((line for line in done.stderr.splitlines() if "ERROR" in line), done.stderr.strip()[-200:])
        if "matched no objects" in done.stderr:
            return ""
    raise MirrorError(f"gcloud storage {arguments[0]} failed {ATTEMPTS} times: {problem}")


def _is_bucket(url):
    return str(url).startswith("gs://")


@dataclass(frozen=True)
class Mirror:
    """A folder of copies of one run's checkpoints, in a bucket or a directory."""
    url: str  # of the folder of the run: gs://…/RUN or a path
    keep: int  # how many of the newest checkpoints stay there
    keep_every: int = -1  # checkpoints of steps that are multiples of this stay, too

    def copy(self, path):
        """Copies the checkpoint at `path` and its run's metrics there, and deletes old copies. Raises MirrorError,
        BadInput or OSError."""
        self._copy([path / name for name in SUMMED_FILES], f"{self.url}/{path.name}")
        self._copy([path / SUMS], f"{self.url}/{path.name}")
        self._copy([path.parent / METRICS_FILE], self.url)
        for old in self._steps()[:-self.keep]:
            if self.keep_every < 1 or int(old[5:]) % self.keep_every:
                self._remove(f"{self.url}/{old}")

    def fetch(self, run_dir, report=print):
        """Copies the newest complete checkpoint and the metrics into `run_dir`.

        Returns the checkpoint's path, or None if there is none. Reports damaged copies and tries the one before.
        Raises BadInput if the mirror cannot be read.
        """
        run_dir = Path(run_dir)
        try:
            for step in reversed(self._steps()):
                partial = run_dir / f"{step}.tmp"
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
                self._copy([f"{self.url}/{step}/{name}" for name in (*SUMMED_FILES, SUMS)], partial)
                problem = find_problem(partial)
                if problem is None:
                    self._copy([f"{self.url}/{METRICS_FILE}"], run_dir)
                    partial.rename(run_dir / step)
                    return run_dir / step
                shutil.rmtree(partial)
                report(f"warning: {self.url}/{step} is damaged ({problem}): the one before it is used")
        except (MirrorError, OSError) as error:
            raise BadInput(f"--checkpoint_mirror: {self.url} cannot be read ({error}): correct that, or start without "
                           "the flag") from None
        return None

    def _steps(self):
        """Returns the names of the complete copies, oldest first."""
        if _is_bucket(self.url):
            found = _gcloud_storage("ls", f"{self.url}/step_*/{SUMS}", timeout_s=LIST_TIMEOUT_S).split()
        else:
            found = [str(path) for path in Path(self.url).glob(f"step_*/{SUMS}")]
        return sorted((match[1] for match in (re.search(r"/(step_\d+)/[^/]*$", path) for path in found) if match),
                      key=lambda name: int(name[5:]))

    def _copy(self, sources, directory):
        if _is_bucket(self.url):
            _gcloud_storage("cp", *map(str, sources), f"{directory}/", timeout_s=COPY_TIMEOUT_S)
            return
        Path(directory).mkdir(parents=True, exist_ok=True)
        for source in map(Path, sources):
            partial = Path(directory) / f"{source.name}.partial"
            shutil.copyfile(source, partial)
            partial.replace(Path(directory) / source.name)

    def _remove(self, url):
        # The checksums are deleted first, so that a copy that is half deleted does not pass for a complete one.
        if _is_bucket(url):
            _gcloud_storage("rm", f"{url}/{SUMS}", timeout_s=LIST_TIMEOUT_S)
            _gcloud_storage("rm", f"{url}/*", timeout_s=LIST_TIMEOUT_S)
        else:
            (Path(url) / SUMS).unlink()
            shutil.rmtree(url)


class Uploader:
    """Copies checkpoints to a Mirror in the background. A failed copy is reported and never stops the run."""

    def __init__(self, mirror, report=print):
        """report: called with each message."""
        self._mirror, self._report = mirror, report
        self._wanted, self._idle = None, True  # guarded by the condition
        self._condition = threading.Condition()
        self._thread = None

    def upload(self, path):
        """Copies the checkpoint at `path` in the background. It replaces a checkpoint that is still waiting for its
        turn."""
        with self._condition:
            self._wanted = Path(path)
            if not self._thread:
                self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)
                self._thread.start()
            self._condition.notify_all()

    def finish(self, timeout_s):
        """Waits until everything is copied, for at most `timeout_s` seconds; warns if that is too short."""
        with self._condition:
            if not self._condition.wait_for(lambda: self._idle and not self._wanted, timeout_s):
                self._report(f"warning: the newest checkpoint is not in {self._mirror.url} after {timeout_s} s")

    def _work(self):
        while True:
            with self._condition:
                self._idle = True
                self._condition.notify_all()
                self._condition.wait_for(lambda: self._wanted)
                path, self._wanted, self._idle = self._wanted, None, False
            try:
                started = time.monotonic()
                self._mirror.copy(path)
                self._report(f"copied {path.name} to {self._mirror.url} in {time.monotonic() - started:.0f} s")
            except (MirrorError, BadInput, OSError) as error:
                self._report(f"warning: {path.name} is not in {self._mirror.url}: {error}")
