"""Runs untrusted programs, such as a model's, where they can do no harm.

Needs bubblewrap 0.8 or newer (Debian 12, Ubuntu 24.04).
"""
import json
import os
import shutil
import signal
import subprocess
from contextlib import ExitStack
from dataclasses import dataclass

from nanochat.common import BadInput, Failure

NOBODY = 65534
MIB = 2**20
TMP_BYTES = 64 * MIB  # all files in the sandbox together: they are in memory
KILL_TIMEOUT_S = 10
# The first process of a sandbox. When it ends, the kernel ends all others before bubblewrap's wait for it returns. It
# is not the program, because the kernel ignores most signals to a first process, such as SIGABRT.
FIRST_PROCESS = ["sh", "-c", '"$@"; exit $?', "sh"]


@dataclass(frozen=True)
class Limits:
    cpu_s: int  # of each process
    wall_s: float
    memory_bytes: int  # of address space, of each process
    output_bytes: int  # of both outputs together
    processes: int = 16  # and threads
    file_bytes: int = 16 * MIB  # of each file


@dataclass(frozen=True)
class Result:
    status: int | None  # the exit status, 128 + n for signal n; None if it was stopped
    stopped_by: str  # "wall time", "output" or ""
    stdout: bytes
    stderr: bytes


# bubblewrap gives a program its own namespaces: it sees /usr read-only and an empty /tmp, and no other file, no network
# and no other process. prlimit limits the CPU time, memory, files and number of its processes; this module limits wall
# time and output. root first becomes the user "nobody", because the kernel does not count the processes of root.
class Sandbox:
    def __init__(self):
        """Raises BadInput if it cannot run programs here."""
        need("prlimit", "util-linux")
        need("setpriv", "util-linux")
        need("bwrap", "bubblewrap")
        try:
            tried = self.run(["true"], Limits(cpu_s=5, wall_s=30, memory_bytes=256 * MIB, output_bytes=MIB))
            reason = "" if tried.status == 0 else f"status {tried.status}"
        except Failure as error:
            reason = str(error)
        if reason:
            raise BadInput(f"bubblewrap makes no sandbox here: {reason}; install version 0.8 or newer and enable user "
                           "namespaces")

    # The whole command, from the outside in: `choom` makes it the first to die when memory runs out, `setpriv` turns
    # root into nobody, `bwrap` makes the namespaces and the files, `sh` is their first process, `prlimit` sets the
    # limits, and then comes the program. Each one becomes the next, except two that stay: `bwrap` waits outside, and
    # when `sh` ends, the kernel ends whatever the program has left behind.
    def run(self, command, limits, files=None, read_only=()):
        """Runs `command` within `limits`, and returns its Result when all its processes have ended. files: {name:
        bytes}, the only ones in its working directory. read_only: folders that it sees at their paths. Its standard
        input is empty. Raises Failure if bubblewrap itself fails, such as when memory runs out."""
        files = files or {}
        with ExitStack() as stack:
            outputs = [stack.enter_context(memory_file(b"")) for _ in range(2)]
            descriptors = []
            box = []
            for name, data in files.items():
                descriptor = stack.enter_context(memory_file(data)).fileno()
                descriptors.append(descriptor)
                box += ["--perms", "0755", "--file", str(descriptor), f"/tmp/{name}"]
            for folder in read_only:
                box += ["--ro-bind", str(folder), str(folder)]
            info, info_of_child = os.pipe()
            info = stack.enter_context(open(info, "rb", buffering=0))
            command = [*less_privileged(), *bubblewrap(info_of_child, box), *FIRST_PROCESS, *limited(limits), *command]
            try:
                process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=outputs[0], stderr=outputs[1],
                                           start_new_session=True, pass_fds=[info_of_child, *descriptors])
            finally:
                os.close(info_of_child)

            def kill():
                """Ends the first process of the sandbox: bubblewrap ends when the kernel has ended all others."""
                try:
                    os.kill(json.loads(info.readline())["child-pid"], signal.SIGKILL)
                except (ValueError, ProcessLookupError):  # it had not begun, or has ended
                    process.kill()
            result = collect(process, outputs, limits, kill)
            # bubblewrap's word for how the program ended: the program sees neither it nor this pipe.
            if not result.stopped_by and b'"exit-code"' not in info.read():
                reason = " ".join(result.stderr.decode(errors="replace").split())[:300]
                raise Failure(f"the sandbox failed: {reason or f'status {result.status}'}")
            return result


def need(program, package):
    """Raises BadInput unless `program` is installed."""
    if not shutil.which(program):
        raise BadInput(f"there is no {program} to judge programs with: apt-get install {package}")


def memory_file(data):
    """Returns a file in memory, at its beginning."""
    file = os.fdopen(os.memfd_create("nanochat"), "r+b")
    file.write(data)
    file.seek(0)
    return file


def less_privileged():
    """Returns the beginning of a command that runs as nobody instead of root, the first to die when memory runs out."""
    first = ["choom", "--adjust=1000", "--"]
    if os.geteuid() == 0:
        first += ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    return first


def bubblewrap(info, box):
    """Returns the beginning of a command in a sandbox. info: descriptor for its status; box: its files."""
    system = ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "lib", "lib64"):
        system += ["--symlink", f"usr/{name}", f"/{name}"]
    return ["bwrap", "--unshare-all", "--unshare-user", "--disable-userns", "--as-pid-1", "--die-with-parent",
            "--new-session", "--clearenv", "--setenv", "PATH", "/usr/bin", "--json-status-fd", str(info), *system,
            "--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev", "--size", str(TMP_BYTES), "--tmpfs", "/tmp",
            *box, "--remount-ro", "/", "--chdir", "/tmp", "--"]


# Stands inside bubblewrap's command, where the processes are counted. The first limit of CPU time sends SIGXCPU, the
# second SIGKILL.
def limited(limits):
    """Returns the beginning of a command with `limits`."""
    return ["prlimit", f"--cpu={limits.cpu_s}:{limits.cpu_s + 1}", f"--as={limits.memory_bytes}", "--core=0",
            f"--fsize={limits.file_bytes}", f"--nproc={limits.processes}", "--nofile=64", "--"]


# The limit of a file holds for the outputs, too: a program that writes without end is ended by the kernel.
def collect(process, outputs, limits, kill):
    """Waits until `process` ends or its wall time is over; kill() then ends it. Returns the Result."""
    stopped_by = ""
    with process:
        try:
            process.wait(limits.wall_s)
        except subprocess.TimeoutExpired:
            stopped_by = "wall time"
            kill()
            try:
                process.wait(KILL_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
    texts = []
    for file in outputs:
        file.seek(0)
        texts.append(file.read(limits.output_bytes + 1))
    if sum(map(len, texts)) > limits.output_bytes:
        stopped_by = "output"
    status = process.returncode
    if stopped_by:
        status = None
    elif status < 0:  # a signal
        status = 128 - status
    return Result(status, stopped_by, *texts)
