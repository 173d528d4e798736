"""Which checkpoint a name stands for."""
import os

import pytest

from nanochat.common import BadInput
from nanochat.infer.load import find_checkpoint
from tests.run.states import save


def test_a_checkpoint_is_found_by_path_by_run_and_as_the_newest(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    with pytest.raises(BadInput, match="there is no checkpoint in"):
        find_checkpoint()
    runs = tmp_path / "checkpoints"
    first, second = save(runs / "old", 1), save(runs / "old", 2)
    newest = save(runs / "new", 1)
    os.utime(first, (1, 1))
    os.utime(second, (2, 2))
    assert find_checkpoint() == newest
    assert find_checkpoint("old") == second
    assert find_checkpoint("old/step_000001") == first
    assert find_checkpoint(str(first)) == first
    with pytest.raises(BadInput, match="no checkpoint at nothing"):
        find_checkpoint("nothing")
