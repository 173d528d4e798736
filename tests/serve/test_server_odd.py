"""The server gets what no client should send, and what would wear it out; and the script is run as a person does."""
import gc
import json
import logging
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest

from nanochat.common import BadInput
from scripts import serve
from tests.serve.conftest import REST, SOURCE, serving
from tests.serve.test_server import VIM

SECRET = "xyzzy_secret"  # in every text, and never in a log
JSON = {"Content-Type": "application/json"}
PATHS = {
    "/infill": VIM | {"input_prefix": SECRET + "\n", "n_predict": 2},
    "/v1/completions": {"prompt": SECRET, "suffix": "\n", "max_tokens": 2, "temperature": 0.5, "top_p": 0.9, "n": 1,
                        "stop": ["x"], "seed": 1, "stream": False, "stream_options": {}, "user": "me"}}
ODD = [None, True, False, 0, -1, 1, 2**31, -2**63, 2**64, 10**400, 1e308, -0.0, 0.5, "", "nan", "\ud800", "a\udfffb",
       "\0", "é漢🎉", "x" * 5000, " " * 5000, "\n" * 5000, "}" * 300, [], [None], [[]], ["a"] * 40, [1, 2, 3], {},
       {"a": {}}, [{"text": "\ud83d"}], {"prefix": None}, "<|fim_middle|><|bos|>", SECRET * 100]
RAW = [b"", b"null", b"[]", b"1", b'"text"', b"{", b"\xff\xfe", b"{\"prompt\": NaN}", b'{"prompt": "\\ud800"}',
       b"[" * 99999, b'{"a":' * 9999, b"9" * 9999, b'{"max_tokens": 1e999}', b'{"prompt": "' + b"x" * (1 << 20) + b'"}',
       b"\0" * 99]
HTTP = [b"\r\n\r\n", b"GET\r\n\r\n", b"POST /infill HTTP/1.1\r\n\r\n", b"x" * 70000, bytes(range(256)),
        b"POST /infill HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"POST /infill HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST /infill HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n{",
        b"GET /%ff%fe?prompt=" + SECRET.encode() + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        b"POST /infill HTTP/9.9\r\nHost: localhost\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"]


def send_odd(client, generator):
    """Sends one odd request, and returns the answer; None for what is not even HTTP."""
    kind = generator.random()
    if kind < 0.1:
        address = (client.base_url.host, client.base_url.port)
        with socket.create_connection(address, timeout=30) as connection:
            connection.sendall(generator.choice(HTTP))
            connection.shutdown(socket.SHUT_WR)
            assert not re.match(rb"HTTP/1.1 5", connection.recv(1 << 16))
        return None
    path = generator.choice(list(PATHS))
    if kind < 0.25:
        return client.post(path, content=generator.choice(RAW), headers=JSON)
    body = dict(PATHS[path])
    for name in generator.sample(sorted(body), generator.randrange(1, 3)):
        body[name] = generator.choice(ODD)
    body.update({"n": 1} if body.get("n") == 8 else {})
    return client.post(path, content=json.dumps(body).encode(), headers=JSON)


def test_odd_requests_get_an_answer_and_never_a_500(completer, caplog):
    generator, statuses = random.Random(0), []
    with serving(completer, max_tokens=4) as (client, _), caplog.at_level(logging.DEBUG):
        for _ in range(150):
            answer = send_odd(client, generator)
            if answer is None:
                continue
            statuses.append(answer.status_code)
            assert answer.status_code < 500, answer.text
            if answer.status_code >= 400:
                message = answer.json()["error"]["message"]
                assert message and "\n" not in message and SECRET not in message
        assert client.post("/infill", json=VIM).status_code == 200
    assert {200, 422, 400} <= set(statuses)
    records = [record for record in caplog.records if not record.name.startswith(("httpx", "httpcore"))]
    assert any("tokens of prompt" in record.getMessage() for record in records)
    assert not [record for record in records if SECRET in record.getMessage() + str(record.exc_info)]


def test_a_body_that_is_too_long_is_refused(client):
    def endless():
        while True:
            yield b" " * (1 << 16)

    try:
        assert client.post("/infill", content=endless(), headers=JSON).status_code == 413
    except httpx.WriteError:  # the server has closed the connection while more was sent
        pass
    assert client.post("/infill", content=b" " * ((1 << 20) + 1), headers=JSON).status_code == 413


def test_a_body_that_never_comes_is_not_waited_for(client, monkeypatch):
    monkeypatch.setattr("nanochat.serve.server.BODY_S", 0.2)
    with socket.create_connection((client.base_url.host, client.base_url.port), timeout=30) as connection:
        connection.sendall(b"POST /infill HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                           b"Content-Length: 50\r\n\r\n{")
        answer = connection.recv(1 << 16)
        assert answer.startswith(b"HTTP/1.1 408 ") and b"\r\nconnection: close\r\n" in answer


def test_what_is_not_there_gets_the_same_kind_of_error(client):
    for answer in (client.get("/v1/nothing"), client.get("/infill"), client.post("/health")):
        assert answer.status_code in (404, 405) and "message" in answer.json()["error"]


@pytest.mark.slow
def test_memory_does_not_grow_while_text_is_typed(completer):
    """What Python's garbage collector knows of is counted, after a while and after 50 requests more, and again, because
    other threads make some for a moment."""
    counts = []
    with serving(completer) as (client, server):
        for round_ in range(5):
            for at in range(1, 100, 4):
                body = VIM | {"input_prefix": SOURCE[:at], "prompt": "", "input_suffix": SOURCE[100:], "n_predict": 2,
                              "input_extra": [{"text": f"{round_} {at}"}]}
                assert client.post("/infill", json=body).status_code == 200
            gc.collect()
            counts.append(len(gc.get_objects()))
        assert len(server.thread._jobs) <= 2
    assert min(counts[3:]) - counts[1] < 50, counts  # fewer than one object a request


# scripts/serve.py


def run_script(base_dir, *flags, **options):
    def heed_ctrl_c():
        """A shell that runs the tests in the background lets them, and what they start, ignore it."""
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    return subprocess.Popen([sys.executable, "-m", "scripts.serve", "--port=0", *flags], text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=heed_ctrl_c,
                            env=os.environ | {"NANOCHAT_BASE_DIR": str(base_dir)}, **options)


@pytest.mark.slow
@pytest.mark.parametrize("how, status", [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
def test_the_script_says_where_it_listens_and_ends_at_a_signal(gap_run, byte_tokenizer_dir, how, status):
    process = run_script(gap_run, "--checkpoint=tiny", f"--tokenizer_dir={byte_tokenizer_dir}", "--no_copies")
    watchdog = threading.Timer(120, process.kill)
    watchdog.start()
    try:
        assert re.search("^loading .*tiny.*, step 150$", process.stderr.readline())
        line = process.stderr.readline()
        url = re.search(r"^on cpu, completions of at most 128 tokens. Open (http://127.0.0.1:\d+/)$", line)[1]
        assert httpx.post(f"{url}infill", json=VIM, timeout=60).json()["content"] == REST
        process.send_signal(how)
        time.sleep(0.1)
        process.send_signal(how)  # an impatient person: it must say nothing more
        out, err = process.communicate(timeout=60)
        assert process.returncode == status and out == "" and "Traceback" not in err
        assert "/infill: " in err and "int add" not in err
    finally:
        watchdog.cancel()
        process.kill()


@pytest.mark.parametrize("flags, message", [
    (["--checkpoint=tiny", "--max_tokens=129"], "--max_tokens=129 is more than half of the 256 .* give at most 128"),
    (["--port={taken}"], "choose another port")])
def test_the_script_refuses_bad_input_before_the_model_is_loaded(flags, message, gap_run, monkeypatch, capsys):
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(gap_run))
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(BadInput, match=message):
        serve.main(["--port=0", *(flag.format(taken=server.getsockname()[1]) for flag in flags)])
    assert not capsys.readouterr().err
