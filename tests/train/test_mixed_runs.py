"""Runs on a mixture, and runs with several validation sets."""
import re
import shutil

import pytest

from nanochat.checkpoint import on_disk
from nanochat.checkpoint.pieces import load_lane_states
from nanochat.common import BadInput
from nanochat.train.flags import named_places, parse_flags
from nanochat.train.language import make_task
from scripts import base_train
from tests.conftest import add_records, last_of_each
from tests.train import unreadable

MIXTURE = """
[sources.big]
dir = "{folder}/train"
weight = 2
val = "{folder}/train"
[sources.own]
dir = "{folder}/val"
weight = 1
val = "{folder}/val"
[[stage]]
from = 0.5
weights = {{own = 1}}
"""


@pytest.fixture
def mixture(tmp_path, corpus_dir):
    path = tmp_path / "mix.toml"
    path.write_text(MIXTURE.format(folder=corpus_dir))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("kills", [[(3, 2)], [(5, 4), (2, 4), (2, 1)]])
def test_a_run_that_is_killed_in_each_stage_and_at_its_edge_resumes_with_the_same_bits(
        train, mixture, tiny, corpus_dir, kills):
    flags = [f"--data_dir={mixture}", "--save_every=1", "--keep_checkpoints=9", "--log_every=1", "--eval_tokens=2048"]
    without = ("data_dir", "val_dir")  # so it is validated on the text that the file names
    all_devices = kills[0][1]
    whole = train(*flags, run="mixed", devices=all_devices, without=without)
    tokens = {record["step"]: (record["tokens_big"], record["tokens_own"]) for record in whole.records
              if "tokens_own" in record}
    share = tokens[3][0] / sum(tokens[3])  # counted by the lanes of rank 0, of which 3 steps read a few
    assert share == pytest.approx(2 / 3, abs=0.05 * all_devices) and tokens[6][0] == tokens[3][0]
    assert tokens[6][1] > tokens[3][1] + 1000
    assert f"| big {tokens[6][0]:,} tokens | own {tokens[6][1]:,} tokens" in whole.stdout
    last = whole.records[-1]
    assert last["val_bpb"] == last["val_bpb_big"] != last["val_bpb_own"]  # the first set is the run's
    assert f"validation {last['val_bpb']:.4f} bits per byte" in whole.stdout
    assert f"big {last['val_bpb_big']:.4f} | own {last['val_bpb_own']:.4f}" in whole.stdout
    states = load_lane_states(on_disk.latest(whole.run_dir))
    for step, devices in kills:
        on_disk.set_aside_after(whole.run_dir, step)
        resumed = train(*flags, run="mixed", devices=devices, without=without)
        assert f"step_{step:06d}" in resumed.stdout and load_lane_states(on_disk.latest(whole.run_dir)) == states
        if devices == all_devices:
            assert resumed.losses == whole.losses
        assert resumed.losses == pytest.approx(whole.losses, rel=2e-6)
    mixture.write_text(mixture.read_text().replace("weight = 2", "weight = 3"))
    others = [flag for flag in tiny if not flag.startswith(("--data_dir", "--val_dir"))]
    with pytest.raises(BadInput, match="the hash of --data_dir's mixture is .* there and .* here"):
        base_train.main(last_of_each("--run=mixed", *others, *flags, "--num_iterations=8"))


@pytest.mark.slow
@pytest.mark.parametrize("rank, lanes", [
    (0, 2), (1, 2), (1, 64)])  # with 64 lanes, each rank reads the whole text
def test_a_run_goes_on_without_the_evaluations_whose_text_a_rank_cannot_read(warm_ranks, tiny, corpus_dir, base_dir,
                                                                             tmp_path, rank, lanes):
    """At first one rank cannot open it, then it cannot read all of it, and then the folder has gone, for all ranks."""
    val = tmp_path / "val"
    shutil.copytree(corpus_dir / "val", val)
    flags = last_of_each("--run=test", *tiny, f"--val_dir={val}", f"--num_lanes={lanes}", "--eval_every=2")
    process = warm_ranks(2).call(unreadable.main, flags, FAILING_RANK=str(rank), VANISHING=str(val))
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-4000:]
    warnings = re.findall("warning: no evaluation at step (.*)", process.stdout)
    problems = ["shard_00000.parquet cannot be opened", "shard_00000.parquet cannot be read"]
    if rank:
        problems = ["another rank cannot read the text"] * 2
    assert warnings[:2] == [f"{step}: {problem}" for step, problem in zip((0, 2), problems, strict=True)]
    assert warnings[2].startswith("4: ") and warnings[3].startswith(f"6: no val data: {val} cannot be read")
    found = add_records(process, base_dir / "checkpoints/test")
    assert sorted(found.losses) == [1, 2, 3, 4, 5, 6] and not found.bpb


def test_a_mixture_may_be_edited_while_a_run_lasts(mixture, tiny, tmp_path):
    others = [flag for flag in tiny if not flag.startswith(("--data_dir", "--val_dir"))]
    task = make_task(parse_flags(last_of_each(*others, f"--data_dir={mixture}")), "cpu", 1, tmp_path)
    mixture.unlink()
    assert list(task.console) == ["val_bpb_big", "val_bpb_own", "tokens_big", "tokens_own"]  # which names all of them


def test_names_of_validation_sets_are_told_from_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert named_places("own=/a,big=gs://b/c=d") == {"own": "/a", "big": "gs://b/c=d"}
    (tmp_path / "lang=cpp").mkdir()
    assert named_places("lang=cpp") == named_places("gs://b/lang=cpp") == named_places("a/lang=cpp") == {}
    for text in ("own=a,own=b", "own=a,b", "own=", "own=a,2=b", "chars_per_s=a"):
        with pytest.raises(BadInput, match="is not NAME=FOLDER"):
            named_places(text)
