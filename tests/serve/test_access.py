"""Who may use the server, and what everybody else is told."""
import contextlib
import json
import socket
from dataclasses import replace

import httpx
import pytest
from uvicorn.protocols.http import h11_impl

from nanochat.serve.connections import MAX_WITHOUT_KEY
from tests.serve.conftest import serving
from tests.serve.test_server import REST, VIM

KEY = {"Authorization": "Bearer secret"}


def refusal(answer, status):
    """The message of a refused request."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert error["code"] == status and error["type"]
    return error["message"]


def connect(client):
    return socket.create_connection((client.base_url.host, client.base_url.port), timeout=30)


# A browser


@pytest.mark.parametrize("headers", [
    {"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site", "Origin": "http://127.0.0.1:1"},
    {"Origin": "https://other.example"}, {"Origin": "null"}, {"Origin": "http://127.0.0.1:1"},
    {"Sec-Fetch-Site": "none", "Origin": "chrome-extension://abc"}])
def test_a_page_of_another_site_cannot_use_the_server(client, served, headers):
    _, server = served
    server.thread._jobs.clear()
    assert "other sites" in refusal(client.post("/infill", json=VIM, headers=headers), 403)
    for path in ("/health", "/v1/models"):
        assert "other sites" in refusal(client.get(path, headers=headers), 403)
    assert not server.thread._jobs
    assert client.get("/", headers=headers).status_code == 200  # a link to the page is followed
    answer = client.options("/infill", headers=headers | {"Access-Control-Request-Method": "POST"})
    assert answer.status_code == 405 and not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded",
                                          "multipart/form-data; boundary=x", "text/plain; application/json"])
def test_what_a_form_can_send_is_refused_even_without_a_browsers_headers(client, content_type):
    headers = {"Content-Type": content_type} if content_type else {}
    for path in ("/infill", "/v1/completions"):
        assert "application/json" in refusal(client.post(path, content=json.dumps(VIM), headers=headers), 415)


def test_the_servers_own_page_and_programs_can_use_it(client):
    own = str(client.base_url).rstrip("/")
    for headers in ({"Sec-Fetch-Site": "same-origin", "Origin": own}, {"Origin": own}, {"Sec-Fetch-Site": "none"},
                    {"Sec-Fetch-Site": "same-origin", "Origin": "https://proxy.example"},
                    {"Sec-Fetch-Mode": "cors"}, {"Content-Type": "Application/JSON; charset=utf-8"}):
        headers = {"Content-Type": "application/json"} | headers
        answer = client.post("/infill", content=json.dumps(VIM), headers=headers)
        assert answer.status_code == 200 and answer.json()["content"] == REST


def test_a_name_that_was_given_this_machines_address_is_refused(client):
    for host in ("evil.example:8012", "", "127.0.0.1.evil.example", "localhost.", "[::1", "8012"):
        assert "Host" in refusal(client.get("/health", headers={"Host": host}), 400)
    for host in ("localhost:8012", "LOCALHOST", "[::1]:8012", "127.0.0.1"):
        assert client.get("/health", headers={"Host": host}).status_code == 200


# The key


def test_with_a_key_only_the_page_and_health_need_none(completer):
    with serving(replace(completer, copies=False), api_key="secret") as (client, _):
        assert client.get("/").status_code == client.get("/health").status_code == 200
        for value in (None, "Bearer wrong", "Bearer sécret".encode(), "Bearer", "secret", "Basic secret"):
            answer = client.post("/infill", json=VIM, headers={"Authorization": value} if value else {})
            assert "--api_key" in refusal(answer, 401) and answer.headers["connection"] == "close"
        assert client.get("/v1/models").status_code == 401
        for value in ("Bearer secret", "bearer secret", "BEARER  secret"):
            answer = client.post("/infill", json=VIM, headers={"Authorization": value})
            assert answer.json()["content"] == REST and "connection" not in answer.headers


def test_connections_without_the_key_are_few_and_end_with_their_answer(completer):
    with serving(completer, api_key="secret") as (client, _), contextlib.ExitStack() as stack:
        assert client.get("/health").headers["connection"] == "close"
        for _ in range(2 * MAX_WITHOUT_KEY):  # those that have shown the key do not count
            other = stack.enter_context(httpx.Client(base_url=client.base_url, headers=KEY))
            assert other.get("/v1/models").status_code == 200
        silent = [stack.enter_context(connect(client)) for _ in range(MAX_WITHOUT_KEY)]
        assert stack.enter_context(connect(client)).recv(1) == b""  # closed
        assert other.get("/v1/models").status_code == 200
        silent[0].close()
        assert client.get("/v1/models", headers=KEY).status_code == 200


def test_a_client_that_is_gone_already_does_not_lift_the_limit_of_others(completer, monkeypatch):
    address_of = h11_impl.get_remote_addr
    gone = [None]
    monkeypatch.setattr(h11_impl, "get_remote_addr", lambda transport: gone.pop() if gone else address_of(transport))
    with serving(completer, api_key="secret") as (client, _), contextlib.ExitStack() as stack:
        for _ in range(1 + MAX_WITHOUT_KEY):
            stack.enter_context(connect(client))
        assert stack.enter_context(connect(client)).recv(1) == b""


# Every refusal is the same JSON


def test_one_connection_too_many_gets_the_same_kind_of_error(completer):
    with serving(completer, max_connections=3) as (client, _), contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(connect(client))
        assert "open already" in refusal(client.get("/health"), 503)


def test_head_is_answered_without_a_body(client):
    for path in ("/", "/health", "/v1/models"):
        head, whole = client.head(path), client.get(path)
        assert (head.status_code, head.content) == (200, b"") and whole.content
        assert head.headers["content-type"] == whole.headers["content-type"]
