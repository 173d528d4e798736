"""All ranks stop before the same step and save their state, and the resumed run has the same bits."""
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import termios

import pytest

from nanochat.checkpoint import on_disk
from nanochat.checkpoint.meta import load_meta
from nanochat.run.agreement import RankAgreement, Requests
from nanochat.run.stopping import EXIT_STATUS, stop_on_preemption_notice
from tests.buckets import OUTAGE
from tests.conftest import last_of_each, run_python
from tests.deploy.conftest import eventually
from tests.run.life import Life, child_processes, rank_process

TIMEOUT_S = 240
FLAGS = ("--device_type=xla", "--depth=2", "--model_dim=64", "--num_heads=2", "--max_seq_len=32",
         "--device_batch_size=2", "--total_batch_size=128", "--num_iterations=120", "--eval_every=-1",
         "--sample_every=-1", "--save_every=100", "--log_every=5", "--synthetic_data")


@pytest.mark.parametrize("key, answers", [
    ("preempted", ["FALSE", "FALSE", "TRUE"]),
    ("maintenance-event", ["NONE", "MIGRATE_ON_HOST_MAINTENANCE", "TERMINATE_ON_HOST_MAINTENANCE"])])
def test_a_notice_of_the_metadata_server_asks_for_a_stop(tmp_path, metadata, capsys, key, answers):
    metadata |= {"preempted": "FALSE", "maintenance-event": "NONE", key: answers}
    requests = Requests(tmp_path / "requests", create=True)
    stop_on_preemption_notice(requests, poll_s=0.01)
    eventually(lambda: requests.times_asked)
    assert not answers and f"about to end (instance/{key} is T" in capsys.readouterr().out
    agreement = RankAgreement(requests, 0)
    assert [agreement.agreed_to_stop() for _ in range(2)] == [False, True]
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
    process = run_python("-c", code, tmp_path / "requests")
    assert process.returncode == 0, process.stderr


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR2, signal.SIGTERM])
def test_each_signal_asks_for_a_stop_and_one_that_is_ignored_stays_ignored(tmp_path, number):
    code = """
import os, signal, sys, threading
from nanochat.run import stopping
from nanochat.run.agreement import Requests
requests = Requests(sys.argv[1], create=True)
has_said = threading.Event()
stopping.say = lambda line: (print(line, flush=True), has_said.set())
is_ignored = len(sys.argv) == 4
if is_ignored:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
stopping.stop_on_signals(requests)
if is_ignored and os.fork() == 0:
    stopping.stop_on_signal_to_rank(requests)  # the child is a rank, and prints its line, too
os.kill(os.getpid(), int(sys.argv[2]))
has_said.wait(1 if is_ignored else 60)
os.write(1, b"%d\\n" % requests.times_asked)  # in one piece, because two processes write it
"""
    command = "-c", code, tmp_path / "requests", str(int(number))
    asked = run_python(*command)
    assert asked.stdout == (f"{number.name}: the run stops after its current step or batch, and saves what it has "
                            "trained\n1\n"), asked.stderr
    if number == signal.SIGHUP:
        asked = run_python(*command, "nohup")
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


@pytest.fixture
def start(tmp_path, byte_tokenizer_dir):
    """Starts a run of small steps on two XLA devices, with a mirror in a directory, and returns its Life."""
    lives = []

    def run(*flags):
        flags = last_of_each("--run=test", *FLAGS, f"--checkpoint_mirror={tmp_path}/mirror",
                             f"--tokenizer_dir={byte_tokenizer_dir}", *flags)
        lives.append(Life([sys.executable, "-m", "scripts.base_train", *flags], {"CPU_NUM_DEVICES": "2"}, TIMEOUT_S))
        return lives[-1]

    yield run
    for life in lives:
        life.kill()


@pytest.mark.slow
def test_a_run_that_is_told_to_stop_saves_and_resumes_bit_for_bit(start, train, base_dir):
    """Each time it resumes from the mirror, as on a new VM, whose disk has the data and nothing else. The evaluation
    that is interrupted would last for hours."""
    run_dir = base_dir / "checkpoints" / "test"
    for number, after, flags in ((signal.SIGTERM, "step 00010", ()),
                                 (signal.SIGINT, "evaluating ", ("--eval_every=30", "--eval_tokens=268435456"))):
        run = start("--num_iterations=40", *flags)
        run.wait_for(after)
        run.process.send_signal(number)
        assert run.end() == EXIT_STATUS, run.text
        assert f"{number.name}: the run stops" in run.text and "| validation" not in run.text
        saved = on_disk.latest(run_dir)
        done = [record["step"] for record in records_of(run_dir) if "loss" in record]
        assert done == list(range(1, on_disk.step_of(saved) + 1))
        shutil.rmtree(run_dir)
    assert saved.name == "step_000030"
    run = start("--num_iterations=40")
    assert run.end() == 0, run.text
    losses = [(record["step"], record["loss"]) for record in records_of(run_dir) if "loss" in record]
    whole = train(*FLAGS, "--num_iterations=40", run="whole", devices=2, without=(
        "data_dir", "val_dir", "matrix_lr", "embedding_lr", "unembedding_lr", "scalar_lr"))
    assert losses == list(whole.losses.items()) and len(losses) == 40  # each exactly once


def records_of(run_dir):
    return list(map(json.loads, (run_dir / "metrics.jsonl").open()))


def test_a_run_prints_its_stacks_on_sigusr1_and_goes_on_and_a_stop_before_step_1_says_that_nothing_is_saved(
        start, base_dir):
    run = start("--device_type=cpu", "--eval_every=50", "--eval_tokens=268435456")
    run.wait_for("evaluating ")
    run.process.send_signal(signal.SIGUSR1)
    run.wait_for("most recent call first")
    run.process.send_signal(signal.SIGTERM)
    assert run.end() == EXIT_STATUS and "before step 1, so nothing is saved" in run.lines[-1]
    assert not list((base_dir / "checkpoints" / "test").glob("step_*"))


@pytest.mark.slow
def test_a_run_is_trained_by_one_process_and_ctrl_c_twice_ends_it_and_its_ranks_at_once_without_warnings_of_python(
        start):
    run = start("--num_iterations=100000")  # so that it is not done before
    run.wait_for("step 00005")
    second = start("--num_iterations=100000")
    assert second.end() == 2 and f"in use by process {run.process.pid} on " in second.text
    children = child_processes(run.process)
    os.kill(rank_process(run.process), signal.SIGSTOP)  # so that it cannot save
    run.process.send_signal(signal.SIGINT)
    run.wait_for("again: it ends at once")
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 130
    assert "leaked semaphore" not in run.text and "resource_tracker" not in run.text
    eventually(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in children))


@pytest.mark.slow
def test_a_stop_waits_for_the_mirror_until_it_has_the_checkpoint_or_a_second_signal_comes(start, base_dir, bucket):
    def state():
        return json.loads((base_dir / "checkpoints/test/mirror.json").read_text())

    run = start("--checkpoint_mirror=gs://b")
    run.wait_for("step 00020")
    bucket.broken = OUTAGE
    run.process.send_signal(signal.SIGTERM)
    run.wait_for("waiting until step_")
    run.process.send_signal(signal.SIGTERM)
    assert run.end() == EXIT_STATUS and "without waiting for its mirror" in run.text, run.text
    assert "is on this machine's disk only" in run.text and "leaked semaphore" not in run.text
    stopped = state()
    assert stopped["newest_saved"] and stopped["newest_copied"] is None and stopped["behind_since"]
    assert load_meta(base_dir / "checkpoints/test" / stopped["newest_saved"]).is_pause
    bucket.broken = None
    run = start("--checkpoint_mirror=gs://b", "--num_iterations=5000")  # so that it is not done before
    run.wait_for(f"copied {stopped['newest_saved']} to gs://b/test")
    bucket.broken = OUTAGE
    run.process.send_signal(signal.SIGINT)
    run.wait_for("waiting until step_")
    bucket.broken = None
    assert run.end() == EXIT_STATUS and "copied step_" in run.text, run.text
    assert state()["newest_saved"] == state()["newest_copied"] > stopped["newest_saved"]
    assert state()["behind_since"] is state()["error"] is None


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_run_with_the_reason(start):
    """One that is killed: see chaos.py."""
    run = start("--step_timeout_s=10", "--num_iterations=100000")
    run.wait_for("step 00020")
    ranks = rank_process(run.process)
    os.kill(ranks, signal.SIGSTOP)
    assert run.end() == 1 and "has not finished a step at step " in run.text, run.text
    assert f"(process {ranks})" in run.text and not os.path.exists(f"/proc/{ranks}")
