"""Checks the parts of the report that need no compiler."""
from types import SimpleNamespace

import pytest

from nanochat.preflight import report

CONFIG = SimpleNamespace(vocab_size=65536, n_embd=1024, n_head=8, n_layer=16)


@pytest.mark.parametrize("shape, what", [
    ("f32[65536,1024]", "embedding or head"), ("bf16[4,512,65536]", "logits"),
    ("f32[4,8,512,512]", "attention scores"), ("f32[32,512,512]", "attention scores"),
    ("bf16[4,512,4096]", "activations"), ("bf16[16,4,512,1024]", "activations of all layers"),
    ("bf16[16,3,100]", "stacked weights"), ("f32[7,3]", ""), ("f32[]", "")])
def test_large_buffers_are_named_by_their_shape(shape, what):
    assert report.name_buffer_of_gpt(shape, CONFIG, batch_size=4, seq_len=512) == what


@pytest.mark.parametrize("kernel, checkpointing, batch_size, what, advice", [
    ("current", "none", 8, "logits", ["--kernel=flash", "--device_batch_size=4"]),
    ("flash", "none", 8, "activations", ["--activation_checkpointing=all", "--device_batch_size=4"]),
    ("flash", "qkv", 8, "activations", ["--activation_checkpointing=all", "--device_batch_size=4"]),
    ("flash", "all", 1, "activations", ["a smaller model", "a TPU with more memory"])])
def test_the_advice_follows_from_what_is_large(kernel, checkpointing, batch_size, what, advice):
    assert report.advice({
        "kernel": kernel, "flags": {"activation_checkpointing": checkpointing, "device_batch_size": batch_size},
        "out_of_memory": {"micro_step": {"memory": "hbm", "largest": [{"what": what}]}}}) == advice


def test_the_smallest_mesh_is_found_from_below():
    def try_mesh(fsdp):
        tried.append(fsdp)
        return {"fits": fsdp >= fits_from, "peak_bytes": 2**34 // fsdp, "out_of_memory": {"update": {}}}

    for fits_from, smallest, calls in ((4, 4, [1, 2, 4]), (1, 1, [1]), (16, None, [1, 2, 4, 8])):
        tried, said = [], []
        found = report.find_mesh(try_mesh, (1, 2, 4, 8), said.append)
        assert found["smallest"] == smallest and tried == calls == list(found["peak_bytes"])
        assert found["peak_bytes"][calls[-1]] == (2**34 // smallest if smallest else None)
        assert len(said) == len(calls) and ("update do" in said[0]) == (fits_from > 1)


def test_who_cannot_fit_into_a_chip_of_many_is_told_of_the_mesh():
    common = {"kernel": "flash", "flags": {"activation_checkpointing": "all", "device_batch_size": 1, "mesh_fsdp": 1},
              "out_of_memory": {"update": {"memory": "hbm", "largest": []}}}
    assert "tpu_preflight --find_mesh" in report.advice(common | {"chips": 8})[0]
    assert "--find_mesh" not in str(report.advice(common | {"chips": 8, "kernel": "current"}))  # it has no mesh
    assert report.advice(common | {"chips": 1}) == ["a smaller model", "a TPU with more memory"]


@pytest.mark.parametrize("start", [1, 8, 64])
def test_the_largest_batch_is_found_by_doubling_halving_and_looking_between(start):
    def try_batch(batch_size, setting):
        fits = batch_size <= {"none": 6, "qkv": 11, "all": 50}[setting]
        return {"fits": fits, "peak_bytes": batch_size * 2**30 if fits else None}

    found = report.find_batch(try_batch, start, ("none", "qkv", "all"), say=lambda line: None)["settings"]
    assert [each["largest"] for each in found.values()] == [6, 9, 36]
    assert found["qkv"]["peak_bytes"] == {6: 6 * 2**30, 12: None, 9: 9 * 2**30}
    assert sorted(found["none"]["peak_bytes"]) == {1: [1, 2, 4, 6, 8], 8: [4, 6, 8], 64: [4, 6, 8, 16, 32, 64]}[start]


def test_no_batch_may_fit():
    found = report.find_batch(lambda *_: {"fits": False, "peak_bytes": None}, 2, ("none", "all"), say=lambda line: None)
    assert found["settings"]["none"] == found["settings"]["all"] == {"largest": None, "peak_bytes": {2: None, 1: None}}
    assert found["compilations"] == 4


def test_a_price_that_is_not_known_stays_out():
    request = report.Request("v4-8", ("update",))
    assert report.costs(10, request) == {"usd_spot": None, "usd_on_demand": None}
    assert report.costs(10, report.Request("v6e-4", ("update",), zone="us-east5-b"))["usd_spot"] == pytest.approx(43.2)
    assert report.costs(10, report.Request("v4-8", ("update",), usd_per_chip_hour=0.5))["usd_spot"] == 20
