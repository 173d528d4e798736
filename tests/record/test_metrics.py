"""Every record is in metrics.jsonl once, even if the run is interrupted or the disk is full; and the console line."""
import json
import os
import threading
import time

import pytest

from nanochat.record import metrics
from nanochat.record.metrics import MetricsLogger
from tests.checkpoint.states import run_on_small_disk


def read(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def start(run_dir, console=lambda line: None, **kwargs):
    return MetricsLogger(run_dir, console=console, **kwargs)


def test_a_record_is_in_the_file_before_the_next_statement(tmp_path):
    logger, begun = start(tmp_path), time.time()
    logger.log(1, {"loss": 3.5})
    [record] = read(tmp_path)
    assert (record["step"], record["loss"]) == (1, 3.5)
    assert round(begun, 3) <= record["time"] <= round(time.time(), 3)


def test_after_resuming_no_step_appears_twice_and_lines_that_are_no_records_are_gone(tmp_path):
    logger = start(tmp_path)
    for step in range(1, 11):
        logger.log(step, {"loss": 1.0})
        if step % 5 == 0:
            logger.log(step, {"val_bpb": 2.0})
    logger.close()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write("[" * 100_000)
        file.write('\n[]\n4\n{}\n{"step": "x", "time": 1}\n{"step": 2}\n{"step": 1, "time": null}\n{"step": 11, "lo')
    resumed = start(tmp_path, resume_step=5)
    resumed.log(5, {"val_bpb": 2.0})  # evaluated again
    for step in range(6, 9):
        resumed.log(step, {"loss": 1.0})
    found = [(record["step"], "loss" if "loss" in record else "val_bpb") for record in read(tmp_path)]
    assert found == [(1, "loss"), (2, "loss"), (3, "loss"), (4, "loss"), (5, "loss"), (5, "val_bpb"),
                     (6, "loss"), (7, "loss"), (8, "loss")]


def test_a_new_run_of_an_old_name_keeps_the_old_file_aside(tmp_path):
    start(tmp_path).log(5, {"loss": 1.0})
    start(tmp_path).log(1, {"loss": 2.0})
    assert [record["step"] for record in read(tmp_path)] == [1]
    assert '"step": 5' in (tmp_path / "metrics.jsonl.aside").read_text()


FULL_DISK = """
import json
from nanochat.record.metrics import MetricsLogger
said = []
logger = MetricsLogger(run_dir, console=said.append)
logger.log(1, {"loss": 1.0}, quiet=True)
fill()
for step in range(2, 500):
    logger.log(step, {"loss": float("nan")}, quiet=True)
assert len(said) == 1 and "records wait in memory" in said[0], said
os.truncate(ballast, 0)
logger.log(500, {"loss": 1.0}, quiet=True)
logger.close()
records = [json.loads(line) for line in open(run_dir / "metrics.jsonl")]
assert [record["step"] for record in records] == list(range(1, 501)) and records[5]["loss"] is None
"""


def test_records_wait_while_the_disk_is_full_and_none_is_lost(tmp_path):
    run_on_small_disk(tmp_path, FULL_DISK, 1)


def test_each_record_is_written_once_while_another_thread_flushes(tmp_path, monkeypatch):
    logger, write = start(tmp_path), os.write

    def slow_write(file, data):
        time.sleep(0.0005)  # as a disk may: the other thread's turn
        return write(file, data)

    monkeypatch.setattr(os, "write", slow_write)
    is_done = threading.Event()

    def flush():
        while not is_done.is_set():
            logger.flush()

    thread = threading.Thread(target=flush)
    thread.start()
    for step in range(200):
        logger.log(step, {"loss": 1.0}, quiet=True)
    is_done.set()
    thread.join()
    logger.close()
    assert [record["step"] for record in read(tmp_path)] == list(range(200))


@pytest.mark.parametrize("record, text", [
    ({"step": 100, "time_left_s": 3725, "loss": 2.9, "mean_loss": 3.21, "lr_multiplier": 1.0, "step_ms": 1312.2,
      "tokens_per_s": 175_123.4, "mfu": 0.2, "tokens": 52_428_800},
     "step 00100/05000 | loss 3.2100 | lr 1.000 | 1,312 ms | 175,123 tok/s | mfu 20.0% | 52.4M tokens | 1h02m left"),
    ({"step": 6, "recompiled": ["micro_step", "update"]}, "step 00006/05000 | compiled again: micro_step, update"),
    ({"step": 1, "time": 0.0, "mfu": None}, "step 00001/05000"),  # an unknown peak
    ({"step": 5, "val_bpb": 1.25, "val_bytes": 999_999, "fim_bpb": 2.1192, "fim_bytes": 65_536},
     "step 00005/05000 | validation 1.2500 bits per byte | of 1M bytes | middles 2.1192 | of 65.5K bytes"),
])
def test_the_console_line_has_every_figure_with_its_unit_and_nothing_else(record, text):
    assert metrics.format_line(record, 5000) == text
