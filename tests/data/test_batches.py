"""A run sees the same batches, whatever number of devices reads them, and through stops."""
import pytest

from nanochat.checkpoint.on_disk import list_checkpoints
from nanochat.run.stopping import EXIT_STATUS
from nanochat.train.prepare import REQUESTS_FILE
from tests.data import hash_batches

STEPS, ROWS_PER_STEP = 48, 16


def hashes(path):
    """The hash of every row of the run, in their order. None was read twice, and none left out."""
    rows = sorted(tuple(map(int, line.split())) for line in path.read_text().splitlines())
    assert [number for number, _ in rows] == list(range(STEPS * ROWS_PER_STEP))
    return [value for _, value in rows]


@pytest.mark.slow
@pytest.mark.parametrize("fim_rate", ["0", "0.5"])
def test_a_run_on_two_devices_then_one_then_four_sees_the_same_batches_at_every_step(
        byte_tokenizer_dir, corpus_dir, tmp_path, base_dir, warm_ranks, fim_rate):
    def train(name, devices, stop_at_row=-1):
        """Runs hash_batches; returns its status and output, and the step of the newest checkpoint."""
        run_dir = base_dir / "checkpoints" / name
        was_begun = run_dir.exists()
        flags = [f"--run={name}", "--device_type=xla", "--depth=1", "--model_dim=64", "--num_heads=2",
                 "--max_seq_len=128", "--device_batch_size=4", f"--total_batch_size={ROWS_PER_STEP * 128}",
                 f"--num_iterations={STEPS}", "--eval_every=-1", "--sample_every=-1", "--save_every=1000",
                 "--log_every=100", f"--tokenizer_dir={byte_tokenizer_dir}", f"--data_dir={corpus_dir}/train",
                 f"--fim_rate={fim_rate}"]
        process = warm_ranks(devices).call(hash_batches.main, flags, HASHES=str(tmp_path / name),
                                           STOP_AT_ROW=str(stop_at_row), REQUESTS=str(run_dir / REQUESTS_FILE))
        output = process.stdout + process.stderr
        assert ("resuming from" in output) == was_begun, output
        return process.returncode, int(list_checkpoints(run_dir)[-1].name.removeprefix("step_"))

    status, first = train("parts", 2, stop_at_row=8 * ROWS_PER_STEP)
    assert status == EXIT_STATUS and 8 <= first
    status, second = train("parts", 1, stop_at_row=24 * ROWS_PER_STEP)
    assert status == EXIT_STATUS and first < second < STEPS
    assert train("parts", 4) == train("whole", 2) == (0, STEPS)
    expected, found = hashes(tmp_path / "whole"), hashes(tmp_path / "parts")
    for begin in range(0, STEPS * ROWS_PER_STEP, ROWS_PER_STEP):
        rows = slice(begin, begin + ROWS_PER_STEP)
        assert found[rows] == expected[rows], f"step {begin // ROWS_PER_STEP + 1}"
    assert len(set(expected)) > 200  # rows differ, though every header begins with the same licence
