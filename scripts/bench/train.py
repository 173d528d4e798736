"""Measures the speed of training on this CPU, with the same model and optimizer:

    python3 -m scripts.bench train --depth=4

current: eager, with the logits of all tokens. chunked: eager, with those of 1,024. XLA: the default.
"""
import time
from dataclasses import dataclass
from functools import partial

import torch

from nanochat.common import flag, read_flags
from nanochat.device.programs import synchronize
from nanochat.device.ranks import compute_init, keep_freed_memory, prepare_xla_environment
from nanochat.train.flags import parse_flags
from nanochat.train.language import make_model, make_step
from nanochat.train.plan import make_plan
from scripts.bench.rounds import compare

WAYS = {"XLA": ("xla", "current"), "chunked": ("cpu", "chunked"), "current": ("cpu", "current")}  # device type, kernel


@dataclass(frozen=True)
class Flags:
    depth: int = flag(4, "number of layers", at_least=1)
    vocab_size: int = flag(65536, "tokens in the vocabulary", at_least=2)
    max_seq_len: int = flag(256, "positions per row", at_least=1)
    device_batch_size: int = flag(4, "rows in a micro-step", at_least=1)
    rounds: int = flag(15, "optimizer steps measured of each", at_least=1)
    compute_dtype: str = flag("float32", "of activations and products", choices=("float32", "bfloat16"))


def begin(flags, device_type, kernel):
    """Returns a training in one way: a function that trains a step of one micro-step, and returns its seconds."""
    dist = compute_init(device_type)
    plan = make_plan(parse_flags([
        f"--depth={flags.depth}", f"--max_seq_len={flags.max_seq_len}", f"--kernel={kernel}",
        f"--compute_dtype={flags.compute_dtype}", f"--device_batch_size={flags.device_batch_size}",
        f"--total_batch_size={flags.device_batch_size * flags.max_seq_len}", "--num_iterations=1000",
    ]), flags.vocab_size, device_type, 1)
    training = make_step(plan, make_model(plan).init_weights().to(dist.device), dist)
    training.materialise()
    return partial(step, flags, training, dist)


def step(flags, training, dist):
    begun = time.perf_counter()
    rows = torch.randint(flags.vocab_size, (flags.device_batch_size, flags.max_seq_len + 1), dtype=torch.int32)
    training.run(iter([{"rows": rows}]), training.optimizer.scheduled(0))
    # XLA runs a program after dispatching it; without this, the bench would measure only the dispatch.
    synchronize(dist)
    return time.perf_counter() - begun


def main(argv=None):
    (flags,) = read_flags(argv, __doc__, {Flags: "flags"})
    prepare_xla_environment("xla")
    keep_freed_memory()
    contenders = {name: begin(flags, *way) for name, way in WAYS.items()}
    print(f"depth {flags.depth}, {flags.compute_dtype}, {torch.get_num_threads()} threads")
    compare(f"a step of {flags.device_batch_size} × {flags.max_seq_len} tokens", contenders, flags.rounds)
