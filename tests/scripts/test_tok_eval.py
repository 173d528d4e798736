"""scripts/tok_eval.py: the comparison of the tokenizer with OpenAI's."""
import socket

import pytest

from nanochat.common import BadInput
from scripts import tok_eval
from tests.data.headers import HEADERS, write_headers


@pytest.fixture(scope="session")
def headers_dir(tmp_path_factory):
    return write_headers(tmp_path_factory.mktemp("headers"))


@pytest.fixture
def is_offline(monkeypatch, tmp_path):
    """Without a network: requests, by which tiktoken downloads, finds nobody at its proxy."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    monkeypatch.setattr("tiktoken.registry.ENCODINGS", {})


def test_without_a_network_the_comparison_says_so_in_one_line(headers_dir, is_offline, capsys):
    assert tok_eval.main([f"--data_dir={headers_dir}", "--max_bytes_per_source=50000"]) == 0
    printed = capsys.readouterr().out
    (line,) = [line for line in printed.splitlines() if "TIKTOKEN_CACHE_DIR" in line]
    assert line.startswith("without cl100k_base and o200k_base, which tiktoken cannot fetch")
    assert "| bytes per token | MB | ours |" in printed and "| every text comes back |  | yes |" in printed


def test_a_server_that_does_not_answer_is_not_waited_for(is_offline, monkeypatch, capsys):
    monkeypatch.setattr(tok_eval, "FETCH_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{server.getsockname()[1]}")
        (ours,) = tok_eval.find_entrants(None)
    assert ours.name == "ours"
    first, fetching, without = capsys.readouterr().out.splitlines()
    assert fetching == "fetching OpenAI's vocabularies, for up to 0.5 s"
    assert "which tiktoken cannot fetch (it has not ended after 0.5 s)" in without


def test_bad_data_is_found_before_anything_is_downloaded(tmp_path, monkeypatch):
    monkeypatch.setattr(tok_eval, "find_entrants", None)
    with pytest.raises(BadInput, match="no val data"):
        tok_eval.main([f"--data_dir={tmp_path}"])


def test_comments_and_strings_are_told_apart():
    documents = [("a.cc", 'x = "// no"; // yes "no"\n'), ("c.c", ""),
                 ("b.h", """char c = '"'; /* two\nlines */ f("s\\"");""")]
    kinds = tok_eval.by_kind(documents)
    assert kinds["comments"] == ['// yes "no"\n/* two\nlines */']
    assert kinds["strings"] == ['"// no"\n"s\\""']
    assert [len(kinds[kind]) for kind in ("C++ sources", "C++ headers", "C", "all")] == [1, 1, 1, 3]


def test_the_shipped_tokenizer_needs_fewer_tokens_than_openais(monkeypatch):
    monkeypatch.setattr(tok_eval, "FETCH_S", 30)
    *others, ours = tok_eval.find_entrants(None)
    if len(others) < 2:
        pytest.skip("tiktoken cannot fetch OpenAI's vocabularies: no network")
    texts = HEADERS[::3]  # the tokenizer was not trained on pyarrow
    for other in others:
        assert ours.bytes_per_token(texts) > 1.12 * other.bytes_per_token(texts)
