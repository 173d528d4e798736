"""Small states of models and optimizers, and checkpoints of them, for the tests, and what may befall them."""
import os
import subprocess
import sys
import threading

import pytest
import torch

from nanochat.checkpoint.meta import Meta, rng_state
from nanochat.checkpoint.saver import SaveOptions, save_checkpoint, save_lane_states

RNG = rng_state()


def make_meta(step=1, **fields):
    return Meta(**{"step": step, "config": {"n_layer": 2, "n_embd": 128}, "tokenizer_sha256": "aa" * 32,
                   "data_fingerprint": "bb" * 32, "flags": {"depth": 2}, "rng": RNG, **fields})


def make_state(seed=0):
    generator = torch.Generator().manual_seed(seed)
    transposed = torch.randn(8, 16, generator=generator).t()
    model = {"attn_q": torch.randn(2, 8, 8, generator=generator), "wte": torch.nn.Parameter(transposed)}
    optimizer = {f"{name}.momentum": torch.randn(t.shape, generator=generator).bfloat16() for name, t in model.items()}
    return model, optimizer


def make_source(**fields):
    """Returns a Meta's source."""
    return {"model": "some/model", "commit": "", "licence": "mit", "model_type": "qwen2", "dtype": "float32"} | fields


def save(run_dir, step, keep=100, uploader=None, **fields):
    """Saves a checkpoint of two lanes, whose weights depend on `step`; returns its path. fields: of its Meta."""
    save_lane_states(run_dir, step, {0: {"row": step}, 1: {"row": step, "buffer": [1, 2, 3]}})
    return save_checkpoint(run_dir, *make_state(step), make_meta(step, **fields), num_lanes=2,
                           options=SaveOptions(keep), uploader=uploader,
                           source=b"the small files")


def assert_holds(loaded, state):
    """Compares the tensors of a Checkpoint with the states of the model and the optimizer that were saved."""
    for saved, found in zip(state, (loaded.model_state, loaded.optimizer_state), strict=True):
        assert saved.keys() == found.keys()
        for name in saved:
            assert saved[name].dtype == found[name].dtype and torch.equal(saved[name], found[name]), name


def names(run_dir):
    return sorted(path.name for path in run_dir.iterdir())


def flip_a_byte(path, offset=-1):
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


DAMAGES = ["truncated", "flipped", "missing", "emptied"]


def damage(file, how):
    """Damages a file in one of the DAMAGES."""
    if how == "truncated":
        os.truncate(file, file.stat().st_size - 10)
    elif how == "flipped":
        flip_a_byte(file, offset=5)
    elif how == "emptied":
        os.truncate(file, 0)
    else:
        file.unlink()


def listen(module):
    """Returns wait(words), which returns once the module has said a line with these words."""
    said, say, is_new = [], module.say, threading.Condition()

    def note(text):
        say(text)
        with is_new:
            said.append(text)
            is_new.notify_all()

    def wait(words):
        with is_new:
            assert is_new.wait_for(lambda: any(words in line for line in said), 60), f"nobody said: {words}"

    module.say = note
    return wait


ON_SMALL_DISK = """
import os, sys, time
from pathlib import Path
import torch
from nanochat.checkpoint import on_disk
from nanochat.checkpoint import saver as saver_module
from nanochat.checkpoint.pieces import Layout, sizes_of
from nanochat.checkpoint.saver import SaveOptions, Saver, save_lane_states
from tests.checkpoint.states import listen, make_meta
run_dir, wait = Path(sys.argv[1]), listen(saver_module)
ballast = run_dir / "ballast"
def fill():
    with open(ballast, "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass
def names():
    return [path.name for path in on_disk.list_checkpoints(run_dir)]
"""


def run_on_small_disk(tmp_path, script, megabytes):
    """Runs a Python script, which begins with ON_SMALL_DISK and must succeed, with a file system of so many MB, which
    anybody may mount in a user namespace. Returns what it printed."""
    disk = tmp_path / "disk"
    disk.mkdir()
    script = ON_SMALL_DISK + script
    command = f"mount -t tmpfs -o size={megabytes}m tmpfs {disk} && exec {sys.executable} -c '{script}' {disk}"
    process = subprocess.run(["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", command],
                             capture_output=True, text=True, timeout=120)
    if "unshare" in process.stderr or "mount:" in process.stderr:
        pytest.skip(f"no user namespaces here: {process.stderr.strip()}")
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout
