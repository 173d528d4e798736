"""The compile cache, with the torch_xla that is installed."""
import json
import os
import subprocess
import sys

import pytest

from nanochat import compile_cache

TIMEOUT_S = 300


@pytest.fixture(autouse=True)
def cache_is_wanted(monkeypatch):
    monkeypatch.delenv("NANOCHAT_COMPILE_CACHE")
    monkeypatch.delenv("XLA_PERSISTENT_CACHE_PATH", raising=False)


def prepare(device_type="xla"):
    said = []
    compile_cache.prepare(device_type, report=said.append)
    return said


@pytest.mark.skipif(compile_cache._version() != "2.9.0", reason="another torch_xla may well load what it stored")
def test_torch_xla_2_9_0_cannot_load_what_it_stored_and_is_asked_once(base_dir, monkeypatch):
    assert prepare()[-1] == "compile cache: off, because torch_xla 2.9.0 cannot load what it stores"
    assert "XLA_PERSISTENT_CACHE_PATH" not in os.environ
    monkeypatch.setattr(sys, "executable", "/nowhere/python")  # a second probe would fail
    assert prepare() == ["compile cache: off, because torch_xla 2.9.0 cannot load what it stores"]


def test_a_probe_that_fails_leaves_the_cache_off_and_is_tried_again(base_dir, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    for _ in range(2):
        assert "off, because the probe failed" in prepare()[-1] and "/nowhere/python" in prepare()[-1]
    assert "XLA_PERSISTENT_CACHE_PATH" not in os.environ


def test_the_oldest_programs_make_room(tmp_path):
    for rank in (0, 1):
        (tmp_path / f"rank_{rank}").mkdir()
        for age in range(3):
            path = tmp_path / f"rank_{rank}" / str(age)
            path.write_bytes(bytes(100))
            os.utime(path, (1e9 - 10 * age - rank,) * 2)
    assert compile_cache.prune(tmp_path, 250) == 200
    assert [path.name for path in tmp_path.glob("rank_*/*")] == ["0", "0"]


def test_each_rank_that_is_a_process_has_a_folder_of_its_own(base_dir):
    base_dir.mkdir()
    (base_dir / "xla_cache").mkdir()
    compile_cache.remember("tpu", True)
    assert prepare("tpu") == [f"compile cache: on, 0 MB in {base_dir}/xla_cache"]
    compile_cache.use_folder_of(5)
    assert os.environ.pop("XLA_PERSISTENT_CACHE_PATH") == f"{base_dir}/xla_cache/rank_5"


@pytest.mark.slow
@pytest.mark.skipif(compile_cache._version() != "2.9.0", reason="another torch_xla may well load what it stored")
def test_a_run_that_cannot_load_what_the_one_before_stored_switches_the_cache_off(base_dir, byte_tokenizer_dir):
    """As if the probe had said yes, which is what a TPU would see whose own part fails."""
    (base_dir / "xla_cache").mkdir(parents=True)
    compile_cache.remember("xla", True)
    environment = {key: value for key, value in os.environ.items() if key != "PJRT_DEVICE"}
    command = [sys.executable, "-m", "scripts.base_train", "--device_type=xla", "--depth=2", "--model_dim=64",
               "--num_heads=2", "--max_seq_len=32", "--synthetic_data", "--device_batch_size=2", "--num_iterations=2",
               "--total_batch_size=128", "--eval_every=-1", "--sample_every=-1", "--save_every=-1", "--resume=never",
               f"--tokenizer_dir={byte_tokenizer_dir}"]
    outputs = [subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True,
                              env={**environment, "CPU_NUM_DEVICES": "2"}).stdout for _ in range(3)]
    assert "compile cache: on, 0 MB" in outputs[0] and "; loaded 0 from the compile cache" in outputs[0]
    assert len(list((base_dir / "xla_cache" / "rank_0").iterdir())) >= 2
    assert "compile cache: on" in outputs[1] and "could not be loaded, so the compile cache is off" in outputs[1]
    assert "compile cache: off, because torch_xla 2.9.0 cannot load what it stores" in outputs[2]
    assert not any(json.loads((base_dir / "xla_cache" / "can_load.json").read_text()).values())
