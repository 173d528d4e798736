"""The budget of watch.sh with a clock and a VM that are made up."""
import shutil

import pytest

from deploy.lib.calls import TIMED_OUT, Result
from deploy.lib.loop import BudgetReached
from deploy.lib.settings import Settings
from deploy.lib.state import State, Vm
from tests.deploy.made_up import World, polls, replace

HOUR = 3600


@pytest.fixture
def world(tmp_path):
    """A budget of 1 USD, of which an hour of the VM costs 1."""
    world = World(tmp_path)
    world.fails["delete"] = lambda flags: None if world.vm else 3
    world.settings = replace(world.settings, max_usd=1, max_hours=None)
    world.price = 1.0
    return world


@pytest.mark.parametrize("failing", [
    {}, {"vm": 1}, {"vm": TIMED_OUT}, {"stop_run": TIMED_OUT}, {"stop_run": 1, "vm": 1},
])
def test_the_end_of_the_budget_saves_the_run_whatever_fails_and_stays_within_it(world, failing):
    world.fails |= failing
    assert world.loop().run() == 7
    assert world.vm is None
    newest = "step_000111" if "stop_run" not in failing else "step_000100"
    assert (world.settings.to / "d16" / newest).is_dir() or newest == world.run["mirrored"]
    assert 0.8 < world.state.spent_usd <= 1


def test_a_call_is_ended_when_the_budget_is_reached(world):
    """Whatever it waits for: here a setup that takes for ever."""
    world.run = {"state": "none", "run": ""}
    loop = world.loop()
    world.fails["setup"] = lambda flags: loop.wait(100 * HOUR)
    assert loop.run() == 7 and world.vm is None and 0.8 < world.state.spent_usd <= 1


def test_an_error_of_this_program_ends_neither_the_watch_nor_its_budget(world):
    errors = {"run": [ZeroDivisionError(), KeyError("x")], "stop_run": [ValueError("y")]}

    def fail(what):
        if errors[what]:
            raise errors[what].pop()

    world.fails |= {what: lambda flags, what=what: fail(what) for what in errors}
    assert world.loop().run() == 7 and world.vm is None and world.state.spent_usd <= 1
    assert "the watch itself failed (ZeroDivisionError()); it goes on after 10 s" in world.text()
    assert "KeyError" in world.text() and "ValueError" in world.text()


def test_an_error_that_nobody_can_be_told_and_one_of_the_look_delete_the_vm_nevertheless(world, monkeypatch):
    """The disk is full, and with it the file to which stderr goes."""
    monkeypatch.setattr("sys.stderr", open("/dev/full", "w", buffering=1))
    world.state.spent_usd = 5
    world.fails["vm"] = lambda flags: 1 / 0
    assert world.loop().run() == 7 and world.vm is None


def test_the_reserve_follows_from_the_size_of_the_checkpoint(world):
    world.settings = replace(world.settings, max_usd=5)
    world.run |= {"checkpoint_bytes": "4000000000", "mirrored": ""}
    polls(loop := world.loop(), 1)
    assert loop.reserve_s() == 600 + 1.25 * 800
    limits = []
    world.answer_fetch = lambda flags: (world.settings.to / "d16/step_000111").mkdir(parents=True) or "here\n"
    call = world.__call__
    loop.call = lambda verb, limit_s, *flags: limits.append((verb, limit_s)) or call(verb, limit_s, *flags)
    assert loop.run() == 7
    assert dict(limits)["fetch"] > 1.25 * 800 and dict(limits)["stop_run"] > 300


def test_the_reserve_has_no_copy_home_of_what_the_mirror_takes(world):
    """Else a run of a large model with a budget of hours would end at its first checkpoint."""
    world.settings = replace(world.settings, flags=("--run=d16", "--checkpoint_mirror=gs://b/x"))
    world.run |= {"checkpoint_bytes": "84000000000", "mirrored": "", "mirror_behind_s": "900"}
    polls(loop := world.loop(), 1)
    assert loop.reserve_s() == 600
    world.run["mirror_error"] = "403 the account may not write"
    with pytest.raises(BudgetReached):
        polls(loop, 1)
    assert loop.reserve_s() > 600 + 20000


def test_a_fetch_that_fails_is_repeated_until_the_last_of_the_budget_and_the_loss_is_said(world):
    world.run["mirrored"] = ""
    world.fails["fetch"] = 1
    assert world.loop().run() == 7 and world.done.count("fetch") > 3
    assert "LOST: step_000111 is on its disk alone" in world.text()
    assert world.vm is None and world.state.spent_usd <= 1


def test_a_deletion_that_fails_is_repeated_for_ever_and_counted(world):
    attempts = []
    world.fails["delete"] = lambda flags: None if world.vm and len(attempts) > 15 else (
        attempts.append(1) or 1) if world.vm else 3
    assert world.loop().run() == 7 and world.vm is None
    assert world.state.spent_usd > 1 and world.text().count("deleting the VM: each try waits for gcloud, up to") == 1
    assert "VM NOT DELETED, IT MAY STILL COST MONEY" in world.text()


def test_money_is_counted_for_every_interval_with_a_vm_at_either_end(tmp_path):
    state, now, budget = State(), 0, Settings(max_usd=10, max_hours=None)

    def after(hours):
        nonlocal now
        now += hours * HOUR
        state.count(2.0, now)
        return state.spent_usd

    assert after(5) == 0  # there was none
    state.creating = True
    assert after(1) == 0 and state.left_s(budget, 2.0) == 4 * HOUR  # perhaps there is one
    state.creating = False
    assert after(1) == 0 and state.left_s(budget, 2.0) == 5 * HOUR  # there was no capacity
    state.creating = True
    after(1)
    state.vm.state, state.creating = "READY", False
    assert after(1) == 4  # the creation counts, too
    state.vm.state = "absent"
    assert after(1) == 6
    state.save(tmp_path / "state.json")
    again = State.load(tmp_path / "state.json", now + HOUR)
    again.count(2.0, now + HOUR)
    assert again.spent_usd == 6


@pytest.mark.parametrize("away_s, existed, spent", [
    (HOUR, True, 6.5),  # nobody counted for an hour, in which the VM was there
    (-10**6, True, 0.5),  # the clock was set back
    (HOUR, False, 0.5),  # there was none, and nobody counted
])
def test_spending_is_counted_over_restarts_and_changes_of_the_clock(world, away_s, existed, spent):
    world.settings, world.price, path = replace(world.settings, max_usd=0.2), 6.0, world.settings.state / "state.json"
    State(counted_at=world.now - away_s, elapsed_s=100, spent_usd=0.5, existed=existed).save(path)
    world.state = State.load(path, world.now)
    assert world.loop().run() == 7 and world.vm is None
    assert State.load(path, world.now).spent_usd == pytest.approx(spent, abs=0.3)


def test_a_vm_that_costs_nothing_never_ends_a_budget_of_money():
    state = State(vm=Vm(state="READY"))
    state.count(0.0, 1000 * HOUR)
    assert state.left_s(Settings(max_usd=10, max_hours=None), 0.0) == float("inf") and state.elapsed_s == 1000 * HOUR


def test_a_vm_that_the_state_does_not_know_is_saved_before_it_is_deleted(world):
    world.state = State(counted_at=world.now, spent_usd=5)
    assert world.loop().run() == 7
    assert world.vm is None and world.done.index("stop_run") < world.done.index("delete")


@pytest.mark.parametrize("name, value", [("type", "v5litepod-4"), ("spot", "False"), ("remembered", "")])
@pytest.mark.parametrize("spent_usd", [0, 5])
def test_a_vm_of_another_kind_or_of_somebody_else_is_neither_counted_nor_used_nor_deleted(
        world, name, value, spent_usd):
    world.state, world.vm[name] = State(counted_at=world.now, spent_usd=spent_usd), value
    failures = [1] * bool(spent_usd)  # gcloud gives no answer when the budget ends
    world.fails["vm"] = lambda flags: failures.pop() if failures else None
    assert world.loop().run() == 2 and not {"delete", "stop_run", "setup"} & {*world.done}
    assert value or world.state.spent_usd == spent_usd and {*world.done} == {"vm"}


def test_a_vm_whose_creation_was_interrupted_is_ours_whatever_is_remembered(world):
    world.state, world.vm["remembered"] = State(counted_at=world.now, creating=True), ""
    polls(world.loop(), 3)
    assert world.state.vm.id == "1"


def test_a_vm_that_never_became_healthy_has_cost_money_and_one_that_was_never_there_has_not(world):
    for text, spent in (("nano in us-west4-a: CREATING ", 0), ("nano in us-west4-a: READY UNHEALTHY_TENSORFLOW", 0.25)):
        world.state, world.vm = State(counted_at=world.now), None
        loop = world.loop()

        def create(verb, limit_s, *flags, loop=loop, text=text):
            if verb != "create":
                return world(verb, limit_s, *flags)
            loop.wait(900)
            return Result(5, f"{text}\nerror: no VM in us-west4-a \n")

        loop.call = create
        polls(loop, 1)
        loop.count()
        assert world.state.spent_usd == pytest.approx(spent, abs=0.01) and not world.state.creating


def test_a_vm_that_an_interrupted_creation_may_have_made_counts_though_it_is_not_there(world):
    """The watch was killed while create.sh went on, and the VM may have deleted itself since."""
    world.state, world.vm = State(counted_at=world.now - HOUR, creating=True), None
    assert world.loop().run() == 7
    assert world.state.spent_usd == pytest.approx(1, abs=0.05) and not world.state.creating


def test_a_login_that_expired_before_the_creation_costs_nothing(world):
    world.state, world.vm, world.fails["create"] = State(counted_at=world.now), None, 4
    polls(world.loop(), 9)
    assert not world.state.creating and world.state.pending_usd == 0


def test_a_budget_of_which_nobody_knows_what_was_spent_is_over(world):
    path = world.settings.state / "state.json"
    path.write_text('{"spent_usd": 4')
    world.state = State.load(path, world.now)
    assert world.loop().run() == 7 and world.vm is None
    assert world.done.index("stop_run") < world.done.index("delete") and world.state.spent_usd < 0.2


@pytest.mark.parametrize("failing", ["run", "fetch"])
def test_one_lost_connection_at_the_end_of_the_budget_costs_neither_the_last_steps_nor_the_log(world, failing):
    world.settings = replace(world.settings, flags=("--run=d16", "--checkpoint_mirror=gs://b/x"))
    world.answer_stop_run = lambda flags: world.run.update(state="ended", exit="75") or "run d16 ended\n"
    world.state.spent_usd, failures = 5, [255]
    world.fails[failing] = lambda flags: failures.pop() if failures else None
    assert world.loop().run() == 7 and world.vm is None
    fetches = [index for index, what in enumerate(world.done) if what == "fetch"]
    assert len(fetches) == (2 if failing == "fetch" else 1) and world.done.index("stop_run") < fetches[-1]


def test_a_vm_that_answers_is_not_gone_whatever_gcloud_finds(world):
    answers = [3] * 6
    world.fails["delete"] = lambda flags: answers.pop() if answers else None if world.vm else 3
    assert world.loop().run() == 7 and world.vm is None
    assert "gcloud finds no VM, but it answers" in world.text()


def test_a_state_folder_that_somebody_deleted_stops_no_count(world):
    loop = world.loop()
    shutil.rmtree(world.settings.state)
    assert loop.run() == 7 and world.vm is None
    assert 0.8 < world.state.spent_usd <= 1
