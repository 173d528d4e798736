"""scripts/tok_eval.py: the comparison of the tokenizer with OpenAI's."""
import socket

import numpy as np
import pytest

from nanochat.common import BadInput
from nanochat.data.tokenizer import encode_text, load_tokenizer
from scripts import tok_eval
from tests.data.headers import HEADERS


@pytest.fixture
def is_offline(monkeypatch, tmp_path):
    """Without a network: requests, by which tiktoken downloads, finds nobody at its proxy."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    monkeypatch.setattr("tiktoken.registry.ENCODINGS", {})


def test_without_a_network_the_comparison_says_so_in_one_line(headers_dir, is_offline, capsys):
    assert tok_eval.main([f"--data_dir={headers_dir}", "--max_bytes_per_source=50000"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if "TIKTOKEN_CACHE_DIR" in line]
    assert line.startswith("without cl100k_base and o200k_base")
    assert lines[-1].startswith("| ours | ") and lines[-1].endswith(" | yes |")


def test_a_server_that_does_not_answer_is_not_waited_for(is_offline, monkeypatch, capsys):
    monkeypatch.setattr(tok_eval, "FETCH_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{server.getsockname()[1]}")
        assert tok_eval.fetch_openai() == {}
    assert capsys.readouterr().out.splitlines()[-1].startswith("without cl100k_base and o200k_base")


def test_bad_data_is_found_before_anything_is_downloaded(tmp_path, monkeypatch):
    monkeypatch.setattr(tok_eval, "fetch_openai", None)
    with pytest.raises(BadInput, match="no val data"):
        tok_eval.main([f"--data_dir={tmp_path}"])


def test_a_text_that_does_not_come_back_is_told(capsys):
    texts = ["int a;", "int b;"]
    assert tok_eval.measure("all", lambda text: np.frombuffer(text.encode(), np.uint8), bytes, texts)
    assert not tok_eval.measure("one", lambda text: np.frombuffer(b"int a;", np.uint8), bytes, texts)
    printed = capsys.readouterr().out.splitlines()
    assert [line.endswith("| yes |") for line in printed] == [True, False]
    assert printed[0].startswith("| all | 1.000 |")


def test_the_shipped_tokenizer_needs_fewer_tokens_than_openais(monkeypatch):
    monkeypatch.setattr(tok_eval, "FETCH_S", 30)
    others = tok_eval.fetch_openai()
    if len(others) < 2:
        pytest.skip("tiktoken cannot fetch OpenAI's vocabularies: no network")
    texts = HEADERS[::3]  # the tokenizer was not trained on pyarrow
    ours = load_tokenizer()
    tokens = sum(len(ours.encode_to_numpy(text)) for text in texts)
    for encoding in others.values():
        assert sum(len(encode_text(encoding, text)) for text in texts) > 1.12 * tokens
