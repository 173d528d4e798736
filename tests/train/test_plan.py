"""The plan of a run: batches, horizon and schedules that follow from its flags."""
import math
from dataclasses import asdict

import pytest

from nanochat.checkpoint.meta import Meta
from nanochat.common import BadInput
from nanochat.data.tokenizer import load_tokenizer
from nanochat.model.config import GPTConfig
from nanochat.model.weights import flops_per_token
from nanochat.train import describe
from nanochat.train.describe import describe_plan
from nanochat.train.flags import parse_flags
from nanochat.train.plan import make_plan
from tests.conftest import last_of_each


def plan_of(*flags, world_size=8):
    return make_plan(parse_flags(flags), 65536, "cpu", world_size)


def test_the_plan_of_the_mission():
    plan = plan_of("--depth=16", "--num_iterations=50000", "--device_batch_size=8", "--max_seq_len=1024",
                   "--kernel=current", "--no_compile", "--run=NAME")
    assert (plan.total_batch_size, plan.micro_steps, plan.num_iterations) == (524288, 8, 50000)
    assert sum(plan.parameters.values()) == 335_544_320 + 67_108_864 + 32 + 16 * 3 * 1025
    assert plan_of("--depth=16", world_size=4).micro_steps == 16 and plan.activation_checkpointing == "none"
    assert plan_of("--activation_checkpointing").activation_checkpointing == "all"


def test_the_horizon_is_the_first_of_two_flags():
    assert plan_of("--num_iterations=7", "--target_param_data_ratio=10").num_iterations == 7
    by_ratio = plan_of("--target_param_data_ratio=10", "--total_batch_size=524288")
    assert by_ratio.num_iterations == round(10 * (201_326_592 + 67_108_864) / 524288)
    assert "10.0 for each of the 268,435,456 parameters of matrices and head" in str(
        describe_plan(by_ratio, load_tokenizer()))


def test_rows_that_become_longer_keep_the_tokens_of_a_micro_step_and_cost_more_flops():
    ramp = "--seq_len_ramp=0:1024,100:2048,200:4096"
    flags = "--max_seq_len=4096", "--device_batch_size=2", "--total_batch_size=524288"
    plan, full = plan_of(*flags, ramp, "--num_iterations=300"), plan_of(*flags, "--num_iterations=300")
    assert [(plan.rows(step), plan.seq_len(step)) for step in (0, 99, 100, 199, 200, 299)] == \
        [(8, 1024)] * 2 + [(4, 2048)] * 2 + [(2, 4096)] * 2
    assert plan.stages == ((0, 100, "micro_step 1024"), (100, 200, "micro_step 2048"), (200, 300, "micro_step 4096"))
    assert full.stages == ((0, 300, "micro_step"),) and full.switches == () and full.length_schedule == ((0, 4096),)
    assert plan.tokens(0, 300) == full.tokens(0, 300) and plan.micro_steps == full.micro_steps == 8
    assert full.flops(0, 300) == full.flops_per_token * full.tokens(0, 300)
    by_length = [flops_per_token(plan.config, length) for length in (1024, 2048, 4096)]
    assert plan.flops(50, 250) == 524288 * (50 * by_length[0] + 100 * by_length[1] + 50 * by_length[2])
    described = "\n".join(describe_plan(plan, load_tokenizer()))
    assert "8 × 1,024 per micro-step and device, 4 × 2,048 from step 100 on, 2 × 4,096 from step 200 on" in described


@pytest.mark.parametrize("flags, said", [
    ((), "rise for 20 steps, fall after step 50 to 0.05"),
    (("--warmdown_ratio=0",), "rise for 20 steps, fall after step 100 to 0.05"),
    (("--warmup_steps=60", "--final_lr_frac=0.1"), "rise for 60 steps, fall after step 60 to 0.1"),
    (("--warmup_steps=0", "--warmdown_ratio=1"), "rise for 0 steps, fall after step 0 to 0.05"),
])
def test_the_plan_says_when_the_learning_rates_rise_and_fall(flags, said):
    plan = plan_of("--num_iterations=100", *flags)
    [schedule, rates] = [line for line in describe_plan(plan, load_tokenizer()) if "  rates  " in line][0].split("; ")
    assert schedule == f"      rates  {said}"
    scale = math.sqrt(plan.total_batch_size / 2**19) * (2**32 / plan.tokens(0, 100)) ** 0.32
    assert rates == (f"at lr 1.000: matrices {0.02 * scale:.3g}, embedding {0.3 * scale * 0.75**0.5:.3g}, "
                     f"head {0.004 * scale * 0.75**0.5:.3g}, value table {0.15 * scale * 0.75**0.5:.3g}, "
                     f"scales of the embedding {0.05 * scale:.3g}")


@pytest.mark.parametrize("ramp, message", [
    ("0:1024,100:4096,50:8192", "50:8192 is not STEP:LENGTH with steps and lengths that rise"),
    ("0:2048,100:1024,200:4096", "100:1024 is not STEP:LENGTH with steps and lengths that rise"),
    ("0:1024,0:4096", "0:4096 is not STEP:LENGTH"), ("0:1024,100", "100 is not STEP:LENGTH"),
    ("0:1024,", " is not STEP:LENGTH"), ("0:0,1:4096", "0:0 is not STEP:LENGTH"), ("0:1e3", "0:1e3 is not STEP:LENGTH"),
    ("5:1024,100:4096", "before step 5: begin with 0:"),
    ("0:1000,100:4096", "4096 .* 1000.*: give a multiple of 1000"),
    ("0:1024,100:2048", "2048.*--max_seq_len=4096"),
    ("0:1024,300:4096", "step 300.*4096")])
def test_a_ramp_that_is_odd_is_refused_in_one_line(ramp, message):
    with pytest.raises(BadInput, match=f"--seq_len_ramp={ramp}.*{message}") as error:
        plan_of("--max_seq_len=4096", "--num_iterations=300", f"--seq_len_ramp={ramp}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("flags, message", [
    (["--fim_rate=0.5"], "with --fim_rate=0.5"),
    (["--kernel=flash", "--seq_len_ramp=0:64,9:4096"], "sequences of up to 4,096 in steps of 128 and .*and 64:")])
def test_a_ramp_that_does_not_fit_other_flags_is_refused(flags, message):
    flags = last_of_each("--max_seq_len=4096", "--num_iterations=300", "--seq_len_ramp=0:1024,9:4096", *flags)
    with pytest.raises(BadInput, match=f"--seq_len_ramp=0:.*,9:4096.*{message}"):
        make_plan(parse_flags(flags), 65536, "tpu", 8)


@pytest.mark.parametrize("flags, saved, expected", [
    *(([f"--max_seq_len={length}"], None, {"rotary_base": base}) for length, base in (
        (1024, 10_000), (4096, 10_000), (8192, 100_000), (32768, 100_000), (65536, 500_000))),
    (["--max_seq_len=8192"], {"rotary_base": 10_000.0}, {"rotary_base": 10_000}),
    ([], {"layer_gates": False, "value_embeddings": "off", "window_pattern": "SL", "short_window": 512},
     {"n_layer": 4, "layer_gates": False, "value_embeddings": "off", "windows": [512, None, 512, None]}),
    ([], {"window_pattern": "L"}, {"windows": [None] * 4}),
    (["--depth=4"], None, {"windows": [256] * 3 + [None]}),
    (["--depth=4", "--window_pattern=L"], None, {"windows": [None] * 4})])
def test_a_model_follows_from_its_flags_and_stays_that_of_the_checkpoint(flags, saved, expected):
    meta = None if saved is None else meta_with(**saved)
    config = make_plan(parse_flags(["--device_batch_size=1", *flags]), 65536, "cpu", 8, meta).config
    assert {name: config.windows() if name == "windows" else getattr(config, name) for name in expected} == expected


def meta_with(**config):
    """Returns the Meta of a checkpoint whose model has four layers and these other fields."""
    config = asdict(GPTConfig(n_layer=4, **config))
    return Meta(step=1, config=config, tokenizer_sha256="", data_fingerprint="", flags={}, rng="")


def test_a_world_size_that_does_not_divide_is_refused():
    with pytest.raises(BadInput, match="3 devices .*--num_lanes=64 .*: use 2 or 4 devices"):
        plan_of(world_size=3)
    with pytest.raises(BadInput, match="use 64 devices .*--num_lanes=128"):
        plan_of(world_size=128)
    assert plan_of("--num_lanes=128", world_size=128).micro_steps == 1


@pytest.mark.parametrize("flags, message", [
    (["--target_param_data_ratio=1e300"], "--target_param_data_ratio=1e300 is not a number above 0"),
    (["--target_param_data_ratio=1e-300"], "--target_param_data_ratio=1e-300 .* 0 steps"),
    (["--total_batch_size=1"], "--total_batch_size=1 tokens does not divide by 65536 = .*: use 65536$"),
    (["--activation_checkpointing=qkv"], "--activation_checkpointing: invalid choice: 'qkv'"),
    (["--softcap=1e-300"], "--softcap=1e-300 is not a number of at least 1 and of at most 10000.0, or 0"),
    (["--depth=10000", "--model_dim=65536"], "5.15e.14 parameters with .* need at least"),
    (["--device_batch_size=1048576", "--max_seq_len=1048576"],
     "--device_batch_size=1048576 and --max_seq_len=1048576 need at least")])
def test_what_no_machine_can_compute_is_refused_in_one_line(flags, message):
    with pytest.raises(BadInput, match=message) as error:
        plan_of(*flags)
    assert "\n" not in str(error.value)


def test_a_run_of_more_than_a_day_on_a_cpu_asks_for_num_iterations(monkeypatch, capsys):
    assert 0 < describe.seconds_of_row(GPTConfig(vocab_size=512, max_seq_len=64, n_layer=2, n_embd=64, n_head=2)) < 30
    monkeypatch.setattr(describe, "seconds_of_row", lambda config: 5.0)
    plan = make_plan(parse_flags(["--depth=4", "--max_seq_len=256"]), 512, "cpu", 1)
    days = 5.0 * plan.tokens(0, plan.num_iterations) / 256 / 86400
    assert days > 2
    with pytest.raises(BadInput, match=f"take about {days:,.0f} days on this CPU: for a first try add --num_it"):
        describe.require_time(plan, -1)
    describe.require_time(plan, plan.num_iterations)
    assert f"about {days:,.0f} days on this CPU; for a first try add" in capsys.readouterr().out
    monkeypatch.setattr(describe, "seconds_of_row", None)  # it is not called
    for flags, device_type in ((describe.FIRST_TRY.split(), "cpu"), ([], "tpu")):
        describe.require_time(make_plan(parse_flags([*flags, "--depth=2"]), 512, device_type, 1), -1)
    assert not capsys.readouterr().out
