"""Runs that begin with another run's checkpoint."""
import re
import shutil
from dataclasses import asdict, replace

import pytest
import torch

from nanochat.checkpoint import on_disk
from nanochat.checkpoint.meta import load_meta
from nanochat.checkpoint.saver import save_checkpoint
from nanochat.common import BadInput, get_base_dir
from nanochat.data.tokenizer import SHIPPED_DIR, load_tokenizer
from nanochat.device.ranks import Dist
from nanochat.infer.load import load_model
from nanochat.kernels.choose import get_kernels
from nanochat.model.llama import LlamaConfig
from nanochat.model.rates import run_lr_scale
from nanochat.train.flags import parse_flags
from nanochat.train.language import make_task
from nanochat.train.prepare import run_directory
from nanochat.train.start import as_begun, run_tokenizer, with_start
from scripts.base_train import main
from tests.checkpoint.states import make_meta, make_source
from tests.conftest import LLAMA, add_records, last_of_each
from tests.data.hub import files_of, hub_tokenizer, qwen, smollm2, zipped


@pytest.fixture(scope="module")
def trained(tiny, warm_ranks, tmp_path_factory):
    """A run of 8 steps whose rates fall after step 4, with checkpoints of steps 4 and 8."""
    base_dir = tmp_path_factory.mktemp("first")
    flags = last_of_each("--run=first", *tiny, "--num_iterations=8", "--eval_every=2", "--save_every=4")
    process = warm_ranks(2).call(main, flags, NANOCHAT_BASE_DIR=str(base_dir))
    assert process.returncode == 0, process.stderr
    return add_records(process, base_dir / "checkpoints" / "first")


@pytest.fixture
def first(trained):
    """The same run, as a copy in the base directory of this test."""
    shutil.copytree(trained.run_dir, get_base_dir() / "checkpoints" / "first")
    return trained


def test_a_run_that_begins_with_weights_has_them_and_resumes_without_their_run(train, first, tiny, corpus_dir,
                                                                               tmp_path):
    """On this machine, and on a new one, which has only the mirror."""
    flags = ["--init_from=first", f"--data_dir={corpus_dir}/val", "--save_every=3"]
    mirror = f"--checkpoint_mirror={tmp_path}/mirror"
    process = train(*flags, mirror, run="second", devices=2, without=("depth", "model_dim", "num_heads", "max_seq_len"))
    assert "start  weights and optimizer of first/step_000008" in process.stdout
    # The optimizer's averages are as old as the runs together that had them.
    third = parse_flags(last_of_each("--run=third", *tiny, "--init_from=second"))
    task = make_task(third, "cpu", 1, run_directory(third))
    assert task.plan.start.earlier_steps == 8 + 6
    saved = replace(load_meta(on_disk.latest(process.run_dir)), flags=task.flags.as_dict())
    assert as_begun(third, saved).start == task.flags.start
    assert process.bpb[0] == first.bpb[8] and sorted(process.losses) == [1, 2, 3, 4, 5, 6]
    on_disk.set_aside_after(process.run_dir, 3)
    (process.run_dir / ".finished").unlink()
    shutil.rmtree(get_base_dir() / "checkpoints/first")
    resumed = train(*flags, run="second", devices=2)
    assert "step_000003" in resumed.stdout and resumed.losses == process.losses and resumed.bpb == process.bpb
    meta = load_meta(on_disk.latest(process.run_dir))
    assert (meta.flags["init_from"], meta.flags["init_optimizer"]) == ("first/step_000008", True)
    shutil.rmtree(get_base_dir())
    shutil.rmtree(tmp_path / "mirror/second/step_000006")
    resumed = train(*flags, mirror, run="second", devices=2)
    assert "step_000003" in resumed.stdout and resumed.losses == process.losses
    assert load_meta(on_disk.latest(process.run_dir)).flags["init_from"] == "first/step_000008"


def test_the_rates_of_a_run_that_begins_with_weights_do_not_depend_on_its_length(first, tiny):
    def rules(*flags):
        flags = parse_flags(last_of_each("--run=second", *tiny, *flags))
        return make_task(flags, "cpu", 1, run_directory(flags)).plan.rules

    scratch = rules("--num_iterations=100")
    begun = rules("--num_iterations=100", "--init_from=first")
    assert begun.matrix_lr == rules("--num_iterations=200", "--init_from=first").matrix_lr
    assert scratch.matrix_lr == pytest.approx(begun.matrix_lr * run_lr_scale(100 * 512))
    # A weight shrinks by as much, whatever its rate.
    assert begun.matrix_weight_decay * begun.matrix_lr == pytest.approx(scratch.matrix_weight_decay * scratch.matrix_lr)
    halved = rules("--num_iterations=100", "--lr_scale=0.5")
    assert halved.matrix_lr == scratch.matrix_lr / 2
    assert {name: rule.lr for name, rule in halved.adam.items()} == {
        name: rule.lr / 2 for name, rule in scratch.adam.items()}


def test_fifty_steps_with_the_usual_rates_unlearn_nothing_of_trained_weights_of_the_llama_family(train):
    flags = (*LLAMA, "--device_type=cpu", "--device_batch_size=16", "--num_iterations=50", "--eval_every=50",
             "--save_every=50")
    begun = train(*flags, "--lr_scale=10", run="begun")
    assert begun.bpb[50] < 0.7 * begun.bpb[0]
    further = train(*flags, "--init_from=begun", run="further")
    assert further.bpb[0] == pytest.approx(begun.bpb[50], rel=1e-5)
    assert further.bpb[50] < 1.02 * further.bpb[0]


def test_a_start_that_cannot_be_is_refused_in_one_line(train, first, tiny, tmp_path):
    def refusal(*flags, run="second"):
        directory = get_base_dir() / "checkpoints" / run
        with pytest.raises(BadInput) as error:
            flags = parse_flags(last_of_each(f"--run={run}", *tiny, *flags))
            make_task(flags, "cpu", 1, directory, on_disk.latest(directory))
        assert "\n" not in str(error.value)
        return str(error.value)

    assert "no checkpoint at nobody" in refusal("--init_from=nobody")
    mirrored = train("--init_from=nobody", f"--checkpoint_mirror={tmp_path}/mirror", run="second", status=2)
    assert "error: --init_from=nobody: no checkpoint at nobody" in mirrored.stderr
    flags = parse_flags(last_of_each("--run=a", *tiny, "--init_from=first"))
    origin = make_task(flags, "cpu", 1, run_directory(flags)).origin
    assert re.fullmatch(r"first/step_000008 \([0-9a-f]{12}\)", origin)
    assert "did not begin with other" in refusal("--init_from=other", run="first")
    for flag in ("--init_from=", "--init_from= ", "--teacher="):  # with a variable that is not set
        assert f"{flag}: it is empty: give a value, or leave the flag out" in refusal(flag)
    assert refusal("--init_from=first", "--depth=3").endswith("has --depth=2: leave the flag out")
    assert "the hash of the tokenizer" in refusal("--init_from=first", f"--tokenizer_dir={SHIPPED_DIR}")
    model = get_base_dir() / "checkpoints/first/step_000008/model.safetensors"
    model.write_bytes(model.read_bytes()[:-1] + b"x")
    assert "is damaged" in refusal("--init_from=first")


# Flags of `tiny` that imported weights bring, or that are for the other model
WITHOUT = ("depth", "model_dim", "num_heads", "max_seq_len", "tokenizer_dir", "matrix_lr", "embedding_lr",
           "unembedding_lr", "scalar_lr")


@pytest.fixture
def hub_model(tmp_path):
    """The path of a checkpoint of imported weights, with three more rows than its tokenizer has ids."""
    tokenizer = hub_tokenizer(qwen)
    config = LlamaConfig(vocab_size=tokenizer.n_vocab + 3, n_layer=1, max_seq_len=64, max_positions=64, n_embd=32,
                         n_head=2, n_kv_head=1, head_dim=16, mlp_dim=64)
    model = config.new_model(get_kernels("current", "cpu")).init_weights(1)
    source = make_source(model="some/coder")
    return save_checkpoint(tmp_path / "imported", model.state_dict(), {}, make_meta(
        0, config=asdict(config), tokenizer_sha256=tokenizer.sha256, flags={}, rng="", source=source), num_lanes=0,
        source=zipped(files_of(*qwen())))


@pytest.mark.slow
def test_what_came_with_imported_weights_stays_with_a_run_that_begins_with_them(train, hub_model, tiny, tmp_path):
    """On this machine, whose command need not repeat the start, and on a new one, which has only the mirror."""
    tokenizer, files = load_tokenizer(checkpoint=hub_model), (hub_model / on_disk.SOURCE).read_bytes()

    def require_source(path):
        meta = load_meta(path)
        assert meta.source == make_source(model="some/coder") and meta.tokenizer_sha256 == tokenizer.sha256
        assert (path / on_disk.SOURCE).read_bytes() == files and on_disk.find_problem(path) is None

    mirror = f"--checkpoint_mirror={tmp_path}/mirror"
    flags = [f"--init_from={hub_model}", "--save_every=3", "--max_seq_len=64", "--device_type=cpu", mirror]
    process = train(*flags, run="second", without=WITHOUT)
    assert f"{tokenizer.n_vocab} tokens, sha256 {tokenizer.sha256[:12]}; some texts do not come back" in process.stdout
    saved = on_disk.latest(process.run_dir)
    require_source(saved)
    shape = [flag for flag in tiny if flag.partition("=")[0].removeprefix("--") not in WITHOUT]
    preflight = with_start(parse_flags(["--run=third", *shape, f"--init_from={hub_model}"]))
    assert run_tokenizer(preflight).sha256 == tokenizer.sha256
    shutil.rmtree(hub_model)
    on_disk.set_aside_after(process.run_dir, 3)
    (process.run_dir / ".finished").unlink()
    resumed = train("--save_every=3", "--device_type=cpu", run="second", without=WITHOUT)
    assert "step_000003" in resumed.stdout and resumed.losses == process.losses
    require_source(saved)
    shutil.rmtree(get_base_dir())
    shutil.rmtree(tmp_path / "mirror/second/step_000006")
    resumed = train(*flags, run="second", without=WITHOUT)
    assert "step_000003" in resumed.stdout and resumed.losses == process.losses
    require_source(saved)
    _, loaded, _ = load_model(saved, Dist("cpu", torch.device("cpu")))
    assert loaded.sha256 == tokenizer.sha256


def test_an_imported_model_has_only_weights_to_begin_with(hub_model, tiny):
    shape = [flag for flag in tiny if flag.partition("=")[0].removeprefix("--") not in WITHOUT]
    flags = parse_flags(["--run=second", *shape, f"--init_from={hub_model}"])
    task = make_task(flags, "cpu", 1, run_directory(flags))
    assert task.start.load()[1] is None and task.plan.start.earlier_steps == 0
    assert task.start.describe().endswith("weights of imported/step_000000")
    with pytest.raises(BadInput, match="holds only weights.*--init_from=imported"):
        make_task(parse_flags(["--run=imported", *shape]), "cpu", 1, hub_model.parent, hub_model)


def test_a_run_that_gives_tokens_the_meaning_of_gaps_says_so(tiny, tmp_path):
    for name, content in files_of(*smollm2()).items():
        (tmp_path / name).write_bytes(content)
    flags = last_of_each("--run=gaps", *tiny, f"--tokenizer_dir={tmp_path}", "--max_seq_len=64", "--fim_rate=0.5")
    lines = make_task(parse_flags(flags), "cpu", 1, run_directory(parse_flags(flags))).describe()
    assert [line for line in lines if "<jupyter_start> means <|fim_prefix|>" in line]
    plain = parse_flags(last_of_each(*flags, "--fim_rate=0"))
    assert not any("jupyter" in line for line in make_task(plain, "cpu", 1, run_directory(plain)).describe())
