"""No VM is forgotten: its project, zone and account are remembered, and it is deleted by what is known."""
import os
import subprocess

import pytest

pytestmark = pytest.mark.slow
PAGE_FOR = 'case "$*" in {}) echo "<html>Login</html>"; exit 0 ;; esac'  # the page of a proxy, instead of an answer
QUICK = ["--zones=us-a,us-b", "--poll_s=0.1"]


def test_another_project_and_config_env_change_neither_the_vms_of_a_watch_nor_their_end(world):
    watch = world.watch(run=("--num_iterations=30", "--step_s=0.2"))
    world.wait("run started")
    world.laptop.let_gcloud("export CLOUDSDK_CORE_PROJECT=q")  # as `gcloud config set project q` does, from now on
    (world.laptop.home / "config.env").write_text("ON_DEMAND=1\nUSD_PER_HUOR=2\n")
    world.end(watch, 0)
    assert len(world.booted) == 1 and not world.cloud.nodes
    assert not [request for request in world.cloud.requests if "/projects/q/" in request]


def test_a_vm_is_found_deleted_and_listed_where_it_was_created_and_not_in_the_present_project(laptop, cloud):
    laptop.run("create.sh", "nano", *QUICK)
    [memory] = (laptop.home / ".local/state/nanochat/vms").glob("*/*/nano")
    assert memory.relative_to(memory.parents[2]).parts == ("p", "us-a", "nano")
    assert memory.stat().st_mode & 0o077 == 0
    laptop.env["CLOUDSDK_CORE_PROJECT"] = "q"
    listed = laptop.run("list.sh")
    assert "may exist in project p" in listed and "delete.sh nano --project=p" in listed
    assert "may exist in us-a of project p" not in laptop.run("list.sh", "--project=p")
    refused = laptop.run("watch.sh", "nano", *QUICK[:1], "--project=q", "--max_hours=1", "--", "--run=a", status=2)
    assert "us-a of project p" in refused and "delete.sh nano --project=p" in refused
    laptop.run("delete.sh", "nano", "--yes")  # without --zones
    assert not cloud.nodes and not memory.exists()


def test_another_vm_that_has_the_name_of_one_that_is_gone_is_not_taken_for_it(laptop, cloud):
    look = ["lib/look.sh", "nano", *QUICK[:1], "--what=vm"]
    laptop.run("create.sh", "nano", *QUICK)
    assert "remembered=1\n" in laptop.run(*look)
    cloud.node("nano")["id"] = "5"
    assert "remembered=\n" in laptop.run(*look)
    assert "is not the one" in laptop.run("delete.sh", "nano", *QUICK[:1], "--yes", "--vm_id=1001", status=3)
    assert cloud.node("nano")


def test_status_finds_each_vm_in_its_own_project(laptop, cloud):
    laptop.run("create.sh", "nano", *QUICK)
    laptop.run("create.sh", "other", *QUICK, "--project=q")
    for name in ("nano", "other"):
        assert f"{name}  READY" in laptop.run("status.sh", name, *QUICK[:1], "--ssh_timeout_s=1", status=1)


def test_a_vm_is_reached_with_the_key_with_which_it_was_created(world):
    key, other = world.laptop.home / ".ssh/google_compute_engine", world.laptop.home / "another key"
    key.rename(other)
    key.with_suffix(".pub").rename(f"{other}.pub")
    world.laptop.run("create.sh", "nano", *QUICK, f"--ssh_key={other}")
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    assert "no run yet" in world.laptop.run("status.sh", "nano", *QUICK[:1])
    assert "may exist in project p" in world.laptop.run("list.sh", "--project=q")


def test_a_vm_is_deleted_by_what_is_known_and_not_before_gcloud_confirms_it(laptop, cloud):
    laptop.run("create.sh", "nano", *QUICK)
    laptop.let_gcloud(PAGE_FOR.format('*" delete "*'))
    assert "nano is NOT deleted: it is READY" in laptop.run("delete.sh", "nano", *QUICK[:1], "--yes", status=1)
    laptop.let_gcloud(PAGE_FOR.format("*describe*"))
    output = laptop.run("delete.sh", "nano", "--yes", status=4)
    assert "not yet confirmed" in output and not cloud.nodes
    (laptop.home / "bin/gcloud").unlink()
    [memory] = (laptop.home / ".local/state/nanochat/vms").glob("*/*/nano")
    os.utime(memory, (0, 0))
    laptop.run("delete.sh", "nano", "--yes", status=3)
    assert not memory.exists()


def test_no_vm_is_created_in_a_project_that_is_not_known(laptop, cloud):
    laptop.let_gcloud(PAGE_FOR.format("*config*"))
    assert "give --project" in laptop.run("create.sh", "nano", *QUICK, status=4) and not cloud.nodes
    (laptop.home / "bin/gcloud").unlink()
    laptop.env["CLOUDSDK_CORE_PROJECT"] = ""
    output = laptop.run("create.sh", "nano", *QUICK, status=2)
    assert output.splitlines() == [output.strip()] and "gcloud config set project" in output


def test_the_bucket_says_which_checkpoint_is_the_newest_whole_one(laptop, cloud):
    look = ["lib/look.sh", "nano", "--zones=us-a", "--project=p"]
    for name in ("step_000009/SHA256SUMS", "step_000010/SHA256SUMS", "step_000011/meta.json", "x/SHA256SUMS"):
        cloud.put("b", f"m/a/{name}", b"x")
    assert laptop.run(*look, "--what=mirror", "--bucket=gs://b/m/a") == "mirrored=step_000010\n"
    assert laptop.run(*look, "--what=mirror", "--bucket=gs://b/m/none") == "mirrored=\n"
