"""watch.sh where something does not answer, is killed or refuses: nothing is lost, and no VM is forgotten."""
import pytest

from tests.deploy.conftest import ROOT, eventually, train


@pytest.mark.parametrize("fault", [None, *(pytest.param(fault, marks=pytest.mark.slow)
                                          for fault in ("quota", "stockout"))])
def test_create_does_not_delete_a_vm_that_gcloud_overlooked(world, fault):
    """Whatever the API says before it notices that the VM is there."""
    world.laptop.run("create.sh", "nano")
    node, world.cloud.hidden, world.cloud.faults["us-a"] = world.cloud.node("nano"), 1, [fault]
    output = world.laptop.run("create.sh", "nano", "--poll_s=3", status=6)
    assert "nano exists already in us-a" in output and world.cloud.node("nano") is node


def test_stop_run_waits_for_the_mirror_and_says_where_the_checkpoint_is(laptop, vm):
    mirror = laptop.root / "mirror"
    mirror.mkdir()
    (mirror / "refuses").touch()
    train(laptop, vm, "--run=a", "--num_iterations=10000", f"--checkpoint_mirror={mirror}")
    # The VM's own limit and two stop_run.sh send one signal together: a second would end the run's wait.
    vm.shell(f"cd {ROOT}/deploy/lib; . ./on_vm.sh; . ./limit.sh; set_limit 0 0 '' 0.2")
    for _ in range(2):
        output = laptop.run("stop_run.sh", vm.ip, "--wait_s=1", status=1)
        assert "has not ended after 1 s" in output
        eventually(lambda: (vm.run_dir("a") / "mirror.json").exists())  # a slow machine saves it after that second
    assert "on this disk alone" in output
    (mirror / "refuses").unlink()
    output = laptop.run("stop_run.sh", vm.ip)
    assert f"checkpoints/a/{max(mirror.glob('step_*')).name}, and in {mirror}" in output
    assert (vm.home / "nanochat.d/runs/a.exit").read_text() == "75\n"


@pytest.mark.slow
def test_the_budget_ends_in_time_though_gcloud_hangs(world):
    """The VM is asked itself; it is deleted as soon as gcloud answers again."""
    hang = world.laptop.home / "hang"
    world.laptop.let_gcloud(f"while [ -e {hang} ]; do sleep 0.2; done")
    (world.mirror / "refuses").touch()
    watch = world.watch(run=("--num_iterations=10000",), max_hours=0.04, margin_s=60, max_usd=1, usd_per_hour=20)
    world.wait("run started")
    world.wait("the mirror is behind")
    hang.touch()
    world.wait("gcloud does not answer; the VM is asked itself")
    world.wait("the newest checkpoint, step_")
    hang.unlink()
    world.end(watch, 7)
    newest = max((world.laptop.root / "results/d16").glob("step_*"))
    assert world.steps()[-1] == int(newest.name[5:]) and not world.cloud.nodes
    assert (newest / "model.safetensors").read_text() == f"weights of step {int(newest.name[5:])}"
    assert world.known().elapsed_s < 0.04 * 3600


@pytest.mark.slow
@pytest.mark.parametrize("is_older", [False, True])
def test_a_vm_whose_watch_was_killed_ends_the_budget_itself_and_the_next_watch_counts_it(world, is_older):
    """Also one that was created by hand, without a limit."""
    if is_older:
        world.laptop.run("create.sh", "nano")
    watch = world.watch(run=("--num_iterations=10000",), max_hours=0.025, margin_s=30)
    world.wait("run started")
    eventually(lambda: world.known().vm.deletes_itself)
    watch.kill()
    eventually(lambda: not world.cloud.nodes, 120)
    assert list(world.mirror.glob("step_*"))
    world.end(world.watch(run=("--num_iterations=10000",), max_hours=0.025, margin_s=30), 7)
    assert len(world.booted) == 1 and 0.01 * 3600 < world.known().elapsed_s


@pytest.mark.slow
def test_a_watch_that_is_killed_during_the_creation_makes_no_second_vm(world):
    world.cloud.held = True
    watch = world.watch(run=("--num_iterations=9",))
    eventually(lambda: any(request.startswith("POST") for request in world.cloud.requests), 60)
    watch.kill()
    watch.wait()
    watch = world.watch(run=("--num_iterations=9",))
    world.wait("a creation was interrupted")
    world.cloud.held = False
    output = world.end(watch, 0)
    assert len(world.booted) == 1 and not world.cloud.nodes, output
    assert "create.sh that an earlier watch.sh left behind is ended" in world.journal()
