"""Training speed through XLA against plain eager PyTorch, the same model and optimizer on this CPU, in one run:

    python3 -m scripts.bench_train --depth=4

Rounds alternate between the two, so that other work on the machine falls on both; the ratio is the median of the
rounds' ratios.
"""
import statistics
import time

import torch

from nanochat.common import ArgumentParser, run_script
from nanochat.device.programs import one_program, synchronize
from nanochat.device.ranks import Dist, compute_init, prepare_xla_environment
from nanochat.kernels.choose import get_kernels
from nanochat.model.gpt import GPT, config_for_depth
from nanochat.model.optim import MuonAdamW, OptimConfig
from scripts.base_train import micro_step


def parse_args(argv=None):
    parser = ArgumentParser(prog="python3 -m scripts.bench_train", description=__doc__)
    add = parser.add_argument
    add("--depth", type=int, default=4, help="number of layers")
    add("--vocab_size", type=int, default=65536, help="tokens in the vocabulary")
    add("--max_seq_len", type=int, default=256, help="positions a row")
    add("--device_batch_size", type=int, default=4, help="rows in a micro-step")
    add("--steps", type=int, default=3, help="optimizer steps in a round")
    add("--rounds", type=int, default=5, help="rounds of each")
    return parser.parse_args(argv)


class Contender:
    def __init__(self, args, dist):
        self.args, self.dist = args, dist
        config = config_for_depth(args.depth, vocab_size=args.vocab_size, max_seq_len=args.max_seq_len)
        self.model = GPT(config, get_kernels("current", dist.device_type)).init_weights().to(dist.device)
        self.optimizer = MuonAdamW(self.model, OptimConfig(), 2**19, 1000)
        self.loss_sum = torch.zeros((), device=dist.device)
        self.scale = torch.ones((), device=dist.device)
        self.generator = torch.Generator().manual_seed(0)
        self.step = 0
        with one_program(dist, "initialise"):
            pass

    def tokens_per_s(self, steps):
        """Trains `steps` optimizer steps and waits for them."""
        args, started = self.args, time.perf_counter()
        for _ in range(steps):
            shape = (args.device_batch_size, args.max_seq_len + 1)
            rows = torch.randint(args.vocab_size, shape, generator=self.generator, dtype=torch.int32)
            with one_program(self.dist, "micro_step"):
                micro_step(self.model, rows.to(self.dist.device), self.loss_sum, self.scale)
            with one_program(self.dist, "update"):
                scheduled = self.optimizer.scheduled(self.step).to(self.dist.device)
                loss = self.optimizer.update(scheduled, self.loss_sum)
            self.step += 1
        synchronize(self.dist)
        self.last_loss = loss.item()
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
