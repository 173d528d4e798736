"""A bucket with the login of the real gcloud, which a test lets fail."""
import io
import os
import shutil
import threading

import pytest

from nanochat.data import gcs, storage
from tests.deploy import warm_gcloud
from tests.deploy.cloud import Cloud, Failure

OUTAGE = (429, "RESOURCE_EXHAUSTED", "Too many requests")


class Bucket(Cloud):
    """Emulated Cloud Storage. `refuses_writes`; `failures`: (code, status, message) of the next answers to requests for
    content; `cuts`: after how many bytes the next contents end with their connection; `stall`: an Event for which
    contents wait; `lives_for`: how many contents it answers in all."""
    refuses_writes = False

    def __init__(self):
        super().__init__()
        self.failures, self.cuts, self.page_size, self.fetched, self.stall = [], [], 1000, [], None
        self.generations, self.lives_for = {}, 10**9
        bucket = self

        class Handler(self.server.RequestHandlerClass):
            def do_GET(self):
                if "alt=media" not in self.path or bucket.failures or not (bucket.cuts or bucket.stall):
                    return super().do_GET()
                connection, self.wfile = self.wfile, io.BytesIO()
                super().do_GET()
                head, _, body = self.wfile.getvalue().partition(b"\r\n\r\n")
                self.wfile = connection
                n_bytes = bucket.cuts.pop(0) if bucket.cuts else len(body) // 2
                connection.write(head + b"\r\n\r\n" + body[:n_bytes])
                connection.flush()
                if bucket.stall:
                    bucket.stalled.set()
                    bucket.stall.wait(60)
                self.close_connection = True

        self.stalled = threading.Event()
        self.server.RequestHandlerClass = Handler

    def copy(self, folder, bucket, prefix):
        """Copies the parquet files of a folder there, as gcloud storage cp does."""
        for path in folder.rglob("*.parquet"):
            self.put(bucket, f"{prefix}/{path.relative_to(folder)}", path.read_bytes())

    def put(self, bucket, name, content):
        super().put(bucket, name, content)
        self.generations[bucket, name] = str(int(self.generations.get((bucket, name), 1000)) + 1)

    def described(self, bucket, name):
        return {**super().described(bucket, name), "generation": self.generations[bucket, name]}

    def storage(self, method, path, query, body, headers):
        if self.refuses_writes and method in ("POST", "PUT", "DELETE"):
            raise Failure(403, "PERMISSION_DENIED",
                          "tpu@p.iam does not have storage.objects.create access to the Google Cloud Storage object.")
        if query.get("alt") == "media":
            if len(self.fetched) >= self.lives_for:
                raise Failure(503, "UNAVAILABLE", "Try again later")
            if self.failures:
                raise Failure(*self.failures.pop(0))
            self.fetched.append((path, headers["Range"]))
            bucket, name = path.split("/b/")[1].split("/o/")
            if query["generation"] != self.generations.get((bucket, name.replace("%2F", "/"))):
                raise Failure(404, "NOT_FOUND", f"No such object: {bucket}/{name}")
        return super().storage(method, path, query, body, headers)

    def list_objects(self, bucket, query):
        found = super().list_objects(bucket, {name: value for name, value in query.items() if name != "pageToken"})
        begin, items = int(query.get("pageToken", 0)), found["items"]
        page = {**found, "items": items[begin:begin + self.page_size]}
        if begin:
            del page["prefixes"]
        return page | ({"nextPageToken": str(begin + self.page_size)} if len(items) > begin + self.page_size else {})

    def names(self):
        return sorted(name for _, name in self.objects)


@pytest.fixture(scope="session")
def gcloud(tmp_path_factory):
    """The folder of a gcloud that has been imported already."""
    if not shutil.which("gcloud"):
        pytest.skip("gcloud is not installed")
    folder = tmp_path_factory.mktemp("gcloud")
    server = warm_gcloud.start(folder)
    yield folder
    server.stdin.close()
    server.wait()
    server.stdout.close()


@pytest.fixture
def bucket(gcloud, tmp_path, monkeypatch):
    """A Bucket; `environment` are the variables with which a process sees it."""
    bucket = Bucket()
    bucket.environment = {**bucket.env(tmp_path / "gcloud"), "PATH": f"{gcloud}:{os.environ['PATH']}"}
    for name, value in bucket.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(gcs, "_tokens", {})
    monkeypatch.setattr(storage, "BLIP_S", 0)
    yield bucket
    for thread in threading.enumerate():  # they would read from the bucket of the next test
        if thread.name == "read-ahead":
            thread.join(60)
    bucket.close()
