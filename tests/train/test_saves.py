"""When a rank saves, what it hands over, and what is on disk after it."""
from types import SimpleNamespace

import pytest
import torch

from nanochat.checkpoint.on_disk import list_checkpoints
from nanochat.checkpoint.pieces import load_checkpoint
from nanochat.device.ranks import Dist
from nanochat.train.flags import RecordFlags
from nanochat.train.saves import Saves
from tests.checkpoint.states import make_meta, make_state


class Training:
    """As a TrainingStep, with a fixed state."""

    def __init__(self):
        self.state = make_state()

    def sizes(self):
        return [{name: tensor.nbytes for name, tensor in part.items()} for part in self.state]

    def host_state(self, names):
        return [{name: tensor for name, tensor in part.items() if name in names} for part in self.state]


@pytest.fixture
def saves(tmp_path):
    def make(step=0, **record):
        run = SimpleNamespace(directory=tmp_path, link=None, mirror=None, checkpoint=None,
                              flags=SimpleNamespace(record=RecordFlags(**record)),
                              task=SimpleNamespace(num_lanes=2, source_zip=None))
        return Saves(run, Dist("cpu", torch.device("cpu")), step, SimpleNamespace(flush=lambda: None))

    return make


def save(saves, step):
    saves.save(step, {0: {"at": step}, 1: {}}, Training(), make_meta(step))


def test_a_state_is_saved_once_and_whole(saves, tmp_path):
    saver, training = saves(), Training()
    for step in (3, 3):
        save(saver, step)
    assert saver.finish(lambda: False) and saver.finish_mirror(lambda: False)
    saver.check()
    [path] = list_checkpoints(tmp_path)
    found = load_checkpoint(path)
    assert found.meta.step == 3 and found.lane_states[0] == {"at": 3}
    for expected, state in zip(training.state, (found.model_state, found.optimizer_state), strict=True):
        assert expected.keys() == state.keys() and all(torch.equal(state[name], expected[name]) for name in expected)


def test_the_state_that_a_run_resumes_from_is_not_saved_again(saves, tmp_path):
    saver = saves(step=3)
    save(saver, 3)
    assert saver.finish(lambda: False) and not list_checkpoints(tmp_path)
