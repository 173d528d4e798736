"""The babysitter: real gcloud, ssh and scripts against a small cloud whose VMs are preempted, sick, frozen, full."""
import http.server
import json
import threading

import pytest

from tests.deploy.cloud import Cloud
from tests.deploy.conftest import eventually


class World:
    """A cloud that boots stand-in VMs, and one watch.sh at a time."""

    def __init__(self, laptop):
        self.laptop, self.booted = laptop, {}
        self.cloud = Cloud(self.boot, lambda node: self.booted[node].kill() if node in self.booted else None)
        laptop.env.update(self.cloud.env(laptop.home / "gcloud"))
        (laptop.home / "config.env").write_text("POLL_S=1 MIN_FREE_GB=0 ZONES=us-a BACKOFF_S=1\n")
        self.mirror = laptop.root / "mirror"
        self.state = laptop.home / "state"
        self.vm_options = {}

    def boot(self, node, index):
        if node not in self.booted:
            self.booted[node] = self.laptop.vm("nano", **self.vm_options)
        return self.booted[node].ip

    @property
    def vm(self):
        return list(self.booted.values())[-1]

    def watch(self, *flags, run=("--num_iterations=40",), **settings):
        """Starts watch.sh; data_dir is named so that no data is asked for."""
        settings = {"state": self.state, "to": self.laptop.root / "results", **settings}
        settings = [f"--{name}={value}" for name, value in settings.items()]
        run = ["--run=d16", "--data_dir=x", "--save_every=5", f"--checkpoint_mirror={self.mirror}", *run]
        return self.laptop.start("watch.sh", "nano", *settings, *flags, "--", *run)

    def journal(self):
        path = self.state / "journal"
        return path.read_text() if path.exists() else ""

    def wait(self, text, timeout_s=90):
        eventually(lambda: text in self.journal(), timeout_s)

    def end(self, process, status, timeout_s=90):
        output = process.communicate(timeout=timeout_s)[0]
        assert process.returncode == status, output
        return output

    def steps(self, run="d16"):
        """The steps that have a loss in the metrics that were fetched."""
        lines = (self.laptop.root / "results" / run / "metrics.jsonl").read_text().splitlines()
        return [record["step"] for record in map(json.loads, lines) if "loss" in record]


@pytest.fixture
def world(laptop):
    world = World(laptop)
    yield world
    world.cloud.close()


def test_a_preempted_vm_is_made_again_and_the_run_finishes_with_every_step_once(world):
    watch = world.watch(run=("--num_iterations=40", "--step_s=0.2"))
    world.wait("run started")
    eventually(lambda: (world.mirror / "step_000010").exists())
    world.cloud.node("nano")["state"] = "PREEMPTED"
    world.vm.kill()
    output = world.end(watch, 0)
    assert "PREEMPTED: making the VM again" in output and "finished: step 00040/00040" in output
    assert len(world.booted) == 2 and not world.cloud.nodes
    assert world.steps() == list(range(1, 41))


@pytest.mark.slow
def test_expired_credentials_and_a_not_found_race_make_no_second_vm(world):
    watch = world.watch(run=("--num_iterations=60", "--step_s=0.2"))
    world.wait("run started")
    world.cloud.broken = (401, "UNAUTHENTICATED", "Request had invalid authentication credentials.")
    world.wait("cannot tell what nano is doing")
    world.cloud.broken = None
    world.cloud.hidden = 1  # the next question about the node is answered NOT_FOUND, though it is there
    world.end(watch, 0)
    assert "no VM (status 6)" in world.journal()
    assert len(world.booted) == 1 and world.steps() == list(range(1, 61))


@pytest.mark.slow
def test_a_frozen_vm_is_made_again(world):
    with open(world.laptop.home / "config.env", "a") as config:
        config.write("SSH_TIMEOUT_S=2\n")
    watch = world.watch(patience=2, run=("--num_iterations=60", "--step_s=0.2"))
    world.wait("run started")
    world.vm.freeze()
    world.wait("trouble 2 times in a row")
    world.end(watch, 0)
    assert "(1 of 2)" in world.journal()
    assert len(world.booted) == 2 and world.steps() == list(range(1, 61))


@pytest.mark.slow
def test_an_unhealthy_vm_is_made_again(world):
    watch = world.watch(patience=2, run=("--num_iterations=60", "--step_s=0.2"))
    world.wait("run started")
    world.cloud.node("nano")["health"] = "UNHEALTHY_TENSORFLOW"
    world.end(watch, 0)
    assert "sick: UNHEALTHY_TENSORFLOW" in world.journal()
    assert len(world.booted) == 2 and world.steps() == list(range(1, 61))


@pytest.mark.slow
def test_a_crash_loop_ends_with_the_tail_of_the_log_and_a_message(world):
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
def test_wrong_flags_of_the_run_are_not_tried_again(world):
    assert "does not accept its flags" in world.end(world.watch(run=("--bad_input=1",)), 1)
    assert len(world.booted) == 1 and not world.cloud.nodes


@pytest.mark.slow
def test_another_run_on_the_vm_is_neither_stopped_nor_taken_for_ours(world):
    world.laptop.run("create.sh", "nano")
    world.laptop.run("setup.sh", world.vm.ip)
    world.laptop.run("push.sh", world.vm.ip)
    world.laptop.run("train.sh", world.vm.ip, "--", "--run=old", "--data_dir=x", "--num_iterations=10000")
    watch = world.watch()
    world.wait("another run is going: old")
    world.laptop.run("stop_run.sh", world.vm.ip)
    world.end(watch, 0)
    assert world.steps() == list(range(1, 41))


@pytest.mark.slow
def test_the_budget_ends_the_run_with_a_checkpoint_and_deletes_the_vm(world):
    watch = world.watch("--keep_vm", margin_s=30, max_usd=1, usd_per_hour=60, run=("--num_iterations=10000",))
    output = world.end(watch, 7)
    assert "VM deleted" in output and not world.cloud.nodes
    spent = float((world.state / "spent").read_text().split()[2])
    assert 0.2 < spent < 1
    assert world.steps()[-1] == int(max(world.mirror.glob("step_*")).name[5:])


@pytest.mark.slow
def test_it_waits_for_capacity_and_a_second_watcher_is_refused(world):
    world.cloud.faults["us-a"] = ["stockout", "stockout"]
    watch = world.watch(run=("--num_iterations=9",))
    world.wait("no VM: error: no VM in us-a")
    assert "is watched by process" in world.end(world.watch(), 6)
    world.end(watch, 0)
