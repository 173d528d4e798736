import json
import os
import socket
import subprocess
import sys
import time

import pytest

from nanochat.model.gpt import GPT, GPTConfig
from nanochat.record import metrics
from nanochat.record.metrics import Goodput, MetricsLogger


def read(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def start(run_dir, console=lambda line: None, **kwargs):
    return MetricsLogger(run_dir, "dummy", {}, console=console, **kwargs)


def test_a_record_is_in_the_file_before_the_next_statement(tmp_path):
    logger = start(tmp_path)
    logger.log(1, {"loss": 3.5})
    assert [(record["step"], record["loss"]) for record in read(tmp_path)] == [(1, 3.5)]
    assert abs(read(tmp_path)[0]["time"] - time.time()) < 60


def test_after_resuming_no_step_and_no_half_line_appears_twice(tmp_path):
    logger = start(tmp_path)
    for step in range(1, 11):
        logger.log(step, {"loss": 1.0})
        if step % 5 == 0:
            logger.log(step, {"val_bpb": 2.0})
    logger.close()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 11, "lo')
    resumed = start(tmp_path, resume_step=5)
    resumed.log(5, {"val_bpb": 2.0})  # evaluated again
    for step in range(6, 9):
        resumed.log(step, {"loss": 1.0})
    found = [(record["step"], name) for record in read(tmp_path) for name in ("loss", "val_bpb") if name in record]
    assert found == [(1, "loss"), (2, "loss"), (3, "loss"), (4, "loss"), (5, "loss"), (5, "val_bpb"),
                     (6, "loss"), (7, "loss"), (8, "loss")]


def test_an_evaluation_lost_with_the_interruption_is_recorded_after_resuming(tmp_path):
    start(tmp_path).log(5, {"loss": 1.0})
    start(tmp_path, resume_step=5).log(5, {"val_bpb": 2.0})
    assert [record.get("val_bpb") for record in read(tmp_path)] == [None, 2.0]


def test_a_new_run_of_an_old_name_keeps_the_old_file_aside(tmp_path):
    start(tmp_path).log(5, {"loss": 1.0})
    start(tmp_path).log(1, {"loss": 2.0})
    assert [record["step"] for record in read(tmp_path)] == [1]
    assert '"step": 5' in (tmp_path / "metrics.jsonl.aside").read_text()


FULL_DISK = """
import os, sys
from nanochat.record.metrics import MetricsLogger
said = []
logger = MetricsLogger(sys.argv[1], "dummy", {}, console=said.append)
logger.log(1, {"loss": 1.0}, quiet=True)
ballast = os.open(sys.argv[1] + "/ballast", os.O_CREAT | os.O_WRONLY)
try:
    while True:
        os.write(ballast, bytes(4096))
except OSError:
    pass
for step in range(2, 500):
    logger.log(step, {"loss": float("nan")}, quiet=True)
assert len(said) == 1 and "records wait in memory" in said[0], said
os.truncate(ballast, 0)
logger.log(500, {"loss": 1.0}, quiet=True)
logger.close()
lines = open(sys.argv[1] + "/metrics.jsonl").read().splitlines()
import json
assert [json.loads(line)["step"] for line in lines] == list(range(1, 501))
assert json.loads(lines[5])["loss"] is None
"""


def test_records_wait_while_the_disk_is_full_and_none_is_lost(tmp_path):
    command = f"mount -t tmpfs -o size=64k tmpfs {tmp_path} && exec {sys.executable} -c '{FULL_DISK}' {tmp_path}"
    process = subprocess.run(["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", command],
                             capture_output=True, text=True, timeout=120)
    if "unshare" in process.stderr or "mount:" in process.stderr:
        pytest.skip(f"no user namespaces here: {process.stderr.strip()}")
    assert process.returncode == 0, process.stderr


def test_the_console_line_has_every_figure_with_its_unit(tmp_path):
    lines = []
    start(tmp_path, total_steps=5000, console=lines.append).log(100, {
        "time_left_s": 3725, "loss": 3.21, "lr_multiplier": 1.0, "step_ms": 1312.2, "tokens_per_s": 175_123.4,
        "mfu": 0.2, "tokens": 52_428_800})
    assert lines == ["step 00100/05000 | loss 3.2100 | lr 1.000 | 1,312 ms | 175,123 tok/s | mfu 20.0% | "
                     "52.4M tokens | 1h02m left"]


def test_an_unknown_peak_leaves_mfu_out_of_the_console_line():
    assert "mfu" not in metrics.format_line({"step": 1, "time": 0.0, "mfu": metrics.mfu(1e5, 1e9, None, 8)})


@pytest.mark.parametrize("count, text", [(7, "7"), (1234, "1.23K"), (999_999, "1M"), (26_843_545_600, "26.8B")])
def test_format_count(count, text):
    assert metrics.format_count(count) == text


# -----------------------------------------------------------------------------
# WandB, the real one, in a process of its own: it leaves threads and an exit handler behind


WANDB_RUN = """
import sys, time
from nanochat.record import metrics
metrics._WANDB_FINISH_TIMEOUT_S = 2
logger = metrics.MetricsLogger(sys.argv[1], sys.argv[2], {"depth": 4}, wandb_id="abcd1234")
slowest_s = 0
for step in range(1, 101):
    start = time.perf_counter()
    logger.log(step, {"loss": 1 / step})
    slowest_s = max(slowest_s, time.perf_counter() - start)
    time.sleep(0.005)
start = time.perf_counter()
logger.close()
print("slowest_log_s", slowest_s, "close_s", time.perf_counter() - start)
"""


def run_with_wandb(run_dir, run="trial", **environment):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    done = subprocess.run([sys.executable, "-c", WANDB_RUN, str(run_dir), run], text=True, timeout=60,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                          env={**clean, "HOME": str(run_dir), **environment})
    assert done.returncode == 0, done.stdout
    assert len(read(run_dir)) == 100
    words = done.stdout.split()
    figures = {name: float(words[words.index(name) + 1]) for name in ("slowest_log_s", "close_s")}
    return done.stdout, figures


def test_wandb_offline_receives_the_run_under_its_id(tmp_path):
    output, _ = run_with_wandb(tmp_path, WANDB_MODE="offline")
    assert "warning" not in output
    assert list(tmp_path.glob("wandb/offline-run-*-abcd1234/run-abcd1234.wandb"))


def test_wandb_without_a_login_is_one_warning(tmp_path):
    output, _ = run_with_wandb(tmp_path)
    assert output.count("warning: WandB failed") == 1


def test_a_wandb_server_that_never_answers_delays_no_step_and_the_end_by_seconds(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        output, figures = run_with_wandb(tmp_path, WANDB_BASE_URL=f"http://127.0.0.1:{silent.getsockname()[1]}",
                                         WANDB_API_KEY="a" * 40)
    assert output.count("warning: WandB") == 1
    assert figures["slowest_log_s"] < 0.2
    assert figures["close_s"] < 4


def test_wandb_is_not_imported_for_a_run_called_dummy(tmp_path):
    code = ("import sys; from nanochat.record.metrics import MetricsLogger; "
            "MetricsLogger(sys.argv[1], 'dummy', {}).log(1, {}); assert 'wandb' not in sys.modules")
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, capture_output=True)


# -----------------------------------------------------------------------------
# FLOPs


def test_matrix_parameters_are_those_of_the_model():
    config = GPTConfig(vocab_size=96, max_seq_len=8, n_layer=3, n_embd=64, n_head=4, n_kv_head=2)
    model = GPT.on_meta(config)
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.ndim > 1 and name != "wte")
    assert metrics.matrix_parameters(config) == matrices


def test_depth_16_has_the_published_flops():
    # the useful work of one micro-batch of 8 × 1024 and of 8 × 2048 tokens, counted independently: 14.0 and 29.7 TFLOP
    assert metrics.flops_per_token(GPTConfig(), 1024) * 8 * 1024 == pytest.approx(14.0e12, rel=0.005)
    assert metrics.flops_per_token(GPTConfig(), 2048) * 8 * 2048 == pytest.approx(29.7e12, rel=0.005)


@pytest.mark.parametrize("pattern, n_kv_head", [("L", 4), ("SSL", 4), ("S", 1)])
def test_flops_agree_with_a_count_of_every_product_and_every_position_looked_at(pattern, n_kv_head):
    T = 16
    config = GPTConfig(vocab_size=96, max_seq_len=T, n_layer=4, n_embd=64, n_head=4, n_kv_head=n_kv_head,
                       window_pattern=pattern)
    kv_width = n_kv_head * 16
    forward = 2 * 64 * 96 * T
    for window in config.windows():
        forward += 2 * 64 * (64 + kv_width + kv_width + 64 + 4 * 64 + 4 * 64) * T
        for query in range(T):
            for key in range(T):
                if key <= query and (window == 0 or query - key < window):
                    forward += 2 * (2 * 64)  # q·k and the weighting of v, all heads
    assert metrics.flops_per_token(config, T) * T == pytest.approx(3 * forward)


def test_mfu_of_a_chip_that_does_its_peak_is_one():
    assert metrics.mfu(8 * 197e12 / 1e9, 1e9, 197e12, 8) == pytest.approx(1.0)


# -----------------------------------------------------------------------------
# Time and money


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now[0])
    return now


def test_goodput_counts_every_second_once_for_the_innermost_span(clock):
    goodput = Goodput()
    clock[0] += 1
    with goodput.span("train"):
        clock[0] += 10
        with goodput.span("save"):
            clock[0] += 2
        clock[0] += 5
    clock[0] += 2
    assert goodput.seconds() == {"other": 3, "train": 15, "save": 2}
    assert goodput.fraction() == pytest.approx(0.75)


def test_what_compiling_took_is_not_counted_as_training(clock):
    compiled_s = 7.0  # before this run began
    goodput = Goodput(compile_seconds=lambda: compiled_s)
    with goodput.span("train"):
        clock[0] += 10
        compiled_s += 4
        with goodput.span("evaluate"):
            clock[0] += 3
            compiled_s += 3
    assert goodput.seconds() == {"other": 0, "train": 6, "evaluate": 0, "compile": 7}


def test_goodput_goes_on_where_the_run_was_interrupted_and_survives_an_error(clock):
    goodput = Goodput({"train": 5.0})
    with pytest.raises(KeyError), goodput.span("train"):
        clock[0] += 1
        raise KeyError
    clock[0] += 1
    assert goodput.seconds() == {"train": 6, "other": 1}


def test_from_the_saved_state_to_the_new_process_is_lost(clock, monkeypatch):
    monkeypatch.setattr(metrics.time, "time", lambda: 1000.0)
    assert Goodput({"train": 5.0, "lost": 1.0}, saved_at=940.0).seconds() == {"train": 5, "lost": 61, "other": 0}


def test_cost():
    assert metrics.cost_usd(1800, 2.04) == pytest.approx(1.02)
    assert metrics.cost_usd(1800, None) is None
