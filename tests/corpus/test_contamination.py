"""Documents that contain a part of a test problem's prompt are not trained on."""
import pytest

from nanochat.common import BadInput
from nanochat.corpus.scan import overlaps, telling_sequences
from nanochat.judge.problems import read_problems
from tests.corpus.projects import make_project, manifest, prepare, read


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
    assert manifest(tmp_path / "clean")["flags"]["exclude_problems"] == ["own"]
    with pytest.raises(BadInput, match="--exclude_problems=.*missing.jsonl cannot be read"):
        prepare(tmp_path / "other", *flags, f"--exclude_problems={tmp_path}/missing.jsonl")
