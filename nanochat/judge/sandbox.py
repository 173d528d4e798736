"""Runs programs that nobody has read, such as those that a model writes, where they can do no harm.

bubblewrap 0.8 or newer is needed (Debian 12, Ubuntu 24.04). Without it, only the limits hold: `unsafe`.
"""
import json
import os
import selectors
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from nanochat.common import BadInput

NOBODY = 65534
MIB = 2**20
TMP_BYTES = 64 * MIB  # all files in the sandbox together: they are in memory
KILL_TIMEOUT_S = 10
# The first process of a sandbox. When it ends, the kernel ends all others before bubblewrap's wait for it returns. It
# is not the program, because the kernel ignores most signals to a first process, such as that of abort().
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


# bubblewrap gives a program namespaces of its own: it sees the system's /usr, read-only, an empty /tmp and no other
# file, no network and no other process, and when its first process ends the kernel ends all others. prlimit bounds the
# CPU time, memory, files and number of its processes; this module bounds the wall time and the output. root first
# becomes the user "nobody", because the kernel does not count the processes of root.
class Sandbox:
    def __init__(self, unsafe=False):
        """Raises BadInput if programs cannot be run here. unsafe: runs them with limits only, as somebody who can read
        and write files and use the network."""
        self.unsafe = unsafe
        need("prlimit", "util-linux")
        need("setpriv", "util-linux")
        if unsafe:
            return
        need("bwrap", "bubblewrap", "; --unsafe runs the programs without a sandbox, with limits only")
        tried = self.run(["true"], Limits(cpu_s=5, wall_s=30, memory_bytes=256 * MIB, output_bytes=MIB))
        if tried.status != 0:
            reason = " ".join(tried.stderr.decode(errors="replace").split()) or f"status {tried.status}"
            raise BadInput(f"bubblewrap (0.8 or newer is needed) makes no sandbox here: {reason}; where user "
                           "namespaces are switched off, switch them on; --unsafe runs the programs with limits only")

    def run(self, command, limits, files=None, read_only=()):
        """Runs `command` until it ends or exceeds `limits`, and returns its Result when all its processes have ended.

        files: {name: bytes}, made in its working directory, which is empty otherwise. read_only: folders that it sees,
        at their own paths. Its standard input is empty.
        """
        with ExitStack() as stack:
            if self.unsafe:
                return self._run_unsafe(command, limits, files or {}, stack)
            descriptors = [stack.enter_context(memory_file(data)) for data in (files or {}).values()]
            info, info_of_child = os.pipe()
            stack.callback(os.close, info)
            box = [argument for name, file in zip(files or (), descriptors, strict=True)
                   for argument in ("--perms", "0755", "--file", str(file.fileno()), f"/tmp/{name}")]
            box += [argument for folder in read_only for argument in ("--ro-bind", str(folder), str(folder))]
            command = [*less_privileged(), *bubblewrap(info_of_child, box), *FIRST_PROCESS, *limited(limits), *command]
            try:
                process = start(command, pass_fds=[info_of_child, *(file.fileno() for file in descriptors)])
            finally:
                os.close(info_of_child)

            def kill():
                """Ends the first process of the sandbox: bubblewrap ends when the kernel has ended all others."""
                try:
                    os.kill(json.loads(os.read(info, 4096))["child-pid"], signal.SIGKILL)
                except (ValueError, ProcessLookupError):  # it had not begun, or has ended
                    process.kill()
            return collect(process, limits, kill)

    def _run_unsafe(self, command, limits, files, stack):
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        for name, data in files.items():
            (folder / name).write_bytes(data)
            (folder / name).chmod(0o755)
        folder.chmod(0o777)
        mine = subprocess.run(["ps", "-L", "--no-headers", "-U", str(NOBODY if os.geteuid() == 0 else os.getuid())],
                              capture_output=True).stdout.count(b"\n")  # the limit counts all processes of the user
        command = [*less_privileged(), "setpriv", "--pdeathsig=KILL", *limited(limits, mine), *command]
        process = start(command, cwd=folder, env={"PATH": "/usr/bin:/bin", "TMPDIR": str(folder)})

        def kill():
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        stack.callback(kill)  # what it started in the background, too
        return collect(process, limits, kill)


def need(program, package, otherwise=""):
    """Raises BadInput unless `program` is installed."""
    if not shutil.which(program):
        raise BadInput(f"there is no {program}, which is needed to judge programs: install it with apt-get install "
                       f"{package}{otherwise}")


def memory_file(data):
    """Returns a file in memory, to be read from its beginning."""
    file = os.fdopen(os.memfd_create("nanochat"), "r+b")
    file.write(data)
    file.seek(0)
    return file


def less_privileged():
    """Returns the beginning of a command that may become nobody, and is the first to end when memory runs out."""
    become = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"] if os.geteuid() == 0 else []
    return ["choom", "--adjust=1000", "--", *become]


def bubblewrap(info, box):
    """Returns the beginning of a command that runs in a sandbox. box: arguments for files in it. info: descriptor to
    which bubblewrap writes the number of the sandbox's first process."""
    system = ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "lib", "lib64"):
        system += ["--symlink", f"usr/{name}", f"/{name}"]
    return ["bwrap", "--unshare-all", "--unshare-user", "--disable-userns", "--as-pid-1", "--die-with-parent",
            "--new-session", "--clearenv", "--setenv", "PATH", "/usr/bin", "--info-fd", str(info), *system,
            "--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev", "--size", str(TMP_BYTES), "--tmpfs", "/tmp",
            *box, "--remount-ro", "/", "--chdir", "/tmp", "--"]


# It is within bubblewrap's command, so that the number of processes is counted there. At the first limit of CPU time
# comes SIGXCPU, at the second SIGKILL.
def limited(limits, num_processes=0):
    """Returns the beginning of a command with `limits`."""
    return ["prlimit", f"--cpu={limits.cpu_s}:{limits.cpu_s + 1}", f"--as={limits.memory_bytes}", "--core=0",
            f"--fsize={limits.file_bytes}", f"--nproc={limits.processes + num_processes}", "--nofile=64", "--"]


def start(command, **options):
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            start_new_session=True, **options)


def collect(process, limits, kill):
    """Reads the outputs of `process` until it ends or exceeds the limits; kill() then ends it. Returns the Result."""
    deadline = time.monotonic() + limits.wall_s
    size = 0
    stopped_by = ""
    outputs = {process.stdout: bytearray(), process.stderr: bytearray()}
    # Both pipes are read as they fill. A program whose pipe nobody reads would wait until its time is over.
    with selectors.DefaultSelector() as selector, process:
        for stream in outputs:
            selector.register(stream, selectors.EVENT_READ)
        while selector.get_map() and not stopped_by:
            ready = selector.select(max(0, deadline - time.monotonic()))
            if not ready:
                stopped_by = "wall time"
            for key, _ in ready:
                data = os.read(key.fd, 65536)
                outputs[key.fileobj] += data
                size += len(data)
                if not data:
                    selector.unregister(key.fileobj)
                if size > limits.output_bytes:
                    stopped_by = "output"
        try:
            if not stopped_by:
                process.wait(max(0, deadline - time.monotonic()))  # it may have closed its outputs long before
        except subprocess.TimeoutExpired:
            stopped_by = "wall time"
        if stopped_by:
            kill()
            try:
                process.wait(KILL_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
    status = process.returncode if process.returncode >= 0 else 128 - process.returncode
    return Result(None if stopped_by else status, stopped_by, *map(bytes, outputs.values()))
