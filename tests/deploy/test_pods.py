"""Pods, which are several VMs: a run starts on all of them or on none, and errors name the worker."""
import os
import signal

import pytest

from tests.deploy.cloud import Cloud
from tests.deploy.conftest import ROOT, eventually


@pytest.fixture
def pod(laptop):
    vms = [laptop.vm(f"w{index}", chips=4) for index in range(3)]
    for vm in vms:
        (vm.home / ".tpu_env").write_text((ROOT / ".tpu_env.example").read_text())
    vms[0].all = ",".join(vm.ip for vm in vms)
    return vms


def test_every_worker_is_set_up_and_trains_and_stops(laptop, pod):
    hosts = pod[0].all
    output = laptop.run("push.sh", hosts, "--worker=all") + laptop.run("setup.sh", hosts)
    for index in range(3):
        assert f"[worker {index}] w{index}: ~/nanochat is now" in output
        assert f"[worker {index}] w{index}: torch_xla sees 4 chips" in output
    train = ["train.sh", hosts, "--min_free_gb=0", "--", "--run=a", "--synthetic_data=1", "--num_iterations=10000"]
    laptop.run(*train)
    assert all(vm.trainers() for vm in pod)
    assert "worker 1" in laptop.run(*train, status=6)
    assert "step" in laptop.run("status.sh", pod[1].ip)
    shown = laptop.run("status.sh", hosts)
    assert shown.count("  step ") == 1 and all(f"  worker {index} ({pod[index].ip})  a running" in shown
                                               for index in (1, 2))
    assert "worker" not in laptop.run("status.sh", hosts, "--worker=1")
    output = laptop.run("stop_run.sh", hosts)
    assert "[worker 2] run a ended with status 75" in output
    assert not any(vm.trainers() for vm in pod)
    log = laptop.run("logs.sh", hosts, "--worker=all", status=75)
    assert all(f"[worker {index}] run a ended with status 75" in log for index in range(3))
    assert all(line.startswith("[worker ") for line in log.splitlines() if "step" in line) and "step" in log


def test_a_worker_that_cannot_start_keeps_all_from_starting(laptop, pod):
    laptop.run("push.sh", pod[0].all)
    (pod[1].home / ".tpu_env").unlink()
    train = ["train.sh", pod[0].all, "--min_free_gb=0", "--", "--run=a", "--synthetic_data=1", "--num_iterations=10000"]
    output = laptop.run(*train, status=1)
    assert "[worker 1] packages or ~/.tpu_env are missing" in output and f"worker 1 ({pod[1].ip}) failed" in output
    assert not any(vm.trainers() for vm in pod)


def test_a_worker_that_fails_at_once_stops_the_others(laptop, pod):
    laptop.run("push.sh", pod[0].all)
    (pod[2].home / "nanochat.d/venv/bin/python").write_text("#!/bin/sh\nexit 1\n")
    train = ["train.sh", pod[0].all, "--min_free_gb=0", "--", "--run=a", "--synthetic_data=1", "--num_iterations=10000"]
    assert "not running everywhere: stopping it" in laptop.run(*train, status=1)
    assert not any(vm.trainers() for vm in pod)


def test_a_worker_that_ends_while_the_first_waits_for_it_is_named_and_stops_the_others(laptop, pod):
    """As a host does whose program ends before it has joined the first one."""
    laptop.run("push.sh", pod[0].all)
    pod[2].program(pod[2].home / "nanochat.d/venv/bin/python", "sleep 1; echo 'error: no disk' >&2; exit 2")
    output = laptop.run("train.sh", pod[0].all, "--min_free_gb=0", "--", "--run=a", "--synthetic_data=1",
                        "--hang_at=1", status=2, env={"LAST_WORDS_S": "1"}, timeout_s=60)
    assert output.count("plan: run a") == 1
    assert "[worker 2] the run ended with status 2: error: no disk" in output
    assert "not running everywhere: stopping it" in output and not any(vm.trainers() for vm in pod)


def test_one_worker_alone(laptop, pod):
    laptop.run("push.sh", pod[0].all, "--worker=1")
    assert [(vm.home / "nanochat").exists() for vm in pod] == [False, True, False]
    assert "--worker 3 does not exist: there are 3" in laptop.run("push.sh", pod[0].all, "--worker=3", status=2)


def test_a_pod_is_reached_by_its_name_wherever_its_vms_are_now(laptop, pod):
    cloud = Cloud(boot=lambda node, index: pod[index].ip)
    cloud.hosts["v5litepod-16"] = 2
    laptop.env.update(cloud.env(laptop.home / "gcloud"))
    zones = ["--zones=us-a", "--poll_s=0.1"]
    laptop.run("create.sh", "pod", "--type=v5litepod-16", *zones)
    laptop.run("push.sh", "pod", *zones)
    assert "[worker 1] w1: torch_xla sees 4 chips" in laptop.run("setup.sh", "pod", *zones)
    assert [(vm.home / "nanochat").exists() for vm in pod] == [True, True, False]
    pod[1].restart_with_another_ip()
    cloud.node("pod")["networkEndpoints"][1]["accessConfig"]["externalIp"] = pod[1].ip
    assert "[worker 1] w1: ~/nanochat is now" in laptop.run("push.sh", "pod", *zones)
    cloud.close()


def test_ctrl_c_ends_the_following_and_not_the_run(laptop, pod):
    laptop.run("push.sh", pod[0].all)
    following = laptop.start("train.sh", pod[0].all, "--min_free_gb=0", "--", "--run=a", "--synthetic_data=1",
                             "--num_iterations=100000", "--hang_at=1",
                             under=("env", "--default-signal=INT"))  # which a test in the background ignores
    eventually(lambda: "plan: run a" in following.stdout.readline())  # it follows what it has started
    eventually(lambda: all(vm.trainers() for vm in pod))
    os.killpg(following.pid, signal.SIGINT)
    assert following.wait(timeout=60) == 130
    eventually(lambda: "no longer following" in following.stdout.readline())
    assert all(vm.trainers() for vm in pod)
