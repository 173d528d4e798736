"""Real runs see the same batches, whatever number of devices reads them, through stops, and past a corrupt shard."""
import os
import signal
import subprocess
import sys

import pyarrow.parquet as pq
import pytest

from nanochat.run.checkpoint_files import list_checkpoints
from nanochat.run.stopping import EXIT_STATUS
from tests.data.test_shards import damage
from tests.scripts.test_base_train import TIMEOUT_S

STEPS, ROWS_PER_STEP = 120, 16


@pytest.fixture
def train(byte_tokenizer_dir, corpus_dir, tmp_path, base_dir):
    """Runs base_train, sends it SIGTERM at step `stop_at`; returns exit status, output and newest checkpoint."""

    def run(name, *flags, devices=2, stop_at=None, data_dir=corpus_dir / "train"):
        environment = {key: value for key, value in os.environ.items() if key != "PJRT_DEVICE"}
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.data.hash_batches", str(tmp_path / name), f"--run={name}",
             "--device_type=xla", "--depth=1", "--model_dim=64", "--num_heads=2", "--max_seq_len=32",
             "--device_batch_size=4", f"--total_batch_size={ROWS_PER_STEP * 32}", f"--num_iterations={STEPS}",
             "--eval_every=-1", "--sample_every=-1", "--save_every=1000", "--log_every=2",
             f"--tokenizer_dir={byte_tokenizer_dir}", f"--data_dir={data_dir}", *flags],
            env={**environment, "CPU_NUM_DEVICES": str(devices)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True)
        begin = ""
        for line in process.stdout if stop_at else ():
            begin += line
            if line.startswith(f"step {stop_at:05d}"):
                process.send_signal(signal.SIGTERM)
                break
        output = begin + process.communicate(timeout=TIMEOUT_S)[0]
        done = list_checkpoints(base_dir / "checkpoints" / name)
        return process.returncode, output, int(done[-1].name.removeprefix("step_")) if done else 0

    return run


def hashes(path):
    """The hash of every row of the run, in their order. None was read twice, and none left out."""
    rows = sorted(tuple(map(int, line.split())) for line in path.read_text().splitlines())
    assert [number for number, _ in rows] == list(range(STEPS * ROWS_PER_STEP))
    return [value for _, value in rows]


@pytest.mark.slow
def test_a_run_on_two_devices_then_one_then_four_sees_the_same_batches_at_every_step(train, tmp_path):
    assert train("whole")[0] == 0
    status, _, first = train("parts", devices=2, stop_at=20)
    assert status == EXIT_STATUS and 20 <= first
    status, output, second = train("parts", devices=1, stop_at=60)
    assert status == EXIT_STATUS and first < second < STEPS and "resuming from" in output
    status, output, last = train("parts", devices=4)
    assert status == 0 and last == STEPS and "resuming from" in output
    expected, found = hashes(tmp_path / "whole"), hashes(tmp_path / "parts")
    for step in range(STEPS):
        rows = slice(step * ROWS_PER_STEP, (step + 1) * ROWS_PER_STEP)
        assert found[rows] == expected[rows], f"step {step + 1}"
    assert len(set(expected)) > 200  # rows differ, though every header begins with the same licence


def test_a_corrupt_row_group_ends_a_run_unless_it_is_to_be_skipped(train, tmp_path, corpus_dir):
    data_dir = tmp_path / "data"
    data_dir.mkdir()
    for path in (corpus_dir / "train").glob("*.parquet"):  # with checksums, as prepare_data writes them
        pq.write_table(pq.read_table(path), data_dir / path.name, row_group_size=8, write_page_checksum=True)
    damage(data_dir / "shard_00001.parquet", 1, 1000, b"?")
    status, output, _ = train("stops", data_dir=data_dir)
    assert status == 2 and "error: " in output and "shard_00001.parquet: row group 1 cannot be read" in output
    assert "--skip_bad_shards" in output
    status, output, _ = train("skips", "--skip_bad_shards", data_dir=data_dir)
    assert status == 0, output
    assert output.count("warning: skipped what cannot be read: ") == 1
    assert len(hashes(tmp_path / "skips")) == STEPS * ROWS_PER_STEP
