"""Checks the parts of the report that need no compiler."""
from types import SimpleNamespace

import pytest

from nanochat.device import tpu
from nanochat.preflight.describe import describe_run
from nanochat.preflight.estimate import report_run
from nanochat.preflight.fit import find_batch, find_mesh
from nanochat.preflight.flags import PreflightFlags
from nanochat.preflight.report import advice, costs


@pytest.mark.parametrize("kernel, checkpointing, batch_size, chips, flags", [
    ("current", "none", 8, 8, ["--kernel=flash", "--activation_checkpointing=all", "--device_batch_size=4"]),
    ("flash", "all", 8, 1, ["--device_batch_size=4"]),
    ("flash", "all", 1, 8, ["the --mesh_fsdp that tpu_preflight --find_mesh finds"]),
    ("current", "all", 1, 8, ["--kernel=flash"]),  # it has no mesh
    ("flash", "all", 1, 1, ["a smaller model", "a TPU with more memory"])])
def test_the_advice_follows_from_the_flags(kernel, checkpointing, batch_size, chips, flags):
    assert advice({
        "kernel": kernel, "chips": chips, "out_of_memory": {"micro_step": {"memory": "hbm", "largest": []}},
        "flags": {"activation_checkpointing": checkpointing, "device_batch_size": batch_size, "mesh_fsdp": 1}}) == flags


def test_the_smallest_mesh_is_found_from_below(capsys):
    def try_mesh(fsdp):
        tried.append(fsdp)
        return 2**34 // fsdp if fsdp >= fits_from else None

    for fits_from, smallest, calls in ((4, 4, [1, 2, 4]), (1, 1, [1]), (16, None, [1, 2, 4, 8])):
        tried = []
        found = find_mesh(try_mesh, (1, 2, 4, 8))
        said = capsys.readouterr().out.splitlines()
        assert found["smallest"] == smallest and tried == calls == list(found["peak_bytes"])
        assert found["peak_bytes"][calls[-1]] == (2**34 // smallest if smallest else None)
        assert len(said) == len(calls) and ("does not fit" in said[0]) == (fits_from > 1)


@pytest.mark.parametrize("start, limit, largest, tried", [
    (1, 6, 4, [1, 2, 4, 8]), (8, 6, 4, [4, 8]), (64, 6, 4, [4, 8, 16, 32, 64]), (6, 11, 6, [6, 12]),
    (2, 0, None, [1, 2])])
def test_the_largest_batch_is_found_by_doubling_and_halving(start, limit, largest, tried):
    found = find_batch(lambda size: size * 2**30 if size <= limit else None, start)
    assert found["largest"] == largest and sorted(found["peak_bytes"]) == tried
    assert all((peak is None) == (size > limit) for size, peak in found["peak_bytes"].items())


def test_a_run_is_micro_steps_and_updates():
    """8 micro-steps of 0.1 s and an update of 0.1 s; 1000 tokens a step, of 197e9 FLOPs each."""
    programs = {name: {"name": name, "runs_per_step": runs, "estimated_s": 0.1, "low_s": 0.05, "high_s": 0.2}
                for name, runs in (("micro_step", 8), ("update", 1))}
    plan = SimpleNamespace(num_iterations=3600, stages=((0, 3600, "micro_step"),),
                           units=lambda first, last: 1000 * (last - first),
                           flops=lambda first, last: 1000 * 197e9 * (last - first))
    run = report_run(programs, plan, tpu.parse_accelerator("v5litepod-16"))
    assert (run["step_s"], run["step_low_s"], run["step_high_s"]) == pytest.approx((0.9, 0.45, 1.8))
    assert (run["tokens_per_s"], run["hours"]) == pytest.approx((1000 / 0.9, 0.9))
    assert run["mfu"] == pytest.approx(1 / 0.9 / 16)  # 197 TFLOP in 0.9 s on 16 chips of 197 TFLOP/s
    assert run["update_share"] == pytest.approx(1 / 9)


def test_a_price_that_is_not_known_stays_out():
    assert costs(10, PreflightFlags("v4-8")) == {"usd_spot": None, "usd_on_demand": None}
    assert costs(10, PreflightFlags("v6e-4", zone="us-east5-b"))["usd_spot"] == pytest.approx(43.2)
    run = {"step_s": 0.1, "step_low_s": 0.1, "step_high_s": 0.1, "tokens_per_s": 1, "mfu": 0.5, "update_share": 0.1,
           "hours": 1.0, "stages": {}}
    plan = {"total_batch_size": 1, "num_iterations": 3}
    known = {"usd_spot": 43.2, "usd_on_demand": None}
    assert describe_run(run | known, plan, "us-east5-b")[-1].endswith(" 3 steps, 43 USD on spot in us-east5-b")
    assert describe_run(run | {"usd_spot": None}, plan, None)[-1].endswith(" 3 steps")
