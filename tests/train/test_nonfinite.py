"""The count of non-finite steps."""
import math

import numpy as np
import torch

from nanochat.train.nonfinite import NonfiniteSteps


def test_the_batch_of_the_first_of_the_steps_in_a_row_is_written(tmp_path):
    steps = NonfiniteSteps(limit=2)
    for step, loss in enumerate((math.nan, 1.0, math.inf, math.nan), start=1):
        assert steps.add(step, loss, 1.0, [torch.full((2, 3), step)]) == (not math.isfinite(loss))
    assert steps.are_too_many and steps.counts() == {"total": 3, "in_a_row": 2}
    directory = steps.write_first_batch(tmp_path, rank=1)
    assert directory.name == "bad_step_000003"
    assert np.load(directory / "rank_001.npy").tolist() == [[3, 3, 3], [3, 3, 3]]


def test_a_run_that_resumes_with_a_lower_limit_than_its_count_ends_without_a_batch(tmp_path):
    steps = NonfiniteSteps(limit=3, total=5, in_a_row=5)
    assert steps.are_too_many and steps.write_first_batch(tmp_path, rank=0) is None
