"""Ranks that die or hang, as processes of an executor, which is how xmp.spawn starts them. They import no PyTorch."""
import multiprocessing
import os
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

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
        heartbeats.beat(rank, "step", step, 5)
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
