"""Stopping: all ranks before the same step, with the state saved, and going on as if nothing had happened."""
import http.server
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from nanochat.preemption import EXIT_STATUS, StopRequest, stop_on_preemption_notice

TIMEOUT_S = 240


def test_ranks_that_run_at_their_own_pace_stop_before_the_same_step(tmp_path):
    path = tmp_path / "stop"
    parent = StopRequest(path, create=True)
    stopped_at, lock = {}, threading.Lock()

    def rank_loop(rank):
        request, random = StopRequest(path), np.random.default_rng(rank)
        for step in range(1000):
            if request.must_stop_before(step, rank):
                with lock:
                    stopped_at[rank] = step
                return
            barrier.wait(TIMEOUT_S)  # as in the all-reduce: no rank is a whole step ahead of another
            time.sleep(random.uniform(0, 0.002))

    barrier = threading.Barrier(8)
    threads = [threading.Thread(target=rank_loop, args=(rank,), daemon=True) for rank in range(8)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    parent.ask()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert len(stopped_at) == 8 and len(set(stopped_at.values())) == 1


def test_a_rank_that_missed_the_step_says_so(tmp_path):
    request = StopRequest(tmp_path / "stop", create=True)
    request.ask()
    assert not request.must_stop_before(5, rank=0)
    with pytest.raises(RuntimeError, match="rank 1 is at step 99"):
        request.must_stop_before(99, rank=1)


def test_the_metadata_servers_notice_asks_for_a_stop(tmp_path, monkeypatch):
    answers = [b"FALSE", b"FALSE", b"TRUE"]

    class Metadata(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            is_right = self.path == "/computeMetadata/v1/instance/preempted" and \
                self.headers["Metadata-Flavor"] == "Google"
            self.send_response(200 if is_right else 404)
            self.end_headers()
            self.wfile.write(answers.pop(0))

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Metadata) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{server.server_port}")
        request, told = StopRequest(tmp_path / "stop", create=True), threading.Event()
        stop_on_preemption_notice(request, report=lambda message: told.set(), poll_s=0.01)
        assert told.wait(30) and not answers
        server.shutdown()
    step = next(step for step in range(10) if request.must_stop_before(step, rank=0))
    assert step > 0


@pytest.fixture
def start(tmp_path, byte_tokenizer_dir):
    """Starts a run of 120 small steps over two XLA devices, its checkpoints mirrored in a directory."""

    def run(name):
        environment = {key: value for key, value in os.environ.items() if key != "PJRT_DEVICE"}
        return subprocess.Popen(
            [sys.executable, "-m", "scripts.base_train", f"--run={name}", "--device_type=xla", "--depth=2",
             "--model_dim=64", "--num_heads=2", "--max_seq_len=32", "--device_batch_size=2", "--total_batch_size=128",
             "--num_iterations=120", "--eval_every=-1", "--sample_every=-1", "--save_every=100", "--log_every=5",
             "--synthetic_data", f"--checkpoint_mirror={tmp_path}/mirror", f"--tokenizer_dir={byte_tokenizer_dir}"],
            env={**environment, "CPU_NUM_DEVICES": "2", "WANDB_MODE": "disabled"}, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True)

    return run


def losses_of(base_dir, name):
    records = [json.loads(line) for line in (base_dir / "checkpoints" / name / "metrics.jsonl").open()]
    steps = [record["step"] for record in records if "loss" in record]
    assert steps == list(range(1, len(steps) + 1))  # each exactly once
    return [record["loss"] for record in records if "loss" in record]


def test_a_run_that_is_told_to_stop_saves_and_goes_on_bit_for_bit(start, base_dir):
    """The second time on a new VM, whose disk is empty but for the data."""
    for number, after in ((signal.SIGTERM, "step 00020"), (signal.SIGINT, "step 00060")):
        run = start("test")
        for line in run.stdout:
            if line.startswith(after):
                run.send_signal(number)
                break
        output = run.communicate(timeout=TIMEOUT_S)[0]
        assert run.returncode == EXIT_STATUS, output
        assert f"{number.name}: the run stops" in output
        done = len(losses_of(base_dir, "test"))
        assert (base_dir / "checkpoints" / "test" / f"step_{done:06d}").is_dir()
        shutil.rmtree(base_dir / "checkpoints" / "test")
    assert 60 <= done < 120
    for name in ("test", "whole"):
        process = start(name)
        output = process.communicate(timeout=TIMEOUT_S)[0]
        assert process.returncode == 0, output
    assert losses_of(base_dir, "test") == losses_of(base_dir, "whole")


def test_a_run_is_trained_once_and_no_rank_outlives_a_parent_that_is_killed(start):
    run = start("test")
    for line in run.stdout:
        if line.startswith("step 00020"):
            break
    second = start("test")
    output = second.communicate(timeout=TIMEOUT_S)[0]
    assert second.returncode == 2 and f"in use by process {run.pid} on " in output
    children = [int(pid) for pid in open(f"/proc/{run.pid}/task/{run.pid}/children").read().split()]
    assert children
    run.kill()
    run.wait()
    deadline = time.monotonic() + 20
    while any(os.path.exists(f"/proc/{pid}") for pid in children):
        assert time.monotonic() < deadline, "a rank is still there"
        time.sleep(0.1)
