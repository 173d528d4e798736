"""The run that survives everything: see chaos.py."""
import os
import subprocess
import sys

import pytest


def chaos(*flags, timeout_s):
    environment = {name: value for name, value in os.environ.items() if name != "NANOCHAT_BASE_DIR"}
    process = subprocess.run(["timeout", str(timeout_s), sys.executable, "-m", "tests.run.chaos", *flags],
                             capture_output=True, text=True, env=environment)
    if "unshare" in process.stderr or "mount:" in process.stderr:
        pytest.skip(f"no user namespaces here: {process.stderr.strip()}")
    assert process.returncode == 0, process.stdout[-4000:] + process.stderr[-4000:]
    return process.stdout


@pytest.mark.slow
def test_every_kind_of_fault_once_changes_no_bit_of_a_run():
    """27 faults, each kind three times: python -m tests.run.chaos --interruptions=27, which takes ten minutes."""
    survived = chaos("--seed=1", "--interruptions=9", "--steps=130", "--every=2", timeout_s=1500)
    assert survived.count("   1 × ") == 9 and "9 interruptions survived" in survived
