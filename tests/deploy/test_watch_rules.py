"""The rules of watch.sh with a clock and a VM that are made up: what is done, in which order, and what is not done."""
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.lib.actions import Actions
from deploy.lib.calls import TIMED_OUT, Result
from deploy.lib.keeper import Keeper
from deploy.lib.settings import Settings
from deploy.lib.state import Books, Journal, Known
from deploy.lib.worker import MIRROR_BEHIND_S, End, Worker

HOUR = 3600
READY = {"state": "READY", "health": "HEALTHY", "zone": "us-west4-a", "id": "1", "created": "2026", "type": "v6e-4",
         "ips": "192.0.2.1", "spot": "True"}
RUNNING = {"state": "running", "run": "d16", "steps": "00100/00500", "log_age_s": "3", "checkpoint": "step_000100",
           "mirrored": "step_000100", "mirror_behind_s": "0", "checkpoint_bytes": "1000"}


class World:
    """Answers the calls of a worker and a keeper. A test changes `vm`, `run` and `fails`; `done` are the calls."""

    def __init__(self, folder):
        self.now, self.done, self.fails = 1_000_000.0, [], {}
        self.vm, self.run, self.copies = dict(READY), dict(RUNNING), 0
        self.settings = Settings(
            name="nano", type="v6e-4", zones=("us-west4-a",), spot=True, flags=("--run=d16",), verb_flags=(),
            has_bucket=False, max_usd=None, max_hours=100, usd_per_hour=2, margin_s=600, poll_s=60, patience=3,
            stall_s=1800, keep_vm=False, state=folder / "state", to=folder / "results", webhook="", price_api_key="",
            price_api="")
        self.settings.state.mkdir()
        self.journal = Journal(self.settings.state, "nano")
        self.known = Known(state="READY", id="1", zone="us-west4-a", ips="192.0.2.1", run="d16", bytes_per_s=1e6)

    def __call__(self, verb, limit_s, *flags):
        what = flags[0].removeprefix("--what=") if verb == "lib/look" else verb
        self.done.append(what)
        self.now += 5
        failure = self.fails.get(what)
        if callable(failure):
            failure = failure(flags)
        if failure == TIMED_OUT:
            self.now += limit_s
        if failure is not None:
            return Result(failure, f"error: {what} failed")
        return Result(0, getattr(self, f"answer_{what}")(flags))

    @staticmethod
    def lines(values):
        return "".join(f"{name}={value}\n" for name, value in values.items())

    def answer_vm(self, flags):
        return self.lines(self.vm) if self.vm else "state=absent\n"

    def answer_run(self, flags):
        return self.lines(self.run)

    def answer_rate(self, flags):
        return "20000000\n"

    def answer_create(self, flags):
        self.vm = dict(READY, id=str(int(self.known.id or 0) + 1))
        self.run = {"state": "none", "run": ""}
        return "nano is ready\n"

    def answer_train(self, flags):
        self.run = dict(RUNNING)
        return "step 00001/00500 | loss 5\n"

    def answer_stop_run(self, flags):
        self.run |= {"state": "ended", "exit": "75", "checkpoint": "step_000111"}
        return "run d16 ended\n"

    def answer_fetch(self, flags):
        if "--no_checkpoints" not in flags:
            (self.settings.to / "d16" / self.run["checkpoint"]).mkdir(parents=True, exist_ok=True)
        return "run d16 is here\n"

    def answer_delete(self, flags):
        if not self.vm:
            self.fails["delete"] = 3
        self.vm = None
        return "nano is deleted\n"

    answer_setup = answer_push = answer_logs = lambda self, flags: "\n"

    def pause(self, seconds):
        self.now += seconds

    @property
    def actions(self):
        return Actions(self.settings, self.known, self.journal, self, now=lambda: self.now)

    def worker(self):
        return Worker(self.settings, self.actions, self.pause, lambda: "2.00")

    def text(self):
        return self.journal.path.read_text()


@pytest.fixture
def world(tmp_path):
    world = World(tmp_path)
    world.fails["delete"] = lambda flags: None if world.vm else 3
    return world


def polls(worker, count):
    for _ in range(count):
        worker.poll()
        worker.pause(60)


def test_a_run_that_goes_on_is_left_alone_whatever_gcloud_says_of_its_vm(world):
    worker = world.worker()
    for health in ("UNHEALTHY_TENSORFLOW", "UNHEALTHY_MAINTENANCE", ""):
        world.vm["health"] = health
        polls(worker, 10)
    world.vm["health"] = "HEALTHY"
    world.fails["vm"] = 1
    polls(worker, 100)
    assert set(world.done) == {"vm", "run"} and world.text().count("unhealthy") == 3


def test_an_unhealthy_vm_whose_run_stands_still_is_stopped_and_fetched_before_it_is_deleted(world):
    world.vm["health"] = "UNHEALTHY_TENSORFLOW"
    world.run |= {"log_age_s": "5000"}
    polls(world.worker(), 3)
    assert [call for call in world.done if call not in ("vm", "run")] == ["stop_run", "fetch", "delete"]
    assert (world.settings.to / "d16/step_000111").is_dir()


@pytest.mark.parametrize("status", ["0", "2"])
def test_a_vm_is_not_deleted_while_the_newest_checkpoint_is_on_its_disk_alone(world, status):
    """Neither when the run has finished nor when the watch gives up."""
    world.run |= {"state": "ended", "exit": status, "checkpoint": "step_000200"}
    attempts = []
    world.fails["fetch"] = lambda flags: None if len(attempts) == 4 else attempts.append(flags) or 1
    worker = world.worker()
    with pytest.raises(End) as end:
        polls(worker, 10)
    assert end.value.status == (0 if status == "0" else 1)
    assert world.done.count("fetch") == 5 and "delete" not in world.done[:world.done.index("fetch") + 4]
    assert not any("--no_checkpoints" in flags for flags in attempts)
    assert "step_000200 is on its disk alone and could not be fetched" in world.text()


def test_a_checkpoint_that_the_mirror_has_is_not_fetched(world):
    world.run |= {"state": "ended", "exit": "0"}
    with pytest.raises(End):
        world.worker().poll()
    assert not (world.settings.to / "d16").exists() and "step_000100, is in the mirror" in world.text()


def test_a_silent_vm_is_kept_only_if_its_disk_alone_has_the_newest_checkpoint(world):
    worker = world.worker()
    world.run |= {"checkpoint": "step_000200"}
    polls(worker, 1)
    world.fails["run"] = 255
    polls(worker, 50)
    assert "delete" not in world.done and world.text().count("kept until the last of the budget") == 1
    del world.fails["run"]
    world.run |= {"mirrored": "step_000200"}
    polls(worker, 1)
    world.fails["run"] = 255
    polls(worker, 3)
    assert "delete" in world.done


def test_what_a_preemption_loses_is_said(world):
    worker = world.worker()
    world.run |= {"checkpoint": "step_000200"}
    polls(worker, 1)
    world.vm["state"] = "PREEMPTED"
    polls(worker, 1)
    assert "step_000200 was on the VM's disk alone and is lost; the mirror has step_000100" in world.text()


@pytest.mark.parametrize("change", [{"mirror_error": "403 may not write", "checkpoint": "step_000200"},
                                    {"mirror_behind_s": str(MIRROR_BEHIND_S), "checkpoint": "step_000200"}])
def test_a_mirror_that_falls_behind_is_reported_once_an_hour_until_it_has_caught_up(world, change, monkeypatch):
    monkeypatch.setattr("time.time", lambda: world.now)
    worker = world.worker()
    polls(worker, 2)
    assert "the mirror is behind" not in world.text() if world.journal.path.exists() else True
    world.run |= change
    polls(worker, 50)
    assert world.text().count("the mirror is behind: it has step_000100, the VM's disk alone has step_000200") == 1
    polls(worker, 50)
    assert world.text().count("the mirror is behind") == 2


def test_a_bucket_that_is_away_when_the_run_starts_costs_no_vm(world):
    world.run = {"state": "none", "run": ""}
    world.fails["train"] = 75
    worker = world.worker()
    polls(worker, 10)
    del world.fails["train"]
    polls(worker, 2)
    assert "delete" not in world.done and "giving up" not in world.text() and "run started" in world.text()


def test_a_vm_that_gcloud_overlooks_once_is_not_forgotten(world):
    worker = world.worker()
    polls(worker, 1)
    vm, world.vm = world.vm, None
    polls(worker, 1)
    assert world.known.id == "1" and "create" not in world.done
    world.vm = vm
    polls(worker, 1)
    world.vm = None
    polls(worker, 2)
    assert world.done.count("create") == 1


@pytest.mark.parametrize("state", ["absent", "unknown"])
def test_an_error_that_no_waiting_mends_ends_the_watch_in_its_own_words(world, state):
    world.known.forget_vm()
    world.vm = None if state == "absent" else {"state": "unknown", "error": "no zone us-wset4", "permanent": "1"}
    world.fails["create"] = 2
    with pytest.raises(End) as end:
        polls(world.worker(), 5)
    assert end.value.status == 1 and "delete" not in world.done
    assert ("create failed" if state == "absent" else "no zone us-wset4") in world.text()


def test_after_an_interrupted_creation_none_is_created_until_gcloud_has_said_three_times_that_there_is_none(world):
    world.known.forget_vm()
    world.vm, world.known.creating = None, True
    worker = world.worker()
    worker.settling = 3
    polls(worker, 3)
    assert "create" not in world.done
    world.vm = dict(READY)
    world.run = {"state": "none", "run": ""}
    polls(worker, 1)
    assert "create" not in world.done and "train" in world.done and not world.known.creating


def test_a_creation_is_known_before_it_begins_and_a_stockout_forgets_it(world):
    world.known.forget_vm()
    world.vm, seen = None, []

    def create(flags):
        seen.append((Known.load(world.settings.state / "known.json").creating, "creating nano" in world.text()))
        return 5

    world.fails["create"] = create
    worker = world.worker()
    polls(worker, 1)
    assert seen == [(True, True)] and not Known.load(world.settings.state / "known.json").creating


def test_of_two_vms_the_older_one_stays(world):
    world.settings = replace(world.settings, zones=("us-west4-a", "us-east5-b"))
    old, new = dict(READY, created="2026-11-21"), dict(READY, created="2026-11-22", zone="us-east5-b", id="7")
    deleted = []

    def vm(flags):
        zones = [flag for flag in flags if flag.startswith("--zones=")]
        world.vm = new if zones == ["--zones=us-east5-b"] else old

    world.fails |= {"vm": vm, "delete": deleted.append}
    world.worker().delete_twins()
    assert deleted == [("--yes", "--zones=us-east5-b")] and world.known.id == "1"


# ----------------------------------------------------------------------
# The budget


class Stuck:
    """A worker that does not end by itself."""
    pid = 2**22 + 1

    def __init__(self, world, ended=False):
        self.world, self.ended = world, ended

    def poll(self):
        return -9 if self.ended else None

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
    assert watch.books.spent_usd > 1 and "VM NOT DELETED, IT MAY STILL COST MONEY" in world.text()


def test_a_worker_that_dies_is_started_again(world, keeper):
    watch = keeper()
    workers = [Stuck(world, ended=True), Stuck(world, ended=True), Stuck(world)]
    watch.start_worker = iter(workers).__next__
    assert watch.run() == 7 and workers[2].ended
    assert world.text().count("the watch itself failed (status -9); it is started again") == 2


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


def test_a_vm_that_costs_nothing_never_ends_a_budget_of_money():
    books = Books(Path("/nonexistent/spent"), max_usd=10)
    books.counted_at = 0
    books.count(Known(state="READY"), 0.0, 1000 * HOUR)
    assert books.left_s(0.0) == float("inf") and books.elapsed_s == 1000 * HOUR
