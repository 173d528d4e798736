"""Fixtures: a laptop (scripts, ssh keys, gcloud's settings) and its VMs, all on loopback."""
import http.server
import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.deploy import warm_gcloud
from tests.deploy.cloud import Cloud
from tests.deploy.standin import NAMESPACE, StandIn
from tests.deploy.watched import World

ROOT = Path(__file__).resolve().parents[2]


def missing():
    """Returns why the tests with VMs cannot run here, or None."""
    if os.geteuid() != 0:
        return "namespaces and sshd need root"
    for program in ("unshare", "setsid", "flock", "/usr/sbin/sshd", "ssh", "gcloud"):
        if not shutil.which(program):
            return f"{program} is not installed"
    if subprocess.run([*NAMESPACE, "mount", "-t", "tmpfs", "x", "/mnt"], capture_output=True).returncode:
        return "this machine does not allow namespaces"
    return None


def pytest_collection_modifyitems(items):
    here = [item for item in items if Path(__file__).parent in item.path.parents and "laptop" in item.fixturenames]
    reason = missing() if here else None
    for item in here if reason else ():
        item.add_marker(pytest.mark.skip(reason=reason))


class Laptop:
    """The user's machine: `run("push.sh", HOST)` runs deploy/push.sh on it."""

    def __init__(self, root, gcloud):
        self.root, self.home, self.gcloud = root, root / "home", gcloud
        (self.home / ".ssh").mkdir(parents=True)
        (self.home / "bin").mkdir()
        key = self.home / ".ssh/google_compute_engine"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
        self.public_key = key.with_suffix(".pub").read_text()
        # ssh takes the home directory from the password file, not from $HOME
        (self.home / ".ssh/config").write_text(f"Host *\n  UserKnownHostsFile {self.home}/.ssh/known_hosts\n")
        (self.home / "bin/ssh").write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {self.home}/.ssh/config "$@"\n')
        (self.home / "bin/ssh").chmod(0o755)
        # A version manager's python3 would be a script that takes several times as long to start.
        (self.home / "bin/python3").symlink_to(Path(sys.base_prefix, "bin/python3"))
        if os.environ.get("BASH32"):  # runs every script in bash 3.2: make test BASH32=/opt/bash-3.2/bin/bash
            (self.home / "bin/bash").symlink_to(os.environ["BASH32"])
        self.env = {"PATH": f"{self.home}/bin:{gcloud.parent}:{os.environ['PATH']}", "HOME": str(self.home),
                    "TMPDIR": str(root), "LANG": "C.UTF-8", "NANOCHAT_DEPLOY_CONFIG": str(self.home / "config.env")}
        self.vms, self.processes = [], []

    def let_gcloud(self, text):
        """Lets gcloud run these lines of bash, which may exit, before the real one."""
        StandIn.program(self.home / "bin/gcloud", f'{text}\nexec {self.gcloud} "$@"')

    def vm(self, name="vm", **options):
        self.vms.append(StandIn(self.root / f"{name}{len(self.vms)}", name, self.public_key, **options))
        return self.vms[-1]

    def start(self, script, *args, env=None, root=ROOT, under=()):
        self.processes.append(subprocess.Popen(
            [*under, root / "deploy" / script, *map(str, args)], env={**self.env, **(env or {})}, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True))
        return self.processes[-1]

    def run(self, script, *args, status=0, env=None, root=ROOT, timeout_s=180):
        """Runs a script, asserts its exit status and returns its output."""
        process = self.start(script, *args, env=env, root=root)
        try:
            output = process.communicate(timeout=timeout_s)[0]
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        assert process.returncode == status, f"{script} ended with {process.returncode}, not {status}:\n{output}"
        return output


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch):
    """What a test writes need not outlive a power failure."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


@pytest.fixture(scope="session")
def warm(tmp_path_factory):
    """The path of a gcloud that has been imported already; one serves all tests of this process."""
    folder = tmp_path_factory.mktemp("gcloud")
    server = warm_gcloud.start(folder)
    yield folder / "gcloud"
    server.stdin.close()
    server.wait()
    server.stdout.close()


@pytest.fixture
def laptop(tmp_path_factory, warm):
    laptop = Laptop(tmp_path_factory.mktemp("laptop"), warm)  # short: the path of a socket has 107 bytes at most
    yield laptop
    for process in laptop.processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        process.stdout.close()
    for vm in laptop.vms:
        vm.erase()


@pytest.fixture
def cloud(laptop):
    """An emulated TPU API, which the laptop's gcloud is pointed at."""
    cloud = Cloud()
    laptop.env.update(cloud.env(laptop.home / "gcloud"))
    yield cloud
    cloud.close()


@pytest.fixture
def world(laptop):
    world = World(laptop)
    yield world
    world.cloud.close()


@pytest.fixture
def installed_gcloud(laptop):
    """The laptop's gcloud is the installed program itself, a new process for every call."""
    laptop.env["PATH"] = laptop.env["PATH"].replace(f"{laptop.gcloud.parent}:", "")


@pytest.fixture
def vm(laptop):
    """A VM with 8 chips, as setup.sh, push.sh and data.sh leave it."""
    return laptop.vm().prepare()


@pytest.fixture
def hook():
    """An HTTP server that keeps what is posted."""
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            server.posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.posted, server.url = [], f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def run(script, *words, root=ROOT, cwd=None, **environment):
    """Runs a script here, where there is no config.env, and returns what came of it."""
    environment = {**os.environ, "NANOCHAT_DEPLOY_CONFIG": "/nonexistent", **environment}
    return subprocess.run([root / "deploy" / script, *words], capture_output=True, text=True, env=environment, cwd=cwd,
                          timeout=300)


def train(laptop, vm, *flags, **options):
    """Starts a run and returns what train.sh prints."""
    return laptop.run("train.sh", vm.ip, "--min_free_gb=0", "--", *flags, **options)


def eventually(condition, timeout_s=60):
    """Waits until `condition()` is true and returns its value."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not true after {timeout_s} s: {inspect.getsource(condition).strip()}"
        time.sleep(0.05)
    return value
