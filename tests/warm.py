"""Warm ranks: a process that runs many trainings, one after the other. So the tests import torch_xla once, and compile
once what several of them train.

A test calls `WarmRanks(devices).call(base_train.main, flags)`. The first call starts a process with a thread for each
XLA device of its CPU, like the one in which base_train trains (nanochat/train/launch.py, `spawn`). Its threads wait for
the next call:

    the test's process              the warm process
    WarmRanks.call  -- function, flags, environment -->  thread of rank 0: function(flags), until it has prepared a Run
                                                         every thread:     launch.train(run)
                    <-- exit status -------------------  thread of rank 0

Two functions of launch are replaced in that process, and nothing else: `spawn` hands the Run to threads that exist
already, and `stop_on_signals`, which needs the main thread, does nothing. Tests of signals, of processes that are
killed and of what a new process does must start one (`run_python` in conftest.py).
"""
import os
import queue
import subprocess
import sys
import tempfile
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from unittest import mock

from nanochat.common import run_script

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 300  # for one call, on a machine that does other work too
# XLA's CPU compiler with few optimisations takes a third of the time. The last two options, one part and its older code
# for fusions, save a quarter of what a small run then computes.
CHEAP_COMPILATION = ("--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
                     "--xla_cpu_parallel_codegen_split_count=1 --xla_cpu_use_fusion_emitters=false")


# -----------------------------------------------------------------------------
# The test's side


class WarmRanks:
    """A warm process with `devices` ranks. It is started by the first call, and again after it has ended."""

    def __init__(self, devices):
        self.devices, self._process = devices, None

    def call(self, function, argv, **environment):
        """Calls function(argv), an importable function like base_train.main, in the warm process. Returns a
        subprocess.CompletedProcess with what a script with that main function would print, and its exit status.

        environment: variables that are added to those of the test; there is no WandB unless they say so.
        Raises subprocess.TimeoutExpired after TIMEOUT_S.
        """
        if self._process is None:
            self._start()
        begin = [os.path.getsize(file.name) for file in self._output]
        try:
            self._connection.send((function, argv, {**os.environ, "WANDB_MODE": "disabled", **environment}))
            if not self._connection.poll(TIMEOUT_S):
                self.stop()
                raise subprocess.TimeoutExpired(argv, TIMEOUT_S, *self._read_output(begin))
            status = self._connection.recv()
        except (EOFError, ConnectionError):  # a rank has raised an error and ended the process
            status = self._process.wait(TIMEOUT_S)
            self._process = None
        return subprocess.CompletedProcess(argv, status, *self._read_output(begin))

    def stop(self):
        """Ends the process if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _start(self):
        self._connection, theirs = Pipe()
        self._output = [tempfile.NamedTemporaryFile("a", prefix=name) for name in ("stdout", "stderr")]
        fixed = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(self.devices), "XLA_FLAGS": CHEAP_COMPILATION}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.warm", str(theirs.fileno())], cwd=ROOT, env={**os.environ, **fixed},
            pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=self._output[0], stderr=self._output[1])
        theirs.close()
        try:
            assert self._connection.poll(TIMEOUT_S), "the warm process does not start"
            self._connection.recv()
        except EOFError:
            raise RuntimeError("the warm process has ended:\n" + self._read_output([0, 0])[1]) from None

    def _read_output(self, begin):
        """Returns what the process has written to standard output and standard error after these positions."""
        return [Path(file.name).read_bytes()[start:].decode() for file, start in zip(self._output, begin, strict=True)]


# -----------------------------------------------------------------------------
# The warm process's side


def main():
    from torch_xla._internal import pjrt

    from nanochat.device.ranks import prepare_xla_environment
    from nanochat.run.processes import end_process_on_error
    prepare_xla_environment("xla")
    connection = Connection(int(sys.argv[1]))
    inboxes = [queue.SimpleQueue() for _ in range(int(os.environ["CPU_NUM_DEVICES"]))]
    # This is what xmp.spawn does in the process that it spawns. An error in a script ends the process, too.
    rank = partial(end_process_on_error, partial(serve, connection, inboxes), os.devnull)
    pjrt._run_thread_per_device(0, 1, rank, pjrt.initialize_multiprocess)


def serve(connection, inboxes):
    """Runs in the thread of every rank. Rank 0 serves the test's process until that has ended; the others train when
    rank 0 tells them to, through their inboxes."""
    import torch_xla.runtime as xr

    from nanochat.train import launch
    rank = xr.global_ordinal()
    if rank > 0:
        while True:
            train_as_rank(*inboxes[rank].get())

    def train_on_all_ranks(run, watchdog):
        """Takes the place of launch.spawn; the test has a time limit in place of the watchdog."""
        statuses = queue.SimpleQueue()
        for inbox in inboxes[1:]:
            inbox.put((run, statuses))
        train_as_rank(run, statuses)
        return max(statuses.get() for _ in inboxes)

    launch.spawn = train_on_all_ranks
    launch.stopping.stop_on_signals = lambda requests: None
    connection.send("ready")
    while True:
        try:
            function, argv, environment = connection.recv()
        except EOFError:
            os._exit(0)
        connection.send(call_as_script(function, argv, environment))


def train_as_rank(run, statuses):
    """Trains, as base_train's ranks do, and puts the exit status into the queue. An error ends the process: the other
    ranks would wait for this one for ever."""
    from nanochat.run.processes import end_process_on_error
    from nanochat.train import launch
    end_process_on_error(lambda: statuses.put(launch.train(run)), os.devnull)


def call_as_script(function, argv, environment):
    """Calls function(argv) as a script would, and returns the exit status."""
    fixed = {name: os.environ[name] for name in ("PJRT_DEVICE", "CPU_NUM_DEVICES", "XLA_FLAGS")}
    try:
        with mock.patch.dict(os.environ, {**environment, **fixed}):
            run_script(lambda: function(argv))
    except SystemExit as end:
        return end.code or 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


if __name__ == "__main__":
    main()
