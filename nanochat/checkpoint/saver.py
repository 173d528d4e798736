"""Saves checkpoints, which are atomic, checked, and independent of the number of ranks.

A checkpoint is written as `step_000100.tmp`, synced to disk, read back, and renamed. So a directory with the final name
is whole unless something damaged it later; its checksums tell, and a run resumes from the one before it.

To save, every rank calls `save_lane_states`. The ranks that write tensors have a Saver, which writes them in the
background: rank 0 calls Saver.save, which waits for the files of the others and gives the checkpoint its name; the
others call Saver.save_part.
"""
import errno
import json
import shutil
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from nanochat.checkpoint import on_disk
from nanochat.checkpoint.on_disk import LANES, META, SOURCE, SUMS
from nanochat.checkpoint.pieces import Layout, remove_files, sizes_of, write_files
from nanochat.common import Failure, is_disk_full, move_aside, say

END_TIMEOUT_S = 1800  # for the last checkpoint at the end of a run
PROBE_S = 1  # between two tests whether a missing part is due to a full disk
PROBE_BYTES = 2**20
FULL, NOT_FINITE = "disk_is_full", "weights_are_not_finite"  # files that tell rank 0 why a rank's part is missing


@dataclass(frozen=True)
class SaveOptions:
    keep: int = sys.maxsize  # of the newest checkpoints, so many stay when there is a new one
    retry_s: float = 15  # between attempts to write to a full disk
    lanes_timeout_s: float = 300  # for the ranks to hand over the states of their lanes
    pieces_timeout_s: float = 1800  # for the ranks that write tensors


class NotFinite(Exception):
    """A weight is not finite, so the state must not be saved."""


# What every rank adds

# Ranks meet only in the directory step_….tmp. Each writes a file under another name and renames it once it is whole. So
# rank 0 may take every file that it sees there, in any order, and needs no message from the others. A rank that cannot
# write leaves a mark instead, FULL or NOT_FINITE; otherwise rank 0 would wait for it until its wait times out.


def save_lane_states(run_dir, step, lane_states, options=SaveOptions()):
    """Adds the states of this rank's lanes, {lane: JSON value}, to the checkpoint of `step` that rank 0 saves. If the
    disk is full, a thread retries for as long as rank 0 waits for the states. Raises any other OSError."""
    if not lane_states:
        return
    path = on_disk.partial_dir(run_dir, step) / f"lanes_from_{min(lane_states)}.json"
    text = json.dumps(lane_states)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_lanes(path, text)
    except OSError as error:
        if not is_disk_full(error):
            raise
        threading.Thread(target=_write_lanes_later, args=(path, text, options), name="lanes", daemon=True).start()


def _write_lanes(path, text):
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(text)
    unfinished.rename(path)


def _write_lanes_later(path, text, options):
    deadline = time.monotonic() + options.lanes_timeout_s
    while time.monotonic() < deadline:
        time.sleep(options.retry_s)
        if not path.parent.is_dir():  # rank 0 waits for space, or has abandoned this checkpoint
            continue
        try:
            return _write_lanes(path, text)
        except OSError as error:
            if not is_disk_full(error):
                say(f"warning: {path} was not written: {error}")
                return


def write_part(run_dir, step, layout, model_state, optimizer_state):
    """Adds this rank's tensors to the checkpoint of `step` that rank 0 saves. For ranks other than 0.

    layout: the Layout of the whole checkpoint; the states: {name: tensor} of the files that this rank writes. Raises
    NotFinite, and OSError; tells rank 0 if a weight is not finite or the disk is full.
    """
    partial = on_disk.partial_dir(run_dir, step)
    partial.mkdir(parents=True, exist_ok=True)
    # The mark of an earlier attempt would make rank 0 abandon this one.
    (partial / FULL).unlink(missing_ok=True)
    try:
        require_finite(model_state)
        write_files(partial, layout.files_with(model_state, optimizer_state))
    except NotFinite:
        (partial / NOT_FINITE).touch()
        raise
    except OSError as error:
        if is_disk_full(error):
            (partial / FULL).touch()
        raise


def require_finite(model_state):
    """Raises NotFinite unless all weights, {name: tensor}, are finite."""
    if not all(tensor.isfinite().all() for tensor in model_state.values()):
        raise NotFinite


# What rank 0 does


def save_checkpoint(run_dir, model_state, optimizer_state, meta, num_lanes, layout=None, options=SaveOptions(),
                    log=None, uploader=None, source=None):
    """Saves the checkpoint of step `meta.step` and returns its path, once it is on disk and was read back. Rank 0 only.

    model_state, optimizer_state: {name: tensor}, those that this rank writes. meta: a Meta.
    num_lanes: the number of lane states to wait for, from all ranks together.
    layout: the Layout of the whole checkpoint, whose other files other ranks write; None: this rank writes all.
    log: its flush() writes the metrics up to this step, before the checkpoint gets its final name.
    uploader: an Uploader, whose checkpoints on their way to the mirror stay. source: the bytes of SOURCE, or None.
    Raises TimeoutError if parts of other ranks are missing, OSError (ENOSPC) if the disk is full even without the old
    checkpoints, and NotFinite if another rank's weights are not finite.
    """
    final = on_disk.final_dir(run_dir, meta.step)
    partial = on_disk.partial_dir(run_dir, meta.step)
    if final.is_dir():
        if on_disk.find_problem(final) is None:
            return final  # it holds the same state: a resumed run repeats its steps bit for bit
        move_aside(final)
    layout = layout or Layout.of(sizes_of(model_state), sizes_of(optimizer_state))
    mine = layout.files_with(model_state, optimizer_state)
    partial.mkdir(parents=True, exist_ok=True)
    # Other ranks may have written a part of it already.
    make_room(run_dir, layout.num_bytes - on_disk.bytes_in(partial))
    try:
        write_files(partial, mine)
        texts = layout.indexes() | {META: json.dumps(meta.to_json(), indent=1)}
        small = {name: text.encode() for name, text in texts.items()}
        if source is not None:
            small[SOURCE] = source
        for name, content in small.items():
            _write_small(partial / name, content)
        _wait_for_files(partial, layout.files, options.pieces_timeout_s)
        _merge_lane_states(partial, num_lanes, options.lanes_timeout_s)
        files = [partial / name for name in (*layout.files, LANES, *small)]
        _write_small(partial / SUMS, on_disk.sums_text(files).encode())
        if log:
            log.flush()
    except BaseException:
        remove_files(partial, mine)  # frees the disk; ranks may still write to the directory
        raise
    on_disk.publish(partial, final)
    on_disk.prune(run_dir, meta.step, options.keep, uploader.on_their_way() if uploader else ())
    return final


def make_room(run_dir, needed_bytes):
    """Deletes the oldest checkpoints until `needed_bytes` are free, but never the newest. Raises OSError (ENOSPC) if
    that is not enough."""
    doomed = on_disk.list_checkpoints(run_dir)[:-1]
    while (free := shutil.disk_usage(run_dir).free) < needed_bytes:
        if not doomed:
            raise OSError(errno.ENOSPC, f"a checkpoint takes {needed_bytes / 1e6:,.1f} MB and {free / 1e6:,.1f} MB "
                          "are free", str(run_dir))
        on_disk.delete(doomed.pop(0))


def _write_small(path, content):
    path.write_bytes(content)
    on_disk.sync_to_disk(path)
    if path.read_bytes() != content:
        raise OSError(errno.EIO, "other bytes were read back than were written", str(path))


def _wait_for_files(partial, files, timeout_s):
    wait = _Wait(partial, timeout_s)
    while missing := [name for name in files if not (partial / name).exists()]:
        if (partial / NOT_FINITE).exists():
            raise NotFinite
        if (partial / FULL).exists():
            raise OSError(errno.ENOSPC, "another rank has no room for its part", str(partial))
        wait.for_the_ranks_that(f"write {', '.join(missing[:3])} to {partial}")


# LANES gets its name before the ranks' files go: so at any moment the folder holds every position at least once. A full
# disk may end the save behind that point. The next attempt finds LANES, and needs nothing from the ranks.
def _merge_lane_states(partial, num_lanes, timeout_s):
    """Merges the files that the ranks' save_lane_states wrote into LANES, and deletes them."""
    if (partial / LANES).exists():  # merged by an earlier attempt, which a full disk ended
        return
    wait = _Wait(partial, timeout_s)
    while True:
        files = list(partial.glob("lanes_from_*.json"))
        merged = {}
        for file in files:
            merged |= {int(lane): state for lane, state in json.loads(file.read_text()).items()}
        missing = [str(lane) for lane in range(num_lanes) if lane not in merged]
        if not missing:
            break
        wait.for_the_ranks_that(f"own lanes {', '.join(missing)} to write their loader state to {partial}")
    unfinished = partial / f"{LANES}.unfinished"
    _write_small(unfinished, json.dumps(dict(sorted(merged.items()))).encode())
    unfinished.rename(partial / LANES)
    for file in files:
        file.unlink()


# On a full disk a rank may be unable to write even its mark, which takes a block of its own. So while rank 0 waits, it
# tests each second whether 1 MiB fits.
class _Wait:
    """Rank 0's wait for files of other ranks in the directory `partial`."""

    def __init__(self, partial, timeout_s):
        self._partial = partial
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._next_probe = time.monotonic() + PROBE_S

    def for_the_ranks_that(self, what):
        """Waits a moment. Raises TimeoutError once the time is over, and OSError (ENOSPC) if the disk is full: then the
        ranks cannot write, and waiting for them would stop the run."""
        if time.monotonic() > self._deadline:
            raise TimeoutError(f"waited {self._timeout_s:.0f} s for the ranks that {what}")
        if time.monotonic() > self._next_probe:
            _write_probe(self._partial / "probe")
            self._next_probe = time.monotonic() + PROBE_S
        time.sleep(0.02)


def _write_probe(path):
    try:
        path.write_bytes(bytes(PROBE_BYTES))
        on_disk.sync_to_disk(path)
    finally:
        path.unlink(missing_ok=True)


# In the background


class Saver:
    """Writes this rank's part of each checkpoint, in the background and one checkpoint at a time. Rank 0 calls `save`,
    the other ranks `save_part`, with states {name: tensor} in host memory that never change (MuonAdamW.host_state).

    A full disk does not end the run: the Saver retries until there is a newer state. The next call of a method raises
    any other error. A state whose weights are not finite is not saved.
    """

    def __init__(self, run_dir, num_lanes=0, options=SaveOptions(), saved_step=0, uploader=None, log=None,
                 source=None):
        """saved_step: the step of the checkpoint that the run resumes from. uploader: an Uploader, which gets each
        finished checkpoint. num_lanes, options, log, source: see save_checkpoint."""
        self.saved_step = saved_step  # of the newest checkpoint on disk; on rank 0
        self._run_dir = Path(run_dir)
        self._num_lanes = num_lanes
        self._options = options
        self._uploader = uploader
        self._log = log
        self._source = source
        self._thread = None
        self._error = None
        self._superseded = threading.Event()

    def save(self, model_state, optimizer_state, meta, layout=None):
        """Waits for the checkpoint that is being written, and begins to save this one; see save_checkpoint."""
        self._begin(self._save, model_state, optimizer_state, meta, layout)

    def save_part(self, step, layout, model_state, optimizer_state):
        """Waits for the part that is being written, and begins to write this one; see write_part."""
        self._begin(self._save_part, step, layout, model_state, optimizer_state)

    def check(self):
        """Raises the error that ended a save in the background, if there was one."""
        if self._error:
            raise self._error

    def finish(self, is_told_to_end=lambda: False, timeout_s=END_TIMEOUT_S):
        """Waits until the last state is on disk. Once is_told_to_end() returns True, it no longer retries on a full
        disk. Raises Failure after `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        while self._thread and self._thread.is_alive():
            if is_told_to_end():
                self._superseded.set()
            if time.monotonic() > deadline:
                raise Failure(f"the last checkpoint in {self._run_dir} is not on disk after {timeout_s} s: see to the "
                              "disk, and run the same command again")
            self._thread.join(1)
        self.check()

    # At most one state waits in host memory. A newer one ends the retries of a full disk (_superseded), waits until the
    # thread has abandoned or written the older one, and begins in a thread of its own.
    def _begin(self, work, *args):
        self._superseded.set()
        self.finish()
        self._superseded.clear()
        self._thread = threading.Thread(target=work, args=args, name="save", daemon=True)
        self._thread.start()

    def _save(self, model_state, optimizer_state, meta, layout):
        started = time.monotonic()
        while True:
            try:
                require_finite(model_state)
                path = save_checkpoint(self._run_dir, model_state, optimizer_state, meta, self._num_lanes, layout,
                                       self._options, self._log, self._uploader, self._source)
                self.saved_step = meta.step
                say(f"saved {path} (in {time.monotonic() - started:.1f} s)")
                if self._uploader:
                    self._uploader.upload(path)
                return
            except NotFinite:
                say(f"warning: step {meta.step} is not saved: its weights are not finite")
                break
            except BaseException as error:
                if not is_disk_full(error):
                    self._error = error
                    return
                say(f"warning: the disk is full ({error}): step {meta.step} is not saved; the run continues, trying "
                    f"again every {self._options.retry_s} s")
            if self._superseded.wait(self._options.retry_s):
                break
        shutil.rmtree(on_disk.partial_dir(self._run_dir, meta.step), ignore_errors=True)  # this state is abandoned

    def _save_part(self, step, layout, model_state, optimizer_state):
        while True:
            try:
                return write_part(self._run_dir, step, layout, model_state, optimizer_state)
            except NotFinite:  # rank 0 says so
                return
            except BaseException as error:
                if not is_disk_full(error):
                    if on_disk.partial_dir(self._run_dir, step).is_dir():  # otherwise rank 0 has abandoned it
                        self._error = error
                    return
            if self._superseded.wait(self._options.retry_s):
                return
