"""A run that would take days on a CPU says so before it starts."""
import pytest

from nanochat.common import BadInput
from nanochat.train import describe
from nanochat.train.flags import parse_flags
from nanochat.train.plan import make_plan


def plan_of(*flags, device_type="cpu"):
    return make_plan(parse_flags([*flags], ""), 512, device_type, 1)


def test_a_run_of_more_than_a_day_on_a_cpu_asks_for_num_iterations(monkeypatch, capsys):
    monkeypatch.setattr(describe, "seconds_of_row", lambda config: 5.0)
    plan = plan_of("--depth=4", "--max_seq_len=256")
    days = 5.0 * plan.tokens(0, plan.num_iterations) / 256 / 86400
    assert days > 2
    with pytest.raises(BadInput, match=f"take about {days:,.0f} days on this CPU: for a first try add --num_it"):
        describe.require_time(plan, -1)
    describe.require_time(plan, plan.num_iterations)
    assert f"about {days:,.0f} days on this CPU; for a first try add" in capsys.readouterr().out


def test_a_short_run_and_a_run_on_a_tpu_say_nothing(monkeypatch, capsys):
    monkeypatch.setattr(describe, "seconds_of_row", None)  # it is not called
    describe.require_time(plan_of(*describe.FIRST_TRY.split(), "--depth=2"), 100)
    describe.require_time(plan_of("--depth=4", device_type="tpu"), -1)
    assert not capsys.readouterr().out


def test_a_row_is_timed_with_the_real_model():
    config = plan_of("--depth=2", "--model_dim=64", "--num_heads=2", "--max_seq_len=64").config
    assert 0 < describe.seconds_of_row(config) < 30
