"""Measures how long saving a checkpoint holds up the training loop, beside the time until the state is on disk:

    python3 -m scripts.bench checkpoint --depth=16

The state has the true sizes and random contents; nothing is trained. It is in host memory, so a copy within memory
holds up the loop here; on a TPU it is the copy from the device to the host.
"""
import tempfile
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import torch

from nanochat.checkpoint.meta import Meta
from nanochat.checkpoint.on_disk import Kept
from nanochat.checkpoint.pieces import state_bytes
from nanochat.checkpoint.saver import SaveOptions, Saver, save_lane_states
from nanochat.common import flag, get_base_dir, read_flags, require_writable_dir
from nanochat.data.lanes import NUM_LANES
from nanochat.model.gpt import GPT
from nanochat.train.flags import parse_flags
from nanochat.train.language import make_optimizer
from nanochat.train.plan import make_plan
from scripts.bench.rounds import Clock


@dataclass(frozen=True)
class Flags:
    depth: int = flag(16, "number of layers", at_least=1)


def make_state(depth):
    """Returns random weights and a random optimizer's state of a model of this depth, each {name: tensor}."""
    plan = make_plan(parse_flags([f"--depth={depth}"]), 65536, "cpu", 1)
    optimizer = make_optimizer(plan, GPT.on_meta(plan.config))
    return make_random(optimizer.masters), make_random(optimizer.state)


def make_random(tensors):
    return {name: torch.rand(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()}


def main(argv=None):
    (flags,) = read_flags(argv, __doc__, {Flags: "flags"})
    weights, state = make_state(flags.depth)
    with tempfile.TemporaryDirectory(prefix="bench_checkpoint_", dir=require_writable_dir(get_base_dir())) as folder:
        run_dir = Path(folder)
        saver = Saver(run_dir, NUM_LANES, SaveOptions(Kept(1)))
        # held_s: the training loop waits for the lanes' states, a copy of all tensors, and handing over the copies. The
        # rest runs in the background, and finish() waits for it.
        clock = Clock()
        save_lane_states(run_dir, 1, {lane: {} for lane in range(NUM_LANES)})
        meta = Meta(step=1, config={}, tokenizer_sha256="", data_fingerprint="", flags={}, rng="")
        saver.save(deepcopy(weights), deepcopy(state), meta)  # as MuonAdamW.host_state copies
        held_s = clock.spent().wall_s
        saver.finish()
        safe_s = clock.spent().wall_s
    num_bytes = state_bytes(weights, state)
    print(f"{num_bytes:,} bytes: the loop was held up for {held_s:.2f} s; written, synced, read back and renamed after "
          f"{safe_s:.1f} s ({num_bytes / safe_s / 1e6:.0f} MB/s): the loop waits for {held_s / safe_s:.1%} of the save")
