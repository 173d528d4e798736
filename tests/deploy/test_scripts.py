"""What every script promises, without any machine: help, clear refusals, portability, size."""
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
VERBS = ["create", "setup", "push", "data", "train", "status", "logs", "stop_run", "fetch", "watch", "stop", "start",
         "delete", "list"]
LIBRARIES = ["lib", "gcloud", "ssh", "on_vm", "money"]


def run(*args):
    env = {**os.environ, "NANOCHAT_DEPLOY_CONFIG": "/nonexistent"}
    return subprocess.run([str(arg) for arg in args], capture_output=True, text=True, env=env, timeout=30)


def test_every_script_is_a_verb_or_a_library():
    assert {path.stem for path in DEPLOY.glob("*.sh")} == set(VERBS + LIBRARIES)


@pytest.mark.parametrize("verb", VERBS)
def test_help_and_an_unknown_flag(verb):
    script = DEPLOY / f"{verb}.sh"
    result = run(script, "--help")
    assert result.returncode == 0 and f"deploy/{verb}.sh" in result.stdout and not result.stderr
    assert len(result.stdout.splitlines()) < 30
    result = run(script, "--no_such_flag")
    assert result.returncode == 2 and "unknown flag --no_such_flag" in result.stderr


@pytest.mark.parametrize("name", VERBS + LIBRARIES)
def test_no_script_is_long(name):
    lines = (DEPLOY / f"{name}.sh").read_text().splitlines()
    assert len(lines) < 120 and max(map(len, lines)) <= 120


@pytest.mark.parametrize("verb", VERBS)
def test_help_names_every_flag_of_its_own(verb):
    text = (DEPLOY / f"{verb}.sh").read_text()
    own = re.search(r'^parse "([^"]*)"', text, re.MULTILINE)[1].replace("=", "").split()
    shown = run(DEPLOY / f"{verb}.sh", "--help").stdout
    assert not [name for name in own if f"--{name.lower()}" not in shown]


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb not in ("status", "list")])
def test_a_missing_name_is_wrong_use(verb):
    result = run(DEPLOY / f"{verb}.sh")
    assert result.returncode == 2 and result.stderr.startswith("error: ") and len(result.stderr.splitlines()) == 1


def test_nothing_that_bash_3_2_or_the_tools_of_macos_lack():
    """What runs on the laptop; the scripts between <<'END' and END run on the VM."""
    newer = re.compile(r"mapfile|readarray|declare -A|local -n|\$\{[^}]*(,,|\^\^)|&>>|\|&|\[\[ -v|%\(|coproc|"
                       r"sed -i|sed -r|grep -P|readlink -f|stat -c|\btac\b|date -Is|mktemp --|xargs -r|flock|setsid")
    for path in DEPLOY.glob("*.sh"):
        if path.stem != "on_vm":
            here = re.sub(r"<<'END'.*?^END$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
            here = re.sub(r"^#.*$", "", here, flags=re.MULTILINE)
            assert not newer.findall(here), path.name
            empty = re.findall(r'(?<!\+)"\$\{(?:FLAGS|ARGS)\[@\]\}"', here)  # unbound in bash 3.2 if there is none
            assert not empty or path.stem in ("status", "watch"), path.name  # these have made sure that there is one


def test_shellcheck_finds_nothing():
    shellcheck = Path(sys.executable).with_name("shellcheck")
    program = str(shellcheck) if shellcheck.exists() else shutil.which("shellcheck")
    if not program:
        pytest.skip("shellcheck is not installed")
    result = run(program, *sorted(DEPLOY.glob("*.sh")))
    assert result.returncode == 0, result.stdout
