"""When a rank saves, what it hands over, and what is on disk after it."""
from types import SimpleNamespace

import torch

from nanochat.checkpoint.on_disk import list_checkpoints
from nanochat.checkpoint.pieces import load_checkpoint, sizes_of
from nanochat.device.ranks import Dist
from nanochat.train.flags import RecordFlags
from nanochat.train.saves import Saves
from tests.checkpoint.states import assert_holds, make_meta, make_state


class Training:
    """As a TrainingStep, with a fixed state."""

    def __init__(self):
        self.state = make_state()

    def sizes(self):
        return map(sizes_of, self.state)

    def host_state(self, names):
        return [{name: tensor for name, tensor in part.items() if name in names} for part in self.state]


def test_a_state_is_saved_once_and_whole_and_not_if_the_run_resumes_from_it(tmp_path):
    run = SimpleNamespace(directory=tmp_path, link=None, mirror=None, checkpoint=None,
                          flags=SimpleNamespace(record=RecordFlags()),
                          task=SimpleNamespace(num_lanes=2, source_zip=None))
    training = Training()
    for resumed_step, saved in ((3, []), (0, ["step_000003"])):
        saver = Saves(run, Dist("cpu", torch.device("cpu")), resumed_step, SimpleNamespace(flush=lambda: None))
        for _ in range(2):
            saver.save(3, {0: {"at": 3}, 1: {}}, training, make_meta(3))
        assert saver.finish(lambda: False) and saver.finish_mirror(lambda: False)
        saver.check()
        assert [path.name for path in list_checkpoints(tmp_path)] == saved
    found = load_checkpoint(tmp_path / "step_000003")
    assert found.meta.step == 3 and found.lane_states[0] == {"at": 3}
    assert_holds(found, training.state)
