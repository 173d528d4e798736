"""A model is adapted to a project."""
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nanochat.common import BadInput
from nanochat.data.shards import open_shards, whole_texts
from scripts import adapt


def project_shard(path, files):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"text": list(files.values()), "project": ["p"] * len(files), "path": list(files)}), path)
    return open_shards([path])


def test_a_tenth_of_a_project_is_held_out_by_the_names_of_its_files(tmp_path):
    files = {f"{i}.h": f"int x{i};" * (1 + i % 7) for i in range(200)}
    adapt.divide(project_shard(tmp_path / "a.parquet", files), tmp_path / "own")
    train, val = (list(whole_texts(open_shards([tmp_path / "own" / split / "shard_00000.parquet"])))
                  for split in ("train", "val"))
    assert sorted(train + val) == sorted(files.values())
    assert 0.09 < sum(map(len, val)) / sum(map(len, files.values())) <= 0.1
    with pytest.raises(BadInput, match="has a single C.. file"):
        adapt.divide(project_shard(tmp_path / "b.parquet", {"a.h": "int x;"}), tmp_path / "other")


def test_training_stops_once_the_held_out_files_gain_no_more(tmp_path, capsys):
    """With a process that waits to be stopped, and evaluations that no longer become better."""
    metrics = tmp_path / "metrics.jsonl"
    lines = [f'{{"step": {step}, "val_bpb_own": {own}, "val_bpb_old": 1.0}}\n'
             for step, own in enumerate((2.0, 1.5, 1.6, 1.5))]
    metrics.write_text("".join(lines) + '{"step": 4, "val_')
    assert adapt.evaluations(metrics)[3] == (1.5, 1.0) and len(adapt.evaluations(metrics)) == 4
    stops = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(75)); time.sleep(60)"
    adapt.train(["-c", stops], metrics)
    assert "gain no more" in capsys.readouterr().out
    metrics.write_text("".join(lines[:3]))
    with pytest.raises(BadInput, match="base_train ended with status 75"):  # nobody told it to stop
        adapt.train(["-c", "import sys; sys.exit(75)"], metrics)


@pytest.mark.slow
def test_a_model_is_adapted_by_one_command_and_says_what_it_gained(train, corpus_dir, tmp_path, capsys):
    train("--save_every=6", "--device_type=cpu", run="first")
    project = tmp_path / "project"
    project.mkdir()
    for i, text in enumerate(whole_texts(open_shards(sorted((corpus_dir / "val").glob("*.parquet"))))):
        (project / f"{i}.h").write_text(text)
    flags = ["--checkpoint=first", f"--source={project}", "--rate=10", "--minutes=0.05", "--device_type=cpu"]
    assert not adapt.main(flags)
    said = capsys.readouterr().out
    assert re.search(r"its held-out files: \d\.\d+ -> \d\.\d+ bits per byte \(-\d+\.\d%\)", said)
    assert re.search(r"the old validation text: \d\.\d+ -> \d\.\d+ bits per byte \(.*%\)", said)
    assert re.search(r"scripts.serve --checkpoint=adapted/step_\d+", said)
    with pytest.raises(BadInput, match="--run=adapted is there already"):
        adapt.main(flags)
