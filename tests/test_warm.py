"""A warm process trains as a new one does, and an error in it is one of that run alone."""
import pytest

from nanochat.common import BadInput


@pytest.mark.slow
def test_a_warm_process_gives_the_bits_of_a_new_one_also_the_second_time(train):
    new = train(run="new", devices=2, new_process=("-m", "scripts.base_train"))
    for name in ("first", "second"):
        warm = train(run=name, devices=2)
        assert warm.losses == new.losses and warm.bpb == new.bpb and len(new.losses) == 6
        assert [line[:10] for line in warm.stdout.splitlines() if line.startswith("step")] == \
               [line[:10] for line in new.stdout.splitlines() if line.startswith("step")]


def fail(argv):
    raise {"bad input": BadInput, "error": RuntimeError}[argv[0]]("as asked")


def test_an_error_is_reported_as_by_a_script_and_the_next_call_is_served(warm_ranks):
    ranks = warm_ranks(2)
    refused = ranks.call(fail, ["bad input"])
    assert (refused.returncode, refused.stdout, refused.stderr) == (2, "", "error: as asked\n")
    failed = ranks.call(fail, ["error"])
    assert failed.returncode == 1 and "RuntimeError: as asked" in failed.stderr
    assert ranks.call(fail, ["bad input"]).returncode == 2
