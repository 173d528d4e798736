"""The table of settings: how config.env and flags are read, and what is refused in one line."""
import os
import re
import shutil
import sys

import pytest

from deploy.lib.settings import FORMS, Refused, read_config, read_flags
from tests.deploy.conftest import ROOT, run


@pytest.fixture
def config(tmp_path):
    def read(content):
        path = tmp_path / "config.env"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return read_config(path)
    return read


@pytest.mark.parametrize("content, values", [
    (b"\xef\xbb\xbfNAME=nano\r\n", {"NAME": "nano"}),
    ("ZONES='us-a us-b'  # two of the user's", {"ZONES": "us-a,us-b"}), ("ZONES='us-a, us-b'", {"ZONES": "us-a,us-b"}),
    ("POLL_S=0.2 MIN_FREE_GB=0 ZONES=us-a", {"POLL_S": "0.2", "MIN_FREE_GB": "0", "ZONES": "us-a"}),
    ("export NAME=nano", {"NAME": "nano"}), ("# NAME=nano\n\n", {}),
    ("BUCKET=\nNAME=nano", {"BUCKET": "", "NAME": "nano"}),
    ("SSH_KEY='~/a key'", {"SSH_KEY": os.path.expanduser("~/a key")}),
    ('TO="$HOME/x"', {"TO": os.environ["HOME"] + "/x"}),
    ("TO=${HOME}/x", {"TO": os.environ["HOME"] + "/x"}),
    ("WEBHOOK=https://a.b/c?d=e#f", {"WEBHOOK": "https://a.b/c?d=e#f"}),
    *((f"{name}={no}", {name: ""}) for name in ("ON_DEMAND", "AGAIN", "INTERNAL_IPS")
      for no in ("0", "no", "False", "off")),
    ("ON_DEMAND=1", {"ON_DEMAND": "1"}), ("ON_DEMAND=yes", {"ON_DEMAND": "1"}),
])
def test_a_config_file_is_read(config, content, values):
    assert config(content) == values


@pytest.mark.parametrize("content, named", [
    ("USD_PER_HUOR=2", ["line 1", "USD_PER_HUOR", "USD_PER_HOUR"]), ("\nzones=us-a", ["line 2", "ZONES"]),
    ("TO=$NOT_DEFINED/x", ["$NOT_DEFINED"]), ("TO=$(touch pwned)", ["touch"]), ("TO='`touch pwned`'", ["touch"]),
    ("touch pwned", ["touch pwned"]), ("NAME=nano; touch pwned", ["NAME"]), ("TO='/x", ["'/x"]),
    ("ON_DEMAND=maybe", ["ON_DEMAND=maybe", "1 for yes"]), ("MAX_USD=5,5", ["MAX_USD=5,5"]),
    ("MARGIN_S=10m", ["MARGIN_S=10m"]), (f"WAIT_S={'9' * 400}", ["WAIT_S"]),
    ("SSH_USER=-oProxyCommand=x", ["SSH_USER"]),
    ("NAME=../x", ["NAME=../x"]),
    *((f"ZONES={zone}", [zone, "us-west4-a"]) for zone in ("us-west4", "us-west4-A")),
    ("TO=/a b", ["TO", "quotation marks"]), ("BUCKET=my-bucket", ["gs://"]), ("NAME=nano".encode("utf-16"), ["UTF-8"]),
])
def test_what_cannot_be_read_is_refused_by_name_and_nothing_of_it_runs(config, tmp_path, monkeypatch, content, named):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Refused) as error:
        config(content)
    assert all(word in str(error.value) for word in named) and "\n" not in str(error.value)
    assert not (tmp_path / "pwned").exists()


def test_a_refused_config_file_ends_a_script_with_status_2_and_one_line(tmp_path):
    (tmp_path / "config.env").write_text("USD_PER_HUOR=2\n")
    result = run("list.sh", NANOCHAT_DEPLOY_CONFIG=tmp_path / "config.env")
    assert result.returncode == 2 and len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("key, said", [("", "--ssh_key is empty"), ("folder", "folder.pub is no public key"),
                                       ("private", "private.pub is no public key")])
def test_a_new_vm_needs_a_key_with_which_one_can_log_in(tmp_path, key, said):
    (tmp_path / "folder").mkdir()
    (tmp_path / "private").write_text("-----BEGIN OPENSSH PRIVATE KEY-----\n")
    (tmp_path / "private.pub").touch()
    result = run("create.sh", "nano", "--zones=us-a", f"--ssh_key={key and tmp_path / key}")
    assert result.returncode == 2 and said in result.stderr and len(result.stderr.splitlines()) == 1


def test_flags_are_read_as_the_config_file_is():
    values, others, run = read_flags(
        ["nano", "--max-usd", "5", "--on_demand=0", "--kill", "--to=~/x", "b", "--", "--a", "b c"],
        ["MAX_USD", "KILL", "TO"])
    assert values == {"MAX_USD": "5", "ON_DEMAND": "", "KILL": "1", "TO": os.path.expanduser("~/x")}
    assert (others, run) == (["nano", "b"], ["--a", "b c"])


@pytest.mark.parametrize("flags, named", [
    (["--pol_s"], ["--pol_s", "--poll_s"]), (["--max_usd=5"], ["unknown flag --max_usd"]),
    (["--wait_s"], ["value"]),
    (["--wait_s="], ["--wait_s"]), (["--webhook=https://a.b"], ["unknown flag --webhook"]),
])
def test_a_flag_that_the_script_has_not_or_that_lacks_its_value_is_refused(flags, named):
    with pytest.raises(Refused) as error:
        read_flags(flags, [])
    assert all(word in str(error.value) for word in named)


def test_every_setting_of_the_scripts_and_of_the_example_is_in_the_table():
    texts = [path.read_text() for path in (ROOT / "deploy").rglob("*.sh")]
    named = {name for text in texts for names in re.findall(r'^parse "([^"]*)"', text, re.MULTILINE)
             for name in names.split()}
    example = (ROOT / "deploy/config.env.example").read_text()
    named |= set(re.findall(r"^#(\w+)=", example, re.MULTILINE))
    assert named and named <= set(FORMS)


def watch(name, *flags, run_flag="--run=d16", **environment):
    return run("watch.sh", name, "--zones=us-west4-a", "--max_usd=5", *flags, "--", run_flag, "--depth=16",
               **environment)


@pytest.mark.parametrize("name, flag, run_flag, named", [
    ("nano", "--max_usd=0", "--run=d16", "--max_usd=0"),
    *(pytest.param("nano", flag, "--run=d16", flag, marks=pytest.mark.slow)
      for flag in ("--max_hours=0", "--patience=0")),
    # Google would not take these names
    *(pytest.param(name, "--dry_run", "--run=d16", name, marks=pytest.mark.slow)
      for name in ("../x", "Nano", "nano_1", "1nano", "nano-", "n" * 64)),
    # that of a run must be a folder's, and be known
    ("nano", "--dry_run", "--run=../x", "--run"),
    pytest.param("nano", "--dry_run", "--config=configs/d16.toml", "--config", marks=pytest.mark.slow)])
def test_a_dry_run_of_watch_refuses_what_cannot_be(name, flag, run_flag, named):
    result = watch(name, flag, "--dry_run", run_flag=run_flag)
    [error] = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert result.returncode == 2 and named in error


def test_a_state_folder_that_cannot_be_written_and_a_budget_below_its_own_reserve_are_one_line(tmp_path):
    result = watch("nano", "--project=p", "--max_usd=0.01", "--usd_per_hour=2", HOME=tmp_path)
    assert result.returncode == 2 and "error: the budget lasts 18 s, and --margin_s=600" in result.stderr
    (tmp_path / ".local/state/nanochat/nano/lock").unlink()
    (tmp_path / ".local/state/nanochat/nano/lock").mkdir()
    result = watch("nano", "--project=p", HOME=tmp_path)
    assert result.returncode == 2 and "cannot be written" in result.stderr and len(result.stderr.splitlines()) == 1


@pytest.mark.slow
def test_a_dry_run_of_watch_says_what_the_budget_buys():
    said = watch("nano", "--max_usd=50", "--usd_per_hour=2", "--dry_run").stderr
    assert "v5litepod-8" in said and "a spot VM" in said and "us-west4-a (2.00 USD an hour)" in said
    assert "25.00 hours" in said and "warning" not in said
    said = watch("nano", "--max_usd=0.01", "--on_demand=1", "--usd_per_hour=2", "--dry_run").stderr
    assert "on demand" in said and "warning: the budget lasts 18 s" in said and "--margin_s=600" in said


@pytest.mark.slow
def test_a_dry_run_of_train_is_in_words_and_one_command_is_not_two():
    said = run("train.sh", "192.0.2.1", "--ssh_user=me", "--dry_run", "--", "--run=d16").stderr
    assert "+ ssh me@192.0.2.1: " in said and "base_train '--run=d16'" in said and "set -a" not in said
    again = run("train.sh", "192.0.2.1", "--again", "--", "--run=d16")
    assert again.returncode == 2 and "--again" in again.stderr


def test_a_half_installed_environment_is_one_line(tmp_path):
    shutil.copytree(ROOT / "deploy", tmp_path / "deploy")
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").symlink_to(sys.executable)  # without the packages, and without nanochat/
    result = run("train.sh", "192.0.2.1", "--dry_run", "--", "--run=d16", root=tmp_path)
    assert result.returncode == 0 and "Traceback" not in result.stderr and "are not checked" in result.stderr
