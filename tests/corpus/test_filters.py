"""Filters of documents: what each drops and keeps, the manifest's shares, and the page with examples."""
import random
import re

import pytest

from nanochat.common import BadInput
from nanochat.corpus.filters import EXAMPLES, FILTERS, Code, is_permissive, parse_filters, replace_emails
from tests.corpus.projects import cpp, make_project, prepare, read, stack_rows, write_table

RNG = random.Random(1)
COMMENT = f"/* {cpp('comment')} */\n"
TABLE = "".join(f'"{"".join(RNG.choices("ABCdefGHIjkl", k=60))}",\n' for _ in range(30))
STATES = "".join(f"case {number}: return handle_the_event_of_this_kind_in_the_context_and_its_state(event, {number});\n"
                 for number in range(200))
OPERATORS = "".join("".join(RNG.choices("+-*<>=;&|!~^%:?.", k=40)) + "\n" for _ in range(80))
KEY = "ghp_" + "aB3" * 12
SAME = "    value += compute_something(value, 3);\n"
CASES = {  # {filter: (a document that it drops, similar ones that it keeps)}
    "repeated_lines": (cpp(1, 5) + SAME * 30, [cpp(1) + SAME * 5, cpp(1) + "        }\n" * 200]),
    "repeated_text": (STATES, [cpp(1, 60)]),
    "comments": (COMMENT + "int a;\n", [COMMENT + cpp(1), "const char *text = \"/* \"; " + cpp(1) + "// */\n"]),
    "data": (TABLE, [TABLE + cpp(1, 60), "".join(f'#include "folder/header{i}.h"\n' for i in range(50))]),
    "identifiers": (OPERATORS, [cpp(1)]),
    "long_lines": (cpp(3, 30).replace("\n", " ") + "\n" + cpp(2), [cpp(1, 10).replace("\n", " ") + "\n" + cpp(2)]),
    "unbalanced": (cpp(4) + "void f() {\n" * 6 + "if (a[\n" * 3, [
        cpp(1) + '// ((((((((((((\nconst char *s = "{{{{{{{{{{{\\"{{", c = \'{\', *r = R"x({{{{{{"{{{{{)x";\n',
        "void f() { if ((*p != L'\\\"') && (g)) { } }\n" * 9,
        "#if A\nvoid f() {\n#elif defined(B) || \\\n  (C)\nvoid g() {\n#else\nvoid h() {\n#endif\n}\n" * 20]),
    "secrets": (f'const char *token = "{KEY}";\n' + cpp(5), [
        f"int {KEY[:20]};\n", "// -----BEGIN RSA PRIVATE KEY-----\n"]),
}


@pytest.mark.parametrize("name", FILTERS)
def test_a_filter_drops_what_it_is_for_and_keeps_code(name):
    function, limit, _ = FILTERS[name]
    dropped, kept = CASES[name]
    assert function(Code(dropped.encode())) > limit
    for text in kept:
        assert function(Code(text.encode())) <= limit
    assert function(Code(b"int a;")) <= limit


def test_hostile_documents_take_no_more_than_their_length():
    for text in ("(" * 500_000, "eyJ" * 100_000, "a@" * 300_000, 'R"(' * 300_000, "/*" * 300_000, "a." * 300_000 + "@",
                 "#if\n#else\n" * 50_000, "sk-" * 200_000):
        for function, *_ in FILTERS.values():
            function(Code(text.encode()))
        replace_emails(text.encode())


def test_addresses_are_replaced_and_other_uses_of_the_sign_are_not():
    others = b"@param x, asm(\"f@GLIBC_2.2\"), int a@b; "
    text = others + b"<jane.doe+c@mail.example.org>\n// author:joe@b-c.de."
    assert replace_emails(text) == others + b"<name@example.com>\n// author:name@example.com."


@pytest.mark.parametrize("licence, permissive", [
    ("MIT", True), ("mit", True), ("Expat", True), ("Apache-2.0 WITH LLVM-exception", True), ("GPL-2.0", False),
    ("MIT OR GPL-2.0-only", True), ("MIT AND GPL-2.0-only", False), ("MIT AND (GPL-2.0 OR ISC)", True),
    ("GPL-2.0 OR MIT AND LGPL-3.0", False), ("(MIT OR GPL-2.0) AND LGPL-3.0", False), ("unknown", False), ("", False),
    ("MIT MIT", False), ("(MIT", False), ("(" * 5000 + "MIT", False), ("GPL-2.0 WITH MIT", False)])
def test_permissive_is_read_from_the_expression(licence, permissive):
    assert is_permissive(licence) is permissive


def test_what_filters_drop_is_counted_and_shown_and_the_page_comes_with_the_corpus(tmp_path):
    project = make_project(tmp_path / "in", "a", files=30)
    for name, (text, _) in CASES.items():
        (project / f"{name}.cpp").write_text(text)
    (project / "mail.cpp").write_text("// me@home.org\n" + cpp("mail"))
    make_project(tmp_path / "in", "v")
    flags = [f"--projects_dir={tmp_path / 'in'}", "--val_projects=v"]
    plain = prepare(tmp_path / "plain", *flags)
    assert not plain["dropped"].keys() & FILTERS.keys() and not (tmp_path / "plain" / "filters.html").exists()
    result = prepare(tmp_path / "out", *flags, "--filters=all")
    assert {name: result["dropped"].get(name) for name in FILTERS} == dict.fromkeys(FILTERS, 1)
    assert result["dropped_share"]["secrets"] == round(1 / 45, 6)
    texts = {document["path"]: document["text"] for document in read(tmp_path / "out", "base_data_v3")}
    assert texts.keys() == {"mail.cpp", *(f"src/file{number}.cpp" for number in range(30))}
    assert texts["mail.cpp"].startswith("// name@example.com\n")
    page = (tmp_path / "out" / "filters.html").read_text()
    sections = dict(re.findall(r"<h2>(\w+): (.*?)(?=<h2>|\Z)", page, re.DOTALL))
    assert sections.keys() == FILTERS.keys()
    for name, section in sections.items():
        dropped, kept = section.split("<h3>Just kept")
        assert section.startswith("1 of 45 documents dropped (2.222%)") and dropped.count("<pre>") == 1
        assert f"a: {name}.cpp" in dropped and kept.count("<pre>") <= EXAMPLES
    only = prepare(tmp_path / "only", *flags, "--filters=secrets")
    assert only["dropped"].keys() & FILTERS.keys() == {"secrets"}


def test_only_permissive_licences_if_asked_for(tmp_path):
    rows = stack_rows("a", 40)
    for number, row in enumerate(rows):
        row["max_stars_repo_licenses"] = ["MIT"] if number % 2 else ["GPL-3.0", "MIT"]
    rows[0]["content"] = "// SPDX-License-Identifier: MIT\n" + rows[0]["content"]
    path = write_table(tmp_path / "a.jsonl", rows)
    result = prepare(tmp_path / "out", f"--source={path}", "--licences=permissive", "--eval_only")
    assert result["dropped"] == {"licence": 39}
    assert {document["licence"] for document in read(tmp_path / "out", "val")} == {"MIT"}


def test_unknown_filters_are_named_and_a_page_of_somebody_else_stays(tmp_path):
    with pytest.raises(BadInput, match="--filters=data,size: there is no filter size: give all, or some of"):
        prepare(tmp_path / "out", "--filters=data,size")
    assert parse_filters("secrets, data") == ("data", "secrets")
    for name in "ab":
        make_project(tmp_path / "in", name)
    (tmp_path / "out").mkdir(exist_ok=True)
    (tmp_path / "out" / "filters.html").write_text("mine")
    with pytest.raises(BadInput, match="filters.html is not of a corpus: move it away"):
        prepare(tmp_path / "out", f"--projects_dir={tmp_path / 'in'}", "--filters=data")
