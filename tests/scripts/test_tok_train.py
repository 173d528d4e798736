"""scripts/tok_train.py: the same data makes the same tokenizer, and data or flags that make none are refused."""
import errno
import subprocess
import sys
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import rustbpe

from nanochat.common import BadInput
from nanochat.data.shards import list_shards, open_shards
from nanochat.data.tokenizer import SHIPPED_DIR, Tokenizer, load_tokenizer
from scripts import tok_train
from tests.conftest import last_of_each
from tests.data import hub
from tests.data.headers import HEADERS


def train(data_dir, out_dir, *flags):
    tok_train.main(last_of_each(f"--data_dir={data_dir}", f"--out_dir={out_dir}", "--vocab_size=1000", *flags))
    return load_tokenizer(out_dir)


def test_training_twice_gives_the_same_bytes(headers_dir, tmp_path):
    train(headers_dir, tmp_path / "one", "--max_bytes=1000000")
    command = [sys.executable, "-m", "scripts.tok_train", f"--data-dir={headers_dir}", f"--out-dir={tmp_path / 'two'}",
               "--vocab-size=1000", "--max-bytes=1000000"]
    env = {"RAYON_NUM_THREADS": "1", "PYTHONHASHSEED": "1"}
    subprocess.run(command, check=True, timeout=120, env=env, cwd=SHIPPED_DIR.parent)
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert names == ["SHA256SUMS", "token_bytes.pt", "tokenizer.json", "vocabulary.tiktoken"]
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name


def test_trainer_and_tiktoken_split_and_merge_alike(headers_dir):
    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator(iter(HEADERS[::2]), 3000, pattern=tok_train.PATTERN)
    ranks = {bytes(token): rank for token, rank in trainer.get_mergeable_ranks()}
    tokenizer = Tokenizer(ranks, tok_train.PATTERN, {"<|bos|>": len(ranks)})
    assert all(trainer.encode(text) == tokenizer.encode(text) for text in HEADERS[1:60:2])


def test_no_source_gives_more_than_the_limit(headers_dir):
    shards = open_shards(list_shards(headers_dir))
    for most, most_per_source in ((10**9, 200_000), (100_000, 10**9)):
        nbytes = Counter()
        texts = list(tok_train.choose_texts(shards, most, most_per_source, nbytes))
        assert nbytes.keys() == {"even=1.0", "odd=2.0"} and len(texts) > 5
        limit = min(most, 2 * most_per_source)
        assert 0.5 * limit < nbytes.total() <= limit and max(nbytes.values()) <= most_per_source


def test_any_parquet_with_a_column_text_will_do(tmp_path):
    texts = [text.encode() + b"\xff" for text in HEADERS] + [None, b""]
    (tmp_path / "data").mkdir()
    pq.write_table(pa.table({"text": pa.array(texts, pa.binary())}), tmp_path / "data" / "a.parquet")
    assert train(tmp_path / "data", tmp_path / "out").n_vocab == 1000


def test_tokens_of_another_are_split_as_llama_cpp_does(headers_dir, tmp_path):
    first = train(headers_dir, tmp_path / "first", "--max_bytes=1000000")
    tok_train.main([f"--tokens_of={tmp_path / 'first'}", "--llama_cpp", f"--out_dir={tmp_path / 'second'}"])
    second = load_tokenizer(tmp_path / "second")
    assert second.tokens() == first.tokens() and second.special_tokens == first.special_tokens
    assert second.decode_bytes(second.encode("1234567")) == b"1234567"
    small = Tokenizer({bytes([byte]): byte for byte in range(256)} | {b"12": 256, b"34": 257, b"a b": 258},
                            tok_train.LLAMA_CPP_PATTERN, {"<|bos|>": 259})
    assert small.encode("a b1234") == [258, ord("1"), ord("2"), 257]
    assert len(small.encode("1" * 200_000)) == 200_000  # in a moment
    assert train(headers_dir, tmp_path / "third", "--max_bytes=1000000", "--llama_cpp").sha256 == second.sha256


def test_a_tokenizer_of_hugging_face_gives_no_tokens(tmp_path):
    tmp_path.joinpath("tokenizer.json").write_bytes(hub.files_of(*hub.smollm2())["tokenizer.json"])
    with pytest.raises(BadInput, match="--tokens_of.*Hugging Face"):
        tok_train.main([f"--tokens_of={tmp_path}", f"--out_dir={tmp_path / 'new'}"])


@pytest.mark.parametrize("flags, complaint", [
    (["--vocab_size=200"], "not a whole number of at least 270"),
    (["--max_bytes=5000", "--vocab_size=60000"], "give more text"),
])
def test_flags_that_make_no_tokenizer_are_bad_input(headers_dir, tmp_path, flags, complaint):
    with pytest.raises(BadInput, match=complaint):
        train(headers_dir, tmp_path / "new", *flags)
    assert not list(tmp_path.glob("new/*"))


def test_a_full_disk_leaves_nothing_that_the_same_command_refuses(headers_dir, tmp_path, monkeypatch):
    def sums_text(paths):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr(tok_train, "sums_text", sums_text)
        train(headers_dir, tmp_path)
    assert train(headers_dir, tmp_path).n_vocab == 1000 and not (tmp_path / ".unfinished").exists()


def test_a_tokenizer_is_not_overwritten_and_a_corrupt_shard_is_named(headers_dir, tmp_path, byte_tokenizer_dir):
    (tmp_path / "nested" / "tokenizer_65k").mkdir(parents=True)
    with pytest.raises(BadInput, match="is not empty .it holds tokenizer_65k."):
        train(headers_dir, tmp_path / "nested")
    with pytest.raises(BadInput, match="is not empty .it holds token_bytes.pt …., and checkpoints may need"):
        train(headers_dir, byte_tokenizer_dir)
    content = bytearray((headers_dir / "shard_00000.parquet").read_bytes())
    middle = len(content) // 2
    content[middle:middle + 400] = bytes(400)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "broken.parquet").write_bytes(content)
    with pytest.raises(BadInput, match=r"broken\.parquet"):
        train(tmp_path / "data", tmp_path / "other")
