"""The report of a run that was interrupted and resumed."""
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from nanochat.analysis.figures import Lines
from nanochat.analysis.measured import differences, markdown_block
from nanochat.common import BadInput
from nanochat.device.tpu import chip_price
from nanochat.record.history import read_run
from scripts.report import main

# metrics.jsonl of six steps of a tiny model, as base_train wrote it. A second process resumed from step 2.
RECORDED = Path(__file__).parent / "interrupted_run.jsonl"


@pytest.fixture
def interrupted(base_dir):
    """The directory of the recorded run."""
    run_dir = base_dir / "checkpoints" / "test"
    run_dir.mkdir(parents=True)
    shutil.copy(RECORDED, run_dir / "metrics.jsonl")
    return run_dir


def test_an_interruption_is_marked_at_its_place(interrupted):
    from matplotlib.figure import Figure
    run = read_run(str(interrupted))
    axes = Figure().subplots()
    Lines("loss", "loss").draw([run], axes)
    [mark] = [line for line in axes.lines if line.get_linestyle() == "--"]
    assert list(mark.get_xdata()) == [run.work(run.interruptions()[0]["step"])] * 2
    assert mark.get_xdata()[0] > 0


def test_a_report_has_the_numbers_and_pictures_of_its_runs_and_refers_to_nothing_else(interrupted, base_dir, capsys):
    from matplotlib import image
    shutil.copytree(interrupted, base_dir / "checkpoints" / "copy")
    main(["test", str(base_dir / "checkpoints" / "copy" / "metrics.jsonl")])
    output = capsys.readouterr().out
    records = [json.loads(line) for line in (interrupted / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if "loss" in record]
    validation = {record["step"]: record["val_bpb"] for record in records if "val_bpb" in record}
    best = min(validation, key=validation.get)
    assert len(losses) == 6 and sorted(validation) == [0, 3, 6]
    for what, value in (("run", "test"), ("steps", "6"), ("tokens", "3.07K"), ("interruptions", "1"),
                        ("loss, last 20 steps", f"{np.mean(losses):.4f}"),
                        ("validation, bits per byte", f"{validation[6]:.4f}"),
                        ("the best, at step", f"{validation[best]:.4f}, {best}"),
                        ("goodput", f"{records[-2].get('goodput', 0):.1%}")):
        second = "copy" if what == "run" else value
        assert re.search(rf"^{re.escape(what)}\s+{re.escape(value)}\s+{re.escape(second)}$", output, re.M), what
    page = (interrupted / "report" / "report.html").read_text()
    assert "http" not in page and page.count("<img ") == page.count('src="data:image/png;base64,') >= 4
    for name in ("loss", "throughput", "goodput", "optimizer"):
        pixels = image.imread(interrupted / "report" / f"{name}.png")
        assert min(pixels.shape[:2]) > 300 and pixels.std() > 0.05  # something is on it
    assert f"{validation[best]:.4f}, {best}" in page
    with open(interrupted / "metrics.jsonl", "a") as file:
        file.write('{"step": 7, "los')  # a crash left an incomplete line
    run = read_run(interrupted)
    assert run.records[-1]["step"] == 6 and [record["step"] for record in run.interruptions()] == [3]
    assert run.work([0, 1, 3, 6]).tolist() == [0, 512, 1536, 3072]
    assert run.series("loss")[0].tolist() == [1, 2, 3, 4, 5, 6] and run.last("no_such_field") is None


def test_the_cost_is_that_of_the_price_table_or_of_the_flag(interrupted, capsys):
    main(["test", "--accelerator=v5litepod-8", "--zone=us-west4-a", "--out_dir", str(interrupted / "out")])
    run = read_run(interrupted)
    hours = (run.records[-1]["time"] - run.records[0]["time"]) / 3600
    price = chip_price("v5litepod-8", True, "us-west4-a").usd_per_chip_hour * 8
    per_billion = price * 1e9 / run.median("tokens_per_s") / 3600
    output = capsys.readouterr().out
    assert re.search(rf"^cost of that time +{hours * price:.2f} USD$", output, re.M)
    assert re.search(rf"^cost of 1B tokens, .* {per_billion:.2f} USD$", output, re.M)
    with pytest.raises(BadInput, match="--accelerator=v9-8"):
        main(["test", "--accelerator=v9-8"])
    with pytest.raises(BadInput, match="--zone=us-wets4-a: .*--usd_per_chip_hour.* us-west4"):
        main(["test", "--accelerator=v5litepod-8", "--zone=us-wets4-a"])


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
    assert 'alt="completion"' in (tmp_path / "report.html").read_text()
    with pytest.raises(BadInput, match="--completion=.*none.txt cannot be read"):
        main([str(tmp_path), f"--completion={tmp_path / 'none.txt'}"])


def test_panels_show_values_below_zero_whole_counts_and_a_legend_that_hides_nothing(base_dir, tmp_path):
    from matplotlib.figure import Figure
    records = [{"step": step, "time": 100.0 + step, "tokens": 512 * step, "lr_multiplier": multiplier, "bad_steps": bad}
               for step, multiplier, bad in ((1, 1.0, 0), (2, 0.5, 0), (3, -0.7, 1))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    run = read_run(tmp_path)
    figure = Figure()
    rates, counts = figure.subplots(2)
    lines = Lines("lr_multiplier", "learning rates"), Lines("bad_steps", "steps", is_count=True)
    lines[0].draw([run], rates)
    lines[1].draw([run], counts)
    figure.draw_without_rendering()
    assert rates.get_ylim()[0] < -0.7 and counts.get_ylim()[0] < 0 < 1 < counts.get_ylim()[1]
    assert all(tick == int(tick) for tick in counts.get_yticks())
    for axes in (rates, counts):
        assert axes.get_legend().get_window_extent().y0 >= axes.get_window_extent().y1
    assert lines[1].is_shown([run])
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records[:2]))
    assert not lines[1].is_shown([read_run(tmp_path)]) and lines[0].is_shown([run])


def test_the_block_for_an_issue_sets_what_was_measured_beside_the_estimate(interrupted, tmp_path, capsys):
    run = read_run(interrupted)
    step_s = run.median("step_ms") / 2000  # the estimate is half of what was measured
    report = {"accelerator": "v5litepod-8", "chips": 8, "fits": True, "kernel": "flash", "flags": {"depth": 2},
              "peak_bytes": 2**31, "plan": {"total_batch_size": 512, "parameters": 1000},
              "estimate": {"step_s": step_s, "step_low_s": step_s, "step_high_s": 2 * step_s, "mfu": 0.5,
                           "tokens_per_s": run.median("tokens_per_s")}}
    path = tmp_path / "preflight.json"
    path.write_text(json.dumps(report))
    main(["test", f"--preflight={path}"])
    block = capsys.readouterr().out.partition("**v5litepod-8: run test")[2]
    assert re.search(r"^\| step, ms \| .* \| 2.000 \|$", block, re.M)
    assert re.search(r"^\| tokens/s \| .* \| 1.000 \|$", block, re.M)
    assert re.search(r"^\| MFU, % \| – \| 50.0 \| – \|$", block, re.M)  # a run on a CPU has none
    assert re.search(r"^\| peak HBM of a chip, GiB \| – \| 2.00 \| – \|$", block, re.M)
    assert "interruptions 1;" in block and "torch 2." in block
    text = markdown_block(run, {"depth": 4, "seed": 1}, report)
    assert "depth was 4 in the run and 2 in the preflight" in text
    assert differences({"shard_optimizer": "on"}, {"shard_optimizer": "auto"}) == ""
    assert differences({"key_shift": "off"}, {"key_shift": "on"}) == \
        "key_shift was off in the run and on in the preflight"
    for content in ("", "[]", "{}", '{"accelerator": 1}', json.dumps(report | {"flags": []})):
        path.write_text(content)
        with pytest.raises(BadInput, match="--preflight="):
            main(["test", f"--preflight={path}"])
