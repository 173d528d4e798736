"""The rules of watch.sh with a clock and a VM that are made up: what is done, in which order, and what is not done."""
import shutil

import pytest

from deploy.lib.loop import End
from deploy.lib.rules import MIRROR_BEHIND_S, Seen, decide
from deploy.lib.state import State, Tries, Vm
from tests.deploy.made_up import READY, World, polls, replace


@pytest.fixture
def world(tmp_path):
    world = World(tmp_path)
    world.fails["delete"] = lambda flags: None if world.vm else 3
    return world


def test_the_vm_is_told_how_much_time_is_left_and_ends_the_run_itself(world):
    """As it must while this machine sleeps."""
    given = []
    world.fails["train"] = given.extend
    world.loop().start()
    assert "--max_hours=100.0000" in given[:given.index("--")]


def test_a_run_that_goes_on_is_left_alone_whatever_gcloud_says_of_its_vm(world):
    loop = world.loop()
    for health in ("UNHEALTHY_TENSORFLOW", "UNHEALTHY_MAINTENANCE", ""):
        world.vm["health"] = health
        polls(loop, 10)
    world.vm["health"] = "HEALTHY"
    world.fails["vm"] = 1
    polls(loop, 20)
    assert set(world.done) == {"vm", "run"} and world.text().count("unhealthy") == 3


def test_another_run_on_the_vm_is_neither_stopped_nor_mistaken_for_ours(world):
    world.run |= {"run": "old"}
    polls(loop := world.loop(), 3)
    assert set(world.done) == {"vm", "run"} and "another run is running: old" in world.text()
    world.run |= {"state": "ended", "exit": "1"}
    polls(loop, 1)
    assert world.done.count("train") == 1 and "stop_run" not in world.done


def test_a_vm_that_somebody_stopped_is_kept(world):
    world.settings = replace(world.settings, spot=False)
    world.vm |= {"state": "STOPPED", "spot": "False"}
    assert world.loop().run() == 1 and "somebody stopped nano" in world.text() and "delete" not in world.done


def test_an_unhealthy_vm_whose_run_stands_still_is_stopped_and_fetched_before_it_is_deleted(world):
    world.vm["health"] = "UNHEALTHY_TENSORFLOW"
    world.run |= {"log_age_s": "5000"}
    polls(world.loop(), 3)
    assert [call for call in world.done if call not in ("vm", "run")] == ["stop_run", "fetch", "delete"]
    assert (world.settings.to / "d16/step_000111").is_dir()


@pytest.mark.parametrize("status", ["0", "2"])
def test_a_vm_is_not_deleted_while_the_newest_checkpoint_is_on_its_disk_alone(world, status):
    """Neither when the run has finished nor when the watch gives up."""
    world.run |= {"state": "ended", "exit": status, "checkpoint": "step_000200"}
    attempts = []
    world.fails["fetch"] = lambda flags: None if len(attempts) == 4 else attempts.append(flags) or 1
    assert world.loop().run() == (0 if status == "0" else 1)
    assert world.done.count("fetch") == 5 and "delete" not in world.done[:world.done.index("fetch") + 4]
    assert not any("--no_checkpoints" in flags for flags in attempts)
    assert "step_000200 is on its disk alone and could not be fetched" in world.text()


def test_a_checkpoint_that_the_mirror_has_is_not_fetched_and_what_is_finished_makes_no_new_vm(world):
    world.run |= {"state": "ended", "exit": "0"}
    world.fails["delete"] = lambda flags: 1 / 0
    with pytest.raises(ZeroDivisionError):  # the watch is killed, and the deletion succeeds
        world.loop().poll()
    assert not (world.settings.to / "d16").exists() and "step_000100, is in the mirror" in world.text()
    world.vm, world.fails["delete"] = None, 3
    world.state = State.load(world.settings.state / "state.json", world.now)
    assert world.loop().run() == 0 and "create" not in world.done


@pytest.mark.parametrize("failing", ["run", "fetch"])
@pytest.mark.parametrize("times", [1, 100])
def test_metrics_and_log_are_fetched_again_after_a_lost_connection_but_not_for_ever(world, failing, times):
    world.run |= {"state": "ended", "exit": "0"}
    failures = [255] * times
    world.fails[failing] = lambda flags: failures.pop() if failures and len(world.done) > 2 else None
    assert world.loop().run() == 0 and world.vm is None
    assert world.done.count("fetch") == {("run", 1): 1, ("run", 100): 0, ("fetch", 1): 2, ("fetch", 100): 3}[
        failing, times]


def test_a_checkpoint_that_did_not_arrive_is_not_taken_for_fetched(world):
    world.run |= {"state": "ended", "exit": "0", "checkpoint": "step_000200"}
    world.answer_fetch = lambda flags: "run d16 is here\n"
    polls(world.loop(), 3)
    assert "delete" not in world.done and "step_000200 is on its disk alone" in world.text()


def test_a_vm_that_goes_while_it_is_kept_is_not_waited_for(world):
    world.run |= {"state": "ended", "exit": "2", "checkpoint": "step_000200"}

    def fetch(flags):
        world.vm["state"] = "PREEMPTED"
        return 1

    world.fails["fetch"] = fetch
    assert world.loop().run() == 1 and world.now < 1_010_000


def test_a_limit_that_could_not_be_set_is_set_later(world):
    world.state.vm.has_limit, world.fails["limit"] = False, 255
    loop = world.loop()
    polls(loop, 3)
    assert world.done.count("limit") == 3 and world.text().count("may not delete itself") == 1
    del world.fails["limit"]
    polls(loop, 3)
    assert world.done.count("limit") == 4 and world.state.vm.deletes_itself


def test_a_silent_vm_is_kept_only_if_its_disk_alone_has_the_newest_checkpoint(world):
    loop = world.loop()
    world.run |= {"checkpoint": "step_000200"}
    polls(loop, 1)
    world.fails["run"] = 255
    polls(loop, 50)
    assert "delete" not in world.done and world.text().count("kept until the last of the budget") == 1
    del world.fails["run"]
    world.run |= {"mirrored": "step_000200"}
    polls(loop, 1)
    world.fails["run"] = 255
    polls(loop, 3)
    assert "delete" in world.done


def test_what_a_preemption_loses_is_said(world):
    loop = world.loop()
    world.run |= {"checkpoint": "step_000200"}
    polls(loop, 1)
    world.vm["state"] = "PREEMPTED"
    polls(loop, 1)
    assert "step_000200 was on the VM's disk alone and is lost; the mirror has step_000100" in world.text()


@pytest.mark.parametrize("error, end", [("", "(1 of 3)\n"), ("OSError: no disk", "(1 of 3): OSError: no disk\n")])
def test_a_line_about_a_crash_ends_with_a_reason_or_with_nothing(world, error, end):
    world.run |= {"state": "killed", "error": error}
    polls(world.loop(), 1)
    assert f"the run killed at step 00100/00500 {end}" in world.text()


@pytest.mark.parametrize("in_bucket, is_lost", [("step_000300", False), ("step_000100", True), ("", True), ("x", True)])
def test_what_the_bucket_has_is_not_said_to_be_on_the_disk_alone(world, in_bucket, is_lost):
    world.settings = replace(world.settings, flags=("--run=d16", "--checkpoint_mirror", "gs://b/x"))
    loop = world.loop()
    world.run |= {"checkpoint": "step_000200"}
    polls(loop, 1)
    world.vm["state"], world.in_bucket = "PREEMPTED", in_bucket
    world.fails["run"] = 255
    assert bool(loop.rescue(100)) == is_lost
    polls(loop, 1)
    assert ("step_000200 was on the VM's disk alone and is lost" in world.text()) == is_lost


@pytest.mark.parametrize("change", [{"mirror_error": "403 may not write", "checkpoint": "step_000200"},
                                    {"mirror_behind_s": str(MIRROR_BEHIND_S), "checkpoint": "step_000200"}])
def test_a_mirror_that_falls_behind_is_reported_once_an_hour_until_it_has_caught_up(world, change, monkeypatch):
    monkeypatch.setattr("time.time", lambda: world.now)
    loop = world.loop()
    polls(loop, 2)
    assert "the mirror is behind" not in world.text() if world.journal.path.exists() else True
    world.run |= change
    polls(loop, 50)
    assert world.text().count("the mirror is behind: it has step_000100, the VM's disk alone has step_000200") == 1
    polls(loop, 50)
    assert world.text().count("the mirror is behind") == 2


def test_it_gives_up_after_three_vms_that_never_train(world):
    world.run = {"state": "none", "run": ""}
    world.fails["setup"] = 1
    assert world.loop().run() == 1 and world.done.count("create") == 2 and world.vm is None
    assert "giving up: the run did not start on any of three VMs" in world.text()


def test_a_bucket_that_is_away_when_the_run_starts_costs_no_vm(world):
    world.run = {"state": "none", "run": ""}
    world.fails["train"] = 75
    loop = world.loop()
    polls(loop, 10)
    del world.fails["train"]
    polls(loop, 2)
    assert "delete" not in world.done and "giving up" not in world.text() and "run started" in world.text()


def test_a_vm_that_gcloud_overlooks_once_is_not_forgotten(world):
    loop = world.loop()
    polls(loop, 1)
    vm, world.vm = world.vm, None
    polls(loop, 1)
    assert world.state.vm.id == "1" and "create" not in world.done and "it is asked again" in world.text()
    world.vm = vm
    polls(loop, 1)
    world.vm = None
    polls(loop, 2)
    assert world.done.count("create") == 1


def test_a_vm_that_answers_is_never_absent(world):
    world.answer_vm = lambda flags: "state=absent\n"
    loop = world.loop()
    for _ in range(5):
        loop.poll()
    assert set(world.done) == {"vm", "run"} and "gcloud finds no VM, but it answers" in world.text()


@pytest.mark.parametrize("state", ["absent", "unknown"])
def test_an_error_that_no_waiting_mends_ends_the_watch_in_its_own_words(world, state):
    world.state.vm = Vm()
    world.vm = None if state == "absent" else {"state": "unknown", "error": "no zone us-wset4", "permanent": "1"}
    world.fails["create"] = 2
    assert world.loop().run() == 1 and "delete" not in world.done
    assert ("create failed" if state == "absent" else "no zone us-wset4") in world.text()


@pytest.mark.parametrize("verb", ["setup", "train"])
def test_a_script_that_gcloud_refused_an_answer_does_not_end_the_watch_and_a_wrong_flag_does(world, verb):
    world.run = {"state": "none", "run": ""}
    world.fails |= {"vm": lambda flags: 1 if world.done.count("vm") in (2, 4) else None, verb: 2}
    loop = world.loop()
    polls(loop, 2)
    assert "delete" not in world.done and "(2 of 3)" in world.text()
    with pytest.raises(End):
        polls(loop, 1)
    assert "giving up" in world.text()


def test_after_an_interrupted_creation_none_is_created_until_gcloud_has_said_three_times_that_there_is_none(world):
    world.state.vm = Vm()
    world.vm, world.state.creating = None, True
    loop = world.loop()
    world.state.tries.settling = 3
    polls(loop, 3)
    assert "create" not in world.done
    world.vm = dict(READY)
    world.run = {"state": "none", "run": ""}
    polls(loop, 1)
    assert "create" not in world.done and "train" in world.done and not world.state.creating


def test_a_creation_is_known_before_it_begins_and_a_stockout_forgets_it(world):
    world.state.vm = Vm()
    world.vm, seen = None, []

    def create(flags):
        seen.append((State.load(world.settings.state / "state.json", 0).creating, "creating nano" in world.text()))
        return 5

    world.fails["create"] = create
    loop = world.loop()
    polls(loop, 1)
    assert seen == [(True, True)] and not State.load(world.settings.state / "state.json", 0).creating


def test_no_vm_is_created_that_cannot_be_written_down(world):
    world.state.vm = Vm()
    world.vm = None
    loop = world.loop()
    shutil.rmtree(world.settings.state)
    polls(loop, 5)
    assert "create" not in world.done and not world.state.creating
    world.settings.state.mkdir()
    polls(loop, 1)
    assert "create" in world.done


def test_what_is_done_follows_from_the_state_and_a_look_alone(world):
    crashed = Seen("READY", "HEALTHY", "v6e-4", run={"state": "killed", "run": "d16", "steps": "00007/00010"})
    state = State(vm=Vm("READY"), tries=Tries(crashes=1, furthest=7))
    first, again = (decide(world.settings, state, crashed) for _ in range(2))
    assert first == again and state.tries == Tries(crashes=1, furthest=7) and not world.done
    assert first[0] == Tries(crashes=2, furthest=7) and first[1][-1] == ("restart",)
    _, actions = decide(world.settings, State(tries=first[0]), crashed)
    assert actions[-1][0] == "give_up"
