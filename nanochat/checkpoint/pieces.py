"""The files that hold a checkpoint's tensors, and which rank writes which.

Weights and optimizer's state are a file each: model.safetensors and optimizer.safetensors. If they are larger than a
few GB, they are divided into pieces, with whole tensors in each, and an index says what is where. Hugging Face's
libraries read the same format:
    model-00001-of-00007.safetensors … model-00007-of-00007.safetensors
    model.safetensors.index.json        {"metadata": {"total_size": bytes}, "weight_map": {tensor: file}}

All ranks of the first host write. So each keeps only its part of the state in host memory, and a large checkpoint is
written by as many processes as the host has chips.
"""
import errno
import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from nanochat.checkpoint.checkpoint_files import MODEL, OPTIMIZER, index_of, sync_to_disk, tensor_files

PIECE_BYTES = 4 * 10**9  # a file is larger only if one tensor is
WRITING_THREADS = 2  # files that a rank writes at the same time


@dataclass(frozen=True)
class Layout:
    """Which tensors are in which file of a checkpoint."""
    files: dict  # {file: {tensor: bytes}}, those of the model first

    @classmethod
    def of(cls, model_sizes, optimizer_sizes, piece_bytes=PIECE_BYTES):
        """Returns the Layout of {tensor: bytes} of weights and optimizer's state."""
        files = {}
        for kind, sizes in ((MODEL, model_sizes), (OPTIMIZER, optimizer_sizes)):
            pieces = [{}]
            for name, size in sizes.items():
                if pieces[-1] and sum(pieces[-1].values()) + size > piece_bytes:
                    pieces.append({})
                pieces[-1][name] = size
            files |= dict(zip(_names(kind, len(pieces)), pieces, strict=True))
        return cls(files)

    @property
    def num_bytes(self):
        return sum(sum(sizes.values()) for sizes in self.files.values())

    def tensors_of(self, writer, writers):
        """Returns the names of the tensors that one of several writers writes: each file, the largest first, goes to
        the writer that has least to write."""
        shares = [(0, number, set()) for number in range(writers)]
        for sizes in sorted(self.files.values(), key=lambda sizes: -sum(sizes.values())):
            num_bytes, number, names = min(shares, key=lambda share: share[:2])
            shares[number] = num_bytes + sum(sizes.values()), number, names | sizes.keys()
        return shares[writer][2]

    def files_with(self, *states):
        """Returns {file: {name: tensor}} of the files all of whose tensors are in the states, {name: tensor}."""
        found = {name: tensor for state in states for name, tensor in state.items()}
        return {file: {name: found[name] for name in names} for file, names in self.files.items()
                if names.keys() <= found.keys()}

    def indexes(self):
        """Returns {file: its text} of the indexes. There are none where one file holds all."""
        texts = {}
        for kind in (MODEL, OPTIMIZER):
            files = {file: sizes for file, sizes in self.files.items() if file.startswith(f"{Path(kind).stem}-")}
            if files:
                texts[index_of(kind)] = json.dumps({
                    "metadata": {"total_size": sum(sum(sizes.values()) for sizes in files.values())},
                    "weight_map": {name: file for file, sizes in files.items() for name in sizes}}, indent=1)
        return texts


def _names(kind, count):
    if count == 1:
        return [kind]
    return [f"{Path(kind).stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def sizes_of(state):
    """Returns {name: bytes} of {name: tensor}."""
    return {name: tensor.numel() * tensor.element_size() for name, tensor in state.items()}


def write_files(folder, files):
    """Writes {file: {name: tensor}} to the folder and reads them back. A file gets its name when it is whole. If
    anything goes wrong, none of them is left. Raises OSError."""
    try:
        with ThreadPoolExecutor(WRITING_THREADS) as pool:
            list(pool.map(lambda item: _write_file(folder / item[0], item[1]), files.items()))
    except BaseException:
        remove_files(folder, files)
        raise


def remove_files(folder, files):
    """Deletes those of the files that are there, also unfinished ones."""
    for file in files:
        (folder / file).unlink(missing_ok=True)
        _unfinished(folder / file).unlink(missing_ok=True)


def _write_file(path, state):
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    unfinished = _unfinished(path)
    try:
        save_file(state, unfinished)
    except SafetensorError as error:  # only its text has the number of the OSError behind it
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number[1]), str(error), str(path)) from None if number else error
    sync_to_disk(unfinished)
    found = load_file(unfinished)
    for name, tensor in state.items():
        if not torch.equal(_bytes_of(tensor), _bytes_of(found[name])):
            raise OSError(errno.EIO, f"{name} was read back with other bytes than were written", str(path))
    unfinished.rename(path)


def _unfinished(path):
    return path.with_name(f"{path.name}.unfinished")


def _bytes_of(tensor):
    return tensor.reshape(-1).view(torch.uint8)


def load_tensors(path, kind):
    """Returns {name: tensor} of `kind`, MODEL or OPTIMIZER, of the checkpoint at `path`: memory-mapped, so that the
    processes of a host share the pages, and only what is used is read."""
    files = [name for name in tensor_files(path, kind) if name.endswith(".safetensors")]
    return {name: tensor for file in files for name, tensor in load_file(Path(path) / file).items()}
