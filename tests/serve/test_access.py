"""Who may use the server, and what everybody else is told."""
import json

import pytest

from tests.serve.conftest import REST
from tests.serve.test_server import VIM


def refusal(answer, status):
    """The message of a refused request."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert error["code"] == status and error["type"]
    return error["message"]


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
