"""Small states of models and optimizers, and checkpoints of them, for the tests, and what may befall them."""
import multiprocessing
import os
import subprocess
import sys
import threading
import time

import pytest
import torch

from nanochat.checkpoint import on_disk
from nanochat.checkpoint.meta import Meta, rng_state
from nanochat.checkpoint.saver import SaveOptions, save_checkpoint, save_lane_states

RNG = rng_state()


def make_meta(step=1, **fields):
    return Meta(**{"step": step, "config": {"n_layer": 2, "n_embd": 128}, "tokenizer_sha256": "aa" * 32,
                   "data_fingerprint": "bb" * 32, "flags": {"depth": 2}, "rng": RNG, **fields})


def make_state(seed=0):
    generator = torch.Generator().manual_seed(seed)
    model = {"attn_q": torch.randn(2, 8, 8, generator=generator), "wte": torch.randn(16, 8, generator=generator)}
    optimizer = {f"{name}.momentum": torch.randn(t.shape, generator=generator).bfloat16() for name, t in model.items()}
    return model, optimizer


def make_source(**fields):
    """Returns a Meta's source."""
    return {"model": "some/model", "commit": "", "licence": "mit", "model_type": "qwen2", "dtype": "float32"} | fields


def save(run_dir, step, keep=100, keep_every=-1, uploader=None):
    """Saves a checkpoint of two lanes, whose weights depend on `step`; returns its path."""
    save_lane_states(run_dir, step, {0: {"row": step}, 1: {"row": step, "buffer": [1, 2, 3]}})
    return save_checkpoint(run_dir, *make_state(step), make_meta(step), num_lanes=2,
                           options=SaveOptions(on_disk.Kept(keep, keep_every)), uploader=uploader,
                           source=b"the small files")


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


def kill_at_any_moment(save_for_ever, run_dir, pause_s):
    """Kills a process that runs save_for_ever(run_dir) a bit later each time, and checks that it leaves whole
    checkpoints and nothing else that a start does not delete."""
    context = multiprocessing.get_context("forkserver")  # this process may have an XLA runtime and its threads
    context.set_forkserver_preload([save_for_ever.__module__])
    for moment in range(6):
        process = context.Process(target=save_for_ever, args=(run_dir,))
        process.start()
        give_up = time.monotonic() + 60
        while on_disk.latest(run_dir) is None and time.monotonic() < give_up:
            time.sleep(0.001)
        time.sleep(pause_s * moment)
        process.kill()
        process.join()
        paths = on_disk.list_checkpoints(run_dir)
        assert paths and all(on_disk.find_problem(path) is None for path in paths)
        on_disk.clean_partial(run_dir)
        assert not any(name.endswith(".tmp") for name in names(run_dir))
        on_disk.set_aside_after(run_dir, -1)


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


def run_on_small_disk(tmp_path, script, megabytes):
    """Runs a Python script, which must succeed, with the path of a file system of so many MB, which anybody may mount
    in a user namespace. Returns what it printed."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = f"mount -t tmpfs -o size={megabytes}m tmpfs {disk} && exec {sys.executable} -c '{script}' {disk}"
    process = subprocess.run(["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", command],
                             capture_output=True, text=True, timeout=120)
    if "unshare" in process.stderr or "mount:" in process.stderr:
        pytest.skip(f"no user namespaces here: {process.stderr.strip()}")
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout
