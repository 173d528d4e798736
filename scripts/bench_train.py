"""Measures the speed of training on this CPU, with the same model and optimizer, in one run, in tokens a second:

    python3 -m scripts.bench_train --depth=4

current: eager, with PyTorch's attention and loss; chunked: eager, with this project's, the default on a CPU; XLA; and
glibc: current in a process that gives the memory that it frees back. Each has a process. Rounds alternate between them,
so that other work on the machine falls on all; the ratios are the medians of the rounds' ratios.
"""
import multiprocessing
import os
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import torch

from nanochat.common import flag, read_flags, run_script
from nanochat.device.programs import synchronize
from nanochat.device.ranks import MALLOC_VARIABLES, compute_init, keep_freed_memory, prepare_xla_environment
from nanochat.train.flags import parse_flags
from nanochat.train.language import make_model, make_step
from nanochat.train.plan import make_plan


@dataclass(frozen=True)
class Flags:
    depth: int = flag(4, "number of layers", at_least=1)
    vocab_size: int = flag(65536, "tokens in the vocabulary", at_least=2)
    max_seq_len: int = flag(256, "positions per row", at_least=1)
    device_batch_size: int = flag(4, "rows in a micro-step", at_least=1)
    steps: int = flag(3, "optimizer steps in a round", at_least=1)
    rounds: int = flag(5, "rounds of each", at_least=1)
    compute_dtype: str = flag("float32", "of activations and products", choices=("float32", "bfloat16"))


class Way(NamedTuple):
    """A way to train."""
    device_type: str = "cpu"
    kernel: str = "current"
    keeps_memory: bool = True  # that it frees, for its next use


# XLA is the last one, because what it sets in the environment would make the processes after it keep memory, too.
WAYS = {"current": Way(), "chunked": Way(kernel="chunked"), "glibc": Way(keeps_memory=False), "XLA": Way("xla")}


class Contender:
    def __init__(self, flags, way):
        self.flags, self.dist = flags, compute_init(way.device_type)
        self.tokens = flags.device_batch_size * flags.max_seq_len  # in an optimizer step
        plan = plan_of(flags, way)
        self.training = make_step(plan, make_model(plan).init_weights().to(self.dist.device), self.dist)
        self.training.materialise()
        self.generator = torch.Generator().manual_seed(0)
        self.step = 0

    def batches(self):
        shape = (self.flags.device_batch_size, self.flags.max_seq_len + 1)
        while True:
            yield {"rows": torch.randint(self.flags.vocab_size, shape, generator=self.generator, dtype=torch.int32)}

    def tokens_per_s(self, steps):
        """Trains `steps` optimizer steps, waits for them, and returns their speed."""
        started = time.perf_counter()
        for _ in range(steps):
            result = self.training.run(self.batches(), 1, self.training.optimizer.scheduled(self.step))
            self.step += 1
        synchronize(self.dist)
        self.last_loss = result[0].item()
        return steps * self.tokens / (time.perf_counter() - started)


def plan_of(flags, way):
    """Returns the Plan of a run with these Flags, trained in this Way. Raises BadInput."""
    return make_plan(parse_flags([
        f"--depth={flags.depth}", f"--max_seq_len={flags.max_seq_len}", f"--kernel={way.kernel}",
        f"--compute_dtype={flags.compute_dtype}", "--num_iterations=1000",
        f"--device_batch_size={flags.device_batch_size}",
        f"--total_batch_size={flags.device_batch_size * flags.max_seq_len}"]), flags.vocab_size, way.device_type, 1)


_here = []  # the Contender of this process


def begin(flags, way):
    """Makes a process ready: called first in each."""
    if way.keeps_memory:
        keep_freed_memory()
    _here.append(Contender(flags, way))


def run(steps):
    """Trains in a process that is ready. Returns tokens a second and the last loss."""
    return _here[0].tokens_per_s(steps), _here[0].last_loss


def main(argv=None):
    (flags,) = read_flags(argv, __doc__, {Flags: "flags"})
    plan_of(flags, Way())
    for variable in MALLOC_VARIABLES:  # for the process that gives memory back
        os.environ.pop(variable, None)
    processes = {}
    for name, way in WAYS.items():
        if way.device_type == "xla":
            prepare_xla_environment("xla")
        processes[name] = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        processes[name].submit(begin, flags, way).result()
        processes[name].submit(run, 2).result()  # compilation, first touch of memory
    print(f"depth {flags.depth}, {flags.device_batch_size} × {flags.max_seq_len} tokens a step, {flags.compute_dtype}, "
          f"{torch.get_num_threads()} threads; tokens/s:")
    ratios = {name: [] for name in WAYS}
    for number in range(flags.rounds):
        found = {name: process.submit(run, flags.steps).result() for name, process in processes.items()}
        speeds = {name: speed for name, (speed, _) in found.items()}
        for name, speed in speeds.items():
            ratios[name].append(speed / speeds["current"])
        print(f"round {number + 1}: " + "   ".join(f"{name} {speed:8,.0f}" for name, speed in speeds.items()),
              flush=True)
    for process in processes.values():
        process.shutdown()
    print("times as fast as current: "
          + ", ".join(f"{name} {statistics.median(ratios[name]):.2f}" for name in WAYS if name != "current"))
    print("last losses: " + ", ".join(f"{name} {loss:.4f}" for name, (_, loss) in found.items()))


if __name__ == "__main__":
    run_script(main)
