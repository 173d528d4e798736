"""What is logged of the steps since the last line, whatever their results are called."""
import json
import math
import re
from types import SimpleNamespace

import pytest
import torch

from nanochat.device.ranks import Dist
from nanochat.model.optim import Measured
from nanochat.model.rates import OptimConfig, Rules
from nanochat.record.goodput import Goodput
from nanochat.record.metrics import METRICS_FILE
from nanochat.record.observe import Observer
from nanochat.train import step_log
from nanochat.train.flags import Flags, RunFlags
from nanochat.train.step_log import NonfiniteSteps, StepLog, mean_of_finite, summarise

BATCHES = SimpleNamespace(metrics=lambda: {"tokens": 64})


def plan():
    return SimpleNamespace(num_iterations=10, unit="tokens", device_type="cpu", world_size=1,
                           units=lambda begin, end: 8 * (end - begin), flops=lambda begin, end: 80 * (end - begin))


def make_log(directory, rank=0, run="dummy"):
    dist = Dist("cpu", torch.device("cpu"), rank=rank)
    run = SimpleNamespace(plan=plan(), directory=directory, flags=Flags(RunFlags(run=run)),
                          task=SimpleNamespace(console={}))
    optimizer = SimpleNamespace(rules=Rules({}, 0.0, 0.0, OptimConfig(warmup_steps=0), 10))
    training = SimpleNamespace(optimizer=optimizer, observer=Observer(dist), sums={"loss": None, "exact": None})
    return StepLog(run, dist, training, NonfiniteSteps(), first_step=0)


def add(log, *values):
    log.begin_step()
    log.add(Measured(("loss", "exact", "grad_norm", "size of the head"), torch.tensor(values)))


def records(directory):
    return [json.loads(line) for line in (directory / METRICS_FILE).read_text().splitlines()]


def test_sums_are_means_and_what_else_was_measured_is_that_of_the_last_step():
    results = [{"loss": 4.0, "exact": 0.5, "grad_norm": 1.0}, {"loss": 2.0, "exact": 1.0, "grad_norm": 3.0}]
    assert summarise(results, averaged=("loss", "exact")) == {
        "loss": 2.0, "mean_loss": 3.0, "exact": 0.75, "grad_norm": 3.0}
    assert mean_of_finite([1.0, math.nan, 3.0]) == 2.0 and math.isnan(mean_of_finite([math.inf]))


def test_every_result_is_in_the_file_by_its_name_and_the_console_shows_only_what_it_knows(tmp_path, capsys):
    log = make_log(tmp_path)
    assert log.write(0, Goodput(), BATCHES, 0) is None
    add(log, 4.0, 0.5, 1.0, 7.0)
    add(log, 2.0, 1.0, 3.0, 8.0)
    assert log.write(2, Goodput(), BATCHES, interruptions=1) > 0
    first, last = records(tmp_path)
    assert first["step"] == 1 and first["loss"] == 4.0 and "mean_loss" not in first
    expected = {"step": 2, "loss": 2.0, "mean_loss": 3.0, "exact": 0.75, "grad_norm": 3.0, "size of the head": 8.0,
                "tokens": 64, "bad_steps": 0, "interruptions": 1, "lr_multiplier": 1.0}
    assert {name: last[name] for name in expected} == expected
    assert last["tokens_per_s"] == pytest.approx(16 / (2 * last["step_ms"] / 1000))
    assert last["time_left_s"] == pytest.approx(8 * last["step_ms"] / 1000)
    line = capsys.readouterr().out
    assert "loss 3.0000" in line and "8.0" not in line and "head" not in line


def test_in_a_long_silence_the_file_gets_the_losses_of_all_steps_but_the_newest_once(tmp_path, monkeypatch):
    log = make_log(tmp_path)
    for loss in (4.0, 3.0, 2.0):
        add(log, loss, 0.5, 1.0, 7.0)
    assert not records(tmp_path)
    monkeypatch.setattr(step_log, "SILENCE_S", -1)
    add(log, 1.0, 1.0, 1.0, 7.0)
    assert [(record["step"], record["loss"]) for record in records(tmp_path)] == [(1, 4.0), (2, 3.0), (3, 2.0)]
    log.write(4, Goodput(), BATCHES, 0)
    for loss in (0.5, 0.25):
        add(log, loss, 1.0, 1.0, 7.0)
    assert [(record["step"], record["loss"]) for record in records(tmp_path)[3:]] == [(4, 1.0), (5, 0.5)]
    log.write(6, Goodput(), BATCHES, 0)
    assert [record["step"] for record in records(tmp_path)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("run, mode", [("dummy", "offline"), ("mine", "disabled")])
def test_a_run_called_dummy_or_with_a_wandb_that_is_turned_off_has_none_and_keeps_its_id(
        tmp_path, monkeypatch, run, mode):
    monkeypatch.setenv("WANDB_MODE", mode)
    log = make_log(tmp_path, run=run)
    readers = [reader._name for reader in log._logger._readers]
    assert readers == ([] if run == "dummy" else ["TensorBoard"]) and re.fullmatch("[0-9a-f]{8}", log.wandb_id)


def test_steps_that_are_not_finite_are_counted_and_told_on_every_rank(tmp_path, capsys):
    logs = [make_log(tmp_path), make_log(tmp_path / "nowhere", rank=1)]
    for log in logs:
        add(log, math.nan, 0.0, 1.0, 0.0)
        add(log, 2.0, 0.0, math.inf, 0.0)
        log.write(2, Goodput(), BATCHES, 0)
        assert log._nonfinite == NonfiniteSteps(total=2, in_a_row=2)
    assert records(tmp_path)[-1]["mean_loss"] == 2.0 and records(tmp_path)[-1]["bad_steps"] == 2
    assert records(tmp_path)[0]["loss"] is None and not (tmp_path / "nowhere").exists()
    assert "warning: step 1 is skipped" in capsys.readouterr().out
    logs[1].write_event(2, {"val_bpb": 1.0})
    logs[1].flush()
    logs[1].close(timeout_s=1)


def test_ten_steps_in_a_row_that_are_not_finite_are_too_many():
    steps = NonfiniteSteps()
    for loss in (math.nan, 1.0, math.inf, *[math.nan] * 9):
        assert not steps.are_too_many
        assert steps.add(loss, 1.0) == (not math.isfinite(loss))
    assert steps.are_too_many and steps == NonfiniteSteps(total=11, in_a_row=10)


def test_the_first_step_which_compiles_says_nothing_about_the_time_left(tmp_path):
    log = make_log(tmp_path)
    for step in (1, 2):
        add(log, 3.0, 0.5, 1.0, 2.0)
        log.write(step, Goodput(), BATCHES, 0)
    assert ["time_left_s" in record for record in records(tmp_path)] == [False, True]
