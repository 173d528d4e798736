"""A process of a run, followed from its start to its end."""
import os
import subprocess
import threading
import time
from pathlib import Path

from tests.deploy.conftest import eventually


def child_processes(run):
    return [int(pid) for pid in open(f"/proc/{run.pid}/task/{run.pid}/children").read().split()]


def rank_process(run):
    """Returns the id of the process in which the ranks of a run are threads."""
    return next(pid for pid in child_processes(run) if b"spawn_main" in open(f"/proc/{pid}/cmdline", "rb").read())


def require_ended(pid):
    """Waits for the end of a process; one that nobody waits for stays as a zombie."""
    stat = Path(f"/proc/{pid}/stat")
    eventually(lambda: not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z")


class Life:
    """A process whose lines are read as they come. command, options: for subprocess.Popen; environment: what its
    environment has beside that of this process; timeout_s: how long it may take to its next sign of life, and to its
    end."""

    def __init__(self, command, environment, timeout_s, **options):
        self.timeout_s = timeout_s
        inherited = {name: value for name, value in os.environ.items() if name != "PJRT_DEVICE"}
        self.process = subprocess.Popen(command, env={**inherited, "WANDB_MODE": "disabled", **environment},
                                        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
        self.lines, self._news = [], threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.process.stdout:
            with self._news:
                self.lines.append(line.rstrip())
                self._news.notify_all()

    @property
    def text(self):
        return "\n".join(self.lines)

    def count(self, words):
        """Returns how many lines have these words."""
        return sum(words in line for line in self.lines)

    def wait_until(self, condition):
        """Waits until condition() holds or the process has ended; returns whether it holds."""
        deadline = time.monotonic() + self.timeout_s
        with self._news:
            while not condition():
                if self.process.poll() is not None and not self._reader.is_alive():
                    return False
                if time.monotonic() > deadline:
                    raise TimeoutError("no sign of life:\n" + "\n".join(self.lines[-60:]))
                self._news.wait(0.2)
        return True

    def wait_for(self, words, times=1):
        """Waits for so many lines with these words."""
        assert self.wait_until(lambda: self.count(words) >= times), f"it ended without: {words}\n{self.text}"

    def kill(self):
        self.process.kill()
        self.process.wait()

    def end(self):
        """Returns the exit status."""
        status = self.process.wait(self.timeout_s)
        self._reader.join(10)
        return status
