"""What a prompt for a gap contains."""
import random

import pytest

from nanochat.data.tokenizer import Infill, load_tokenizer
from nanochat.infer.prompt import Special, Window, encode_prompt, fills_gaps, first_tokens, gap_prompt
from tests.checkpoint.states import make_meta, make_source

LINES = "".join(f"    total += values[{i}];\n" for i in range(200))  # a token is a byte here
ROOM = 192


@pytest.fixture(scope="module")
def tokenizer(byte_tokenizer_dir):
    return load_tokenizer(byte_tokenizer_dir)


@pytest.fixture
def texts_of(tokenizer):
    """Returns {special token: the text after it} of a prompt, and whether something was cut."""
    def ask(prefix, suffix, room=ROOM, **options):
        prompt = gap_prompt(tokenizer, prefix, suffix, room, **options)
        texts, name = {}, None
        for part in prompt.parts:
            if isinstance(part, Special):
                name = part.name
            else:
                texts[name] = texts.get(name, "") + part
        return texts, prompt.is_cut
    return ask


def num_tokens(tokenizer, prompt):
    return len(encode_prompt(tokenizer, prompt.parts)[0])


def test_the_line_at_the_gap_comes_last(texts_of):
    texts, is_cut = texts_of("int a;\nint b;\n  ret", "\n}\n")
    assert texts == {"<|fim_prefix|>": "int a;\nint b;\n", "<|fim_suffix|>": "\n}\n", "<|fim_middle|>": "  ret"}
    assert not is_cut
    assert texts_of("", "")[0] == {}


def test_without_a_suffix_the_prefix_alone_is_read(texts_of):
    assert texts_of("int a;\n  ret", None)[0] == {"<|bos|>": "int a;\n  ret"}


@pytest.mark.parametrize("prefix, suffix", [
    (LINES, LINES), (LINES, ""), ("", LINES), (LINES.replace("\n", " "), LINES.replace("\n", " ")),
    ("é" * 999, "漢" * 999), ("\n" * 999, "\n" * 999)])
@pytest.mark.parametrize("room", [128, 255])
def test_long_texts_are_cut_to_the_room_prefix_and_suffix_3_to_1(tokenizer, texts_of, prefix, suffix, room):
    prompt = gap_prompt(tokenizer, prefix, suffix, room)
    assert prompt.is_cut and room // 3 < num_tokens(tokenizer, prompt) <= room
    texts, _ = texts_of(prefix, suffix, room)
    before = texts.get("<|fim_prefix|>", "") + texts.get("<|fim_middle|>", "")
    assert before == prompt.before and prefix.endswith(before)
    assert suffix.startswith(texts.get("<|fim_suffix|>", ""))
    if prefix and suffix:
        assert len(texts["<|fim_suffix|>"].encode()) <= room // 4
        assert len(before.encode()) > room // 3


def test_no_prompt_is_longer_than_its_room_with_a_tokenizer_of_words():
    shipped = load_tokenizer()
    with open(__file__, encoding="utf-8") as file:
        text = file.read() * 3
    generator = random.Random(0)
    for _ in range(100):
        at = generator.randrange(len(text))
        room = generator.randint(30, 1000)
        assert num_tokens(shipped, gap_prompt(shipped, text[:at], text[at:], room)) <= room


def test_while_text_is_written_the_prefix_is_cut_at_the_same_place_for_many_lines(tokenizer):
    windows = {}
    begins = []
    for num_lines in range(20, 40):
        seen = LINES[(num_lines - 20) * 27:num_lines * 27]  # an editor's, which itself moves on with the cursor
        prompt = gap_prompt(tokenizer, seen + "    tot", "\n}\n", ROOM, windows=windows)
        begins.append(LINES.find(prompt.head[2]))
        assert num_tokens(tokenizer, prompt) <= ROOM
    assert len(set(begins)) <= 12


def test_a_window_is_cut_anew_where_too_little_would_be_left(tokenizer):
    window = Window(tokenizer)
    kept = window.last(LINES, 100)
    assert window.last(LINES + "x", 100) == kept + "x"
    assert len(window.last(LINES + kept[:20] + "x" * 30, 100)) >= 50
    for text in ("}\n", LINES[:30] + "}\n" + LINES[:60]):  # each fits, and the second contains the first
        assert window.last(text, 100) == text
    assert window.last("anything", 0) == window.last("", 10) == ""


def test_the_suffix_ends_with_a_line_where_it_can(tokenizer):
    assert first_tokens(tokenizer, "abc\ndef\nghijk", 10) == "abc\ndef\n"
    assert first_tokens(tokenizer, "abcdefghijk", 10) == "abcdefghij"
    assert first_tokens(tokenizer, "漢" * 9, 10) == "漢" * 3


def test_other_files_stand_in_front_of_a_gap_as_training_shows_it(texts_of, tokenizer):
    extra = [("far.h", LINES), ("b/near.h", "// Adds.\n\nint add(int, <|fim_suffix|>);\n"), ("x", "// nothing\n")]
    assert "near.h" not in str(texts_of("int a;\n", "\n", extra=extra))
    prompt = gap_prompt(tokenizer, "int a;\n", "\n", 600, extra=extra, extra_tokens=100)
    far, near = prompt.head[2], prompt.head[4]
    assert prompt.head[1] == prompt.head[3] == Special("<|file_sep|>") and prompt.head[5] == Special("<|fim_prefix|>")
    assert near == "b/near.h\nint add(int, <|fim_suffix|>);\n" and far.startswith("far.h\n") and far.endswith("\n")
    ids, _ = encode_prompt(tokenizer, prompt.parts)
    assert ids.count(tokenizer.special("<|fim_suffix|>")) == 1  # the name in the text is text
    own = ids[ids.index(tokenizer.special("<|fim_prefix|>")):]
    row = Infill(prompt.head[6], prompt.head[8], prompt.line + "int b;")
    assert list(tokenizer.encode_infills([row])[0][0])[1:len(own) + 1] == own
    for long in (LINES, "int a;\n"):  # a prefix that fills the room leaves a quarter for them
        prompt = gap_prompt(tokenizer, long * 20, "\n", 400, extra=[("far.h", LINES)] * 9, extra_tokens=1000)
        assert 40 < sum(len(text) for text in prompt.head[2:prompt.head.index(Special("<|fim_prefix|>")):2]) < 100
        assert num_tokens(tokenizer, prompt) <= 400


@pytest.mark.parametrize("flags, source, fills", [
    ({}, {}, False), ({"fim_rate": 0.0}, {}, False), ({"fim_rate": 0.5}, {}, True),
    ({}, {"model": "Qwen/Qwen2.5-Coder-0.5B", "model_type": "qwen2"}, True),
    ({"fim_rate": 0.0}, {"model": "my-cpp-CODER", "model_type": "qwen3"}, True),
    ({}, {"model": "Qwen/Qwen3-0.6B", "model_type": "qwen3"}, False),  # which has the tokens
    ({}, {"model": "deepseek-coder-1.3b", "model_type": "llama"}, False),  # whose tokens have other names
    ({"fim_rate": 0.5}, {"model": "SmolLM2-135M", "model_type": "llama"}, True)])
def test_gaps_are_for_models_that_were_trained_with_them(flags, source, fills):
    assert fills_gaps(make_meta(flags=flags, source=source and make_source(**source))) == fills
