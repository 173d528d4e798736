from tests.buckets import bucket, gcloud  # noqa: F401
