"""Measures the training speed of XLA against eager PyTorch, with the same model and optimizer on this CPU, in one run:

    python3 -m scripts.bench_train --depth=4

Rounds alternate between the two, so that other work on the machine falls on both; the ratio is the median of the
rounds' ratios.
"""
import statistics
import time

import torch

from nanochat.common import ArgumentParser, run_script
from nanochat.device.programs import synchronize
from nanochat.device.ranks import Dist, compute_init, prepare_xla_environment
from nanochat.train.flags import parse_flags
from nanochat.train.plan import make_plan
from nanochat.train.step import make_model, make_step


def parse_args(argv=None):
    parser = ArgumentParser(prog="python3 -m scripts.bench_train", description=__doc__)
    add = parser.add_argument
    add("--depth", type=int, default=4, help="number of layers")
    add("--vocab_size", type=int, default=65536, help="tokens in the vocabulary")
    add("--max_seq_len", type=int, default=256, help="positions per row")
    add("--device_batch_size", type=int, default=4, help="rows in a micro-step")
    add("--steps", type=int, default=3, help="optimizer steps in a round")
    add("--rounds", type=int, default=5, help="rounds of each")
    return parser.parse_args(argv)


class Contender:
    def __init__(self, args, dist):
        self.args, self.dist = args, dist
        tokens = args.device_batch_size * args.max_seq_len
        flags = parse_flags([f"--depth={args.depth}", f"--max_seq_len={args.max_seq_len}", "--kernel=current",
                             f"--device_batch_size={args.device_batch_size}", f"--total_batch_size={tokens}",
                             "--num_iterations=1000"])
        plan = make_plan(flags, args.vocab_size, dist.device_type, 1)
        self.training = make_step(plan, make_model(plan).init_weights().to(dist.device), dist)
        self.training.materialise()
        self.generator = torch.Generator().manual_seed(0)
        self.step = 0

    def batches(self):
        shape = (self.args.device_batch_size, self.args.max_seq_len + 1)
        while True:
            yield {"rows": torch.randint(self.args.vocab_size, shape, generator=self.generator, dtype=torch.int32)}

    def tokens_per_s(self, steps):
        """Trains `steps` optimizer steps, waits for them, and returns their speed."""
        args, started = self.args, time.perf_counter()
        for _ in range(steps):
            result = self.training.run(self.batches(), 1, self.training.optimizer.scheduled(self.step))
            self.step += 1
        synchronize(self.dist)
        self.last_loss = result[0].item()
        return steps * args.device_batch_size * args.max_seq_len / (time.perf_counter() - started)


def main(argv=None):
    args = parse_args(argv)
    prepare_xla_environment("xla")
    xla = Contender(args, compute_init("xla"))
    eager = Contender(args, Dist("cpu", torch.device("cpu")))
    for contender in (xla, eager):  # compilation, first touch of memory
        contender.tokens_per_s(2)
    print(f"depth {args.depth}, {args.device_batch_size} × {args.max_seq_len} tokens a step, tokens/s:")
    ratios = []
    for number in range(args.rounds):
        by_xla, by_eager = xla.tokens_per_s(args.steps), eager.tokens_per_s(args.steps)
        ratios.append(by_xla / by_eager)
        print(f"round {number + 1}: XLA {by_xla:8,.0f}   eager {by_eager:8,.0f}   ratio {ratios[-1]:.2f}", flush=True)
    print(f"XLA is {statistics.median(ratios):.2f} times as fast as eager PyTorch ({torch.get_num_threads()} threads; "
          f"last losses {xla.last_loss:.4f} and {eager.last_loss:.4f})")


if __name__ == "__main__":
    run_script(main)
