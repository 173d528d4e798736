"""Ranks that die or hang, as processes of an executor, which is how xmp.spawn starts them."""
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest

from nanochat.checkpoint import mirror, saver
from nanochat.run import watchdog

RANKS = 3


def be_a_rank(rank, path, fault):
    watchdog.print_stacks_on_signal()
    if fault == "never begins":
        os.write(1, f"pid of {rank} is {os.getpid()}\n".encode())
        Path(f"{path}_stuck_{rank}").touch()
        get_stuck_here()
    heartbeats = watchdog.Heartbeats(path)
    heartbeats.beat(rank, "compile", 0, 60)
    os.write(1, f"pid of {rank} is {os.getpid()}\n".encode())  # in one write, so that the lines of the ranks do not mix
    while (heartbeats._shared[:RANKS, 0] == 0).any():  # until all ranks have begun
        time.sleep(0.01)
    for step in range(10_000):
        heartbeats.beat(rank, "step", step, 1)
        if rank == 1 and step == 10:
            fault_of(fault)
        time.sleep(0.02)


def fault_of(fault):
    if fault == "killed":
        os.kill(os.getpid(), 9)
    elif fault == "error":
        os._exit(1)
    elif fault == "hangs":
        get_stuck_here()


def get_stuck_here():
    time.sleep(10_000)


def lower_the_limit_once_all_are_stuck(path):
    while not all(Path(f"{path}_stuck_{rank}").exists() for rank in range(RANKS)):
        time.sleep(0.01)
    watchdog.SLOW_PHASE_TIMEOUT_S = 0


def be_the_parent(path, fault):
    if fault == "never begins":
        threading.Thread(target=lower_the_limit_once_all_are_stuck, args=[path], daemon=True).start()
    with watchdog.Watchdog(watchdog.Heartbeats(path, create=True)) as watching:
        try:
            with ProcessPoolExecutor(RANKS, multiprocessing.get_context("spawn")) as executor:
                list(executor.map(be_a_rank, range(RANKS), [path] * RANKS, [fault] * RANKS))
        except BrokenProcessPool:
            watching.has_reported.wait(10)
            sys.exit(1)


@pytest.mark.parametrize("fault", ["killed", "error", "hangs", "never begins"])
def test_a_rank_that_dies_or_hangs_ends_all_of_them(tmp_path, fault):
    code = f"from tests.run.test_watchdog import be_the_parent; be_the_parent({str(tmp_path / 'beats')!r}, {fault!r})"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert process.returncode == 1, process.stdout + process.stderr
    pids = dict(line.removeprefix("pid of ").split(" is ") for line in process.stdout.splitlines())
    assert len(pids) == RANKS and not any(os.path.exists(f"/proc/{pid}") for pid in pids.values())
    reasons = [line for line in process.stderr.splitlines() if line.startswith("error: ")]
    if fault == "killed":
        assert reasons == [f"error: rank 1 (process {pids['1']}) was ended by SIGKILL: the run ends"]
    elif fault == "hangs":
        assert len(reasons) == 1 and f"rank 1 (process {pids['1']}) has not come to the end of a step at step 10" in \
            reasons[0]
        # the stuck rank, and the other two, and the parent
        assert "in get_stuck_here" in process.stderr
        assert process.stderr.count("in be_a_rank") == RANKS and "in be_the_parent" in process.stderr
    elif fault == "never begins":
        assert len(reasons) == 1 and "no rank has come to its first step after " in reasons[0]
        assert process.stderr.count("in get_stuck_here") == RANKS
    else:
        assert reasons == []  # the rank itself has reported its error


def test_a_step_may_take_twenty_times_its_usual_time():
    assert watchdog.limit_s("step", 600, usual_s=13) == 600
    assert watchdog.limit_s("step", 600, usual_s=100) == 2000
    assert watchdog.limit_s("compile", 600, usual_s=0) == watchdog.SLOW_PHASE_TIMEOUT_S
    assert watchdog.limit_s("compile", -1, usual_s=0) == float("inf")


def test_the_end_may_take_as_long_as_its_waits_for_the_disk_and_the_mirror():
    """Ranks other than 0 come to the end at once and have nothing to do there."""
    assert watchdog.limit_s("end", 600, usual_s=1) > saver.END_TIMEOUT_S + mirror.END_TIMEOUT_S + 60
