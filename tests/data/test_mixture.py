"""Rows from several sources: by their weights, the same on any number of ranks, and restored exactly."""
import os

import pytest
import torch

from nanochat.common import BadInput
from nanochat.data import loader as loader_module
from nanochat.data.mixture import MixtureLoader, open_mixture, read_mixture, spread
from nanochat.data.shards import TextFlags, open_text
from nanochat.train.flags import DataFlags, parse_flags
from nanochat.train.plan import make_plan
from nanochat.train.text import stage_rows
from scripts import tpu_preflight
from tests.data.documents import ByteTokenizer, make_texts, rows_and_others, write
from tests.data.test_loader import repeated_steps

FILE = """
[sources.big]
dir = "big"
weight = 0.7
[sources.own]
dir = "own"
weight = 0.3
[[stage]]
from = 0.4
weights = {own = 0.5, big = 0.5}
[[stage]]
from = 0.8
weights = {own = 9, big = 1}
"""
SMALL = ["--depth=1", "--max_seq_len=128", "--device_batch_size=4", "--total_batch_size=512"]


@pytest.fixture
def data(tmp_path, monkeypatch):
    """The DataFlags of a mixture of many documents `<NUMBER:` and of few `[NUMBER:`."""
    monkeypatch.setattr(loader_module, "BLOCK_TOKENS", 500)
    for name, begin, count in (("big", "<", 900), ("own", "[", 120)):
        (tmp_path / name).mkdir()
        texts = [text and text.replace("<", begin) for text in make_texts(count)]
        write(tmp_path / name / "a.parquet", texts, row_group_size=37)
    (tmp_path / "mix.toml").write_text(FILE)
    return DataFlags(data_dir=str(tmp_path / "mix.toml"))


def open_mixed(data, **options):
    rows, options = rows_and_others({"seq_len": 128, "num_lanes": 8, **options})
    return MixtureLoader(open_mixture(data), ByteTokenizer(), rows, (0, 16 * 16, 24 * 16), **options)


def test_rows_are_the_same_on_any_number_of_ranks_and_wherever_a_run_resumes(data):
    # 15 and 23 are the steps before an edge.
    repeated_steps(data, 60, (0, 7, 14, 15, 16, 22, 23, 30, 45, 57), loader=open_mixed)


def test_every_row_is_full_and_every_token_counted_as_one_of_its_source(data):
    with open_mixed(data, batch_size=16) as loader:
        rows = torch.cat([next(loader).rows for _ in range(60)])
        tokens = loader.stats["sources"]
    assert (rows >= 0).all() and sum(count for count, _ in tokens.values()) == pytest.approx(rows.numel(), rel=0.02)
    assert tokens["own"][1] > 1 > tokens["big"][1]  # a source that has been read whole begins again


@pytest.mark.parametrize("num_lanes, weights", [
    (1, (0.5, 0.5)), (8, (0.7, 0.3)), (64, (0.999, 0.001)), (64, (0.1, 0.2, 0.3, 0.4)), (96, (0.05, 0.95)),
    (96, (1 / 3, 1 / 3, 1 / 3)), (256, (0.3, 0.7))])
@pytest.mark.parametrize("rows_of_step", [8, 40])
def test_weights_hold_within_a_thousandth_over_a_thousand_steps_from_anywhere_on(num_lanes, weights, rows_of_step):
    for begin in (0, 12_345):
        rows = range(begin, begin + 1000 * rows_of_step)
        points = [spread(row % num_lanes, row // num_lanes, num_lanes) for row in rows]
        edge = 0
        for weight in weights:
            assert sum(edge <= point < edge + weight for point in points) / len(rows) == pytest.approx(weight, abs=1e-3)
            edge += weight


def test_stages_begin_with_a_row_of_the_run(data):
    plan = make_plan(parse_flags([*SMALL, "--num_iterations=100"]), 300, "cpu", 1)
    mixture = open_mixture(data)
    assert stage_rows(mixture, plan, 0, None) == [0, 160, 320]
    assert stage_rows(mixture, plan, 50, {0: {"rows": 100}, 1: {"rows": 100}}) == [0, 0, 320]


@pytest.mark.parametrize("before, after, words", [
    ("weight = 0.3", "weight = 0", "the weight of own is 0, which is not a number above 0"),
    ("weight = 0.3", "weight = " + 400 * "9", "the weight of own is 9{20}, which is not a number above 0"),
    ("weight = 0.3", "weight = true", "the weight of own is True, "),
    ("{own = 9, big = 1}", "{own = 9, bog = 1}", "weights .*bog.* are not of sources, which are big, own"),
    ("{own = 9, big = 1}", "{}", "the weights {} are not of sources"),
    ("from = 0.8", "from = 0.3", r"from = 0.3: stages begin one after the other, each at a fraction .* above 0.4 and"),
    ("from = 0.8", "from = 1.5", r"from = 1.5: stages begin"),
    ("from = 0.8", "", r"from is missing: it has from, weights"),
    ("[[stage]]", "[[stages]]", "the file: stages is unknown: it has sources, stage"),
    ("weight = 0.7", "weight = 0.7\nepochs = 14", "source big: epochs is unknown: it has dir, val, weight"),
    ('dir = "own"', "", "source own: dir is missing"),
    ('dir = "own"', 'dir = "own"\nval = 3', "source own: val = 3: "),
    ('dir = "own"', 'dir = "own"\nval = "a\\u0000b"', "source own: val = .*: "),
    ('dir = "own"', 'dir = "own"\nval = "gs://"', "source own: val = 'gs://': it is neither gs://BUCKET/FOLDER"),
    ('dir = "own"', 'dir = "s3://own"', "source own: dir = 's3://own': it is neither gs://BUCKET/FOLDER"),
    ("[sources.own]", '[sources."a b"]', "source a b: name it with letters"),
    ("[sources.own]", "[sources.per_s]", "source per_s: name it with .* not …per_s"),
    ("[sources.own]", "[sources.own", "cannot be read as a table of TOML"),
    (FILE, "", "the file: sources is missing"), (FILE, "sources = 3", "no sources"),
    (FILE, "[sources]\nown = 3", "source own: dir is missing"),
    (FILE, "stage = 3\n[sources.a]\ndir = 'b'\nweight=1", r"\[\[stage\]\]: from is missing"),
    (FILE, "[sources.a]\ndir = 'b'\nweight=1\n[sources.c]\ndir='d'", "source c has no weight at any time"),
])
def test_a_mixture_that_makes_no_sense_is_refused_in_one_line(data, tmp_path, before, after, words):
    (tmp_path / "mix.toml").write_text(FILE.replace(before, after))
    with pytest.raises(BadInput, match=words) as refusal:
        read_mixture(data.mixture)
    assert str(refusal.value).startswith(f"--data_dir={data.mixture}: ")
    with pytest.raises(BadInput, match=words):  # before it needs a compiler
        tpu_preflight.main(["--accelerator=v5litepod-8", f"--data_dir={data.mixture}"])


def test_a_file_may_begin_with_a_byte_order_mark_and_a_pipe_is_refused(data, tmp_path):
    (tmp_path / "mix.toml").write_text("\ufeff" + FILE)
    assert read_mixture(data.mixture).sources
    (tmp_path / "mix.toml").unlink()
    os.mkfifo(tmp_path / "mix.toml")
    with pytest.raises(BadInput, match="no ordinary file"):
        read_mixture(data.mixture)


def test_a_mixture_is_a_file_of_this_machine_for_scripts_that_train_and_a_folder_is_none(data, tmp_path):
    (tmp_path / "folder.toml").mkdir()
    assert DataFlags(data_dir=str(tmp_path / "folder.toml")).mixture is None
    with pytest.raises(BadInput, match="--data_dir=gs://b/mix.toml: .* copy it here"):
        read_mixture(DataFlags(data_dir="gs://b/mix.toml").mixture)
    with pytest.raises(BadInput, match="mix.toml .*: name one of its folders"):
        open_text(TextFlags(data.mixture))


def test_a_source_without_documents_is_refused(data, tmp_path):
    write(tmp_path / "own" / "a.parquet", [None, ""])
    with pytest.raises(BadInput, match="source own: no text in .*: every document is empty"):
        open_mixture(data)
    (tmp_path / "own" / "a.parquet").unlink()
    with pytest.raises(BadInput, match=r"source own: no train data: .* has no \*.parquet"):
        open_mixture(data)
