"""base_train with --data_dir=gs://… ends in one line if the bucket is gone."""
from nanochat.run.stopping import EXIT_STATUS
from tests.buckets import bucket, gcloud  # noqa: F401
from tests.conftest import last_of_each
from tests.data import elsewhere


def test_a_bucket_that_is_gone_while_a_run_trains_ends_it_with_one_line_and_status_75(
        bucket, corpus_dir, tiny, warm_ranks):  # noqa: F811
    bucket.copy(corpus_dir, "b", "corpus")
    bucket.lives_for = 7  # the footers of both splits, and what is read of them at the start
    process = warm_ranks(2).call(elsewhere.main, last_of_each(
        *tiny, "--data_dir=gs://b/corpus/train", "--val_dir=gs://b/corpus/val"), **bucket.environment, OUTAGE_S="0.5")
    assert process.returncode == EXIT_STATUS, process.stderr
    assert "       data  0.00" in process.stdout
    assert "error: gs://b/corpus/" in process.stderr and "has not been reached for" in process.stderr
    assert "Traceback" not in process.stderr
