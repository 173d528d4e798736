"""What a rank says to the watchdog, and when it learns that all ranks save or stop."""
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nanochat.device.ranks import Dist
from nanochat.run.agreement import Requests
from nanochat.run.watchdog import PHASES, Heartbeats
from nanochat.train.flags import RecordFlags
from nanochat.train.liveness import Liveness


@pytest.fixture
def run(tmp_path):
    run = SimpleNamespace(requests_file=tmp_path / "requests", heartbeats_file=tmp_path / "heartbeats",
                          flags=SimpleNamespace(record=RecordFlags(step_timeout_s=60.0, log_every=10)),
                          plan=SimpleNamespace(switches=(20,)))
    Requests(run.requests_file, create=True)
    Heartbeats(run.heartbeats_file, create=True)
    return run


@pytest.fixture
def liveness(run):
    return Liveness(run, Dist("cpu", torch.device("cpu")), first_step=5)


def beat(run):
    """Returns the phase and step of rank 0's last beat, and in how many seconds it must end."""
    _, phase, step, deadline = np.fromfile(run.heartbeats_file).reshape(-1, 4)[0]
    return PHASES[int(phase)], int(step), deadline - time.monotonic()


@pytest.mark.parametrize("step, phase", [(5, "compile"), (7, "compile"), (8, "step"), (20, "compile"), (21, "step")])
def test_first_steps_and_those_with_other_rows_may_compile(run, liveness, step, phase):
    liveness.beat("step", step)
    assert beat(run)[:2] == (phase, step)


def test_a_step_may_take_longer_where_all_do(run, liveness):
    liveness.beat("step", 8)
    assert beat(run)[2] == pytest.approx(60, abs=10)
    for seconds in (1, 1, 50):
        liveness.note_step_seconds(seconds)
    liveness.beat("step", 8)
    assert beat(run)[2] == pytest.approx(20 * 10 * 1, abs=10)


def test_a_request_to_stop_comes_at_the_next_tick(run, liveness):
    liveness.agree("step", 8)
    told = liveness.asked_from_now_on()
    Requests(run.requests_file).ask_to_stop()
    assert told() and not liveness.asked_from_now_on()()
    liveness.agree("evaluate", 9)
    assert not liveness.is_stopping
    liveness.agree("evaluate", 9)
    assert liveness.is_stopping and not liveness.is_preempted
    liveness.finish(10)
    assert beat(run)[:2] == ("end", 10)


def test_on_a_machine_that_ends_its_own_signal_is_no_reason_to_stop_saving(run, liveness):
    requests = Requests(run.requests_file)
    for is_preempted in (False, True):
        requests.ask_to_stop(is_preempted)
        told = liveness.begin_to_wait_for_mirror()
        assert requests.waits_for_mirror and not told()
        requests.ask_to_stop()
        assert told() == (not is_preempted)
    assert liveness.is_preempted
