"""What hosts agree on: that they are alike, the checkpoint to resume, and the tick at which all ranks stop."""
import time
from contextlib import nullcontext

import numpy as np
import pytest

from nanochat.checkpoint import on_disk
from nanochat.checkpoint.mirror import Mirror
from nanochat.checkpoint.pieces import load_checkpoint
from nanochat.checkpoint.saver import save_checkpoint, save_lane_states
from nanochat.common import BadInput
from nanochat.record.metrics import METRICS_FILE
from nanochat.run.agreement import RankAgreement, Requests, agree_with_hosts
from nanochat.run.hosts import code_version, describe, require_alike
from nanochat.run.transfer import agree_on_checkpoint, send_lanes, serve_lanes
from nanochat.train.flags import Flags
from tests.checkpoint.states import make_meta, make_state, save
from tests.run.pods import joined_pods, on_all, wait_for_gradients


def test_hosts_that_differ_are_refused_with_both_values():
    same = describe(Flags(), "xla")
    require_alike(["w0", "w1"], [same, dict(same)], "advice")
    other = describe(Flags().replace(depth=4, data_dir="/data"), "xla") | {"torch": "1.0"}
    with pytest.raises(BadInput) as error:
        require_alike(["w0", "w1", "w2"], [same, same, other], "start the same command")
    assert str(error.value) == (f"the hosts differ: torch is {same['torch']} on w0 and 1.0 on w2; --data_dir is not "
                                "given on w0 and /data on w2; --depth is not given on w0 and 4 on w2: start the same "
                                "command")


def test_another_line_of_code_is_another_version(tmp_path):
    versions = []
    (tmp_path / "nanochat/run").mkdir(parents=True)
    for line in ("x = 1\n", "x = 1\n", "x = 2\n"):
        (tmp_path / "nanochat/run/a.py").write_text(line)
        versions.append(code_version(tmp_path))
    assert versions[0] == versions[1] != versions[2]


# Stopping


def run_ranks(num_hosts, folder, program, ranks):
    """Runs program(rank, its RankAgreement, the Requests of its host) for `ranks` ranks of each host, and returns their
    results in their order."""
    parents = [Requests(folder / f"requests_{index}", create=True) for index in range(num_hosts)]

    def run(rank):
        index = rank // ranks
        own = Requests(folder / f"requests_{index}")
        agreement = RankAgreement(own, rank, spans_hosts=num_hosts > 1)
        return program(rank, agreement, parents[index])

    with joined_pods(num_hosts) if num_hosts > 1 else nullcontext([]) as pods:
        for pod, parent in zip(pods, parents, strict=bool(pods)):
            agree_with_hosts(pod, parent)
        results = on_all(range(ranks * num_hosts), run)
    for found in results:
        if isinstance(found, Exception):
            raise found
    return results


@pytest.mark.parametrize("num_hosts, ranks, stopped", [(1, 8, 3), (3, 2, 0), (3, 2, 5)])
def test_ranks_that_run_at_their_own_pace_stop_at_the_same_tick(tmp_path, num_hosts, ranks, stopped):
    """Nothing synchronises the ranks, so one may be hundreds of ticks ahead of another. The stop is asked for on the
    first host or on the last."""
    def program(rank, agreement, parent):
        random = np.random.default_rng(rank)
        for tick in range(100_000):
            if rank == stopped and tick == 200:
                parent.ask_to_stop()
            if agreement.agreed_to_stop():
                return tick
            time.sleep(random.uniform(0, 0.0001) * (rank + 1))

    results = run_ranks(num_hosts, tmp_path, program, ranks)
    assert len(set(results)) == 1 and results[0] > 200


@pytest.mark.parametrize("num_hosts, ranks", [(1, 4), (2, 2)])
def test_ranks_that_wait_for_each_others_gradients_do_not_wait_for_each_others_answers(tmp_path, num_hosts, ranks):
    """A rank that has not seen the request yet may wait for one that has."""
    ticks = [0] * 4

    def program(rank, agreement, parent):
        random = np.random.default_rng(rank)
        for tick in range(1, 100_000):
            if agreement.agreed_to_stop():
                return tick
            wait_for_gradients(ticks, rank, tick, ahead=2, together=3)
            time.sleep(random.uniform(0, 0.001))
            if rank == 3 and tick == 300:
                parent.ask_to_stop(is_preempted=True)

    assert len(set(run_ranks(num_hosts, tmp_path, program, ranks))) == 1
    assert all(Requests(tmp_path / f"requests_{index}").is_preempted for index in range(num_hosts))


@pytest.mark.parametrize("num_hosts", [1, 2])
def test_a_stop_before_the_first_tick_stops_at_it_and_one_after_the_last_has_no_effect(tmp_path, num_hosts):
    def early(rank, agreement, parent):
        parent.ask_to_stop()
        time.sleep(0.3 * (rank % 2))
        while not agreement.agreed_to_stop():
            time.sleep(0.01)
        return agreement._tick

    assert len(set(run_ranks(num_hosts, tmp_path, early, 2))) == 1

    def late(rank, agreement, parent):
        stops = [agreement.agreed_to_stop() for _ in range(5)]
        if rank == 1:  # it has no further tick, but the others have
            agreement.finish()
            parent.ask_to_stop()
        else:
            time.sleep(0.3)
            stops += [agreement.agreed_to_stop()]
        agreement.finish()
        return stops

    assert not any(map(any, run_ranks(num_hosts, tmp_path, late, 2)))


def test_a_rank_waits_no_longer_than_its_limit_for_a_decision(tmp_path):
    requests = Requests(tmp_path / "requests", create=True)
    requests.hold()  # and then rank 0 dies
    with pytest.raises(TimeoutError, match="rank 1 waited 0.1 s for the decision"):
        RankAgreement(requests, 1, timeout_s=0.1).agreed_to_stop()


# Checkpoints


@pytest.fixture
def hosts(tmp_path):
    """The run's folder of each of three hosts."""
    directories = [tmp_path / f"w{index}" for index in range(3)]
    for directory in directories:
        directory.mkdir()
        (directory / METRICS_FILE).write_text("")
    return directories


@pytest.fixture
def mirror(tmp_path):
    return Mirror(str(tmp_path / "mirror"), keep=100)


def agree(pods, mirror, hosts):
    newest, _ = on_disk.latest_good(hosts[0])
    return on_all(pods, lambda pod: agree_on_checkpoint(pod, mirror, hosts[pod.host.index], newest, True))


def test_a_host_without_the_checkpoint_or_with_a_damaged_or_newer_one_gets_that_of_the_first(hosts, mirror):
    """The mirror lacks it, because the process before was killed."""
    for step in (100, 200):
        save(hosts[0], step)
    damaged = save(hosts[1], 200)
    (damaged / "model.safetensors").write_bytes(b"damaged")
    save(hosts[1], 100)
    save(hosts[1], 300)
    with joined_pods(3) as pods:
        found = agree(pods, mirror, hosts)
    assert found == [(directory / "step_000200", True) for directory in hosts]
    assert all(on_disk.find_problem(path) is None for path, _ in found)
    for directory in hosts[1:]:
        assert on_disk.list_checkpoints(directory) == [directory / "step_000200"]
    with joined_pods(3) as pods:  # now all have it, and nothing is fetched
        before = (hosts[2] / "step_000200").stat().st_mtime_ns
        assert agree(pods, mirror, hosts) == found and (hosts[2] / "step_000200").stat().st_mtime_ns == before


def test_a_run_whose_first_host_has_lost_its_checkpoints_is_refused(hosts, mirror):
    save(hosts[2], 100)
    with joined_pods(3) as pods:
        found = agree(pods, mirror, hosts)
    assert all(isinstance(error, BadInput) and "host w2 has step_000100 of this run, and host w0, whose disk counts, "
               "has no checkpoint" in str(error) for error in found)


def test_a_host_that_finds_another_checkpoint_in_its_mirror_or_none_is_refused(hosts, mirror, tmp_path):
    save(hosts[0], 100)
    mirrors = [mirror, Mirror(str(tmp_path / "empty"), 100), Mirror(str(tmp_path / "other"), 100)]
    other = save(tmp_path, 200).rename(tmp_path / "step_000100")
    mirrors[2].copy(other, hosts[0] / METRICS_FILE)
    with joined_pods(3) as pods:
        found = on_all(pods, lambda pod: agree_on_checkpoint(
            pod, mirrors[pod.host.index], hosts[pod.host.index], hosts[0] / "step_000100", False))
    assert found[0] == (hosts[0] / "step_000100", False)
    for error, place in zip(found[1:], mirrors[1:], strict=True):
        assert isinstance(error, BadInput) and f"{place.url} has another step_000100" in str(error)


def test_the_lanes_of_all_hosts_come_to_the_disk_of_the_first(hosts):
    with joined_pods(3) as pods:
        serve_lanes(pods[0], hosts[0])
        save_lane_states(hosts[0], 100, {0: {"rows": 100}, 3: {"rows": 103}})
        assert on_all(pods[1:], lambda pod: send_lanes(
            pod.link, 100, {lane: {"rows": 100 + lane} for lane in (pod.host.index, pod.host.index + 3)})) == [None] * 2
    path = save_checkpoint(hosts[0], *make_state(100), make_meta(100), num_lanes=6)
    assert load_checkpoint(path).lane_states == {lane: {"rows": 100 + lane if lane else 100} for lane in range(6)}
    assert not list(hosts[1].glob("step*")) and not list(hosts[2].glob("step*"))
