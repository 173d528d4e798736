"""Runs on a mesh with fsdp or tensor train as the unsharded model does, to fp32 rounding, and share checkpoints with
it."""
import shutil

import pytest
import torch

from nanochat.checkpoint.meta import load_meta
from nanochat.checkpoint.on_disk import latest, set_aside_after
from nanochat.checkpoint.pieces import load_checkpoint
from nanochat.common import BadInput
from scripts.base_train import main
from tests.conftest import LLAMA, last_of_each, save_byte_tokenizer

CHUNKED = ("--kernel=chunked", "--log_every=1", "--num_heads=4", "--depth=3")
FLASH = ("--kernel=flash", "--log_every=1", "--depth=2", "--model_dim=256", "--num_heads=2", "--num_kv_heads=1",
         "--max_seq_len=128", "--device_batch_size=1", "--window_pattern=SL", "--activation_checkpointing",
         "--matrix_lr=0.0002", "--num_iterations=3")
LOWER_RATES = ("--matrix_lr=0.0003", "--embedding_lr=0.005", "--unembedding_lr=0.00006", "--scalar_lr=0.008")
SLOW = *CHUNKED, *LOWER_RATES


def assert_same(run, other):
    assert run.losses.keys() == other.losses.keys() and len(run.losses) > 2
    assert run.losses == pytest.approx(other.losses, rel=1e-5)
    assert run.bpb == pytest.approx(other.bpb, rel=1e-5)


def norms(run):
    return [record["grad_norm"] for record in run.records if "loss" in record]


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory):
    """Its 272 tokens can be divided among 8 ranks."""
    return save_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"), b"  ", b"//")


@pytest.fixture(scope="module")
def odd_tokenizer_dir(tmp_path_factory):
    """No mesh divides its 271 tokens."""
    return save_byte_tokenizer(tmp_path_factory.mktemp("odd"), b"  ")


@pytest.mark.slow
@pytest.mark.parametrize("data, fsdp, tensor, is_odd, flags", [
    pytest.param(1, 4, 1, False, SLOW, id="four chips share three layers"),
    pytest.param(1, 1, 2, False, SLOW, id="tensor"),
    pytest.param(2, 2, 2, True, SLOW, id="all axes"),
    # With gates, rounding grows to 2e-4 of the norms in 8 steps.
    pytest.param(1, 2, 2, True, (*SLOW, "--value_embeddings=shared", "--layer_gates=off"), id="value embeddings"),
    pytest.param(1, 2, 2, True, (*CHUNKED, *LLAMA, "--kernel=flash", "--num_kv_heads=2", "--clip_norm=2.4"),
                 id="llama, whose head is tied, flash"),
    pytest.param(1, 1, 2, True, (*CHUNKED, *LLAMA, "--tied_head=off", "--num_kv_heads=2", "--activation_checkpointing"),
                 id="llama with its own head"),
    pytest.param(1, 2, 1, False, FLASH, id="flash, windows, grouped queries, recomputation"),
    # At the usual rates, rounding would grow where tensor divides the heads.
    pytest.param(1, 2, 2, False, (*FLASH, "--model_dim=512", "--num_heads=4", "--num_kv_heads=2", *LOWER_RATES[1:],
                                  "--warmup_steps=6"), id="flash on tensor"),
    # 9,216 tokens are two chunks of the loss. Rates rise with the batch.
    pytest.param(1, 1, 2, False, (*SLOW, "--softcap=0", "--device_batch_size=288", "--total_batch_size=9216",
                                  "--seq_len_ramp=0:16,2:32", "--num_iterations=3"),
                 id="logits without a bound, several chunks of tokens, longer rows")])
def test_every_mesh_trains_as_the_unsharded_model(train, reference, tokenizer_dir, odd_tokenizer_dir, data, fsdp,
                                                  tensor, is_odd, flags):
    tokenizer_dir = odd_tokenizer_dir if is_odd else tokenizer_dir
    flags = "--num_iterations=4", "--eval_every=4", f"--tokenizer_dir={tokenizer_dir}", *flags
    sharded = train(*flags, f"--mesh_fsdp={fsdp}", f"--mesh_tensor={tensor}", devices=data * fsdp * tensor)
    whole = reference(*flags)
    assert_same(sharded, whole)
    assert norms(sharded) == pytest.approx(norms(whole), rel=1e-4)
    assert f"{data} data × {fsdp} fsdp × {tensor} tensor" in sharded.stdout
    for field in ("tokens", "epoch", "val_bytes"):
        assert [record.get(field) for record in sharded.records] == [record.get(field) for record in whole.records]


@pytest.mark.slow
def test_gates_are_whole_and_learn_from_what_all_ranks_compute(train, reference, tokenizer_dir):
    flags = (*SLOW, f"--tokenizer_dir={tokenizer_dir}", "--layer_gates=on", "--num_iterations=3",
             "--save_every=3", "--num_kv_heads=2", "--value_embeddings=shared")
    sharded = train(*flags, "--mesh_fsdp=2", "--mesh_tensor=2", devices=4)
    whole = reference(*flags)
    assert_same(sharded, whole)
    found, expected = (load_checkpoint(latest(run.run_dir)) for run in (sharded, whole))
    for name in ("gate_map", "gate_scale"):  # Adam's step would be the same if their gradients were all too small
        average = expected.optimizer_state[f"{name}.momentum"]
        torch.testing.assert_close(found.optimizer_state[f"{name}.momentum"], average,
                                   atol=0.02 * float(average.abs().max()), rtol=0)


@pytest.mark.slow
def test_steps_that_are_not_finite_are_left_out_by_all_ranks_and_end_the_run(train, tokenizer_dir):
    """The update of the first step makes the embedding infinite."""
    run = train(*CHUNKED, f"--tokenizer_dir={tokenizer_dir}", "--eval_every=-1", "--embedding_lr=1e44",
                "--num_iterations=20", "--mesh_fsdp=2", "--mesh_tensor=2", devices=4, status=1)
    assert run.stdout.count("is skipped") == 10 and "error: 10 steps in a row" in run.stdout
    assert [run.losses[step] is None for step in (1, 2, 3)] == [False, True, True]
    assert run.records[-1]["bad_steps"] == 10 and "Traceback" not in run.stderr


@pytest.fixture
def teacher(train, odd_tokenizer_dir):
    """The name of a run whose model is wider than its students; its heads are as many."""
    train(f"--tokenizer_dir={odd_tokenizer_dir}", "--model_dim=96", "--num_heads=4", "--save_every=6",
          "--device_type=cpu", "--device_batch_size=16", run="teacher")
    return "teacher"


@pytest.mark.slow
def test_a_student_on_a_mesh_learns_from_a_divided_teacher_as_without_a_mesh(train, teacher, odd_tokenizer_dir):
    """And it resumes bit for bit."""
    flags = (*CHUNKED, f"--tokenizer_dir={odd_tokenizer_dir}", f"--teacher={teacher}", "--kd_weight=0.8", "--softcap=0",
             "--kd_temperature=1.5", "--num_iterations=5", "--save_every=3", *LOWER_RATES)
    whole = train(*flags, run="whole")
    for data, fsdp, tensor in ((2, 2, 1), (1, 2, 2)):
        mesh = f"--mesh_fsdp={fsdp}", f"--mesh_tensor={tensor}"
        devices, name = data * fsdp * tensor, f"on-{data}-{fsdp}-{tensor}"
        divided = train(*flags, *mesh, run=name, devices=devices)
        assert_same(divided, whole)
        assert norms(divided) == pytest.approx(norms(whole), rel=1e-4)
    set_aside_after(divided.run_dir, 3)
    resumed = train(*flags, *mesh, run=name, devices=devices)
    assert "resuming from" in resumed.stdout
    assert {s: resumed.losses[s] for s in (4, 5)} == {s: divided.losses[s] for s in (4, 5)}


@pytest.mark.slow
def test_a_teacher_whose_weights_the_mesh_cannot_divide_is_refused(tiny, teacher, odd_tokenizer_dir, monkeypatch):
    monkeypatch.setenv("CPU_NUM_DEVICES", "8")
    flags = last_of_each(*tiny, f"--tokenizer_dir={odd_tokenizer_dir}", "--kernel=chunked", "--teacher=teacher",
                         "--num_heads=8", "--mesh_tensor=8")
    with pytest.raises(BadInput, match="--teacher=teacher .*8 chips along tensor do not divide the attention heads") \
            as refusal:
        main(flags)
    assert "\n" not in str(refusal.value)


@pytest.mark.slow
def test_a_checkpoint_says_its_mesh_and_goes_on_on_every_other_one(train, reference, odd_tokenizer_dir):
    def on(mesh, **run):
        data, fsdp, tensor = mesh
        found = train(*flags, f"--mesh_fsdp={fsdp}", f"--mesh_tensor={tensor}", devices=data * fsdp * tensor, **run)
        assert load_meta(latest(found.run_dir)).mesh == {"data": data, "fsdp": fsdp, "tensor": tensor}
        return found

    flags = *CHUNKED, f"--tokenizer_dir={odd_tokenizer_dir}", "--save_every=3"
    mesh = 1, 2, 2
    first = on(mesh)
    saved = load_checkpoint(latest(first.run_dir)).model_state
    assert {len(saved["wte"]), len(saved["lm_head"])} == {271}
    whole = reference(*flags)
    for other in (mesh, (1, 1, 1), (2, 1, 2)):
        copy = first.run_dir.with_name("copy-" + "-".join(map(str, other)))
        shutil.copytree(first.run_dir, copy)
        set_aside_after(copy, 3)
        resumed = on(other, run=copy.name)
        later = {step: loss for step, loss in resumed.losses.items() if step > 3}
        assert later == pytest.approx({step: whole.losses[step] for step in (4, 5, 6)}, rel=1e-5)
        if other == mesh:  # the same mesh gives the same bits
            assert later == {step: first.losses[step] for step in (4, 5, 6)}


@pytest.mark.parametrize("flags, devices, words", [
    (["--mesh_tensor=4"], 4, "4 chips along tensor do not divide the attention heads .*2: use 2 along tensor"),
    (["--mesh_tensor=2", "--num_kv_heads=1"], 2, "do not divide the heads of keys and values .*1: use 1 along tensor"),
    (["--mesh_tensor=2", "--mesh_fsdp=4", "--model_dim=60"], 8,
     "4 chips along fsdp do not divide the width .* a chip along tensor has, 30: use 2 along fsdp"),
    (["--mesh_tensor=2", "--kernel=current"], 2, "--mesh_tensor .* --kernel=current"),
    (["--mesh_tensor=2", "--shard_optimizer=off"], 2, "1 fsdp × 2 tensor .* --shard_optimizer=off.*: leave it out"),
    (["--mesh_tensor=2"], 6, "3 groups of 2 devices do not divide .* use 2 or 4 groups of 2 devices"),
    (["--mesh_tensor=2", "--total_batch_size=300"], 2, "64 = .* 1 groups of 2 devices: use 256 or 320"),
    (["--mesh_fsdp=2", "--device_type=cpu"], 1, "number of chips, 1: use 1 along fsdp, and the others along data"),
])
def test_meshes_that_cannot_be_are_refused_before_anything_starts(tiny, monkeypatch, flags, devices, words):
    monkeypatch.setenv("CPU_NUM_DEVICES", str(devices))
    with pytest.raises(BadInput, match=words) as refusal:
        main(last_of_each(*tiny, "--kernel=chunked", *flags))
    assert "\n" not in str(refusal.value)
