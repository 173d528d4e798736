"""Checkpoints that earlier versions wrote are read for ever. kept/make.sh says how they were made."""
import json
import re
import shutil
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from nanochat.checkpoint.meta import load_meta, read_config
from nanochat.common import BadInput
from nanochat.device.ranks import Dist
from nanochat.infer.engine import Engine
from nanochat.infer.load import load_model
from nanochat.model.config import GPTConfig
from nanochat.train.flags import GONE, GONE_OFF, parse_flags, require_not_gone
from nanochat.train.start import as_begun
from scripts import base_train, puzzle_train

KEPT = Path(__file__).parent / "kept"
TRAINED = ["--device_type=xla", "--num_lanes=2", "--device_batch_size=2", "--total_batch_size=256",
           "--num_iterations=6", "--eval_every=-1", "--sample_every=-1", "--log_every=1", "--eval_tokens=1024"]
PUZZLES = ["--device_type=xla", "--hidden=8", "--cycles=2", "--supervision_steps=4", "--ema=0.9", "--warmup_steps=2",
           "--warmdown_ratio=0", "--total_batch_size=8", "--eval_puzzles=12", "--num_iterations=6", "--log_every=1",
           "--eval_every=-1", "--sample_every=-1"]
# {run: what its command needs beside TRAINED}
RUNS = {"plain": ["--data_dir={}/data"], "fim": ["--data_dir={}/data", "--fim_rate=0.5"],
        "mixture": ["--data_dir={}/mixture.toml"], "ending": ["--data_dir={}/data"],
        "with_optimizer": ["--data_dir={}/data"]}


@pytest.fixture
def kept(base_dir):
    """The base directory with the kept checkpoints and their data."""
    return Path(shutil.copytree(KEPT, base_dir))


def checkpoint_of(run):
    path, = (KEPT / "checkpoints" / run).glob("step_*")
    return path


def losses(path, after):
    """The losses of the steps after the step `after`, by what a run has recorded."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return {record["step"]: record["loss"] for record in records if "loss" in record and record["step"] > after}


@pytest.mark.parametrize("run", RUNS)
def test_a_kept_model_completes_text(run):
    dist = Dist("cpu", torch.device("cpu"))
    model, tokenizer, _ = load_model(checkpoint_of(run), dist, tokenizer_dir=KEPT / "tokenizer")
    engine = Engine(model, tokenizer, dist)
    engine.complete("int f", max_tokens=5)
    assert engine.timings.predicted_tokens > 0


@pytest.mark.parametrize("run, named", [
    ("ngrams", "ngram_rows = 16, an option that is gone"), ("own_values", "--value_embeddings=own")])
def test_a_kept_model_with_an_option_that_is_gone_is_refused_by_its_name(run, named):
    with pytest.raises(BadInput, match=named):
        load_model(checkpoint_of(run), Dist("cpu", torch.device("cpu")), tokenizer_dir=KEPT / "tokenizer")


@pytest.mark.slow
@pytest.mark.parametrize("run", [*RUNS, "sudoku"])
def test_a_kept_run_goes_on(run, kept, warm_ranks):
    path = kept / "checkpoints" / run / "metrics.jsonl"
    step = load_meta(checkpoint_of(run)).step
    expected = losses(path, step)
    main, flags = puzzle_train.main, [*PUZZLES, f"--data_dir={kept}/puzzles"]
    if run in RUNS:
        own = [flag.format(kept) for flag in RUNS[run]]
        main, flags = base_train.main, [*TRAINED, *own, f"--tokenizer_dir={kept}/tokenizer", f"--val_dir={kept}/data"]
    process = warm_ranks(1).call(main, [*flags, f"--run={run}"], NANOCHAT_BASE_DIR=str(kept))
    assert process.returncode == 0, process.stdout + process.stderr
    assert len(expected) == 3 and losses(path, step) == pytest.approx(expected, rel=1e-4)  # on any processor


def test_a_field_that_came_later_is_read_as_what_stood_for_it_before(tmp_path):
    """Every field that the kept config lacks must say that, too: otherwise the kept checkpoints cannot be read."""
    meta = load_meta(checkpoint_of("plain"))
    before = {each.name: each.metadata["before"] for each in fields(GPTConfig) if "before" in each.metadata}
    older = replace(meta, config={name: value for name, value in meta.config.items() if name not in before})
    found = read_config(tmp_path, older, GPTConfig)
    assert {name: getattr(found, name) for name in before} == before != {}


@pytest.mark.parametrize("init_optimizer, steps", [(True, 3), (False, 0)])
def test_a_run_that_began_with_weights_keeps_the_rates_for_its_length(init_optimizer, steps):
    """Runs of today have none for their length, and always take the optimizer's state."""
    saved = load_meta(checkpoint_of("with_optimizer"))
    found = as_begun(parse_flags([]), replace(saved, flags=saved.flags | {"init_optimizer": init_optimizer})).start
    assert (found.init_from, found.earlier_steps, found.rate_horizon) == ("plain/step_000003", steps, -1)


@pytest.mark.parametrize("name", GONE)
def test_a_flag_that_is_gone_is_refused_with_what_replaces_it(name):
    with pytest.raises(BadInput, match=f"^--{name}=3 is gone: {re.escape(GONE[name])}$"):
        parse_flags([f"--{name}=3"])


@pytest.mark.parametrize("name", GONE_OFF)
def test_a_run_whose_flag_is_gone_resumes_only_if_it_was_off(name):
    path = checkpoint_of("plain")
    saved = load_meta(path).flags
    require_not_gone(saved | {name: GONE_OFF[name]}, "plain")
    with pytest.raises(BadInput, match=f"--run=plain .*--{name}=other, which is gone"):
        require_not_gone(saved | {name: "other"}, "plain")
