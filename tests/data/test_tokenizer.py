"""Text comes back exactly from its tokens, and the tokens of the shipped tokenizer suit C++."""
import hashlib
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest
import tiktoken
import tiktoken.load
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat.common import BadInput
from nanochat.data.tokenizer import SHIPPED_DIR, Tokenizer, encode_text, load_tokenizer
from nanochat.data.tokenizer_files import SPECIAL_TOKENS
from scripts import tok_train

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
HEADERS = [path.read_text() for path in sorted(Path(pa.get_include()).glob("arrow/**/*.h"))]


@pytest.fixture(scope="session")
def shipped():
    return load_tokenizer(SHIPPED_DIR)


@pytest.mark.parametrize("text", ["int a;" + " " * 1_200_000, b"\xff" + b" " * 1_200_000 + b"x"])
def test_a_million_spaces_come_back_with_the_pattern_of_gpt2(text):
    tokenizer = Tokenizer({bytes([byte]): byte for byte in range(256)} | {b"  ": 256}, GPT2_PATTERN, {"<|bos|>": 257})
    data = text.encode() if isinstance(text, str) else text
    assert tokenizer.decode_bytes(tokenizer.encode(text)) == data
    peer = tiktoken.Encoding("peer", pat_str=GPT2_PATTERN, mergeable_ranks=tokenizer.tokens(), special_tokens={})
    assert len(encode_text(peer, data[1:].decode())) < 700_000


def pieces(tokenizer, text):
    return [tokenizer.decode([token]) for token in tokenizer.encode(text)]


# -----------------------------------------------------------------------------
# Text comes back


FRAGMENTS = [
    "\t", "    ", "\n", "\r\n", "\r", " ", "\0", "\x1b[0m", "\x7f", "->", "::", "<<=", "//", "/* ", "*/", "#if ", "{",
    "});\n", "\\n", '"', "'", "std", "vector", "CamelCase", "snake_case_", "HTTPServer2", "0x1F", "3.14159f", "<|bos|>",
    "<|fim_prefix|>", "é", "漢字", "\u00a0", "\u2028", "\ufeff", "\U0001f600", "a" * 200, " " * 200,
]


@pytest.mark.parametrize("texts", [
    ["int x;\n", "", "a <= b", " \n", "\n}", "return 0;"],
    ["int x;\n", "// é\n", b"caf\xe9 \xff", b"plain", "// <bos>", "x\ud800"],
    ["one", "text with <|bos|> in it", "<|bos|>", "<|fim_prefix|>"],
    [],
])
def test_documents_encoded_together_are_as_each_alone(shipped, texts):
    documents = shipped.encode_documents(texts)
    assert [ids.tolist() for ids in documents] == [[shipped.bos_id, *shipped.encode(text)] for text in texts]


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(parts=st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=9), st.binary(max_size=9),
                                st.sampled_from(["\udce9", "\ud800"]))))
def test_any_text_and_any_bytes_come_back_exactly(shipped, parts):
    text = "".join(part for part in parts if isinstance(part, str))
    data = b"".join(part if isinstance(part, bytes) else part.encode("utf-8", "surrogatepass") for part in parts)
    ids = shipped.encode(text)
    assert shipped.decode_bytes(ids) == text.encode("utf-8", "surrogatepass")
    assert shipped.encode_to_numpy(text.encode("utf-8", "surrogatepass")).tolist() == ids
    assert shipped.decode_bytes(shipped.encode(data)) == data
    assert max(ids, default=0) < shipped.special("<|bos|>")  # what looks like a special token is text


def test_every_character_and_every_byte_come_back(shipped):
    text = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x110000)]))
    assert shipped.decode(shipped.encode(text)) == text
    assert shipped.decode_bytes(shipped.encode(bytes(range(256)))) == bytes(range(256))
    assert shipped.encode("") == shipped.encode(b"") == []


def test_malformed_bytes_leave_the_tokens_around_them_alone(shipped):
    assert shipped.encode(b"return x;\xff\xfereturn x;")[-3:] == shipped.encode("return x;")
    assert len(shipped.encode(b"\xff\xfe")) == 2


@pytest.mark.parametrize("line", ["a", " ", "=", "\n\t", "xY", "é", "<|bos|>", b"caf\xe9 ", b"\xff"])
def test_one_endless_line_is_cut_into_short_pieces_and_comes_back(shipped, line):
    text = line * (1_000_000 // len(line))
    if isinstance(text, str):  # the time for a piece grows faster than its length
        assert max(map(len, re.findall(shipped.pattern, text))) <= 64 * 34
    expected = text if isinstance(text, bytes) else text.encode()
    assert shipped.decode_bytes(shipped.encode(text)) == expected


def test_threads_share_a_tokenizer(shipped):
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(shipped.encode, HEADERS[:40])) == [shipped.encode(text) for text in HEADERS[:40]]


# -----------------------------------------------------------------------------
# What the tokens are


@pytest.mark.parametrize("text, expected", [
    ("\n        ", ["\n        "]),
    (" {\n\t\t", [" {\n\t\t"]),
    ("p->get", ["p", "->get"]),
    ("std::string", ["std", "::string"]),
    ("a <<= b", ["a", " <<=", " b"]),
    ("max_value", ["max", "_value"]),
    ("getElementName", ["get", "Element", "Name"]),
    ("1234567", ["12", "34", "56", "7"]),
    ("= 0xFF;", ["=", " 0xFF", ";"]),
    ('"%s\\n"', ['"', "%s", "\\n", '"']),
    ("  // the size\n", ["  ", "//", " the", " size", "\n"]),
])
def test_tokens_are_the_parts_of_cpp(shipped, text, expected):
    assert pieces(shipped, text) == expected


def test_the_shipped_tokenizer_has_65536_tokens_with_all_special_ones(shipped):
    assert shipped.n_vocab == 65536
    assert [shipped.special(name) for name in SPECIAL_TOKENS] == list(range(65536 - len(SPECIAL_TOKENS), 65536))
    assert shipped.bos_id == shipped.special("<|bos|>")
    assert shipped.decode([shipped.bos_id]) == "<|bos|>"
    with pytest.raises(BadInput, match=r"<\|nothing\|>"):
        shipped.special("<|nothing|>")


def test_the_shipped_vocabulary_is_read_by_tiktoken(shipped):
    ranks = tiktoken.load.load_tiktoken_bpe(str(SHIPPED_DIR / "vocabulary.tiktoken"))
    encoding = tiktoken.Encoding("again", pat_str=tok_train.PATTERN, mergeable_ranks=ranks, special_tokens={})
    assert all(encoding.encode_ordinary(text) == shipped.encode(text) for text in HEADERS[:20])


def test_the_shipped_files_are_the_ones_that_are_documented(shipped):
    for line in (SHIPPED_DIR / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split()
        assert hashlib.sha256((SHIPPED_DIR / name).read_bytes()).hexdigest() == digest, name
    assert shipped.sha256 in (SHIPPED_DIR / "README.md").read_text()
    assert shipped.pattern == tok_train.PATTERN
    counts = torch.load(SHIPPED_DIR / "token_bytes.pt", weights_only=True)
    expected = [len(shipped.decode_bytes([token])) for token in range(65536 - len(SPECIAL_TOKENS))]
    assert counts.dtype == torch.int32 and counts.tolist() == expected + [0] * len(SPECIAL_TOKENS)
