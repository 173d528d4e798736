"""The tensors of a checkpoint: which file holds each one, which rank writes it, and how to read them.
saver.py writes them in its thread, into a folder step_000100.tmp. Once all ranks have, rank 0 adds the states of the
lanes, meta.json and checksums, and gives the folder its name. The trainer reads them.

Weights and optimizer's state have a file each: model.safetensors and optimizer.safetensors. If one is larger than a few
GB, it is divided into pieces of whole tensors, with an index, in the format of Hugging Face's libraries:
    model-00001-of-00007.safetensors … model-00007-of-00007.safetensors
    model.safetensors.index.json        {"metadata": {"total_size": bytes}, "weight_map": {tensor: file}}

All ranks of the first host write. So each keeps only its part of the state in host memory, and a large checkpoint has
as many writers as the host has chips.
"""
import errno
import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from nanochat.checkpoint.meta import Meta, load_meta
from nanochat.checkpoint.on_disk import LANES, MODEL, OPTIMIZER, index_of, sync_to_disk, tensor_files

PIECE_BYTES = 4 * 10**9  # a file is larger only if one tensor is
WRITING_THREADS = 2  # files that a rank writes at the same time


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read from disk."""
    meta: Meta
    model_state: dict  # name -> CPU tensor, memory-mapped: copy it, never change it in place
    optimizer_state: dict
    lane_states: dict  # lane -> its state


def load_checkpoint(path):
    """Returns the Checkpoint at `path`, with memory-mapped tensors."""
    return Checkpoint(load_meta(path), load_tensors(path, MODEL), load_tensors(path, OPTIMIZER), load_lane_states(path))


def load_lane_states(path):
    """Returns {lane: its state} of the checkpoint at `path`."""
    return {int(lane): state for lane, state in json.loads((path / LANES).read_text()).items()}


def load_tensors(path, kind):
    """Returns {name: tensor} of `kind`, MODEL or OPTIMIZER, of the checkpoint at `path`: memory-mapped, so that the
    ranks of a host share the pages, and only tensors in use are read."""
    tensors = {}
    for name in tensor_files(path, kind):
        if name.endswith(".safetensors"):
            tensors |= load_file(Path(path) / name)
    return tensors


def tensor_readers(path, kind):
    """Returns {name: a function that reads this tensor into memory of its own} of `kind`, as load_tensors. So a caller
    who lets go of each tensor never holds them all. The files stay open, even if they are deleted."""
    readers = {}
    for name in tensor_files(path, kind):
        if name.endswith(".safetensors"):
            file = safe_open(Path(path) / name, framework="pt", backend="pread")
            readers |= {tensor: partial(file.get_tensor, tensor) for tensor in file.keys()}
    return readers


def sizes_of(state):
    return {name: tensor.nbytes for name, tensor in state.items()}


def state_bytes(*states):
    """Returns the bytes of all tensors in the states, {name: tensor}."""
    return sum(sum(sizes_of(state).values()) for state in states)


# Which tensors are in which file


# Every rank computes the same Layout from the same sizes, so no rank has to be told what it writes, and rank 0 knows
# all files before any exists. Tensors are never cut: a piece ends before the tensor that would make it too large. The
# names of the files, and so the checkpoint, do not depend on the number of writers.
@dataclass(frozen=True)
class Layout:
    """Which tensors are in which file of a checkpoint."""
    files: dict  # {file: {tensor: bytes}}, the model's first

    @classmethod
    def of(cls, model_sizes, optimizer_sizes, piece_bytes=PIECE_BYTES):
        """Returns the Layout for {tensor: bytes} of the weights and of the optimizer's state."""
        return cls(_divide(MODEL, model_sizes, piece_bytes) | _divide(OPTIMIZER, optimizer_sizes, piece_bytes))

    @property
    def num_bytes(self):
        return sum(sum(sizes.values()) for sizes in self.files.values())

    def tensors_of(self, writer, writers):
        """Returns the names of the tensors that one of several writers writes: each file, the largest first, goes to
        the writer with the fewest bytes."""
        # Every rank computes the whole division and takes its own part. By size, because a rank holds its part in
        # memory: of a model of 7B one rank of four had 21.5 GB with files dealt in turn, and 14.9 GB by size.
        loads = [0] * writers  # bytes
        mine = set()
        for sizes in sorted(self.files.values(), key=lambda sizes: -sum(sizes.values())):
            chosen = loads.index(min(loads))
            loads[chosen] += sum(sizes.values())
            if chosen == writer:
                mine |= sizes.keys()
        return mine

    def files_with(self, *states):
        """Returns {file: {name: tensor}} of the files whose tensors are all in the states, {name: tensor}."""
        tensors = {}
        for state in states:
            tensors |= state
        files = {}
        for file, sizes in self.files.items():
            if sizes.keys() <= tensors.keys():
                files[file] = {name: tensors[name] for name in sizes}
        return files

    def indexes(self):
        """Returns {file: its text} of the indexes; a kind that one file holds has none."""
        texts = {}
        for kind in (MODEL, OPTIMIZER):
            weight_map = {}
            total = 0
            for file, sizes in self.files.items():
                if file.startswith(f"{Path(kind).stem}-"):
                    weight_map |= dict.fromkeys(sizes, file)
                    total += sum(sizes.values())
            if weight_map:
                index = {"metadata": {"total_size": total}, "weight_map": weight_map}
                texts[index_of(kind)] = json.dumps(index, indent=1)
        return texts


def _divide(kind, sizes, piece_bytes):
    """Returns {file: {tensor: bytes}}: one file of this kind, or its pieces. Divides no tensor: one that is larger than
    a piece has a file of its own."""
    pieces = [{}]
    for name, size in sizes.items():
        if pieces[-1] and sum(pieces[-1].values()) + size > piece_bytes:
            pieces.append({})
        pieces[-1][name] = size
    if len(pieces) == 1:
        return {kind: pieces[0]}
    files = {}
    for number, piece in enumerate(pieces, 1):
        files[f"{Path(kind).stem}-{number:05d}-of-{len(pieces):05d}.safetensors"] = piece
    return files


# Writing


def write_files(folder, files):
    """Writes {file: {name: tensor}} to the folder and reads them back. A file gets its name once it is whole. Leaves
    none of them after an error. Raises OSError."""
    try:
        with ThreadPoolExecutor(WRITING_THREADS) as pool:
            list(pool.map(_write_file, [folder / file for file in files], files.values()))
    except BaseException:
        remove_files(folder, files)
        raise


def remove_files(folder, files):
    for file in files:
        (folder / file).unlink(missing_ok=True)
        _unfinished(folder / file).unlink(missing_ok=True)


def _write_file(path, state):
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    unfinished = _unfinished(path)
    try:
        save_tensors(state, unfinished)
    except SafetensorError as error:  # only its text has the number of the OSError
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), str(error), str(path)) from None
    sync_to_disk(unfinished)
    found = load_file(unfinished)
    for name, tensor in state.items():
        # As bytes, because a NaN does not equal itself.
        if not torch.equal(_bytes_of(tensor), _bytes_of(found[name])):
            raise OSError(errno.EIO, f"{name} was read back with other bytes than were written", str(path))
    unfinished.rename(path)


def save_tensors(state, path, metadata=None):
    """Writes a file of safetensors with the rights of every new file. save_file alone lets only its owner read it."""
    path.touch()
    mode = path.stat().st_mode
    save_file(state, path, metadata)
    path.chmod(mode)


def _unfinished(path):
    return path.with_name(f"{path.name}.unfinished")


def _bytes_of(tensor):
    return tensor.reshape(-1).view(torch.uint8)
