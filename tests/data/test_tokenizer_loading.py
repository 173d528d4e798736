"""A tokenizer is found, comes back as it was saved, and is read without trusting its files."""
import base64

import pytest
import torch

from nanochat.common import BadInput
from nanochat.data.shards import list_shards
from nanochat.data.tokenizer import SHIPPED_DIR, Tokenizer, check_tokenizer, load_tokenizer
from nanochat.data.tokenizer_files import SPECIAL_TOKENS
from tests.data.headers import HEADERS


def byte_tokenizer(special_tokens=SPECIAL_TOKENS):
    ranks = {bytes([byte]): byte for byte in range(256)}
    return Tokenizer(ranks, r"[^\n]+|\n", {name: 256 + i for i, name in enumerate(special_tokens)})


def save(directory, tokenizer=None):
    directory.mkdir(parents=True, exist_ok=True)
    (tokenizer or byte_tokenizer()).save(directory)
    return directory


def test_the_flag_overrides_the_base_directory_which_overrides_the_shipped_one(tmp_path, base_dir):
    assert load_tokenizer().n_vocab == 65536
    save(base_dir / "tokenizer" / "tokenizer_65k")
    assert load_tokenizer().n_vocab == 256 + len(SPECIAL_TOKENS)
    save(base_dir / "tokenizer", byte_tokenizer(["<|bos|>", "<|pad|>"]))
    assert load_tokenizer().n_vocab == 258
    assert load_tokenizer(save(tmp_path / "flag", byte_tokenizer(["<|bos|>"]))).n_vocab == 257
    assert load_tokenizer(save(tmp_path / "nested" / "tokenizer_65k").parent).n_vocab == 256 + len(SPECIAL_TOKENS)


def test_a_saved_tokenizer_is_the_same_when_it_is_loaded(tmp_path):
    shipped = load_tokenizer(SHIPPED_DIR)
    again = load_tokenizer(save(tmp_path, shipped))
    assert again.sha256 == shipped.sha256
    assert again.sha256 != byte_tokenizer().sha256
    assert again.encode(HEADERS[0]) == shipped.encode(HEADERS[0])


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
    assert complaint in str(error.value) and str(tmp_path) in str(error.value) and "\n" not in str(error.value)


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
    check_tokenizer(tokenizer, vocab_size=tokenizer.n_vocab, sha256=tokenizer.sha256)
    with pytest.raises(BadInput, match="270 tokens .* 256: .*--tokenizer_dir"):
        check_tokenizer(tokenizer, vocab_size=256)
    with pytest.raises(BadInput, match="--tokenizer_dir"):
        check_tokenizer(tokenizer, sha256="0" * 64)
