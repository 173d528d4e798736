"""Pods, which are several VMs: a run starts on all of them or on none, and errors name the worker."""
import os
import signal

import pytest

from tests.deploy.conftest import ROOT, eventually

pytestmark = pytest.mark.slow
TRAIN = ["--min_free_gb=0", "--", "--run=a", "--synthetic_data=1", "--num_iterations=10000"]


@pytest.fixture
def pod(laptop):
    """Three VMs, of which the first knows the addresses of all."""
    vms = [laptop.vm(f"w{index}", chips=4) for index in range(3)]
    for vm in vms:
        (vm.home / ".tpu_env").write_text((ROOT / ".tpu_env.example").read_text())
    vms[0].all = ",".join(vm.ip for vm in vms)
    return vms


def test_every_worker_is_set_up_and_trains_and_stops(laptop, pod):
    hosts = pod[0].all
    laptop.run("push.sh", hosts, "--worker=1")
    assert [(vm.home / "nanochat").exists() for vm in pod] == [False, True, False]
    assert "--worker 3 does not exist: there are 3" in laptop.run("push.sh", hosts, "--worker=3", status=2)
    output = laptop.run("push.sh", hosts, "--worker=all") + laptop.run("setup.sh", hosts)
    for index in range(3):
        assert f"[worker {index}] w{index}: ~/nanochat is now" in output
        assert f"[worker {index}] w{index}: torch_xla sees 4 chips" in output
    laptop.run("train.sh", hosts, *TRAIN)
    assert all(vm.trainers() for vm in pod)
    assert "worker 1" in laptop.run("train.sh", hosts, *TRAIN, status=6)
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


def test_a_worker_that_cannot_start_or_ends_keeps_all_from_training_and_is_named(laptop, pod):
    for vm in pod:
        vm.prepare()
    (pod[1].home / ".tpu_env").rename(pod[1].home / "away")
    output = laptop.run("train.sh", pod[0].all, *TRAIN, status=1)
    assert "[worker 1] packages or ~/.tpu_env are missing" in output and f"worker 1 ({pod[1].ip}) failed" in output
    assert not any(vm.trainers() for vm in pod)

    (pod[1].home / "away").rename(pod[1].home / ".tpu_env")
    python = pod[2].home / "nanochat.d/venv/bin/python"
    pod[2].program(python, "exit 1")
    assert "not running everywhere: stopping it" in laptop.run("train.sh", pod[0].all, *TRAIN, status=1)
    assert not any(vm.trainers() for vm in pod)

    pod[2].program(python, "sleep 1; echo 'error: no disk' >&2; exit 2")  # while the first host waits for it
    output = laptop.run("train.sh", pod[0].all, *TRAIN, "--run=b", "--hang_at=1", status=2,
                        env={"LAST_WORDS_S": "1"})
    assert output.count("plan: run b") == 1
    assert "[worker 2] the run ended with status 2: error: no disk" in output
    assert "not running everywhere: stopping it" in output and not any(vm.trainers() for vm in pod)


def test_a_pod_is_reached_by_its_name_wherever_its_vms_are_now(laptop, pod, cloud):
    cloud.boot = lambda node, index: pod[index].ip
    cloud.hosts["v5litepod-16"] = 2
    zones = ["--zones=us-a", "--poll_s=0.1"]
    laptop.run("create.sh", "pod", "--type=v5litepod-16", *zones)
    laptop.run("push.sh", "pod", *zones)
    assert "[worker 1] w1: torch_xla sees 4 chips" in laptop.run("setup.sh", "pod", *zones)
    assert [(vm.home / "nanochat").exists() for vm in pod] == [True, True, False]
    pod[1].restart_with_another_ip()
    cloud.node("pod")["networkEndpoints"][1]["accessConfig"]["externalIp"] = pod[1].ip
    assert "[worker 1] w1: ~/nanochat is now" in laptop.run("push.sh", "pod", *zones)


def test_all_workers_check_at_the_same_time_and_the_first_tells(laptop, pod, tmp_path):
    for vm in pod:
        (vm.home / "nanochat").mkdir()
    output = laptop.run("check.sh", pod[0].all, "--to", tmp_path / "found", "--", "--depth=3", status=1,
                        env={"LAST_WORDS_S": "1"})
    for worker in ("", "[worker 1] ", "[worker 2] "):
        assert f"{worker}kernels: NOT as expected" in output.splitlines()
    assert (tmp_path / "found/check.toml").read_text() == "depth = 3"


def test_a_check_that_a_worker_or_ctrl_c_ends_leaves_nothing_running(laptop, pod, tmp_path):
    for vm in pod:
        (vm.home / "nanochat").mkdir()
    programs = [vm.home / "nanochat.d/venv/bin/python" for vm in pod]
    fake = programs[0].read_text()
    pod[0].program(programs[0], "touch ~/begun; exec sleep 1000")
    pod[1].program(programs[1], "echo 'error: no' >&2; exit 2")
    pod[2].program(programs[2], "sleep 2; exit 1")
    check = ("--to", tmp_path / "a", "--", "--depth=3")
    laptop.run("check.sh", pod[0].all, *check, status=2, env={"LAST_WORDS_S": "4"})
    (pod[0].home / "begun").unlink()
    process = laptop.start("check.sh", pod[0].ip, *check, under=("env", "--default-signal=INT"))
    eventually((pod[0].home / "begun").exists)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(60) == 130
    programs[0].write_text(fake)
    laptop.run("check.sh", pod[0].ip, *check, status=1)


def test_ctrl_c_ends_the_following_and_not_the_run(laptop, pod):
    for vm in pod:
        vm.prepare()
    following = laptop.start("train.sh", pod[0].all, *TRAIN, "--hang_at=1",
                             under=("env", "--default-signal=INT"))  # which a test in the background ignores
    eventually(lambda: "plan: run a" in following.stdout.readline())  # it follows what it has started
    eventually(lambda: all(vm.trainers() for vm in pod))
    os.killpg(following.pid, signal.SIGINT)
    assert following.wait(timeout=60) == 130
    eventually(lambda: "no longer following" in following.stdout.readline())
    assert all(vm.trainers() for vm in pod)
