"""The mirror: copies of a run's checkpoints in a bucket (gs://…, with gcloud storage) or in another directory.

    <mirror>/<run>/metrics.jsonl
    <mirror>/<run>/step_000100/…     the files listed in checkpoint_files.py

A bucket cannot rename a folder, so SHA256SUMS is copied last and deleted first: a copy without it is not whole, and no
run resumes from it. A new VM, whose disk is empty, resumes from the newest whole copy. The copies of a run that was
abandoned (--resume=never) have SHA256SUMS.aside instead; a newer run deletes them once it has come to their step.

Every method raises BadInput if the mirror refuses for good, and MirrorError if the same may work later.
"""
import errno
import os
import re
import shutil
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from nanochat.checkpoint.checkpoint_files import SUMS, find_problem, is_whole, read_sums
from nanochat.common import BadInput
from nanochat.data.gcloud import gcloud, problem_in
from nanochat.record.metrics import METRICS_FILE

COPY_TIMEOUT_S, LIST_TIMEOUT_S = 1800, 120
TRY_TIMEOUT_S = 60  # for each attempt to reach the mirror at the start of a run
PARTIAL = ".partial"  # ends the names of files that are being copied to a directory
OUTAGE_S, PAUSE_S = 600, 15  # how long a start waits for a mirror that cannot be reached; between its attempts
_UNREACHABLE = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EHOSTDOWN, errno.EHOSTUNREACH,
                errno.ENETUNREACH, errno.EAGAIN, errno.EBUSY}  # errors of a file system whose server does not answer


class MirrorError(Exception):
    """The mirror cannot be reached, and the same may work later."""


def run_mirror(place, run, keep, keep_every):
    """Returns the Mirror of a run for the value `place` of --checkpoint_mirror. Raises BadInput if that is neither
    gs://BUCKET/… nor a path."""
    if re.match(r"gs://[^/]", place):
        return Mirror(f"{place.rstrip('/')}/{run}", keep, keep_every)
    if not place or re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", place):
        raise BadInput(f"--checkpoint_mirror={place} is neither gs://BUCKET/FOLDER nor a directory: correct it (a "
                       "directory with a colon in its name is given as ./NAME)")
    return Mirror(str(Path(place).expanduser().absolute() / run), keep, keep_every)


@dataclass(frozen=True)
class Mirror:
    """A folder of copies of one run's checkpoints, in a bucket or a directory."""
    url: str  # of the folder of the run: gs://…/RUN or a path
    keep: int  # how many of the newest checkpoints stay there
    keep_every: int = -1  # checkpoints of steps that are multiples of this stay, too

    def whole_copies(self):
        """Returns the names of the whole copies, such as step_000100, oldest first."""
        return [name for name, files in self._copies().items() if is_whole(files)]

    def try_to_write(self, scratch):
        """Writes a small file to the mirror and deletes it. scratch: a directory on this machine's disk."""
        name = f"write_test_{os.getpid()}"
        source = Path(scratch) / f".{name}"
        source.write_text("base_train writes this file when it starts, and deletes it\n")
        try:
            self._copy([source], self.url, name, timeout_s=TRY_TIMEOUT_S)
            self._remove_files(f"{self.url}/{name}", timeout_s=TRY_TIMEOUT_S)
        finally:
            source.unlink()

    def copy(self, path):
        """Copies the checkpoint at `path` and its run's metrics there."""
        self._copy([path / name for name in read_sums(path)], f"{self.url}/{path.name}")
        self._copy([path.parent / METRICS_FILE], self.url)
        self._copy([path / SUMS], f"{self.url}/{path.name}")

    def prune(self, newest):
        """Deletes what the copy `newest`, a name, makes superfluous: older copies and incomplete ones. Copies of later
        steps stay."""
        copies = {name: files for name, files in self._copies().items() if int(name[5:]) <= int(newest[5:])}
        whole = [name for name, files in copies.items() if is_whole(files)]
        kept = set(whole[-self.keep:])
        if self.keep_every > 0:
            kept |= {name for name in whole if int(name[5:]) % self.keep_every == 0}
        for name in copies.keys() - kept:
            if SUMS in copies[name]:
                self._remove_files(f"{self.url}/{name}/{SUMS}")
            self._remove_files(f"{self.url}/{name}/*")

    def set_aside(self):
        """Makes all copies ones from which no run resumes, for a run that starts over. The newest is the last: if this
        is interrupted, the abandoned run is still whole."""
        copies = self.whole_copies()
        files = [(f"{self.url}/{name}", SUMS) for name in copies]
        if copies:
            files.append((self.url, METRICS_FILE))
        for folder, file in files:
            with tempfile.TemporaryDirectory() as scratch:
                self._copy([f"{folder}/{file}"], scratch)
                self._copy([Path(scratch) / file], folder, f"{file}.aside")
            self._remove_files(f"{folder}/{file}")

    def fetch(self, run_dir, report=print, after_step=-1):
        """Copies the newest whole copy of a step later than `after_step`, and the metrics, into `run_dir`. Returns the
        checkpoint's path, or None if there is none. Reports damaged copies and tries the one before."""
        run_dir = Path(run_dir)
        copies = {name: files for name, files in self._copies().items() if is_whole(files)}
        for step in reversed([name for name in copies if int(name[5:]) > after_step]):
            partial = run_dir / f"{step}.tmp"
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            self._copy([f"{self.url}/{step}/{name}" for name in sorted(copies[step])
                        if not name.endswith(PARTIAL)], partial)
            problem = find_problem(partial)
            if problem is None:
                self._copy([f"{self.url}/{METRICS_FILE}"], run_dir)
                partial.rename(run_dir / step)
                return run_dir / step
            shutil.rmtree(partial)
            report(f"warning: {self.url}/{step} is damaged ({problem}): the one before it is used")
        return None

    # What differs between a bucket and a directory

    @property
    def _is_bucket(self):
        return self.url.startswith("gs://")

    def _copies(self):
        """Returns {name: names of its files} of all copies, whole or not, oldest first."""
        if self._is_bucket:
            paths = _gcloud_storage("ls", f"{self.url}/step_*/*", timeout_s=LIST_TIMEOUT_S).splitlines()
        else:
            paths = _within(LIST_TIMEOUT_S, lambda: [str(path) for path in Path(self.url).glob("step_*/*")])
        found = {}
        for match in (re.search(r"/(step_\d+)/([^/]+)$", path) for path in paths):
            if match:
                found.setdefault(match[1], set()).add(match[2])
        return dict(sorted(found.items(), key=lambda item: int(item[0][5:])))

    def _copy(self, sources, directory, name="", timeout_s=COPY_TIMEOUT_S):
        """Copies files to a directory, under a new name if there is one. One of the two is in the mirror."""
        if self._is_bucket:
            _gcloud_storage("cp", *map(str, sources), f"{directory}/{name}", timeout_s=timeout_s)
            return

        def copy():
            Path(directory).mkdir(parents=True, exist_ok=True)
            for source in map(Path, sources):
                target = Path(directory) / (name or source.name)
                partial = target.with_name(target.name + PARTIAL)
                shutil.copyfile(source, partial)
                partial.replace(target)

        _within(timeout_s, copy)

    def _remove_files(self, pattern, timeout_s=LIST_TIMEOUT_S):
        """Deletes the files of this URL, whose last part may be *; with *, in a directory, the folder goes, too."""
        if self._is_bucket:
            _gcloud_storage("rm", pattern, timeout_s=timeout_s)
            return
        if pattern.endswith("/*"):
            _within(timeout_s, lambda: shutil.rmtree(pattern[:-2]))
        else:
            _within(timeout_s, Path(pattern).unlink)


# -----------------------------------------------------------------------------
# Errors, and how long each thing may take


def patiently(action, url, on_failure=lambda message: None, report=print):
    """Returns action(). While that raises MirrorError, calls on_failure(its message), says so, and tries again, for
    OUTAGE_S seconds; then raises a MirrorError."""
    deadline = time.monotonic() + OUTAGE_S
    while True:
        try:
            return action()
        except MirrorError as error:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise MirrorError(f"--checkpoint_mirror: {url} has not been reached for {OUTAGE_S / 60:.0f} minutes "
                                  f"({error}): start the same command again later, or without the flag") from None
            on_failure(str(error))
            report(f"warning: --checkpoint_mirror: {url} cannot be reached ({error}); waiting for it, for up to "
                   f"{left_s / 60:.0f} more minutes")
            time.sleep(PAUSE_S)


def _gcloud_storage(*arguments, timeout_s):
    """Returns the standard output of `gcloud storage …`; "" if there is nothing to list or to delete."""
    try:
        status, output, said = gcloud("storage", *arguments, timeout_s=timeout_s)
    except TimeoutError as error:
        raise MirrorError(str(error)) from None
    except OSError as error:
        raise BadInput(f"--checkpoint_mirror=gs://… needs gcloud, which cannot be started here ({error.strerror}): "
                       "install it, or give a directory") from None
    if status == 0:
        return output
    if "matched no objects" in said and arguments[0] != "cp":
        return ""
    problem, is_refusal = problem_in(said, status)
    if is_refusal:
        raise BadInput(f"--checkpoint_mirror: {problem}: correct the bucket, its permissions or the login, or start "
                       "without the flag")
    raise MirrorError(problem)


def _within(timeout_s, function):
    """Returns function(), which uses the mirror's file system. Raises MirrorError if its server does not answer within
    `timeout_s` seconds, and BadInput for any other OSError."""
    outcome = []

    def work():
        try:
            outcome.append((function(), None))
        except OSError as error:
            outcome.append((None, error))

    thread = threading.Thread(target=work, name="mirror-files", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if not outcome:
        raise MirrorError(f"the file system has not answered after {timeout_s} s")
    result, error = outcome[0]
    if error is None:
        return result
    problem = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    if error.errno in _UNREACHABLE:
        raise MirrorError(problem)
    raise BadInput(f"--checkpoint_mirror: {problem}: choose a directory that can be written to, or start without the "
                   "flag")
