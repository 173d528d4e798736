"""Checks of every script that need no VM: help, error messages, portability, length."""
import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from deploy.lib import check_flags
from nanochat.common import BadInput
from tests.deploy.conftest import run

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
VERBS = sorted(path.stem for path in DEPLOY.glob("*.sh"))
BAD_BATCH = "--total_batch_size=999"  # which eight chips cannot divide


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
def test_help_names_every_flag_and_an_unknown_one_and_a_missing_or_third_name_are_refused(verb):
    script = DEPLOY / f"{verb}.sh"
    result = run(script.name, "--help")
    assert result.returncode == 0 and f"deploy/{verb}.sh" in result.stdout and not result.stderr
    assert len(result.stdout.splitlines()) < 30
    own = re.search(r'^parse "([^"]*)"', script.read_text(), re.MULTILINE)[1].split()
    assert not [name for name in own if f"--{name.lower()}" not in result.stdout]
    result = run(script.name, "--no_such_flag")
    assert result.returncode == 2 and "unknown flag --no_such_flag" in result.stderr
    for names in ((), ("nano-1", "nano-2", "nano-3")) if verb not in ("status", "list") else ():
        result = run(script.name, *names)
        assert result.returncode == 2 and result.stderr.startswith("error: ") and len(result.stderr.splitlines()) == 1


def test_hosts_with_a_blank_between_them_are_refused():
    for verb in ("push", "status"):
        result = run(f"{verb}.sh", "192.0.2.1 192.0.2.2")
        assert result.returncode == 2 and "'192.0.2.1 192.0.2.2' is no HOST" in result.stderr


def test_a_script_is_found_through_links_and_stops_without_its_library(tmp_path):
    headers = {re.search("^me=.*\n.*$", (DEPLOY / f"{verb}.sh").read_text(), re.MULTILINE)[0] for verb in VERBS}
    assert len(headers) == 1, "what holds for one script holds for all"
    (tmp_path / "bin").mkdir()
    (tmp_path / "second").symlink_to(DEPLOY / "push.sh")
    (tmp_path / "bin/first").symlink_to("../second")
    (tmp_path / "folder").symlink_to(DEPLOY)
    for script in (tmp_path / "bin/first", tmp_path / "folder/push.sh"):
        result = run(script, "--no_such_flag")
        assert result.returncode == 2 and "unknown flag --no_such_flag" in result.stderr
    alone = shutil.copy(DEPLOY / "push.sh", tmp_path / "bin")
    result = subprocess.run([alone, "192.0.2.1"], capture_output=True, text=True, cwd=tmp_path, timeout=60,
                            stdin=subprocess.DEVNULL)
    assert result.returncode == 2 and len(result.stderr.splitlines()) == 1 and "lib/common.sh" in result.stderr
    assert not (tmp_path / "typescript").exists(), "the program `script` of util-linux was started"


def test_git_ignores_results_and_secrets():
    git = ["git", "-C", DEPLOY.parent]
    if subprocess.run([*git, "rev-parse"], capture_output=True).returncode:
        pytest.skip("this is no git checkout")
    names = ["checkpoints/d16/run.log", "checkpoints/d16/step_000001/model.safetensors", "deploy/config.env", ".env",
             ".tpu_env"]
    assert subprocess.check_output([*git, "check-ignore", *names], text=True).split() == names


def test_scripts_use_nothing_that_bash_3_2_or_the_tools_of_macos_lack():
    """Only the laptop's part of each script is checked; the text between <<'END' and END runs on the VM."""
    newer = re.compile(
        r"mapfile|readarray|(declare|local|typeset) -[Ang]|\$\{[^}]*(,,|\^\^|@[A-Z]\}| -[0-9])|\w\[-[0-9]|&>>|\|&|;;?&|"
        r"\[\[ -v|%\(|coproc|wait -|EPOCH|BASHPID|globstar|lastpipe|inherit_errexit|exec \{|read -\w*[Ni]|\{\d+\.\.|"
        r"\$\([^()]*\bcase\b|"  # it takes the pattern's ) for the end of $(
        r"sed -[irzu]|sed --|grep -\w*P|readlink -f|realpath|stat -|\btac\b|date -I|date --|mktemp --|xargs -r|flock|"
        r"setsid|\btimeout |head -n -|tail -s|-printf|cp -t|sort -\w*[Vz]|base64 -w|\bnproc\b")
    for path in DEPLOY.rglob("*.sh"):
        if path.stem not in ("on_vm", "limit"):
            here = re.sub(r"<<'END'.*?^END$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
            here = re.sub(r"^#.*$", "", here, flags=re.MULTILINE)
            assert not newer.findall(here), path.name
            empty = re.findall(r'(?<!\+)"\$\{(?:FLAGS|ARGS)\[@\]\}"', here)  # unbound in bash 3.2 if there is none;
            assert not empty or path.stem in ("status", "watch", "repair"), path.name  # these made sure that there is


def test_the_example_of_tpu_env_has_every_variable_that_is_read_each_with_a_comment_and_no_other():
    root = DEPLOY.parent
    read = set()
    for folder in ("nanochat", "scripts"):
        for path in (root / folder).rglob("*.py"):
            read |= set(re.findall(r'environ(?:ment)?(?:\.get\(|\[)"(\w+)"(?!\] =)', path.read_text()))
    for path in DEPLOY.rglob("*.sh"):
        on_vm = path.read_text() if path.stem == "on_vm" else "".join(
            re.findall(r"<<'END'(.*?)^END$", path.read_text(), re.DOTALL | re.MULTILINE))
        read |= set(re.findall(r"\$\{([A-Z][A-Z_]+):-", on_vm))
    # the system, torchrun and the TPU's software set these, and no Ray runs on a VM
    read -= {"RAY_AUTH_MODE", "HOME", "RANK", "LOCAL_RANK", "WORLD_SIZE", "TPU_WORKER_HOSTNAMES", "TPU_WORKER_ID"}
    for package, name in (("wandb", "WANDB_API_KEY"), ("wandb", "WANDB_MODE"), ("libtpu", "LIBTPU_INIT_ARGS")):
        if spec := importlib.util.find_spec(package):
            files = [*Path(spec.origin).parent.glob("env.py"), *Path(spec.origin).parent.glob("libtpu.so")]
            assert any(name.encode() in path.read_bytes() for path in files), f"{package} does not read {name}"
        read.add(name)
    blocks = (root / ".tpu_env.example").read_text().split("\n\n")
    found = [name for block in blocks for name in re.findall(r"^#?export (\w+)=", block, re.MULTILINE)]
    assert sorted(found) == sorted(read)
    assert all(re.match(r"# \S", block) for block in blocks)


@pytest.mark.parametrize("flags", [["--max_usd=50$"], ["--max_usd=5,5"], ["--max_usd=-1"], ["--max_hours=."],
                                   ["--max_usd=5", "--margin_s=10m"], ["--max_usd=5", "--patience=1.5"],
                                   [], ["--max_usd="], ["--max_usd=5", "--type=v6e-x"],
                                   ["--max_usd=5", "--type=v5p-8"], ["--max_usd=5", "--type=v9-8"]])
def test_watch_does_not_start_without_a_budget_that_is_a_number(flags):
    result = run("watch.sh", "nano", "--zones=us-a", *flags, "--", "--run=a")
    assert result.returncode == 2 and len(result.stderr.splitlines()) == 1, result.stderr


@pytest.mark.parametrize("accelerator", ["v5litepod-8", ""])
@pytest.mark.parametrize("flags, complaint", [
    ("--dept=3", "--dept=3 is not a flag: did you mean --depth?"), ("--run=a/b", "--run=a/b is not a plain name"),
    (BAD_BATCH, "999 tokens does not divide by 65536 = device_batch_size 8 × max_seq_len 1024 × 8"),
    ("--run=d16 --depth=16", None)])
def test_flags_that_base_train_would_refuse_are_refused(monkeypatch, accelerator, flags, complaint):
    monkeypatch.setattr("sys.argv", ["check_flags", accelerator, *flags.split()])
    if complaint and (accelerator or flags != BAD_BATCH):  # which needs the number of chips
        with pytest.raises(BadInput, match=re.escape(complaint)):
            check_flags.main()
    else:
        check_flags.main()


@pytest.mark.parametrize("command, flags, complaint", [
    ("watch.sh nano --zones=us-a --max_usd=1", BAD_BATCH, "999 tokens does not divide"),
    pytest.param("watch.sh nano --zones=us-a --max_usd=1", "--run=d16 --depth=16", None, marks=pytest.mark.slow),
    pytest.param("train.sh 192.0.2.1", "--dept=3", "--dept=3 is not a flag", marks=pytest.mark.slow),
    ("train.sh 192.0.2.1", BAD_BATCH, None)])  # the TPU behind an address is not known
def test_a_dry_run_checks_the_flags_of_the_run(command, flags, complaint):
    if not (DEPLOY.parent / ".venv/bin/python").exists():
        pytest.skip("make has not installed the packages")
    script, *arguments = command.split()
    result = run(script, *arguments, "--dry_run", "--", *flags.split())
    begins = {"watch.sh": "+ create, setup", "train.sh": "+ ssh"}[script] in result.stderr
    assert (result.returncode, begins) == ((2, False) if complaint else (0, True))
    assert complaint is None or complaint in result.stderr
