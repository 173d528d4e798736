"""The real TensorBoard reads what a run has written for it."""
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from nanochat.record.metrics import MetricsLogger, Reader, write_for_tensorboard


def write(run_dir, resume_step, records):
    """Logs (step, {name: value}) as a process of a run does that resumes from `resume_step`."""
    reader = Reader("TensorBoard", write_for_tensorboard, directory=run_dir / "tensorboard", resume_step=resume_step)
    logger = MetricsLogger(run_dir, resume_step=resume_step, readers=[reader])
    for step, record in records:
        logger.log(step, record)
    logger.close()


def found(run_dir, name):
    events = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_after_a_stop_and_a_resume_every_step_is_there_once(tmp_path, capsys):
    write(tmp_path, None, [(step, {"loss": 8.0 + step, "recompiled": ["a text"]}) for step in range(1, 6)]
          + [(3, {"val_bpb": 2.5})])
    write(tmp_path, 3, [(3, {"val_bpb": 2.5}), (4, {"loss": 4.0}), (5, {"loss": float("nan")}), (6, {"loss": 6.0})])
    assert found(tmp_path, "loss") == [(1, 9.0), (2, 10.0), (3, 11.0), (4, 4.0), (6, 6.0)]
    assert {*found(tmp_path, "val_bpb")} == {(3, 2.5)}
    write(tmp_path, None, [(1, {"loss": 1.0})])
    assert found(tmp_path, "loss") == [(1, 1.0)]
    assert "warning" not in capsys.readouterr().out


def test_a_disk_that_refuses_is_one_warning_and_metrics_jsonl_has_every_record(tmp_path, capsys):
    (tmp_path / "tensorboard").write_text("no folder")
    write(tmp_path, 0, [(1, {"loss": 1.0}), (2, {"loss": 1.0})])
    assert capsys.readouterr().out.count("warning: TensorBoard failed (") == 1
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
