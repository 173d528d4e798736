"""From nothing to a finished run, with every script and the real gcloud, ssh and base_train; one VM is preempted."""
import json
import os
import signal
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from deploy.lib.state import State
from tests.deploy.conftest import eventually
from tests.warm import CHEAP_COMPILATION

CHIPS = 4
# The VM's Python: base_train on XLA CPU devices, as many as a v5litepod-4 has chips.
PYTHON = f'export PJRT_DEVICE=CPU CPU_NUM_DEVICES={CHIPS} XLA_FLAGS="{CHEAP_COMPILATION}"; exec {sys.executable} "$@"'


@pytest.mark.slow
def test_from_nothing_to_a_finished_run_over_a_preemption_and_a_stockout(world, installed_gcloud, tmp_path):
    environment = world.cloud.env(world.laptop.root / "vm_gcloud") | world.cloud.vm_env()
    world.vm_options = {"chips": CHIPS, "python": PYTHON, "env": environment}
    (world.laptop.home / "config.env").write_text(
        "POLL_S=5 MIN_FREE_GB=0 ZONES=us-a,us-b TYPE=v5litepod-4 BUCKET=gs://b/nanochat\n")
    for index in range(2):
        texts = [f"int f{n}(int a) {{ return a + {n * index}; }}\n" * 20 for n in range(200)]
        pq.write_table(pa.table({"text": texts}), tmp_path / "shard.parquet", row_group_size=50)
        world.cloud.put("b", f"nanochat/parquet/base_data_v3/base_data_v3/shard_{index:05d}.parquet",
                        (tmp_path / "shard.parquet").read_bytes())
    # Narrow, because the shipped vocabulary has 65,536 tokens.
    flags = ["--run=d1", "--depth=1", "--model_dim=16", "--num_heads=1", "--max_seq_len=64", "--device_batch_size=1",
             "--total_batch_size=256", "--num_iterations=24", "--device_type=xla", "--log_every=1", "--save_every=4",
             "--eval_every=-1", "--sample_every=-1", f"--checkpoint_mirror={world.mirror}"]

    assert "is ready in us-a" in world.laptop.run("create.sh", "nano", timeout_s=120)
    assert "torch_xla sees 4 chips" in world.laptop.run("setup.sh", "nano", timeout_s=180)
    assert "~/nanochat is now" in world.laptop.run("push.sh", "nano")
    assert "complete" in world.laptop.run("data.sh", "nano", timeout_s=180)
    assert "step 00001/00024" in world.laptop.run("train.sh", "nano", "--", *flags, timeout_s=300)
    copies = world.vm.run_dir("d1") / "mirror.json"
    eventually(lambda: copies.exists() and json.loads(copies.read_text())["newest_copied"], 300)
    [ranks] = [pid for pid, line in world.vm.processes().items() if "spawn_main" in line]
    os.kill(ranks, signal.SIGSTOP)  # so that the run is not finished before it is preempted
    results = world.laptop.root / "results"
    watch = world.laptop.start("watch.sh", "nano", f"--to={results}", "--max_usd=50", "--", *flags)
    eventually(lambda: State.load(world.state / "state.json", 0).vm.mirrored, 300)
    status = world.laptop.run("status.sh", "nano")
    assert "d1 running" in status and "of 24   loss " in status and "tokens/s" in status and "min left" in status
    world.cloud.faults["us-a"] = ["stockout"]
    world.cloud.node("nano")["state"] = "PREEMPTED"
    world.vm.kill()
    output = world.end(watch, 0, timeout_s=600)
    print(output)
    assert "PREEMPTED: creating the VM again" in output and "VM created: nano is ready in us-b" in output
    assert "finished: step 00024/00024" in output and not world.cloud.nodes
    log = (results / "d1/run.log").read_text()
    first = int(log.split("step 000")[1][:2])
    assert first > 1, "the second VM resumed from the mirror"
    assert world.steps("d1") == list(range(1, 25))
