"""What the host spends on an optimizer step, tracing and dispatching its programs, with each kernel, in one run:

    python3 -m scripts.bench_host --depth=16 --micro_steps=8

The model is narrow, so that the device, an XLA device of this CPU, is done at once: what the host does depends on the
number of operations and not on their size. Rounds go from kernel to kernel in turns, so that other work on the machine
falls on all; a ratio is the median of the rounds' ratios.
"""
import statistics

import torch

from nanochat.common import ArgumentParser, run_script
from nanochat.device.programs import one_program, synchronize
from nanochat.device.ranks import compute_init, prepare_xla_environment
from nanochat.kernels.choose import available_kernels, get_kernels
from nanochat.model.gpt import GPT, config_for_depth
from nanochat.model.optim import MuonAdamW, OptimConfig
from scripts.base_train import micro_step


def parse_args(argv=None):
    parser = ArgumentParser(prog="python3 -m scripts.bench_host", description=__doc__)
    add = parser.add_argument
    add("--depth", type=int, default=16, help="number of layers")
    add("--micro_steps", type=int, default=8, help="in an optimizer step")
    add("--rounds", type=int, default=7, help="optimizer steps measured with each kernel")
    return parser.parse_args(argv)


class Contender:
    def __init__(self, args, dist, kernel):
        self.args, self.dist, self.kernel = args, dist, kernel
        config = config_for_depth(args.depth, vocab_size=256, max_seq_len=16, n_embd=128)
        self.model = GPT(config, get_kernels(kernel, "xla")).init_weights().to(dist.device)
        self.optimizer = MuonAdamW(self.model, OptimConfig(), 2**19, 1000)
        self.loss_sum = torch.zeros((), device=dist.device)
        self.scale = torch.full((), 1 / args.micro_steps).to(dist.device)
        self.rows = torch.zeros(2, 17, dtype=torch.int32).to(dist.device)
        with one_program(dist, f"initialise {kernel}"):
            pass

    def host_s(self, step):
        """Seconds that the host spent on one optimizer step; the device is idle before each program."""
        total = 0.0
        for _ in range(self.args.micro_steps):
            with one_program(self.dist, f"micro_step {self.kernel}") as run:
                micro_step(self.model, self.rows, self.loss_sum, self.scale)
            synchronize(self.dist)
            total += run.host_s
        scheduled = self.optimizer.scheduled(step).to(self.dist.device)
        with one_program(self.dist, f"update {self.kernel}") as run:
            self.optimizer.update(scheduled, self.loss_sum)
        synchronize(self.dist)
        return total + run.host_s


def main(argv=None):
    args = parse_args(argv)
    prepare_xla_environment("xla")
    dist = compute_init("xla")
    contenders = [Contender(args, dist, kernel) for kernel in available_kernels("xla")]
    for contender in contenders:  # compilation
        contender.host_s(0)
        contender.host_s(1)
    print(f"host time of an optimizer step of {args.micro_steps} micro-steps, depth {args.depth}, ms:")
    rounds = []
    for number in range(args.rounds):
        rounds.append([1000 * contender.host_s(number + 2) for contender in contenders])
        print(f"round {number + 1}: " + "   ".join(
            f"{contender.kernel} {ms:7.1f}" for contender, ms in zip(contenders, rounds[-1], strict=True)), flush=True)
    plain = statistics.median(row[0] for row in rounds)
    for place, contender in enumerate(contenders[1:], start=1):
        median = statistics.median(row[place] for row in rounds)
        ratio = statistics.median(row[0] / row[place] for row in rounds)
        print(f"{contender.kernel}: {median:.1f} ms, {ratio:.1f} times less than the plain {plain:.1f} ms")



if __name__ == "__main__":
    run_script(main)
