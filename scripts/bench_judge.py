"""Measures how many programs the judge of code_eval decides per second of one core, and what the sandbox costs:

    python3 -m scripts.bench_judge

It judges solutions of the project's problems, one after the other. Times are CPU times, so a busy machine does little.
"""
import os
from dataclasses import dataclass
from pathlib import Path

from nanochat.common import BadInput, expand_path, flag, read_flags, run_script
from nanochat.judge.judge import Judge
from nanochat.judge.problems import read_problems


@dataclass(frozen=True)
class Flags:
    problems: Path | None = flag(None, "problems, as for code_eval; default: the project's own", of=expand_path)
    num_programs: int = flag(40, "programs to judge", at_least=1, at_most=10_000)


def main(argv=None):
    (flags,) = read_flags(argv, __doc__, {Flags: "flags"})
    solved = [problem for problem in read_problems(flags.problems) if problem.solution][:flags.num_programs]
    if not solved:
        raise BadInput(f"--problems={flags.problems} has no solutions to judge")
    seconds = {}
    for name, unsafe in (("in the sandbox", False), ("without it", True)):
        with Judge(unsafe) as judge:
            begun = cpu_s()
            verdicts = [judge.judge(problem.program(problem.solution), problem.tests) for problem in solved]
            seconds[name] = cpu_s() - begun
        print(f"{name}: {len(verdicts) / seconds[name]:.2f} programs per second of CPU time, "
              f"{sum(verdict.passed for verdict in verdicts)} of {len(verdicts)} pass", flush=True)
    print(f"the sandbox costs {seconds['in the sandbox'] / seconds['without it'] - 1:+.1%}")


def cpu_s():
    """Returns the CPU seconds of this process and of all that it has waited for."""
    return sum(os.times()[:4])


if __name__ == "__main__":
    run_script(main)
