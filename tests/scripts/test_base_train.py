"""Trainings as a person starts them: real parquet, several XLA devices; see warm.py for where they run."""
import json
import re
import subprocess
import sys

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from nanochat.checkpoint import on_disk
from nanochat.checkpoint.pieces import load_checkpoint
from nanochat.common import BadInput
from scripts import base_eval, base_train, generate, report
from tests.conftest import BOTH_MODELS, last_of_each, run_python
from tests.warm import TIMEOUT_S


def test_importing_the_script_leaves_the_xla_runtime_uninitialised():
    code = ("import nanochat.train.language, nanochat.train.launch, sys; assert 'torch_xla' not in sys.modules; "
            "import torch_xla; assert not torch_xla._XLAC._xla_runtime_is_initialized()")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=TIMEOUT_S)


SLOWLY = "--warmup_steps=6"  # at the full rates, what rounding makes of sums in another order would grow


def clipped(model):
    """Returns flags with which the gradients of some of the steps are clipped."""
    return *model, SLOWLY, "--clip_norm=2.4" if model else "--clip_norm=1.45"


@BOTH_MODELS
def test_two_devices_give_the_losses_of_one_also_where_gradients_are_clipped(reference, model):
    one, two = reference(*clipped(model)), reference(*clipped(model), devices=2)
    assert sorted(one.losses) == [1, 2, 3, 4, 5, 6] and sorted(one.bpb) == [0, 3, 6]
    assert one.bpb[6] < one.bpb[0]
    assert two.losses == pytest.approx(one.losses, rel=2e-6)
    assert two.bpb == pytest.approx(one.bpb, rel=2e-6)
    assert [r["val_bytes"] for r in two.records if "val_bytes" in r] == \
           [r["val_bytes"] for r in one.records if "val_bytes" in r]
    assert one.losses != pytest.approx(reference(*model, SLOWLY).losses, rel=2e-6)


@BOTH_MODELS
def test_a_run_that_is_stopped_and_resumed_gives_the_same_bits(train, reference, model):
    flags = *clipped(model), "--save_every=2"
    whole = reference(*clipped(model), devices=2)
    # The schedule depends on the horizon, so the first part is the same run with its checkpoints, cut off after step 4.
    run_dir = train(*flags, run="parts", devices=2).run_dir
    saved = [path.name for path in on_disk.list_checkpoints(run_dir)]
    assert saved == ["step_000002", "step_000004", "step_000006"]
    on_disk.set_aside_after(run_dir, 2)
    resumed = train(*flags, run="parts", devices=2)
    assert "resuming from" in resumed.stdout and "step_000002" in resumed.stdout
    assert resumed.losses == whole.losses and resumed.bpb == whole.bpb
    assert [record["step"] for record in resumed.records if "loss" in record] == [1, 2, 3, 4, 5, 6]
    events = EventAccumulator(str(run_dir / "tensorboard")).Reload().Scalars("loss")
    assert [event.step for event in events] == [1, 2, 3, 4, 5, 6]
    on_disk.set_aside_after(run_dir, 2)
    on_one = train(*flags, run="parts", devices=1)
    assert on_one.losses == pytest.approx(whole.losses, rel=2e-6)
    finished = train(*flags, run="parts", devices=2)
    assert "nothing left to do" in finished.stdout


@pytest.mark.parametrize("kernel, dtype, rel", [
    ("current", "float32", 2e-6), pytest.param("chunked", "bfloat16", 2e-3, marks=pytest.mark.slow)])
def test_an_optimizer_that_ranks_share_trains_as_one_that_each_keeps_whole(train, kernel, dtype, rel):
    """Three layers on two devices: one part is padded. A checkpoint of either goes on with the other, and has fp32
    weights also where the model works with bf16 ones."""
    flags = ("--depth=3", "--model_dim=64", "--num_heads=2", "--eval_every=-1", "--save_every=3", "--warmup_steps=2",
             f"--kernel={kernel}", f"--compute_dtype={dtype}")
    shared = train(*flags, run="shared", devices=2)
    whole = train(*flags, "--shard_optimizer=off", run="whole", devices=2)
    assert whole.losses == pytest.approx(shared.losses, rel=rel) and len(set(whole.losses.values())) == 6
    weights = load_checkpoint(on_disk.latest(shared.run_dir)).model_state["mlp_in"]
    assert weights.shape == (3, 256, 64) and not torch.equal(weights, weights.bfloat16().float())
    on_disk.set_aside_after(shared.run_dir, 3)
    resumed = train(*flags, "--shard_optimizer=off", run="shared", devices=2)
    assert "resuming from" in resumed.stdout and resumed.losses == pytest.approx(whole.losses, rel=rel)


@pytest.mark.slow
def test_rows_that_become_longer_keep_the_bits_of_a_run_that_resumes_before_at_and_after_the_switch(train, tiny):
    flags = "--seq_len_ramp=0:16,2:32", "--num_iterations=4", "--save_every=1", "--keep_checkpoints=9", "--log_every=1"
    whole = train(*flags, run="parts", devices=2)
    assert {record["step"]: (record["tokens"], record["seq_len"]) for record in whole.records if "tokens" in record} \
        == {step: (512 * step, 16 if step < 3 else 32) for step in range(1, 5)}
    compilations = {record["step"]: record["compilations"] for record in whole.records if "compilations" in record}
    assert len({compilations[step] for step in range(2, 5)}) == 1  # saving has small programs, compiled after step 1
    for step, devices in ((3, 2), (2, 2), (1, 1)):
        on_disk.set_aside_after(whole.run_dir, step)
        resumed = train(*flags, run="parts", devices=devices)
        assert f"step_{step:06d}" in resumed.stdout
        if devices == 2:
            assert resumed.losses == whole.losses and resumed.bpb == whole.bpb
        assert resumed.losses == pytest.approx(whole.losses, rel=2e-6)
    with pytest.raises(BadInput, match="--seq_len_ramp is 0:16,2:32 there and ''"):
        base_train.main(last_of_each(*tiny, "--run=parts", "--num_iterations=8"))


def test_steps_that_are_not_finite_end_the_run_with_the_last_good_checkpoint(train):
    run_dir = train("--device_type=cpu", "--save_every=3", "--eval_every=-1").run_dir
    on_disk.set_aside_after(run_dir, 3)
    # the update of step 4 makes the embedding infinite, so the steps after it are bad
    process = train("--save_every=1", "--embedding_lr=1e44", "--num_iterations=20", devices=2, status=1)
    assert process.stdout.count("is skipped") == 10 and "Traceback" not in process.stderr
    assert "error: 10 steps in a row" in process.stdout and "step 4 is not saved" in process.stdout
    assert [process.losses[step] is None for step in range(1, 15)] == [False] * 4 + [True] * 10
    assert process.records[-1]["bad_steps"] == 10 and process.records[-1]["grad_norm"] is None
    assert on_disk.latest_good(run_dir)[0].name == "step_000003"


def test_a_run_whose_model_breaks_ends_with_status_1_and_no_script_takes_it_for_a_model(train, byte_tokenizer_dir,
                                                                                        capsys):
    # the update of step 1 makes the scales so large, but finite, that everything after it is not
    break_it = "--device_type=cpu", "--scalar_lr=4e38", "--sample_every=3", "--save_every=6"
    process = train(*break_it, status=1)
    for said in ("warning: the last 5 steps of the run were skipped: their loss or gradient was not finite\n",
                 "step 00006/00006 | loss not finite", "step 00006/00006 | validation not finite",
                 "warning: no sample at step 3: the model's predictions are not finite",
                 "error: the validation after step 6 is not finite: the model is broken"):
        assert said in process.stdout
    assert on_disk.latest_good(process.run_dir)[0].name == "step_000006"
    assert not (process.run_dir / ".finished").exists()
    assert "error: the validation after step 6 is not finite" in train(*break_it, status=1).stdout  # evaluated again
    for temperature in (0, 1):
        with pytest.raises(BadInput, match="the model's predictions are not finite, so its training went wrong"):
            generate.main(["--checkpoint=test", "--prompt=int", "--max_tokens=4", f"--temperature={temperature}",
                           f"--tokenizer_dir={byte_tokenizer_dir}"])
    capsys.readouterr()
    assert not report.main(["test"])
    assert "not finite" in capsys.readouterr().out


def test_lines_of_the_log_count_no_evaluation_and_precede_every_checkpoint(train):
    """Evaluations and checkpoints at steps that are no lines of the log by themselves."""
    records = train("--log_every=4", "--eval_every=3", "--save_every=2").records
    assert [record["step"] for record in records if "step_ms" in record] == [1, 2, 3, 4, 6]
    last = records[-1] if "seconds" in records[-1] else records[-2]
    spent = sum(value for name, value in last.items() if name.startswith("seconds_"))
    assert spent == pytest.approx(last["seconds"]) and last["seconds_evaluate"] > 0
    assert last["interruptions"] == last["bad_steps"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_steps_compile_in_the_first_only_fall_back_never_and_fetch_only_to_log(devices, byte_tokenizer_dir, tmp_path):
    """Read from torch_xla's own counters, by a program that spawns the ranks as base_train does."""
    result, kernels = tmp_path / "counters.json", ["current", "chunked"][devices - 1:]
    process = run_python("-m", "tests.train.count_xla", str(byte_tokenizer_dir), str(result), *kernels, devices=devices)
    assert process.returncode == 0, process.stderr[-4000:]
    by_kernel = json.loads(result.read_text())
    assert list(by_kernel) == kernels
    for kernel, counters in by_kernel.items():
        assert counters["fallbacks"] == []
        by_step = counters["compilations"]
        assert len(by_step) == 20 and len(set(by_step)) == 1, kernel
        # on one device the update is the same program with every kernel
        assert counters["programs_of_a_step"] <= 2 and counters["recompiled"] is None, kernel
        # 20 steps are logged at steps 1, 10 and 20: each loss is one transfer, made then and not before
        assert counters["transfers_between_logs"] == 0
        assert counters["transfers"] == 20 * devices


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["chunked", "flash"])
def test_every_kernel_trains_as_the_plain_one_does(reference, kernel):
    """With few optimisations XLA adds long sums one number at a time: losses differ by 9e-5 after 20 steps, 3e-5 after
    12, and with all optimisations by 4e-6 after 20."""
    flags = "--model_dim=128", "--num_heads=1", "--warmup_steps=2", "--eval_every=6"
    plain, found = reference(*flags, "--kernel=current"), reference(*flags, f"--kernel={kernel}")
    assert plain.bpb[6] < plain.bpb[0]
    assert found.losses == pytest.approx(plain.losses, rel=1e-4) and found.bpb == pytest.approx(plain.bpb, rel=1e-4)


def test_synthetic_data_needs_no_data(train):
    process = train("--synthetic_data", "--data_dir=/nowhere", "--val_dir=/nowhere", "--activation_checkpointing",
                    "--kernel=chunked", "--num_kv_heads=1", "--window_pattern=SL", "--sample_every=6",
                    "--device_type=cpu")
    assert sorted(process.losses) == [1, 2, 3, 4, 5, 6]
    assert "sample at step 6" in process.stdout
    assert "finished: --save_every=-1 saved nothing" in process.stdout.splitlines()[-1]


@pytest.mark.slow
def test_a_run_is_not_silent_between_two_lines_of_its_log(train):
    program = """
from nanochat import common
common.SILENCE_S = 0.05
from scripts.base_train import main
common.run_script(main, "preparing the run")
"""
    found = train("--log_every=1000", "--num_iterations=30", "--device_type=cpu", "--synthetic_data", "--save_every=30",
                  new_process=("-c", program)).stderr
    assert "still preparing the run (" in found and re.search(r"still training, step \d+ \(", found)


@BOTH_MODELS
def test_evaluating_a_checkpoint_gives_what_the_run_found(train, byte_tokenizer_dir, corpus_dir, capsys, model):
    trained = train(*model, "--save_every=6", run="done")
    base_eval.main(["--checkpoint=done", f"--tokenizer_dir={byte_tokenizer_dir}", f"--data_dir={corpus_dir}/val",
                    "--eval_tokens=1024", "--device_type=cpu"])
    found = float(re.search(r"([\d.]+) bits per byte", capsys.readouterr().out)[1])
    assert found == pytest.approx(trained.bpb[6], abs=1e-4)  # the same text, on another backend


def test_several_hosts_are_for_xla_devices(tiny, monkeypatch):
    monkeypatch.setenv("NANOCHAT_HOSTS", "10.0.0.7,10.0.0.8")
    monkeypatch.setenv("NANOCHAT_HOST_INDEX", "1")
    with pytest.raises(BadInput, match="NANOCHAT_HOSTS=10.0.0.7,10.0.0.8 .*cpu"):
        base_train.main(last_of_each(*tiny, "--device_type=cpu"))


def test_a_run_with_fill_in_the_middle_records_its_bits_per_byte_and_keeps_its_rate(train, tiny, byte_tokenizer_dir,
                                                                                  corpus_dir, capsys):
    flags = ("--fim_rate=0.5", "--max_seq_len=64", "--device_batch_size=8", "--eval_every=6", "--save_every=6",
             "--device_type=cpu")
    trained = train(*flags, run="fim")
    assert "step_000006" in (last := trained.stdout.splitlines()[-1]) and "generate --checkpoint=fim" in last
    fim = {record["step"]: record["fim_bpb"] for record in trained.records if "fim_bpb" in record}
    assert sorted(fim) == sorted(trained.bpb) == [0, 6] and fim[6] < fim[0]
    with pytest.raises(BadInput, match="--fim_rate is 0.5 there and 0.0"):
        base_train.main(last_of_each(*tiny, "--run=fim", *flags[1:], "--num_iterations=8"))
    with pytest.raises(BadInput, match="--num_lanes is 64 there and 128"):
        base_train.main(last_of_each(*tiny, "--run=fim", *flags, "--num_iterations=8", "--num_lanes=128"))
    base_eval.main(["--checkpoint=fim", f"--tokenizer_dir={byte_tokenizer_dir}", f"--data_dir={corpus_dir}/val",
                    "--eval_tokens=1024", "--device_type=cpu", "--fim"])
    out = capsys.readouterr().out
    assert "without --fim_rate" not in out
    lines = out.splitlines()[-3:]
    assert [line.split()[0] for line in lines] == ["random", "line", "structure"]
    for line in lines:
        with_suffix, without = map(float, line.split()[2:4])
        assert 0 < with_suffix < 10
        change = re.search("changes them by ([+-][0-9.]+)%", line)
        assert float(change[1]) == pytest.approx(100 * (with_suffix / without - 1), abs=0.1)
