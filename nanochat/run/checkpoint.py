"""Checkpoints: atomic, checked, and free of ranks.

    <base dir>/checkpoints/<run>/step_000100/
        model.safetensors      the weights by name
        optimizer.safetensors  the optimizer's state by name
        lanes.json             where each lane of the data stands, its buffered documents included
        meta.json              step, model config, hashes of tokenizer and data, WandB run id, clock, all that is small
        SHA256SUMS             of these files; `sha256sum -c SHA256SUMS` checks them too

A checkpoint is written as `step_000100.tmp`, synced to disk, and renamed, so a directory with the final name is whole
unless something damaged it later: that the checksums tell, and `latest_good` then takes the one before. A damaged or
superseded checkpoint is renamed to `step_000100.aside` and deleted once a new one at its step or later is in place.

In a run, the parent calls, before it spawns the ranks and once only, so that all ranks agree:
    clean_partial(run_dir); check_disk_space(run_dir, bytes); path = latest_good(run_dir)
then every rank calls `load(path)`; and to save, every rank calls `save_lane_states(…)` and rank 0 `Saver.save(…)`,
which writes in the background.
"""
import base64
import errno
import hashlib
import json
import os
import re
import shutil
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from nanochat.common import BadInput, get_base_dir

MODEL, OPTIMIZER, LANES, META, SUMS = (
    "model.safetensors", "optimizer.safetensors", "lanes.json", "meta.json", "SHA256SUMS")
LANES_TIMEOUT_S = 300  # for the ranks to hand over the states of their lanes
RETRY_S = 15  # a full disk is tried again after so long
SAVE_TIMEOUT_S = 1800


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    step: int  # optimizer steps completed
    meta: dict
    model_state: dict  # name -> CPU tensor, memory-mapped: copy, never change in place
    optimizer_state: dict
    lane_states: dict  # lane -> its state


# -----------------------------------------------------------------------------
# Saving


def save_lane_states(run_dir, step, lane_states, report=print):
    """Hands the states of this rank's lanes, {lane: JSON value}, to the checkpoint of `step` that rank 0 saves.

    While the disk is full, this goes on in a thread, for as long as rank 0 waits for it.
    """
    if not lane_states:
        return
    path = _partial_dir(run_dir, step) / f"lanes_from_{min(lane_states)}.json"
    content = json.dumps(lane_states)

    def write():
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(content)
        unfinished.rename(path)

    def write_later():
        deadline = time.monotonic() + LANES_TIMEOUT_S
        while time.monotonic() < deadline:
            time.sleep(RETRY_S)
            try:
                return write()
            except OSError as error:
                if not _is_disk_full(error):
                    report(f"warning: {path} was not written: {error}")
                    return

    try:
        write()
    except OSError as error:
        if not _is_disk_full(error):
            raise
        threading.Thread(target=write_later, name="lanes", daemon=True).start()


def save(run_dir, step, model_state, optimizer_state, meta, *, num_lanes, keep=None, keep_every=-1,
         timeout_s=LANES_TIMEOUT_S, before_rename=lambda: None):
    """Saves a checkpoint and returns its path; rank 0 only. It is safe on disk, and was read back, when this returns.

    model_state, optimizer_state: {name: tensor}; meta: a JSON object, to which `step` is added.
    num_lanes: how many lane states to wait for from all ranks together, for at most `timeout_s` (then TimeoutError).
    keep: afterwards only this many of the newest checkpoints are left (None: all), and those of every step that
        `keep_every` divides.
    before_rename: called when the checkpoint is written, before it has its name.
    Raises OSError (ENOSPC) if the disk is full also without the old checkpoints.
    """
    final, partial = Path(run_dir) / f"step_{step:06d}", _partial_dir(run_dir, step)
    if final.is_dir():
        if find_problem(final) is None:
            return final  # this very state: a run repeats its steps bit for bit
        set_aside(final)
    partial.mkdir(parents=True, exist_ok=True)
    _make_room(run_dir, state_bytes(model_state, optimizer_state), keep_every)
    try:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(_save_tensors, (model_state, optimizer_state), (partial / MODEL, partial / OPTIMIZER)))
        _write_text(partial / META, json.dumps({"step": step, **meta}, indent=1))
        _merge_lane_states(partial, num_lanes, timeout_s)
        sums = _sha256_of_files([partial / name for name in (MODEL, OPTIMIZER, LANES, META)])
        _write_text(partial / SUMS, "".join(f"{digest}  {path.name}\n" for path, digest in sums.items()))
        before_rename()
    except BaseException:
        for name in (MODEL, OPTIMIZER):  # a full disk is given back at once; the directory may still be in use
            (partial / name).unlink(missing_ok=True)
        raise
    _sync_to_disk(partial)
    partial.rename(final)
    _sync_to_disk(run_dir)
    _prune(run_dir, step, keep, keep_every)
    return final


def _partial_dir(run_dir, step):
    return Path(run_dir) / f"step_{step:06d}.tmp"


def _save_tensors(state, path):
    """Writes {name: tensor} and reads it back."""
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    try:
        save_file(state, path)
    except SafetensorError as error:  # it has the number of an OSError in its text only
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number[1]), str(error), str(path)) from None if number else error
    _sync_to_disk(path)
    found = load_file(path)
    for name, tensor in state.items():
        if not torch.equal(_bytes_of(tensor), _bytes_of(found[name])):
            raise OSError(errno.EIO, f"{name} was read back with other bytes than were written", str(path))


def _bytes_of(tensor):
    return tensor.reshape(-1).view(torch.uint8)


def _write_text(path, text):
    path.write_text(text)
    _sync_to_disk(path)
    if path.read_text() != text:
        raise OSError(errno.EIO, "other text was read back than was written", str(path))


def _merge_lane_states(partial, num_lanes, timeout_s):
    """Merges what every rank's save_lane_states wrote into one file, and deletes theirs."""
    if (partial / LANES).exists():  # by an earlier attempt, which found the disk full later
        return
    deadline = time.monotonic() + timeout_s
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
        time.sleep(0.02)
    unfinished = partial / f"{LANES}.unfinished"
    _write_text(unfinished, json.dumps(dict(sorted(merged.items()))))
    unfinished.rename(partial / LANES)
    for file in files:
        file.unlink()


def _sync_to_disk(path):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _prune(run_dir, step, keep, keep_every):
    outdated = [path for path in Path(run_dir).glob("step_*.aside") if _step_of(path) <= step]
    if keep is not None:
        outdated += [path for path in list_checkpoints(run_dir)[:-max(keep, 1)] if not _stays(path.name, keep_every)]
    for path in outdated:
        _delete(path)


def _stays(name, keep_every):
    """Whether the checkpoint of this name is kept for good."""
    return keep_every > 0 and _step_of(Path(name)) % keep_every == 0


def _delete(path):
    doomed = path.with_suffix(".tmp")  # half deleted, it must not pass for a checkpoint
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed)


class Saver:
    """Saves checkpoints in the background, one at a time; rank 0 only.

    While the disk is full, the run goes on, and the save is tried again every RETRY_S with the state it was begun with,
    until a newer one takes its place. Any other error is raised by the next call of a method. Weights that are not
    finite are not saved.
    """

    def __init__(self, run_dir, *, num_lanes, keep, keep_every=-1, before_rename=lambda: None,
                 on_saved=lambda path: None, report=print):
        """on_saved: called with the path of each checkpoint, in the background. The rest as in `save`."""
        self._save = dict(num_lanes=num_lanes, keep=keep, keep_every=keep_every, before_rename=before_rename)
        self._run_dir, self._on_saved, self._report = Path(run_dir), on_saved, report
        self._error, self._thread = None, None
        self._superseded = threading.Event()

    def save(self, step, model_state, optimizer_state, meta):
        """Begins to save the state, which lies in host memory and which nobody changes any more (see
        MuonAdamW.host_state); one that is being written is waited for before."""
        self._superseded.set()
        self.finish()
        self._superseded.clear()
        self._thread = threading.Thread(target=self._work, args=(step, model_state, optimizer_state, meta),
                                        name="save", daemon=True)
        self._thread.start()

    def check(self):
        """Raises what went wrong in the background, if anything did."""
        if self._error:
            raise self._error

    def finish(self, timeout_s=SAVE_TIMEOUT_S):
        """Waits until the last state is safe; TimeoutError if that takes longer than `timeout_s`."""
        if self._thread:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise TimeoutError(f"the last checkpoint in {self._run_dir} is not safe on disk after {timeout_s} s")
        self.check()

    def _work(self, step, *state):
        started = time.monotonic()
        if not all(tensor.isfinite().all() for tensor in state[0].values()):
            return self._report(f"warning: step {step} is not saved: its weights are not finite")
        while True:
            try:
                path = save(self._run_dir, step, *state, **self._save)
                self._report(f"saved {path} (in {time.monotonic() - started:.1f} s)")
                return self._on_saved(path)
            except BaseException as error:
                if not _is_disk_full(error):
                    self._error = error
                    return
                self._report(f"warning: the disk is full ({error}): step {step} is not saved; the run goes on, trying "
                             f"again every {RETRY_S} s")
            if self._superseded.wait(RETRY_S):
                return shutil.rmtree(_partial_dir(self._run_dir, step), ignore_errors=True)


# -----------------------------------------------------------------------------
# Disk space


def state_bytes(*states):
    """Bytes of all tensors in the {name: tensor} dicts."""
    return sum(tensor.numel() * tensor.element_size() for state in states for tensor in state.values())


def check_disk_space(run_dir, checkpoint_bytes):
    """Raises BadInput unless there is room for two checkpoints, those that the run already has counted in.

    Two is what a run needs: the new one must be in place before the last old one goes.
    """
    own = sum(file.stat().st_size for file in Path(run_dir).glob("step_*/*"))
    free = shutil.disk_usage(run_dir).free
    if own + free < 2 * checkpoint_bytes:
        raise BadInput(f"too little disk in {run_dir}: two checkpoints take {2 * checkpoint_bytes / 1e9:.2f} GB and "
                       f"{(own + free) / 1e9:.2f} GB are free: free some, or set NANOCHAT_BASE_DIR to a larger disk")


def _make_room(run_dir, needed_bytes, keep_every):
    """On a disk too full for `keep` checkpoints the oldest go first; the newest stays whatever happens, and so do those
    that are kept for good. OSError (ENOSPC) if that is not enough."""
    for path in [path for path in list_checkpoints(run_dir)[:-1] if not _stays(path.name, keep_every)] + [None]:
        free = shutil.disk_usage(run_dir).free
        if free >= needed_bytes:
            return
        if path:
            _delete(path)
    raise OSError(errno.ENOSPC, f"a checkpoint takes {needed_bytes / 1e9:.3f} GB and {free / 1e9:.3f} GB are free",
                  str(run_dir))


def _is_disk_full(error):
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


# -----------------------------------------------------------------------------
# Finding and checking


def _step_of(path):
    return int(re.match(r"step_(\d+)", path.name)[1])


def list_checkpoints(run_dir):
    """Paths of the finished checkpoints of a run, oldest first."""
    paths = [path for path in Path(run_dir).glob("step_*") if re.fullmatch(r"step_\d+", path.name)]
    return sorted(paths, key=_step_of)


def latest(run_dir):
    """Path of the newest checkpoint, or None."""
    return next(reversed(list_checkpoints(run_dir)), None)


def latest_good(run_dir, report=warnings.warn):
    """Path of the newest undamaged checkpoint, or None. Damaged ones are set aside, each with a call of
    `report(message)`."""
    for path in reversed(list_checkpoints(run_dir)):
        problem = find_problem(path)
        if problem is None:
            return path
        report(f"checkpoint {path} is damaged ({problem}): set aside, the one before it is used")
        set_aside(path)
    return None


def find_problem(path, names=(MODEL, OPTIMIZER, LANES, META)):
    """What is wrong with the files `names` of the checkpoint, in a few words, or None: reads and hashes them all."""
    path = Path(path)
    try:
        lines = (path / SUMS).read_text(errors="replace").splitlines()
        found = _sha256_of_files([path / name for name in names])
    except OSError as error:
        return f"{Path(error.filename).name}: {error.strerror}" if error.filename else str(error)
    expected = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    return next((f"{file.name} does not match its checksum" for file, digest in found.items()
                 if expected.get(file.name) != digest), None)


def _sha256_of_files(paths):
    """{path: hex digest}; hashing lets go of the GIL, so the large files are read side by side."""
    def sha256(path):
        digest, buffer = hashlib.sha256(), bytearray(2**22)
        with open(path, "rb", buffering=0) as file:
            while count := file.readinto(buffer):
                digest.update(memoryview(buffer)[:count])
        return digest.hexdigest()

    with ThreadPoolExecutor(len(paths)) as pool:
        return dict(zip(paths, pool.map(sha256, paths), strict=True))


def set_aside(path):
    """Renames a checkpoint so that no run picks it up: `step_000100.aside`."""
    aside = Path(path).with_suffix(".aside")
    shutil.rmtree(aside, ignore_errors=True)
    Path(path).rename(aside)


def set_aside_after(run_dir, step):
    """Sets aside all checkpoints after `step`: for a run that goes back to an earlier one, or (-1) starts anew."""
    for path in list_checkpoints(run_dir):
        if _step_of(path) > step:
            set_aside(path)


def clean_partial(run_dir):
    """Deletes what interrupted saves left. Only while no rank is saving."""
    for path in Path(run_dir).glob("step_*.tmp"):
        shutil.rmtree(path)


def find_checkpoint(where=""):
    """Path of the checkpoint that a person means by `where`: a checkpoint's path, a run's path or name (its newest
    checkpoint), RUN/step_000100, or nothing (the newest checkpoint of all runs). BadInput if there is none."""
    checkpoints_dir = get_base_dir() / "checkpoints"
    if not where:
        newest = [path for path in map(latest, checkpoints_dir.glob("*")) if path]
        if not newest:
            raise BadInput(f"there is no checkpoint in {checkpoints_dir}: train one with python3 -m scripts.base_train")
        return max(newest, key=lambda path: path.stat().st_mtime)
    for path in (Path(where), checkpoints_dir / where):
        if (path / META).is_file():
            return path
        if latest(path):
            return latest(path)
    raise BadInput(f"no checkpoint at {where}: give a run in {checkpoints_dir}, or the path of a step_… directory")


# -----------------------------------------------------------------------------
# Loading


def load(path):
    """Checkpoint at `path`. Its tensors are memory-mapped, so that several ranks on a host share the pages."""
    path, meta = Path(path), load_meta(path)
    lane_states = {int(lane): state for lane, state in json.loads((path / LANES).read_text()).items()}
    return Checkpoint(path, meta["step"], meta, load_file(path / MODEL), load_file(path / OPTIMIZER), lane_states)


def load_meta(path):
    """What meta.json of the checkpoint at `path` says; BadInput if it is not there or cannot be read."""
    try:
        return json.loads((Path(path) / META).read_text())
    except (OSError, ValueError) as error:
        raise BadInput(f"{path} is not a checkpoint ({META}: {error}): give a step_… directory") from None


def require_match(path, meta, *, config, tokenizer_sha256, data_fingerprint):
    """Raises BadInput if the checkpoint at `path` is of another architecture, tokenizer or data than these.

    config: the model's config as a dict; None for anything that need not match.
    """
    advice = "resume with the flags it was trained with, or choose another --run"
    for key, value in (config or {}).items():
        if meta["config"].get(key) != value:
            raise BadInput(f"{path} is of another architecture: {key} is {meta['config'].get(key)} there and {value} "
                           f"here: {advice}")
    for key, value, noun in (("tokenizer_sha256", tokenizer_sha256, "tokenizer"),
                             ("data_fingerprint", data_fingerprint, "data")):
        if value is not None and meta[key] != value:
            raise BadInput(f"{path} was trained with another {noun}: its fingerprint is {meta[key][:12]} there and "
                           f"{value[:12]} here: {advice}")


def load_model(path, dist, *, tokenizer_dir=None, kernel="auto"):
    """(model, tokenizer, meta) of the checkpoint at `path`, the model on the Dist's device and ready for evaluation.

    Raises BadInput if the weights are damaged or the tokenizer is not the one it was trained with.
    """
    from nanochat.data.tokenizer import check_tokenizer, load_tokenizer
    from nanochat.kernels.choose import get_kernels
    from nanochat.model.gpt import GPT, GPTConfig
    meta = load_meta(path)
    problem = find_problem(path, (MODEL, META))
    if problem:
        raise BadInput(f"checkpoint {path} is damaged ({problem}): use another one")
    tokenizer = load_tokenizer(tokenizer_dir)
    check_tokenizer(tokenizer, meta["config"]["vocab_size"], meta["tokenizer_sha256"])
    dtype = torch.bfloat16 if dist.device_type in ("tpu", "cuda") else torch.float32
    model = GPT(GPTConfig(**meta["config"]), get_kernels(kernel, dist.device_type), dtype)
    model.load_state_dict(load_file(Path(path) / MODEL), assign=True)
    return model.to(dist.device).eval().requires_grad_(False), tokenizer, meta


def rng_state():
    """State of torch's default CPU generator, as a string for the meta."""
    return base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode()


def restore_rng(state):
    """Sets torch's default CPU generator to what rng_state gave."""
    torch.set_rng_state(torch.frombuffer(bytearray(base64.b64decode(state)), dtype=torch.uint8))
