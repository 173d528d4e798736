"""The real WandB; each test runs it in another process, because it leaves threads and an exit handler behind."""
import os
import re
import socket
import subprocess
import sys

import pytest

from tests.record.test_metrics import read

WANDB_RUN = """
import sys
from nanochat.record import metrics
metrics.WANDB_TIMEOUT_S = 2
wandb = metrics.Reader("WandB", metrics.send_to_wandb, id="abcd1234", name="run", project="nanochat",
                       config={"depth": 4}, dir=sys.argv[1])
logger = metrics.MetricsLogger(sys.argv[1], readers=[wandb])
for step in range(1, 101):
    logger.log(step, {"loss": 87654000 + step})
for step in range(98, 101):  # as after a resume from a checkpoint of step 97: WandB has these already
    wandb.log({"step": step, "loss": 87655000 + step})
print(f"{wandb._queue.qsize()} records wait for WandB")
logger.close()
"""


def run_with_wandb(run_dir, **environment):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    done = subprocess.run([sys.executable, "-c", WANDB_RUN, str(run_dir)], text=True, timeout=60,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                          env={**clean, "HOME": str(run_dir), **environment})
    assert done.returncode == 0, done.stdout
    assert len(read(run_dir)) == 100
    return done.stdout


def test_wandb_offline_receives_the_run_under_its_id_and_steps_that_it_has_already(tmp_path):
    output = run_with_wandb(tmp_path, WANDB_MODE="offline")
    assert "warning" not in output
    [file] = tmp_path.glob("wandb/offline-run-*-abcd1234/run-abcd1234.wandb")
    assert f"wandb sync --id=abcd1234 '{tmp_path}/wandb'/offline-run-*-abcd1234" in output
    found = {int(loss) for loss in re.findall(rb"8765\d{4}", file.read_bytes())}
    assert found == {*range(87654001, 87654101), *range(87655098, 87655101)}


def test_wandb_without_a_login_is_one_plain_line(tmp_path):
    output = run_with_wandb(tmp_path)
    assert output.count("WandB gets no records: nobody has logged in here (wandb login)") == 1
    assert "warning" not in output and "UsageError" not in output


@pytest.mark.slow
def test_no_step_waits_for_a_wandb_server_that_never_answers_and_the_process_ends(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        output = run_with_wandb(tmp_path, WANDB_BASE_URL=f"http://127.0.0.1:{silent.getsockname()[1]}",
                                WANDB_API_KEY="a" * 40)
    assert output.count("warning: WandB") == 1
    assert "103 records wait for WandB" in output
