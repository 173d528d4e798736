"""A model is adapted to a project."""
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from nanochat.checkpoint.meta import Meta
from nanochat.checkpoint.saver import save_checkpoint
from nanochat.common import BadInput, get_base_dir, locked
from nanochat.data.loader import DataLoader, RankRows
from nanochat.data.shards import open_shards, whole_texts
from nanochat.kernels.choose import get_kernels
from nanochat.model.llama import LlamaConfig
from nanochat.model.rates import gpt_rules
from nanochat.train.flags import Flags as TrainFlags
from nanochat.train.flags import parse_flags
from scripts import adapt
from tests.checkpoint.states import make_meta, make_source
from tests.conftest import last_of_each
from tests.data.documents import ByteTokenizer
from tests.data.hub import files_of, hub_tokenizer, llama3, qwen, zipped


def project_shard(path, files, source="p"):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"text": list(files.values()), "source": [source] * len(files), "path": list(files)}), path)
    return open_shards([path])


@pytest.fixture
def project(corpus_dir, tmp_path):
    """A folder with the files of the corpus that are held out."""
    folder = tmp_path / "project"
    folder.mkdir()
    for i, text in enumerate(whole_texts(open_shards(sorted((corpus_dir / "val").glob("*.parquet"))))):
        (folder / f"{i}.h").write_text(text)
    return folder


def test_a_tenth_of_a_project_is_held_out_by_the_names_of_its_files(tmp_path):
    files = {f"{i}.h": f"int x{i};" * (1 + i % 7) for i in range(200)}
    adapt.divide(project_shard(tmp_path / "a.parquet", files), tmp_path / "own")
    train, val = (list(whole_texts(open_shards([tmp_path / "own" / split / "shard_00000.parquet"])))
                  for split in ("train", "val"))
    assert sorted(train + val) == sorted(files.values())
    assert 0.09 < sum(map(len, val)) / sum(map(len, files.values())) <= 0.1
    shards = project_shard(tmp_path / "c.parquet", files) + project_shard(tmp_path / "d.parquet", files, source="other")
    adapt.divide(shards, tmp_path / "both")  # files of one name
    assert sum(len(list(whole_texts(open_shards([tmp_path / "both" / split / "shard_00000.parquet"]))))
               for split in ("train", "val")) == 400
    with pytest.raises(BadInput, match="has a single C.. file"):
        adapt.divide(project_shard(tmp_path / "b.parquet", {"a.h": "int x;"}), tmp_path / "other")


def test_the_best_checkpoint_is_one_that_the_old_text_loses_little_by(tmp_path, capsys):
    lines = [f'{{"step": {step}, "time": {step}, "val_bpb_own": {own}, "val_bpb_old": {old}}}\n'
             for step, (own, old) in enumerate(((2.0, 1.0), (1.5, 1.03), (1.4, 1.031), (1.6, 1.0)))]
    (tmp_path / "metrics.jsonl").write_text("".join(lines) + '{"step": 4, "val_')
    adapt.report(adapt.Flags(run="a"), tmp_path, ["--init_from=gone", "--tokenizer_dir=/tmp/my tokens"], tmp_path)
    said = capsys.readouterr().out
    assert "its held-out files: 2.0000 -> 1.5000 bits per byte (-25.0%)" in said
    assert "scripts.serve --checkpoint=a/step_000001 '--tokenizer_dir=/tmp/my tokens'\n" in said
    (tmp_path / "metrics.jsonl").write_text(lines[0] + lines[2])
    adapt.report(adapt.Flags(run="a"), tmp_path, ["--init_from=gone"], tmp_path)
    assert "nothing was gained" in capsys.readouterr().out
    (tmp_path / "metrics.jsonl").write_text(lines[1])
    with pytest.raises(BadInput, match="first evaluation failed"):
        adapt.report(adapt.Flags(run="a"), tmp_path, [], tmp_path)


@pytest.mark.parametrize("old, is_stopped", [(1.031, True), (1.03, False)])
def test_training_stops_once_the_old_text_loses_too_much(tmp_path, monkeypatch, capsys, old, is_stopped):
    """With a process that writes what base_train does, and waits to be stopped."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "time": 0, "val_bpb_own": 2, "val_bpb_old": 1}\n')
    program = f"""
import signal, sys, time
signal.signal(15, lambda *_: sys.exit(75))
with open({str(tmp_path / "metrics.jsonl")!r}, "a") as file:
    file.write('{{"step": 1, "time": 1, "val_bpb_own": 1, "val_bpb_old": {old}}}\\n')
time.sleep({60 if is_stopped else 2})
"""

    @contextmanager
    def started(*argv):
        with subprocess.Popen([sys.executable, "-c", program]) as process:
            yield process

    monkeypatch.setattr(adapt, "started_module", started)
    adapt.train([], tmp_path)
    assert ("loses too much" in capsys.readouterr().out) == is_stopped
    assert adapt.loses_too_much(tmp_path) == is_stopped


def begun_with(steps=600, device_type="cpu", step=5000, **saved):
    """Returns the Flags of the training that adapts a run with these flags after `step` steps."""
    flags = TrainFlags().replace(data_dir="parquet/train", **saved)
    meta = Meta(step, {}, "", "", flags.as_dict(), "", total_batch_size=8192)
    fim_rate = adapt.fim_rate_for(meta, ByteTokenizer())
    return parse_flags(adapt.training_flags(adapt.Flags(device_type=device_type), Path("a/step_005000"), meta, steps,
                                            Path("f"), fim_rate))


def test_an_adapted_run_has_the_batch_and_lower_rates_than_the_run_before_and_keeps_all_evaluated_checkpoints():
    for steps in (6, 11, 12, 600):
        record = begun_with(steps).record
        assert record.save_every == record.eval_every
        assert record.keep_checkpoints == 100  # however many others interruptions leave
    flags = begun_with(total_batch_size=-1, matrix_lr=0.03, num_iterations=20000, fim_rate=0.5, weight_decay=0.0)
    assert flags.batch.total_batch_size == 8192 and flags.optimizer.matrix_lr == 0.0045
    assert flags.data.fim_rate == 0.5 and flags.optimizer.weight_decay == 0


def test_imported_weights_are_adapted_in_small_steps_at_one_ten_thousandth(monkeypatch):
    monkeypatch.setenv("CPU_NUM_DEVICES", "4")
    config = LlamaConfig(vocab_size=300, n_layer=1, max_seq_len=2048)
    meta = Meta(0, asdict(config), "", "", {}, "", source=make_source())
    for device_type, devices in (("cpu", 1), ("xla", 4)):
        given = adapt.Flags(device_type=device_type)
        flags = parse_flags(adapt.training_flags(given, Path("a"), meta, 6, Path("f"), 0.5))
        assert flags.batch.total_batch_size == 1024 * devices and flags.batch.device_batch_size == 2
        assert flags.model.max_seq_len == 512
        assert config.rules(flags.optimizer, 1024, 6, None, 0, 0).matrix_lr == pytest.approx(1e-4)
    assert adapt.old_data(adapt.Flags(), meta, "x") is None
    assert adapt.device_for("auto", meta) == "cpu" and adapt.device_for("xla", meta) == "xla"
    assert adapt.device_for("auto", make_meta()) == "xla"
    assert adapt.fim_rate_for(meta, hub_tokenizer(qwen)) == 0.5
    assert adapt.fim_rate_for(meta, hub_tokenizer(llama3)) == 0  # no token to spare
    assert adapt.fim_rate_for(make_meta(flags={"fim_rate": 0.25}), None) == 0.25


@pytest.mark.parametrize("has_products, device_type, dtype", [
    (True, "cpu", "bfloat16"), (False, "cpu", "float32"), (True, "xla", "float32")])
def test_a_cpu_that_has_products_in_bfloat16_adapts_with_them(monkeypatch, has_products, device_type, dtype):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_products)
    flags = begun_with(device_type=device_type).devices
    assert flags.dtype_on(device_type) == getattr(torch, dtype)


@pytest.mark.slow
def test_a_public_model_is_adapted_with_installed_headers_for_its_unknown_data(base_dir, project, capfd):
    tokenizer = hub_tokenizer(qwen)
    config = LlamaConfig(vocab_size=tokenizer.n_vocab, n_layer=1, max_seq_len=64, n_embd=32, n_head=2, n_kv_head=1,
                         head_dim=16, mlp_dim=64)
    model = config.new_model(get_kernels("current", "cpu")).init_weights()
    save_checkpoint(base_dir / "checkpoints/public", model.state_dict(), {}, make_meta(
        0, config=asdict(config), tokenizer_sha256=tokenizer.sha256, flags={}, rng="",
        source=make_source()), num_lanes=0,
        source=zipped(files_of(*qwen())))
    assert not adapt.main(["--checkpoint=public", f"--source={project}", "--minutes=0.1", "--device_type=cpu",
                           "--rate=10"])
    said = capfd.readouterr().out
    assert re.search(r"its held-out files: \d\.\d+ -> \d\.\d+ bits per byte \(-\d+\.\d%\)", said)
    assert len(re.findall(r"a line of a held-out file: \S.*\n  the model wrote before: .*\n  it writes now", said)) == 3
    assert "fim_rate=0.5" in said
    assert list((base_dir / "adapt/adapted/old/val").glob("*.parquet"))


def rates_of(flags, rate_horizon=0):
    """Returns the rate and the decay of the matrices, and all other rates, of a run with these Flags."""
    rules = gpt_rules(flags.optimizer, flags.batch.total_batch_size, flags.batch.num_iterations, 768,
                      rate_horizon=rate_horizon)
    return rules.matrix_lr, rules.matrix_weight_decay, *(rule.lr for rule in rules.adam.values())


def test_an_adapted_run_has_the_rates_and_the_decay_a_step_of_the_run_before_times_its_rate():
    adapted = begun_with(137, num_iterations=20000)
    # As with rates and decay for the length of the run before.
    before = adapted.replace(lr_scale=1.0, weight_decay=4.0)
    assert rates_of(before, 20000)[:2] == pytest.approx((0.0010665078164625078, 0.18750917550382232), rel=1e-14)
    assert rates_of(adapted) == pytest.approx(rates_of(before, 20000), rel=1e-14)
    # The length is what its rates were scaled for, what it was to have, or what it has.
    of_other = begun_with(137, num_iterations=2000, rate_horizon=7000)
    assert rates_of(of_other) == pytest.approx(rates_of(before, 7000), rel=1e-14)
    assert rates_of(begun_with(137, num_iterations=-1)) == pytest.approx(rates_of(before, 5000), rel=1e-14)
    # An adapted run is adapted again.
    again = begun_with(137, **vars(adapted.optimizer), rate_horizon=0, num_iterations=137)
    assert again.optimizer.matrix_lr == pytest.approx(0.02 * 0.15**2)
    assert again.optimizer.lr_scale == adapted.optimizer.lr_scale
    assert again.optimizer.weight_decay == pytest.approx(adapted.optimizer.weight_decay)


def test_a_short_training_reads_old_files_to_their_ends(tmp_path, monkeypatch):
    """And not the beginning of one file in each of many lanes."""
    texts = ["licence " * 100 + "code " * 1000] * 128
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet", row_group_size=8)
    monkeypatch.setenv("CPU_NUM_DEVICES", "4")
    for device_type, ranks in (("cpu", 1), ("xla", 4)):
        rows = RankRows(batch_size=160, seq_len=256, num_lanes=begun_with(device_type=device_type).data.num_lanes)
        assert rows.num_lanes % ranks == 0
        with DataLoader(open_shards([tmp_path / "a.parquet"]), ByteTokenizer(), rows) as loader:
            read = bytes(next(loader).rows.clamp(0, 255).to(dtype=torch.uint8).flatten().tolist())
        assert read.count(b"code ") / 5 > read.count(b"licence ") / 10


def test_the_folder_of_the_old_data_counts_from_where_it_was_named(tmp_path, monkeypatch):
    """The mixture is in another folder, from which its own would count."""
    for split in ("train", "val"):
        project_shard(tmp_path / "parquet" / split / "a.parquet", {"a.h": "int x;"})
    monkeypatch.chdir(tmp_path)
    flags = TrainFlags().replace(data_dir="parquet/train", val_dir="one=parquet/val,two=elsewhere").as_dict()
    meta = Meta(1, {}, "", "", flags, "")
    assert adapt.old_data(adapt.Flags(), meta, "x") == {"train": f"{tmp_path}/parquet/train",
                                                        "val": f"{tmp_path}/parquet/val"}
    meta = replace(meta, flags={**flags, "data_mix": "mix.toml"})
    with pytest.raises(BadInput, match="x was trained on a mixture: name the folder"):
        adapt.old_data(adapt.Flags(), meta, "x")


@pytest.mark.slow
def test_a_model_is_adapted_by_one_command_and_says_what_it_gained(train, corpus_dir, project, tmp_path, capfd,
                                                                       monkeypatch):
    train("--save_every=6", "--device_type=cpu", run="first")
    old = tmp_path / "old 😀"
    old.symlink_to(corpus_dir)
    flags = ["--checkpoint=first", f"--source={project}", f"--data_dir={old}/train", "--rate=10", "--minutes=0.05",
             "--device_type=cpu"]
    single = tmp_path / "single"
    single.mkdir()
    shutil.copy(project / "0.h", single)
    with pytest.raises(BadInput, match="has a single C.. file"):
        adapt.main(last_of_each(*flags, f"--source={single}"))
    with locked(get_base_dir() / "adapt/adapted/.lock", ""), pytest.raises(BadInput, match="--run=adapted is in use"):
        adapt.main(flags)
    process = subprocess.Popen([sys.executable, "-m", "scripts.adapt", *flags], stdout=subprocess.PIPE, text=True)
    checkpoints = get_base_dir() / "checkpoints/adapted"
    while not list(checkpoints.glob("step_*")):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    stopped = process.communicate(timeout=300)[0]
    assert process.returncode == 130, stopped
    with pytest.raises(BadInput, match="--run=adapted is there already .* the flags that it began with"):
        adapt.main([*flags, "--epochs=5"])
    prepared = (get_base_dir() / "adapt/adapted/own/train/shard_00000.parquet").stat().st_mtime_ns
    monkeypatch.setattr(adapt, "MOST_LOSS", 10)  # at this rate, the old text may have lost 3% before the stop
    assert not adapt.main(flags)
    assert (get_base_dir() / "adapt/adapted/own/train/shard_00000.parquet").stat().st_mtime_ns == prepared
    said = capfd.readouterr().out
    assert re.search(r"resuming from .*/adapted/step_", said)
    assert re.search(r"its held-out files: \d\.\d+ -> \d\.\d+ bits per byte \(-\d+\.\d%\)", said)
    assert re.search(r"the old validation text: \d\.\d+ -> \d\.\d+ bits per byte \(.*%\)", said)
    assert re.search(r"scripts.serve --checkpoint=adapted/step_\d+", said)
    with pytest.raises(BadInput, match="--run=adapted is there already"):
        adapt.main(flags)
