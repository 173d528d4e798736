"""What base_train refuses before it trains, with one line that says what is wrong and what to do."""
import subprocess
import sys

import pytest

from nanochat.common import BadInput
from scripts.base_train import main
from tests.conftest import last_of_each
from tests.warm import TIMEOUT_S


@pytest.mark.parametrize("flags, words", [
    (["--kernel=warp"], "--kernel=warp .*choose current or chunked"),
    (["--kernel=flash", "--device_type=cpu"], "--kernel=flash .*choose current or chunked"),
    (["--window_pattern=Q"], "--window_pattern=Q"),
    (["--device_type=gpu"], "--device_type=gpu .*auto, tpu, xla, cuda, cpu"),
    (["--device_type=tpu"], "no TPU chips"),
    (["--tokenizer_dir=/nowhere"], "no tokenizer in /nowhere"),
    (["--data_dir=/nowhere"], "no train data: /nowhere"),
    (["--num_kv_heads=3"], "--num_kv_heads=3"),
    (["--val_dir=/nowhere", "--eval_every=-1"], "no val data: /nowhere"),
    (["--fim_rate=0.5"], "--fim_rate=0.5 needs rows .* --max_seq_len=32 is less than 64"),
    (["--fim_rate=0.5", "--max_seq_len=64", "--synthetic_data"], "--fim_rate=0.5 .* --synthetic_data"),
    (["--batch_size=8"], r"did you mean --device_batch_size \(rows .*\) or --total_batch_size \(tokens .*\)\?$"),
    (["--seq-len=64"], "--seq_len=64 is not a flag: did you mean --max_seq_len\\?$"),
])
def test_bad_flags_are_refused_with_the_value_and_what_to_do(tiny, flags, words):
    with pytest.raises(BadInput, match=words) as refusal:
        main(last_of_each(*tiny, *flags))
    assert "\n" not in str(refusal.value)


def test_bad_data_is_one_line_that_names_the_file_and_its_row_group(train, tmp_path, corpus_dir):
    damaged = bytearray((corpus_dir / "train" / "shard_00000.parquet").read_bytes())
    damaged[40:4000] = bytes(3960)  # in the pages of the first row group; the footer is whole
    (tmp_path / "shard_00000.parquet").write_bytes(damaged)
    said = train(f"--data_dir={tmp_path}", status=2).stderr
    assert "shard_00000.parquet: row group 0" in said and said.count("\n") == 1 and "Traceback" not in said


def test_a_resumed_run_keeps_its_architecture_and_its_data(train, tiny, corpus_dir):
    short = ["--window_pattern=SL", "--save_every=3", "--device_type=cpu"]
    train(*short, "--num_iterations=3")
    without = ("depth", "model_dim", "num_heads", "max_seq_len")
    resumed = train("--save_every=3", "--num_iterations=4", "--device_type=cpu", without=without)
    assert "step_000003" in resumed.stdout and "model_dim 64, num_heads 2" in resumed.stdout
    assert "window_pattern SL" in resumed.stdout
    (resumed.run_dir / "step_000004/meta.json").write_text("{")  # damaged: the one before it is used
    resumed = train("--save_every=3", "--num_iterations=5", "--device_type=cpu", without=without)
    assert "step_000003" in resumed.stdout and "model_dim 64, num_heads 2" in resumed.stdout
    for other, words in [(["--window_pattern=L"], "--window_pattern=L, .* has --window_pattern=SL"),
                         (["--window_pattern=SL", f"--data_dir={corpus_dir}/val"], "the hash of --data_dir is")]:
        with pytest.raises(BadInput, match=words):
            main(last_of_each(*tiny, "--run=test", "--num_iterations=8", *other))


def test_a_base_directory_that_cannot_be_written_is_refused(tiny, monkeypatch):
    monkeypatch.setenv("NANOCHAT_BASE_DIR", "/dev/null/base")
    with pytest.raises(BadInput, match="cannot write to /dev/null/base"):
        main(tiny)


def test_too_little_disk_for_two_checkpoints_is_said_before_the_first_step(base_dir, byte_tokenizer_dir):
    """On a file system of its own, of 3 MB, which a user namespace lets anyone mount."""
    base_dir.mkdir()
    command = (f"mount -t tmpfs -o size=3m tmpfs {base_dir} && exec {sys.executable} -m scripts.base_train "
               f"--device_type=cpu --depth=4 --synthetic_data --tokenizer_dir={byte_tokenizer_dir} --max_seq_len=32 "
               "--device_batch_size=2 --total_batch_size=64 --num_iterations=2")
    process = subprocess.run(["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", command],
                             capture_output=True, text=True, timeout=TIMEOUT_S)
    if "unshare" in process.stderr or "mount:" in process.stderr:
        pytest.skip(f"no user namespaces here: {process.stderr.strip()}")
    assert process.returncode == 2 and "too little disk" in process.stderr and "step 0" not in process.stdout
