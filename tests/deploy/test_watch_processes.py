"""The processes below watch.sh: each has a limit, ends with all its children, and is found by whoever comes later."""
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from deploy import watch
from deploy.lib import calls, catalogue
from deploy.lib.calls import TIMED_OUT, Calls, Result, end_orphan
from deploy.lib.loop import Loop
from deploy.lib.state import Journal, State
from nanochat.common import BadInput
from nanochat.device import tpu
from tests.deploy.conftest import ROOT, eventually
from tests.deploy.made_up import World, replace
from tests.deploy.standin import StandIn

pytestmark = pytest.mark.slow
STUBBORN = """trap '' TERM
(trap '' TERM; echo "$BASHPID" >"$CHILD"; while :; do sleep 0.1; done) &
while :; do sleep 0.1; done
"""


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """Settings whose scripts are in a folder of the test: hang.sh ignores SIGTERM, and so does its child."""
    monkeypatch.setattr(calls, "DEPLOY", tmp_path)
    monkeypatch.setattr(calls.end_group, "__defaults__", (None, 0.3))  # patience
    monkeypatch.setenv("CHILD", str(tmp_path / "child"))
    monkeypatch.setenv("WATCH_WEBHOOK", "secret")
    monkeypatch.setenv("WATCH_WANDB_API_KEY", "key")
    scripts = {"hang": STUBBORN, "setup": 'echo "args $*"; env; exit 3', "push": "env", "delete": "env"}
    for name, text in scripts.items():
        StandIn.program(tmp_path / f"{name}.sh", text)
    yield replace(World(tmp_path).settings, passed_on=("--type=v6e-4",))
    for line in subprocess.check_output(["ps", "-A", "-ww", "-o", "pid=,command="], text=True).splitlines():
        if str(tmp_path) in line:
            os.kill(int(line.split()[0]), signal.SIGKILL)


def is_running(pid):
    try:
        return "State:\tZ" not in open(f"/proc/{pid}/status").read()
    except OSError:
        return False


def test_a_call_passes_settings_on_and_the_key_to_setup_only(settings):
    records = []
    call = Calls(settings, record=lambda *which: records.append(which))
    result = call("setup", 60, "--wait_s=9")
    assert [script for script, group in records] == ["setup.sh", ""] and records[0][1] > 0 == records[1][1]
    assert result.status == 3 and "args nano --type=v6e-4 --wait_s=9\n" in result.output
    assert result.fields["WANDB_API_KEY"] == "key" and "secret" not in result.output
    assert "WANDB_API_KEY" not in call("push", 60).fields
    assert call("delete", 60).fields["GCLOUD_S"] == "60" and "GCLOUD_S" not in call("push", 60).fields


def test_what_a_vm_writes_to_stderr_is_no_field_and_says_why_a_look_failed(settings, tmp_path):
    (tmp_path / "lib").mkdir()
    StandIn.program(tmp_path / "lib/look.sh", "echo state=running; echo checkpoint=step_9 >&2; exit 1")
    result = Calls(settings)("lib/look", 60)
    assert result.fields == {"state": "running"} and result.last_line == "checkpoint=step_9"
    assert result._replace(status=0).last_line == "state=running"
    assert {Result(0, "", "why\n").last_line, Result(1, "why\n", " \n").last_line} == {"why"}


def test_a_script_that_hangs_is_ended_with_its_children_though_they_ignore_sigterm(settings, tmp_path):
    result = Calls(settings)("hang", 4)
    assert result.status == TIMED_OUT and result.last_line == "hang.sh gave no answer for 4 s"
    assert not is_running((tmp_path / "child").read_text().strip())


def test_output_without_end_neither_fills_the_memory_nor_ends_the_watch(settings, tmp_path):
    StandIn.program(tmp_path / "push.sh", "exec tr '\\0' x </dev/zero")
    result = Calls(settings)("push", 100)
    assert result.status == TIMED_OUT and result.last_line == "push.sh printed without end"
    assert len(Result(1, "x" * 10**6).last_line) == 500


def test_an_answer_is_whole_though_the_log_has_no_room(settings, tmp_path):
    StandIn.program(tmp_path / "push.sh", "echo state=READY")
    (settings.state / "push.log").symlink_to("/dev/full")
    assert Calls(settings)("push", 20) == Result(0, "state=READY\n")


def test_a_process_that_cannot_be_killed_holds_nobody_up():
    """As one that waits for a broken disk."""
    class Stuck:
        def poll(self):
            return None

        def wait(self, timeout=None):
            assert timeout
            raise subprocess.TimeoutExpired("stuck", timeout)

    calls.end_group(2**22 + 1, Stuck())


def test_neither_a_full_disk_nor_the_locale_keeps_a_watch_from_beginning(settings, tmp_path):
    with open("/dev/full", "a+") as lock:
        assert watch.take(lock, settings)
    script = ("import pathlib, sys; from deploy.lib.state import replace_file; "
              "sys.exit(not replace_file(pathlib.Path(sys.argv[1]), '# \\u2026'))")
    subprocess.run([sys.executable, "-c", script, tmp_path / "config.env"], cwd=ROOT, check=True, env={
        "PATH": os.environ["PATH"], "LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"})
    assert (tmp_path / "config.env").read_bytes() == "# …".encode()


def test_a_script_that_cannot_be_started_is_an_answer_and_no_end_of_the_watch(settings):
    assert "gone.sh could not be started" in Calls(settings)("gone", 1).last_line


def test_a_script_that_a_killed_watch_left_behind_is_ended_and_another_process_is_not(
        settings, tmp_path, monkeypatch):
    journal, child = Journal(tmp_path, "nano"), tmp_path / "child"
    left_behind = subprocess.Popen([tmp_path / "hang.sh", "nano"], start_new_session=True)
    eventually(lambda: child.exists() and child.read_text())
    loop = Loop(settings, State(script="hang.sh", group=left_behind.pid), journal, {}, None)
    loop.end_orphan()
    assert not is_running(child.read_text().strip()) and not loop.state.group and "hang.sh" in journal.path.read_text()
    left_behind.wait()
    stranger = subprocess.Popen(["sh", "-c", "sleep 60; : an editor with nano.txt"], start_new_session=True)
    assert not end_orphan(settings, "hang.sh", stranger.pid) and stranger.poll() is None  # as after a reboot
    StandIn.program(tmp_path / "ps", "printf '1 \\377\\n'")
    with monkeypatch.context() as patch:
        patch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        assert not end_orphan(settings, "hang.sh", stranger.pid)  # with a command line in no known encoding
        patch.setenv("PATH", "")
        assert not end_orphan(settings, "hang.sh", stranger.pid)  # without ps
    os.killpg(stranger.pid, signal.SIGKILL)
    stranger.wait()


def test_the_webhook_gets_every_line_as_it_is(tmp_path, hook):
    journal = Journal(tmp_path, "nano", f"{hook.url}/secret")
    journal.note('a "quoted" \\ line\nand another')
    journal.close()
    assert hook.posted == [{"text": 'nano: a "quoted" \\ line and another'}]


def test_a_webhook_that_is_silent_does_not_hold_the_watch_up(tmp_path, hook, monkeypatch):
    silent = threading.Event()
    hook.process_request = lambda *_: silent.wait(20)  # it accepts and never answers
    monkeypatch.setattr(threading.Thread, "start", lambda thread: exec("raise RuntimeError"))
    Journal(tmp_path, "nano", hook.url).note("no process is left for the webhook")
    monkeypatch.undo()
    started = time.monotonic()
    Journal(tmp_path, "nano", hook.url).note("x")
    assert time.monotonic() - started < 10  # curl gives up after 10 s
    silent.set()


def test_a_zone_that_the_table_does_not_know_counts_at_the_dearest_price_and_that_is_said(tmp_path):
    said = []
    by_zone = catalogue.hourly_prices("v6e-4", ("us-a", "us-west1-c"), True, None, said.append)
    assert by_zone["us-a"] == 4 * tpu.chip_price("v6e-4", spot=True).usd_per_chip_hour > by_zone["us-west1-c"]
    assert said == [f"the price in us-a is not known: {by_zone['us-a']:.2f} USD an hour counts, the dearest of the "
                    "table"]
    assert catalogue.hourly_prices("v4-8", ("us-a",), True, None) is None
    with pytest.raises(BadInput):
        catalogue.hourly_prices("v9-8", ("us-a",), True, 1)


@pytest.mark.parametrize("flags, facts", [
    ("--usd_per_hour=0", "8 1 v2-alpha-tpuv5-lite 0.00"), ("--zones=us-west4-a", "8 1 v2-alpha-tpuv5-lite 2.04"),
    ("--zones=us-west4-a,us-east5-b", "8 1 v2-alpha-tpuv5-lite 4.80"),
    ("--zones=nowhere-1-a", "8 1 v2-alpha-tpuv5-lite 6.24"), ("", "8 1 v2-alpha-tpuv5-lite 6.24"),
    ("--zones=us-west4-b --on_demand", "8 1 v2-alpha-tpuv5-lite 9.60"),
    ("--type=v6e-16", "16 4 v2-alpha-tpuv6e 36.32"), ("--type=v4-32", "16 4 tpu-ubuntu2204-base ")])
def test_the_shell_knows_the_types_of_tpus_and_the_price_is_that_of_the_dearest_zone(flags, facts):
    script = '. deploy/lib/common.sh; parse "" "$@"; facts "$TYPE"; echo "$CHIPS $HOSTS $VERSION $USD"'
    result = subprocess.run(["bash", "-c", script, "x", *flags.split()], cwd=ROOT, capture_output=True, text=True, env={
        **os.environ, "NANOCHAT_DEPLOY_CONFIG": "/nonexistent"})
    assert (result.stdout, result.stderr) == (f"{facts}\n", "")
