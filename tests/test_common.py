"""Flags: their types, ranges and messages."""
import errno
import fcntl
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from nanochat.common import (
    BadInput,
    Outage,
    counted,
    expand_path,
    flag,
    get_base_dir,
    locked,
    read_flags,
    require_writable_dir,
    say,
    say_error,
    written_whole,
)
from nanochat.corpus.workers import worker_pool
from nanochat.record.progress import Progress
from tests.conftest import run_python
from tests.run.life import require_ended


@dataclass(frozen=True)
class Flags:
    depth: int = flag(4, "number of layers", at_least=1, at_most=100)
    steps: int = flag(-1, "steps; -1: as many as are needed", at_least=1, unset=-1)
    rate: float = flag(0.5, "rate", above=0, below=1)
    verbose: bool = flag(False, "say more")
    out_dir: Path | None = flag(None, "a folder", of=expand_path)
    names: list = flag((), "names", of=lambda text: text.split(","))


def read(*argv):
    return read_flags(list(argv), "A script.", {Flags: "flags"})[0]


def test_flags_have_the_types_of_their_defaults_hyphens_are_underscores_and_the_last_value_counts(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    assert read() == Flags()
    found = read("--depth=100", "--steps=-1", "--rate", "1e-3", "--verbose", "--out-dir=~/here", "--names=a,b")
    assert found == Flags(100, -1, 0.001, True, Path("/home/someone/here"), ["a", "b"])
    assert read("--out-dir=/a", "--depth=4", "--depth=05", "--out_dir=/b") == Flags(depth=5, out_dir=Path("/b"))


@pytest.mark.parametrize("argument, message", [
    ("--depth=0", "--depth=0 is not a whole number of at least 1 and of at most 100"),
    ("--depth=101", "--depth=101 is not a whole number"),
    ("--depth=1.5", "--depth=1.5 is not a whole number"),
    ("--depth=", "--depth= is not a whole number"),
    ("--depth=1_0", "--depth=1_0 is not a whole number"),
    ("--depth=\u0663", "--depth=\u0663 is not a whole number"),
    ("--depth= 3", "--depth= 3 is not a whole number"),
    ("--rate=0.2_5", "--rate=0.2_5 is not a number"),
    ("--steps=0", "--steps=0 is not a whole number of at least 1, or -1"),
    ("--steps=-2", "--steps=-2 is not"),
    ("--steps=9223372036854775808", "--steps=9223372036854775808 is not"),
    ("--rate=0", "--rate=0 is not a number above 0 and below 1"),
    ("--rate=1", "--rate=1 is not"),
    ("--rate=nan", "--rate=nan is not"),
    ("--rate=1e400", "--rate=1e400 is not"),
    ("--rate=half", "--rate=half is not"),
    ("--dept=3", "--dept=3 is not a flag: did you mean --depth?"),
    ("depth=3", "depth=3 is not a flag: did you mean --depth?"),
    ("e", "e is not a flag: --help lists all flags"),
    ("", "'' is not a flag: --help lists all flags"),
    ("--zzz", "--zzz is not a flag: --help lists all flags"),
    ("--dir=x", "--dir=x is not a flag: did you mean --out_dir?"),
    ("--verbose=3", "--verbose: it takes no value, not '3': leave it out"),
])
def test_a_value_outside_of_a_flag_s_range_is_refused_in_one_line(argument, message):
    with pytest.raises(BadInput) as refusal:
        read(argument)
    assert str(refusal.value).startswith(message) and "\n" not in str(refusal.value)


def test_help_shows_a_default_only_where_there_is_one(capsys):
    @dataclass(frozen=True)
    class Needed:
        data_dir: Path = flag(Path(), "a folder", of=expand_path, required=True)
        depth: int = flag(4, "number of layers")

    with pytest.raises(SystemExit):
        read_flags(["--help"], "A script.", {Needed: "flags"})
    assert re.findall(r"\(default: (.*)\)", capsys.readouterr().out) == ["4"]


def test_a_base_directory_below_the_home_directory(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("NANOCHAT_BASE_DIR", "~/data")
    assert get_base_dir() == Path("/home/someone/data")
    monkeypatch.delenv("NANOCHAT_BASE_DIR")
    assert get_base_dir() == Path("/home/someone/.cache/nanochat")
    monkeypatch.setenv("HOME", "")
    with pytest.raises(BadInput, match="~/.cache/nanochat has no home directory: write the path in full"):
        get_base_dir()


def run_main(body, **options):
    """Runs a script whose main() is `body` in a process of its own, and returns how it ended."""
    lines = "import os, sys, signal, time\nfrom nanochat.common import *\nfrom nanochat.common import run_script"
    return subprocess.Popen([sys.executable, "-c", f"{lines}\ndef main():\n{body}\nrun_script(main)"], text=True,
                            stderr=subprocess.PIPE, **options)


@pytest.mark.parametrize("body, status, message", [
    # Started in the background by a shell, a process ignores Ctrl-C; this test may be, too.
    (" signal.signal(signal.SIGINT, signal.default_int_handler); os.kill(os.getpid(), signal.SIGINT); time.sleep(9)",
     130, "stopped by Ctrl-C\n"),
    # In a callback of the garbage collector, whose exceptions Python drops.
    (""" import gc
 signal.signal(signal.SIGINT, signal.default_int_handler)
 gc.callbacks.append(lambda phase, info: phase == "start" and os.kill(os.getpid(), signal.SIGINT))
 gc.collect()
 gc.callbacks.pop()
 time.sleep(9)""", 130, "stopped by Ctrl-C\n"),
    # Where a worker process is busy for long.
    (""" signal.signal(signal.SIGINT, signal.default_int_handler)
 work = f"import os, signal, time; os.kill({os.getpid()}, signal.SIGINT); time.sleep(1000)"
 from nanochat.corpus.workers import worker_pool
 with worker_pool(2) as run:
  run(exec, [(work,)] + [("import time; time.sleep(1000)",)] * 2, print)""", 130, "stopped by Ctrl-C\n"),
    # Where worker processes begin.
    (""" signal.signal(signal.SIGINT, signal.default_int_handler)
 def calls():
  yield ("import time; time.sleep(1000)",)
  time.sleep(0.1)  # they begin to import
  os.killpg(0, signal.SIGINT)
 from nanochat.corpus.workers import worker_pool
 with worker_pool(2) as run:
  run(exec, calls(), print)""", 130, "stopped by Ctrl-C\n"),
    (" open('/dev/full', 'w', 1).write('x\\n')", 1,
     "error: the disk is full ([Errno 28] No space left on device): free some space and run the same command again\n"),
    (" sys.stdout.close(); sys.stdout = open('/dev/full', 'w'); print('x')", 1, "error: the disk is full"),
])
def test_ctrl_c_and_a_full_disk_are_one_line(body, status, message):
    process = run_main(body, start_new_session=True)
    errors = process.communicate(timeout=30)[1]
    assert (process.returncode, errors.count("Traceback")) == (status, 0) and errors.startswith(message)
    assert "leaked semaphore" not in errors


def test_ctrl_c_works_after_a_pool_that_was_interrupted():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), worker_pool(2):
        raise KeyboardInterrupt
    assert signal.getsignal(signal.SIGINT) == before


def test_ctrl_c_while_a_script_is_imported_is_one_line():
    lines = ("import os, scripts, signal, time\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
             "os.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)")
    process = run_python("-c", lines)
    assert (process.returncode, process.stderr) == (-signal.SIGINT, "stopped by Ctrl-C\n")


def test_a_reader_that_has_ended_ends_a_script_without_a_word():
    reading, writing = os.pipe()
    os.close(reading)
    process = run_main(" print('x')", stdout=writing)
    os.close(writing)
    assert (process.communicate(timeout=30)[1], process.returncode) == ("", 141)


def test_a_script_runs_with_closed_outputs():
    body = " print('x'); sys.stderr.isatty(); raise BadInput('no')"
    process = run_main(body, preexec_fn=lambda: (os.close(1), os.close(2)))
    assert process.wait(timeout=30) == 2


@pytest.mark.parametrize("before", ["pass", "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())"])
def test_a_worker_ends_when_its_parent_is_killed(before):
    worker = f"{before}; end_with_parent(parent); print(os.getpid(), flush=True); time.sleep(60)"
    process = run_main(f" parent = os.getpid()\n if os.fork(): time.sleep(60)\n else: {worker}",
                       stdout=subprocess.PIPE)
    pid = int(process.stdout.readline())
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)  # until nobody holds the pipes
    require_ended(pid)


def test_a_worker_whose_parent_has_ended_before_it_began_ends():
    process = run_main(" end_with_parent(1)")
    assert process.wait(timeout=30) == -signal.SIGKILL


def test_an_output_folder_may_be_a_link_and_no_file_and_no_link_to_nothing(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "gone").symlink_to("nowhere")
    (tmp_path / "link").symlink_to(tmp_path)
    for name in ("file", "gone", "gone/deeper"):
        with pytest.raises(BadInput, match=f"cannot write to .*{name} .File exists.: choose a writable"):
            require_writable_dir(tmp_path / name)
    assert require_writable_dir(tmp_path / "link") == tmp_path / "link"


def test_what_a_terminal_would_obey_is_escaped(capsys):
    say("warning: a\x1b[2J\nb\tc é 中\x9b1m\u202e")
    say("a\x1b[2J\nb\tc", sys.stderr, keep="\n\t")
    assert capsys.readouterr() == ("warning: a\\x1b[2J\\nb\\tc é 中\\x9b1m\\u202e\n", "a\\x1b[2J\nb\tc\n")
    assert say_error(Outage("\x1b]0;title\x07 é")) == 75
    assert capsys.readouterr().err == "error: \\x1b]0;title\\x07 é\n"


def test_a_file_is_written_whole_or_left_as_it_was(tmp_path):
    path = tmp_path / "file"
    with written_whole(path) as unfinished:
        unfinished.write_text("first")
        assert not path.exists()
    with pytest.raises(OSError), written_whole(path) as unfinished:
        unfinished.write_text("second")
        raise OSError
    assert path.read_text() == "first" and list(tmp_path.iterdir()) == [path]


def test_a_lock_has_one_holder(tmp_path):
    with locked(tmp_path / "lock", "in use"):
        with pytest.raises(BadInput, match="in use"), locked(tmp_path / "lock", "in use"):
            pass
    with locked(tmp_path / "lock", "in use"):
        pass


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_disk_without_locks_is_refused(tmp_path, monkeypatch, number):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(BadInput, match=rf"lock cannot be locked \({os.strerror(number)}\): choose a disk of this"):
        with locked(tmp_path / "lock", "in use"):
            pass


def test_progress_is_a_line_at_the_end_where_stderr_is_no_terminal(capsys):
    with Progress("reading", 2, " files") as progress:
        progress.update(1)
        progress.update(1)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and "reading" in lines[0] and "2.00/2.00" in lines[0]


def test_work_that_is_silent_says_what_it_does_until_it_ends_or_speaks():
    code = """
import sys, time
from nanochat import common
common.SILENCE_S = 0.5
common.work.begin("reading")
for _ in range(8):
    time.sleep(0.2)
    common.say("a line", sys.stderr)
print("silent", file=sys.stderr)
time.sleep(1.5)
common.work.begin("")
time.sleep(1)
"""
    found = run_python("-c", code).stderr
    spoken, _, silent = found.partition("silent\n")
    assert set(spoken.splitlines()) == {"a line"}
    assert 1 <= len(re.findall(r"^still reading \(\d s\)$", silent, re.MULTILINE)) <= 5


def test_a_script_that_starts_says_so():
    code = """
import sys, time
sys.argv = ["-m"]
from nanochat import common
common.SILENCE_S = 0.1
import scripts
time.sleep(1)
"""
    found = run_python("-c", code).stderr
    assert "still starting (" in found


@pytest.mark.parametrize("load, own, chosen", [(2.0, {}, "PASSIVE"), (0.1, {}, None),
                                               (2.0, {"OMP_NUM_THREADS": "1"}, None)])
def test_on_a_busy_machine_threads_wait_without_spinning_and_it_is_said(load, own, chosen, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    code = f"""
import os, sys
sys.argv = ["-m"]
os.getloadavg = lambda: ({load}, 0, 0)
os.cpu_count = lambda: 2
import scripts
print(os.environ.get("OMP_WAIT_POLICY"))
"""
    done = run_python("-c", code, **own)
    assert done.stdout.split() == [str(chosen)]
    assert ("OMP_NUM_THREADS=1" in done.stderr) == bool(chosen)


def test_one_thing_is_counted_without_an_s():
    assert [counted(number, "shard") for number in (0, 1, 2)] == ["0 shards", "1 shard", "2 shards"]
