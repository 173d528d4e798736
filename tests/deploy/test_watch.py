"""watch.sh with the real gcloud and ssh, in an emulated cloud whose VMs are preempted, unhealthy or frozen."""
import os
import signal
import subprocess

import pytest

from deploy import watch
from tests.deploy import made_up
from tests.deploy.conftest import eventually


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
def test_a_crash_loop_ends_with_the_end_of_the_log_and_a_message(world, hook):
    with open(world.laptop.home / "config.env", "a") as config:
        config.write(f"WEBHOOK={hook.url}/secret\n")
    output = world.end(world.watch(run=("--num_iterations=9", "--crash_at=3")), 1)
    assert "(3 of 3)" in output and "RuntimeError: crash at step 3, as asked" in output
    assert "secret" not in output and any("giving up" in message["text"] for message in hook.posted)
    assert not world.cloud.nodes


@pytest.mark.slow
def test_the_watch_ends_the_budget_of_a_vm_that_may_not_delete_itself_and_says_so(world):
    world.cloud.permissions = []
    watch = world.watch(margin_s=75, max_usd=2, usd_per_hour=60, run=("--num_iterations=10000",))
    output = world.end(watch, 7)
    assert "warning: nano may not delete itself" in output and "VM deleted" in output and not world.cloud.nodes
    assert 0.2 < world.known().spent_usd < 2 and not world.known().vm.exists
    assert world.steps()[-1] == int(max(world.mirror.glob("step_*")).name[5:])


@pytest.mark.slow
def test_it_waits_for_capacity_and_starts_a_run_that_hangs_or_is_killed_again_on_the_same_vm(world):
    world.cloud.faults["us-a"] = ["stockout", "stockout"]
    watch = world.watch(stall_s=4, run=("--num_iterations=60", "--step_s=0.2", "--hang_at=12"))
    world.wait("no VM: error: no VM in us-a")
    assert "is watched by process" in world.end(world.watch(), 6)
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


def test_a_failure_of_watch_itself_is_reported(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(watch.Loop, "run", lambda loop: 1 / 0)
    assert watch.watch(made_up.World(tmp_path).settings, {"us-west4-a": 2.29}) == 70
    printed = capsys.readouterr().out
    assert "watch.sh failed: ZeroDivisionError" in printed and "nano (absent) is left as it is, at 2.29 USD" in printed
