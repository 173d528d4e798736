"""Scripts that start other scripts of this project."""
import threading
import time
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest

from nanochat.common import Failure
from nanochat.run.processes import run_as_ranks, run_module, started_module

ENDS_SLOWLY = """
import pathlib, signal, time
def end(*_):
    time.sleep(0.3)
    pathlib.Path("saved").touch()
    raise SystemExit
signal.signal(signal.SIGTERM, end)
pathlib.Path("ready").touch()
time.sleep(60)
"""


def test_ctrl_c_waits_for_a_script_that_still_saves(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ends_slowly.py").write_text(ENDS_SLOWLY)
    with pytest.raises(KeyboardInterrupt), started_module("ends_slowly") as process:
        while not (tmp_path / "ready").exists():
            assert process.poll() is None
            time.sleep(0.02)
        raise KeyboardInterrupt
    assert (tmp_path / "saved").exists() and process.returncode == 0
    (tmp_path / "says_so.py").write_text("raise SystemExit(130)")
    with pytest.raises(SystemExit, match="130"), started_module("says_so"):
        raise KeyboardInterrupt


def test_a_script_that_fails_ends_its_caller_which_has_nothing_to_add(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fails.py").write_text("raise SystemExit(2)")
    with pytest.raises(SystemExit, match="2"):
        run_module("fails")
    assert capfd.readouterr().err == ""
    (tmp_path / "is_killed.py").write_text("import os; os.kill(os.getpid(), 9)")
    with pytest.raises(Failure, match="is_killed was ended by signal 9: start the same command again"):
        run_module("is_killed")


@pytest.mark.parametrize("text, status", [("0", None), ("3", 3)])
def test_a_process_that_ends_is_explained_before_the_run_ends(monkeypatch, text, status):
    """Even if another rank has failed meanwhile, because of the one that was killed."""
    reported = threading.Event()

    def end(function, *args, begin):
        Path(args[-1]).write_text(text)
        threading.Timer(0.2, reported.set).start()
        raise BrokenProcessPool

    monkeypatch.setattr("nanochat.run.processes.spawn_ranks", end)
    assert run_as_ranks(print, begin=None, has_reported=reported) == status and reported.is_set()
