"""What an editor is given to insert."""
import random
from dataclasses import replace

import pytest

from nanochat.infer.sample import Sampling
from nanochat.serve.completer import Options, Shaper, copied, end_of_block, without_repetition


def test_a_model_that_was_not_trained_to_fill_gaps_reads_what_is_before_the_cursor(completer):
    options = Options(Sampling(max_tokens=1))
    completion = replace(completer, fim=False, windows={}).complete("int a;\n  ret", "\n}\n", [], options)
    assert completion.timings.prompt_tokens == 1 + len("int a;\n  ret")


def test_a_copy_continues_the_longest_text_that_stands_elsewhere_in_the_file():
    assert copied("int alpha = first;\nint beta = alpha;\nint alph", "") == ("a = first;", 8)
    assert copied("int alpha = first;\na(alph", "\nb(alpha, 2);\n") == ("", 0)  # fewer than 6 characters
    assert copied("int alpha = first;\nmore\n\nint alph", "\nmore\n\nint alpha = last;\n") == ("a = last;", 12)
    assert copied("first(a);\nlast(b);\n}\n\nfirst(a);", "") == ("\nlast(b);", 8)  # at the end of a line, the next one
    assert copied("first(a);\r\nlast(b);\r\n}\r\nfirst(a)", "") == (";", 8)
    assert copied("first(a);\r\nlast(b);\r\n}\r\nfirst(a);", "") == ("\r\nlast(b);", 8)
    assert copied("abc", "") == copied("", "") == ("", 0)
    others = [("a.h", "int alpha(int a);\n"), ("b.h", "int alpha(int b);\n")]
    assert copied("int alph", "", others) == ("a(int b);", 8)  # the last file is the nearest
    assert copied("int alph", "\nalpha;\nt alpha = 1;", others) == ("a = 1;", 6)  # the file itself comes first
    assert copied("alpha", "", [("a.h", "alpha")]) == ("", 0)


def test_what_follows_the_cursor_and_what_is_too_long_for_a_line_is_no_copy(completer):
    options = Options(Sampling(max_tokens=9))
    assert completer._copy("int alpha = first;\nint alph", "", [], options) == ("a = first;", 8)
    assert completer._copy("int alpha = first;\nint alph", "a = first;\n", [], options) == ("", 0)
    assert completer._copy("alphabet" + "(" * 20_000 + "\nalphabet", "(" * 20_000, [], options) == ("", 0)


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
    """text: a str, which comes by the character, or a list of pieces."""
    pieces = []
    shaper = Shaper(suffix, Options(Sampling(max_tokens=100), **options), pieces.append)
    num_fed = 0
    for piece in text:
        if shaper.ended:
            break
        shaper.add(piece)
        num_fed += 1
    assert shaper.finish() == "".join(pieces)
    return shaper.finish(), num_fed


@pytest.mark.parametrize("newline", ["\r\n", "\r", "\n"])
@pytest.mark.parametrize("min_indent", [0, 4])
def test_what_stands_after_the_cursor_is_known_by_any_end_of_its_lines(newline, min_indent):
    suffix = "\n}\n\nint next();\n".replace("\n", newline)
    assert feed(["turn c;", "\n", "}", "\n\n", "int next();\n"], suffix, min_indent=min_indent)[0] == "turn c;"
    assert feed(["turn c;", "\r\n", "}", "\r", "\n"], suffix, min_indent=min_indent)[0] == "turn c;"


def test_pieces_are_shown_only_once_they_are_sure():
    assert feed("return a;\n}\nint main", "\n}\n\nint main", min_indent=4)[0] == "return a;"
    assert feed("return a;\n    }", "\n}\n") == ("return a;\n    }", 15)
    assert feed("a;\n\n    b;", "", min_indent=4)[0] == "a;\n\n    b;"


def test_a_stream_and_a_whole_answer_are_equal():
    assert feed("f(x) }\nint", "}", min_indent=4)[0] == "f(x) "
    draw = random.Random(0)
    for _ in range(3000):
        def text(count):
            return "".join(draw.choices("a;}) \n\r\x0b", k=draw.randrange(count)))

        feed([text(6) for _ in range(8)], text(8), min_indent=draw.choice((0, 1, 2)), max_ms=draw.choice((None, 0)))


def test_generation_ends_when_a_line_of_the_suffix_is_repeated_and_after_its_time_with_a_line():
    assert feed("y;\n}\n\nint main() {\n", "\n}\n\nint main() {\n") == ("y;", 5)
    assert feed("a;\nb;\nc;", "", max_ms=0) == ("a;", 3)
    assert feed("a;\nb;\nc;", "", max_ms=60_000)[0] == "a;\nb;\nc;"
