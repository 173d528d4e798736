"""Answers that no Cloud Storage gives: each is refused in one line, and nobody gets the token."""
import json
import os
import time
from unittest.mock import Mock

import pytest

from nanochat.common import BadInput, Outage
from nanochat.data import remote
from nanochat.data.gcs import _ask_gcloud
from nanochat.data.remote import Interruption, Retries
from nanochat.data.shards import list_shards
from tests.buckets import Bucket, bucket, gcloud  # noqa: F401
from tests.data.test_bucket import URL, folder, storage  # noqa: F401
from tests.deploy.cloud import Failure as Answer


def test_a_redirection_gets_no_token_and_an_error_that_repeats_it_is_printed_without_it(storage):  # noqa: F811
    thief = Bucket()
    storage.handle = lambda *request: ({":code": 302, "Location": thief.url}, b"")
    with pytest.raises(BadInput, match=f"{URL}: 302 "):
        list_shards(URL)
    assert not thief.requests
    thief.close()
    storage.handle = Mock(side_effect=Answer(403, "DENIED", "\x1b[2Jno: {'Authorization': 'Bearer ya29.a-token'}"))
    with pytest.raises(BadInput, match="403 .*Bearer .token.") as error:
        list_shards(URL)
    assert str(error.value).isprintable()


def test_a_warning_of_an_outage_has_no_escape_code(monkeypatch, capsys):
    monkeypatch.setattr(Retries, "silent_until", 0)
    monkeypatch.setattr(Retries, "begin", lambda self: vars(self).update(deadline=time.monotonic() + 99, pause_s=0))
    assert Retries("gs://b", 60).call(Mock(side_effect=[Interruption("\x1b[2Jgone\n"), 5])) == 5
    assert capsys.readouterr().out.startswith("warning: gs://b cannot be reached (\\x1b[2Jgone\\n); waiting for it")


@pytest.mark.parametrize("answer, words", [
    ({"nextPageToken": "again"}, "does not end after 1000 pages"),
    ([], "'list' object has no"), ({"items": [{"name": "a.parquet"}]}, "KeyError: 'size'"),
    ({"items": [{"name": "a.parquet", "size": "x", "generation": 1}]}, "ValueError: invalid literal"),
    ({"items": 5}, "TypeError: 'int'"),
    (b"[" * 100_000, "RecursionError"), (b"\xff", "UnicodeDecodeError")])
def test_answers_of_another_kind_are_one_line(storage, monkeypatch, answer, words):  # noqa: F811
    monkeypatch.setattr(remote, "OUTAGE_S", 0)
    storage.handle = lambda *request: ({}, answer if isinstance(answer, bytes) else json.dumps(answer).encode())
    with pytest.raises((BadInput, Outage), match=words) as error:
        list_shards(URL)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("output", ["", "a token\nand more", "ya29.\u00e4"])
def test_gcloud_that_prints_no_token_is_named_and_its_output_is_not_shown(tmp_path, monkeypatch, output):
    program = tmp_path / "gcloud"
    program.write_text(f"#!/bin/sh\nprintf '{output}'\necho 'WARNING: be careful' >&2\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(Interruption, match="^gcloud auth print-access-token printed no token$"):
        _ask_gcloud("gs://b")
