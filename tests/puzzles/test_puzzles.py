"""Sudokus and the model that solves them, also on XLA, and as a run of puzzle_train."""
import json
import shutil
from dataclasses import asdict, replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch_xla
from filelock import FileLock

from nanochat.common import BadInput
from nanochat.device.ranks import Dist
from nanochat.puzzles import sudoku, task
from nanochat.puzzles.episodes import EpisodeLoss, empty_carry
from nanochat.puzzles.flags import parse_flags
from nanochat.puzzles.plan import make_plan
from nanochat.puzzles.puzzle_data import PuzzleFeed, read_puzzles, write_puzzles
from nanochat.puzzles.trm import TRM, TRMConfig
from scripts import prepare_puzzles, puzzle_train
from tests.conftest import add_records, last_of_each, run_python

TINY = ["--hidden=16", "--cycles=2", "--supervision_steps=4", "--ema=0.9", "--warmup_steps=2", "--total_batch_size=8",
        "--eval_puzzles=12", "--sample_every=-1", "--eval_every=4", "--save_every=3", "--log_every=2",
        "--num_iterations=6"]


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("puzzles")
    prepare_puzzles.main(["--train=40", "--val=12", f"--out_dir={path}"])
    return path


def test_a_sudoku_is_minimal_and_has_one_solution_which_the_rules_allow():
    for seed in range(3):
        puzzle, solution = sudoku.generate(2, 3, seed)
        assert sudoku.solve(puzzle, 2, 3) == [solution]
        for units in np.array(sudoku.units_of_cells(2, 3)).T:
            assert len(set(zip(units, solution, strict=True))) == 36  # no unit has a digit twice
        for cell in np.flatnonzero(puzzle):
            fewer = [0 if at == cell else digit for at, digit in enumerate(puzzle)]
            assert len(sudoku.solve(fewer, 2, 3)) == 2


@pytest.mark.parametrize("box", [(2, 2), (2, 3), (3, 2)])
def test_other_forms_of_a_sudoku_have_its_fingerprint_and_its_one_solution(box):
    made = [sudoku.generate(*box, seed) for seed in range(4)]
    puzzles, solutions = (np.array([one[at] for one in made]) for at in range(2))
    own = sudoku.fingerprints(puzzles, *box)
    assert len(set(own.tolist())) > 1
    for seed in range(5):
        other, other_solutions = sudoku.draw_symmetries([puzzles, solutions], *box, np.random.default_rng(seed))
        assert (sudoku.fingerprints(other, *box) == own).all() and (other != puzzles).any()
        for puzzle, solution in zip(other.tolist(), other_solutions.tolist(), strict=True):
            assert sudoku.solve(puzzle, *box) == [solution]


def test_puzzles_that_cannot_be_found_in_time_and_a_folder_in_use_are_refused(tmp_path):
    with pytest.raises(BadInput, match="--box.*3x4"):
        prepare_puzzles.main([f"--out_dir={tmp_path}", "--box=3x4"])
    with FileLock(tmp_path / ".lock"), pytest.raises(BadInput, match="another prepare_puzzles is writing"):
        prepare_puzzles.main([f"--out_dir={tmp_path}"])


def test_after_a_kill_new_puzzles_are_not_taken_for_the_old_ones(tmp_path):
    row = ([1] * 16, [1] * 16)
    write_puzzles(tmp_path, (2, 2), {"train": [row], "val": [row]})
    with pytest.raises(TypeError):
        write_puzzles(tmp_path, (2, 2), {"train": [row], "val": None})
    with pytest.raises(BadInput, match="--data_dir=.* puzzles.json and train.parquet: make them"):
        read_puzzles(tmp_path, "train")


def test_a_run_does_not_resume_with_other_puzzles_and_the_message_says_so(data_dir, monkeypatch):
    flags = parse_flags(last_of_each(*TINY, f"--data_dir={data_dir}"))
    made = task.make_task(flags, "cpu", 1, None)
    config = {**asdict(made.plan.config), "vocab_size": 7, "cells": 36}
    meta = SimpleNamespace(config=config, data_fingerprint="other", tokenizer_sha256="")
    monkeypatch.setattr(task, "saved_meta", lambda path, name: meta)
    with pytest.raises(BadInput, match="the hash of --data_dir is"):
        task.make_task(flags, "cpu", 1, None, "step_000001")
    meta.data_fingerprint = made.data_fingerprint
    with pytest.raises(BadInput, match="the model.s vocab_size is 7 there"):
        task.make_task(flags, "cpu", 1, None, "step_000001")
    meta.config, meta.flags = asdict(made.plan.config) | {"mixer": "attention"}, flags.as_dict()
    with pytest.raises(BadInput, match="--mixer is attention there"):  # an older version's
        task.make_task(flags, "cpu", 1, None, "step_000001")


def test_no_held_out_puzzle_is_a_form_of_one_to_train_on(data_dir):
    train, val = (set(sudoku.fingerprints(read_puzzles(data_dir, split).puzzles, 2, 2).tolist())
                  for split in ("train", "val"))
    assert train and val and not train & val


def test_an_evaluation_does_not_need_the_folder_any_more(data_dir, tmp_path):
    folder = shutil.copytree(data_dir, tmp_path / "puzzles")
    made = task.make_task(parse_flags(last_of_each(*TINY, f"--data_dir={folder}")), "cpu", 1, None)
    dist = Dist("cpu", torch.device("cpu"))
    training = made.make_step(TRM(made.plan.config).init_weights(0), dist)
    shutil.rmtree(folder)
    assert made.evaluate(training, dist, 0, lambda: False)["val_puzzles"] == 12
    assert made.sample(training, dist, 0, lambda: False) == {}


def test_every_number_of_ranks_sees_the_same_puzzles_from_any_step_on(data_dir):
    puzzles, options = read_puzzles(data_dir, "train"), dict(seed=3, total_batch_size=8, explore=0.5, max_steps=4)
    alone = PuzzleFeed(puzzles, Dist("cpu", None), 0, **options)
    next(alone)
    expected = next(alone)
    parts = [next(PuzzleFeed(puzzles, Dist("cpu", None, rank, 4), 1, **options)) for rank in range(4)]
    for name, values in expected.items():
        together = torch.stack([part[name] for part in parts], 1).flatten(0, 1)
        assert torch.equal(together, values)


class Scripted(torch.nn.Module):
    """A model whose wish to halt follows from the puzzle and its own number of calls, which y counts."""
    compute_dtype = torch.float32

    def starts(self, rows):
        return torch.zeros(rows, 24, 16), torch.zeros(rows, 24, 16)

    def forward(self, puzzle, y, z):
        calls = y[:, 0, 0] + 1
        wishes = (puzzle.sum(-1) + calls) % 3 == 0
        return y + 1, z, torch.zeros(len(puzzle), 16, 5), wishes.float() - 0.5


def test_episodes_are_those_of_a_slow_loop_over_single_slots(data_dir):
    flags = parse_flags(last_of_each(*TINY, "--supervision_steps=5", "--explore=0.5"))
    puzzles = read_puzzles(data_dir, "train")
    loss = EpisodeLoss(max_steps=5)
    carry = empty_carry(make_plan(flags, puzzles, "cpu", 1).config, 8, torch.float32, "cpu")
    feed = PuzzleFeed(puzzles, Dist("cpu", None), 0, seed=0, total_batch_size=8, explore=0.5, max_steps=5)
    slots = [None] * 8
    for _ in range(30):
        batch = next(feed)
        _, carry = loss(Scripted(), carry, **batch)
        for at, slot in enumerate(slots):
            if slot is None:
                slot = {"puzzle": batch["puzzle"][at], "minimum": int(batch["min_steps"][at]), "steps": 0}
            slot["steps"] += 1
            wishes = (int(slot["puzzle"].sum()) + slot["steps"]) % 3 == 0
            ends = slot["steps"] >= 5 or wishes and slot["steps"] >= slot["minimum"]
            assert torch.equal(carry["puzzle"][at], slot["puzzle"])
            assert (int(carry["steps"][at]), bool(carry["is_free"][at])) == (slot["steps"], ends)
            slots[at] = None if ends else slot


def test_more_cycles_are_the_same_function_of_the_weights_as_by_hand():
    config = TRMConfig(vocab_size=5, cells=16, hidden=16, recursions=2, cycles=3)
    model = TRM(config).init_weights(0)
    torch.nn.init.normal_(model.mix_out, std=0.1)
    puzzle = torch.arange(32).reshape(2, 16) % 5
    y, z = model.starts(2)
    once = TRM(replace(config, cycles=1))
    once.load_state_dict(model.state_dict())
    for _ in range(3):
        y, z, *_ = once(puzzle, y, z)
    torch.testing.assert_close(model(puzzle, *model.starts(2))[0], y)


def supervision_step(device, recursions=3, cycles=3, run=lambda model: model):
    """Returns a TRM's state, logits and gradients after one supervision step as {name: tensor}. run(model): what is
    called in its place."""
    config = TRMConfig(vocab_size=5, cells=16, hidden=16, recursions=recursions, cycles=cycles)
    model, generator = TRM(config).init_weights(0), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():  # small, so that the recursion does not double an error each time
            p += 0.02 * torch.randn(p.shape, generator=generator)
    puzzle = torch.randint(3, (3, 16), generator=generator).to(device)
    model.to(device)
    y, z, logits, halt = run(model)(puzzle, *(state.clone() for state in model.starts(3)))
    (logits.sin().sum() + y.sin().sum() + halt.sum()).backward()
    return {"y": y.detach(), "z": z, "logits": logits.detach(), "halt": halt.detach()} \
        | {name: p.grad for name, p in model.named_parameters()}


def test_a_supervision_step_on_xla_is_that_of_the_cpu_forward_and_backward():
    expected, found = supervision_step("cpu"), supervision_step(torch_xla.device())
    torch_xla.sync()
    assert all(expected[name].abs().max() > 0 for name in expected)
    for name, other in expected.items():
        torch.testing.assert_close(found[name].cpu(), other, rtol=0, atol=1e-5 * float(other.abs().max()), msg=name)


def test_torch_compile_captures_a_supervision_step_as_one_graph():
    """As on CUDA, where puzzle_train compiles the model. The backend runs the graph as it is."""
    of_model = dict(recursions=1, cycles=2)
    expected = supervision_step("cpu", **of_model)
    found = supervision_step("cpu", **of_model, run=partial(torch.compile, backend="eager", fullgraph=True))
    for name, other in expected.items():
        torch.testing.assert_close(found[name], other, rtol=0, atol=1e-5 * float(other.abs().max()), msg=name)


# Runs


@pytest.fixture
def solve(base_dir, data_dir, warm_ranks):
    """Runs puzzle_train on tiny puzzles and returns the CompletedProcess, with what add_records adds."""

    def run(*flags, run="puzzles", devices=1, status=0):
        argv = last_of_each(f"--run={run}", "--device_type=xla", f"--data_dir={data_dir}", *TINY, *flags)
        process = warm_ranks(devices).call(puzzle_train.main, argv)
        assert process.returncode == status, process.stdout[-2000:] + process.stderr[-4000:]
        return add_records(process, base_dir / "checkpoints" / run)

    return run


@pytest.mark.slow
def test_a_run_resumes_in_the_middle_of_its_episodes_bit_for_bit(solve, base_dir, tmp_path):
    whole = solve("--save_every=2", devices=2)
    folder = base_dir / "checkpoints" / "puzzles"
    last = (folder / "step_000006" / "optimizer.safetensors").read_bytes()
    assert not [record for record in whole.records if "recompiled" in record]
    for step in (4, 6):
        (folder / f"step_{step:06d}").rename(tmp_path / f"step_{step:06d}")
    (folder / ".finished").unlink()
    resumed = solve("--save_every=2", devices=2)
    assert {step: resumed.losses[step] for step in (3, 4, 5, 6)} == {step: whole.losses[step] for step in (3, 4, 5, 6)}
    assert (folder / "step_000006" / "optimizer.safetensors").read_bytes() == last  # carry and averages, too
    with pytest.raises(BadInput, match="is of the task puzzles"):
        from scripts import generate
        generate.main(["--checkpoint=puzzles", "--prompt=x", "--device_type=cpu"])


@pytest.mark.slow
def test_two_and_four_devices_agree_with_eager_pytorch(solve):
    """One device is tried in eager PyTorch alone: the next test has one XLA device."""
    flags = ["--num_iterations=20", "--save_every=-1", "--eval_every=-1", "--log_every=10"]
    eager = solve(*flags, "--device_type=cpu", run="eager").losses
    assert len(eager) == 20
    for devices in (2, 4):
        found = solve(*flags, run=f"on{devices}", devices=devices).losses
        # AdamW divides by the gradients' size, which magnifies differences of rounding from step to step.
        assert list(found.values())[:10] == pytest.approx(list(eager.values())[:10], rel=1e-4)
        assert list(found.values()) == pytest.approx(list(eager.values()), rel=1e-3)


COUNT = """
import json, sys
from nanochat.device.ranks import compute_init, prepare_xla_environment
from nanochat.run.processes import exclusive_use
from nanochat.train.prepare import prepare, run_directory
from nanochat.puzzles.flags import parse_flags
from nanochat.puzzles.task import make_task
from tests.train.count_xla import count
flags = parse_flags(sys.argv[1:])
prepare_xla_environment("xla")
with exclusive_use(run_directory(flags)):
    print(json.dumps(count(prepare(flags, "xla", make_task), compute_init("xla"))))
"""


@pytest.mark.slow
def test_all_steps_are_two_programs_without_a_fallback_to_the_host_or_a_fetch_between_lines(base_dir, data_dir):
    process = run_python("-c", COUNT, *last_of_each(
        f"--data_dir={data_dir}", *TINY, "--num_iterations=12"))
    assert process.returncode == 0, process.stderr[-3000:]
    found = json.loads(process.stdout.splitlines()[-1])
    assert found["programs_of_a_step"] == 2 and found["compilations"][1] == found["compilations"][-1]
    assert not found["recompiled"] and not found["fallbacks"] and found["transfers_between_logs"] == 0
