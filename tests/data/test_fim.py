"""Fill in the middle: every document comes back whole, spans are where they should be, and lanes stay what they are."""
import json

import numpy as np
import pytest

from nanochat.common import BadInput
from nanochat.data import loader as loader_module
from nanochat.data import shards as shards_module
from nanochat.data.fim import KINDS, Infilling, check_fim, choose_middle, draws, find_brackets, find_statement
from nanochat.data.loader import check_lane_states
from nanochat.data.shards import TextPiece
from nanochat.data.tokenizer import FIM_TOKENS, Infill, Tokenizer, load_tokenizer
from nanochat.data.tokenizer_files import SPECIAL_TOKENS
from tests.data.documents import open_loader, write
from tests.data.headers import HEADERS
from tests.data.test_loader import as_saved, repeated_steps


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer()


def odd_documents(count):
    """Yields C++ (str, or bytes that are not UTF-8), whole headers and short pieces of them, most of them made odd."""
    rng = np.random.default_rng(0)
    for i in range(count):
        text = HEADERS[i % len(HEADERS)]
        if i % 3:
            begin = int(rng.integers(len(text)))
            text = text[begin:begin + int(rng.lognormal(5.5, 1.5)) + 1]
        if i % 7 == 1:
            text = text.replace("\n", "\r\n")
        if i % 7 == 2:
            text = text.replace(" ", " é😀"[int(rng.integers(3))])
        if i % 7 == 3:
            text = text.replace("int", str(rng.choice(SPECIAL_TOKENS)))
        if i % 7 == 4:
            text = text.replace("\n", "")  # one endless line
        if i % 7 == 5:
            data = bytearray(text.encode())
            for place in rng.integers(len(data), size=1 + len(data) // 50):
                data[place] = rng.integers(256)
            try:
                text = str(data, "utf-8")
            except UnicodeDecodeError:
                text = bytes(data)
        yield text or "x"


def text_of(tokenizer, tokens):
    """Returns the bytes of a document of a row, and whether it was rewritten."""
    ids = np.asarray(tokens)
    assert ids[0] == tokenizer.bos_id
    places = [np.flatnonzero(ids == tokenizer.special(name)) for name in FIM_TOKENS]
    if not any(map(len, places)):
        return tokenizer.decode_bytes(ids[1:].tolist()), False
    (prefix,), (suffix,), (middle,), (end,) = places
    assert prefix == 1 and end == len(ids) - 1
    before, after, between = (tokenizer.decode_bytes(ids[first + 1:last].tolist())
                              for first, last in ((prefix, suffix), (suffix, middle), (middle, end)))
    return before + between + after, True


@pytest.mark.parametrize("row_tokens", [65, 257, 1025])
def test_every_document_comes_back_whole(tokenizer, row_tokens, count=400):
    texts = [((0, i, 0), TextPiece(i, 0, True, text)) for i, text in enumerate(odd_documents(count))]
    infilling, rewritten = Infilling(0.5, seed=0), 0
    for (_, text), parts in zip(texts, infilling.encode(3, texts, tokenizer, row_tokens), strict=True):
        parts = parts or tokenizer.encode_documents([text.text])  # as a lane does
        found = [text_of(tokenizer, part) for part in parts]
        whole = text.text if isinstance(text.text, bytes) else text.text.encode()
        assert b"".join(part for part, _ in found) == whole
        assert all(len(tokens) <= row_tokens for tokens, (_, is_fim) in zip(parts, found, strict=True) if is_fim)
        rewritten += any(is_fim for _, is_fim in found)
    assert 0.45 < rewritten / count < 0.55


def test_texts_encoded_in_one_call_are_as_each_alone(tokenizer):
    rng = np.random.default_rng(1)
    for text in odd_documents(500):
        if isinstance(text, bytes):
            text = text.decode("utf-8", "surrogateescape")
        first, last = sorted(rng.integers(len(text) + 1, size=2).tolist())
        texts = [text[:first], text[last:], text[first:last]]
        _, (tokens, *places) = tokenizer.encode_infills([Infill("a", "b", "c"), Infill(*texts)])
        expected = [tokenizer.bos_id]
        begins = []
        for name, part in zip(FIM_TOKENS[:3], texts, strict=True):
            begins.append(len(expected))
            expected += tokenizer.special(name), *tokenizer.encode(part.encode("utf-8", "surrogateescape"))
        assert tokens.tolist() == [*expected, tokenizer.special("<|file_sep|>")]
        prefix, suffix = places
        assert [prefix.start - 1, suffix.start - 1, suffix.stop] == begins


def test_the_tokens_of_a_document_follow_from_the_seed_and_the_lane(tokenizer):
    def encode(seed, lane):
        texts = [((1, i, 0), TextPiece(i, 0, True, text)) for i, text in enumerate(odd_documents(20))]
        return [[part.tolist() for part in parts] for parts in Infilling(1.0, seed).encode(lane, texts, tokenizer, 257)]

    found = encode(0, 0)
    assert encode(0, 0) == found
    assert encode(1, 0) != found and encode(0, 1) != found


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_middles_by_lines_end_before_the_end_of_a_line_and_are_never_blank(newline):
    text = newline.join(f"    line {i} of some text;{newline}" for i in range(80))
    at_line_start = single = 0
    for i in range(300):
        begin, end = choose_middle(text, ["line"], draws(f"{i}"))
        middle = text[begin:end]
        assert end == len(text) or middle.strip() and text.startswith(newline, end) and middle.count("\n") <= 31
        at_line_start += not begin or text[begin - 1] == "\n"
        single += "\n" not in middle
    assert 140 < at_line_start < 250 and 30 < single < 150


CODE = '''// a comment (with a bracket {
#include <vector>
#define TWICE(x) \\
  ((x) + (x))

const char* text = "}";  /* ) */
int f(int a, char b = ')') {
  for (int i = 0; i < a; ++i) { g(i); }
  return R"(})" == text ? 1'000 : '}';
}
'''


def test_the_scanner_finds_structure_and_skips_strings_comments_and_directives():
    def found(span):
        return CODE[slice(*span)]

    assert found(find_brackets(CODE, 0, "{}")) == CODE[CODE.index("\n  for"):CODE.rindex("}")]
    assert found(find_brackets(CODE, 0, "()")) == "int a, char b = ')'"
    assert found(find_statement(CODE, 0)) == 'const char* text = "}";'
    assert found(find_statement(CODE, CODE.index("int f"))) == "g(i);"
    assert found(find_statement(CODE, CODE.index("  return"))) == "return R\"(})\" == text ? 1'000 : '}';"
    assert find_brackets("a { b", 0, "{}") is find_statement("a", 0) is None


# -----------------------------------------------------------------------------
# In lanes and loader


@pytest.fixture
def open_fim(tmp_path, byte_tokenizer_dir, monkeypatch):
    """Opens a loader of C++ by bytes, with half of the documents rewritten. Some are read in pieces."""
    monkeypatch.setattr(shards_module, "PIECE_BYTES", 3000)
    monkeypatch.setattr(loader_module, "BLOCK_TOKENS", 2000)
    lengths = np.random.default_rng(0).lognormal(5.5, 1.3, size=600).astype(int)
    texts = [HEADERS[i % len(HEADERS)][i:i + 1 + length] for i, length in enumerate(lengths)]
    tokenizer, shard = load_tokenizer(byte_tokenizer_dir), write(tmp_path / "shard.parquet", texts, row_group_size=67)

    def run(_=None, **options):
        return open_loader([shard], tokenizer, **{"seq_len": 256, "fim_rate": 0.5, **options})
    return run


def test_a_step_has_the_same_rows_for_any_number_of_ranks_and_is_restored_exactly(open_fim):
    steps = repeated_steps(None, 30, range(28), loader=open_fim)
    waiting = [ref for _, state in steps for lane in state.values() for ref in [lane["next"], *lane["buffer"]]]
    assert sum(part > 0 for _, _, part in waiting) > 100
    prefix = 256 + SPECIAL_TOKENS.index("<|fim_prefix|>")
    assert np.mean([(rows == prefix).any(1).float().mean() for rows, _ in steps]) > 0.25


def test_rows_hold_whole_documents_and_little_is_dropped(headers_dir, tokenizer):
    prefix, suffix, middle, end = map(tokenizer.special, FIM_TOKENS)
    with open_loader(sorted(headers_dir.glob("*.parquet")), tokenizer, batch_size=8, seq_len=1024, num_lanes=2,
                     fim_rate=0.5) as loader:
        rewritten = 0
        while loader.stats["epoch"] < 1:
            for row in next(loader).rows.tolist():
                special = [token for token in row if token in (prefix, suffix, middle, end)]
                whole, rest = divmod(len(special), 4)
                assert special == [prefix, suffix, middle, end] * whole + [prefix, suffix, middle, end][:rest]
                rewritten += whole
        assert rewritten > 100 and loader.stats["dropped_share"] <= 0.01


def test_rate_and_kinds_must_be_those_of_the_saved_position(open_fim):
    plain, half = (as_saved(next(loader).state) for loader in (open_fim(fim_rate=0.0), open_fim()))
    assert "fim" not in json.dumps(plain)  # as before there was fill in the middle
    for options, state, message in (
            ({"fim_rate": 0.5}, plain, "is for fim_rate 0, but this run has 0.5"),
            ({"fim_rate": 0.0}, half, "is for fim_rate 0.5, but this run has 0"),
            ({"fim_rate": 0.25}, half, "is for fim_rate 0.5, but this run has 0.25"),
            ({"fim_kinds": KINDS[:2]}, half, "is for fim_kinds .*, but this run has")):
        with pytest.raises(BadInput, match=message):
            open_fim(**options, state=state)
    run = {name: value for name, value in half[0]["run"].items() if not name.startswith("fim")}
    assert check_lane_states(plain, run, 1).keys() == plain.keys()


def test_what_cannot_be_used_for_it_is_one_line(tokenizer, byte_tokenizer_dir):
    without = Tokenizer({bytes([byte]): byte for byte in range(256)}, r"[^\n]+|\n", {"<|bos|>": 256})
    with pytest.raises(BadInput, match=r"--fim .*<\|fim_prefix\|>"):
        check_fim("--fim", without, 1024)
    with pytest.raises(BadInput, match="--fim .* --max_seq_len=32 .* 64"):
        check_fim("--fim", tokenizer, 32)
    check_fim("--fim", load_tokenizer(byte_tokenizer_dir), 64)
