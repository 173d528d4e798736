"""Measures how long saving a checkpoint holds up the training loop, and how long it takes until the state is on disk:

    python3 -m scripts.bench_checkpoint --depth=16

The state has the true sizes and random contents; nothing is trained. The state is in host memory, so a copy within
memory holds up the loop here; on a TPU it is the copy from the device to the host.
"""
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from nanochat.checkpoint import checkpoint
from nanochat.checkpoint.checkpoint_files import state_bytes
from nanochat.checkpoint.meta import Meta
from nanochat.checkpoint.saver import Saver
from nanochat.common import flag, get_base_dir, read_flags, require_writable_dir, run_script
from nanochat.data.lanes import NUM_LANES
from nanochat.model.gpt import GPT
from nanochat.model.optim import MuonAdamW
from nanochat.train.flags import parse_flags
from nanochat.train.plan import make_plan


@dataclass(frozen=True)
class Flags:
    depth: int = flag(16, "number of layers", at_least=1)


def make_state(depth):
    """Returns random weights and a random optimizer's state of a model of this depth, each {name: tensor}."""
    plan = make_plan(parse_flags([f"--depth={depth}"]), 65536, "cpu", 1)
    optimizer = MuonAdamW(GPT.on_meta(plan.config), plan.optimizer, plan.total_batch_size, plan.num_iterations)
    return tuple({name: torch.rand(tensor.shape, dtype=tensor.dtype) for name, tensor in state.items()}
                 for state in (optimizer.masters, optimizer.state))


def main(argv=None):
    (flags,) = read_flags(argv, __doc__, {Flags: "flags"})
    state = make_state(flags.depth)
    num_bytes = state_bytes(*state)
    run_dir = Path(tempfile.mkdtemp(prefix="bench_checkpoint_", dir=require_writable_dir(get_base_dir())))
    try:
        saver = Saver(run_dir, num_lanes=NUM_LANES, keep=1)
        started = time.monotonic()
        checkpoint.save_lane_states(run_dir, 1, {lane: {} for lane in range(NUM_LANES)})
        copies = ({name: tensor.clone() for name, tensor in part.items()} for part in state)  # as MuonAdamW.host_state
        saver.save(*copies, Meta(step=1, config={}, tokenizer_sha256="", data_fingerprint="", flags={}, rng=""))
        held_s = time.monotonic() - started
        saver.finish()
        safe_s = time.monotonic() - started
        print(f"{num_bytes:,} bytes: the loop was held up for {held_s:.2f} s; written, synced, read back and "
              f"renamed after {safe_s:.1f} s ({num_bytes / safe_s / 1e6:.0f} MB/s)")
    finally:
        shutil.rmtree(run_dir)


if __name__ == "__main__":
    run_script(main)
