"""Every script is called with generated command lines, most of them bad: each ends in one line, or its work begins."""
import contextlib
import dataclasses
import importlib
import math
import os
import re
import sys
from pathlib import Path
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanochat.common import BadInput
from nanochat.data.tokenizer import load_tokenizer
from nanochat.preflight.flags import PreflightFlags
from nanochat.puzzles import flags as puzzles
from nanochat.puzzles.puzzle_data import write_puzzles
from nanochat.train import launch
from nanochat.train.flags import TITLES
from scripts.bench import __main__ as bench
from tests.infer.test_engine import make_model, save_model

LAUNCHED = ["spawn", "Trainer"]  # of nanochat.train.launch
# Where the real work of each script begins: there the test stops it.
WORK = {
    "ablate": ["started_module"], "adapt": ["run_module"], "base_eval": ["nanochat.data.loader.DataLoader"],
    "base_train": LAUNCHED,
    "bench.kernels": ["measure"], "bench.loader": ["compare"], "bench.train": ["begin"], "code_eval": ["Judge"],
    "demo": ["run"], "export": ["nanochat.infer.load.load_model"], "generate": ["nanochat.infer.engine.Engine"],
    "import_hf": ["nanochat.export.hub.import_model"], "lsp": ["run"], "prepare_data": ["prepare"],
    "prepare_puzzles": ["make_splits"], "puzzle_train": LAUNCHED, "report": ["summarise"],
    "serve": ["nanochat.serve.completer.load_completer"], "solve": ["Judge"],
    "tok_eval": ["fetch_openai"], "tok_train": ["choose_texts"],
    "tpu_check": ["check_all"], "tpu_preflight": ["prepare"],
    "dev.bench_replay": ["load_completer"], "dev.bench_search": ["Judge"], "dev.bench_serve": ["save_model"]}

ODD = ["", " ", "-", "--", "=", "nan", "inf", "-inf", "-0", "0", "-1", "1e400", "9" * 30, "9" * 5000, "٣", "²", "1_0",
       "0x10", " 7 ", "1e3", "True", "\udcff\udcfe", "é", "a" * 300, "x" * 5000, ",", ":", "1:2", "5:1", "1:2,0:3", "%",
       "~nobody/x", "~", ".", "MISSING", "MISSING/deeper", "FILE", "FILE/below", "FOLDER", "LINK", "\n", "a\nb", "auto"]


class WorkBegins(BaseException):
    """The flags were accepted."""


def flags_of(module):
    """Returns the fields of a script's flags."""
    classes = [value for value in vars(module).values() if dataclasses.is_dataclass(value)]
    if module.__name__ in ("scripts.base_train", "scripts.tpu_check", "scripts.tpu_preflight"):
        classes += TITLES
    if module.__name__ == "scripts.puzzle_train":
        classes += puzzles.TITLES
    if module.__name__ == "scripts.tpu_preflight":
        classes.append(PreflightFlags)
    return [field for of in classes for field in dataclasses.fields(of) if "limits" in field.metadata]


def arguments(field):
    """Returns a strategy of one argument for the flag `field`."""
    edges = [edge for limit in field.metadata["limits"] if limit is not None and math.isfinite(limit)
             for edge in (limit - 1, limit, limit + 1, -limit)]
    text = st.text(st.characters(blacklist_characters="\0/~", blacklist_categories=["Cs"]), max_size=8)
    values = st.one_of(st.sampled_from([*ODD, *map(str, edges)]), st.integers().map(str), st.floats().map(str),
                       text.filter(lambda value: ".." not in value))
    if field.metadata.get("positional"):
        return values
    return st.one_of(values.map(lambda value: f"--{field.name}={value}"), st.just(f"--{field.name}"))


def command_lines(module):
    fields = flags_of(module)
    one = st.sampled_from(fields).flatmap(arguments) if fields else st.sampled_from(ODD)
    return st.lists(one, min_size=1, max_size=4)


@contextlib.contextmanager
def in_folder(folder):
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@pytest.mark.parametrize("name", sorted(WORK))
def test_bad_flags_are_one_line_that_names_what_is_wrong(name, corpus_dir, byte_tokenizer_dir, base_dir, tmp_path,
                                                         monkeypatch):
    module = importlib.import_module(name if name.startswith("dev.") else f"scripts.{name}")
    (tmp_path / "FILE").write_text("text")
    (tmp_path / "FOLDER").mkdir()
    (tmp_path / "LINK").symlink_to("LINK")
    tokenizer = load_tokenizer(byte_tokenizer_dir)
    trained = save_model(tmp_path / "run", make_model(vocab_size=tokenizer.n_vocab), tokenizer)
    made_puzzles = tmp_path / "FOLDER"
    (tmp_path / "table.toml").write_text(
        f"[flags]\ndepth = 1\ndevice_type = 'cpu'\ntokenizer_dir = '{byte_tokenizer_dir}'\ntotal_batch_size = 8192\n"
        f"data_dir = '{corpus_dir}/train'\nval_dir = '{corpus_dir}/val'\n[variants.a]\n")
    tokenizer_dir = f"--tokenizer_dir={byte_tokenizer_dir}"
    train, val = f"--data_dir={corpus_dir}/train", f"--data_dir={corpus_dir}/val"
    val_dir, documents = f"--val_dir={corpus_dir}/val", f"--data_dir={tmp_path}/documents"
    model = [f"--checkpoint={trained}", tokenizer_dir, "--device_type=cpu"]
    good = {
        "ablate": [str(tmp_path / "table.toml")],
        "adapt": [f"--checkpoint={trained}", "--source=mine", train, val_dir],
        "base_eval": [*model, val],
        "base_train": [tokenizer_dir, train, val_dir, "--device_type=cpu", "--depth=1", "--max_seq_len=32",
                       "--total_batch_size=256"],
        "bench.kernels": ["--accelerator=v6e-1"],
        "bench.loader": [train, tokenizer_dir],
        "code_eval": [*model, "--max_tokens=10"],
        "dev.bench_replay": [*model, documents],
        "dev.bench_search": model,
        "dev.bench_serve": [documents],
        "export": [f"--checkpoint={trained}", tokenizer_dir, "--out=exported"],
        "generate": [*model, "--prompt=x"],
        "import_hf": ["--run=imported", "org/model"],
        "prepare_data": ["--source=mine"],
        "puzzle_train": [f"--data_dir={made_puzzles}", "--device_type=cpu", "--hidden=8"],
        "serve": [*model, "--port=0"],
        "solve": [*model, "--prompt=int f(int x) {"],
        "tok_eval": [val, tokenizer_dir],
        "tok_train": [train],
        "tpu_check": ["--device_type=xla", tokenizer_dir],
        "tpu_preflight": ["--accelerator=v6e-4", tokenizer_dir]}.get(name, [])
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a.cpp").touch()
    (tmp_path / "documents").mkdir()
    pq.write_table(pa.table({"text": ["int x;\n" * 10_000]}), tmp_path / "documents/shard_00000.parquet")
    write_puzzles(made_puzzles, (2, 2), dict.fromkeys(("train", "val"), [([0] * 16, [1] * 16)]))
    outcomes = set()

    @settings(max_examples=30, deadline=None, database=None, derandomize=True,
              suppress_health_check=list(HealthCheck))
    @given(command_lines(module))
    def call(found):
        outcomes.add(outcome_of(module, WORK[name], [*good, *found]))

    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with in_folder(tmp_path):
        outcomes.add(outcome_of(module, WORK[name], good))
        call()
    assert "refused" in outcomes and (not good or "began" in outcomes)


def outcome_of(module, work, argv):
    """Runs the script until its work begins, and returns how that went; fails for anything else than one line."""
    with contextlib.ExitStack() as stack:
        for function in work:
            place = launch if function in LAUNCHED else module
            target = function if "." in function else f"{place.__name__}.{function}"
            stack.enter_context(mock.patch(target, side_effect=WorkBegins))
        for function in ("stop_on_signals", "stop_on_preemption_notice"):
            stack.enter_context(mock.patch.object(launch.stopping, function))
        stack.enter_context(mock.patch.dict(os.environ))
        stack.enter_context(mock.patch.object(sys, "argv", [f"{module.__name__.rpartition('.')[2]}.py"]))
        stack.enter_context(mock.patch.object(sys, "stdin", mock.Mock(buffer=mock.Mock(read=lambda: b"prompt"))))
        try:
            status = module.main(argv)
        except WorkBegins:
            return "began"
        except BadInput as error:
            message = str(error)
            assert message and "\n" not in message, (argv, message)
            values = [str(BadInput(argument.partition("=")[2] or argument)) for argument in argv]
            is_named = re.search(r"--\w|/|RUN|^no run |[A-Z]+_[A-Z]+", message)
            assert is_named or any(value[:40] in message for value in values), (argv, message)
            return "refused"
        except SystemExit as end:
            assert not end.code, argv
            return "ended"
        assert status in (0, None), argv
        return "ended"


def test_no_script_is_left_out():
    root = Path(__file__).parent.parent
    folder = root / "scripts"
    scripts = {path.stem for path in folder.glob("[a-z]*.py")} | {f"bench.{name}" for name in bench.NAMES}
    assert scripts | {f"dev.{path.stem}" for path in root.glob("dev/bench_*.py")} == WORK.keys()
    assert {path.stem for path in folder.glob("bench/[a-z]*.py")} == {*bench.NAMES, "rounds"}


@pytest.mark.parametrize("script, name, advice", [
    ("adapt", "fim_rate", "the model's own training"), ("export", "format", "model.safetensors"),
    ("export", "force", "another --out"), ("prepare_puzzles", "qqwing", "leave it out"),
    ("puzzle_train", "mixer", "the defaults"), ("puzzle_train", "resume", "another --run"),
    ("report", "preflight", "tpu_check"), ("serve", "api_key", "ssh tunnel"), ("solve", "problems", "bench_search"),
    ("tok_train", "pattern", "PATTERN"), ("tpu_preflight", "usd_per_chip_hour", "your price")])
def test_a_flag_that_is_gone_is_refused_before_any_that_is_missing(script, name, advice):
    with pytest.raises(BadInput, match=f"^--{name}=3 is gone: .*{re.escape(advice)}"):
        importlib.import_module(f"scripts.{script}").main([f"--{name.replace('_', '-')}=3"])
