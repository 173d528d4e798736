"""Alerts of runs, which a server on this machine receives."""
import json
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest


@pytest.fixture
def webhook():
    """Returns the address of a server, and the list of the texts that it has received."""
    texts = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            texts.append(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["text"].partition(": ")[2])
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/secret", texts
        server.shutdown()


def test_a_run_that_nobody_watches_says_what_becomes_of_it(train, webhook):
    address, texts = webhook
    flags = ("--device_type=cpu", "--synthetic_data", "--eval_every=-1", "--total_batch_size=64", "--log_every=1")
    train(*flags, "--num_iterations=2", WEBHOOK=address)
    assert texts == ["run test started at step 0", "run test finished"]
    texts.clear()
    train(*flags, "--num_iterations=20", "--embedding_lr=1e38", "--matrix_lr=1e38", run="bad", WEBHOOK=address)
    assert any("run bad: step" in text and "is not finite" in text for text in texts) and len(texts) < 8
    texts.clear()
    train("--device_type=cpu", "--data_dir=/nowhere", run="refused", status=2, WEBHOOK=address)
    assert len(texts) == 1 and texts[0].startswith("run refused failed: ") and "/nowhere" in texts[0]


def test_a_webhook_that_refuses_costs_a_warning_which_does_not_show_it(train):
    output = train("--device_type=cpu", "--synthetic_data", "--eval_every=-1", "--num_iterations=2",
                   "--total_batch_size=64", WEBHOOK="http://127.0.0.1:9/secret")
    assert "warning: $WEBHOOK" in output.stdout and "secret" not in output.stdout + output.stderr
