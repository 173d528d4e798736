"""The mirror: copies of a run's checkpoints in a bucket (gs://…) or in another directory.

    <mirror>/<run>/metrics.jsonl
    <mirror>/<run>/step_000100/…            the files listed in on_disk.py

A bucket cannot rename a folder, so SHA256SUMS is copied last and deleted first: a copy without it is not whole, and no
run resumes from it. A new VM, whose disk is empty, resumes from the newest whole copy. A run that starts over
(--resume=never) is refused while there are whole copies: it would replace them as it passes their steps.

uploader.py keeps it up to date while a run lasts.
"""
import errno
import os
import re
import shutil
import threading
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from nanochat.checkpoint import on_disk
from nanochat.checkpoint.on_disk import SUMS, Kept, step_of
from nanochat.checkpoint.pieces import is_whole
from nanochat.common import BadInput, Outage, move_aside, say
from nanochat.data.bucket import is_remote
from nanochat.data.storage import Interruption, Retries, copy_files, delete_file, list_files
from nanochat.record.metrics import METRICS_FILE

COPY_TIMEOUT_S = 1800
LIST_TIMEOUT_S = 120
TRY_TIMEOUT_S = 60  # for each attempt to reach the mirror at the start of a run
OUTAGE_S = 600  # how long a start waits for an unreachable mirror
ROUNDED = ".rounded"  # ends the names of the copies that earlier versions made at a notice of preemption
PIECE_BYTES = 4 << 20  # of a file that is copied to a directory
PARTIAL = ".partial"  # ends the names of files that are being copied to a directory
OURS = re.compile(rf"(?:(?:model|optimizer)[\w.-]*|lanes\.json|meta\.json|source\.zip|{SUMS})(?:{re.escape(PARTIAL)})?")
_UNREACHABLE = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EHOSTDOWN, errno.EHOSTUNREACH,
                errno.ENETUNREACH, errno.EAGAIN, errno.EBUSY}  # errors of a file system whose server does not answer


def run_mirror(place, run, kept):
    """Returns the Mirror of a run. place: as data_place returns it."""
    return Mirror(f"{place if is_remote(place) else Path(place).absolute()}/{run}", kept)


@dataclass(frozen=True)
class Mirror:
    """A folder of copies of one run's checkpoints, in a bucket or a directory. Every method raises BadInput if the
    mirror refuses for good, and Interruption if a retry may succeed."""
    url: str  # of the folder of the run: gs://…/RUN or a path
    kept: Kept  # which copies stay there

    def whole_copies(self):
        """Returns the names of the whole copies, such as step_000100, oldest first."""
        return [name for name, files in self._copies().items() if is_whole(files) and not name.endswith(ROUNDED)]

    def try_to_write(self, scratch):
        """Writes a small file to the mirror and deletes it. scratch: a directory on this machine's disk."""
        source = Path(scratch) / f".write_test_{os.getpid()}"
        source.write_text("base_train writes this file when it starts, and deletes it\n")
        try:
            self._copy([source], self.url, TRY_TIMEOUT_S)
            self._remove(f"{self.url}/{source.name}", TRY_TIMEOUT_S)
        finally:
            source.unlink()

    def copy(self, path, metrics):
        """Copies the checkpoint at `path` there, and its run's file `metrics`."""
        target = f"{self.url}/{path.name}"
        self._copy([path / file for file in on_disk.read_sums(path)], target)
        # Before SHA256SUMS: whoever finds a whole copy finds the metrics up to its step, too.
        self.copy_metrics(metrics)
        self._copy([path / SUMS], target)

    def copy_metrics(self, path, timeout_s=COPY_TIMEOUT_S):
        """Copies the run's metrics.jsonl, of this path, there."""
        self._copy([path], self.url, timeout_s)

    def prune(self, newest):
        """Deletes what the copy `newest`, a name, makes superfluous: older copies and incomplete ones. Copies of later
        steps stay."""
        copies = {}
        whole = []
        for name, files in self._copies().items():
            if step_of(name) <= step_of(newest):
                copies[name] = files
                if is_whole(files) and not name.endswith(ROUNDED):
                    whole.append(name)
        staying = set(whole) - set(self.kept.outdated(whole))
        for name in copies.keys() - staying:
            # Without SHA256SUMS, the first, it is no longer whole, whenever a kill comes.
            for file in sorted(copies[name], key=lambda file: file != SUMS):
                if OURS.fullmatch(file):
                    self._remove(f"{self.url}/{name}/{file}")
            if not is_remote(self.url):
                with suppress(OSError):  # it has a file of somebody else
                    Path(self.url, name).rmdir()

    def fetch(self, run_dir, after_step=-1):
        """Copies the newest whole copy of a step later than `after_step`, and the metrics, into `run_dir`. Returns the
        checkpoint's path, or None if there is none. Skips damaged copies with a warning."""
        run_dir = Path(run_dir)
        copies = self._copies()
        for name in reversed(copies):
            if step_of(name) <= after_step or not is_whole(copies[name]):
                continue
            if name.endswith(ROUNDED):
                say(f"{self.url}/{name} is rounded, which this version does not read: the copy before it is used")
                continue
            final = on_disk.final_dir(run_dir, step_of(name))
            partial = on_disk.partial_dir(run_dir, step_of(name))
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            files = sorted(file for file in copies[name] if not file.endswith(PARTIAL))
            self._copy([f"{self.url}/{name}/{file}" for file in files], partial)
            problem = on_disk.find_problem(partial)
            if problem is None:
                # Before the checkpoint gets its name: from then on, a start fetches only later copies.
                if METRICS_FILE in self._names():
                    self._copy([f"{self.url}/{METRICS_FILE}"], run_dir)
                else:
                    say(f"warning: {self.url} has no {METRICS_FILE}: the run continues at {final.name}, with only the "
                        "metrics that are on this disk")
                move_aside(final)  # a damaged one of that step, if there is one
                on_disk.publish(partial, final)
                return final
            shutil.rmtree(partial)
            say(f"warning: {self.url}/{name} is damaged ({problem}): the one before it is used")
        return None

    def _names(self):
        """Returns the names of the files directly in the folder of the run, and perhaps of its folders."""
        if is_remote(self.url):
            files, _ = _within(LIST_TIMEOUT_S, list_files, self.url)
            return [os.path.basename(file.url) for file in files]
        return _within(LIST_TIMEOUT_S, os.listdir, self.url)

    def _copies(self):
        """Returns {name: names of its files} of all copies, whole or not, oldest first."""
        if is_remote(self.url):
            files = _within(LIST_TIMEOUT_S, list_files, self.url, "")[0]
            paths = [file.url for file in files]
        else:
            paths = map(str, _within(LIST_TIMEOUT_S, list, Path(self.url).glob("step_*/*")))
        found = {}
        for path in paths:
            match = re.search(rf"/(step_\d+(?:{ROUNDED})?)/([^/]+)$", path)
            if match:
                found.setdefault(match[1], set()).add(match[2])
        return dict(sorted(found.items(), key=lambda copy: step_of(copy[0])))

    def _copy(self, sources, directory, timeout_s=COPY_TIMEOUT_S):
        """Copies files to a directory. The sources or the directory are in the mirror."""
        if is_remote(self.url):
            pairs = [(str(source), f"{directory}/{os.path.basename(source)}") for source in sources]
            _within(timeout_s, copy_files, pairs)
        else:
            is_over = threading.Event()
            try:
                _within(timeout_s, _copy_to_directory, sources, Path(directory), is_over)
            finally:
                is_over.set()  # a copy that was too slow writes no longer beside the next one

    def _remove(self, url, timeout_s=LIST_TIMEOUT_S):
        """Deletes the file of this URL."""
        _within(timeout_s, delete_file if is_remote(url) else _unlink, url)


def _unlink(path):
    with suppress(IsADirectoryError):  # somebody else has made it
        os.unlink(path)


def _copy_to_directory(sources, directory, is_over):
    """Copies files to a directory, in pieces, until the Event `is_over` is set."""
    directory.mkdir(parents=True, exist_ok=True)
    for source in map(Path, sources):
        if source.is_dir():  # of a damaged copy; its checksum tells
            continue
        target = directory / source.name
        partial = target.with_name(target.name + PARTIAL)
        try:
            partial.unlink(missing_ok=True)  # a copy that was too slow may still have it open
            with open(source, "rb") as file, open(partial, "wb") as copy:
                while piece := file.read(PIECE_BYTES):
                    if is_over.is_set():
                        return
                    copy.write(piece)
            partial.replace(target)
        except OSError as error:
            error.filename = error.filename or str(partial)
            with suppress(OSError):
                partial.unlink()
            raise


# A call to a file system whose server is gone (NFS, for example) does not return, and nothing can interrupt it. So a
# thread makes the call, and is abandoned if it does not return. It also limits a bucket that sends a byte now and then.
def _within(timeout_s, function, *args):
    """Returns function(*args), which uses the mirror. Raises Interruption if it takes more than `timeout_s` seconds, or
    if a retry may succeed, and BadInput for any other OSError."""
    future = Future()

    def work():
        try:
            future.set_result(function(*args))
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=work, name="mirror-files", daemon=True).start()
    if not wait([future], timeout_s).done:
        raise Interruption(f"it has not answered after {timeout_s} s")
    try:
        return future.result()
    except BadInput as error:
        raise BadInput(f"--checkpoint_mirror: {error}") from None
    except OSError as error:
        path = error.filename2 or error.filename  # the target of a copy, if it was open
        problem = f"{path}: {error.strerror}" if path else str(error)
        if error.errno in _UNREACHABLE:
            raise Interruption(problem) from None
        advice = "choose a directory that can be written to, or start without the flag"
        if error.errno == errno.EISDIR:
            advice = "move that folder away"
        raise BadInput(f"--checkpoint_mirror: {problem}: {advice}") from None


def patiently(url, function):
    """Returns function(), which uses the mirror at `url`, retried for OUTAGE_S seconds. Raises Outage after them."""
    place = f"--checkpoint_mirror: {url}"
    try:
        return Retries(place, OUTAGE_S).call(function)
    except Interruption as error:
        raise Outage(f"{place} has not been reached for {OUTAGE_S / 60:.0f} minutes ({error}): start the same command "
                     "again later, or without the flag") from None
