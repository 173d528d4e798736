"""Ablations: the table, what is refused before any run, and a table that is killed and goes on."""
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from nanochat.analysis.results import finish_or_reopen
from nanochat.analysis.running import chip_seconds_per_token
from nanochat.analysis.trials import read_trials
from nanochat.checkpoint.saver import save_checkpoint
from nanochat.common import BadInput
from nanochat.data.tokenizer import SPECIAL_TOKENS, Tokenizer
from scripts import ablate
from tests.checkpoint.states import make_meta, make_state
from tests.test_documents import fenced_blocks

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "ablations.md"
RECORDED = Path(__file__).parent / "interrupted_run.jsonl"


@pytest.fixture
def write_table(tmp_path, byte_tokenizer_dir, corpus_dir):
    """Writes rates.toml, whose runs take seconds, and returns its path."""

    def write(variants="[variants.default]\n[variants.fast]\nmatrix_lr = 0.2\n", seeds="[0, 1]", **flags):
        flags = {"device_type": "cpu", "depth": 1, "model_dim": 64, "num_heads": 1, "max_seq_len": 32,
                 "device_batch_size": 4, "total_batch_size": 128, "num_iterations": 200, "eval_every": 50,
                 "eval_tokens": 512, "sample_every": -1, "save_every": 20, "tokenizer_dir": str(byte_tokenizer_dir),
                 "data_dir": f"{corpus_dir}/train", "val_dir": f"{corpus_dir}/val", **flags}
        lines = [f"{name} = {json.dumps(value)}" for name, value in flags.items()]
        path = tmp_path / "rates.toml"
        path.write_text("\n".join([f"seeds = {seeds}", "[flags]", *lines, variants]))
        return path

    return write


def test_a_table_is_every_variant_with_every_seed_and_a_variant_s_flags_count(write_table):
    trials = read_trials(write_table("[variants.default]\n[variants.wide]\nmodel_dim = 128\nskip_bad_shards = true\n"))
    assert [(trial.variant, trial.seed) for trial in trials] == [("default", 0), ("wide", 0), ("default", 1),
                                                                 ("wide", 1)]
    wide = trials[3]
    assert wide.plan.config.n_embd == 128 and wide.flags.data.skip_bad_shards and wide.flags.run.seed == 1
    assert wide.flags.run.run == "rates.wide.1" and wide.argv.count("--model_dim=128") == 1
    assert not any(word.startswith("--model_dim=64") for word in wide.argv)


@pytest.mark.parametrize("variants, message", [
    ("", "names no variants"),
    ("[variants.a]\nmatrixlr = 1", "variant a: --matrixlr=1 is not a flag: did you mean --matrix_lr?"),
    ("[variants.a]\nmatrix_lr = -1", "variant a: --matrix_lr=-1 is not a number of at least 0"),
    ("[variants.a]\nmatrix_lr = [1, 2]", r"variant a: matrix_lr = \[1, 2\] is not a flag of base_train with a value"),
    ("[variants.a]\nseed = 3", "variant a: seed is not for a table"),
    ("[variants.a]\nhelp = true", "variant a: help is not for a table"),
    ("[variants.a]\nno_compile = false", "no_compile = false: write .off. if the flag takes .*, else leave it out"),
    ("[variants.a]\ntotal_batch_size = 100", "variant a: --total_batch_size=100 tokens does not divide"),
    ("[variants.a]\neval_every = -1", "variant a: --eval_every=-1"),
    ("[variants.'a b']", "variant a b: --run=rates.a b.0 is not a plain name"),
    ("[variants.a]\n[variants.b]\nwindow_pattern = 'SSSL'", "variants a and b .* leave one out"),
    ("[variants.a]\n[variants.b]\nvalue_embeddings = 'shared'", "variants a and b .* leave one out"),
    ("[variants.a]\ndepth = 2\ndepth = 3", "cannot be read as a table of TOML"),
    ("[variant.a]", "variant is unknown"),
    ('[variants.""]', "a variant's name has 0 letters"),
    (f"[variants.{'a' * 270}]", "a variant's name has 270 letters"),
])
def test_bad_tables_are_refused_with_one_line(write_table, variants, message):
    with pytest.raises(BadInput, match=message) as error:
        ablate.main([str(write_table(variants))])
    assert "\n" not in str(error.value) and "rates.toml" in str(error.value)


@pytest.mark.parametrize("seeds", ["[]", "[0, 0]", "3", '["a"]', "[true]", "[-1]"])
def test_bad_seeds_are_refused(write_table, seeds):
    with pytest.raises(BadInput, match="rates.toml.*seed"):
        ablate.main([str(write_table(seeds=seeds))])


def test_chip_seconds_come_from_a_preflight_which_runs_once(write_table, tmp_path):
    (trial,) = read_trials(write_table("[variants.default]\n", seeds="[0]"))
    report = {"fits": True, "chips": 8, "plan": {"total_batch_size": 128},
              "estimate": {"step_s": 2.0, "hours": 3.0, "hours_of_last": 4.0}}
    python = tmp_path / "python"
    python.write_text(f"""#!/bin/sh
for word; do case $word in --json=*) echo '{json.dumps(report)}' >"${{word#--json=}}" ;; esac; done
echo "$@" >>{tmp_path}/calls
""")
    python.chmod(0o755)
    command = [str(python), "-m", "scripts.tpu_preflight"]
    found = [chip_seconds_per_token(trial, "v5litepod-8", command, tmp_path) for _ in range(2)]
    assert found == [0.75 * 2 * 8 / 128] * 2
    assert "-m scripts.tpu_preflight --accelerator=v5litepod-8" in (tmp_path / "calls").read_text()
    assert (tmp_path / "calls").read_text().count("\n") == 1


def test_the_table_of_the_document_is_one(tmp_path, base_dir, corpus_dir):
    shutil.copytree(corpus_dir / "train", base_dir / "parquet" / "base_data_v3")
    shutil.copytree(corpus_dir / "val", base_dir / "parquet" / "val")
    (table,) = [text for language, text in fenced_blocks(DOCUMENT.read_text()) if language == "toml"]
    (tmp_path / "rates.toml").write_text(table)
    assert ablate.main([str(tmp_path / "rates.toml"), "--dry_run"]) == 0
    assert not (base_dir / "checkpoints").exists()


def finish(trial, shift=0.0):
    """Makes the folder of a finished run, with the records of a real one whose validation is shifted."""
    trial.write_notes(12.5)
    records = [json.loads(line) for line in RECORDED.read_text().splitlines()]
    for record in records:
        if "val_bpb" in record:
            record["val_bpb"] += shift
    (trial.directory / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (trial.directory / ".finished").touch()


def test_finished_runs_are_not_repeated_and_their_differences_are_told(write_table, base_dir, capsys):
    table = write_table(num_iterations=6)
    shifts = {("default", 0): 0.0, ("default", 1): 0.001, ("fast", 0): -0.5, ("fast", 1): -0.501}
    for trial in read_trials(table):
        finish(trial, shifts[trial.variant, trial.seed])
    assert ablate.main([str(table)]) == 0
    output, folder = capsys.readouterr().out, base_dir / "ablations" / "rates"
    assert "4 finished before" in output and "run 1 of" not in output
    (row,) = [line for line in output.splitlines() if line.startswith("fast") and "better" in line]
    assert "-0.5010" in row
    results = json.loads((folder / "results.json").read_text())
    assert results["fast"]["verdict"] == "better" and results["fast"]["cpu_s"] == 12.5
    page = (folder / "report.html").read_text()
    assert "http" not in page and page.count('src="data:image/png;base64,') == 1
    assert not list(folder.glob("*.log"))


def test_a_run_whose_last_evaluation_was_skipped_is_repeated(write_table):
    trial = read_trials(write_table(num_iterations=6))[0]
    finish(trial)
    assert finish_or_reopen(trial)
    records = trial.directory / "metrics.jsonl"
    lines = records.read_text().splitlines(keepends=True)
    records.write_text("".join(line for line in lines if json.loads(line)["step"] < 6 or "val_bpb" not in line))
    assert not finish_or_reopen(trial) and not trial.is_finished()


def test_a_run_of_the_same_name_with_other_flags_is_refused(write_table):
    for trial in read_trials(write_table()):
        finish(trial)
    with pytest.raises(BadInput, match="rates.default.0 .*num_iterations 200 -> 100"):
        ablate.main([str(write_table(num_iterations=100))])


def test_a_table_says_what_a_run_is_and_not_an_earlier_checkpoint(write_table):
    trial = read_trials(write_table())[0]
    config = asdict(trial.plan.config) | {"layer_gates": False}
    trial.directory.mkdir(parents=True)
    save_checkpoint(trial.directory, *make_state(), make_meta(config=config), num_lanes=0)
    assert read_trials(write_table())[0].flags.model.layer_gates == "on"


@pytest.mark.parametrize("what", ["tokenizer", "train", "val"])
def test_so_is_one_whose_data_or_tokenizer_has_changed_in_place(what, write_table, tmp_path, byte_tokenizer_dir,
                                                                corpus_dir):
    shutil.copytree(byte_tokenizer_dir, tmp_path / "tokenizer")
    shutil.copytree(corpus_dir, tmp_path / "data")
    places = {"tokenizer_dir": f"{tmp_path}/tokenizer", "data_dir": f"{tmp_path}/data/train",
              "val_dir": f"{tmp_path}/data/val"}
    for trial in read_trials(write_table(num_iterations=6, **places)):
        finish(trial)
    assert ablate.main([str(write_table(num_iterations=6, **places))]) == 0
    if what == "tokenizer":
        ranks = {bytes([byte]): byte for byte in range(256)} | {b"//": 256}
        Tokenizer(ranks, r"[^\n]+|\n", {name: 257 + i for i, name in enumerate(SPECIAL_TOKENS)}).save(tmp_path / what)
    else:
        source = next((corpus_dir / ("val" if what == "train" else "train")).glob("*.parquet"))
        shutil.copy(source, tmp_path / "data" / what / "shard_00009.parquet")
    name = {"tokenizer": "hash of the tokenizer", "train": "hash of the data", "val": "hash of the validation"}[what]
    with pytest.raises(BadInput, match=f"rates.default.0 .*{name} .* -> "):
        ablate.main([str(write_table(num_iterations=6, **places))])


@pytest.mark.parametrize("lines, message", [
    (None, "has finished, but its record is lost .* delete .*rates.default.0, and the same command trains it again"),
    (0, "has finished, but its record is lost"), (3, "its last evaluation is of step 0, not of step 6, so it was")])
def test_a_finished_run_whose_record_does_not_end_with_its_last_step_is_refused(lines, message, write_table):
    table = write_table(num_iterations=6)
    for trial in read_trials(table):
        finish(trial)
    metrics = read_trials(table)[0].directory / "metrics.jsonl"
    text = metrics.read_text().splitlines(keepends=True)
    metrics.unlink()
    if lines is not None:
        metrics.write_text("".join(text[:lines]))
    with pytest.raises(BadInput, match=f"default, seed 0.* {message}"):
        ablate.main([str(table)])


def test_results_that_cannot_be_written_are_one_line_and_the_old_ones_stay(write_table, base_dir):
    table, folder = write_table(num_iterations=6), base_dir / "ablations" / "rates"
    for trial in read_trials(table):
        finish(trial)
    (folder / "report.html").mkdir(parents=True)
    with pytest.raises(BadInput, match=r"cannot be written \(.*Is a directory.*/report.html.\): mend this"):
        ablate.main([str(table)])
    assert [path.name for path in folder.glob("*unfinished")] == []


def wait_for_step_40(metrics, process):
    """Returns when the run that writes `metrics` has come to step 40. Otherwise it kills `process` and fails."""
    deadline = time.monotonic() + 240
    try:
        while not (metrics.exists() and '"step": 40,' in metrics.read_text()):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
    except BaseException:
        process.kill()
        raise


@pytest.mark.slow
def test_a_killed_table_goes_on_and_repeats_no_finished_run(write_table, base_dir):
    table = write_table(num_iterations=400, save_every=20)
    command = [sys.executable, "-m", "scripts.ablate", str(table)]
    metrics = base_dir / "checkpoints" / "rates.fast.0" / "metrics.jsonl"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        wait_for_step_40(metrics, process)
        process.kill()
    first = base_dir / "checkpoints" / "rates.default.0" / "metrics.jsonl"
    before = first.read_bytes()
    deadline = time.monotonic() + 60  # the run that was going on is told to stop, and saves
    while any("scripts.base_train" in line and f"--run={table.stem}." in line for line in processes()):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    again = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "1 finished before" in again.stdout and "run 1 of 4" not in again.stdout and first.read_bytes() == before
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    losses = [record["step"] for record in records if "loss" in record]
    assert losses == list(range(1, 401)), "each step once"
    results = json.loads((base_dir / "ablations" / "rates" / "results.json").read_text())
    assert [len(results[name]["seeds"]) for name in ("default", "fast")] == [2, 2]
    assert results["default"]["seeds"]["0"] < records[0]["val_bpb"] - 0.5  # it learnt something
    assert results["default"]["cpu_s"] > 0


def processes():
    """Returns the command lines of all processes."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return found


@pytest.mark.slow
def test_sigterm_stops_after_a_checkpoint_with_status_75(write_table, base_dir):
    table = write_table(num_iterations=100_000, seeds="[0]")
    metrics = base_dir / "checkpoints" / "rates.default.0" / "metrics.jsonl"
    with subprocess.Popen([sys.executable, "-m", "scripts.ablate", str(table)], stdout=subprocess.PIPE,
                          text=True) as process:
        wait_for_step_40(metrics, process)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 75 and "the same command resumes" in output
    assert list(metrics.parent.glob("step_*"))
    assert os.path.exists(base_dir / "ablations" / "rates" / "default.0.log")
    shutil.rmtree(base_dir)
