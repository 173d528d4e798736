"""Hostile programs are contained, as root and as an ordinary user, and nothing of them is left running."""
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from nanochat.common import BadInput, Failure
from nanochat.judge import sandbox
from nanochat.judge.judge import Judge
from nanochat.judge.sandbox import MIB, Limits, Sandbox, need
from tests.deploy.conftest import eventually
from tests.judge.hostile import PROGRAMS, SOURCES, program

ROOT = Path(__file__).parents[2]
FILE_BYTES = 16 * MIB + os.getpid()  # by which the processes of these tests are known
# A machine short of memory may take two seconds to give a program 1024 MiB: so the limit is half of that.
LIMITS = Limits(cpu_s=2, wall_s=8, memory_bytes=512 * MIB, output_bytes=65536, file_bytes=FILE_BYTES)
COMPILER_LIMITS = Limits(cpu_s=5, wall_s=60, memory_bytes=1024 * MIB, output_bytes=32 * MIB, file_bytes=FILE_BYTES)


def require_sandbox():
    try:
        need("g++", "g++")
        Sandbox()
    except BadInput as error:
        pytest.skip(str(error))


def processes():
    """Returns the numbers of all processes of this machine that run under LIMITS or COMPILER_LIMITS, which every
    process inherits and none can raise."""
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if f" {LIMITS.file_bytes} " in (path / "limits").read_text():
                found.add(int(path.name))
        except OSError:  # it has ended
            continue
    return found


def attack(names, folder):
    """Runs hostile programs, and returns what is wrong, as lines."""
    wrong = []
    folder = Path(folder)
    (folder / "file").write_text("untouched")
    victim = subprocess.Popen(["sleep", "1000"])
    with socket.create_server(("127.0.0.1", 0)) as server, Judge(
            compiler_limits=COMPILER_LIMITS, program_limits=LIMITS) as judge:
        for name in names:
            if name in PROGRAMS:
                code = program(name, server.getsockname()[1], victim.pid, folder)
                verdict, expected = judge.judge(code), PROGRAMS[name][1]
            else:
                verdict, expected = judge.judge(SOURCES[name]), {"does not compile"}
            if verdict.status not in expected:
                wrong.append(f"{name}: {verdict.status} {verdict.message}")
            if left := processes():
                wrong.append(f"{name} left running: {left}")
    if victim.poll() is not None:
        wrong.append("another process was killed")
    victim.kill()
    victim.wait()
    if [path.name for path in folder.iterdir()] != ["file"] or (folder / "file").read_text() != "untouched":
        wrong.append("the folder was written to")
    return wrong


def test_programs_that_are_stopped_at_once_leave_nothing(tmp_path):
    require_sandbox()
    assert attack(["fork bomb", "network", "signal to the parent", "reads /etc"], tmp_path) == []


@pytest.mark.slow
def test_hostile_programs_are_contained(tmp_path):
    require_sandbox()
    assert attack([*PROGRAMS, *SOURCES], tmp_path) == []


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user runs the test before this one")
def test_hostile_programs_are_contained_when_an_ordinary_user_runs_them(tmp_path_factory):
    require_sandbox()
    as_user = ["setpriv", "--reuid=12345", "--regid=12345", "--clear-groups"]
    if subprocess.run([*as_user, "test", "-r", __file__]).returncode:
        pytest.skip(f"{ROOT} is closed to other users")
    folder = Path(f"/tmp/nanochat_user_{os.getpid()}")  # pytest's own folders are closed to other users
    folder.mkdir()
    os.chown(folder, 12345, 12345)
    call = ("import sys; from tests.judge.test_sandbox import attack, PROGRAMS, SOURCES; "
            "wrong = attack([*PROGRAMS, *list(SOURCES)[:3]], sys.argv[1]); print(wrong); sys.exit(bool(wrong))")
    try:
        done = subprocess.run([*as_user, sys.executable, "-c", call, str(folder)], cwd=ROOT, capture_output=True,
                              text=True, timeout=300,
                              env={**os.environ, "HOME": str(folder), "PYTHONDONTWRITEBYTECODE": "1"})
        assert done.returncode == 0, done.stdout + done.stderr
    finally:
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()


def test_a_program_ends_with_the_process_that_judges_it():
    require_sandbox()
    call = ("from nanochat.judge.sandbox import *; "
            f"Sandbox().run(['sleep', '1000'], Limits(5, 100, 2**30, 65536, file_bytes={FILE_BYTES}))")
    judging = subprocess.Popen([sys.executable, "-c", call], cwd=ROOT)
    eventually(processes)
    judging.kill()
    judging.wait()
    eventually(lambda: not processes())


def test_a_sandbox_that_fails_itself_is_told_from_its_program(monkeypatch):
    require_sandbox()
    box = Sandbox()
    assert box.run(["sh", "-c", "echo bwrap: x >&2; exit 1"], LIMITS).status == 1
    monkeypatch.setattr(sandbox, "FIRST_PROCESS", ["/nonexistent"])
    with pytest.raises(Failure, match="the sandbox failed: bwrap: execvp /nonexistent"):
        box.run(["true"], LIMITS)
    with pytest.raises(BadInput, match="makes no sandbox here: .*/nonexistent"):
        Sandbox()


def test_without_bubblewrap_the_error_says_how_to_install_it(monkeypatch, tmp_path):
    for name in ("prlimit", "setpriv", "g++"):
        (tmp_path / name).symlink_to(f"/usr/bin/{name}")
    monkeypatch.setenv("PATH", str(tmp_path))
    for missing in ("bwrap.*bubblewrap", r"g\+\+.*g\+\+"):
        with pytest.raises(BadInput, match=f"no {missing}"):
            Judge()
        (tmp_path / "g++").unlink(missing_ok=True)
