"""base_train and base_eval with --data_dir=gs://… end where they end with the same data on disk."""
import json

import pytest

from nanochat.run.stopping import EXIT_STATUS
from scripts import base_eval
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


@pytest.mark.slow
def test_a_run_from_a_bucket_has_the_losses_and_evaluations_of_one_from_disk(
        bucket, corpus_dir, tiny, base_dir, warm_ranks, capsys):  # noqa: F811
    bucket.copy(corpus_dir, "b", "corpus")
    found = []
    for place, run in ((corpus_dir, "disk"), ("gs://b/corpus", "bucket")):
        process = warm_ranks(2).call(elsewhere.main, last_of_each(
            *tiny, "--save_every=6", f"--data_dir={place}/train", f"--val_dir={place}/val", f"--run={run}"),
            **bucket.environment)
        assert process.returncode == 0, process.stderr
        lines = map(json.loads, (base_dir / "checkpoints" / run / "metrics.jsonl").read_text().splitlines())
        found.append([tuple(map(line.get, ("step", "loss", "val_bpb"))) for line in lines])
    assert found[0] == found[1] and any(bpb for _, _, bpb in found[0])
    printed = []
    for place in (corpus_dir, "gs://b/corpus"):
        base_eval.main([f"--data_dir={place}/val", "--checkpoint=bucket", "--device_type=cpu", "--eval_tokens=4096",
                        next(flag for flag in tiny if "tokenizer_dir" in flag)])
        printed.append(capsys.readouterr().out.splitlines())
    assert printed[0][-1] == printed[1][-1] and "bits per byte" in printed[0][-1]
    assert printed[1][0].startswith("data: ") and "gs://b/corpus/val" in printed[1][0]
