"""Measures the time that the host spends on an optimizer step, tracing and dispatching its programs, for each kernel:

    python3 -m scripts.bench_host --depth=16 --micro_steps=8

The model is narrow, so that the device, an XLA device of this CPU, finishes at once: the host's work depends on the
number of operations and not on their size. Rounds alternate between the kernels, so that other work on the machine
falls on all of them; a ratio is the median of the rounds' ratios.
"""
import statistics
from dataclasses import dataclass

import torch

from nanochat.common import flag, read_flags, run_script
from nanochat.device.programs import one_program, synchronize
from nanochat.device.ranks import compute_init, prepare_xla_environment
from nanochat.kernels.choose import available_kernels
from nanochat.train.flags import parse_flags
from nanochat.train.language import make_model, make_step
from nanochat.train.plan import make_plan


@dataclass(frozen=True)
class Flags:
    depth: int = flag(16, "number of layers", at_least=1)
    micro_steps: int = flag(8, "micro-steps in an optimizer step", at_least=1)
    rounds: int = flag(7, "optimizer steps measured with each kernel", at_least=1)


class Contender:
    def __init__(self, depth, micro_steps, dist, kernel):
        self.micro_steps, self.dist, self.kernel = micro_steps, dist, kernel
        flags = parse_flags([f"--depth={depth}", "--model_dim=128", "--max_seq_len=16", "--device_batch_size=2",
                             f"--total_batch_size={32 * micro_steps}", "--num_iterations=1000",
                             f"--kernel={kernel}", "--shard_optimizer=off"])
        plan = make_plan(flags, 256, "xla", 1)
        self.training = make_step(plan, make_model(plan).init_weights().to(dist.device), dist)
        self.batch = {"rows": torch.zeros(2, 17, dtype=torch.int32).to(dist.device)}
        with one_program(dist, f"initialise {kernel}"):
            pass

    def host_s(self, step):
        """Returns the seconds that the host spent on one optimizer step; the device is idle before each program."""
        training, total = self.training, 0.0
        for _ in range(self.micro_steps):
            with one_program(self.dist, f"micro_step {self.kernel}") as run:
                training.micro_step(self.batch, training.loss_scales[self.micro_steps])
            synchronize(self.dist)
            total += run.host_s
        scheduled = training.optimizer.scheduled(step).to(self.dist.device)
        with one_program(self.dist, f"update {self.kernel}") as run:
            training.update(scheduled)
        synchronize(self.dist)
        return total + run.host_s


def main(argv=None):
    (flags,) = read_flags(argv, __doc__, {Flags: "flags"})
    prepare_xla_environment("xla")
    dist = compute_init("xla")
    contenders = [Contender(flags.depth, flags.micro_steps, dist, kernel) for kernel in available_kernels("xla")]
    for contender in contenders:  # compilation
        contender.host_s(0)
        contender.host_s(1)
    print(f"host time of an optimizer step of {flags.micro_steps} micro-steps, depth {flags.depth}, ms:")
    rounds = []
    for number in range(flags.rounds):
        rounds.append([1000 * contender.host_s(number + 2) for contender in contenders])
        print(f"round {number + 1}: " + "   ".join(
            f"{contender.kernel} {ms:7.1f}" for contender, ms in zip(contenders, rounds[-1], strict=True)), flush=True)
    plain = statistics.median(times[0] for times in rounds)
    for number, contender in enumerate(contenders[1:], start=1):
        median = statistics.median(times[number] for times in rounds)
        ratio = statistics.median(times[0] / times[number] for times in rounds)
        print(f"{contender.kernel}: {median:.1f} ms, {ratio:.1f} times less than the plain {plain:.1f} ms")


if __name__ == "__main__":
    run_script(main)
