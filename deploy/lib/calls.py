"""Runs the other scripts of deploy/, each in a process group of its own and limited in time."""
import os
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from deploy.lib.state import open_private

DEPLOY = Path(__file__).resolve().parents[1]
TIMED_OUT, NOT_STARTED = 124, 126  # the statuses of a call that ran past its limit, and of one that did not run
MOST_BYTES = 20_000_000  # of output: it is in memory, and a VM may print without end
LINE = 500  # characters of a line that is shown


class Result(NamedTuple):
    status: int
    output: str
    errors: str = ""  # what look.sh wrote to stderr; of other scripts it is in the output

    @property
    def last_line(self):
        is_said = not self.status and self.output.strip()  # what a look that worked says is in its output
        text = self.output if is_said or not self.errors.strip() else self.errors
        lines = [line for line in text.splitlines() if line.strip()]
        return lines[-1][:LINE] if lines else ""

    @property
    def fields(self):
        """The NAME=value lines of the output."""
        return dict(line.split("=", 1) for line in self.output.splitlines() if "=" in line)


class Calls:
    """`call("push", 900)` runs deploy/push.sh. It waits by calling wait(seconds), which may raise. record(name, group)
    is told which script runs as which process group, for whoever comes after a kill -9."""

    def __init__(self, settings, wait=time.sleep, record=lambda name, group: None):
        self.settings, self.wait, self.record = settings, wait, record

    def __call__(self, verb, limit_s, *flags):
        """Runs it with the settings of the watch and returns its Result. Its output goes to VERB.log, too."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("WATCH_")}
        if verb == "setup" and os.environ.get("WATCH_WANDB_API_KEY"):
            environment["WANDB_API_KEY"] = os.environ["WATCH_WANDB_API_KEY"]
        if verb == "delete":  # it is tried again, and every minute costs money
            environment.setdefault("GCLOUD_S", "60")
        path = DEPLOY / f"{verb}.sh"
        is_look = verb == "lib/look"
        try:
            output = _memory_file()
            errors = _memory_file() if is_look else output  # where a VM may write what looks like a field
            process = subprocess.Popen(
                [path, self.settings.name, *self.settings.passed_on, *flags], stdin=subprocess.DEVNULL,
                stdout=output, stderr=errors, env=environment, start_new_session=True)
        except OSError as error:
            return Result(NOT_STARTED, f"{path.name} could not be started: {error}")
        self.record(path.name, process.pid)
        deadline = time.monotonic() + limit_s
        try:
            while process.poll() is None and time.monotonic() < deadline \
                    and max(os.fstat(file.fileno()).st_size for file in (output, errors)) < MOST_BYTES:
                self.wait(0.1)
        finally:
            if timed_out := process.poll() is None:
                end_group(process.pid, process)
            self.record("", 0)
        said = _content(output)
        problems = _content(errors) if is_look else b""
        mode = "wb" if is_look else "ab"
        with suppress(OSError), open_private(self.settings.state / f"{path.stem}.log", mode) as log:
            log.write((said + problems)[-1_000_000:])
        text = said.decode(errors="replace")
        if timed_out:
            is_endless = max(len(said), len(problems)) >= MOST_BYTES
            why = "printed without end" if is_endless else f"gave no answer for {limit_s:.0f} s"
            return Result(TIMED_OUT, f"{text}\n{path.name} {why}")
        return Result(process.returncode, text, problems.decode(errors="replace"))


def _content(file):
    with file:
        file.seek(0)
        return file.read(2 * MOST_BYTES)


def _memory_file():
    """Returns an open file that needs no disk, which may be full, and that outlives this process as long as the script
    writes to it: a pipe would end a script whose watch was killed. macOS has only temporary files."""
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("output"), "w+b")
    return tempfile.TemporaryFile()


def end_group(group, process=None, patience_s=5):
    """Ends all processes of a group, with SIGKILL those that are still there after `patience_s`."""
    for signal_, wait_s in ((signal.SIGTERM, patience_s), (signal.SIGKILL, 2)):
        deadline = time.monotonic() + wait_s
        try:
            os.killpg(group, signal_)
            while time.monotonic() < deadline:
                if process:
                    process.poll()  # a leader that has ended, but was not waited for, counts as a member of the group
                os.killpg(group, 0)
                time.sleep(0.05)
        except (ProcessLookupError, PermissionError):  # macOS answers EPERM when only zombies are left
            break
    if process:
        with suppress(subprocess.TimeoutExpired):  # a process that waits for a broken disk cannot even be killed
            process.wait(patience_s)


def end_orphan(settings, script, group):
    """Ends the process group of a script that a watch.sh which was killed left running. Returns whether there is one.
    After a reboot the number may belong to another program, so its command line must name the script and the VM."""
    try:
        lines = subprocess.run(["ps", "-A", "-ww", "-o", "pgid=", "-o", "command="], capture_output=True, text=True,
                               errors="replace", timeout=30).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):  # the watch of the VM matters more
        return False
    words = [line.split(None, 1) for line in lines]
    if not any(each[0] == str(group) and f"/{script} {settings.name} " in f"{each[-1]} " for each in words if each):
        return False
    end_group(group)
    return True
