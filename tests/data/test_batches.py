"""Runs see the same batches, whatever number of devices reads them, through stops, and past a corrupt shard."""
import pyarrow.parquet as pq
import pytest

from nanochat.checkpoint.on_disk import list_checkpoints
from nanochat.run.stopping import EXIT_STATUS
from nanochat.train.prepare import REQUESTS_FILE
from tests.conftest import last_of_each
from tests.data import hash_batches
from tests.data.test_shards import damage

STEPS, ROWS_PER_STEP = 48, 16
HASHES_OF_WHOLE = {}  # flags -> the hashes of a run that was not interrupted
FIM_FLAGS = ("--fim_rate=0.5",)


def flags_of(name, tokenizer_dir, data_dir, *flags):
    return last_of_each(
        f"--run={name}", "--device_type=xla", "--depth=1", "--model_dim=64", "--num_heads=2", "--max_seq_len=128",
        "--device_batch_size=4", f"--total_batch_size={ROWS_PER_STEP * 128}", f"--num_iterations={STEPS}",
        "--eval_every=-1", "--sample_every=-1", "--save_every=1000", "--log_every=100",
        f"--tokenizer_dir={tokenizer_dir}", f"--data_dir={data_dir}", *flags)


@pytest.fixture
def whole(byte_tokenizer_dir, corpus_dir, warm_ranks, tmp_path):
    """Returns the hashes of an uninterrupted run with these flags on two devices, which tests of two files share."""
    def run(*flags):
        if flags not in HASHES_OF_WHOLE:
            process = warm_ranks(2).call(
                hash_batches.main, flags_of("whole", byte_tokenizer_dir, corpus_dir / "train", *flags),
                HASHES=str(tmp_path / "whole"))
            assert process.returncode == 0, process.stderr
            HASHES_OF_WHOLE[flags] = hashes(tmp_path / "whole")
        return HASHES_OF_WHOLE[flags]

    return run


@pytest.fixture
def train(byte_tokenizer_dir, corpus_dir, tmp_path, base_dir, warm_ranks):
    """Runs hash_batches, which is asked to stop after step `stop_at`, and returns exit status, output and the step of
    the newest checkpoint. The hashes are in tmp_path / name."""

    def run(name, *flags, devices=2, stop_at=None, data_dir=corpus_dir / "train"):
        run_dir = base_dir / "checkpoints" / name
        stop_at_row = -1 if stop_at is None else stop_at * ROWS_PER_STEP
        process = warm_ranks(devices).call(
            hash_batches.main, flags_of(name, byte_tokenizer_dir, data_dir, *flags), HASHES=str(tmp_path / name),
            STOP_AT_ROW=str(stop_at_row), REQUESTS=str(run_dir / REQUESTS_FILE))
        done = list_checkpoints(run_dir)
        return (process.returncode, process.stdout + process.stderr,
                int(done[-1].name.removeprefix("step_")) if done else 0)

    return run


def hashes(path):
    """The hash of every row of the run, in their order. None was read twice, and none left out."""
    rows = sorted(tuple(map(int, line.split())) for line in path.read_text().splitlines())
    assert [number for number, _ in rows] == list(range(STEPS * ROWS_PER_STEP))
    return [value for _, value in rows]


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), FIM_FLAGS], ids=["plain", "fim"])
def test_a_run_on_two_devices_then_one_then_four_sees_the_same_batches_at_every_step(train, whole, tmp_path, flags):
    status, _, first = train("parts", *flags, devices=2, stop_at=8)
    assert status == EXIT_STATUS and 8 <= first
    status, output, second = train("parts", *flags, devices=1, stop_at=24)
    assert status == EXIT_STATUS and first < second < STEPS and "resuming from" in output
    status, output, last = train("parts", *flags, devices=4)
    assert status == 0 and last == STEPS and "resuming from" in output
    expected, found = whole(*flags), hashes(tmp_path / "parts")
    for step in range(STEPS):
        rows = slice(step * ROWS_PER_STEP, (step + 1) * ROWS_PER_STEP)
        assert found[rows] == expected[rows], f"step {step + 1}"
    assert len(set(expected)) > 200  # rows differ, though every header begins with the same licence


@pytest.mark.slow
def test_a_corrupt_row_group_ends_a_run(train, tmp_path, corpus_dir):
    data_dir = tmp_path / "data"
    data_dir.mkdir()
    for path in (corpus_dir / "train").glob("*.parquet"):  # with checksums, as prepare_data writes them
        pq.write_table(pq.read_table(path), data_dir / path.name, row_group_size=8, write_page_checksum=True)
    damage(data_dir / "shard_00001.parquet", 1, 1000, b"?")
    status, output, _ = train("stops", data_dir=data_dir)
    assert status == 2 and "error: " in output and "shard_00001.parquet: row group 1 cannot be read" in output
