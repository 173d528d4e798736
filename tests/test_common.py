"""Flags: their types, ranges and messages."""
from dataclasses import dataclass
from pathlib import Path

import pytest

from nanochat.common import BadInput, expand_path, flag, get_base_dir, read_flags


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


def test_flags_have_the_types_of_their_defaults_and_hyphens_are_underscores(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    assert read() == Flags()
    found = read("--depth=100", "--steps=-1", "--rate", "1e-3", "--verbose", "--out-dir=~/here", "--names=a,b")
    assert found == Flags(100, -1, 0.001, True, Path("/home/someone/here"), ["a", "b"])


@pytest.mark.parametrize("argument, message", [
    ("--depth=0", "--depth=0 is not a whole number of at least 1 and of at most 100"),
    ("--depth=101", "--depth=101 is not a whole number"),
    ("--depth=1.5", "--depth=1.5 is not a whole number"),
    ("--depth=", "--depth= is not a whole number"),
    ("--steps=0", "--steps=0 is not a whole number of at least 1, or -1"),
    ("--steps=-2", "--steps=-2 is not"),
    ("--steps=9223372036854775808", "--steps=9223372036854775808 is not"),
    ("--rate=0", "--rate=0 is not a number above 0 and below 1"),
    ("--rate=1", "--rate=1 is not"),
    ("--rate=nan", "--rate=nan is not"),
    ("--rate=1e400", "--rate=1e400 is not"),
    ("--rate=half", "--rate=half is not"),
    ("--dept=3", "--dept=3 is not a flag: did you mean --depth?"),
    ("--zzz", "--zzz is not a flag: --help lists all flags"),
    ("--verbose=3", "--verbose: it takes no value, and '3' is given"),
])
def test_a_value_outside_of_a_flag_s_range_is_refused_in_one_line(argument, message):
    with pytest.raises(BadInput) as refusal:
        read(argument)
    assert str(refusal.value).startswith(message) and "\n" not in str(refusal.value)


def test_a_base_directory_below_the_home_directory(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("NANOCHAT_BASE_DIR", "~/data")
    assert get_base_dir() == Path("/home/someone/data")
    monkeypatch.delenv("NANOCHAT_BASE_DIR")
    assert get_base_dir() == Path("/home/someone/.cache/nanochat")
