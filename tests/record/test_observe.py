"""What a run measures of its own programs, which XLA compiles for one CPU device."""
import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch_xla

from nanochat.data.loader import Loader
from nanochat.device.programs import compilations, compile_seconds
from nanochat.device.ranks import Dist, compute_cleanup, compute_init
from nanochat.record.observe import Observer
from nanochat.train.flags import parse_flags
from nanochat.train.language import make_task
from nanochat.train.prepare import prepare, run_directory
from nanochat.train.step import TrainingStep
from nanochat.train.trainer import Trainer
from tests.conftest import last_of_each
from tests.run.pods import free_port


@pytest.fixture
def dist():
    dist = compute_init("xla")
    yield dist
    compute_cleanup(dist)


@pytest.fixture
def make_trainer(dist, byte_tokenizer_dir):
    """Makes a Trainer of a tiny model in this process; `width` sets its programs apart from those of other tests."""

    def make(*flags, width):
        flags = parse_flags(last_of_each(
            "--device_type=xla", "--depth=1", f"--model_dim={width}", "--num_heads=2", "--max_seq_len=32",
            "--synthetic_data", "--device_batch_size=2", "--total_batch_size=128", "--num_iterations=8",
            "--eval_every=-1", "--sample_every=-1", "--save_every=-1", "--log_every=2",
            f"--tokenizer_dir={byte_tokenizer_dir}", *flags))
        run_directory(flags).mkdir(parents=True)
        return Trainer(prepare(flags, "xla", make_task), dist)

    return make


def records(trainer):
    return [json.loads(line) for line in (trainer.run.directory / "metrics.jsonl").read_text().splitlines()]


def test_rows_that_grow_have_a_program_for_each_length_compiled_before_the_first_step(make_trainer, dist, monkeypatch):
    counted, rehearse = [], TrainingStep.rehearse

    def counting(*args):
        counted.append(compilations())
        rehearse(*args)
        counted.append(compilations())

    monkeypatch.setattr(TrainingStep, "rehearse", counting)
    trainer = make_trainer("--seq_len_ramp=0:8,3:16,5:32", "--log_every=1", width=144)
    assert counted[1] - counted[0] == 4  # three micro-steps, and one that sets the gradients to zero
    assert trainer.train() == 0
    assert compilations() - counted[1] == 1  # the update
    assert {name for name in dist.program_runs if name.startswith("micro_step")} == {
        "micro_step 8", "micro_step 16", "micro_step 32"}
    logged = [record for record in records(trainer) if "tokens" in record]
    assert [record["tokens"] for record in logged] == [128 * step for step in range(1, 9)]
    assert [record["seq_len"] for record in logged] == [8] * 3 + [16] * 2 + [32] * 3
    assert not any("recompiled" in record for record in logged)


def test_the_log_says_where_the_hosts_time_goes_and_what_was_compiled_and_why(make_trainer, monkeypatch, capsys):
    compiled_before = compile_seconds()
    trainer = make_trainer(width=80)
    is_wide, read = iter([True] * 13 + [False] * 9), Loader.__next__  # two a step: narrower in the middle of step 7

    def narrowing(loader):
        batch = read(loader)
        return batch if next(is_wide) else replace(batch, rows=batch.rows[:, :17])

    monkeypatch.setattr(Loader, "__next__", narrowing)
    assert trainer.train() == 0
    logged = [record for record in records(trainer) if "step_ms" in record]
    assert [record["step"] for record in logged] == [1, 2, 4, 6, 8]
    for record in logged:
        assert record["data_wait"] >= 0 and 0 <= record["host_dispatch"] <= 1
        assert record["data_wait"] + record["host_dispatch"] <= 1
        assert "device_memory_bytes" not in record  # XLA's CPU cannot tell
    assert {"loss", "mean_loss", "grad_norm", "lr_multiplier", "tokens", "tokens_per_s", "goodput", "bad_steps",
            "interruptions", "seconds_train", "compile_s"} <= logged[-1].keys()  # which report reads
    *constant, last = logged
    assert constant[-1]["host_dispatch"] > 0
    assert len({record["compilations"] for record in constant}) == 1
    assert len({record["compile_s"] for record in constant}) == 1
    assert trainer.goodput.seconds()["compile"] == pytest.approx(last["compile_s"] - compiled_before)
    output = capsys.readouterr().out
    assert output.count(f"compiled {logged[0]['compilations']} programs in {logged[0]['compile_s']:.1f} s") == 1
    assert [record["step"] for record in logged if "recompiled" in record] == [8]
    assert last["recompiled"] == ["micro_step"] and output.count("compiled again: micro_step") == 1


ASK = "import sys, torch_xla.debug.profiler as xp; xp.trace('localhost:' + sys.argv[1], sys.argv[2], 500)"


@pytest.mark.slow
def test_a_running_process_gives_a_trace_to_whoever_asks_at_its_port(tmp_path, monkeypatch):
    port = str(free_port())
    monkeypatch.setenv("PROFILE_PORT", port)
    dist = compute_init("xla")
    asker = subprocess.Popen([sys.executable, "-c", ASK, port, str(tmp_path)])
    while asker.poll() is None:
        torch.ones(8, 8).to(dist.device).sum()
        torch_xla.sync()
    compute_cleanup(dist)
    [trace] = tmp_path.glob("plugins/profile/*/*.xplane.pb")
    assert trace.stat().st_size > 0


def test_the_hosts_memory_is_recorded_and_a_warning_comes_once_before_it_is_full(monkeypatch, capsys):
    observer = Observer(Dist("cpu", torch.device("cpu")))
    record = observer.record(1.0)
    assert 0 < record["host_memory_bytes"] < record["host_memory_limit_bytes"]
    assert "warning" not in capsys.readouterr().out
    monkeypatch.setattr("nanochat.record.observe.host_memory",
                        lambda: {"host_memory_bytes": 94 << 30, "host_memory_limit_bytes": 100 << 30})
    for _ in range(2):
        observer.record(1.0)
    assert capsys.readouterr().out.count("warning: 94.0 of this machine's 100.0 GiB") == 1
