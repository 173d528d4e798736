"""Saves and loads checkpoints, which are atomic, checked, and independent of the number of ranks.

A checkpoint is written as `step_000100.tmp`, synced to disk, read back, and renamed. So a directory with the final name
is whole unless something damaged it later; its checksums tell, and `latest_good` then returns the checkpoint before it.

Before a run spawns its ranks, its parent process calls, once and only there, so that all ranks agree:
    clean_partial(run_dir); check_disk_space(run_dir, bytes); path = latest_good(run_dir)
Then every rank calls `load(path)`. To save, every rank calls `save_lane_states(…)`, and rank 0 calls `Saver.save(…)`,
which writes in the background.
"""
import errno
import json
import re
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from nanochat.run.checkpoint_files import (
    LANES,
    MODEL,
    OPTIMIZER,
    SUMMED_FILES,
    SUMS,
    final_dir,
    find_problem,
    is_disk_full,
    make_room,
    partial_dir,
    prune,
    set_aside,
    sha256_of_files,
    state_bytes,
    sync_to_disk,
)
from nanochat.run.meta import META, Meta, load_meta

LANES_TIMEOUT_S = 300  # for the ranks to hand over the states of their lanes
RETRY_S = 15  # between attempts to write to a full disk
PROBE_S, PROBE_BYTES = 1, 2**20  # how often, and by which file, a missing state is found to be due to a full disk
SAVE_TIMEOUT_S = 1800


def save_lane_states(run_dir, step, lane_states, report=print):
    """Adds the states of this rank's lanes, {lane: JSON value}, to the checkpoint of `step` that rank 0 saves.

    If the disk is full, a thread tries again for as long as rank 0 waits for the states.
    """
    if not lane_states:
        return
    path = partial_dir(run_dir, step) / f"lanes_from_{min(lane_states)}.json"
    content = json.dumps(lane_states)

    def write():
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(content)
        unfinished.rename(path)

    def write_later():
        deadline = time.monotonic() + LANES_TIMEOUT_S
        while time.monotonic() < deadline:
            time.sleep(RETRY_S)
            try:
                if path.parent.is_dir():  # otherwise rank 0 waits for space, or has given this checkpoint up
                    return write()
            except OSError as error:
                if not is_disk_full(error):
                    report(f"warning: {path} was not written: {error}")
                    return

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write()
    except OSError as error:
        if not is_disk_full(error):
            raise
        threading.Thread(target=write_later, name="lanes", daemon=True).start()


def save(run_dir, model_state, optimizer_state, meta, *, num_lanes, keep=None, keep_every=-1,
         timeout_s=LANES_TIMEOUT_S, before_rename=lambda: None):
    """Saves the checkpoint of step `meta.step` and returns its path, once it is on disk and was read back. Rank 0 only.

    model_state, optimizer_state: {name: tensor}. meta: a Meta.
    num_lanes: the number of lane states to wait for, from all ranks together, for at most `timeout_s` seconds.
    keep: how many of the newest checkpoints remain afterwards (None: all), besides those whose step is a multiple of
        `keep_every`.
    before_rename: called when the checkpoint is written and before it gets its final name.
    Raises TimeoutError if lane states are missing, and OSError (ENOSPC) if the disk is full even without the old
    checkpoints.
    """
    final, partial = final_dir(run_dir, meta.step), partial_dir(run_dir, meta.step)
    if final.is_dir():
        if find_problem(final) is None:
            return final  # it holds the same state, because a resumed run repeats its steps bit for bit
        set_aside(final)
    partial.mkdir(parents=True, exist_ok=True)
    make_room(run_dir, state_bytes(model_state, optimizer_state), keep_every)
    try:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(_save_tensors, (model_state, optimizer_state), (partial / MODEL, partial / OPTIMIZER)))
        _write_text(partial / META, json.dumps(meta.to_json(), indent=1))
        _merge_lane_states(partial, num_lanes, timeout_s)
        sums = sha256_of_files([partial / name for name in SUMMED_FILES])
        _write_text(partial / SUMS, "".join(f"{digest}  {path.name}\n" for path, digest in sums.items()))
        before_rename()
    except BaseException:
        for name in (MODEL, OPTIMIZER):  # frees the disk; ranks may still write to the directory
            (partial / name).unlink(missing_ok=True)
        raise
    sync_to_disk(partial)
    partial.rename(final)
    sync_to_disk(run_dir)
    prune(run_dir, meta.step, keep, keep_every)
    return final


def _save_tensors(state, path):
    """Writes {name: tensor} and reads it back."""
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    try:
        save_file(state, path)
    except SafetensorError as error:  # only its text has the number of the OSError behind it
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number[1]), str(error), str(path)) from None if number else error
    sync_to_disk(path)
    found = load_file(path)
    for name, tensor in state.items():
        if not torch.equal(_bytes_of(tensor), _bytes_of(found[name])):
            raise OSError(errno.EIO, f"{name} was read back with other bytes than were written", str(path))


def _bytes_of(tensor):
    return tensor.reshape(-1).view(torch.uint8)


def _write_text(path, text):
    path.write_text(text)
    sync_to_disk(path)
    if path.read_text() != text:
        raise OSError(errno.EIO, "other text was read back than was written", str(path))


def _merge_lane_states(partial, num_lanes, timeout_s):
    """Merges the files that the ranks' save_lane_states wrote into one, and deletes them.

    Raises OSError (ENOSPC) if states are missing while the disk is full: their ranks cannot write them, and to wait for
    them would stop the run.
    """
    if (partial / LANES).exists():  # merged by an earlier attempt, after which the disk was full
        return
    deadline, next_probe = time.monotonic() + timeout_s, time.monotonic() + PROBE_S
    while True:
        merged, files = {}, list(partial.glob("lanes_from_*.json"))
        for file in files:
            merged.update({int(lane): state for lane, state in json.loads(file.read_text()).items()})
        missing = sorted(set(range(num_lanes)) - merged.keys())
        if not missing:
            break
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout_s:.0f} s for the ranks that own lanes {', '.join(map(str, missing))} "
                               f"to write their loader state to {partial}")
        if time.monotonic() > next_probe:
            _write_probe(partial / "probe")
            next_probe = time.monotonic() + PROBE_S
        time.sleep(0.02)
    unfinished = partial / f"{LANES}.unfinished"
    _write_text(unfinished, json.dumps(dict(sorted(merged.items()))))
    unfinished.rename(partial / LANES)
    for file in files:
        file.unlink()


def _write_probe(path):
    """Raises OSError if PROBE_BYTES cannot be written to `path`, where nothing is left."""
    try:
        path.write_bytes(bytes(PROBE_BYTES))
        sync_to_disk(path)
    finally:
        path.unlink(missing_ok=True)


class Saver:
    """Saves checkpoints in the background, one at a time; rank 0 only.

    If the disk is full, the run continues, and the Saver tries to save the same state again every RETRY_S until save
    is called with a newer one. The next call of a method raises any other error. A state whose weights are not finite
    is not saved. `saved_step` is the step of the newest checkpoint on disk.
    """

    def __init__(self, run_dir, *, num_lanes, keep, saved_step=0, keep_every=-1, before_rename=lambda: None,
                 on_saved=lambda path: None, report=print):
        """saved_step: that of the checkpoint that the run resumes from. on_saved: called with the path of each finished
        checkpoint, in the background. report: called with each message. The other arguments are those of the function
        `save`."""
        self.saved_step = saved_step
        self._save = dict(num_lanes=num_lanes, keep=keep, keep_every=keep_every, before_rename=before_rename)
        self._run_dir, self._on_saved, self._report = Path(run_dir), on_saved, report
        self._error, self._thread = None, None
        self._superseded = threading.Event()

    def save(self, model_state, optimizer_state, meta):
        """Waits for the checkpoint that is being written, and begins to save this one.

        model_state, optimizer_state: {name: tensor} in host memory, never changed again (see MuonAdamW.host_state).
        """
        self._superseded.set()
        self.finish()
        self._superseded.clear()
        self._thread = threading.Thread(target=self._work, args=(model_state, optimizer_state, meta),
                                        name="save", daemon=True)
        self._thread.start()

    def check(self):
        """Raises the error that ended saving in the background, if there was one."""
        if self._error:
            raise self._error

    def finish(self, timeout_s=SAVE_TIMEOUT_S):
        """Waits until the last checkpoint is on disk. Raises TimeoutError after `timeout_s` seconds."""
        if self._thread:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise TimeoutError(f"the last checkpoint in {self._run_dir} is not safe on disk after {timeout_s} s")
        self.check()

    def _work(self, model_state, optimizer_state, meta):
        started = time.monotonic()
        if not all(tensor.isfinite().all() for tensor in model_state.values()):
            self._report(f"warning: step {meta.step} is not saved: its weights are not finite")
            return self._give_up(meta.step)
        while True:
            try:
                path = save(self._run_dir, model_state, optimizer_state, meta, **self._save)
                self.saved_step = meta.step
                self._report(f"saved {path} (in {time.monotonic() - started:.1f} s)")
                return self._on_saved(path)
            except BaseException as error:
                if not is_disk_full(error):
                    self._error = error
                    return
                self._report(f"warning: the disk is full ({error}): step {meta.step} is not saved; the run continues, "
                             f"trying again every {RETRY_S} s")
            if self._superseded.wait(RETRY_S):
                return self._give_up(meta.step)

    def _give_up(self, step):
        shutil.rmtree(partial_dir(self._run_dir, step), ignore_errors=True)


# -----------------------------------------------------------------------------
# Loading


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    meta: Meta
    model_state: dict  # name -> CPU tensor, memory-mapped: copy it, never change it in place
    optimizer_state: dict
    lane_states: dict  # lane -> its state


def load(path):
    """Returns the Checkpoint at `path`. Its tensors are memory-mapped, so that the ranks of a host share the pages."""
    path, meta = Path(path), load_meta(path)
    lane_states = {int(lane): state for lane, state in json.loads((path / LANES).read_text()).items()}
    return Checkpoint(path, meta, load_file(path / MODEL), load_file(path / OPTIMIZER), lane_states)
