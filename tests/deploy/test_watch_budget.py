"""The budget of watch.sh with a clock and a VM that are made up."""
import shutil
import subprocess
from dataclasses import replace

import pytest

from deploy.lib.calls import TIMED_OUT
from deploy.lib.keeper import Keeper
from deploy.lib.state import Books, Known
from tests.deploy.made_up import World, polls

HOUR = 3600


@pytest.fixture
def world(tmp_path):
    world = World(tmp_path)
    world.fails["delete"] = lambda flags: None if world.vm else 3
    return world


class Stuck:
    """A worker that does not end by itself."""
    pid = 2**22 + 1

    def __init__(self, world, status=-9, ended=False):
        self.world, self.status, self.ended = world, status, ended

    def poll(self):
        return self.status if self.ended else None

    def wait(self, timeout=None):
        if not self.ended:
            self.world.now += timeout
            raise subprocess.TimeoutExpired("worker", timeout)


@pytest.fixture
def keeper(world, monkeypatch):
    """Returns a function: it makes a Keeper with 1 USD, of which an hour of the VM costs 1."""
    def make():
        world.settings = replace(world.settings, max_usd=1, max_hours=None)
        books = Books(world.settings.state / "spent", max_usd=1)
        books.counted_at = world.now
        world.actions.save()
        world.stuck = Stuck(world)
        return Keeper(world.settings, world.actions, books, lambda zone: 1.0, lambda: world.stuck, world.pause,
                      lambda: world.now)

    monkeypatch.setattr("deploy.lib.keeper.end_group", lambda pid, worker, patience_s: setattr(worker, "ended", True))
    return make


@pytest.mark.parametrize("failing", [
    {}, {"vm": 1}, {"vm": TIMED_OUT}, {"stop_run": TIMED_OUT}, {"stop_run": 1, "vm": 1},
])
def test_the_end_of_the_budget_saves_the_run_whatever_fails_and_stays_within_it(world, keeper, failing):
    world.fails |= failing
    watch = keeper()
    assert watch.run() == 7
    assert world.stuck.ended and world.vm is None
    newest = "step_000111" if "stop_run" not in failing else "step_000100"
    assert (world.settings.to / "d16" / newest).is_dir() or newest == world.run["mirrored"]
    assert 0.8 < watch.books.spent_usd <= 1


def test_the_reserve_follows_from_the_size_of_the_checkpoint_and_the_measured_rate(world, keeper):
    world.run |= {"checkpoint_bytes": "4000000000", "mirrored": ""}
    world.known.bytes_per_s = 0
    world.fails["rate"] = 255
    polls(world.worker(), 1)
    assert not world.known.bytes_per_s
    del world.fails["rate"]
    polls(world.worker(), 1)  # measures 4 MB a second: 20 MB in 5 s
    assert world.known.bytes_per_s == 4e6
    assert world.actions.reserve_s() == 600 + 1.25 * 1000
    watch = keeper()
    limits = []
    world.answer_fetch = lambda flags: (world.settings.to / "d16/step_000111").mkdir(parents=True) or "here\n"
    call = world.__call__
    watch.actions.call = lambda verb, limit_s, *flags: limits.append((verb, limit_s)) or call(verb, limit_s, *flags)
    assert watch.run() == 7
    assert dict(limits)["fetch"] > 1.25 * 1000 and dict(limits)["stop_run"] > 300


def test_the_reserve_has_no_copy_home_of_what_the_mirror_takes(world):
    """Else a run of a large model with a budget of hours would end at its first checkpoint."""
    world.settings = replace(world.settings, flags=("--run=d16", "--checkpoint_mirror=gs://b/x"))
    world.run |= {"checkpoint_bytes": "84000000000", "mirrored": "", "mirror_behind_s": "900"}
    polls(worker := world.worker(), 1)
    assert worker.actions.reserve_s() == 600
    world.run["mirror_error"] = "403 the account may not write"
    polls(worker, 1)
    assert worker.actions.reserve_s() > 600 + 84000


def test_a_fetch_that_fails_is_repeated_until_the_last_of_the_budget_and_the_loss_is_said(world, keeper):
    world.run["mirrored"] = ""
    world.fails["fetch"] = 1
    watch = keeper()
    assert watch.run() == 7 and world.done.count("fetch") > 3
    assert "LOST: step_000111 is on its disk alone" in world.text()
    assert world.vm is None and watch.books.spent_usd <= 1


def test_a_deletion_that_fails_is_repeated_for_ever_and_counted(world, keeper):
    attempts = []
    world.fails["delete"] = lambda flags: None if world.vm and len(attempts) > 200 else (
        attempts.append(1) or 1) if world.vm else 3
    watch = keeper()
    assert watch.run() == 7 and world.vm is None
    assert watch.books.spent_usd > 1 and world.text().count("deleting the VM: each try waits for gcloud, up to") == 1
    assert "VM NOT DELETED, IT MAY STILL COST MONEY" in world.text()


def test_a_worker_that_dies_is_started_again(world, keeper):
    watch = keeper()
    workers = [Stuck(world, ended=True), Stuck(world, status=1, ended=True), Stuck(world)]
    watch.start_worker = iter(workers).__next__
    assert watch.run() == 7 and workers[2].ended
    assert "failed (status -9); it is started again" in world.text() and "failed (status 1); it" in world.text()


def test_money_is_counted_for_every_interval_with_a_vm_at_either_end(tmp_path):
    books, known = Books(tmp_path / "spent", max_usd=10), Known()
    books.counted_at = now = 0

    def after(hours):
        nonlocal now
        now += hours * HOUR
        books.count(known, 2.0, now)
        return books.spent_usd

    assert after(5) == 0  # there was none
    known.creating = True
    assert after(1) == 0 and books.left_s(2.0) == 4 * HOUR  # perhaps there is one
    known.creating = False
    assert after(1) == 0 and books.left_s(2.0) == 5 * HOUR  # there was no capacity
    known.creating = True
    after(1)
    known.state, known.creating = "READY", False
    assert after(1) == 4  # the creation counts, too
    known.state = "absent"
    assert after(1) == 6
    again = Books(tmp_path / "spent", max_usd=10)
    again.count(known, 2.0, now + HOUR)
    assert again.spent_usd == 6


def test_a_vm_that_costs_nothing_never_ends_a_budget_of_money(tmp_path):
    books = Books(tmp_path / "spent", max_usd=10)
    books.counted_at = 0
    books.count(Known(state="READY"), 0.0, 1000 * HOUR)
    assert books.left_s(0.0) == float("inf") and books.elapsed_s == 1000 * HOUR


def test_a_vm_that_the_state_does_not_know_is_saved_before_it_is_deleted(world, keeper):
    world.known.forget_vm()
    watch = keeper()
    watch.books.spent_usd = 5
    assert watch.run() == 7
    assert world.vm is None and world.done.index("stop_run") < world.done.index("delete")


def test_a_vm_that_answers_is_not_gone_whatever_gcloud_finds(world, keeper):
    answers = [3] * 6
    world.fails["delete"] = lambda flags: answers.pop() if answers else None if world.vm else 3
    assert keeper().run() == 7 and world.vm is None
    assert "gcloud finds no VM, but it answers" in world.text()


def test_a_state_folder_that_somebody_deleted_stops_no_count(world, keeper):
    watch = keeper()
    watch.read_known()
    shutil.rmtree(world.settings.state)
    assert watch.run() == 7 and world.vm is None
    assert 0.8 < watch.books.spent_usd <= 1


@pytest.mark.parametrize("deleted_after, spent", [(7, 7), ("", 10), (-1, 10), (99, 10), (10**12, 10)])
def test_a_vm_that_was_deleted_while_this_machine_slept_costs_nothing_after_its_deletion(
        world, keeper, deleted_after, spent):
    watch = keeper()
    watch.books.max_usd = 8
    world.actions.look_up()
    world.actions.save()
    watch.count()
    if deleted_after:
        world.deleted_at = int(world.now + deleted_after * HOUR)
    world.now += 10 * HOUR
    world.vm = None
    assert watch.run() == 7
    assert watch.books.spent_usd == pytest.approx(spent, abs=0.2)
    assert ("it has cost nothing since" in world.text()) == (spent == 7)
