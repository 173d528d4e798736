import pytest

from tests.buckets import bucket, gcloud  # noqa: F401


@pytest.fixture
def run_dir(tmp_path):
    """The folder of a run, with metrics."""
    path = tmp_path / "run"
    path.mkdir()
    (path / "metrics.jsonl").write_text('{"step": 1}\n')
    return path
