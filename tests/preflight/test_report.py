"""Checks the parts of the report that need no compiler."""
from types import SimpleNamespace

import pytest

from nanochat.device import tpu
from nanochat.preflight.describe import describe_cost
from nanochat.preflight.estimate import report_run
from nanochat.preflight.fit import find_batch, find_mesh
from nanochat.preflight.flags import PreflightFlags
from nanochat.preflight.language import name_buffer_of_gpt
from nanochat.preflight.report import advice, costs

CONFIG = SimpleNamespace(vocab_size=65536, n_embd=1024, n_head=8, n_layer=16)


@pytest.mark.parametrize("shape, what", [
    ("f32[65536,1024]", "embedding or head"), ("bf16[4,512,65536]", "logits"),
    ("f32[4,8,512,512]", "attention scores"), ("f32[32,512,512]", "attention scores"),
    ("bf16[4,512,4096]", "activations"), ("bf16[16,4,512,1024]", "activations of all layers"),
    ("bf16[16,3,100]", "stacked weights"), ("f32[7,3]", ""), ("f32[]", "")])
def test_large_buffers_are_named_by_their_shape(shape, what):
    assert name_buffer_of_gpt(shape, CONFIG, batch_size=4, seq_len=512) == what


@pytest.mark.parametrize("kernel, checkpointing, batch_size, what, flags", [
    ("current", "none", 8, "logits", ["--kernel=flash", "--device_batch_size=4"]),
    ("flash", "none", 8, "activations", ["--activation_checkpointing=all", "--device_batch_size=4"]),
    ("flash", "all", 1, "activations", ["a smaller model", "a TPU with more memory"])])
def test_the_advice_follows_from_what_is_large(kernel, checkpointing, batch_size, what, flags):
    assert advice({
        "kernel": kernel, "flags": {"activation_checkpointing": checkpointing, "device_batch_size": batch_size},
        "out_of_memory": {"micro_step": {"memory": "hbm", "largest": [{"what": what}]}}}) == flags


def test_the_smallest_mesh_is_found_from_below():
    def try_mesh(fsdp):
        tried.append(fsdp)
        return 2**34 // fsdp if fsdp >= fits_from else None

    for fits_from, smallest, calls in ((4, 4, [1, 2, 4]), (1, 1, [1]), (16, None, [1, 2, 4, 8])):
        tried, said = [], []
        found = find_mesh(try_mesh, (1, 2, 4, 8), said.append)
        assert found["smallest"] == smallest and tried == calls == list(found["peak_bytes"])
        assert found["peak_bytes"][calls[-1]] == (2**34 // smallest if smallest else None)
        assert len(said) == len(calls) and ("does not fit" in said[0]) == (fits_from > 1)


def test_who_cannot_fit_into_a_chip_of_many_is_told_of_the_mesh():
    common = {"kernel": "flash", "flags": {"activation_checkpointing": "all", "device_batch_size": 1, "mesh_fsdp": 1},
              "out_of_memory": {"update": {"memory": "hbm", "largest": []}}}
    assert "tpu_preflight --find_mesh" in advice(common | {"chips": 8})[0]
    assert "--find_mesh" not in str(advice(common | {"chips": 8, "kernel": "current"}))  # it has no mesh
    assert advice(common | {"chips": 1}) == ["a smaller model", "a TPU with more memory"]


@pytest.mark.parametrize("start", [1, 8, 64])
def test_the_largest_batch_is_found_by_doubling_halving_and_looking_between(start):
    def try_batch(batch_size, setting):
        fits = batch_size <= {"none": 6, "all": 11}[setting]
        return batch_size * 2**30 if fits else None

    found = find_batch(try_batch, start, ("none", "all"), say=lambda line: None)["settings"]
    assert [each["largest"] for each in found.values()] == [6, 9]
    assert found["all"]["peak_bytes"] == {6: 6 * 2**30, 12: None, 9: 9 * 2**30}
    assert sorted(found["none"]["peak_bytes"]) == {1: [1, 2, 4, 6, 8], 8: [4, 6, 8], 64: [4, 6, 8, 16, 32, 64]}[start]


def test_no_batch_may_fit():
    found = find_batch(lambda *_: None, 2, ("none", "all"), say=lambda line: None)
    assert found["settings"]["none"] == found["settings"]["all"] == {"largest": None, "peak_bytes": {2: None, 1: None}}
    assert found["compilations"] == 4


def test_a_run_is_micro_steps_and_updates():
    """8 micro-steps of 0.1 s and an update of 0.1 s; 1000 tokens a step, of 197e9 FLOPs each."""
    programs = {name: {"name": name, "runs_per_step": runs, "estimated_s": 0.1, "low_s": 0.05, "high_s": 0.2}
                for name, runs in (("micro_step", 8), ("update", 1))}
    plan = SimpleNamespace(num_iterations=3600, stages=((0, 3600, "micro_step"),),
                           units=lambda first, last: 1000 * (last - first),
                           flops=lambda first, last: 1000 * 197e9 * (last - first))
    run = report_run(programs, plan, tpu.parse_accelerator("v5litepod-16"))
    assert (run["step_s"], run["step_low_s"], run["step_high_s"]) == pytest.approx((0.9, 0.45, 1.8))
    assert (run["tokens_per_s"], run["hours"], run["hours_of_last"]) == pytest.approx((1000 / 0.9, 0.9, 0.9))
    assert run["mfu"] == pytest.approx(1 / 0.9 / 16)  # 197 TFLOP in 0.9 s on 16 chips of 197 TFLOP/s
    assert run["shares"] == pytest.approx({"micro_step": 8 / 9, "update": 1 / 9})


def test_a_price_that_is_not_known_stays_out():
    assert costs(10, PreflightFlags("v4-8")) == {"usd_spot": None, "usd_on_demand": None}
    assert costs(10, PreflightFlags("v6e-4", zone="us-east5-b"))["usd_spot"] == pytest.approx(43.2)
    assert costs(10, PreflightFlags("v4-8", usd_per_chip_hour=0.5))["usd_spot"] == 20
    assert describe_cost({"usd_spot": 43.2, "usd_on_demand": None}, "in us-east5-b") == ", 43 USD on spot in us-east5-b"
    assert describe_cost({"usd_spot": None}, "in us-east5-b") == ""
