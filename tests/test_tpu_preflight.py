"""The preflight as a person runs it, with the real TPU compiler."""
import importlib.util
import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(not (importlib.util.find_spec("libtpu") and importlib.util.find_spec("jax")),
                                reason="needs libtpu and jax: pip install '.[tpu]'")


@pytest.fixture
def preflight(tmp_path):
    """Runs tpu_preflight and returns the process; `.report` is what it wrote as JSON."""

    def run(*flags, status=0, timeout_s=300):
        environment = {key: value for key, value in os.environ.items()
                       if key not in ("PJRT_DEVICE", "CPU_NUM_DEVICES", "LIBTPU_INIT_ARGS")}
        path = tmp_path / "report.json"
        process = subprocess.run([sys.executable, "-m", "scripts.tpu_preflight", f"--json={path}", *flags],
                                 capture_output=True, text=True, timeout=timeout_s, env=environment)
        assert process.returncode == status, process.stdout[-2000:] + process.stderr[-4000:]
        process.report = json.loads(path.read_text()) if path.exists() else None
        return process

    return run


@pytest.fixture
def tiny(byte_tokenizer_dir):
    return ["--depth=2", "--model_dim=128", "--num_heads=1", "--max_seq_len=128", "--device_batch_size=1",
            "--total_batch_size=1024", "--num_iterations=10", f"--tokenizer_dir={byte_tokenizer_dir}"]


def test_a_tiny_run_is_compiled_for_four_chips_and_fits(preflight, tiny):
    report = preflight("--accelerator=v5litepod-4", "--kernel=current", *tiny).report
    assert report["fits"] and sorted(report["programs"]) == ["evaluate", "micro_step", "update"]
    update, micro = report["programs"]["update"], report["programs"]["micro_step"]
    gradients = report["memory"]["gradients"]
    assert update["collectives"]["all-reduce"][1] >= gradients and not micro["collectives"]
    assert update["alias_bytes"] >= report["memory"]["weights"] + report["memory"]["optimizer"]
    assert micro["alias_bytes"] >= gradients
    assert micro["runs_per_step"] == 2 and report["estimate"]["tokens_per_s"] > 0
    assert any(line["source"].startswith("nanochat/gpt.py:") for line in micro["top_operations"])


def test_bad_flags_are_refused_in_one_line(preflight, tiny):
    for flags, message in ((["--accelerator=v9-8"], "accelerator 'v9-8' is unknown"),
                           (["--accelerator=v6e-4", "--programs=backward"], "--programs=backward is unknown"),
                           (["--accelerator=v6e-4", "--depth=0"], "--depth=0 must be at least 1")):
        process = preflight(*tiny, *flags, status=2)
        assert message in process.stderr and process.stderr.count("error:") == 1
