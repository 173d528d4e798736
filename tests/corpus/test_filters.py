"""Filters of documents: keys and tokens, e-mail addresses, licences, prompts of test problems."""
import pytest

from nanochat.common import BadInput
from nanochat.corpus.filters import has_secret, is_permissive, licence_in, parse_filters, replace_emails
from nanochat.corpus.scan import licence_of, overlaps, telling_sequences
from nanochat.corpus.sources import open_source
from nanochat.judge.problems import read_problems
from tests.corpus.projects import cpp, make_project, prepare, read, stack_rows, write_table

KEY = "ghp_" + "aB3" * 12


def test_keys_and_tokens_are_known_by_their_form():
    assert has_secret(f'const char *token = "{KEY}";\n'.encode())
    for text in (f"int {KEY[:20]};\n", "// -----BEGIN RSA PRIVATE KEY-----\n", "int a;"):
        assert not has_secret(text.encode())


def test_hostile_documents_take_no_more_than_their_length():
    for text in ("eyJ" * 100_000, "a@" * 300_000, "a." * 300_000 + "@", "sk-" * 200_000):
        has_secret(text.encode())
        replace_emails(text.encode())


def test_addresses_are_replaced_and_other_uses_of_the_sign_are_not():
    others = b"@param x, asm(\"f@GLIBC_2.2\"), int a@b; "
    text = others + b"<jane.doe+c@mail.example.org>\n// author:joe@b-c.de."
    assert replace_emails(text) == others + b"<name@example.com>\n// author:name@example.com."


@pytest.mark.parametrize("licence, permissive", [
    ("MIT", True), ("mit", True), ("Expat", True), ("Apache-2.0 WITH LLVM-exception", True), ("GPL-2.0", False),
    ("MIT OR GPL-2.0-only", True), ("MIT AND GPL-2.0-only", False), ("MIT AND (GPL-2.0 OR ISC)", True),
    ("GPL-2.0 OR MIT AND LGPL-3.0", False), ("(MIT OR GPL-2.0) AND LGPL-3.0", False), ("unknown", False), ("", False),
    ("MIT MIT", False), ("(MIT", False), ("(" * 5000 + "MIT", False), ("GPL-2.0 WITH MIT", False),
    ("MIT WITH GPL-2.0-only", False), ("Apache-2.0 WITH Commons-Clause", False), ("MIT & GPL-2.0", False),
    ("MIT OR\tGPL-2.0", True), ("(MIT OR ISC AND GPL-2.0", False), ("MIT AND " * 200 + "GPL-2.0", False)])
def test_permissive_is_read_from_the_expression(licence, permissive):
    assert is_permissive(licence) is permissive


@pytest.mark.parametrize("header, licence", [
    ("// SPDX-License-Identifier: MIT", "MIT"), ("/* SPDX-License-Identifier: GPL-2.0+ */", "GPL-2.0+"),
    ("// (SPDX-License-Identifier: MIT OR (ISC AND GPL-2.0))", "MIT OR (ISC AND GPL-2.0)"),
    ("// spdx-licence-identifier : 'MIT  and\t( GPL-2.0 )'.", "MIT and ( GPL-2.0 )"),
    ("// SPDX-License-Identifier: \"GPL-2.0\"\r\n", "GPL-2.0"), ("// SPDX-License-Identifier:\n// MIT", "unknown"),
    ("// SPDX-License-Identifier: (MIT AND\n// GPL-2.0)", "(MIT AND"),
    ("// SPDX-License-Identifier: MIT, GPL-2.0", "MIT, GPL-2.0"),
    ("// SPDX-License-Identifier: MIT\n// SPDX-License-Identifier: ISC", "(MIT) AND (ISC)"),
    (f"// SPDX-License-Identifier: MIT{' AND MIT' * 30} AND GPL-2.0", "unknown"),
    (" " * 4060 + "// SPDX-License-Identifier: MIT AND GPL-2.0", "MIT AND GPL-2.0"),
    (" " * 4097 + "// SPDX-License-Identifier: GPL-2.0", "Expat"), ("// a small program", "Expat"),
    ("// under the terms of the GNU Lesser General\n// Public License", "Expat AND GPL")])
def test_the_licence_of_a_file_is_all_that_its_beginning_says(header, licence):
    assert licence_in(f"{header}\nint a;\n".encode(), "Expat") == licence


MIT_TEXT = "Permission is hereby granted, free of charge, to any person"
UNLICENSE = "This is free and unencumbered software. Anyone may sell it, for any purpose, commercial or non-commercial"


@pytest.mark.parametrize("name, text, permissive", [
    ("LICENSE", MIT_TEXT, True), ("COPYING", UNLICENSE, True), ("License.cpp", MIT_TEXT, False),
    ("LICENSE", "Business Source License 1.1, then the Apache License", False),
    ("LICENSE", "Commons Clause License Condition, and the Apache License", False),
    ("LICENSE", f"{MIT_TEXT}\nFiles in src/ are under the GNU General Public License", False),
    ("LICENSE", "Redistribution and use in source and binary forms for non-commercial research", False),
    ("LICENSE", "Attribution-NonCommercial … dedicated to the public domain", False),
    ("LICENSE", "This is NOT in the public domain", False)])
def test_a_licence_file_with_conditions_makes_no_project_permissive(tmp_path, name, text, permissive):
    project = make_project(tmp_path, "p")
    (project / name).write_text(text)
    assert is_permissive(licence_of(open_source(project))) is permissive


def test_documents_with_keys_are_dropped_and_addresses_replaced_if_asked_for(tmp_path):
    project = make_project(tmp_path / "in", "a", files=30)
    (project / "key.cpp").write_text(f'const char *token = "{KEY}";\n' + cpp("key"))
    (project / "mail.cpp").write_text("// me@home.org\n" + cpp("mail"))
    make_project(tmp_path / "in", "v")
    flags = [f"--projects_dir={tmp_path / 'in'}", "--val_projects=v"]
    for filters, num_dropped, begin in (("", 0, "// me@home.org"), ("secrets", 1, "// me@home.org"),
                                        ("all", 1, "// name@example.com")):
        out_dir = tmp_path / f"filters_{filters}"
        assert prepare(out_dir, *flags, f"--filters={filters}")["dropped"].get("secrets", 0) == num_dropped
        texts = {document["path"]: document["text"] for document in read(out_dir, "base_data_v3")}
        assert len(texts) == 32 - num_dropped and ("key.cpp" in texts) == (not num_dropped)
        assert texts["mail.cpp"].startswith(begin)


def test_only_permissive_licences_if_asked_for(tmp_path):
    rows = stack_rows("a", 40)
    for number, row in enumerate(rows):
        row["max_stars_repo_licenses"] = ["MIT"] if number % 2 else ["GPL-3.0", "MIT"]
    tags = ["MIT", "GPL-2.0-only OR (MIT AND ISC)", "GPL-2.0-only", "MIT AND (GPL-2.0-only)"]
    for number, tag in enumerate(tags):
        rows[2 * number]["content"] = f"// SPDX-License-Identifier: {tag}\n" + rows[2 * number]["content"]
    path = write_table(tmp_path / "a.jsonl", rows)
    result = prepare(tmp_path / "out", f"--source={path}", "--licences=permissive", "--eval_only")
    assert result["dropped"] == {"licence": 38}
    assert {document["licence"] for document in read(tmp_path / "out", "val")} == {*tags[:2]}


def test_unknown_filters_are_named(tmp_path):
    with pytest.raises(BadInput, match="--filters=secrets,data: there is no filter data: give all, or some of"):
        prepare(tmp_path / "out", "--filters=secrets,data")
    assert parse_filters("emails, secrets") == ("secrets", "emails")


# -----------------------------------------------------------------------------
# Documents that contain a part of a test problem's prompt are not trained on


def test_a_prompt_is_found_however_it_is_laid_out_and_chance_is_not():
    prompt = "#include <vector>\n// Returns the largest of the numbers, or nothing if there are no numbers.\n"
    excluded = telling_sequences([prompt, "{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14}"])
    relaid = b"/* x\n * Returns the largest  of the numbers;\n#include <x>\n * or nothing, if there are NO numbers"
    assert not overlaps(relaid, excluded)
    assert overlaps(relaid.replace(b"NO", b"no"), excluded)
    assert not overlaps(b"int a[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};", excluded)


def test_a_corpus_says_how_many_documents_overlap(tmp_path):
    for name in "ab":
        make_project(tmp_path / "in", name)
    leaked = read_problems()[3].prompt + "    return 0;\n}\n"
    (tmp_path / "in/a/leaked.cpp").write_text(leaked)
    flags = (f"--projects_dir={tmp_path / 'in'}", "--val_projects=b")
    plain = prepare(tmp_path / "plain", *flags)
    clean = prepare(tmp_path / "clean", *flags, "--exclude_problems=own")
    assert "overlaps_problem" not in plain["dropped"] and clean["dropped"]["overlaps_problem"] == 1
    assert leaked in [document["text"] for document in read(tmp_path / "plain", "base_data_v3")]
    assert leaked not in [document["text"] for document in read(tmp_path / "clean", "base_data_v3")]
    assert clean["flags"]["exclude_problems"] == ["own"]
    with pytest.raises(BadInput, match="--exclude_problems=.*missing.jsonl cannot be read"):
        prepare(tmp_path / "other", *flags, f"--exclude_problems={tmp_path}/missing.jsonl")
