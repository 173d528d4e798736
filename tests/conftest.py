"""Tests see no base directory, no WandB and no TPU but their own."""
import os

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
