"""Tests see no base directory, no WandB and no TPU but their own."""
import os
from pathlib import Path

# Before anything imports torch_xla: one XLA device, on the CPU, in the process that runs the tests.
os.environ["PJRT_DEVICE"] = "CPU"
os.environ["CPU_NUM_DEVICES"] = "1"
os.environ["WANDB_MODE"] = "offline"

import pytest  # noqa: E402
import torch_xla  # noqa: E402

torch_xla.device()  # PyTorch's autograd engine counts the devices at the first backward pass and never again


@pytest.fixture(autouse=True)
def base_dir(tmp_path, monkeypatch):
    """An empty $NANOCHAT_BASE_DIR for each test."""
    path = tmp_path / "base"
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(path))
    return path


@pytest.fixture(scope="session")
def byte_tokenizer_dir(tmp_path_factory):
    """A tokenizer of the 256 bytes and the special tokens: models with it are small."""
    from nanochat.data.tokenizer import SPECIAL_TOKENS, Tokenizer
    path = tmp_path_factory.mktemp("byte_tokenizer")
    ranks = {bytes([byte]): byte for byte in range(256)}
    Tokenizer(ranks, r"[^\n]+|\n", {name: 256 + i for i, name in enumerate(SPECIAL_TOKENS)}).save(path)
    return path


@pytest.fixture(scope="session")
def corpus_dir(tmp_path_factory):
    """Parquet shards of real C++ (headers that pyarrow installs): `train/` with two files, `val/` with one."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    path = tmp_path_factory.mktemp("corpus")
    headers = sorted(Path(pa.get_include()).glob("arrow/**/*.h"))
    texts = [header.read_text() for header in headers]
    for name, part in (("train/shard_00000", texts[:30]), ("train/shard_00001", texts[30:60]),
                       ("val/shard_00000", texts[60:70])):
        (path / name).parent.mkdir(exist_ok=True)
        pq.write_table(pa.table({"text": part}), path / f"{name}.parquet", row_group_size=8, compression="zstd")
    return path
