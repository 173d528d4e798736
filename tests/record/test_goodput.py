"""Goodput counts every second of a run once."""
import pytest

from nanochat.record import goodput as goodput_module
from nanochat.record.goodput import Goodput


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(goodput_module.time, "monotonic", lambda: now[0])
    return now


def test_goodput_counts_every_second_once_for_the_innermost_span(clock):
    goodput = Goodput()
    clock[0] += 1
    with goodput.span("train"):
        clock[0] += 10
        with goodput.span("save"):
            clock[0] += 2
        clock[0] += 5
    clock[0] += 2
    assert goodput.seconds() == {"other": 3, "train": 15, "save": 2}
    assert goodput.fraction() == pytest.approx(0.75)


def test_the_time_spent_compiling_is_not_counted_as_training(clock, monkeypatch):
    compiled_s = 7.0  # before this run began
    monkeypatch.setattr(goodput_module, "compile_seconds", lambda: compiled_s)
    goodput = Goodput()
    with goodput.span("train"):
        clock[0] += 10
        compiled_s += 4
        with goodput.span("evaluate"):
            clock[0] += 3
            compiled_s += 3
    assert goodput.seconds() == {"other": 0, "train": 6, "evaluate": 0, "compile": 7}


def test_goodput_resumes_and_counts_the_time_without_a_process_as_lost(clock, monkeypatch):
    monkeypatch.setattr(goodput_module.time, "time", lambda: 1000.0)
    goodput = Goodput({"train": 5.0, "lost": 1.0}, saved_at=940.0)
    with pytest.raises(KeyError), goodput.span("train"):
        clock[0] += 1
        raise KeyError
    clock[0] += 1
    assert goodput.seconds() == {"train": 6, "lost": 61, "other": 1}
