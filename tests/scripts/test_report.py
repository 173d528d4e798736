"""The report of a run that was interrupted and resumed."""
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from nanochat.common import BadInput
from nanochat.record.history import History, read_run
from scripts.report import draw_metric, main, recommend

# metrics.jsonl of six steps of a tiny model, as base_train wrote it. A second process resumed from step 2.
RECORDED = Path(__file__).parent / "interrupted_run.jsonl"


@pytest.fixture
def interrupted(base_dir):
    """The directory of the recorded run."""
    run_dir = base_dir / "checkpoints" / "test"
    run_dir.mkdir(parents=True)
    shutil.copy(RECORDED, run_dir / "metrics.jsonl")
    return run_dir


def test_an_interruption_is_marked_at_its_place_and_the_legend_says_which_line_is_a_mean_of_steps(interrupted):
    from matplotlib.figure import Figure
    run = read_run(str(interrupted))
    records = [{"step": step, "time": step, "loss": 1.0, "tokens": step} for step in range(1, 31)]
    axes = Figure().subplots()
    draw_metric([run, History("long", Path(), records)], "loss", "loss", 1, axes)
    [mark] = [line for line in axes.lines if line.get_linestyle() == "--"]
    assert list(mark.get_xdata()) == [run.work(run.interruptions()[0]["step"])] * 2
    assert mark.get_xdata()[0] > 0
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["test", "long, mean of 10 steps"]


def test_a_report_has_the_numbers_and_the_picture_of_its_runs(interrupted, base_dir, capsys):
    from matplotlib import image
    shutil.copytree(interrupted, base_dir / "checkpoints" / "copy")
    main(["test", str(base_dir / "checkpoints" / "copy" / "metrics.jsonl")])
    output = capsys.readouterr().out
    records = [json.loads(line) for line in (interrupted / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if "loss" in record]
    validation = {record["step"]: record["val_bpb"] for record in records if "val_bpb" in record}
    best = min(validation, key=validation.get)
    assert len(losses) == 6 and sorted(validation) == [0, 3, 6]
    for what, value in (("run", "test"), ("steps", "6"), ("seen", "3,072 tokens"), ("interruptions", "1"),
                        ("loss, last 20 steps", f"{np.mean(losses):.4f}"),
                        ("validation, bits per byte", f"{validation[6]:.4f} at step 6"),
                        ("the best", f"{validation[best]:.4f} at step {best}"),
                        ("goodput", f"{records[-2].get('goodput', 0):.1%}")):
        second = "copy" if what == "run" else value
        assert re.search(rf"^{re.escape(what)}\s+{re.escape(value)}\s+{re.escape(second)}$", output, re.M), what
    pixels = image.imread(interrupted / "report" / "curves.png")
    assert min(pixels.shape[:2]) > 300 and pixels.std() > 0.05  # something is on it
    assert "Recommendations for copy:" in output
    with open(interrupted / "metrics.jsonl", "a") as file:
        file.write('{"step": 7, "los')  # a crash left an incomplete line
    run = read_run(interrupted)
    assert run.records[-1]["step"] == 6 and [record["step"] for record in run.interruptions()] == [3]
    assert run.work([0, 1, 3, 6]).tolist() == [0, 512, 1536, 3072]
    assert run.series("loss")[0].tolist() == [1, 2, 3, 4, 5, 6] and run.last("no_such_field") is None


def test_a_run_that_does_not_exist_or_has_no_records_is_bad_input(tmp_path, base_dir):
    with pytest.raises(BadInput, match="no run d99: .*d99 is not there"):
        main(["d99"])
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(BadInput, match="has no records yet"):
        main([str(tmp_path)])


def test_a_completion_stands_beside_the_loss(tmp_path, capsys):
    from matplotlib import image
    records = [{"step": step, "time": float(step), "loss": 11 - step, "tokens": 100 * step} for step in range(1, 6)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    right_parts = []
    for text in ("", "int main() {\n    return $1 + $2;\n}\n" + 30 * "long line "):
        (tmp_path / "completion.txt").write_text(text)
        main([str(tmp_path), f"--completion={tmp_path / 'completion.txt'}", f"--out_dir={tmp_path}"])
        assert "completion.png" in capsys.readouterr().out
        pixels = image.imread(tmp_path / "completion.png")[40:, :, :3]  # below the title
        right_parts.append(pixels[:, pixels.shape[1] * 6 // 10:])
        assert pixels[:, :pixels.shape[1] // 2].std() > 0.05  # the loss
    assert right_parts[0].std() == 0 < right_parts[1].std()
    with pytest.raises(BadInput, match="--completion=.*none.txt cannot be read"):
        main([str(tmp_path), f"--completion={tmp_path / 'none.txt'}"])


@pytest.fixture
def make_run(tmp_path):
    """Returns the History of a run whose ten records have these values."""
    def make(**measured):
        records = [{"step": step, "time": 100.0 + step, "tokens": 512 * step, **measured} for step in range(1, 11)]
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        return read_run(tmp_path)
    return make


@pytest.mark.parametrize("measured, words", [
    ({"data_wait": 0.3}, ["waiting for data takes 30%"]),
    ({"host_dispatch": 0.9}, ["dispatching programs takes 90%", "--device_batch_size", "--log_every"]),
    ({"recompiled": ["micro_step"]}, ["compiled again: micro_step"]),
    ({"seconds_train": 75.0, "seconds_evaluate": 25.0}, ["evaluate takes 25%", "--eval_every", "--eval_tokens"]),
    ({"seconds_train": 70.0, "seconds_save": 30.0, "seconds_lost": 9.0, "interruptions": 1},
     ["save takes 28%", "larger --save_every"]),
    ({"seconds_train": 70.0, "seconds_save": 9.0, "seconds_lost": 30.0, "interruptions": 2},
     ["lost takes 28%", "smaller --save_every"]),
    ({"device_memory_peak_bytes": 7e9, "device_memory_limit_bytes": 16.9e9},
     ["peaks at 41% of 15.7 GiB", "--device_batch_size"]),
])
def test_each_loss_of_time_is_named_with_its_measure_and_the_flag(make_run, measured, words):
    (said,) = recommend(make_run(**measured))
    assert all(word in said for word in words), said


def test_the_largest_loss_comes_first_and_where_nothing_is_wrong_nothing_is_recommended(make_run):
    said = recommend(make_run(data_wait=0.1, seconds_train=70.0, seconds_evaluate=20.0, seconds_sample=10.0))
    assert said[0].startswith("evaluate takes 20%") and len(said) == 3
    quiet = make_run(data_wait=0.03, host_dispatch=0.7, seconds_train=90.0, seconds_evaluate=4.0, seconds_lost=6.0,
                     device_memory_peak_bytes=15e9, device_memory_limit_bytes=16.9e9)
    assert recommend(quiet) == ["none: the measurements show nothing wrong"]


def test_the_wall_time_does_not_jump_with_the_clock(make_run):
    run = make_run(seconds_train=70.0, seconds_save=30.0)
    run.records[-1]["time"] -= 7200
    assert run.wall_s() == 100
    run = make_run(loss=1.0)
    assert run.wall_s() == 9
    run.records[-1]["time"] -= 7200
    assert run.wall_s() == 0
