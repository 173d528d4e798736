"""Ablations: the table, what is refused before any run, and a table that is killed and goes on."""
import json
import shutil
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from nanochat.checkpoint.saver import save_checkpoint
from nanochat.common import BadInput
from nanochat.data.tokenizer import load_tokenizer
from nanochat.train.flags import parse_flags
from scripts import ablate
from scripts.ablate import print_results, read_trials, verdict
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
    trials = read_trials(write_table("[variants.default]\n[variants.wide]\nmodel_dim = 128\nsynthetic_data = true\n"))
    assert [trial.directory.name for trial in trials] == [
        "rates.default.0", "rates.wide.0", "rates.default.1", "rates.wide.1"]
    wide = trials[3]
    flags = parse_flags(wide.argv)
    assert flags.data.synthetic_data and flags.run.seed == 1
    assert wide.variant == "wide" and wide.argv.count("--model_dim=128") == 1
    assert not any(word.startswith("--model_dim=64") for word in wide.argv)


@pytest.mark.parametrize("variants, message", [
    ("", "names no variants"),
    ("[variants.a]\nmatrixlr = 1", "variant a: --matrixlr=1 is not a flag: did you mean --matrix_lr?"),
    ("[variants.a]\nmatrix_lr = -1", "variant a: --matrix_lr=-1 is not a number of at least 0"),
    ("[variants.a]\nmatrix_lr = [1, 2]", r"variant a: matrix_lr = \[1, 2\] is no value"),
    ("[variants.a]\nseed = 3", "variant a: seed is not for a table"),
    ("[variants.a]\nhelp = true", "variant a: help is not for a table"),
    ("[variants.a]\nno_compile = false", "no_compile = False is no value of a flag"),
    ("[variants.a]\ntotal_batch_size = 100", "variant a: --total_batch_size=100 tokens does not divide"),
    ("[variants.a]\neval_every = -1", "variant a: --eval_every=-1"),
    ("[variants.'a b']", "variant a b: --run=rates.a b.0 is not a plain name"),
    ("[variants.a]\ndepth = 2\ndepth = 3", "cannot be read as a table of TOML"),
    ("[variant.a]", "variant is unknown"),
    (f"[variants.{'a' * 270}]", "--run=rates.a* is not a plain name"),
])
def test_bad_tables_are_refused_with_one_line(write_table, variants, message):
    with pytest.raises(BadInput, match=message) as error:
        ablate.main([str(write_table(variants))])
    assert "\n" not in str(error.value) and "rates.toml" in str(error.value)


@pytest.mark.parametrize("seeds", ["[]", "[0, 0]", "3", '["a"]', "[true]", "[-1]"])
def test_bad_seeds_are_refused(write_table, seeds):
    with pytest.raises(BadInput, match="rates.toml.*seed"):
        ablate.main([str(write_table(seeds=seeds))])


def test_the_table_of_the_document_is_one(tmp_path, base_dir, corpus_dir):
    shutil.copytree(corpus_dir / "train", base_dir / "parquet" / "base_data_v3")
    shutil.copytree(corpus_dir / "val", base_dir / "parquet" / "val")
    (table,) = [text for language, text in fenced_blocks(DOCUMENT.read_text()) if language == "toml"]
    (tmp_path / "rates.toml").write_text(table)
    assert ablate.main([str(tmp_path / "rates.toml"), "--dry_run"]) == 0
    assert not (base_dir / "checkpoints").exists()


def finish(trial, shift=0.0):
    """Makes the folder of a finished run, with the records of a real one whose validation is shifted."""
    trial.directory.mkdir(parents=True)
    records = [json.loads(line) for line in RECORDED.read_text().splitlines()]
    for record in records:
        if "val_bpb" in record:
            record["val_bpb"] += shift
    (trial.directory / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (trial.directory / ".finished").touch()


def test_finished_runs_are_not_repeated_and_their_differences_are_told(write_table, base_dir, capsys):
    table = write_table(num_iterations=6)
    trials = read_trials(table)
    for trial, shift in zip(trials, (0.0, -0.5, 0.001, -0.501), strict=True):
        finish(trial, shift)
    assert ablate.main([str(table)]) == 0
    output = capsys.readouterr().out
    assert "4 runs; 4 finished before" in output and "scripts.base_train" not in output
    (row,) = [line for line in output.splitlines() if line.startswith("fast")]
    assert "-0.5010" in row and row.endswith("better")
    records = trials[1].directory / "metrics.jsonl"  # without the evaluation of its last step
    lines = records.read_text().splitlines(keepends=True)
    records.write_text("".join(line for line in lines if json.loads(line)["step"] < 6 or "val_bpb" not in line))
    assert ablate.main([str(table)]) == 0
    output = capsys.readouterr().out
    assert "rates.fast.0 is left out" in output and "needs two seeds" in output


@pytest.mark.parametrize("changed, words", [
    ({"matrix_lr": 0.5}, "matrix_lr is 0.5"), ({"data_fingerprint": "other"}, "hash of the data is other"),
    ({"tokenizer_sha256": "0" * 64}, "hash of the tokenizer is 0+")])
def test_a_run_of_the_same_name_with_other_flags_or_data_is_refused(changed, words, write_table, byte_tokenizer_dir):
    trial = read_trials(write_table())[0]
    same = {"flags": {}, "tokenizer_sha256": load_tokenizer(byte_tokenizer_dir).sha256}
    fields = {"flags": changed} if "matrix_lr" in changed else changed
    save_checkpoint(trial.directory, *make_state(), make_meta(**{**same, **fields}), num_lanes=0)
    with pytest.raises(BadInput, match=f"rates.default.0/.*{words}"):
        ablate.main([str(write_table())])


@pytest.mark.parametrize("status, ended_with, started", [(0, 0, 4), (1, 1, 4), (2, 2, 1), (75, 75, 1)])
def test_a_run_that_fails_is_named_and_one_that_is_refused_or_told_to_stop_ends_the_table(
        status, ended_with, started, write_table, monkeypatch, capsys):
    @contextmanager
    def start(module, *argv, env):
        begun.append(argv)
        if status == 0:
            finish(next(trial for trial in trials if trial.argv == list(argv)))
        yield SimpleNamespace(wait=lambda: status)

    begun, table = [], write_table(num_iterations=6)
    trials = read_trials(table)
    monkeypatch.setattr(ablate, "started_module", start)
    assert ablate.main([str(table)]) == ended_with and len(begun) == started
    assert ("rates.default.0, rates.fast.0, rates.default.1, rates.fast.1 failed" in capsys.readouterr().err) == (
        status == 1)


# The comparison


def test_p_values_are_corrected_for_their_number():
    values, reference = [2.00, 2.01, 2.02], [1.90, 1.92, 1.94]
    p_value = float(verdict(values, reference, 1).split()[0])
    assert float(verdict(values, reference, 3).split()[0]) == pytest.approx(3 * p_value, rel=0.05)
    assert verdict(values, reference, 1000).split()[0] == "1"
    assert verdict([1.0, 1.0], [1.0, 1.0], 1).split()[0] == "1" and verdict([1.0, 1.0], [2.0, 2.0], 1).split()[0] == "0"


def test_a_difference_is_one_only_beyond_the_spread_of_the_seeds(capsys):
    print_results({"reference": [2.00, 2.02, 2.01], "same": [2.01, 2.03, 1.99], "better": [1.90, 1.91, 1.89],
                   "worse": [2.20, 2.22, 2.19], "one": [1.0], "none": []})
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line}
    assert rows["reference"].endswith("the reference") and rows["same"].endswith("not beyond the spread of seeds")
    assert rows["better"].endswith(" better") and "-0.1100" in rows["better"] and rows["worse"].endswith(" worse")
    assert rows["one"].endswith("needs two seeds") and rows["none"].split() == ["none", "0"]
    print_results({"reference": [], "alone": [2.0, 2.1]})
    assert "better" not in (output := capsys.readouterr().out) and "alone" in output


@pytest.mark.slow
def test_a_table_is_trained_and_told_and_the_same_command_goes_on_with_a_run_that_has_not_ended(
        write_table, base_dir, capfd):
    """As after a kill, which leaves a checkpoint and no mark of an end."""
    table = write_table(num_iterations=40, seeds="[0]")
    assert ablate.main([str(table)]) == 0
    first, second = read_trials(table)
    (second.directory / ".finished").unlink()
    shutil.rmtree(second.directory / "step_000040")
    before = (first.directory / "metrics.jsonl").read_bytes()
    capfd.readouterr()
    assert ablate.main([str(table)]) == 0
    said = capfd.readouterr().out
    assert "2 runs; 1 finished before" in said and "resuming from" in said
    assert (first.directory / "metrics.jsonl").read_bytes() == before
    records = [json.loads(line) for line in (second.directory / "metrics.jsonl").read_text().splitlines()]
    rows = {line.split()[0]: line.split() for line in said.splitlines() if line}
    assert rows["default"][1] == rows["fast"][1] == "1"  # seeds
    assert float(rows["fast"][2]) < records[0]["val_bpb"] - 0.1  # it learnt something
