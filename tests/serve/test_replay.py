"""The bench that types held-out files again with completions."""
from dev import bench_replay as replay
from dev.bench_replay import Block, Person
from tests.corpus.projects import write_table
from tests.serve.conftest import SOURCE

BODY = "    return a + b;\n}\n\nint twice(int a) {\n    return add(a, a);"
BLOCK = Block(0, SOURCE[:SOURCE.index(BODY)], BODY, "\n}\n")


def oracle(seconds):
    """Completes with the rest of BODY, which takes so many seconds."""
    def complete(before, after):
        assert after == "\n}\n"
        typed = before[len(BLOCK.before):]
        return (BODY[len(typed):] if BODY.startswith(typed) else "wrong"), seconds
    return complete


def test_what_comes_next_is_accepted_with_one_key_if_it_comes_before_the_next_key():
    person = Person(oracle(0.0))
    person.type(BLOCK)
    assert person.num_characters == len(BODY)
    assert sum(person.accepted.values()) == 1
    first = sum(person.asked.values())
    assert 1 <= first < 10 and 0 <= len(BODY) - 1 - sum(person.saved.values()) < 10
    late = Person(oracle(3600.0))
    late.type(BLOCK)
    assert not late.accepted and len(late.seconds) == sum(late.asked.values()) > len(BODY) / 2
    patient = Person(oracle(3600.0), patient=True)
    patient.type(BLOCK)
    assert patient.saved == person.saved and set(patient.seconds) == {3600.0}


def test_a_completion_or_its_first_line_must_be_what_comes_next():
    assert replay.accepted_length("a;\n}", "a;\n}\nint") == 4
    assert replay.accepted_length("a;\nx", "a;\n}\nint") == 2
    assert replay.accepted_length("a.", "a;\n}") == 0
    assert replay.accepted_length("\nx", "\n}") == replay.accepted_length("", "\n}") == 0


def test_kinds_of_places():
    lines = ["    ", "#incl", "x = 1;  // the fir", "list.", "p->", "std::", "int nam", "f(a, ", "int name ", "x = "]
    assert [replay.kind_of_place(line) for line in lines] == [
        "start of a line", "comment or directive", "comment or directive", "member", "member", "member",
        "rest of a name", "argument", "elsewhere", "elsewhere"]


def test_the_bench_says_what_a_model_saves(gap_run, byte_tokenizer_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(gap_run))
    write_table(tmp_path / "val" / "shard_00000.parquet", [{"text": 50 * SOURCE}])
    replay.main(["--checkpoint=tiny", f"--data_dir={tmp_path}/val", f"--tokenizer_dir={byte_tokenizer_dir}",
                 "--device_type=cpu", "--blocks=2", "--lines=4", "--max_tokens=8"])
    output = capsys.readouterr().out
    assert "nothing: 0.0% of" in output and "the model alone: " in output and "copies alone: " in output
    assert "  start of a line: " in output and " shown completions accepted; p50 " in output


def test_blocks_begin_with_a_line_that_is_not_blank():
    flags = replay.Flags(blocks=20, lines=3)
    texts = "\n\nint x;\n\n\n\n", SOURCE
    for block in replay.choose_blocks(texts, flags):
        assert block.text.strip() and block.text == block.text.rstrip()
        assert block.before + block.text + block.after in texts
