"""Text comes back exactly from its tokens, those of the shipped tokenizer suit C++, and a tokenizer's files are found,
come back as they were saved, and are not trusted."""
import base64
import hashlib
import re

import pytest
import tiktoken
import tiktoken.load
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat.common import BadInput
from nanochat.data.hub_tokenizer import GPT2_PATTERN
from nanochat.data.shards import list_shards
from nanochat.data.tokenizer import SHIPPED_DIR, Tokenizer, check_tokenizer, encode_text, load_tokenizer
from nanochat.data.tokenizer_files import SPECIAL_TOKENS
from scripts import tok_train
from tests.data.headers import HEADERS


@pytest.fixture(scope="session")
def shipped():
    return load_tokenizer(SHIPPED_DIR)


@pytest.mark.parametrize("begin", [b"int a;", b"\xff"])
def test_a_million_spaces_come_back_with_the_pattern_of_gpt2(begin):
    tokenizer = Tokenizer({bytes([byte]): byte for byte in range(256)} | {b"  ": 256}, GPT2_PATTERN, {"<|bos|>": 257})
    spaces = b" " * 1_200_000
    assert tokenizer.decode_bytes(tokenizer.encode(begin + spaces)) == begin + spaces
    peer = tiktoken.Encoding("peer", pat_str=GPT2_PATTERN, mergeable_ranks=tokenizer.tokens(), special_tokens={})
    assert len(encode_text(peer, spaces.decode())) < 700_000


# -----------------------------------------------------------------------------
# Text comes back


FRAGMENTS = [
    "\t", "    ", "\n", "\r\n", "\r", " ", "\0", "\x1b[0m", "\x7f", "->", "::", "<<=", "//", "/* ", "*/", "#if ", "{",
    "});\n", "\\n", '"', "'", "std", "vector", "CamelCase", "snake_case_", "HTTPServer2", "0x1F", "3.14159f", "<|bos|>",
    "<|fim_prefix|>", "é", "漢字", "\u00a0", "\u2028", "\ufeff", "\U0001f600", "a" * 200, " " * 200,
]


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


@pytest.mark.parametrize("line", ["a", " ", "\n\t", "é", "<|bos|>", b"caf\xe9 "])
def test_one_endless_line_is_cut_into_short_pieces_and_comes_back(shipped, line):
    text = line * (1_000_000 // len(line))
    if isinstance(text, str):  # the time for a piece grows faster than its length
        assert max(map(len, re.findall(shipped.pattern, text))) <= 64 * 34
    expected = text if isinstance(text, bytes) else text.encode()
    assert shipped.decode_bytes(shipped.encode(text)) == expected


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
    assert [shipped.decode([token]) for token in shipped.encode(text)] == expected


def test_the_shipped_tokenizer_has_65536_tokens_with_all_special_ones_and_tiktoken_reads_it(shipped):
    assert shipped.n_vocab == 65536
    assert [shipped.special(name) for name in SPECIAL_TOKENS] == list(range(65536 - len(SPECIAL_TOKENS), 65536))
    assert shipped.bos_id == shipped.special("<|bos|>")
    assert shipped.decode([shipped.bos_id]) == "<|bos|>"
    with pytest.raises(BadInput, match=r"<\|nothing\|>"):
        shipped.special("<|nothing|>")
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


# -----------------------------------------------------------------------------
# Where it is read from


def byte_tokenizer(special_tokens=SPECIAL_TOKENS):
    ranks = {bytes([byte]): byte for byte in range(256)}
    return Tokenizer(ranks, r"[^\n]+|\n", {name: 256 + i for i, name in enumerate(special_tokens)})


def save(directory, tokenizer=None):
    directory.mkdir(parents=True, exist_ok=True)
    (tokenizer or byte_tokenizer()).save(directory)
    return directory


def test_the_flag_overrides_the_base_directory_which_overrides_the_shipped_one(tmp_path, base_dir, shipped):
    assert load_tokenizer().sha256 == shipped.sha256 == load_tokenizer(save(tmp_path / "saved", shipped)).sha256
    save(base_dir / "tokenizer" / "tokenizer_65k")
    assert load_tokenizer().n_vocab == 256 + len(SPECIAL_TOKENS)
    save(base_dir / "tokenizer", byte_tokenizer(["<|bos|>", "<|pad|>"]))
    assert load_tokenizer().n_vocab == 258
    assert load_tokenizer(save(tmp_path / "flag", byte_tokenizer(["<|bos|>"]))).n_vocab == 257
    assert load_tokenizer(save(tmp_path / "nested" / "tokenizer_65k").parent).n_vocab == 256 + len(SPECIAL_TOKENS)


def vocabulary(*lines):
    singles = [b"%s %d" % (base64.b64encode(bytes([byte])), byte) for byte in range(256)]
    return b"\n".join([*singles, *lines])


@pytest.mark.parametrize("name, content, complaint", [
    ("vocabulary.tiktoken", b"", "single bytes"),
    ("vocabulary.tiktoken", vocabulary(b"not-base64! 256"), "line 257"),
    ("vocabulary.tiktoken", vocabulary(b"YWI= 300"), "special tokens are not 0, 1, 2"),
    ("vocabulary.tiktoken", vocabulary().replace(b"AA== 0", b"YWI= 0"), "single bytes"),
    ("vocabulary.tiktoken", vocabulary(b"YWI= 256"), "the ids of ranks and special tokens"),
    ("tokenizer.json", b"{", "Expecting property name"),
    ("tokenizer.json", b"[]", "indices"),
    ("tokenizer.json", b'{"pattern": "[a", "special_tokens": {"<|bos|>": 256}}', "Parsing error"),
    ("tokenizer.json", b'{"pattern": 5, "special_tokens": {"<|bos|>": 256}}', "str"),
    ("tokenizer.json", b'{"pattern": ".", "special_tokens": {"<|eos|>": 256}}', "no <|bos|>"),
    ("tokenizer.json", b'{"pattern": ".", "special_tokens": {"<|bos|>": "256"}}', ""),
    ("tokenizer.json", None, "No such file"),
    ("vocabulary.tiktoken", None, "No such file"),
])
def test_a_damaged_tokenizer_is_bad_input_in_one_line(tmp_path, name, content, complaint):
    save(tmp_path)
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(BadInput) as error:
        load_tokenizer(tmp_path)
    assert complaint in str(error.value) and str(tmp_path) in str(error.value)


def test_a_directory_that_may_not_be_read_is_bad_input(as_nobody):
    folder, run = as_nobody
    (folder / "closed").mkdir(mode=0)
    for closed in (folder / "closed", folder / "closed" / "deeper"):
        with pytest.raises(BadInput, match=r"closed\S* cannot be read \(Permission denied\): give yourself the right"):
            run(lambda closed=closed: load_tokenizer(closed))
        with pytest.raises(BadInput, match=r"closed\S* cannot be read \(Permission denied\): make some"):
            run(lambda closed=closed: list_shards(closed))


def test_a_directory_without_a_tokenizer_is_bad_input(tmp_path):
    for directory in (tmp_path, tmp_path / "missing"):
        with pytest.raises(BadInput, match="no tokenizer in"):
            load_tokenizer(directory)
    (tmp_path / "tokenizer.pkl").write_bytes(b"")
    with pytest.raises(BadInput, match="only a tokenizer.pkl"):
        load_tokenizer(tmp_path)


def test_token_bytes_are_counted_whatever_the_file_says(tmp_path):
    path = save(tmp_path) / "token_bytes.pt"
    expected = [1] * 256 + [0] * len(SPECIAL_TOKENS)
    assert torch.load(path, weights_only=True).tolist() == expected
    path.write_bytes(b"garbage")
    assert load_tokenizer(tmp_path).token_bytes().tolist() == expected


def test_a_tokenizer_that_does_not_fit_the_model_is_bad_input():
    tokenizer = byte_tokenizer()
    check_tokenizer(tokenizer, tokenizer.n_vocab, tokenizer.sha256)
    with pytest.raises(BadInput, match="270 tokens .* 256: .*--tokenizer_dir"):
        check_tokenizer(tokenizer, 256, tokenizer.sha256)
    with pytest.raises(BadInput, match="--tokenizer_dir"):
        check_tokenizer(tokenizer, tokenizer.n_vocab, "0" * 64)
