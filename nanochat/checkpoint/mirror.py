"""The mirror: copies of a run's checkpoints in a bucket (gs://…) or in another directory.

    <mirror>/<run>/metrics.jsonl
    <mirror>/<run>/step_000100/…            the files listed in on_disk.py

A bucket cannot rename a folder, so SHA256SUMS is copied last and deleted first: a copy without it is not whole, and no
run resumes from it. A new VM, whose disk is empty, resumes from the newest whole copy.

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
from nanochat.checkpoint.meta import load_meta
from nanochat.checkpoint.on_disk import META, SUMS, step_of
from nanochat.common import BadInput, move_aside, say
from nanochat.data import remote
from nanochat.data.remote import Interruption
from nanochat.data.storage import PARTIAL, copy_files, delete_file, is_remote, list_files
from nanochat.record.metrics import METRICS_FILE

COPY_TIMEOUT_S = 1800
LIST_TIMEOUT_S = 120
TRY_TIMEOUT_S = 60  # for each attempt to reach the mirror at the start of a run
OUTAGE_S = 600  # how long a start waits for an unreachable mirror
OURS = re.compile(rf"(?:(?:model|optimizer)[\w.-]*|lanes\.json|meta\.json|source\.zip|{SUMS})(?:{re.escape(PARTIAL)})?")
_UNREACHABLE = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EHOSTDOWN, errno.EHOSTUNREACH,
                errno.ENETUNREACH, errno.EAGAIN, errno.EBUSY}  # errors of a file system whose server does not answer


def run_mirror(place, run, keep):
    """Returns the Mirror of a run. place: as data_place returns it."""
    return Mirror(f"{place if is_remote(place) else Path(place).absolute()}/{run}", keep)


@dataclass(frozen=True)
class Mirror:
    """A folder of copies of one run's checkpoints, in a bucket or a directory. Every method raises BadInput if the
    mirror refuses for good, and Interruption if a retry may succeed."""
    url: str  # of the folder of the run: gs://…/RUN or a path
    keep: int  # so many of the newest copies stay there

    def whole_copies(self):
        """Returns the names of the whole copies, such as step_000100, oldest first."""
        return [name for name, files in _copies(self._files()).items() if SUMS in files]

    def try_to_write(self, scratch):
        """Writes a small file to the mirror and deletes it. scratch: a directory on this machine's disk."""
        source = Path(scratch) / f".write_test_{os.getpid()}"
        source.write_text("base_train writes this file when it starts, and deletes it\n")
        try:
            self._copy({source.name: source}, self.url, TRY_TIMEOUT_S)
            self._delete(source.name, TRY_TIMEOUT_S)
            if not source.exists():
                raise BadInput(f"--checkpoint_mirror: {self.url} is the run's own folder: choose another")
        finally:
            source.unlink(missing_ok=True)

    def require_same_run(self, checkpoint):
        """Raises BadInput if the newest whole copy is of another run than the `checkpoint` on this disk: of one that
        has the same name by chance. Neither may replace the other."""
        files = self._files()
        whole = [name for name, names in _copies(files).items() if {SUMS, META} <= names]
        if not whole:
            return
        copy = on_disk.partial_dir(checkpoint.parent, step_of(whole[-1]))
        copy.mkdir(exist_ok=True)
        self._copy({META: files[f"{whole[-1]}/{META}"]}, copy)
        runs = {_run_of(checkpoint), _run_of(copy)}
        shutil.rmtree(copy)
        if len(runs - {None}) > 1:
            raise BadInput(f"{self.url} has checkpoints of another run than {checkpoint.parent}: choose another --run, "
                           "or move away the folder that you do not want")

    def copy(self, path, metrics):
        """Copies the checkpoint at `path` there, and its run's file `metrics`."""
        target = f"{self.url}/{path.name}"
        self._copy({file: path / file for file in on_disk.read_sums(path)}, target)
        # Before SHA256SUMS: whoever finds a whole copy finds the metrics up to its step, too.
        self.copy_metrics(metrics)
        self._copy({SUMS: path / SUMS}, target)

    def copy_metrics(self, path, timeout_s=COPY_TIMEOUT_S):
        """Copies the run's metrics.jsonl, of this path, there."""
        self._copy({path.name: path}, self.url, timeout_s)

    def prune(self, newest):
        """Deletes what the copy `newest`, a name, makes superfluous: older copies and incomplete ones. Copies of later
        steps stay."""
        copies = {name: files for name, files in _copies(self._files()).items() if step_of(name) <= step_of(newest)}
        whole = [name for name, files in copies.items() if SUMS in files]
        for name in copies.keys() - set(whole[-self.keep:]):
            # Without SHA256SUMS, the first, it is no longer whole, whenever a kill comes.
            for file in sorted(copies[name], key=lambda file: file != SUMS):
                if OURS.fullmatch(file):
                    self._delete(f"{name}/{file}")

    def fetch(self, run_dir, after_step=-1):
        """Copies the newest whole copy of a step later than `after_step`, and the metrics, into `run_dir`. Returns the
        checkpoint's path, or None if there is none. Skips damaged copies with a warning."""
        run_dir = Path(run_dir)
        there = self._files()
        if any(re.match(r"step_\d+\.rounded/", path) for path in there):
            say(f"{self.url} has copies of an earlier version that end in .rounded: they are skipped")
        copies = _copies(there)
        for name in reversed(copies):
            if step_of(name) <= after_step or SUMS not in copies[name]:
                continue
            final = on_disk.final_dir(run_dir, step_of(name))
            partial = on_disk.partial_dir(run_dir, step_of(name))
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            self._copy({file: there[f"{name}/{file}"] for file in copies[name] if not file.endswith(PARTIAL)}, partial)
            problem = on_disk.find_problem(partial)
            if problem is None:
                # Before the checkpoint gets its name: from then on, a start fetches only later copies.
                if METRICS_FILE in there:
                    self._copy({METRICS_FILE: there[METRICS_FILE]}, run_dir)
                else:
                    say(f"warning: {self.url} has no {METRICS_FILE}: the run continues at {final.name}, with only the "
                        "metrics that are on this disk")
                move_aside(final)  # a damaged one of that step, if there is one
                on_disk.publish(partial, final)
                return final
            shutil.rmtree(partial)
            say(f"warning: {self.url}/{name} is damaged ({problem}): the one before it is used")
        return None

    def _files(self):
        """Returns {path in the folder of the run: file}, see list_files."""
        return _within(LIST_TIMEOUT_S, list_files, self.url)

    def _copy(self, files, folder, timeout_s=COPY_TIMEOUT_S):
        """Copies {name there: file} to a folder, from the mirror or to it."""
        _within(timeout_s, copy_files, [(file, f"{folder}/{name}") for name, file in files.items()], timeout_s)

    def _delete(self, path, timeout_s=LIST_TIMEOUT_S):
        _within(timeout_s, delete_file, f"{self.url}/{path}")


def _run_of(checkpoint):
    """Returns what tells runs of one name apart, or None if the checkpoint does not say."""
    with suppress(BadInput):
        return load_meta(checkpoint).wandb_id


def _copies(paths):
    """Returns {name: names of its files} of all copies, whole or not, oldest first. paths: as Mirror._files returns
    them."""
    found = {}
    for path in paths:
        if match := re.fullmatch(r"(step_\d+)/([^/]+)", path):
            found.setdefault(match[1], set()).add(match[2])
    return dict(sorted(found.items(), key=lambda copy: step_of(copy[0])))


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
        raise BadInput(f"--checkpoint_mirror: {problem}: choose a directory that can be written to, or start without "
                       "the flag") from None


def patiently(url, function):
    """Returns function(), which uses the mirror at `url`, retried for OUTAGE_S seconds. Raises Outage after them."""
    return remote.patiently(f"--checkpoint_mirror: {url}", OUTAGE_S, function)
