"""Flags in a file: --config=FILE."""
from pathlib import Path

import pytest

from nanochat.common import BadInput
from nanochat.train.flags import Flags, parse_flags
from nanochat.train.plan import make_plan
from scripts import prepare_data

CONFIGS = sorted((Path(__file__).resolve().parents[1] / "configs").glob("*.toml"))


@pytest.fixture
def config(tmp_path):
    """Returns a function that writes a file for --config and returns the flag."""
    def write(text):
        (tmp_path / "run.toml").write_text(text)
        return f"--config={tmp_path / 'run.toml'}"
    return write


def test_flags_of_the_command_line_win_and_the_log_says_which_came_from_where(config, capsys):
    words = config('depth = 6\nmatrix-lr = 0.01\nno_compile = true\nlayer_gates = "off"\n')
    assert parse_flags([words, "--depth", "4"]) == parse_flags(
        ["--depth=4", "--matrix_lr=0.01", "--no_compile", "--layer_gates=off"])
    said = capsys.readouterr().err
    assert "run.toml gives --matrix_lr=0.01 --no_compile --layer_gates=off" in said
    assert "the command line replaces its --depth=6" in said


@pytest.mark.parametrize("text, found", [
    ("dept = 4", ["run.toml", "--dept=4 is not a flag", "--depth"]),
    ("learning_rate = 0.01", ["--learning_rate=0.01", "--lr_scale"]),
    ("preflight = true", ["--preflight is gone", "scripts.tpu_preflight"]),
    ("depth = 0", ["--depth=0 is not"]),
    ("depth = [4]", ["run.toml", "depth = [4]"]),
    ("[model]\ndepth = 4", ["run.toml", "model"]),
    ("depth 4", ["run.toml", "TOML"]),
])
def test_what_is_no_flag_is_refused_in_one_line(config, text, found):
    with pytest.raises(BadInput) as refusal:
        parse_flags([config(text)])
    assert all(part in str(refusal.value) for part in found) and "\n" not in str(refusal.value)


@pytest.mark.parametrize("text, secret", [
    ("WANDB_API_KEY = 'abcdefgh'", "abcdefgh"), ("hf_token = 'abcdefgh'", "abcdefgh"),
    (f"run = 'hf_{'a' * 34}'", "aaaa"), ("checkpoint_mirror = 'https://me:pass@host/x'", "pass")])
def test_a_secret_in_the_file_is_refused_and_not_shown(config, text, secret):
    with pytest.raises(BadInput, match="secret.*environment") as refusal:
        parse_flags([config(text)])
    assert secret not in str(refusal.value)


def test_every_script_takes_a_file(config):
    with pytest.raises(BadInput, match="--sourc=x is not a flag: did you mean --source"):
        prepare_data.main([config("sourc = 'x'")])


def test_the_file_that_a_run_writes_repeats_it(config):
    flags = parse_flags(["--depth=4", "--key_shift=off", "--run=a", "--no_compile", "--fim_rate=0.5",
                         "--val_dir=own=/a/b,others=/c\"d"])
    flags = flags.settled(make_plan(flags, 65536, "tpu", 8).config)
    again = parse_flags([config(flags.as_toml())])
    assert again == flags
    assert make_plan(again, 65536, "tpu", 8) == make_plan(flags, 65536, "tpu", 8)
    assert Flags().as_toml().count("\n") == 1


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_runs_in_configs_can_be_planned(path):
    flags = parse_flags([f"--config={path}"])
    device_type = flags.devices.device_type.replace("auto", "tpu")
    make_plan(flags, 65536, device_type, {"tpu": 8, "xla": 1, "cpu": 1}[device_type])
