"""watch.sh with the real gcloud and ssh, in an emulated cloud whose VMs are preempted, unhealthy or frozen."""
import http.server
import json
import os
import signal
import subprocess
import threading

import pytest

from deploy import watch
from deploy.lib.state import State
from tests.deploy.cloud import Cloud
from tests.deploy.conftest import eventually


class World:
    """An emulated cloud that boots stand-in VMs, and the watch.sh that is tested."""

    def __init__(self, laptop):
        self.laptop, self.booted = laptop, {}
        self.cloud = Cloud(self.boot, lambda node: [vm.kill() for key, vm in self.booted.items() if key[0] == node])
        laptop.env.update(self.cloud.env(laptop.home / "gcloud"))
        (laptop.home / "config.env").write_text("POLL_S=0.2 MIN_FREE_GB=0 ZONES=us-a\n")
        self.mirror = laptop.root / "mirror"
        self.state = laptop.home / ".local/state/nanochat/nano"
        self.vm_options = {"env": self.cloud.vm_env()}

    def boot(self, node, index):
        if (node, index) not in self.booted:
            self.booted[node, index] = vm = self.laptop.vm("nano", **self.vm_options)
            if script := self.cloud.startup_script(node):
                vm.start_up(script, self.cloud.vm_env())
        return self.booted[node, index].ip

    @property
    def vm(self):
        return list(self.booted.values())[-1]

    def watch(self, *flags, run=("--num_iterations=40",), env=None, under=(), **settings):
        """Starts watch.sh and returns its process. With --data_dir, train.sh does not look for parquet files."""
        settings = {"max_hours": 1, "margin_s": 30, "to": self.laptop.root / "results", **settings}
        settings = [f"--{name}={value}" for name, value in settings.items()]
        run = ["--run=d16", "--data_dir=x", "--save_every=5", f"--checkpoint_mirror={self.mirror}", *run]
        return self.laptop.start("watch.sh", "nano", *settings, *flags, "--", *run, env=env, under=under)

    def journal(self):
        path = self.state / "journal"
        return path.read_text() if path.exists() else ""

    def known(self):
        """Returns the State that watch.sh has written down."""
        return State.load(self.state / "state.json", 0)

    def wait(self, text, timeout_s=180):
        eventually(lambda: text in self.journal(), timeout_s)

    def end(self, process, status, timeout_s=240):
        output = process.communicate(timeout=timeout_s)[0]
        assert process.returncode == status, output
        return output

    def close(self):
        self.cloud.close()

    def steps(self, run="d16"):
        """Returns the steps that have a loss in the fetched metrics."""
        lines = (self.laptop.root / "results" / run / "metrics.jsonl").read_text().splitlines()
        return [record["step"] for record in map(json.loads, lines) if "loss" in record]


@pytest.fixture
def world(laptop):
    world = World(laptop)
    yield world
    world.close()


def test_a_preempted_vm_is_created_again_and_the_run_finishes_with_every_step_once(world):
    key = "deadbeef" * 5
    watch = world.watch(run=("--num_iterations=40", "--step_s=0.1"), env={"WANDB_API_KEY": key})
    world.wait("run started")
    eventually(lambda: (world.mirror / "step_000010").exists())
    world.cloud.node("nano")["state"] = "PREEMPTED"
    world.vm.kill()
    output = world.end(watch, 0)
    assert "PREEMPTED: creating the VM again" in output and "finished: step 00040/00040" in output
    assert len(world.booted) == 2 and not world.cloud.nodes
    assert world.steps() == list(range(1, 41))
    assert key in (world.vm.home / ".tpu_env").read_text()
    assert subprocess.run(["grep", "-r", key, world.state], capture_output=True).returncode == 1 and key not in output


@pytest.mark.slow
def test_expired_credentials_a_not_found_race_and_poor_health_make_no_second_vm(world):
    watch = world.watch(run=("--num_iterations=60", "--step_s=0.2"))
    world.wait("run started")
    world.cloud.broken = (401, "UNAUTHENTICATED", "Request had invalid authentication credentials.")
    world.wait("cannot tell the state of nano")
    world.cloud.broken = None
    world.cloud.hidden = 1  # the next question about the node is answered NOT_FOUND, though it is there
    world.cloud.node("nano")["health"] = "UNHEALTHY_TENSORFLOW"
    world.end(watch, 0)
    assert "gcloud finds no VM; it is asked again" in world.journal()
    assert "unhealthy: UNHEALTHY_TENSORFLOW, but the run goes on" in world.journal()
    assert len(world.booted) == 1 and world.journal().count("creating nano") == 1
    assert world.steps() == list(range(1, 61))


@pytest.mark.slow
def test_a_frozen_vm_is_created_again(world):
    with open(world.laptop.home / "config.env", "a") as config:
        config.write("SSH_TIMEOUT_S=3\n")
    watch = world.watch(patience=2, run=("--num_iterations=30", "--step_s=0.2"))
    world.wait("run started")
    world.vm.freeze()
    world.wait("trouble 2 times in a row")
    world.end(watch, 0)
    assert "(1 of 2)" in world.journal()
    assert len(world.booted) == 2 and world.steps() == list(range(1, 31))


@pytest.mark.slow
def test_a_crash_loop_ends_with_the_end_of_the_log_and_a_message(world):
    messages = []

    class Hook(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            messages.append(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["text"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Hook)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with open(world.laptop.home / "config.env", "a") as config:
        config.write(f"WEBHOOK=http://127.0.0.1:{server.server_port}/secret\n")
    output = world.end(world.watch(run=("--num_iterations=9", "--crash_at=3")), 1)
    server.shutdown()
    server.server_close()
    assert "(3 of 3)" in output and "RuntimeError: crash at step 3, as asked" in output
    assert "secret" not in output and any("giving up" in message for message in messages)
    assert not world.cloud.nodes


@pytest.mark.slow
def test_another_run_on_the_vm_is_neither_stopped_nor_mistaken_for_ours(world):
    world.laptop.run("create.sh", "nano")
    world.laptop.run("setup.sh", world.vm.ip)
    world.laptop.run("push.sh", world.vm.ip)
    world.laptop.run("train.sh", world.vm.ip, "--", "--run=old", "--data_dir=x", "--num_iterations=10000")
    watch = world.watch()
    world.wait("another run is running: old")
    world.laptop.run("stop_run.sh", world.vm.ip)
    world.end(watch, 0)
    assert world.steps() == list(range(1, 41))


@pytest.mark.slow
def test_the_watch_ends_the_budget_of_a_vm_that_may_not_delete_itself_and_says_so(world):
    world.cloud.permissions = []
    watch = world.watch(margin_s=75, max_usd=2, usd_per_hour=60, run=("--num_iterations=10000",))
    output = world.end(watch, 7)
    assert "warning: nano may not delete itself" in output and "VM deleted" in output and not world.cloud.nodes
    assert 0.2 < world.known().spent_usd < 2 and not world.known().vm.exists
    assert world.steps()[-1] == int(max(world.mirror.glob("step_*")).name[5:])


@pytest.mark.slow
def test_it_waits_for_capacity_and_a_second_watcher_is_refused(world):
    world.cloud.faults["us-a"] = ["stockout", "stockout"]
    watch = world.watch(run=("--num_iterations=9",))
    world.wait("no VM: error: no VM in us-a")
    assert "is watched by process" in world.end(world.watch(), 6)
    world.end(watch, 0)


@pytest.mark.slow
def test_a_run_that_hangs_or_is_killed_is_started_again_on_the_same_vm(world):
    watch = world.watch(stall_s=4, run=("--num_iterations=60", "--step_s=0.2", "--hang_at=12"))
    world.wait("run started")
    world.wait("the run hangs: no line in its log for")
    eventually(lambda: (world.mirror / "step_000020").exists(), 60)
    os.kill(world.vm.trainers()[0], signal.SIGKILL)
    world.end(watch, 0)
    assert "ended 137 at step" in world.journal() and "of 3)" in world.journal()
    assert len(world.booted) == 1 and world.steps() == list(range(1, 61))


@pytest.mark.slow
def test_a_pod_that_lost_the_run_on_one_vm_is_started_again_on_all(world):
    world.cloud.hosts["v5litepod-16"], world.vm_options = 2, {"chips": 4}
    watch = world.watch("--type=v5litepod-16", run=("--num_iterations=100", "--step_s=0.2"))  # outlasts a slow start
    world.wait("run started")
    first, second = world.booted.values()
    other = second.trainers()
    os.kill(first.trainers()[0], signal.SIGKILL)
    eventually(lambda: world.journal().count("run started") == 2, 60)
    assert len(first.trainers()) == 1 and second.trainers() not in ([], other)
    world.end(watch, 0)
    assert len(world.booted) == 2 and world.steps() == list(range(1, 101))


@pytest.mark.slow
def test_a_vm_of_another_type_or_price_or_machine_is_refused(world):
    world.laptop.run("create.sh", "nano", "--on_demand")
    assert "exists as v5litepod-8, spot: False" in world.end(world.watch(), 2)
    assert "exists as v5litepod-8" in world.end(world.watch("--on_demand", "--type=v5litepod-4"), 2)
    world.cloud.node("nano")["state"] = "STOPPED"
    assert "somebody stopped nano" in world.end(world.watch("--on_demand"), 1)
    [memory] = (world.laptop.home / ".local/state/nanochat/vms").glob("*/*/nano")
    memory.unlink()
    (world.state / "state.json").unlink()
    refused = world.end(world.watch("--on_demand"), 2)
    assert "nano exists, and was not created from this machine" in refused
    assert world.cloud.node("nano")


@pytest.mark.slow
def test_a_vm_that_is_being_created_when_the_budget_ends_is_deleted(world):
    world.cloud.faults["us-a"] = ["stuck"]
    world.end(world.watch(max_hours=0.012, margin_s=12), 7)
    assert any(request.startswith("POST") for request in world.cloud.requests) and not world.cloud.nodes


@pytest.mark.slow
def test_when_stopped_it_leaves_the_run_alone_says_what_still_costs_money_and_resumes_later(world):
    watch = world.watch(run=("--num_iterations=60", "--step_s=0.2"), under=["nohup"])
    world.wait("run started")
    watch.send_signal(signal.SIGHUP)  # the person logs out
    watch.terminate()
    assert "told to stop. nano (READY) is left as it is, at 6.24 USD an hour" in world.end(watch, 143)
    before = len(world.vm.metrics("d16"))
    eventually(lambda: len(world.vm.metrics("d16")) > before)
    world.end(world.watch(run=("--num_iterations=60", "--step_s=0.2")), 0)
    assert len(world.booted) == 1 and world.journal().count("run started") == 1
    assert world.steps() == list(range(1, 61))


@pytest.fixture
def settings(tmp_path, monkeypatch):
    flags = {"NAME": "nano", "TYPE": "v6e-4", "ZONES": "us-west1-c", "MARGIN_S": 600, "POLL_S": 1, "PATIENCE": 5,
             "STALL_S": 9, "TO": tmp_path}
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, value in flags.items():
        monkeypatch.setenv(f"WATCH_{name}", str(value))
    return watch.read_settings(["--run=d16"])


def test_a_failure_of_watch_itself_is_reported(settings, monkeypatch, capsys):
    monkeypatch.setattr(watch.Loop, "run", lambda loop: 1 / 0)
    assert watch.watch(settings, {"us-west1-c": 2.29}) == 70
    printed = capsys.readouterr().out
    assert "watch.sh failed: ZeroDivisionError" in printed and "nano (absent) is left as it is, at 2.29 USD" in printed
