import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time

import pytest
import torch

from nanochat.common import BadInput
from nanochat.run import checkpoint

META = {"config": {"n_layer": 2, "n_embd": 128}, "tokenizer_sha256": "aa" * 32, "data_fingerprint": "bb" * 32}


def make_state(seed=0):
    generator = torch.Generator().manual_seed(seed)
    model = {"attn_q": torch.randn(2, 8, 8, generator=generator), "wte": torch.randn(16, 8, generator=generator)}
    optimizer = {f"{name}.momentum": torch.randn(t.shape, generator=generator).bfloat16() for name, t in model.items()}
    return model, optimizer


def save(run_dir, step, keep=None, seed=None, **kwargs):
    checkpoint.save_lane_states(run_dir, step, {0: {"row": step}, 1: {"row": step, "buffer": [1, 2, 3]}})
    return checkpoint.save(run_dir, step, *make_state(step if seed is None else seed), META, num_lanes=2, keep=keep,
                           **kwargs)


def names(run_dir):
    return sorted(path.name for path in run_dir.iterdir())


def flip_a_byte(path, offset=-1):
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def test_what_is_loaded_is_what_was_saved_bit_for_bit(tmp_path):
    loaded = checkpoint.load(save(tmp_path, 100))
    model, optimizer = make_state(100)
    assert loaded.step == 100
    assert loaded.meta == {"step": 100, **META}
    assert loaded.lane_states == {0: {"row": 100}, 1: {"row": 100, "buffer": [1, 2, 3]}}
    for saved, found in ((model, loaded.model_state), (optimizer, loaded.optimizer_state)):
        assert saved.keys() == found.keys()
        for name in saved:
            assert saved[name].dtype == found[name].dtype and torch.equal(saved[name], found[name]), name


def test_tensors_that_are_transposed_or_need_gradients_are_saved(tmp_path):
    weight = torch.nn.Parameter(torch.arange(6.0).view(2, 3).t())
    path = checkpoint.save(tmp_path, 1, {"w": weight}, {}, META, num_lanes=0)
    assert torch.equal(checkpoint.load(path).model_state["w"], weight)


def test_a_finished_checkpoint_holds_only_files_that_sha256sum_accepts(tmp_path):
    path = save(tmp_path, 7)
    assert names(tmp_path) == ["step_000007"]
    assert names(path) == ["SHA256SUMS", "lanes.json", "meta.json", "model.safetensors", "optimizer.safetensors"]
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=path, check=True, capture_output=True)


def test_lane_states_come_from_all_ranks_be_they_threads_that_write_late(tmp_path):
    def rank(first_lane):
        time.sleep(0.05 * first_lane)
        checkpoint.save_lane_states(tmp_path, 5, {lane: {"lane": lane} for lane in range(first_lane, 8, 4)})

    ranks = [threading.Thread(target=rank, args=(first_lane,)) for first_lane in range(4)]
    for thread in ranks:
        thread.start()
    path = checkpoint.save(tmp_path, 5, *make_state(), META, num_lanes=8, timeout_s=20)
    assert checkpoint.load(path).lane_states == {lane: {"lane": lane} for lane in range(8)}


def test_a_rank_that_never_writes_its_lanes_is_named_after_the_limit(tmp_path):
    checkpoint.save_lane_states(tmp_path, 5, {0: {}, 2: {}})
    with pytest.raises(TimeoutError, match="lanes 1, 3 "):
        checkpoint.save(tmp_path, 5, *make_state(), META, num_lanes=4, timeout_s=0.1)
    assert checkpoint.latest(tmp_path) is None
    assert not list(tmp_path.glob("*/*.safetensors"))


@pytest.mark.parametrize("name", [checkpoint.MODEL, checkpoint.OPTIMIZER, checkpoint.LANES, checkpoint.META,
                                  checkpoint.SUMS])
@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing", "emptied"])
def test_any_damage_to_any_file_is_found_and_the_checkpoint_before_is_used(tmp_path, name, damage):
    good, bad = save(tmp_path, 100), save(tmp_path, 200)
    file = bad / name
    if damage == "truncated":
        os.truncate(file, file.stat().st_size - 10)
    elif damage == "flipped":
        flip_a_byte(file, offset=5)
    elif damage == "emptied":
        os.truncate(file, 0)
    else:
        file.unlink()
    messages = []
    assert checkpoint.latest_good(tmp_path, messages.append) == good
    assert len(messages) == 1 and str(bad) in messages[0] and "damaged" in messages[0]
    assert names(tmp_path) == ["step_000100", "step_000200.aside"]


def test_all_checkpoints_damaged_gives_none_and_deletes_nothing(tmp_path):
    for step in (1, 2):
        flip_a_byte(save(tmp_path, step) / "model.safetensors")
    assert checkpoint.latest_good(tmp_path, lambda message: None) is None
    assert names(tmp_path) == ["step_000001.aside", "step_000002.aside"]


def test_what_was_set_aside_goes_once_the_run_has_passed_its_step(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step)
    checkpoint.set_aside_after(tmp_path, 1)
    assert names(tmp_path) == ["step_000001", "step_000002.aside", "step_000003.aside"]
    save(tmp_path, 2)
    assert names(tmp_path) == ["step_000001", "step_000002", "step_000003.aside"]


def test_keep_leaves_the_newest_and_sorts_by_number(tmp_path):
    for step in (999_999, 1_000_000, 1_000_001):
        save(tmp_path, step, keep=2)
    assert [path.name for path in checkpoint.list_checkpoints(tmp_path)] == ["step_1000000", "step_1000001"]
    assert checkpoint.latest(tmp_path).name == "step_1000001"


def test_saving_a_step_again_keeps_a_good_checkpoint_and_replaces_a_damaged_one(tmp_path):
    path = save(tmp_path, 10)
    before = path.stat().st_ino
    assert save(tmp_path, 10) == path and path.stat().st_ino == before
    flip_a_byte(path / "model.safetensors")
    assert save(tmp_path, 10) == path and checkpoint.find_problem(path) is None
    assert [name for name in names(tmp_path) if "aside" in name] == []


def _save_for_ever(run_dir):
    step = 0
    while True:
        step += 1
        save(run_dir, step, keep=2)


def test_a_process_killed_at_any_moment_leaves_only_whole_checkpoints(tmp_path):
    context = multiprocessing.get_context("forkserver")  # this process may have an XLA runtime and its threads
    context.set_forkserver_preload(["tests.run.test_checkpoint"])
    for moment in range(6):
        process = context.Process(target=_save_for_ever, args=(tmp_path,))
        process.start()
        give_up = time.monotonic() + 60
        while checkpoint.latest(tmp_path) is None and time.monotonic() < give_up:
            time.sleep(0.001)
        time.sleep(0.007 * moment)
        process.kill()
        process.join()
        for path in checkpoint.list_checkpoints(tmp_path):
            assert checkpoint.find_problem(path) is None
        assert checkpoint.latest(tmp_path) is not None
        checkpoint.clean_partial(tmp_path)
        assert not any(name.endswith(".tmp") for name in names(tmp_path))
        checkpoint.set_aside_after(tmp_path, -1)


def test_an_error_while_saving_leaves_the_old_checkpoint_and_gives_the_space_back(tmp_path, monkeypatch):
    old = save(tmp_path, 1, keep=1)

    def disk_full(path):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_sync_to_disk", disk_full)
        with pytest.raises(OSError, match="No space left"):
            save(tmp_path, 2, keep=1)
    assert checkpoint.latest_good(tmp_path) == old
    assert not list((tmp_path / "step_000002.tmp").glob("*.safetensors"))
    save(tmp_path, 3, keep=1)
    assert [path.name for path in checkpoint.list_checkpoints(tmp_path)] == ["step_000003"]


# -----------------------------------------------------------------------------
# In the background


def begin_save(saver, run_dir, step, state=None):
    checkpoint.save_lane_states(run_dir, step, {0: {}})
    saver.save(step, *(state or make_state(step)), META)


def test_the_loop_goes_on_while_the_state_is_written_and_a_second_save_waits_for_the_first(tmp_path):
    saved, slow = [], threading.Event()
    saver = checkpoint.Saver(tmp_path, num_lanes=1, keep=2, before_rename=lambda: slow.wait(60), on_saved=saved.append)
    begin_save(saver, tmp_path, 1)
    assert checkpoint.latest(tmp_path) is None
    slow.set()
    begin_save(saver, tmp_path, 2)  # waits for the first
    assert saved == [tmp_path / "step_000001"]
    saver.finish()
    assert [path.name for path in saved] == ["step_000001", "step_000002"]
    assert all(torch.equal(tensor, make_state(1)[0][name])
               for name, tensor in checkpoint.load(saved[0]).model_state.items())


def test_an_error_in_the_background_is_raised_at_the_next_step_and_weights_that_are_not_finite_are_left(tmp_path):
    said = []

    def fail():
        raise OSError(5, "Input/output error")

    saver = checkpoint.Saver(tmp_path, num_lanes=1, keep=2, before_rename=fail, report=said.append)
    begin_save(saver, tmp_path, 1, ({"w": torch.tensor([float("nan")])}, {}))
    saver.finish()
    assert said == ["warning: step 1 is not saved: its weights are not finite"]
    begin_save(saver, tmp_path, 2)
    with pytest.raises(OSError, match="Input/output error"):
        saver.finish()
    with pytest.raises(OSError, match="Input/output error"):
        saver.check()
    assert checkpoint.latest(tmp_path) is None


@pytest.mark.parametrize("name", [checkpoint.MODEL, checkpoint.META])
def test_what_does_not_read_back_as_it_was_written_gets_no_name(tmp_path, monkeypatch, name):
    """The file is altered between writing and reading back, as by a bad disk."""
    sync = checkpoint._sync_to_disk

    def sync_and_alter(path):
        sync(path)
        if path.name == name:
            flip_a_byte(path)

    monkeypatch.setattr(checkpoint, "_sync_to_disk", sync_and_alter)
    with pytest.raises(OSError, match="read back"):
        save(tmp_path, 1)
    assert checkpoint.latest(tmp_path) is None


FULL_DISK = """
import os, sys, threading, time
from pathlib import Path
import torch
from nanochat.run import checkpoint
checkpoint.RETRY_S = 0.1
run_dir, state = Path(sys.argv[1]), ({"w": torch.ones(500_000)}, {})
saver = checkpoint.Saver(run_dir, num_lanes=1, keep=2, report=lambda line: print(line, flush=True))
def save(step):
    checkpoint.save_lane_states(run_dir, step, {0: {"text": "x" * 300_000}})
    saver.save(step, *state, {})
def fill():
    with open(run_dir / "ballast", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass
save(1)
saver.finish()
fill()
save(2)
time.sleep(1)
saver.check()
assert [path.name for path in checkpoint.list_checkpoints(run_dir)] == ["step_000001"]
save(3)  # takes the place of 2
time.sleep(0.5)
os.unlink(run_dir / "ballast")
saver.finish(30)
assert [path.name for path in checkpoint.list_checkpoints(run_dir)] == ["step_000001", "step_000003"]
assert checkpoint.latest_good(run_dir).name == "step_000003"
"""


def test_a_full_disk_stops_no_run_and_the_newest_state_is_saved_once_there_is_room(tmp_path):
    """On a file system of its own, of 6 MB, which a user namespace lets anyone mount. The states of the lanes do not
    fit either."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = f"mount -t tmpfs -o size=6m tmpfs {disk} && exec {sys.executable} -c '{FULL_DISK}' {disk}"
    process = subprocess.run(["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", command],
                             capture_output=True, text=True, timeout=120)
    if "unshare" in process.stderr or "mount:" in process.stderr:
        pytest.skip(f"no user namespaces here: {process.stderr.strip()}")
    assert process.returncode == 0, process.stdout + process.stderr
    assert "warning: the disk is full" in process.stdout and "step 2 is not saved" in process.stdout


def test_every_nth_checkpoint_is_kept_for_good(tmp_path):
    for step in range(1, 8):
        save(tmp_path, step, keep=2, keep_every=3)
    assert names(tmp_path) == ["step_000003", "step_000006", "step_000007"]


def test_too_little_disk_for_two_checkpoints_is_said_before_the_first_step(tmp_path):
    checkpoint.check_disk_space(tmp_path, checkpoint.state_bytes(*make_state()))
    with pytest.raises(BadInput, match="too little disk .* two checkpoints take 2000000.00 GB"):
        checkpoint.check_disk_space(tmp_path, 10**15)


def test_on_a_nearly_full_disk_the_oldest_make_room_and_the_newest_stays(tmp_path, monkeypatch):
    for step in (1, 2, 3):
        save(tmp_path, step)
    usage = checkpoint.shutil.disk_usage(tmp_path)

    def nearly_full(path):
        return usage._replace(free=10**6 if len(checkpoint.list_checkpoints(tmp_path)) == 1 else 0)

    monkeypatch.setattr(checkpoint.shutil, "disk_usage", nearly_full)
    save(tmp_path, 4)
    assert [path.name for path in checkpoint.list_checkpoints(tmp_path)] == ["step_000003", "step_000004"]
    with pytest.raises(OSError, match="0.000 GB are free"):
        save(tmp_path, 5, keep_every=3)  # step 3 is kept for good


def test_state_bytes_counts_every_tensor():
    assert checkpoint.state_bytes(*make_state()) == (2 * 8 * 8 + 16 * 8) * (4 + 2)


@pytest.mark.parametrize("change, message", [
    ({"config": {"n_layer": 3, "n_embd": 128}}, "another architecture: n_layer is 2 there and 3 here"),
    ({"tokenizer_sha256": "cc" * 32}, "another tokenizer"),
    ({"data_fingerprint": "cc" * 32}, "another data"),
])
def test_resuming_with_another_model_tokenizer_or_data_is_refused(tmp_path, change, message):
    meta = checkpoint.load_meta(save(tmp_path, 1))
    checkpoint.require_match(tmp_path, meta, **META)
    with pytest.raises(BadInput, match=message):
        checkpoint.require_match(tmp_path, meta, **{**META, **change})


def test_a_checkpoint_is_found_by_path_by_run_and_as_the_newest(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    with pytest.raises(BadInput, match="there is no checkpoint in"):
        checkpoint.find_checkpoint()
    runs = tmp_path / "checkpoints"
    first, second = save(runs / "old", 1), save(runs / "old", 2)
    newest = save(runs / "new", 1)
    os.utime(first, (1, 1))
    os.utime(second, (2, 2))
    assert checkpoint.find_checkpoint() == newest
    assert checkpoint.find_checkpoint("old") == second
    assert checkpoint.find_checkpoint("old/step_000001") == first
    assert checkpoint.find_checkpoint(str(first)) == first
    with pytest.raises(BadInput, match="no checkpoint at nothing"):
        checkpoint.find_checkpoint("nothing")


def test_the_random_generator_goes_on_where_it_was():
    state = json.loads(json.dumps(checkpoint.rng_state()))
    expected = torch.rand(3)
    checkpoint.restore_rng(state)
    assert torch.equal(torch.rand(3), expected)
