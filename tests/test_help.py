"""What --help says of each flag: in few words, and where to read more."""
import ast
import re

import pytest

from nanochat.train.flags import FIRST, parse_flags
from tests.test_documents import ROOT, problem_of_link

MAX_WORDS = 15  # up to the first semicolon, after which the default's meaning and a link follow


def text_of(node):
    """Returns the text of an expression, with "…" for what is computed."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) for part in node.values)
    if isinstance(node, ast.BinOp):
        return text_of(node.left) + text_of(node.right)
    return "…"


def help_texts():
    """Returns {"file --name": help} of all flags of the scripts."""
    found = {}
    for folder in ("nanochat", "scripts"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                is_field = isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Call)
                if is_field and getattr(node.value.func, "id", "") == "flag":
                    found[f"{path.relative_to(ROOT)} --{node.target.id}"] = text_of(node.value.args[1])
    return found


def test_a_help_text_says_what_the_flag_does_in_few_words():
    texts = help_texts()
    assert len(texts) > 200
    too_long = [f"{flag}: {text}" for flag, text in texts.items() if len(text.split(";")[0].split()) > MAX_WORDS]
    assert not too_long, "\n".join(too_long)


def test_the_sections_that_help_texts_name_exist():
    named = [(flag, link) for flag, text in help_texts().items() for link in re.findall(r"docs/[\w./#-]+", text)]
    assert ("nanochat/train/flags.py --kernel", "docs/training.md#kernels") in named
    problems = [f"{flag}: {problem}" for flag, link in named if (problem := problem_of_link("README.md", link))]
    assert not problems, "\n".join(problems)


def test_the_help_of_base_train_begins_with_the_ten_flags_of_a_newcomer(capsys):
    with pytest.raises(SystemExit):
        parse_flags(["--help"], "Trains.")
    groups = capsys.readouterr().out.split("\n\n")
    assert groups[0].startswith("usage:") and "\n" not in groups[0] and groups[1] == "Trains."
    assert re.findall(r"^  --(\w+)", groups[2], re.MULTILINE) == list(FIRST) and len(FIRST) == 10
