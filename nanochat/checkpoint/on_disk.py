"""A run's checkpoints on disk: which exist, whether they are whole, and which are deleted.

    <base dir>/checkpoints/<run>/step_000100/
        model.safetensors      the weights by name; those of large models are in pieces, see pieces.py
        optimizer.safetensors  the optimizer's state by name, in pieces as well
        lanes.json             the position of each lane in the data, with its buffered documents
        meta.json              everything small, see meta.py
        source.zip             of an imported model: the small files that came with its weights, byte for byte
        SHA256SUMS             the checksums of these files; `sha256sum -c SHA256SUMS` checks them, too

step_000100.tmp is being written or deleted. step_000100.aside is damaged or superseded: no run resumes from it, and
only a person deletes it.
"""
import errno
import hashlib
import json
import os
import re
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from nanochat.common import SOURCE, BadInput, Outage, expand_path, get_base_dir, move_aside, require_file, say

MODEL = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
LANES = "lanes.json"
META = "meta.json"
SUMS = "SHA256SUMS"
MAX_THREADS = 16  # that read files to compute their checksums
READ_AGAIN_S = (1, 4, 15)  # the pauses before a file system that fails is tried again
_DAMAGE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EINVAL}  # errors that mean a damaged checkpoint


# Finding


def final_dir(run_dir, step):
    """Returns the path of the finished checkpoint of `step`."""
    return Path(run_dir) / f"step_{step:06d}"


def partial_dir(run_dir, step):
    """Returns the path at which the checkpoint of `step` is written before it is finished."""
    return Path(run_dir) / f"step_{step:06d}.tmp"


def step_of(path):
    """Returns the step of a checkpoint's path or name."""
    return int(re.match(r"step_(\d+)", Path(path).name)[1])


def list_checkpoints(run_dir):
    """Returns the paths of a run's finished checkpoints, oldest first."""
    paths = [path for path in Path(run_dir).glob("step_*") if re.fullmatch(r"step_\d+", path.name)]
    return sorted(paths, key=step_of)


def latest(run_dir):
    """Returns the path of a run's newest checkpoint, or None."""
    paths = list_checkpoints(run_dir)
    return paths[-1] if paths else None


def find_checkpoint(name=""):
    """Returns the path of the checkpoint that `name` stands for. Raises BadInput if there is none.

    name: the path of a checkpoint, the path or name of a run (its newest checkpoint), RUN/step_000100, or "" (the
        newest checkpoint of all runs).
    """
    checkpoints_dir = get_base_dir() / "checkpoints"
    if not name:
        newest = [path for path in map(latest, checkpoints_dir.glob("*")) if path]
        if not newest:
            raise BadInput(f"there is no checkpoint in {checkpoints_dir}: train one with python3 -m scripts.base_train")
        return max(newest, key=lambda path: path.stat().st_mtime)
    for path in (expand_path(name), checkpoints_dir / name):
        if (path / META).is_file():
            return path
        if latest(path):
            return latest(path)
    if (checkpoints_dir / name).is_dir():
        raise BadInput(f"no checkpoint at {name} yet: a run saves one every --save_every steps, and when it ends or is "
                       "stopped by Ctrl-C")
    runs = sorted(path.name for path in checkpoints_dir.glob("*") if latest(path))
    there = f" ({', '.join(runs[:20])})" if runs else ", which has none yet (is NANOCHAT_BASE_DIR right?)"
    raise BadInput(f"no checkpoint at {name}: give a run in {checkpoints_dir}{there}, or the path of a step_… "
                   "directory")


# Two failures must not be confused. A file that is missing, or has another checksum, is damage: the run resumes from
# the checkpoint before it. A file system that does not answer says nothing about the checkpoint. To resume from an
# earlier one would throw away good steps, so the start insists for 20 seconds, and then ends as in an Outage.
def latest_good(run_dir):
    """Returns the path of a run's newest undamaged checkpoint, or None, and {path: what is wrong} of all later ones.
    Raises Outage if the file system fails: that is no proof of damage."""
    damaged = {}
    _insist(run_dir, os.listdir)  # because glob hides errors
    for path in reversed(list_checkpoints(run_dir)):
        problem = _insist(path, _find_damage, ". Or move it away: the run then resumes from the checkpoint before it, "
                                              "if there is one")
        if problem is None:
            return path, damaged
        damaged[path] = problem
    return None, damaged


def _insist(path, read, or_else=""):
    """Returns read(path). Tries it again after each of READ_AGAIN_S, and then raises Outage. or_else: more advice."""
    for pause_s in (*READ_AGAIN_S, None):
        try:
            return read(path)
        except OSError as error:
            problem = _reason(error)
        if pause_s:
            say(f"warning: {path} cannot be read ({problem}): tried again in {pause_s} s")
            time.sleep(pause_s)
    raise Outage(f"{path} cannot be read ({problem}), which does not mean that it is damaged: start the same command "
                 f"again once the disk answers{or_else}")


# Whether the files are whole


def index_of(kind):
    """Returns the name of the file that says which piece holds a tensor. kind: MODEL or OPTIMIZER."""
    return f"{kind}.index.json"


def tensor_files(path, kind):
    """Returns the names of the files with the tensors of `kind`, MODEL or OPTIMIZER, in the checkpoint at `path`: one
    file, or an index and its pieces. Raises OSError, also if the index is damaged."""
    index = Path(path) / index_of(kind)
    if not index.exists():
        return [kind]
    try:
        pieces = sorted(set(json.loads(read_text(index))["weight_map"].values()))
        # A piece is in the same folder: a name with / or NUL would be read from elsewhere, or from nowhere.
        if all(re.fullmatch(r"[\w.-]+\.safetensors", piece) for piece in pieces):
            return [index.name, *pieces]
        raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise OSError(errno.EINVAL, "it is no index of pieces", str(index)) from None


def read_text(path):
    """Returns the text of a checkpoint's file. Raises OSError."""
    require_file(path)
    return path.read_text(errors="replace")


def read_sums(path):
    """Returns {file name: checksum} of the checkpoint at `path`. Raises OSError."""
    sums = {}
    for line in read_text(Path(path) / SUMS).splitlines():
        digest, _, name = line.partition("  ")
        sums[name] = digest
    return sums


def find_problem(path, weights_only=False):
    """Returns what is wrong with a checkpoint's files, in a few words, or None. Reads them whole. weights_only: checks
    the weights, meta.json and source.zip alone."""
    try:
        return _find_damage(Path(path), weights_only)
    except OSError as error:
        return _reason(error)


def _find_damage(path, weights_only=False):
    """Does the work of find_problem. Raises OSError if the file system fails."""
    kinds = [MODEL] if weights_only else [MODEL, OPTIMIZER]
    others = [META] if weights_only else [LANES, META]
    try:
        expected = read_sums(path)
        if SOURCE in expected or (path / SOURCE).exists():
            others.append(SOURCE)
        # The indexes come first: a damaged one names files that do not exist.
        indexes = [index_of(kind) for kind in kinds if (path / index_of(kind)).exists()]
        problem = _find_difference(path, indexes, expected)
        if problem:
            return problem
        files = []
        for kind in kinds:
            files += tensor_files(path, kind)
        return _find_difference(path, files + others, expected)
    except OSError as error:
        if error.errno in _DAMAGE:
            return _reason(error)
        raise


def _reason(error):
    return f"{Path(error.filename).name}: {error.strerror}" if error.filename else str(error)


def has_weights_only(path):
    """Returns whether the checkpoint at `path` was made of weights alone, as import_hf does."""
    with suppress(OSError):
        return LANES not in read_sums(path)
    return False


def _find_difference(path, names, expected):
    for file, digest in sha256_of_files([path / name for name in names]).items():
        if expected.get(file.name) != digest:
            return f"{file.name} does not match its checksum"
    return None


def sha256_of_files(paths):
    """Returns {path: hex digest}. Hashing releases the GIL, so the files are read concurrently."""
    with ThreadPoolExecutor(MAX_THREADS) as pool:
        return dict(zip(paths, pool.map(_sha256, paths), strict=True))


def _sha256(path):
    require_file(path)
    digest = hashlib.sha256()
    buffer = bytearray(2**22)
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
    return digest.hexdigest()


def sums_text(paths):
    """Returns the content of SUMS for these files, as sha256sum prints it."""
    return "".join(f"{digest}  {path.name}\n" for path, digest in sha256_of_files(paths).items())


# Naming, setting aside and deleting


# This order makes a kill at any moment harmless. All files are on disk by now. Then come their names in the directory,
# then one rename, which makes the checkpoint whole for everybody. An older checkpoint goes only once the new name is on
# disk, too.
def publish(partial, final):
    """Gives a checkpoint, whose files are on disk in `partial`, its final name."""
    sync_to_disk(partial)
    partial.rename(final)
    sync_to_disk(final.parent)


def set_aside_after(run_dir, step):
    """Sets aside all checkpoints after `step`, for a run that returns to an earlier one."""
    for path in list_checkpoints(run_dir):
        if step_of(path) > step:
            move_aside(path)


def clean_partial(run_dir):
    """Deletes what interrupted saves left. Call it only while no rank is saving."""
    for path in Path(run_dir).glob("step_*.tmp"):
        shutil.rmtree(path)


def prune(run_dir, step, keep, in_use=()):
    """Deletes what the new checkpoint of `step` makes superfluous. The newest `keep` checkpoints stay, and the paths
    `in_use` for now."""
    for path in Path(run_dir).glob("step_*.tmp"):  # saves that a full disk ended
        if step_of(path) <= step:
            shutil.rmtree(path, ignore_errors=True)
    for path in list_checkpoints(run_dir)[:-keep]:
        if path not in in_use:
            delete(path)


def delete(path):
    # Its files go one by one, and a kill may come in between. So the directory first loses its final name.
    doomed = partial_dir(path.parent, step_of(path))
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed)


# The disk


def check_disk_space(run_dir, checkpoint_bytes, copies=2):
    """Raises BadInput unless the disk has room for so many checkpoints, those that the run already has included. A run
    needs two: the new one must be in place before the last old one is deleted."""
    own = sum(map(bytes_in, list_checkpoints(run_dir)))
    free = shutil.disk_usage(run_dir).free
    if own + free < copies * checkpoint_bytes:
        raise BadInput(f"too little disk in {run_dir}: the run's checkpoints need "
                       f"{copies * checkpoint_bytes / 1e6:,.1f} MB and {(own + free) / 1e6:,.1f} MB are free: free "
                       "some, of old runs for example (step_….aside), or set NANOCHAT_BASE_DIR to a larger disk")


def check_renaming(run_dir):
    """Raises BadInput if the disk cannot do what the end of a save needs: sync a directory and rename it."""
    trial = Path(run_dir) / ".trial.tmp"
    renamed = trial.with_suffix("")
    try:
        (trial / "folder").mkdir(parents=True, exist_ok=True)
        (trial / "file").touch()
        sync_to_disk(trial)
        trial.rename(renamed)
    except OSError as error:
        raise BadInput(f"{run_dir} cannot hold checkpoints: a folder there cannot be synced and renamed "
                       f"({error.strerror}): set NANOCHAT_BASE_DIR to a disk of this machine") from None
    finally:
        shutil.rmtree(trial, ignore_errors=True)
        shutil.rmtree(renamed, ignore_errors=True)


def bytes_in(path):
    """Returns the bytes of the files in a directory, which others may be writing and renaming."""
    total = 0
    for file in path.glob("*"):
        with suppress(OSError):
            total += file.stat().st_size
    return total


def sync_to_disk(path):
    """Returns once the file's contents, or the directory's names, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL or not os.path.isdir(path):  # some file systems cannot sync a directory
            raise
    finally:
        os.close(descriptor)
