"""The exchange of gradients between slices, by hand, and what it adds to a run."""
from types import SimpleNamespace

import pytest

from nanochat.device import tpu
from nanochat.preflight import estimate, report
from nanochat.preflight.between_slices import describe, exchange

BILLION = 10**9


@pytest.mark.parametrize("accelerator, slices, gbps, sent, seconds", [
    ("v5litepod-16", 2, None, 1e9, 0.08),  # of 4 GB, a quarter in each host: half of it there, half of it back
    ("v5litepod-16", 4, None, 1.5e9, 0.12),  # three quarters, twice
    ("v5litepod-16", 2, 50, 1e9, 0.16),
    ("v5litepod-8", 2, None, 4e9, 0.16),  # one host, of 200 Gbit/s
    ("v6e-16", 2, None, 1e9, 0.02), ("v5p-32", 2, None, 1e9, 0.04), ("v4-32", 2, 80, 1e9, 0.1)])
def test_each_host_sends_its_part_of_the_gradients(accelerator, slices, gbps, sent, seconds):
    found = exchange(BILLION, slices, tpu.parse_accelerator(accelerator), gbps)
    assert found["gradient_bytes"] == 4 * BILLION
    assert (found["bytes_of_a_host"], found["seconds"]) == pytest.approx((sent, seconds))
    assert "base_train trains on one slice" in describe(found)[1]


def test_slices_share_a_batch_and_wait_for_the_exchange():
    """8 micro-steps of 0.1 s and an update of 0.1 s; 1000 tokens a step in each slice, of 197e9 FLOPs each."""
    programs = [SimpleNamespace(name=name, runs_per_step=runs, estimated_s=0.1, low_s=0.05, high_s=0.2)
                for name, runs in (("micro_step", 8), ("update", 1))]
    plan = SimpleNamespace(unit="tokens", num_iterations=3600, stages=((0, 3600, "micro_step"),),
                           units=lambda first, last: 1000 * (last - first),
                           flops=lambda first, last: 1000 * 197e9 * (last - first))
    pod = tpu.parse_accelerator("v5litepod-16")
    one = estimate.report_run(programs, plan, pod)
    assert (one["step_s"], one["tokens_per_s"], one["hours"]) == pytest.approx((0.9, 1000 / 0.9, 0.9))
    assert one["mfu"] == pytest.approx(1 / 0.9 / 16)  # 197 TFLOP in 0.9 s on 16 chips of 197 TFLOP/s
    three = estimate.report_run(programs, plan, pod, slices=3, between_s=0.1)
    assert (three["step_s"], three["step_low_s"], three["step_high_s"]) == pytest.approx((1.0, 0.55, 1.9))
    assert (three["tokens_per_s"], three["hours"], three["hours_of_last"]) == pytest.approx((3000, 1.0, 1.0))
    assert three["mfu"] == pytest.approx(1 / 16) and three["shares"]["update"] == pytest.approx(0.1)


def test_all_slices_are_paid_for():
    for slices, usd in ((1, 20), (3, 60)):
        request = report.Request("v6e-4", (), usd_per_chip_hour=0.5, slices=slices)
        assert report.costs(10, request)["usd_spot"] == usd
