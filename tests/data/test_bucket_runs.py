"""base_train and base_eval with --data_dir=gs://… end where they end with the same data on disk."""
import json

import pytest

from nanochat.run.stopping import EXIT_STATUS
from scripts import base_eval
from tests.buckets import bucket, gcloud  # noqa: F401
from tests.conftest import last_of_each
from tests.data import impatient


@pytest.fixture
def storage(bucket, corpus_dir):  # noqa: F811
    """gs://b/corpus, with the folders train and val."""
    bucket.copy(corpus_dir, "b", "corpus")
    return bucket


def flags_of(place, run):
    return f"--data_dir={place}/train", f"--val_dir={place}/val", f"--run={run}"


def records(base_dir, run, *names):
    """The values of these names in all lines of the run's metrics that have them."""
    lines = map(json.loads, (base_dir / "checkpoints" / run / "metrics.jsonl").read_text().splitlines())
    return [tuple(line.get(name) for name in names) for line in lines]


@pytest.mark.slow
def test_a_run_from_a_bucket_has_the_losses_and_evaluations_of_one_from_disk(storage, corpus_dir, tiny, base_dir,
                                                                           warm_ranks, capsys):
    for place, run in ((corpus_dir, "disk"), ("gs://b/corpus", "bucket")):
        process = warm_ranks(2).call(impatient.main, last_of_each(*tiny, "--save_every=6", *flags_of(place, run)),
                                     **storage.environment)
        assert process.returncode == 0, process.stderr
    assert "       data  0.00" in process.stdout
    assert " GB in gs://b/corpus/train and gs://b/corpus/val; a cache of up to 20 GB in " \
        f"{base_dir}/bucket_cache, where " in process.stdout
    found = records(base_dir, "bucket", "step", "loss", "val_bpb")
    assert found == records(base_dir, "disk", "step", "loss", "val_bpb") and any(bpb for _, _, bpb in found)
    lines = []
    for place in (corpus_dir, "gs://b/corpus"):
        base_eval.main([f"--data_dir={place}/val", "--checkpoint=bucket", "--device_type=cpu", "--eval_tokens=4096",
                        next(flag for flag in tiny if "tokenizer_dir" in flag)])
        lines.append(capsys.readouterr().out.splitlines())
    assert lines[0][-1] == lines[1][-1] and "bits per byte" in lines[0][-1]
    assert lines[1][0].startswith("data: ") and "gs://b/corpus/val" in lines[1][0]


def test_a_bucket_that_is_gone_while_a_run_trains_ends_it_with_one_line_and_status_75(storage, tiny, warm_ranks):
    storage.lives_for = 7  # the footers of both splits, and what is read of them at the start
    process = warm_ranks(2).call(impatient.main, last_of_each(*tiny, *flags_of("gs://b/corpus", "gone")),
                                 **storage.environment)
    assert process.returncode == EXIT_STATUS, process.stderr
    assert "error: gs://b/corpus/" in process.stderr and "has not been reached for" in process.stderr
    assert "Traceback" not in process.stderr
