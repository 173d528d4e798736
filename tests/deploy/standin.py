"""A stand-in for a TPU VM: a real sshd on loopback with a home, hostname, /dev and processes of its own."""
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from pathlib import Path

HERE = Path(__file__).resolve().parent
_numbers = itertools.count(2)
# Processes that test at the same time use networks of their own: those of one pytest-xdist run by their numbers.
_NETWORK = f"127.{1 + os.getpid() % 250}.{os.environ.get('PYTEST_XDIST_WORKER', '0').removeprefix('gw')}"

NAMESPACE = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc",
             "--propagation", "private"]
BOOT = """
set -e
mount --bind {root}/passwd /etc/passwd
hostname {name}
mkdir -p {root}/olddev && mount --rbind /dev {root}/olddev
mount -t tmpfs tmpfs /dev
mkdir /dev/pts /dev/shm /dev/vfio
for d in pts shm; do mount --rbind {root}/olddev/$d /dev/$d; done
for d in null zero full random urandom tty ptmx; do touch /dev/$d; mount --bind {root}/olddev/$d /dev/$d; done
ln -s /proc/self/fd /dev/fd; ln -s fd/0 /dev/stdin; ln -s fd/1 /dev/stdout; ln -s fd/2 /dev/stderr
for i in $(seq {chips}); do touch /dev/vfio/$((i - 1)); done
mount -t tmpfs tmpfs /run && mkdir /run/sshd
{disk}
exec 3<&0; (cat <&3 >/dev/null; kill -TERM 1) & exec 3<&-  # the VM ends with the test process
exec /usr/sbin/sshd -D -e -f {root}/sshd_config
"""


class StandIn:
    """One VM. `home` is its home directory, `python` the program that its venv runs; kill() preempts it."""

    def __init__(self, root, name, authorized_key, *, chips=8, env=None, disk_mb=None, set_up=True, python=None):
        self.root, self.name = Path(root), name
        self.ip = f"{_NETWORK}.{next(_numbers)}"
        self.home = self.root / "home"
        self.home.mkdir(parents=True)
        (self.root / "authorized_keys").write_text(authorized_key)
        (self.root / "passwd").write_text("\n".join(
            f"root:x:0:0:root:{self.home}:/bin/bash" if line.startswith("root:") else line
            for line in Path("/etc/passwd").read_text().splitlines()) + "\n")
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.root / "host_key"], check=True)
        self._make_programs(python or f'exec {sys.executable} {HERE}/fake_trainer.py "$@"', set_up)
        variables = {"PATH": f"{self.root}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
                     "FAKE_CHIPS": str(chips), **(env or {})}
        (self.root / "sshd_config").write_text(textwrap.dedent(f"""\
            ListenAddress {self.ip}:22
            HostKey {self.root}/host_key
            AuthorizedKeysFile {self.root}/authorized_keys
            PidFile none
            UsePAM no
            StrictModes no
            PermitRootLogin yes
            PasswordAuthentication no
            ForceCommand {self.root}/bin/session
            SetEnv {" ".join(f'"{name}={value}"' for name, value in variables.items())}
            """))
        self._boot = BOOT.format(root=self.root, name=name, chips=chips, disk=(
            f"mount -t tmpfs -o size={disk_mb}m tmpfs {self.home}" if disk_mb else ""))
        self.boot()

    def boot(self):
        self._log = open(self.root / "log", "w")
        self.process = subprocess.Popen([*NAMESPACE, "bash", "-c", self._boot], start_new_session=True,
                                        stdin=subprocess.PIPE, stdout=self._log, stderr=self._log)
        deadline = time.monotonic() + 60
        while not self._answers():
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise RuntimeError(f"stand-in VM did not start: {(self.root / 'log').read_text()}")
            time.sleep(0.02)

    def _make_programs(self, python, set_up):
        """Makes the image's programs in bin/ and, if `set_up`, a venv as setup.sh leaves it."""
        programs = {
            "python3.11": f'exec {sys.executable} "$@"',
            # A session that finds ~/drop_connection reads some of its input and then drops the connection.
            "session": 'if [ -f ~/drop_connection ]; then head -c 20000 >/dev/null; rm ~/drop_connection;'
                       ' kill -9 $PPID; exit; fi\nexec bash -c "$SSH_ORIGINAL_COMMAND"',
        }
        (self.root / "bin").mkdir()
        for name, text in programs.items():
            self.program(self.root / "bin" / name, text)
        self.program(self.root / "venv_python", python)
        if set_up:
            self.program(self.home / "nanochat.d/venv/bin/python", python)
            try:
                import tomllib
            except ModuleNotFoundError:  # Python 3.10
                return
            project = tomllib.loads((HERE.parents[1] / "pyproject.toml").read_text())["project"]
            pins = project["dependencies"] + project["optional-dependencies"]["tpu"]
            (self.home / "nanochat.d/venv/pins").write_text("\n".join(pins) + "\n")

    @staticmethod
    def program(path, text):
        """Puts a bash script at `path`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)

    def prepare(self):
        """Makes it as setup.sh, push.sh and data.sh leave it, as far as train.sh checks that. Returns it."""
        release = self.home / "nanochat.d/releases/abc1234-00000000"
        (release / "tokenizer").mkdir(parents=True)
        (release / "tokenizer/vocabulary.tiktoken").write_bytes(bytes(200_000))
        (release / "COMMIT").write_text(f"{release.name}\n")
        (self.home / "nanochat").symlink_to(release)
        shard = self.home / ".cache/nanochat/parquet/base_data_v3/shard_00000.parquet"
        shard.parent.mkdir(parents=True)
        shard.write_bytes(b"PAR1")
        (self.home / ".tpu_env").write_text((HERE.parents[1] / ".tpu_env.example").read_text())
        return self

    def _answers(self):
        try:
            with socket.create_connection((self.ip, 22), timeout=1) as connection:
                return connection.recv(4) == b"SSH-"
        except OSError:
            return False

    def pids(self):
        """Returns the pids, outside the VM, of all its processes."""
        init = subprocess.run(["pgrep", "-P", str(self.process.pid)], capture_output=True, text=True).stdout.strip()
        namespace = os.readlink(f"/proc/{init}/ns/pid")
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                if os.readlink(f"/proc/{pid}/ns/pid") == namespace:
                    found.append(int(pid))
            except OSError:
                pass
        return found

    def freeze(self):
        for pid in self.pids():
            with suppress(ProcessLookupError):  # it has ended since it was listed
                os.kill(pid, signal.SIGSTOP)

    def processes(self):
        """Returns the command line of each process, by its pid outside the VM."""
        lines = {}
        for pid in self.pids():
            try:
                lines[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                pass
        return lines

    def trainers(self):
        """Returns the pids, outside the VM, of the processes that train."""
        return [pid for pid, line in self.processes().items() if "fake_trainer.py -u -m scripts.base_train" in line]

    def shell(self, command):
        """Runs a command in the VM and returns its output."""
        inside = ["nsenter", "-t", str(self.pids()[0]), "-p", "-m", "bash", "-c", command]
        return subprocess.check_output(inside, text=True, env={**os.environ, "HOME": str(self.home)})

    def probe(self):
        """Returns what the VM says of its newest run."""
        return self.shell(f"unset NANOCHAT_BASE_DIR; . {HERE.parents[1]}/deploy/lib/on_vm.sh; probe")

    def start_up(self, script, env):
        """Runs the startup script, as Google's agent does at every boot."""
        path = self.root / "startup"
        path.write_text(script)
        inside = ["nsenter", "-t", str(self.pids()[0]), "-p", "-m", "bash", str(path)]
        variables = {"PATH": f"{self.root}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", **env}
        subprocess.run(inside, env=variables, stdin=subprocess.DEVNULL, check=True, timeout=60)

    def set_clock(self, ahead_s):
        """Lets the program `date` say a later time."""
        self.program(self.root / "date", f'exec /bin/date -d "{ahead_s} seconds" "$@"')
        (self.root / "date").rename(self.root / "bin/date")

    def run_dir(self, run="dummy"):
        return self.home / ".cache/nanochat/checkpoints" / run

    def metrics(self, run="dummy"):
        return [json.loads(line) for line in (self.run_dir(run) / "metrics.jsonl").read_text().splitlines()]

    def kill(self):
        """Ends every process at once; a disk in memory (`disk_mb`) is lost, too."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self._log.close()

    def restart_with_another_ip(self):
        self.kill()
        old, self.ip = self.ip, f"{_NETWORK}.{next(_numbers)}"
        config = self.root / "sshd_config"
        config.write_text(config.read_text().replace(f"{old}:", f"{self.ip}:"))
        self.boot()

    def erase(self):
        self.kill()
        shutil.rmtree(self.home, ignore_errors=True)
