"""Saves and loads checkpoints, which are atomic, checked, and independent of the number of ranks.

A checkpoint is written as `step_000100.tmp`, synced to disk, read back, and renamed. So a directory with the final name
is whole unless something damaged it later; its checksums tell, and `latest_good` then returns the checkpoint before it.

Before a run spawns its ranks, its parent process calls, once and only there, so that all ranks agree:
    clean_partial(run_dir); check_disk_space(run_dir, bytes); path = latest_good(run_dir)
Then every rank calls `load(path)`. To save, every rank calls `save_lane_states(…)`, the ranks that write tensors (see
pieces.py) call `write_part`, and rank 0 calls `save`, which waits for the others: saver.py does both in the background.
"""
import errno
import json
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from nanochat.checkpoint.checkpoint_files import (
    LANES,
    MODEL,
    OPTIMIZER,
    SUMS,
    bytes_in,
    final_dir,
    find_problem,
    make_room,
    partial_dir,
    prune,
    set_aside,
    sha256_of_files,
    sync_to_disk,
)
from nanochat.checkpoint.meta import META, Meta, load_meta
from nanochat.checkpoint.pieces import Layout, load_tensors, remove_files, sizes_of, write_files
from nanochat.common import is_disk_full

LANES_TIMEOUT_S = 300  # for the ranks to hand over the states of their lanes
PIECES_TIMEOUT_S = 1800  # for the ranks that write tensors
RETRY_S = 15  # between attempts to write to a full disk
PROBE_S, PROBE_BYTES = 1, 2**20  # how often, and by which file, a missing part is found to be due to a full disk
FULL, NOT_FINITE = "disk_is_full", "weights_are_not_finite"  # files that tell rank 0 why a rank's part is missing


class NotFinite(Exception):
    """A weight is not finite, so the state is not to be saved."""


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


def write_part(run_dir, step, layout, model_state, optimizer_state):
    """Adds this rank's tensors to the checkpoint of `step` that rank 0 saves. Other ranks than rank 0 only.

    layout: the Layout of the whole checkpoint; the states: {name: tensor} of the files that this rank writes. If the
    disk is full, or a weight is not finite, rank 0 gets to know. Raises OSError and NotFinite.
    """
    partial = partial_dir(run_dir, step)
    partial.mkdir(parents=True, exist_ok=True)
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


def save(run_dir, model_state, optimizer_state, meta, *, num_lanes, layout=None, keep=None, keep_every=-1,
         timeout_s=LANES_TIMEOUT_S, before_rename=lambda: None):
    """Saves the checkpoint of step `meta.step` and returns its path, once it is on disk and was read back. Rank 0 only.

    model_state, optimizer_state: {name: tensor}, those that this rank writes. meta: a Meta.
    num_lanes: the number of lane states to wait for, from all ranks together, for at most `timeout_s` seconds.
    layout: the Layout of the whole checkpoint, whose other files other ranks write; None: there are no others.
    keep: how many of the newest checkpoints remain afterwards (None: all), besides those whose step is a multiple of
        `keep_every`.
    before_rename: called when the checkpoint is written and before it gets its final name.
    Raises TimeoutError if parts of other ranks are missing, OSError (ENOSPC) if the disk is full even without the old
    checkpoints, and NotFinite if another rank has found that.
    """
    final, partial = final_dir(run_dir, meta.step), partial_dir(run_dir, meta.step)
    if final.is_dir():
        if find_problem(final) is None:
            return final  # it holds the same state, because a resumed run repeats its steps bit for bit
        set_aside(final)
    layout = layout or Layout.of(sizes_of(model_state), sizes_of(optimizer_state))
    mine = layout.files_with(model_state, optimizer_state)
    partial.mkdir(parents=True, exist_ok=True)
    make_room(run_dir, layout.num_bytes - bytes_in(partial), keep_every)
    try:
        write_files(partial, mine)
        texts = {**layout.indexes(), META: json.dumps(meta.to_json(), indent=1)}
        for name, text in texts.items():
            _write_text(partial / name, text)
        _wait_for_files(partial, layout.files)
        _merge_lane_states(partial, num_lanes, timeout_s)
        sums = sha256_of_files([partial / name for name in (*layout.files, LANES, *texts)])
        _write_text(partial / SUMS, "".join(f"{digest}  {path.name}\n" for path, digest in sums.items()))
        before_rename()
    except BaseException:
        remove_files(partial, mine)  # frees the disk; ranks may still write to the directory
        raise
    sync_to_disk(partial)
    partial.rename(final)
    sync_to_disk(run_dir)
    prune(run_dir, meta.step, keep, keep_every)
    return final


def _write_text(path, text):
    path.write_text(text)
    sync_to_disk(path)
    if path.read_text() != text:
        raise OSError(errno.EIO, "other text was read back than was written", str(path))


def _wait_for_files(partial, files):
    def missing():
        if (partial / NOT_FINITE).exists():
            raise NotFinite
        if (partial / FULL).exists():
            raise OSError(errno.ENOSPC, "another rank has no room for its part", str(partial))
        names = [name for name in files if not (partial / name).exists()]
        return names and f"write {', '.join(names[:3])}{' …' if names[3:] else ''} to {partial}"

    _wait_for_ranks(partial, missing, PIECES_TIMEOUT_S)


def _wait_for_ranks(partial, missing, timeout_s):
    """Waits until missing() is false; else it returns what other ranks have yet to do.

    Raises TimeoutError, and OSError (ENOSPC) if something is missing while the disk is full: the ranks cannot write it,
    and to wait for them would stop the run.
    """
    deadline, next_probe = time.monotonic() + timeout_s, time.monotonic() + PROBE_S
    while what := missing():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout_s:.0f} s for the ranks that {what}")
        if time.monotonic() > next_probe:
            _write_probe(partial / "probe")
            next_probe = time.monotonic() + PROBE_S
        time.sleep(0.02)


def _merge_lane_states(partial, num_lanes, timeout_s):
    """Merges the files that the ranks' save_lane_states wrote into one, and deletes them."""
    if (partial / LANES).exists():  # merged by an earlier attempt, after which the disk was full
        return
    merged, files = {}, []

    def missing():
        files[:] = partial.glob("lanes_from_*.json")
        for file in files:
            merged.update({int(lane): state for lane, state in json.loads(file.read_text()).items()})
        lanes = sorted(set(range(num_lanes)) - merged.keys())
        return lanes and f"own lanes {', '.join(map(str, lanes))} to write their loader state to {partial}"

    _wait_for_ranks(partial, missing, timeout_s)
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
    return Checkpoint(path, meta, load_tensors(path, MODEL), load_tensors(path, OPTIMIZER), lane_states)
