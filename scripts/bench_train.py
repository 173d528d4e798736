"""Measures the training speed of XLA against eager PyTorch, with the same model and optimizer on this CPU, in one run;
and that of eager PyTorch in a process that keeps the memory that it frees against one that gives it back:

    python3 -m scripts.bench_train --depth=4

Each has a process. Rounds alternate between them, so that other work on the machine falls on all; the ratios are the
medians of the rounds' ratios.
"""
import multiprocessing
import os
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

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


class Contender:
    def __init__(self, flags, dist):
        self.flags, self.dist = flags, dist
        self.tokens = flags.device_batch_size * flags.max_seq_len  # in an optimizer step
        plan = plan_of(flags, dist.device_type)
        self.training = make_step(plan, make_model(plan).init_weights().to(dist.device), dist)
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


def plan_of(flags, device_type):
    """Returns the Plan of a run with these Flags. Raises BadInput."""
    return make_plan(parse_flags([
        f"--depth={flags.depth}", f"--max_seq_len={flags.max_seq_len}", "--kernel=current", "--num_iterations=1000",
        f"--device_batch_size={flags.device_batch_size}",
        f"--total_batch_size={flags.device_batch_size * flags.max_seq_len}"]), flags.vocab_size, device_type, 1)


_here = []  # the Contender of this process


def begin(flags, device_type, keeps_memory):
    """Makes a process ready: called first in each."""
    if keeps_memory:
        keep_freed_memory()
    _here.append(Contender(flags, compute_init(device_type)))


def run(steps):
    """Trains in a process that is ready. Returns tokens a second and the last loss."""
    return _here[0].tokens_per_s(steps), _here[0].last_loss


def main(argv=None):
    (flags,) = read_flags(argv, __doc__, {Flags: "flags"})
    plan_of(flags, "cpu")
    for variable in MALLOC_VARIABLES:  # for the process that gives memory back
        os.environ.pop(variable, None)
    names, processes = ("glibc", "eager", "XLA"), []
    for name in names:
        if name == "XLA":
            prepare_xla_environment("xla")
        arguments = flags, "xla" if name == "XLA" else "cpu", name == "eager"
        processes.append(ProcessPoolExecutor(1, multiprocessing.get_context("spawn")))
        processes[-1].submit(begin, *arguments).result()
        processes[-1].submit(run, 2).result()  # compilation, first touch of memory
    print(f"depth {flags.depth}, {flags.device_batch_size} × {flags.max_seq_len} tokens a step, tokens/s:")
    by_xla, by_keeping = [], []
    for number in range(flags.rounds):
        (glibc, _), (eager, eager_loss), (xla, xla_loss) = (process.submit(run, flags.steps).result()
                                                            for process in processes)
        by_xla.append(xla / eager)
        by_keeping.append(eager / glibc)
        print(f"round {number + 1}: XLA {xla:8,.0f}   eager {eager:8,.0f}   ratio {by_xla[-1]:.2f}   "
              f"eager, memory given back {glibc:8,.0f}   ratio {by_keeping[-1]:.2f}", flush=True)
    for process in processes:
        process.shutdown()
    print(f"XLA is {statistics.median(by_xla):.2f} times as fast as eager PyTorch ({torch.get_num_threads()} threads; "
          f"last losses {xla_loss:.4f} and {eager_loss:.4f})")
    print(f"eager PyTorch that keeps freed memory is {statistics.median(by_keeping):.2f} times as fast as without")


if __name__ == "__main__":
    run_script(main)
