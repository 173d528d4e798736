"""Measures the time that the host spends on an optimizer step, tracing and dispatching its programs, for each kernel:

    python3 -m scripts.bench host --depth=16 --micro_steps=8

The model is narrow, so that the device, an XLA device of this CPU, finishes at once: the host's work depends on the
number of operations, not on their size.
"""
from dataclasses import dataclass

import torch

from nanochat.common import flag, read_flags
from nanochat.device.programs import one_program, synchronize
from nanochat.device.ranks import compute_init, prepare_xla_environment
from nanochat.kernels.choose import available_kernels
from nanochat.train.flags import parse_flags
from nanochat.train.language import make_model, make_step
from nanochat.train.plan import make_plan
from scripts.bench.rounds import Spent, compare, cpu_seconds


@dataclass(frozen=True)
class Flags:
    depth: int = flag(16, "number of layers", at_least=1)
    micro_steps: int = flag(8, "micro-steps in an optimizer step", at_least=1)
    rounds: int = flag(7, "optimizer steps measured with each kernel", at_least=1)


class Training:
    def __init__(self, flags, dist, kernel):
        self.dist = dist
        self.kernel = kernel
        run = parse_flags([f"--depth={flags.depth}", "--model_dim=128", "--max_seq_len=16", "--device_batch_size=2",
                           f"--total_batch_size={32 * flags.micro_steps}", "--num_iterations=1000",
                           f"--kernel={kernel}", "--shard_optimizer=off"])
        plan = make_plan(run, 256, "xla", 1)
        self.training = make_step(plan, make_model(plan).init_weights().to(dist.device), dist)
        self.batch = {"rows": torch.zeros(2, 17, dtype=torch.int32).to(dist.device)}
        self.step = 0
        with one_program(dist, f"initialise {kernel}"):
            pass
        self.run()  # compiles the programs that only the first step needs

    def run(self):
        """Returns the Spent of the host on one optimizer step; the device is idle before each program."""
        training = self.training
        cpu_before = cpu_seconds()
        host_s = 0.0
        for _ in range(training.micro_steps):
            with one_program(self.dist, f"micro_step {self.kernel}") as program:
                training.micro_step(self.batch)
            # The device is this CPU, so it must be idle while the next program is traced: its work would slow down
            # tracing, whose wall time counts.
            synchronize(self.dist)
            host_s += program.host_s
        scheduled = training.optimizer.scheduled(self.step).to(self.dist.device)
        with one_program(self.dist, f"update {self.kernel}") as program:
            training.update(scheduled)
        synchronize(self.dist)
        self.step += 1
        return Spent(host_s + program.host_s, cpu_seconds() - cpu_before)


def main(argv=None):
    (flags,) = read_flags(argv, __doc__, {Flags: "flags"})
    prepare_xla_environment("xla")
    dist = compute_init("xla")
    kernels = available_kernels("xla")
    contenders = {kernel: Training(flags, dist, kernel).run for kernel in kernels}
    compare(f"the host's part of a step of {flags.micro_steps} micro-steps, depth {flags.depth}", contenders,
            flags.rounds, reference=kernels[0])
