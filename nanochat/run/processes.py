"""The processes of a run: the number of ranks, the lock of the run's directory, how ranks begin and end, and how one
script runs another."""
import fcntl
import multiprocessing
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from nanochat.common import (
    BadInput,
    Failure,
    end_with_parent,
    locked,
    prepare_output,
    require_writable_dir,
    say,
    say_error,
)
from nanochat.device import tpu
from nanochat.device.ranks import spawn_ranks
from nanochat.device.tpu import count_tpu_chips
from nanochat.run import watchdog

RANKS_LOCK = ".ranks.lock"
ORPHANS_TIMEOUT_S = 30
END_TIMEOUT_S = 600  # for a script that was told to end, and may save


@contextmanager
def exclusive_use(run_dir):
    """Locks the run's directory for the block. Raises BadInput if another process trains this run, or if the directory
    is not writable.

    The operating system frees the lock when its process ends, even by a kill. The ranks of a killed process may live a
    moment longer and could still write a checkpoint, so this waits until they have ended.
    """
    lock_file = require_writable_dir(run_dir) / ".lock"
    holder = run_dir / ".lock_holder"
    user = holder.read_text() if holder.exists() else "another process"
    with locked(lock_file, f"{run_dir} is in use by {user}: end that run first, or choose another --run"):
        _wait_for_orphans(run_dir)
        holder.write_text(f"process {os.getpid()} on {socket.gethostname()}")
        yield


# A rank holds a shared lock on RANKS_LOCK from its first line (begin_as_rank) to its end, however it ends. So the
# exclusive lock is free only when no rank of an earlier process is left.
def _wait_for_orphans(run_dir):
    deadline = time.monotonic() + ORPHANS_TIMEOUT_S
    with open(run_dir / RANKS_LOCK, "w") as file:
        while True:
            try:
                return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # closing the file unlocks it
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise BadInput(f"ranks of an earlier process still hold {file.name} after {ORPHANS_TIMEOUT_S} s: "
                                   "end them (fuser shows which)") from None
            time.sleep(0.1)


_held_as_rank = []  # keeps the lock files open until the process ends


def begin_with_parent():
    """Makes this spawned process end with its parent, and at once on Ctrl-C. Every spawned process first calls this or
    begin_as_rank."""
    watchdog.print_stacks_on_signal()
    end_with_parent(multiprocessing.parent_process().pid)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def begin_as_rank(run_dir):
    """Makes this spawned process end with its parent, and lock the run's directory until then."""
    watchdog.print_stacks_on_signal()
    end_with_parent(multiprocessing.parent_process().pid)
    file = open(run_dir / RANKS_LOCK)
    fcntl.flock(file, fcntl.LOCK_SH)
    _held_as_rank.append(file)


def expected_world_size(device_type, hosts=1):
    """Returns the world size that environment and hardware imply, before any runtime is started. hosts: of the run."""
    if device_type == "tpu":
        accelerator = tpu.detect_accelerator()
        if accelerator:
            return tpu.parse_accelerator(accelerator).chips
        return count_tpu_chips()
    if device_type == "xla":
        return hosts * int(os.environ.get("CPU_NUM_DEVICES", 1))
    return 1


def run_as_ranks(function, *args, begin, has_reported=None):
    """Calls function(*args), which returns an exit status, as every rank. Returns the status of a rank that failed, or
    0; None if a rank was killed. begin: see spawn_ranks. has_reported: the Event of a Watchdog that looks at them."""
    with tempfile.TemporaryDirectory() as scratch:
        # By a file, because the executor does not tell the status of a process that has ended.
        status_path = Path(scratch) / "status"
        status_path.write_text("0")
        try:
            spawn_ranks(_run_as_rank, partial(function, *args), str(status_path), begin=begin)
        except BrokenProcessPool:
            if has_reported:
                # The executor may notice a process's end before the watchdog, which looks four times a second, says
                # why. The status may be that of a rank which failed because another was killed.
                has_reported.wait(timeout=10)
            return int(status_path.read_text()) or None
        return int(status_path.read_text())


def _run_as_rank(index, function, status_path):
    prepare_output()
    end_process_on_error(function, status_path)


def end_process_on_error(function, status_path):
    """Calls function(), which returns an exit status, and writes the status to the file `status_path` unless it is 0.

    If function() raises an error, the whole process ends at once. Otherwise the other ranks would wait for this one in
    an all-reduce for ever.
    """
    try:
        status = function()
        sys.stdout.flush()
        if status:
            Path(status_path).write_text(str(status))
    except BaseException as error:
        status = say_error(error)
        if status is None:
            status = 1
            traceback.print_exc()
        Path(status_path).write_text(str(status))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


@contextmanager
def started_module(module, *flags, env=None, output=None):
    """Prints the command that runs a script of this project, and yields its process, a Popen, which gets SIGTERM when
    this one ends. Ctrl-C in the block ends it, and waits while it saves. env, output: its environment, and the file for
    what it prints; None: this process's."""
    command = ["-m", module, *flags]
    say(f"$ {shlex.join(['python3', *command])}")
    process = subprocess.Popen([sys.executable, *command], env=env, stdin=subprocess.DEVNULL, stdout=output,
                               stderr=output and subprocess.STDOUT,
                               preexec_fn=partial(end_with_parent, os.getpid(), signal.SIGTERM))
    try:
        yield process
    except KeyboardInterrupt:
        # A terminal sends Ctrl-C to both. It must come before the SIGTERM: as the second signal, it would end a run
        # without a checkpoint.
        for timeout_s in (1, END_TIMEOUT_S):
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout_s)
            process.terminate()
        if process.returncode == 130:  # it has said that Ctrl-C stopped it
            sys.exit(130)
        raise


def run_module(module, *flags, env=None):
    """Runs a script of this project as started_module does, up to its end; see require_success."""
    with started_module(module, *flags, env=env) as process:
        status = process.wait()
    require_success(module, status)


def require_success(module, status):
    """Ends this process with the exit status of a script of this project, which has said why, unless it is 0. Raises
    Failure if a signal ended the script, which then could not say anything."""
    if status < 0:
        raise Failure(f"{module} was ended by signal {-status}: start the same command again")
    if status:
        sys.exit(status)
