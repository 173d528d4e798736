"""Runs that learn from a teacher."""
import pytest

from nanochat.common import BadInput, get_base_dir
from nanochat.data.tokenizer import SHIPPED_DIR
from nanochat.device.ranks import resolve_device_type
from nanochat.train.flags import parse_flags
from nanochat.train.language import make_task
from nanochat.train.prepare import prepare
from tests.conftest import LLAMA, last_of_each


@pytest.fixture
def teacher(train):
    """The name of a run of six steps, whose model is wider than its students."""
    train("--model_dim=128", "--save_every=6", "--device_type=cpu", run="teacher")  # where nothing is compiled
    return "teacher"


@pytest.mark.parametrize("devices, kernel, model", [
    (2, "chunked", ()), pytest.param(1, "current", (), marks=pytest.mark.slow),
    pytest.param(2, "chunked", LLAMA, marks=pytest.mark.slow, id="llama")])  # of another model than its teacher
def test_a_student_resumes_bit_for_bit(train, teacher, devices, kernel, model):
    flags = [*model, "--teacher=teacher", "--kd_weight=0.8", f"--kernel={kernel}", "--save_every=1"]
    whole = train(*flags, run="student", devices=devices)
    assert "depth 2, width 128, weight 0.8 at temperature 1" in whole.stdout
    alone = train(*model, f"--kernel={kernel}", run="alone", devices=devices)
    assert whole.losses[1] != alone.losses[1]
    recompiled = [record["recompiled"] for record in whole.records if "recompiled" in record]
    assert not recompiled
    for step in (2, 4):
        run_dir = get_base_dir() / "checkpoints" / "student"
        for path in sorted(run_dir.glob("step_*"))[step:]:
            path.rename(get_base_dir() / f"aside_{step}_{path.name}")
        (run_dir / ".finished").unlink()
        resumed = train(*flags, run="student", devices=devices)
        assert {s: resumed.losses[s] for s in range(step + 1, 7)} == {s: whole.losses[s] for s in range(step + 1, 7)}


def test_a_teacher_that_cannot_teach_is_refused(base_dir, tiny, teacher):
    def refusal(*flags, run="student"):
        with pytest.raises(BadInput) as error:
            prepare(parse_flags(last_of_each(f"--run={run}", *tiny, *flags)), resolve_device_type("cpu"), make_task)
        return str(error.value)

    assert "no checkpoint at nobody" in refusal("--teacher=nobody")
    assert "--kd_weight=0.8 needs a teacher" in refusal("--kd_weight=0.8")
    assert "is a checkpoint of this run" in refusal("--teacher=teacher", run="teacher")
    assert "sees 32 positions" in refusal("--teacher=teacher", "--max_seq_len=64")
    assert "another tokenizer" in refusal("--teacher=teacher", f"--tokenizer_dir={SHIPPED_DIR}")
    model = base_dir / "checkpoints/teacher/step_000006/model.safetensors"
    model.write_bytes(model.read_bytes()[:-1] + b"x")
    assert "is damaged" in refusal("--teacher=teacher")
