"""The training script as a person runs it: processes of their own, real parquet, several XLA devices."""
import json
import re
import socket
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from nanochat.common import BadInput, get_base_dir
from nanochat.device.ranks import resolve_device_type
from nanochat.device.tpu import count_tpu_chips
from nanochat.run import checkpoint, checkpoint_files
from nanochat.run.meta import Meta
from nanochat.train.flags import parse_flags
from nanochat.train.plan import make_plan
from scripts import base_eval
from scripts.base_train import main
from tests.conftest import run_python
from tests.warm import TIMEOUT_S


def test_importing_the_script_leaves_the_xla_runtime_uninitialised():
    code = ("import scripts.base_train, sys; assert 'torch_xla' not in sys.modules; "
            "import torch_xla; assert not torch_xla._XLAC._xla_runtime_is_initialized()")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=TIMEOUT_S)


def test_one_two_and_four_devices_give_the_same_losses(reference):
    by_devices = {devices: reference(devices=devices) for devices in (1, 2, 4)}
    one = by_devices[1]
    assert sorted(one.losses) == [1, 2, 3, 4, 5, 6] and sorted(one.bpb) == [0, 3, 6]
    assert one.bpb[6] < one.bpb[0]
    for devices in (2, 4):
        assert by_devices[devices].losses == pytest.approx(one.losses, rel=2e-6)
        assert by_devices[devices].bpb == pytest.approx(one.bpb, rel=2e-6)
        assert [r["val_bytes"] for r in by_devices[devices].records if "val_bytes" in r] == \
               [r["val_bytes"] for r in one.records if "val_bytes" in r]


def test_a_run_that_is_stopped_and_resumed_gives_the_same_bits(train, reference):
    whole = reference(devices=2)
    # The schedule depends on the horizon, so the first part is the same run with its checkpoints, cut off after step 4.
    train("--save_every=2", run="parts", devices=2)
    run_dir = get_base_dir() / "checkpoints" / "parts"
    saved = [path.name for path in checkpoint_files.list_checkpoints(run_dir)]
    assert saved == ["step_000002", "step_000004", "step_000006"]
    checkpoint_files.set_aside_after(run_dir, 2)
    resumed = train("--save_every=2", run="parts", devices=2)
    assert "resuming from" in resumed.stdout and "step_000002" in resumed.stdout
    assert resumed.losses == whole.losses and resumed.bpb == whole.bpb
    assert [record["step"] for record in resumed.records if "loss" in record] == [1, 2, 3, 4, 5, 6]
    checkpoint_files.set_aside_after(run_dir, 2)
    on_one = train("--save_every=2", run="parts", devices=1)
    assert on_one.losses == pytest.approx(whole.losses, rel=2e-6)
    finished = train("--save_every=2", run="parts", devices=2)
    assert "nothing left to do" in finished.stdout


@pytest.mark.parametrize("kernel, dtype, rel", [("current", "float32", 2e-6), ("chunked", "bfloat16", 2e-3)])
def test_an_optimizer_that_ranks_share_trains_as_one_that_each_keeps_whole(train, kernel, dtype, rel):
    """Three layers on two devices: one part is padded. A checkpoint of either goes on with the other, and has fp32
    weights also where the model works with bf16 ones."""
    flags = ("--depth=3", "--model_dim=64", "--num_heads=2", "--eval_every=-1", "--save_every=3", "--warmup_steps=2",
             f"--kernel={kernel}", f"--compute_dtype={dtype}")
    shared = train(*flags, run="shared", devices=2)
    whole = train(*flags, "--shard_optimizer=off", run="whole", devices=2)
    assert whole.losses == pytest.approx(shared.losses, rel=rel) and len(set(whole.losses.values())) == 6
    run_dir = get_base_dir() / "checkpoints" / "shared"
    weights = checkpoint.load(checkpoint_files.latest(run_dir)).model_state["mlp_in"]
    assert weights.shape == (3, 256, 64) and not torch.equal(weights, weights.bfloat16().float())
    checkpoint_files.set_aside_after(run_dir, 3)
    resumed = train(*flags, "--shard_optimizer=off", run="shared", devices=2)
    assert "resuming from" in resumed.stdout and resumed.losses == pytest.approx(whole.losses, rel=rel)


def test_a_batch_that_grows_keeps_its_programs_its_data_and_its_bits(train):
    ramp = "--batch_ramp=2:1.4,4:2"  # on two devices 4 micro-steps, then 5.6 rounded to 6, then 8
    whole = train(ramp, "--profile_steps=3:5", run="whole", devices=2)
    assert "512 tokens = 2 rows × 32 × 2 devices × 4 micro-steps, 768 from step 2 on (6 micro-steps), " \
           "1,024 from step 4 on (8 micro-steps)" in whole.stdout
    assert {record["step"]: record["tokens"] for record in whole.records if "tokens" in record} == \
           {1: 512, 2: 1024, 3: 1792, 4: 2560, 6: 4608}
    assert len({record["compilations"] for record in whole.records if "compilations" in record}) == 1
    assert len(list(get_base_dir().glob("checkpoints/whole/profile/plugins/profile/*/*.xplane.pb"))) == 1
    train(ramp, "--save_every=3", run="parts", devices=2)
    run_dir = get_base_dir() / "checkpoints" / "parts"
    checkpoint_files.set_aside_after(run_dir, 3)
    resumed = train(ramp, "--save_every=3", run="parts", devices=2)
    assert "resuming from" in resumed.stdout
    assert resumed.losses == whole.losses and resumed.bpb == whole.bpb
    # One device alone would round 11.2 micro-steps to 11; the checkpoint has the batches the run began with.
    checkpoint_files.set_aside_after(run_dir, 3)
    on_one = train(ramp, "--save_every=3", run="parts", devices=1)
    assert on_one.losses == pytest.approx(whole.losses, rel=2e-6)
    assert on_one.records[-2]["tokens"] == 4608


def test_steps_that_are_not_finite_end_the_run_with_the_last_good_checkpoint_and_the_offending_batch(train):
    train("--device_type=cpu", "--save_every=3", "--eval_every=-1")
    run_dir = get_base_dir() / "checkpoints" / "test"
    checkpoint_files.set_aside_after(run_dir, 3)
    # the update of step 4 makes the embedding infinite, so the steps after it are bad
    process = train("--save_every=1", "--embedding_lr=1e44", "--max_bad_steps=2", devices=2, status=1)
    assert process.stdout.count("is left out") == 2 and "Traceback" not in process.stderr
    assert "error: 2 steps in a row" in process.stdout and "step 4 is not saved" in process.stdout
    assert [process.losses[step] is None for step in range(1, 7)] == [False] * 4 + [True] * 2
    assert process.records[-1]["bad_steps"] == 2 and process.records[-1]["grad_norm"] is None
    assert checkpoint_files.latest_good(run_dir).name == "step_000003"
    rows = [np.load(run_dir / "bad_step_000005" / f"rank_{rank:03d}.npy") for rank in (0, 1)]
    assert all(part.shape == (8, 33) and part.dtype == np.int32 for part in rows)


def test_lines_of_the_log_count_no_evaluation_and_precede_every_checkpoint(train):
    """Evaluations and checkpoints at steps that are no lines of the log by themselves."""
    records = train("--log_every=4", "--eval_every=3", "--save_every=2").records
    assert [record["step"] for record in records if "step_ms" in record] == [1, 2, 3, 4, 6]
    last = records[-1] if "seconds" in records[-1] else records[-2]
    spent = sum(value for name, value in last.items() if name.startswith("seconds_"))
    assert spent == pytest.approx(last["seconds"]) and last["seconds_evaluate"] > 0
    assert last["interruptions"] == last["bad_steps"] == 0


@pytest.mark.parametrize("devices", [1, 2])
def test_fifty_steps_compile_twice_fall_back_never_and_fetch_only_to_log(devices, byte_tokenizer_dir, tmp_path):
    """Read from torch_xla's own counters, by a program that spawns the ranks as base_train does."""
    result = tmp_path / "counters.json"
    process = run_python("-m", "tests.train.count_xla", str(byte_tokenizer_dir), str(result), devices=devices)
    assert process.returncode == 0, process.stderr[-4000:]
    counters = json.loads(result.read_text())
    assert counters["fallbacks"] == []
    by_step = counters["compilations"]
    assert len(by_step) == 50 and len(set(by_step[1:])) == 1  # none after the second step
    assert counters["programs_of_a_step"] == 2
    # 50 steps are logged at steps 1, 10, 20 … 50: each loss is one transfer, made then and not before
    assert counters["transfers_between_logs"] == 0
    assert counters["transfers"] == 50 * devices


@pytest.mark.parametrize("kernel", ["chunked", "flash"])
def test_every_kernel_trains_as_the_plain_one_does(reference, kernel):
    flags = ("--model_dim=128", "--num_heads=1", "--num_iterations=20", "--eval_every=20", "--warmup_steps=2",
             "--eval_tokens=4096")
    plain, found = reference(*flags, "--kernel=current"), reference(*flags, f"--kernel={kernel}")
    assert plain.losses[20] < plain.losses[1] - 0.1
    assert found.losses == pytest.approx(plain.losses, rel=1e-4) and found.bpb == pytest.approx(plain.bpb, rel=1e-4)


def test_synthetic_data_needs_no_data(train):
    process = train("--synthetic_data", "--data_dir=/nowhere", "--val_dir=/nowhere", "--activation_checkpointing",
                    "--kernel=chunked", "--num_kv_heads=1", "--window_pattern=SL", "--sample_every=6")
    assert sorted(process.losses) == [1, 2, 3, 4, 5, 6]
    assert "sample at step 6" in process.stdout


def test_a_wandb_that_accepts_and_never_answers_holds_up_no_step(train):
    """The rates are printed, and not asserted: the machine may be busy."""
    def rate(process):
        times = sorted(record["step_ms"] for record in process.records[3:] if "step_ms" in record)
        return 1000 / times[len(times) // 2]

    program = """
from nanochat.record import wandb_log
wandb_log.FINISH_TIMEOUT_S = 5
from nanochat.common import run_script
from scripts.base_train import main
run_script(main)
"""
    flags = ["--num_iterations=40", "--eval_every=-1", "--device_type=cpu", "--total_batch_size=64"]
    with socket.create_server(("127.0.0.1", 0)) as silent:
        slow = train(*flags, run="silent", new_process=("-c", program), WANDB_MODE="online", WANDB_API_KEY="a" * 40,
                     WANDB_BASE_URL=f"http://127.0.0.1:{silent.getsockname()[1]}")
    without = train(*flags, run="dummy")
    print(f"{rate(slow):.2f} steps/s with a silent WandB, {rate(without):.2f} without one")
    assert slow.stdout.count("warning: WandB") == 1
    assert slow.losses == without.losses and sorted(slow.losses) == list(range(1, 41))


def test_evaluating_a_checkpoint_gives_what_the_run_found(train, byte_tokenizer_dir, corpus_dir, capsys):
    trained = train("--save_every=6", run="done")
    base_eval.main(["--checkpoint=done", f"--tokenizer_dir={byte_tokenizer_dir}", f"--data_dir={corpus_dir}/val",
                    "--eval_tokens=1024", "--device_type=cpu"])
    found = float(re.search(r"([\d.]+) bits per byte", capsys.readouterr().out)[1])
    assert found == pytest.approx(trained.bpb[6], abs=1e-4)  # the same text, on another backend


# -----------------------------------------------------------------------------
# Bad input


@pytest.mark.parametrize("flags, words", [
    (["--total_batch_size=500"], "--total_batch_size=500 .* use 448 or 512"),
    (["--kernel=warp"], "--kernel=warp .*choose current or chunked"),
    (["--kernel=cce"], "--kernel=cce .*choose current or chunked"),
    (["--window_pattern=Q"], "--window_pattern=Q"),
    (["--device_type=gpu"], "--device_type=gpu .*auto, tpu, xla, cuda, cpu"),
    (["--device_type=tpu"], "no TPU chips"),
    (["--tokenizer_dir=/nowhere"], "no tokenizer in /nowhere"),
    (["--data_dir=/nowhere"], "no train data: /nowhere"),
    (["--run=a/b"], "--run=a/b"),
    (["--num_kv_heads=3"], "--num_kv_heads=3"),
    (["--depth=0"], "--depth=0"),
    (["--batch_ramp=100"], "--batch_ramp=100: 100 is not STEP:FACTOR"),
    (["--batch_ramp=200:1.5,100:2"], "100:2 is not STEP:FACTOR with rising steps"),
    (["--profile_steps=3"], "--profile_steps=3 is not BEGIN:END"),
    (["--profile_steps=3:3"], "--profile_steps=3:3 is not"),
    (["--profile_steps=3:7"], "END at most the run's 6 steps"),
    (["--batch_ramp=100:0"], "100:0 is not STEP:FACTOR"),
])
def test_bad_flags_are_refused_with_the_value_and_what_to_do(tiny, flags, words):
    with pytest.raises(BadInput, match=words) as refusal:
        main([*tiny, *flags])
    assert "\n" not in str(refusal.value)


def test_bad_data_names_the_file_and_its_row_group(train, tiny, tmp_path, corpus_dir):
    broken = tmp_path / "broken"
    broken.mkdir()
    whole = (corpus_dir / "train" / "shard_00000.parquet").read_bytes()
    (broken / "shard_00000.parquet").write_bytes(whole[:len(whole) // 2])
    process = train(f"--data_dir={broken}", status=2)
    assert "shard_00000.parquet is not a whole parquet file" in process.stderr
    assert process.stderr.count("\n") == 1 and "Traceback" not in process.stderr
    pq.write_table(pa.table({"code": ["int x;"]}), broken / "shard_00000.parquet")
    with pytest.raises(BadInput, match="no column named text"):
        main([*tiny, f"--data_dir={broken}"])
    damaged = bytearray(whole)
    damaged[40:4000] = bytes(3960)  # in the pages of the first row group; the footer is whole
    (broken / "shard_00000.parquet").write_bytes(damaged)
    with pytest.raises(BadInput, match="shard_00000.parquet.* row group 0"):
        main([*tiny, f"--data_dir={broken}"])


def test_resuming_something_else_is_refused(train, tiny, corpus_dir):
    train("--save_every=6")
    for flags, words in [(["--depth=3"], "another architecture: n_layer is 2 there and 3 here"),
                         ([f"--data_dir={corpus_dir}/val"], "another data")]:
        with pytest.raises(BadInput, match=words):
            main([*tiny, "--run=test", "--num_iterations=8", *flags])
    restarted = train("--resume=never", "--depth=3")
    assert sorted(restarted.losses) == [1, 2, 3, 4, 5, 6]


def test_a_base_directory_that_cannot_be_written_is_refused(tiny, monkeypatch):
    monkeypatch.setenv("NANOCHAT_BASE_DIR", "/dev/null/base")
    with pytest.raises(BadInput, match="cannot write to /dev/null/base"):
        main(tiny)


def test_too_little_disk_for_two_checkpoints_is_said_before_the_first_step(base_dir, byte_tokenizer_dir):
    """On a file system of its own, of 3 MB, which a user namespace lets anyone mount."""
    base_dir.mkdir()
    command = (f"mount -t tmpfs -o size=3m tmpfs {base_dir} && exec {sys.executable} -m scripts.base_train "
               f"--device_type=cpu --depth=4 --synthetic_data --tokenizer_dir={byte_tokenizer_dir} --max_seq_len=32 "
               "--device_batch_size=2 --total_batch_size=64 --num_iterations=2")
    process = subprocess.run(["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", command],
                             capture_output=True, text=True, timeout=TIMEOUT_S)
    if "unshare" in process.stderr or "mount:" in process.stderr:
        pytest.skip(f"no user namespaces here: {process.stderr.strip()}")
    assert process.returncode == 2 and "too little disk" in process.stderr and "step 0" not in process.stdout


# -----------------------------------------------------------------------------
# The plan and the device


def plan_of(*flags, world_size=8):
    return make_plan(parse_flags(flags), 65536, "cpu", world_size)


def test_the_plan_of_the_mission():
    plan = plan_of("--depth=16", "--num_iterations=50000", "--device_batch_size=8", "--max_seq_len=1024",
                   "--kernel=current", "--no_compile", "--run=NAME")
    assert (plan.total_batch_size, plan.grad_accum_steps, plan.num_iterations) == (524288, 8, 50000)
    assert sum(plan.parameters.values()) == 335_544_320 + 32
    assert plan_of("--depth=16", world_size=4).grad_accum_steps == 16


def test_the_horizon_is_the_first_of_three_flags():
    both = ["--target_flops=1e18", "--target_param_data_ratio=10"]
    assert plan_of("--num_iterations=7", *both).num_iterations == 7
    by_flops = plan_of(*both)
    assert by_flops.num_iterations == round(1e18 / (by_flops.flops_per_token * by_flops.total_batch_size))
    by_ratio = plan_of("--target_param_data_ratio=10", "--total_batch_size=524288")
    assert by_ratio.num_iterations == round(10 * (201_326_592 + 67_108_864) / 524288)


def test_the_horizon_in_tokens_counts_the_batches_that_grow():
    ramp = plan_of("--target_param_data_ratio=10", "--total_batch_size=524288", "--batch_ramp=1000:1.5,2000:2")
    assert ramp.batch_schedule == ((0, 524288), (1000, 786432), (2000, 1048576))
    assert [ramp.micro_steps(step) for step in (0, 999, 1000, 1999, 2000)] == [8, 8, 12, 12, 16]
    tokens = 10 * (201_326_592 + 67_108_864)
    assert ramp.num_iterations == 2000 + round((tokens - 1000 * (524288 + 786432)) / 1048576)
    assert ramp.tokens(0, ramp.num_iterations) == pytest.approx(tokens, abs=1048576 / 2)
    assert ramp.tokens(999, 1001) == 524288 + 786432 and ramp.tokens(2500, 2501) == 1048576


def test_a_schedule_that_more_devices_cannot_divide_is_refused():
    flags = ["--total_batch_size=131072", "--batch_ramp=10:1.25"]
    begun = plan_of(*flags, "--device_batch_size=4")
    meta = Meta(step=1, config={}, tokenizer_sha256="", data_fingerprint="", flags=parse_flags(flags).as_dict(), rng="",
                batch_schedule=begun.batch_schedule)
    with pytest.raises(BadInput, match="131,072, 163,840 tokens.*do not all divide by 131072"):
        make_plan(parse_flags([*flags, "--device_batch_size=8"]), 65536, "cpu", 16, meta)


def test_dashes_in_flags_are_accepted():
    assert parse_flags(["--max-seq-len=7", "--no-compile"]).model.max_seq_len == 7


def test_a_world_size_that_does_not_divide_is_refused():
    with pytest.raises(BadInput, match="3 devices do not divide the 64 lanes"):
        plan_of(world_size=3)


@pytest.fixture
def pci_with_tpus(tmp_path):
    """A PCI bus as on a v5litepod-8 VM: eight TPU chips and a network card by Google."""
    for i, device_id in enumerate(["0x0063"] * 8 + ["0x0042"]):
        device = tmp_path / "pci" / str(i)
        device.mkdir(parents=True)
        (device / "vendor").write_text("0x1ae0\n")
        (device / "device").write_text(device_id + "\n")
    return tmp_path / "pci"


def test_a_machine_with_tpus_trains_on_them(pci_with_tpus, monkeypatch):
    assert count_tpu_chips(pci_with_tpus) == 8
    monkeypatch.delenv("PJRT_DEVICE")
    assert resolve_device_type("auto", pci_with_tpus) == "tpu"
    assert resolve_device_type("xla", pci_with_tpus) == "xla"  # when told to
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    with pytest.raises(BadInput, match="8 TPU chips but PJRT_DEVICE=CPU"):
        resolve_device_type("auto", pci_with_tpus)
