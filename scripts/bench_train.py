"""Measures the training speed of XLA against eager PyTorch, with the same model and optimizer on this CPU, in one run:

    python3 -m scripts.bench_train --depth=4

Rounds alternate between the two, so that other work on the machine falls on both; the ratio is the median of the
rounds' ratios.
"""
import statistics
import time
from dataclasses import dataclass

import torch

from nanochat.common import flag, read_flags, run_script
from nanochat.device.programs import synchronize
from nanochat.device.ranks import Dist, compute_init, prepare_xla_environment
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
        plan = make_plan(parse_flags([
            f"--depth={flags.depth}", f"--max_seq_len={flags.max_seq_len}", "--kernel=current", "--num_iterations=1000",
            f"--device_batch_size={flags.device_batch_size}", f"--total_batch_size={self.tokens}"]),
            flags.vocab_size, dist.device_type, 1)
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


def main(argv=None):
    (flags,) = read_flags(argv, __doc__, {Flags: "flags"})
    prepare_xla_environment("xla")
    xla = Contender(flags, compute_init("xla"))
    eager = Contender(flags, Dist("cpu", torch.device("cpu")))
    for contender in (xla, eager):  # compilation, first touch of memory
        contender.tokens_per_s(2)
    print(f"depth {flags.depth}, {flags.device_batch_size} × {flags.max_seq_len} tokens a step, tokens/s:")
    ratios = []
    for number in range(flags.rounds):
        by_xla, by_eager = xla.tokens_per_s(flags.steps), eager.tokens_per_s(flags.steps)
        ratios.append(by_xla / by_eager)
        print(f"round {number + 1}: XLA {by_xla:8,.0f}   eager {by_eager:8,.0f}   ratio {ratios[-1]:.2f}", flush=True)
    print(f"XLA is {statistics.median(ratios):.2f} times as fast as eager PyTorch ({torch.get_num_threads()} threads; "
          f"last losses {xla.last_loss:.4f} and {eager.last_loss:.4f})")


if __name__ == "__main__":
    run_script(main)
