"""Runs that learn from a teacher."""
import pytest

from nanochat.checkpoint.on_disk import set_aside_after
from nanochat.common import BadInput
from nanochat.data.tokenizer import SHIPPED_DIR
from nanochat.train.flags import parse_flags
from nanochat.train.language import make_task
from nanochat.train.prepare import run_directory
from tests.conftest import LLAMA, last_of_each


@pytest.fixture
def teacher(train):
    """The name of a run of six steps, whose model is wider than its students."""
    train("--model_dim=128", "--save_every=6", "--device_type=cpu", "--device_batch_size=16", run="teacher")
    return "teacher"


@pytest.mark.parametrize("devices, kernel, model", [
    (2, "chunked", ()),
    pytest.param(1, "current", LLAMA, marks=pytest.mark.slow, id="llama")])  # of another model than its teacher
def test_a_student_resumes_bit_for_bit(train, teacher, devices, kernel, model):
    flags = [*model, "--teacher=teacher", "--kd_weight=0.8", f"--kernel={kernel}", "--save_every=3"]
    whole = train(*flags, run="student", devices=devices)
    assert "depth 2, width 128, weight 0.8 at temperature 1" in whole.stdout
    alone = train(*model, f"--kernel={kernel}", run="alone", devices=devices)
    assert whole.losses[1] != alone.losses[1]
    assert not any("recompiled" in record for record in whole.records)
    set_aside_after(whole.run_dir, 3)
    resumed = train(*flags, run="student", devices=devices)
    assert "step_000003" in resumed.stdout
    assert {step: resumed.losses[step] for step in (4, 5, 6)} == {step: whole.losses[step] for step in (4, 5, 6)}


def test_a_teacher_that_cannot_teach_is_refused(base_dir, tiny, teacher):
    def refusal(*flags, run="student"):
        flags = parse_flags(last_of_each(f"--run={run}", *tiny, *flags))
        with pytest.raises(BadInput) as error:
            make_task(flags, "cpu", 1, run_directory(flags))
        return str(error.value)

    assert "no checkpoint at nobody" in refusal("--teacher=nobody")
    assert "--kd_weight=0.8 needs a teacher" in refusal("--kd_weight=0.8")
    assert "is a checkpoint of this run" in refusal("--teacher=teacher", run="teacher")
    assert "sees 32 positions" in refusal("--teacher=teacher", "--max_seq_len=64")
    assert "another tokenizer" in refusal("--teacher=teacher", f"--tokenizer_dir={SHIPPED_DIR}")
    model = base_dir / "checkpoints/teacher/step_000006/model.safetensors"
    model.write_bytes(model.read_bytes()[:-1] + b"x")
    assert "is damaged" in refusal("--teacher=teacher")
