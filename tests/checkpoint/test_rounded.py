"""A state at the notice of a preemption: a third of the bytes, in the mirror before everything else."""
import json
import time

import torch

from nanochat.checkpoint import rounded
from nanochat.checkpoint.mirror import Mirror, run_mirror
from nanochat.checkpoint.on_disk import MODEL, Kept
from nanochat.checkpoint.pieces import Layout, load_checkpoint, load_tensors, sizes_of
from nanochat.checkpoint.saver import Saver
from nanochat.data import storage
from tests.checkpoint.states import Training, make_meta, save, saves_of
from tests.deploy.conftest import eventually


def make_state(rows=16):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    model = {"matrix": normal(2, rows, 64), "table": normal(rows, 64), "scalars": normal(3)}
    state = {}
    for name, weight in model.items():
        state[f"{name}.momentum"] = normal(*weight.shape) * 1e-4
        state[f"{name}.second_moment"] = normal(*weight.shape).square() * 1e-10
    state["matrix.second_moment"] = state["matrix.second_moment"][:, :, :1].contiguous()
    state["table.second_moment"][0] = 0  # a token that has never been seen
    state["carry.state"] = normal(4, 8)
    return model, state


def test_a_rounded_state_has_a_third_of_the_bytes_and_is_near():
    model, state = make_state(rows=256)
    weights, averages = rounded.round_state(model, state)
    total = sum(sizes_of(weights | averages).values())
    assert total < 0.4 * sum(sizes_of(model | state).values())
    found = rounded.restored(weights) | rounded.restored(averages)
    assert found.keys() == (model | state).keys()
    for name, tensor in (model | state).items():
        assert found[name].dtype == torch.float32 and (found[name] - tensor).norm() <= 0.06 * tensor.norm(), name
    assert torch.equal(found["carry.state"], state["carry.state"])


def test_no_average_of_squares_above_0_becomes_0():
    """An update is divided by its root, so it would be infinite."""
    tensor = torch.tensor([[1.0, 1e-30, 0.0]])
    _, averages = rounded.round_state({}, {"a.second_moment": tensor})
    found = rounded.restored(averages)["a.second_moment"]
    assert found[0, 1] >= 1e-30 and found[0, 2] == 0


def test_the_layout_of_a_rounded_state_has_its_names_and_about_its_bytes():
    model, state = make_state(rows=256)
    layout = Layout.of(sizes_of(model), sizes_of(state), 2**15).rounded()
    names = {name for sizes in layout.files.values() for name in sizes}
    weights, averages = rounded.round_state(model, state)
    assert names == (weights | averages).keys() and len(layout.files) > 2
    total = sum(sizes_of(weights | averages).values())
    assert 0.9 * total <= layout.num_bytes <= total


def preempted(run_dir, mirror, training=None, step=3):
    """Returns the Saves of a run that gets the notice of a preemption at `step`."""
    saves = saves_of(run_dir, mirror)
    saves.save(step, {0: {"at": step}, 1: {}}, training or Training(make_state()), make_meta(step), is_preempted=True)
    return saves


def test_a_preempted_run_that_ends_at_the_step_of_its_save_gathers_its_state_once(run_dir, tmp_path):
    training = Training(make_state())
    saves = preempted(run_dir, Mirror(str(tmp_path / "mirror"), Kept(1)), training)
    saves.save(3, {0: {"at": 3}, 1: {}}, training, make_meta(3), is_preempted=True)
    assert training.gathered == 1
    saves.finish(lambda: False)
    saves.finish_mirror(lambda: False)


def test_the_rounded_state_is_in_the_mirror_first_and_the_whole_one_replaces_it(run_dir, tmp_path, capsys):
    mirror = Mirror(str(tmp_path / "mirror"), Kept(1))
    saves = preempted(run_dir, mirror)
    assert saves.finish(lambda: False) and saves.finish_mirror(lambda: False)
    printed = capsys.readouterr().out
    assert printed.index("copied step_000003, rounded") < printed.index("copied step_000003 to")
    assert mirror.whole_copies() == ["step_000003"] and not saves._memory.exists()


def test_a_new_vm_resumes_from_the_rounded_state(run_dir, tmp_path, capsys, monkeypatch):
    mirror = Mirror(str(tmp_path / "mirror"), Kept(1))
    monkeypatch.setattr(Saver, "save", lambda *_: None)  # the VM ends before the whole state is on its disk
    assert preempted(run_dir, mirror).finish_mirror(lambda: False)
    assert mirror.whole_copies() == ["step_000003.rounded"]
    path = mirror.fetch(tmp_path / "new")
    assert path.name == "step_000003" and "not bit for bit" in capsys.readouterr().out
    found = load_checkpoint(path)
    assert found.lane_states[0] == {"at": 3} and found.meta.step == 3
    for name, weight in make_state()[0].items():
        assert torch.equal(load_tensors(path, MODEL)[name], weight.bfloat16().float())


def test_a_copy_in_progress_makes_way_for_the_rounded_state(run_dir, bucket, monkeypatch, capsys):
    """The bucket takes 1 s for each MB of an earlier, large checkpoint."""
    mirror = run_mirror("gs://b", "run", Kept(1))
    content = storage._content

    def slowly(path, digest, is_cancelled):
        for part in content(path, digest, is_cancelled):
            time.sleep(0 if "nanochat_" in str(path) else 1)
            yield part

    monkeypatch.setattr(storage, "_content", slowly)
    path = save(run_dir, 1)
    with open(path / "optimizer.safetensors", "ab") as file:
        file.write(bytes(60 << 20))
    saves = saves_of(run_dir, mirror, checkpoint=path)
    eventually(lambda: any("POST" in request for request in bucket.requests))
    saves.save(3, {0: {"at": 3}, 1: {}}, Training(make_state()), make_meta(3), is_preempted=True)
    eventually(lambda: "step_000003.rounded" in mirror.whole_copies(), 40)
    assert "step_000001 waits" in capsys.readouterr().out
    assert json.loads((run_dir / "mirror.json").read_text())["newest_copied"] is None
    assert saves.finish_mirror(lambda: False) and mirror.whole_copies() == ["step_000003"]


def test_weights_that_are_not_finite_never_reach_the_mirror(run_dir, tmp_path):
    training = Training(make_state())
    training.state[0]["table"][0, 0] = float("nan")
    mirror = Mirror(str(tmp_path / "mirror"), Kept(1))
    saves = preempted(run_dir, mirror, training)
    saves.finish(lambda: False)
    saves.finish_mirror(lambda: False)
    assert mirror.whole_copies() == []
