"""What a prompt contains, and what an editor is given to insert."""
import pytest

from nanochat.infer.engine import Special
from nanochat.serve.infill import Options, Shaper, Window, end_of_block, first_tokens, without_repetition

LINES = "".join(f"    total += values[{i}];\n" for i in range(200))  # a token is a byte here


def prompt_of(infiller, prefix, suffix, extra=(), max_tokens=64):
    infiller.windows.clear()
    parts, is_cut = infiller.prompt(prefix, suffix, extra, max_tokens)
    texts, name = {}, None
    for part in parts:
        if isinstance(part, Special):
            name = part.name
        else:
            texts[name] = texts.get(name, "") + part
    return texts, is_cut


def num_tokens(infiller, parts):
    return sum(1 if isinstance(part, Special) else len(infiller.engine.tokenizer.encode(part)) for part in parts)


def test_the_line_at_the_cursor_comes_last(infiller):
    texts, is_cut = prompt_of(infiller, "int a;\nint b;\n  ret", "\n}\n")
    assert texts == {"<|fim_prefix|>": "int a;\nint b;\n", "<|fim_suffix|>": "\n}\n", "<|fim_middle|>": "  ret"}
    assert not is_cut
    assert prompt_of(infiller, "", "")[0] == {}
    assert prompt_of(infiller, "int a;", None)[0] == {"<|bos|>": "int a;"}


def test_a_model_that_cannot_infill_reads_what_is_before_the_cursor(infiller, monkeypatch):
    monkeypatch.setattr(infiller, "fim", False)
    assert prompt_of(infiller, "int a;\n  ret", "\n}\n")[0] == {"<|bos|>": "int a;\n  ret"}


@pytest.mark.parametrize("prefix, suffix", [
    (LINES, LINES), (LINES, ""), ("", LINES), (LINES.replace("\n", " "), LINES.replace("\n", " ")),
    ("é" * 999, "漢" * 999), ("\n" * 999, "\n" * 999)])
@pytest.mark.parametrize("max_tokens", [1, 128])
def test_long_texts_are_cut_to_the_context_prefix_and_suffix_3_to_1(infiller, prefix, suffix, max_tokens):
    infiller.windows.clear()
    parts, is_cut = infiller.prompt(prefix, suffix, [], max_tokens)
    room = infiller.context - max_tokens
    assert is_cut and room // 3 < num_tokens(infiller, parts) <= room
    texts, _ = prompt_of(infiller, prefix, suffix, max_tokens=max_tokens)
    before = texts.get("<|fim_prefix|>", "") + texts.get("<|fim_middle|>", "")
    assert prefix.endswith(before) and suffix.startswith(texts.get("<|fim_suffix|>", ""))
    if prefix and suffix:
        assert len(texts["<|fim_suffix|>"].encode()) <= room // 4
        assert len(before.encode()) > room // 3


def test_while_text_is_written_the_prefix_is_cut_at_the_same_place_for_many_lines(infiller):
    infiller.windows.clear()
    begins = []
    for num_lines in range(20, 40):
        window = LINES[(num_lines - 20) * 27:num_lines * 27]  # an editor's, which itself moves on with the cursor
        parts, _ = infiller.prompt(window + "    tot", "\n}\n", [], 64)
        begins.append(LINES.find(parts[2]))
        assert num_tokens(infiller, parts) <= infiller.context - 64
    assert len(set(begins)) <= 12


def test_a_window_is_cut_anew_where_too_little_would_be_left(infiller):
    window = Window(infiller.engine.tokenizer)
    kept = window.last(LINES, 100)
    assert window.last(LINES + "x", 100) == kept + "x"
    assert len(window.last(LINES + kept[:20] + "x" * 30, 100)) >= 50
    assert window.last("anything", 0) == window.last("", 10) == ""


def test_the_suffix_ends_with_a_line_where_it_can(infiller):
    tokenizer = infiller.engine.tokenizer
    assert first_tokens(tokenizer, "abc\ndef\nghijk", 10) == "abc\ndef\n"
    assert first_tokens(tokenizer, "abcdefghijk", 10) == "abcdefghij"
    assert first_tokens(tokenizer, "漢" * 9, 10) == "漢" * 3


def test_other_files_stand_in_front_where_there_is_room(infiller, monkeypatch):
    assert "int x;" not in str(prompt_of(infiller, "int a;\n", "\n", ["int x;"]))
    monkeypatch.setattr(infiller, "extra_tokens", 50)
    texts, _ = prompt_of(infiller, "int a;\n", "\n", ["int x;", "int y;"])
    assert texts["<|fim_prefix|>"] == "int x;\nint y;\nint a;\n"
    assert len(prompt_of(infiller, "int a;\n", "\n", [LINES])[0]["<|fim_prefix|>"]) <= 50 + 7
    assert "int x;" not in str(prompt_of(infiller, LINES, "\n", ["int x;"]))


# -----------------------------------------------------------------------------
# What an editor can insert


@pytest.mark.parametrize("text, suffix, kept", [
    ("return a + b;\n}\n", "\n}\n\nint main() {\n", "return a + b;"),  # the model wrote on in what follows
    ("g(x))", ")", "g(x)"), ("g(x)", ")", "g(x)"), ("a, b);", ");", "a, b"),
    ("\n    if (a) {\n        b();\n    }", "\n    }\n}\n", "\n    if (a) {\n        b();\n    }"),  # closes its own
    ("value", "e;", "value"), ("a", "another", "a"),  # inside a word
    ("x = 1;\n    y = 2;", "\n    y = 2;\n", "x = 1;"), ("x;\n", "\n", "x;"), ("", "}", ""), ("x", "", "x")])
def test_what_stands_after_the_cursor_is_not_repeated(text, suffix, kept):
    assert without_repetition(text, suffix) == kept


@pytest.mark.parametrize("text, end", [
    ("a;\n    b;\n}\nint c;", len("a;\n    b;")), ("a;\n\n    b;\n", None), ("a;\n    b;\n  ", None), ("a;\n\n\n}", 2),
    ("a;\r\n}\r\n", 2), ("} // the line at the cursor does not count", None)])
def test_a_text_ends_before_a_line_that_is_indented_less(text, end):
    assert end_of_block(text, min_indent=4) == end
    assert end_of_block(text, min_indent=0) is None


def feed(text, suffix, **options):
    pieces = []
    shaper = Shaper(suffix, Options(max_tokens=100, **options), pieces.append)
    num_fed = 0
    for character in text:
        if shaper.ended:
            break
        shaper.add(character)
        num_fed += 1
    assert shaper.finish() == "".join(pieces)
    return shaper.finish(), num_fed


def test_pieces_are_shown_only_once_they_are_sure():
    assert feed("return a;\n}\nint main", "\n}\n\nint main", min_indent=4)[0] == "return a;"
    assert feed("return a;\n    }", "\n}\n") == ("return a;\n    }", 15)
    assert feed("a;\n\n    b;", "", min_indent=4)[0] == "a;\n\n    b;"


def test_generation_ends_when_a_line_of_the_suffix_is_repeated():
    assert feed("y;\n}\n\nint main() {\n", "\n}\n\nint main() {\n") == ("y;", 5)


def test_after_its_time_a_text_ends_with_a_line():
    assert feed("a;\nb;\nc;", "", max_ms=0) == ("a;", 3)
    assert feed("a;\nb;\nc;", "", max_ms=60_000)[0] == "a;\nb;\nc;"
