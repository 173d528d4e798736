"""All ranks stop before the same step and save their state, and the resumed run has the same bits."""
import fcntl
import http.server
import json
import os
import shutil
import signal
import subprocess
import sys
import termios
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from nanochat.checkpoint.meta import load_meta
from nanochat.run.agreement import RankAgreement, Requests
from nanochat.run.stopping import EXIT_STATUS, stop_on_preemption_notice
from nanochat.run.watchdog import Heartbeats
from nanochat.train.flags import Flags
from nanochat.train.liveness import Liveness
from tests.buckets import OUTAGE
from tests.conftest import last_of_each
from tests.run.life import child_processes, rank_process
from tests.run.pods import wait_for_gradients

TIMEOUT_S = 240


def run_ranks(path, program, ranks=8):
    """Runs program(rank, its RankAgreement) in a thread for each rank, and returns {rank: its result}."""
    results = {}

    def run(rank):
        results[rank] = program(rank, RankAgreement(Requests(path), rank, ranks))

    threads = [threading.Thread(target=run, args=[rank], daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert len(results) == ranks
    return results


def test_ranks_that_run_at_their_own_pace_stop_at_the_same_tick(tmp_path):
    """Nothing synchronises the ranks, so one may be hundreds of ticks ahead of another."""
    path = tmp_path / "requests"
    parent = Requests(path, create=True)

    def program(rank, agreement):
        random = np.random.default_rng(rank)
        for tick in range(100_000):
            if rank == 3 and tick == 300:
                parent.ask_to_stop()
            if agreement.agreed_to_stop():
                return tick
            time.sleep(random.uniform(0, 0.0005) * (rank + 1))

    results = run_ranks(path, program)
    assert len(set(results.values())) == 1


def test_ranks_that_wait_for_each_others_gradients_do_not_wait_for_each_others_answers(tmp_path):
    """A rank that has not seen the request yet may wait for one that has."""
    path = tmp_path / "requests"
    parent = Requests(path, create=True)
    ticks = [0] * 4

    def program(rank, agreement):
        random = np.random.default_rng(rank)
        for tick in range(1, 100_000):
            if agreement.agreed_to_stop():
                return tick
            wait_for_gradients(ticks, rank, tick, ahead=4, together=5)
            time.sleep(random.uniform(0, 0.001))
            if rank == 2 and tick == 300:
                parent.ask_to_stop()

    assert len(set(run_ranks(path, program, ranks=4).values())) == 1


def test_a_stop_that_is_asked_for_after_the_last_tick_of_one_rank_has_no_effect(tmp_path):
    path = tmp_path / "requests"
    parent = Requests(path, create=True)

    def program(rank, agreement):
        stops = [agreement.agreed_to_stop() for _ in range(5)]
        if rank == 1:  # it has no further tick, but the others have
            agreement.finish()
            parent.ask_to_stop()
        else:
            time.sleep(0.2)
            stops += [agreement.agreed_to_stop()]
        agreement.finish()
        return stops

    assert all(not any(stops) for stops in run_ranks(path, program, ranks=3).values())


def test_a_rank_waits_no_longer_than_its_limit_for_a_decision(tmp_path):
    requests = Requests(tmp_path / "requests", create=True)
    requests.hold()  # and then rank 0 dies
    with pytest.raises(TimeoutError, match="rank 1 waited 0.1 s for the decision"):
        RankAgreement(requests, 1, 3, timeout_s=0.1).agreed_to_stop()


@pytest.mark.parametrize("key, answers", [
    ("preempted", ["FALSE", "FALSE", "TRUE"]),
    ("maintenance-event", ["NONE", "MIGRATE_ON_HOST_MAINTENANCE", "TERMINATE_ON_HOST_MAINTENANCE"])])
def test_a_notice_of_the_metadata_server_asks_for_a_stop(tmp_path, monkeypatch, capsys, key, answers):
    class Metadata(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            is_right = self.path.startswith("/computeMetadata/v1/instance/") and \
                self.headers["Metadata-Flavor"] == "Google"
            self.send_response(200 if is_right else 404)
            self.end_headers()
            self.wfile.write(answers.pop(0).encode() if self.path.endswith(key) else b"NONE")

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Metadata) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{server.server_port}")
        requests = Requests(tmp_path / "requests", create=True)
        stop_on_preemption_notice(requests, poll_s=0.01)
        deadline = time.monotonic() + 30
        while not requests.times_asked:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert not answers and f"about to end (instance/{key} is T" in capsys.readouterr().out
        server.shutdown()
    agreement = RankAgreement(requests, 0, 1)
    deadline = time.monotonic() + 30
    while not agreement.agreed_to_stop():
        assert time.monotonic() < deadline, "the request has no effect"
        time.sleep(0.01)
    assert requests.is_preempted  # so the time until another VM goes on is lost


def test_child_processes_leave_signals_to_the_process_group_to_their_parent(tmp_path):
    code = """
import signal, sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from nanochat.run.agreement import Requests
from nanochat.run.stopping import stop_on_signals
stop_on_signals(Requests(sys.argv[1], create=True))
with ProcessPoolExecutor(1, get_context("spawn")) as executor:
    blocked = executor.submit(signal.pthread_sigmask, signal.SIG_BLOCK, []).result()
assert {signal.SIGINT, signal.SIGTERM, signal.SIGHUP} <= blocked, blocked
"""
    subprocess.run([sys.executable, "-c", code, tmp_path / "requests"], check=True, timeout=TIMEOUT_S)


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR2, signal.SIGTERM])
def test_each_signal_asks_for_a_stop_and_one_that_is_ignored_stays_ignored(tmp_path, number):
    code = """
import os, signal, sys, time
from nanochat.run.agreement import Requests
from nanochat.run.stopping import stop_on_signal_to_rank, stop_on_signals
requests = Requests(sys.argv[1], create=True)
if len(sys.argv) == 4:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
stop_on_signals(requests)
if len(sys.argv) == 4 and os.fork() == 0:
    stop_on_signal_to_rank(requests)  # the child is a rank, and prints its line, too
os.kill(os.getpid(), int(sys.argv[2]))
time.sleep(2)  # until the thread that takes signals has said it
os.write(1, b"%d\\n" % requests.times_asked)  # in one piece, because two processes write it
"""
    command = [sys.executable, "-c", code, tmp_path / "requests", str(int(number))]
    asked = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert asked.stdout == (f"{number.name}: the run stops after its current step or batch, and saves what it has "
                            "trained\n1\n"), asked.stderr
    if number == signal.SIGHUP:
        asked = subprocess.run([*command, "nohup"], capture_output=True, text=True, timeout=TIMEOUT_S)
        assert asked.stdout == "0\n0\n", asked.stderr


def test_a_terminal_that_closes_asks_for_a_stop_and_lines_printed_after_it_are_no_error(tmp_path):
    code = """
import multiprocessing, sys, time
from nanochat.common import prepare_output
from nanochat.run.agreement import Requests
from nanochat.run.stopping import stop_on_signal_to_rank, stop_on_signals

def as_rank(path):
    prepare_output()
    requests = Requests(path)
    stop_on_signal_to_rank(requests)
    print("ready", flush=True)
    while not requests.times_asked:
        time.sleep(0.01)
    time.sleep(0.5)
    print("saved", flush=True)
    open(path + ".saved", "w").close()

if __name__ == "__main__":
    prepare_output()
    stop_on_signals(Requests(sys.argv[1], create=True))
    rank = multiprocessing.get_context("fork").Process(target=as_rank, args=sys.argv[1:])
    rank.start()
    rank.join()
    print("ended", flush=True)
    sys.exit(75)
"""
    terminal, end = os.openpty()
    process = subprocess.Popen([sys.executable, "-c", code, tmp_path / "requests"], stdin=end, stdout=end, stderr=end,
                               start_new_session=True, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0))
    os.close(end)
    output = b""
    while b"ready" not in output:
        output += os.read(terminal, 1000)
    os.close(terminal)
    assert process.wait(60) == 75 and (tmp_path / "requests.saved").exists()


def test_a_rank_prints_its_stacks_on_sigusr1(tmp_path):
    code = """
import os, signal, sys
from nanochat.run.agreement import Requests
from nanochat.run.stopping import stop_on_signals
from nanochat.run.watchdog import print_stacks_on_signal
stop_on_signals(Requests(sys.argv[1], create=True))
if os.fork() == 0:
    print_stacks_on_signal()
    os.kill(os.getpid(), signal.SIGUSR1)
    os._exit(0)
os.wait()
"""
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "requests"], capture_output=True, text=True,
                          timeout=60)
    assert "most recent call first" in done.stderr and done.stdout == ""


def test_the_systems_sigterm_does_not_end_the_copying_on_a_machine_that_is_preempted(tmp_path):
    run = SimpleNamespace(flags=Flags(), plan=SimpleNamespace(switches=()), heartbeats_file=tmp_path / "beats",
                          requests_file=tmp_path / "requests")
    Heartbeats(run.heartbeats_file, create=True)
    parent = Requests(run.requests_file, create=True)
    for is_preempted in (False, True):
        parent.ask_to_stop(is_preempted)
        is_told_to_end = Liveness(run, SimpleNamespace(rank=0, world_size=1, hosts=1), 0).begin_to_wait_for_mirror()
        assert parent.waits_for_mirror and not is_told_to_end()
        parent.ask_to_stop()
        assert is_told_to_end() == (not is_preempted)


@pytest.fixture
def start(tmp_path, byte_tokenizer_dir):
    """Starts a run of 120 small steps on two XLA devices, with a mirror in a directory. The run is killed after
    TIMEOUT_S, so that nobody waits for ever for a line of its output."""
    timers = []

    def run(name, *flags):
        environment = {key: value for key, value in os.environ.items() if key != "PJRT_DEVICE"}
        process = subprocess.Popen(
            [sys.executable, "-m", "scripts.base_train", *last_of_each(
                f"--run={name}", "--device_type=xla", "--depth=2", "--model_dim=64", "--num_heads=2",
                "--max_seq_len=32", "--device_batch_size=2", "--total_batch_size=128", "--num_iterations=120",
                "--eval_every=-1", "--sample_every=-1", "--save_every=100", "--log_every=5", "--synthetic_data",
                f"--checkpoint_mirror={tmp_path}/mirror", f"--tokenizer_dir={byte_tokenizer_dir}", *flags)],
            env={**environment, "CPU_NUM_DEVICES": "2", "WANDB_MODE": "disabled"},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        timers.append(threading.Timer(TIMEOUT_S, process.kill))
        timers[-1].start()
        return process

    yield run
    for timer in timers:
        timer.cancel()


def read_until(run, words):
    """Reads the run's output up to a line that has these words."""
    assert any(words in line for line in run.stdout), f"the run has ended without: {words}"


def losses_of(base_dir, name):
    records = [json.loads(line) for line in (base_dir / "checkpoints" / name / "metrics.jsonl").open()]
    steps = [record["step"] for record in records if "loss" in record]
    assert steps == list(range(1, len(steps) + 1))  # each exactly once
    return [record["loss"] for record in records if "loss" in record]


@pytest.mark.slow
def test_a_run_that_is_told_to_stop_saves_and_resumes_bit_for_bit(start, base_dir):
    """Each time it resumes from the mirror, as on a new VM, whose disk has the data and nothing else. The evaluation
    that is interrupted would last for hours."""
    steps = "--num_iterations=60"
    long_evaluation = "--eval_every=50", "--eval_tokens=268435456"
    for number, after, flags in ((signal.SIGTERM, "step 00010", ()), (signal.SIGTERM, "step 00030", ()),
                                 (signal.SIGINT, "evaluating ", long_evaluation)):
        run = start("test", steps, *flags)
        read_until(run, after)
        run.send_signal(number)
        output = run.communicate(timeout=TIMEOUT_S)[0]
        assert run.returncode == EXIT_STATUS, output
        assert f"{number.name}: the run stops" in output and "| validation" not in output
        done = len(losses_of(base_dir, "test"))
        assert (base_dir / "checkpoints" / "test" / f"step_{done:06d}").is_dir()
        shutil.rmtree(base_dir / "checkpoints" / "test")
    assert done == 50
    for name in ("test", "whole"):
        process = start(name, steps)
        output = process.communicate(timeout=TIMEOUT_S)[0]
        assert process.returncode == 0, output
    assert losses_of(base_dir, "test") == losses_of(base_dir, "whole")


def test_a_run_prints_its_stacks_on_sigusr1_and_goes_on_and_a_stop_before_step_1_says_that_nothing_is_saved(
        start, base_dir):
    run = start("test", "--device_type=cpu", "--eval_every=50", "--eval_tokens=268435456")
    read_until(run, "evaluating ")
    run.send_signal(signal.SIGUSR1)
    read_until(run, "most recent call first")
    run.send_signal(signal.SIGTERM)
    output = run.communicate(timeout=TIMEOUT_S)[0]
    assert run.returncode == EXIT_STATUS and "before step 1, so nothing is saved" in output.splitlines()[-1]
    assert not list((base_dir / "checkpoints" / "test").glob("step_*"))


@pytest.mark.slow
def test_a_run_is_trained_by_one_process_and_no_rank_outlives_a_killed_parent(start):
    run = start("test", "--num_iterations=100000")  # so that it is not done before
    read_until(run, "step 00005")
    second = start("test", "--num_iterations=100000")
    output = second.communicate(timeout=TIMEOUT_S)[0]
    assert second.returncode == 2 and f"in use by process {run.pid} on " in output
    children = child_processes(run)
    assert children
    run.kill()
    run.wait()
    deadline = time.monotonic() + 60
    while any(os.path.exists(f"/proc/{pid}") for pid in children):
        assert time.monotonic() < deadline, "a rank is still there"
        time.sleep(0.1)


@pytest.mark.slow
def test_a_stop_waits_for_the_mirror_until_it_has_the_checkpoint_or_a_second_signal_comes(start, base_dir, bucket):
    def state():
        return json.loads((base_dir / "checkpoints/test/mirror.json").read_text())

    run = start("test", "--checkpoint_mirror=gs://b")
    read_until(run, "step 00020")
    bucket.broken = OUTAGE
    run.send_signal(signal.SIGTERM)
    read_until(run, "waiting until step_")
    run.send_signal(signal.SIGTERM)
    output = run.communicate(timeout=TIMEOUT_S)[0]
    assert run.returncode == EXIT_STATUS and "without waiting for its mirror" in output, output
    assert "is on this machine's disk only" in output and "leaked semaphore" not in output
    stopped = state()
    assert stopped["newest_saved"] and stopped["newest_copied"] is None and stopped["behind_since"]
    assert load_meta(base_dir / "checkpoints/test" / stopped["newest_saved"]).is_pause
    bucket.broken = None
    run = start("test", "--checkpoint_mirror=gs://b", "--num_iterations=5000")  # so that it is not done before
    read_until(run, f"copied {stopped['newest_saved']} to gs://b/test")
    bucket.broken = OUTAGE
    run.send_signal(signal.SIGINT)
    read_until(run, "waiting until step_")
    bucket.broken = None
    output = run.communicate(timeout=TIMEOUT_S)[0]
    assert run.returncode == EXIT_STATUS and "copied step_" in output, output
    assert state()["newest_saved"] == state()["newest_copied"] > stopped["newest_saved"]
    assert state()["behind_since"] is state()["error"] is None


@pytest.mark.slow
def test_ctrl_c_twice_ends_at_once_and_without_warnings_of_python(start):
    run = start("test", "--num_iterations=100000")
    read_until(run, "step 00005")
    ranks = rank_process(run)
    os.kill(ranks, signal.SIGSTOP)  # so that they cannot save
    run.send_signal(signal.SIGINT)
    read_until(run, "again: it ends at once")
    run.send_signal(signal.SIGINT)
    assert run.wait(TIMEOUT_S) == 130
    os.kill(ranks, signal.SIGCONT)
    output = run.communicate(timeout=TIMEOUT_S)[0]
    assert "leaked semaphore" not in output and "resource_tracker" not in output


@pytest.mark.slow
@pytest.mark.parametrize("number, reason", [(signal.SIGKILL, "was ended by SIGKILL: the run ends"),
                                            (signal.SIGSTOP, "has not finished a step at step ")])
def test_a_rank_that_is_killed_or_hangs_ends_the_run_with_the_reason(start, number, reason):
    run = start("test", "--step_timeout_s=10", "--num_iterations=100000")
    read_until(run, "step 00020")
    ranks = rank_process(run)
    os.kill(ranks, number)
    output = run.communicate(timeout=TIMEOUT_S)[0]
    assert run.returncode == 1 and reason in output, output
    assert f"(process {ranks})" in output and not os.path.exists(f"/proc/{ranks}")
