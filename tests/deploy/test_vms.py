"""Creating, listing and deleting VMs with the real gcloud, in an emulated cloud."""
import subprocess

import pytest

from tests.deploy.conftest import eventually

pytestmark = pytest.mark.slow
ZONES = "--zones=us-a,us-b"
QUICK = ["--poll_s=0.1"]


@pytest.mark.slow
def test_create_makes_a_spot_vm_once_and_an_ssh_key_if_there_is_none(laptop, cloud):
    key = laptop.home / ".ssh/google_compute_engine.pub"
    subprocess.run(["rm", key, key.with_suffix("")], check=True)
    output = laptop.run("create.sh", "nano", ZONES, "--type=v6e-4", *QUICK)
    node = cloud.node("nano", "us-a")
    assert "9.08 USD an hour (the price in us-a is not known" in output and "is ready in us-a" in output
    assert node["acceleratorType"] == "v6e-4" and node["runtimeVersion"] == "v2-alpha-tpuv6e"
    assert node["schedulingConfig"]["spot"] is True
    assert key.read_text().strip() in node["metadata"]["ssh-keys"]
    assert "exists already: READY HEALTHY" in laptop.run("create.sh", "nano", "--zones=us-b,us-a", *QUICK, status=6)
    assert len(cloud.nodes) == 1


def test_create_tries_the_next_zone_after_a_stockout_or_without_quota_and_gives_up_with_status_5(laptop, cloud):
    cloud.faults = {"us-a": ["quota", "quota", "quota"], "us-b": ["stockout", "stockout"]}
    assert "no quota in any" in laptop.run("create.sh", "nano", "--zones=us-a", *QUICK, status=5)
    assert "no VM in us-a,us-b" in laptop.run("create.sh", "nano", ZONES, *QUICK, status=5)
    assert not cloud.nodes
    output = laptop.run("create.sh", "nano", f"{ZONES},us-c", *QUICK)
    assert "us-a: no quota" in output and "us-b: no capacity" in output and "is ready in us-c" in output


@pytest.mark.slow
def test_create_deletes_a_vm_that_does_not_become_healthy(laptop, cloud):
    cloud.faults = {"us-a": ["unhealthy"], "us-c": ["stuck"]}
    creations = {zone: laptop.start("create.sh", name, f"--zones={zone},us-b", *QUICK, "--wait_s=20")
                 for zone, name in (("us-a", "nano"), ("us-c", "other"))}
    for zone, creation in creations.items():
        output = creation.communicate(timeout=180)[0]
        assert "not ready and healthy after 20 s" in output and "is ready in us-b" in output
        name = "nano" if zone == "us-a" else "other"
        assert eventually(lambda name=name, zone=zone: not cloud.node(name, zone)) and cloud.node(name, "us-b")


def test_create_tries_no_other_zone_while_one_may_hold_a_vm(laptop, cloud, installed_gcloud):
    cloud.faults, cloud.undeletable = {"us-a": ["stuck"]}, 9
    output = laptop.run("create.sh", "nano", ZONES, *QUICK, "--wait_s=8", status=1)
    assert "nano may still exist in us-a, and cost" in output
    assert not cloud.node("nano", "us-b")


def test_a_gcloud_that_dies_silently_tells_nothing_about_the_vm(laptop):
    laptop.let_gcloud("exit 137")
    output = laptop.run("delete.sh", "nano", "--zones=us-a", "--yes", status=4)
    assert "cannot tell whether nano exists: us-a: gcloud failed and did not say why" in output
    laptop.let_gcloud("no-gcloud-here; exit 127")
    assert "no-gcloud-here: command not found" in laptop.run("delete.sh", "nano", "--zones=us-a", "--yes", status=2)


@pytest.mark.slow
def test_delete_asks_without_yes_and_counts_a_vanished_vm_as_deleted(laptop, cloud):
    laptop.run("create.sh", "nano", ZONES, *QUICK)
    assert "not deleted" in laptop.run("delete.sh", "nano", ZONES, status=1)
    assert cloud.node("nano")
    cloud.vanishing = True
    assert "nano is deleted" in laptop.run("delete.sh", "nano", ZONES, "--yes")
    laptop.run("delete.sh", "nano", ZONES, "--yes", status=3)


def test_a_vm_is_reached_by_its_name_even_after_it_was_created_again(laptop, cloud):
    """The second VM has the IP of the first, and another host key."""
    vm = laptop.vm("nano")
    cloud.boot = lambda node, index: vm.ip
    laptop.run("create.sh", "nano", "--zones=us-a", *QUICK)
    output = laptop.run("push.sh", "nano", "--zones=us-a")
    assert "~/nanochat is now" in output
    status = laptop.run("status.sh", "nano", "--zones=us-a")
    assert "READY HEALTHY  v5litepod-8 spot  us-a" in status and "no run yet" in status and "USD at 6.24" in status
    laptop.run("delete.sh", "nano", "--zones=us-a", "--yes")
    vm.kill()
    subprocess.run(["rm", vm.root / "host_key", vm.root / "host_key.pub"], check=True)
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", vm.root / "host_key"], check=True)
    vm.boot()
    laptop.run("create.sh", "nano", "--zones=us-a", *QUICK)
    assert "~/nanochat is now" in laptop.run("push.sh", "nano", "--zones=us-a")
