"""What a VM says is data: VMs that answer with commands, paths, links, escapes and numbers without end."""
import io
import json
import os
import subprocess
from types import SimpleNamespace

import pytest

from deploy.lib.from_vm import LARGEST, Refused, printable, read_fields, receive
from deploy.lib.state import Journal, State, Tries, Vm
from deploy.watch import make_private
from tests.deploy.conftest import run
from tests.deploy.made_up import World, polls

pytestmark = pytest.mark.slow
BEGIN = "-- nanochat begins --"
GOOD = "state=running\nrun=a\nsteps=1/5\ncheckpoint=step_000005\nmirror=gs://x\nmirrored=step_000001\ndisk=9\n"


def answers(vm, text, to=""):
    """Lets the VM answer every script that has `to` in it with this text."""
    (vm.home / "answer").write_text(f"{BEGIN}\n{text}")
    (vm.home / ".bashrc").write_text(
        f'case $SSH_CONNECTION:$BASH_EXECUTION_STRING in [0-9]*"{to}"*) cat ~/answer; exit 0 ;; esac\n')


def test_status_runs_nothing_that_a_vm_says(laptop, vm):
    names = ("mirror_behind_s", "log_age_s", "checkpoint_age", "disk", "steps", "record", "exit")
    answers(vm, GOOD + "".join(f"{name}=UID[$(touch {laptop.root}/pwned; echo 0)]\n" for name in names))
    output = laptop.run("status.sh", vm.ip)
    assert "run    a running" in output and all(f"the VM's {name} is left out" in output for name in names)
    assert not (laptop.root / "pwned").exists()


def test_fetch_makes_no_path_of_a_name_that_is_no_runs(laptop, vm):
    results = laptop.root / "to/results"
    answers(vm, "../deploy\n/etc\n..\n.ssh\n-x\na/b\na b\n" + "r" * 200 + "\n")
    output = laptop.run("fetch.sh", vm.ip, f"--to={results}", status=1)
    assert output.count("the VM's run is left out") == 8 and not results.parent.exists()


def test_fetch_asks_for_no_checkpoint_whose_name_is_none(laptop, vm):
    results = laptop.root / "results"
    for path in ("a/delete.sh", "x"):
        (results / path).parent.mkdir(parents=True, exist_ok=True)
        (results / path).write_text("mine")
    run_dir(vm)
    answers(vm, "delete.sh 123\n../x 1\nstep_000001/../../x 1\nstep_000001 UID[1]\n", to="checkpoints . |")
    output = laptop.run("fetch.sh", vm.ip, "a", f"--to={results}")
    assert output.count("the VM's checkpoints is left out") == 4
    assert (results / "a/delete.sh").read_text() == (results / "x").read_text() == "mine"
    assert not list((results / "a").glob("*.[0-9]*"))


def run_dir(vm):
    folder = vm.run_dir("a")
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("{}\n")
    return folder


def test_fetch_brings_no_links_and_leaves_no_half_checkpoint(laptop, vm):
    folder = run_dir(vm)
    (folder / "step_000005").mkdir()
    (folder / "step_000005/meta.json").write_text("{}")
    (folder / "step_000005/passwd").symlink_to("/etc/passwd")
    results = laptop.root / "results"
    laptop.run("fetch.sh", vm.ip, "a", f"--to={results}")
    assert sorted(path.name for path in (results / "a").rglob("*")) == ["meta.json", "metrics.jsonl", "step_000005"]
    (folder / "step_000006").mkdir()
    (folder / "step_000006/..sh").write_text("x")
    assert "..sh, which was not asked for" in laptop.run("fetch.sh", vm.ip, "a", f"--to={results}", status=1)
    assert not (results / "a/step_000006").exists()


@pytest.mark.parametrize("sent, word", [
    ("1 delete.sh\nx", "not asked for"), ("1 ../x\nx", "not asked for"), ("1 /etc/x\nx", "not asked for"),
    ("1 step_1/../x\nx", "not asked for"), ("1 step_1\nx", "not asked for"), ("1 metrics.jsonl/x\nx", "not asked for"),
    ("1 step_1/a/b/c\nx", "not asked for"), ("1 step_1/.hidden\nx", "not asked for"),
    ("1 step_1/a\x1b[2J\nx", "not asked for"),
    ("1 step_2/x\nx", "not asked for"), (f"{10 ** 14} step_1/x\nx", "no room"), (f"{'9' * 400} step_1/x\n", "no list"),
    ("5 step_1/x\nx", "not whole"), ("", "not whole"), ("UID[1] step_1/x\n", "no list"), ("x" * 5000, "no list"),
])
def test_files_that_were_not_asked_for_are_refused(tmp_path, sent, word):
    (tmp_path / "sent").write_text(f"{sent}")
    with open(tmp_path / "sent", "rb") as stream, pytest.raises(Refused, match=word) as error:
        receive(stream, tmp_path / "to/incoming", ["metrics.jsonl", "step_1"])
    assert "\x1b" not in str(error.value)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.name not in ("sent", "x")]


ESCAPES = "\x1b]52;c;cHduZWQ=\x07 \x1b[2J \x9b2J \r\u202e"


def test_escapes_of_a_terminal_are_printed_as_escapes(laptop, vm):
    answers(vm, f"{GOOD}error={ESCAPES}\n")
    bashrc = (vm.home / ".bashrc").read_text()
    (vm.home / ".bashrc").write_text(bashrc.replace("cat ~/answer", "cat ~/answer >&2; cat ~/answer"))
    for script, status, *flags in (("status.sh", 0), ("logs.sh", 0), ("stop_run.sh", 0), ("setup.sh", 0),
                                   ("train.sh", 0, "--", "--run=a")):
        output = laptop.run(script, vm.ip, *flags, status=status)
        assert not set(output) & set("\x1b\x07\x9b\r\u202e"), script
        assert "\\x1b]52;c;cHduZWQ=\\x07" in output, script


def test_escapes_are_escapes_in_the_journal_too(tmp_path, capsys):
    journal = Journal(tmp_path, "nano")
    journal.note(f"a{ESCAPES}\nb")
    journal.add(f"c\n{ESCAPES}\ud800")
    for text in (capsys.readouterr().out, journal.path.read_text()):
        assert "\x1b" not in text and "\\x1b]52" in text and "c\n" in text and len(text.splitlines()) == 3
    assert printable("ä → 1\n\t") == "ä → 1\n\t"


@pytest.mark.parametrize("name", ["checkpoint_bytes", "log_age_s", "mirror_behind_s"])
def test_a_number_without_end_ends_no_watch(tmp_path, name):
    world = World(tmp_path)
    world.run |= {name: "9" * 400}
    polls(loop := world.loop(), 3)
    assert world.state.vm.checkpoint_bytes in (0, 1000)
    assert loop.reserve_s() < 10_000 and "delete" not in world.done


def test_fields_out_of_bounds_are_as_missing_ones():
    fields = read_fields(f"run=../x\nstate=a\ndisk={'9' * 400}\nmirror_behind_s=08\ncheckpoint=delete.sh\nother=1\n"
                         f'record={{"loss": 1e999, "step": {"9" * 400}, "mfu": true, "tokens_per_s": 5}}\n')
    assert fields == {"mirror_behind_s": "8", "tokens_per_s": "5"}
    for record in ("[" * 100_000, "[1]", "9" * 5000, '{"step": NaN}'):
        assert read_fields(f"record={record}") == {}


@pytest.mark.parametrize("value", [int("9" * 400), -1, LARGEST, "5", None, [], True, float("inf")])
def test_a_state_that_cannot_be_used_is_as_one_that_is_missing(tmp_path, value):
    path = tmp_path / "state.json"
    vm = {"state": "READY", "checkpoint_bytes": value, "run": 5}
    path.write_text(json.dumps({"vm": vm, "spent_usd": value, "counted_at": value, "script": 7, "tries": value}))
    state = State.load(path, 9)
    assert state == State(vm=Vm(state="READY"), counted_at=9) and state.vm.transfer_s() == 0
    for text in ("[" * 100_000, "[1]", '{"vm": 5, "spent_usd": 1e999}', "\xff", "{", ""):
        path.write_text(text)
        assert State.load(path, 9) == State(counted_at=9, is_lost=text != '{"vm": 5, "spent_usd": 1e999}')
    state = State(True, Vm("READY", id="1"), Tries(2), script="push.sh", group=7, counted_at=5.0)
    assert state.save(path) and State.load(path, 9) == state
    path.unlink()
    assert State.load(path, 9) == State(counted_at=9) and not state.save(tmp_path / "no_such_folder/state.json")


def test_watch_fetches_the_run_that_it_started_and_not_the_one_that_the_vm_names(tmp_path):
    world = World(tmp_path)
    world.run |= {"run": "mine", "checkpoint": "step_000200"}
    fetched = []
    world.fails["fetch"] = lambda flags: fetched.append(flags[0])
    loop = world.loop()
    reason = loop.rescue(100)
    assert "mine" in reason and "fetch.sh" in reason and fetched == []
    world.run |= {"run": "d16"}
    loop.rescue(100)
    assert fetched == ["d16"]


def test_the_state_folder_is_closed_for_others(tmp_path):
    folder = tmp_path / "state"
    make_private(folder)
    Journal(folder, "nano").note("text")
    State().save(folder / "state.json")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600} and len(list(folder.iterdir())) == 3


def test_an_agent_with_many_keys_does_not_hide_the_right_one(laptop, vm):
    agent = dict(line.split(";")[0].split("=") for line in subprocess.check_output(
        ["ssh-agent", "-s"], text=True).splitlines() if "=" in line)
    try:
        for number in range(7):
            key = laptop.home / f"key{number}"
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
            subprocess.run(["ssh-add", "-q", key], check=True, env={**os.environ, **agent})
        assert "no run yet" in laptop.run("status.sh", vm.ip, env=agent)
    finally:
        os.kill(int(agent["SSH_AGENT_PID"]), 15)


def test_an_answer_without_end_is_refused_and_none_at_all_is_unreachable_for_a_reason(laptop, vm):
    for answer in ("yes", "yes | head -n 999999; sleep 999", f"echo '{BEGIN}'; yes state=running",
                   f"echo '{BEGIN}'; cat /dev/zero"):
        (vm.home / ".bashrc").write_text(f"[ -z \"$SSH_CONNECTION\" ] || {{ {answer}; exit 0; }}\n")
        for script in ("status.sh", "fetch.sh"):
            output = laptop.run(script, vm.ip, status=1, timeout_s=60)
            assert "more than 1000000 bytes" in output and len(output) < 10_000
    (vm.home / ".bashrc").write_text("exit 75\n")
    [line] = [line for line in laptop.run("status.sh", vm.ip, status=1).splitlines() if "unreachable" in line]
    assert line.split(": ")[1]


def test_files_without_end_are_refused_and_leave_room_on_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=60_000_000))
    for sent, word in (("0 step_1/x{}\n", "more than 10000 files"), ("20000000 step_1/x{}\n", "no room")):
        stream = io.BytesIO("".join(sent.format(number) for number in range(10_001)).encode())
        with pytest.raises(Refused, match=word):
            receive(stream, tmp_path / word, ["step_1"])


@pytest.mark.parametrize("words", [
    ["push.sh", "-oProxyCommand=touch pwned"],
    *(["lib/look.sh", "nano", "--what=run", f"--vm_ips={host}"]
      for host in ("-oProxyCommand=touch pwned", "a;b", "$(touch pwned)", "a b"))])
def test_an_address_that_is_none_reaches_no_command(tmp_path, words):
    assert run(*words, cwd=tmp_path).returncode == 2 and not (tmp_path / "pwned").exists()
