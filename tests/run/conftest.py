import http.server
import threading

import pytest

from tests.buckets import bucket, gcloud  # noqa: F401


@pytest.fixture
def metadata(monkeypatch):
    """What Google Cloud's metadata server says, {key below instance/: value, or a list of the next values}."""
    says = {}

    class Metadata(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            value = says.get(self.path.removeprefix("/computeMetadata/v1/instance/"))
            if isinstance(value, list):
                value = value.pop(0)
            self.send_response(200 if value is not None and self.headers["Metadata-Flavor"] == "Google" else 404)
            self.end_headers()
            self.wfile.write((value or "").encode())

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Metadata) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{server.server_port}")
        yield says
        server.shutdown()
