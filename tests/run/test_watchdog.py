"""Ranks that die or hang (faulty_ranks.py) end the run, with the reason."""
import os
import signal
import subprocess
import sys
import time

import pytest

from nanochat.checkpoint import saver, uploader
from nanochat.run import watchdog
from nanochat.run.agreement import RankAgreement, Requests
from tests.conftest import run_python
from tests.run.faulty_ranks import RANKS


@pytest.mark.parametrize("fault", ["killed", "error", "hangs", "never begins"])
def test_a_rank_that_dies_or_hangs_ends_all_of_them(tmp_path, fault):
    code = f"from tests.run.faulty_ranks import be_the_parent; be_the_parent({str(tmp_path / 'beats')!r}, {fault!r})"
    process = run_python("-c", code)
    assert process.returncode == 1, process.stdout + process.stderr
    pids = dict(line.removeprefix("pid of ").split(" is ") for line in process.stdout.splitlines())
    assert len(pids) == RANKS and not any(os.path.exists(f"/proc/{pid}") for pid in pids.values())
    reasons = [line for line in process.stderr.splitlines() if line.startswith("error: ")]
    if fault == "killed":
        assert len(reasons) == 1 and reasons[0].startswith(f"error: rank 1 (process {pids['1']}) was ended by SIGKILL")
    elif fault == "hangs":
        assert len(reasons) == 1 and f"rank 1 (process {pids['1']}) has not finished a step at step 10" in \
            reasons[0]
        # the stuck rank, and the other two, and the parent
        assert "in get_stuck_here" in process.stderr
        assert process.stderr.count("in be_a_rank") == RANKS and "in be_the_parent" in process.stderr
    elif fault == "never begins":
        assert len(reasons) == 1 and "no rank has reached its first step after " in reasons[0]
        assert process.stderr.count("in get_stuck_here") == RANKS
    else:
        assert reasons == []  # the rank itself has reported its error


def test_a_rank_of_the_largest_slice_has_places_of_its_own(tmp_path):
    heartbeats = watchdog.Heartbeats(tmp_path / "heartbeats", create=True)
    heartbeats.beat(8959, "step", 5, limit_s=-1)
    assert heartbeats.late(0).startswith(f"rank 8959 (process {os.getpid()}) has not finished a step at step 5")
    requests = Requests(tmp_path / "requests", create=True)
    for rank in (300, 8959):
        RankAgreement(requests, rank).agreed_to_stop()
    assert requests.hold() == 1


def test_a_phase_has_the_time_that_it_may_need():
    assert watchdog.limit_s("step", 600, usual_s=13) == 600
    assert watchdog.limit_s("step", 600, usual_s=100) == 2000
    assert watchdog.limit_s("compile", 600, usual_s=0) == watchdog.SLOW_PHASE_TIMEOUT_S
    assert watchdog.limit_s("compile", -1, usual_s=0) == float("inf")
    # Ranks other than 0 come to the end at once, and wait while rank 0 waits for the disk and the mirror.
    assert watchdog.limit_s("end", 600, usual_s=1) > saver.END_TIMEOUT_S + uploader.END_TIMEOUT_S + 60


DEEP_THREADS = """
import threading, time
from nanochat.run.watchdog import print_stacks_on_signal
def deep(n):
    return n and deep(n - 1)
def work():
    while True:
        deep(600)  # its stack grows and shrinks by pages
print_stacks_on_signal()
for _ in range(3):
    threading.Thread(target=work, daemon=True).start()
print("ready", flush=True)
time.sleep(60)
"""


def test_a_process_survives_printing_its_stack_a_hundred_times():
    with subprocess.Popen([sys.executable, "-c", DEEP_THREADS], stdout=subprocess.PIPE,
                          stderr=subprocess.DEVNULL) as process:
        process.stdout.readline()
        for _ in range(100):
            process.send_signal(signal.SIGUSR1)
            time.sleep(0.005)
        assert process.poll() is None
        process.kill()
