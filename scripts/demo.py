"""Makes a corpus, trains a small model and completes a file, on this machine: `make demo`.

It trains with the program for TPUs, over two XLA devices of the CPU, in three to eight minutes on two cores. Writes to
$NANOCHAT_BASE_DIR/demo (default ~/.cache/nanochat/demo). The model is in checkpoints/dummy there, a path for
--checkpoint of the other scripts. A second demo starts over.
"""
import os
import shlex
import shutil
import time
from dataclasses import dataclass

from nanochat.common import flag, get_base_dir, read_flags, run_script
from nanochat.record.history import read_run
from nanochat.record.metrics import METRICS_FILE
from nanochat.run.processes import run_module

PROMPT = "#include <vector>\n\nnamespace"


@dataclass(frozen=True)
class Flags:
    num_iterations: int = flag(100, "optimizer steps", at_least=1)
    devices: int = flag(2, "XLA devices on this CPU", at_least=1, at_most=64)


def run(step, module, *flags, env):
    """Prints the name of a step, and runs its script (see run_module)."""
    print(f"\n=== {step}")
    run_module(module, *flags, env=env)


def main(argv=None):
    (flags,) = read_flags(argv, __doc__, {Flags: "flags"})
    started = time.monotonic()
    base_dir = get_base_dir() / "demo"
    for folder in ("parquet", "checkpoints"):  # of an older demo, perhaps with other packages
        shutil.rmtree(base_dir / folder, ignore_errors=True)
    env = {**os.environ, "NANOCHAT_BASE_DIR": str(base_dir), "CPU_NUM_DEVICES": str(flags.devices)}
    run("1. a corpus: the C++ headers that are installed here", "scripts.prepare_data", "--installed_headers",
        "--val_projects=torch/c10", env=env)
    run("2. training", "scripts.base_train", "--run=dummy", "--device_type=xla", "--depth=4",
        f"--num_iterations={flags.num_iterations}", "--max_seq_len=256", "--device_batch_size=2",
        f"--total_batch_size={512 * flags.devices}", "--eval_every=1000", "--eval_tokens=16384", "--save_every=1000",
        "--sample_every=-1", "--log_every=10", env=env)
    run("3. a completion", "scripts.generate", "--checkpoint=dummy", "--device_type=xla", f"--prompt={PROMPT}",
        "--echo", "--max_tokens=100", "--temperature=0.6", env=env)

    run_dir = base_dir / "checkpoints" / "dummy"
    history = read_run(str(run_dir))
    bpb = history.series("val_bpb")[1]
    last = history.records[-1]["step"]
    print(f"""
=== done in {time.monotonic() - started:.0f} s
validation   {bpb[0]:.3f} bits per byte before, {bpb[-1]:.3f} after {last} steps
corpus       {base_dir / 'parquet'}
checkpoint   {run_dir}/step_{last:06d}
metrics      {run_dir / METRICS_FILE}

See it write in your browser, at the address that this prints:
  python3 -m scripts.serve --checkpoint={shlex.quote(str(run_dir))} --quantize=int8

Then, on a TPU VM (v5litepod-8 or v6e-4), with data and code on it (README.md, "Put it on a TPU"):
  nohup python3 -m scripts.base_train --depth=16 --run=NAME > NAME.log 2>&1 &""")


if __name__ == "__main__":
    run_script(main)
