"""A bucket, with the login of the real gcloud."""
import os
import shutil

import pytest

from nanochat.data import storage
from tests.deploy import warm_gcloud
from tests.deploy.cloud import Cloud, Failure

OUTAGE = (429, "RESOURCE_EXHAUSTED", "Too many requests")


class Bucket(Cloud):
    """The emulated storage, which can refuse to be written to."""
    refuses_writes = False

    def storage(self, method, path, query, body, headers):
        if self.refuses_writes and method in ("POST", "PUT", "DELETE"):
            raise Failure(403, "PERMISSION_DENIED",
                          "tpu@p.iam does not have storage.objects.create access to the Google Cloud Storage object.")
        return super().storage(method, path, query, body, headers)

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
    bucket = Bucket()
    for name, value in bucket.env(tmp_path / "gcloud").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", f"{gcloud}:{os.environ['PATH']}")
    monkeypatch.setattr(storage, "_tokens", {})
    monkeypatch.setattr(storage, "BLIP_S", 0)
    yield bucket
    bucket.close()
