"""In place of base_train: it writes the record of a run without training, and imports next to nothing. $QUICK_FAULT:
`flash` has another loss, or it `recompiles`."""
import json
import os
import sys
import time
from pathlib import Path

from nanochat.common import get_base_dir, read_toml

flags = read_toml(Path(sys.argv[1].removeprefix("--config=")))
folder = get_base_dir() / "checkpoints" / flags["run"]
folder.mkdir(parents=True)
fault = os.environ.get("QUICK_FAULT")
is_tpu = flags["device_type"] == "tpu"
is_long = flags["max_seq_len"] > 128
while is_tpu and not (get_base_dir() / f"{'long rows' if is_long else 'micro_step'}.estimate").exists():
    time.sleep(0.05)  # for quick_preflight
micro_ms = 24 + (9 if is_long else 4.5) + 7.5  # products, attention, collectives
devices = 8 if is_tpu else 2
micro_steps = flags["total_batch_size"] // (devices * flags["device_batch_size"] * flags["max_seq_len"])
with open(folder / "metrics.jsonl", "w") as file:
    for step in range(1, flags["num_iterations"] + 1):
        record = {"step": step, "time": step, "loss": 5.6 + 0.5 * (fault == flags.get("kernel")), "tokens_per_s": 1000,
                  "step_ms": 20 + micro_ms * micro_steps, "device_memory_peak_bytes": 9 << 30}
        if fault == "recompiles" and step == 12:
            record["recompiled"] = ["update: its inputs are as before"]
        file.write(json.dumps(record) + "\n")
