"""Checks what preemptions are expected to cost against simulated runs."""
import math

import numpy as np
import pytest

from nanochat.preflight.flags import PreflightFlags
from nanochat.preflight.report import Preemptions, report_preemptions, save_every_s


def simulate(model, save_every_s, intervals, generator):
    """Returns the wall time over the training time of a run of so many intervals between checkpoints."""
    wall_s, until_preemption = 0.0, generator.exponential(86400 / model.per_day)
    pending = [save_every_s + model.held_s] * intervals
    while pending:
        if pending[-1] <= until_preemption:
            until_preemption -= pending[-1]
            wall_s += pending.pop()
            continue
        wall_s += until_preemption  # the interval is lost
        while True:  # restarting may be preempted, too
            until_preemption, needed_s = generator.exponential(86400 / model.per_day), model.restart_s + model.safe_s
            if needed_s <= until_preemption:
                break
            wall_s += until_preemption
        until_preemption -= needed_s
        wall_s += needed_s
    return wall_s / (save_every_s * intervals)


@pytest.mark.parametrize("per_day, restart_s, save_every_s", [(4, 600, 700), (24, 600, 3600), (100, 120, 60)])
def test_the_expected_slowdown_is_that_of_simulated_runs(per_day, restart_s, save_every_s):
    model = Preemptions(per_day, restart_s, held_s=6.0, safe_s=18.0)
    found = simulate(model, save_every_s, 40_000, np.random.default_rng(0))
    assert found == pytest.approx(model.slowdown(save_every_s), rel=0.02)


def test_no_other_time_between_checkpoints_is_much_better_than_the_best():
    model = Preemptions(per_day=24, restart_s=600, held_s=6.0, safe_s=18.0)
    best = model.slowdown(model.best_save_every_s())
    assert best < min(map(model.slowdown, np.geomspace(10, 10_000, 400))) * 1.001
    assert model.slowdown(10) > best and model.slowdown(10_000) > best


def test_a_run_that_is_preempted_before_every_checkpoint_never_ends():
    own = PreflightFlags("v5litepod-8", preemptions_per_day=1000, restart_minutes=10)
    found = report_preemptions(own, checkpoint_bytes=3.6e9, save_every_s=math.inf, hours=100_000)
    assert found["hours"] is found["usd_spot"] is None  # JSON has no infinity
    assert found["goodput"] == 0 and 0 < found["best_goodput"] < 0.1


def test_the_time_between_checkpoints_follows_from_the_flags():
    assert save_every_s({"save_every": 1000, "save_every_minutes": -1.0}, step_s=0.7) == pytest.approx(700)
    assert save_every_s({"save_every": 1000, "save_every_minutes": 5.0}, step_s=0.7) == 300
    assert save_every_s({"save_every": -1, "save_every_minutes": -1.0}, step_s=0.7) == math.inf
