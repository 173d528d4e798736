"""Checkpoints whose tensors are divided into pieces that several ranks write."""
import shutil
import subprocess
import threading
import time

import pytest
import torch

from nanochat.checkpoint import on_disk
from nanochat.checkpoint import saver as saver_module
from nanochat.checkpoint.on_disk import MODEL, OPTIMIZER
from nanochat.checkpoint.pieces import Layout, load_checkpoint, sizes_of
from nanochat.checkpoint.saver import SaveOptions, Saver, save_checkpoint, save_lane_states, write_part
from tests.checkpoint.states import assert_holds, make_meta, names, run_on_small_disk

PIECE_BYTES = 1000
WRITERS = 3


def make_state(step, value=0.0):
    """Weights of 400 to 1,600 bytes and a state for each."""
    model = {f"w{i}": torch.full((100 * (i % 4 + 1),), step + i + value) for i in range(7)}
    return model, {f"{name}.momentum": -tensor for name, tensor in model.items()}


def part_of(state, layout, writer):
    mine = layout.tensors_of(writer, WRITERS)
    return tuple({name: tensor for name, tensor in tensors.items() if name in mine} for tensors in state)


def make_layout(state):
    return Layout.of(*map(sizes_of, state), PIECE_BYTES)


def save_in_pieces(run_dir, step, delay_s=0.0):
    """Saves a checkpoint by three writers, of which each has a lane; returns its path."""
    state = make_state(step)
    layout = make_layout(state)

    def write(writer):
        time.sleep(delay_s * writer)
        write_part(run_dir, step, layout, *part_of(state, layout, writer))
        time.sleep(delay_s)
        save_lane_states(run_dir, step, {writer: {"row": step + writer}})

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(1, WRITERS)]
    for thread in threads:
        thread.start()
    save_lane_states(run_dir, step, {0: {"row": step}})
    path = save_checkpoint(run_dir, *part_of(state, layout, 0), make_meta(step), WRITERS, layout)
    for thread in threads:
        thread.join()
    return path


def test_a_piece_holds_whole_tensors_and_no_more_than_it_may_but_for_one_large_tensor():
    layout = Layout.of({"a": 400, "b": 600, "c": 1, "huge": 5000, "d": 1000}, {"a.momentum": 7}, 1000)
    assert layout.files == {
        "model-00001-of-00004.safetensors": {"a": 400, "b": 600}, "model-00002-of-00004.safetensors": {"c": 1},
        "model-00003-of-00004.safetensors": {"huge": 5000}, "model-00004-of-00004.safetensors": {"d": 1000},
        "optimizer.safetensors": {"a.momentum": 7}}
    assert layout.num_bytes == 7008
    parts = [layout.tensors_of(writer, 3) for writer in range(3)]
    assert parts == [{"huge"}, {"a", "b", "a.momentum"}, {"d", "c"}]
    assert Layout.of({"a": 400}, {}).files == {MODEL: {"a": 400}, OPTIMIZER: {}} and not Layout.of({}, {}).indexes()


def test_what_three_ranks_write_loads_as_it_was_even_if_some_are_late(tmp_path):
    path = save_in_pieces(tmp_path, 7, delay_s=0.2)
    loaded = load_checkpoint(path)
    assert_holds(loaded, make_state(7))
    assert loaded.lane_states == {0: {"row": 7}, 1: {"row": 8}, 2: {"row": 9}} and names(tmp_path) == ["step_000007"]
    assert {"model.safetensors.index.json", "optimizer.safetensors.index.json", "model-00001-of-00007.safetensors",
            "optimizer-00007-of-00007.safetensors"} <= set(names(path)) and MODEL not in names(path)
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=path, check=True, capture_output=True)


def test_the_library_that_others_read_such_checkpoints_with_reads_them(tmp_path):
    huggingface_hub = pytest.importorskip("huggingface_hub", reason="needs the extra export")
    model = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.zeros_like(tensor))
                                    for name, tensor in make_state(0)[0].items()})
    result = huggingface_hub.load_torch_model(model, save_in_pieces(tmp_path, 7), strict=True)
    assert not result.missing_keys and not result.unexpected_keys
    assert all(torch.equal(model[name], tensor) for name, tensor in make_state(7)[0].items())


def test_a_rank_that_never_writes_its_part_is_said_after_the_limit(tmp_path):
    state = make_state(1)
    layout = make_layout(state)
    write_part(tmp_path, 1, layout, *part_of(state, layout, 1))
    with pytest.raises(TimeoutError, match="ranks that write model-0000.-of-00007.safetensors, .* to "):
        save_checkpoint(tmp_path, *part_of(state, layout, 0), make_meta(1), 0, layout,
                        SaveOptions(pieces_timeout_s=0.2))
    assert on_disk.latest(tmp_path) is None


def test_weights_of_another_rank_that_are_not_finite_are_not_saved_and_the_next_checkpoint_is(tmp_path, capsys):
    savers = [Saver(tmp_path) for _ in range(WRITERS)]

    def save(step, state):
        layout = make_layout(state)
        for writer, saver in enumerate(savers[1:], 1):
            saver.save_part(step, layout, *part_of(state, layout, writer))
        savers[0].save(*part_of(state, layout, 0), make_meta(step), layout)
        for saver in savers:
            saver.finish(timeout_s=60)

    state = make_state(1)
    state[0]["w6"][5] = float("inf")
    assert "w6" not in make_layout(state).tensors_of(0, WRITERS)
    save(1, state)
    said = capsys.readouterr().out
    assert said == "warning: step 1 is not saved: its weights are not finite\n" and savers[0].saved_step == 0
    save(2, make_state(2))
    assert savers[0].saved_step == 2 and names(tmp_path) == ["step_000002"]


def test_the_parts_of_a_checkpoint_that_rank_0_gives_up_end_quietly(tmp_path, monkeypatch):
    saver, state = Saver(tmp_path), make_state(1)
    layout, write = make_layout(state), saver_module.write_files

    def write_later(folder, files):
        shutil.rmtree(folder)
        write(folder, files)

    monkeypatch.setattr(saver_module, "write_files", write_later)
    saver.save_part(1, layout, *part_of(state, layout, 1))
    saver.finish(timeout_s=60)


FULL_DISK = """
small, large = {"a": torch.ones(1000)}, {"a.momentum": torch.ones(1_000_000)}
layout = Layout.of(sizes_of(small), sizes_of(large))
options = SaveOptions(retry_s=0.2)
saver = Saver(run_dir, options=options)
part = Saver(run_dir, options=options)
ballast.write_bytes(bytes(4_000_000))
part.save_part(1, layout, {}, large)
while not (on_disk.partial_dir(run_dir, 1) / saver_module.FULL).exists():
    time.sleep(0.01)
saver_module.make_room = lambda *_: None  # room was there when rank 0 looked
saver.save(small, {}, make_meta(1), layout)
wait("another rank has no room for its part")
saver.check()
part.check()
assert on_disk.latest(run_dir) is None
print("now there is space", flush=True)
ballast.unlink()
saver.finish(timeout_s=60)
part.finish(timeout_s=60)
assert on_disk.latest_good(run_dir)[0].name == "step_000001" and saver.saved_step == 1
"""


def test_a_part_that_finds_no_room_stops_no_run_and_is_saved_once_there_is_space(tmp_path):
    """A disk of 7 MB has room for the first rank's part and for probes, and not for the other's 4 MB."""
    said = run_on_small_disk(tmp_path, FULL_DISK, megabytes=7)
    complaint = said.partition("now there is space")[0]
    assert "warning: the disk is full" in complaint and "another rank has no room for its part" in complaint
