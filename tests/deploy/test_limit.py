"""The VM's own limit: nobody on the laptop does anything, and the VM is gone before its time is over."""
import time

import pytest

from tests.deploy.cloud import Failure
from tests.deploy.conftest import eventually
from tests.deploy.standin import StandIn

pytestmark = pytest.mark.slow
FLAGS = ["--zones=us-a", "--poll_s=0.2", "--max_hours=1"]
RESERVE, HALF, END = 3000, 3300, 3590  # seconds after the creation: the reserve begins, half of it is over, all is over


def start_run(world, *flags, script=()):
    """Starts a run that would go on for hours."""
    world.vm.prepare()
    world.laptop.run("train.sh", "nano", "--zones=us-a", "--min_free_gb=0", *script, "--", "--run=a",
                     "--num_iterations=100000", "--step_s=0.2", *flags)


def test_a_vm_with_a_limit_deletes_itself_though_its_first_requests_are_refused(world):
    output = world.laptop.run("create.sh", "nano", *FLAGS)
    assert "nano deletes itself before 1 hours are over" in output
    start_run(world, f"--checkpoint_mirror={world.mirror}")
    world.cloud.refusals = [429, 500, 503]
    world.vm.set_clock(RESERVE + 5)
    eventually(lambda: not world.vm.trainers() and list(world.mirror.glob("step_*")))
    assert world.cloud.node("nano") and len(world.cloud.refusals) == 3, "half of the reserve is the laptop's"
    world.vm.set_clock(HALF + 5)
    eventually(lambda: not world.cloud.nodes)
    assert not world.cloud.refusals


@pytest.mark.parametrize("case", ["reboot", "the startup script did not run"])
def test_a_limit_needs_no_run_outlives_a_reboot_and_is_there_without_the_startup_script(world, case):
    if case != "reboot":
        world.cloud.startup_script = lambda node: ""
    world.laptop.run("create.sh", "nano", *FLAGS)
    if case == "reboot":
        world.vm.kill()
        world.vm.boot()
        world.vm.start_up(world.cloud.startup_script(world.cloud.node("nano")["id"]), world.cloud.vm_env())
    world.vm.set_clock(END)
    eventually(lambda: not world.cloud.nodes)


def test_nothing_that_a_user_of_the_vm_wrote_keeps_it_from_deleting_itself(world):
    lines = ["exit 3", "sleep 100000", "(trap '' TERM; setsid sleep 100000) &\nfalse; x=$(<"]
    for creation in [world.laptop.start("create.sh", f"nano-{i}", *FLAGS) for i in range(len(lines))]:
        world.end(creation, 0)
    for line, vm in zip(lines, world.booted.values(), strict=True):
        (vm.home / ".tpu_env").write_text(f"{line}\n")
        (vm.home / "nanochat.d/runs").mkdir(parents=True, exist_ok=True)
        vm.set_clock(END)
    eventually(lambda: not world.cloud.nodes)


@pytest.mark.parametrize("away_s", [-7200, 7200])
def test_a_limit_counts_from_the_creation_and_by_the_clock_of_the_vm(world, away_s):
    # the laptop's clock is wrong by hours
    StandIn.program(world.laptop.home / "bin/date", f'exec /bin/date -d "{away_s} seconds" "$@"')
    created = time.time()
    world.laptop.run("create.sh", "nano", *FLAGS)
    end = int((world.vm.home / "nanochat.d/limit").read_text().partition("END=")[2].split()[0])
    assert created + 3590 < end < time.time() + 3600


def test_a_vm_that_may_not_delete_itself_says_so_at_its_creation_and_ends_its_run(world):
    world.cloud.permissions = []
    output = world.laptop.run("create.sh", "nano", *FLAGS)
    assert "warning: nano may not delete itself" in output and "delete.sh nano" in output
    start_run(world)
    world.vm.set_clock(END)
    log = world.vm.home / "nanochat.d/runs/a.log"
    eventually(lambda: "could not delete itself at its limit, and costs money: delete.sh nano" in log.read_text())
    assert not world.vm.trainers() and world.cloud.node("nano")


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
    assert "warning: nano may not delete itself" in world.laptop.run("create.sh", "nano", *FLAGS)


def test_the_newest_limit_counts_and_begins_with_no_run_of_its_own(world):
    world.laptop.run("create.sh", "nano", *FLAGS)
    start_run(world, script=["--max_hours=100"])
    world.vm.set_clock(END)
    time.sleep(2)  # ten times as long as between two looks at the clock
    assert world.vm.trainers() and world.cloud.node("nano")
