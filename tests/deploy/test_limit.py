"""The VM's own limit: nobody on the laptop does anything, and the VM is gone before its time is over."""
import time

import pytest

from tests.deploy.cloud import Failure
from tests.deploy.conftest import eventually
from tests.deploy.standin import StandIn
from tests.deploy.test_watch import World

HOURS = 0.012  # 43 s, of which the last half is the reserve
FLAGS = ["--zones=us-a", "--poll_s=0.2", f"--max_hours={HOURS}"]
SOON = [*FLAGS, "--max_hours=0.005"]  # where no run has to start before that


@pytest.fixture
def world(laptop):
    world = World(laptop)
    yield world
    world.close()


def start_run(world, *flags, script=()):
    """Starts a run that would go on for hours."""
    vm = world.vm
    vm.give_code()
    (vm.home / ".tpu_env").write_text("export PJRT_DEVICE=TPU\n")
    world.laptop.run("train.sh", "nano", "--zones=us-a", "--min_free_gb=0", *script, "--", "--run=a", "--data_dir=x",
                     "--num_iterations=100000", "--step_s=0.2", *flags)


def test_a_vm_with_a_limit_deletes_itself_though_its_first_requests_are_refused(world):
    world.cloud.refusals = [429, 500, 503]
    created = time.time()
    output = world.laptop.run("create.sh", "nano", *FLAGS)
    assert f"nano deletes itself before {HOURS} hours are over" in output
    start_run(world, f"--checkpoint_mirror={world.mirror}")
    eventually(lambda: not world.cloud.nodes, 120)
    assert not world.cloud.refusals and list(world.mirror.glob("step_*"))
    stopped = (world.mirror / "metrics.jsonl").stat().st_mtime
    assert created + 1800 * HOURS < stopped < created + 3600 * HOURS, "the run ended within the reserve"


def test_a_limit_outlives_a_reboot_and_needs_no_run(world):
    world.laptop.run("create.sh", "nano", *FLAGS)
    world.vm.kill()
    world.vm.boot()
    world.vm.start_up(world.cloud.startup_script(world.cloud.node("nano")["id"]), world.cloud.vm_env())
    eventually(lambda: not world.cloud.nodes, 120)


def test_nothing_that_a_user_of_the_vm_wrote_keeps_it_from_deleting_itself(world):
    lines = ["exit 3", "sleep 100000", "(trap '' TERM; setsid sleep 100000) &\nfalse; x=$(<"]
    boot = world.cloud.boot

    def boot_with_a_line(node, index):
        ip, line = boot(node, index), lines[len(world.booted) - 1]
        (world.vm.home / ".tpu_env").write_text(f"{line}\n")
        (world.vm.home / "nanochat.d/runs").mkdir(parents=True, exist_ok=True)
        return ip

    world.cloud.boot = boot_with_a_line
    for creation in [world.laptop.start("create.sh", f"nano-{i}", *SOON) for i in range(len(lines))]:
        world.end(creation, 0)
    eventually(lambda: not world.cloud.nodes, 120)


@pytest.mark.parametrize("away_s", [-7200, 7200])
def test_a_limit_counts_from_the_creation_and_by_the_clock_of_the_vm(world, away_s):
    # the laptop's clock is wrong by hours
    StandIn.program(world.laptop.home / "bin/date", f'exec /bin/date -d "{away_s} seconds" "$@"')
    created = time.time()
    world.laptop.run("create.sh", "nano", *SOON)
    eventually(lambda: not world.cloud.nodes, 120)
    assert time.time() > created + 1800 * 0.005


def test_a_vm_whose_startup_script_did_not_run_has_its_limit_nevertheless(world):
    world.cloud.startup_script = lambda node: ""
    world.laptop.run("create.sh", "nano", *SOON)
    eventually(lambda: not world.cloud.nodes, 120)


def test_a_vm_that_may_not_delete_itself_says_so_at_its_creation_and_ends_its_run(world):
    world.cloud.permissions = []
    output = world.laptop.run("create.sh", "nano", *FLAGS)
    assert "warning: nano may not delete itself" in output and "delete.sh nano" in output
    start_run(world)
    eventually(lambda: not world.vm.trainers(), 120)
    log = world.vm.home / "nanochat.d/runs/a.log"
    eventually(lambda: "could not delete itself at its limit, and costs money: delete.sh nano" in log.read_text(), 120)
    assert world.cloud.node("nano")


@pytest.mark.parametrize("refusal", ["an API that is off", "a page"])
def test_a_vm_that_cannot_find_out_whether_it_may_delete_itself_says_so(world, refusal):
    answer = world.cloud.handle

    def handle(method, path, *rest):
        if "testIam" not in path:
            return answer(method, path, *rest)
        if refusal == "a page":
            return {}, b"<html>Login</html>"
        raise Failure(403, "PERMISSION_DENIED", "Cloud Resource Manager API has not been used: tpu.nodes.delete")

    world.cloud.handle = handle
    assert "warning: nano may not delete itself" in world.laptop.run("create.sh", "nano", *FLAGS, "--max_hours=1")


def test_the_newest_limit_counts_and_begins_with_no_run_of_its_own(world):
    world.laptop.run("create.sh", "nano", *FLAGS[:-1], "--max_hours=0.01")
    created = time.time()
    start_run(world, script=["--max_hours=100"])
    eventually(lambda: time.time() > created + 3600 * 0.01 + 3)
    assert world.vm.trainers() and world.cloud.node("nano")
