"""Measures how many programs the judge of code_eval decides per second of one core, and what the sandbox costs:

    python3 -m scripts.bench judge

It judges solutions of the project's problems, one after the other. Compare CPU times: a busy machine changes them
little.
"""
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from nanochat.common import BadInput, expand_path, flag, read_flags
from nanochat.judge.judge import Judge
from nanochat.judge.problems import read_problems
from scripts.bench.rounds import Clock, compare


@dataclass(frozen=True)
class Flags:
    problems: Path | None = flag(None, "problems, as for code_eval; default: the project's own", of=expand_path)
    num_programs: int = flag(40, "programs to judge in a round", at_least=1, at_most=10_000)
    rounds: int = flag(1, "rounds, after one to warm up", at_least=1)


def judge_all(problems, unsafe):
    """Returns the Spent of judging one program."""
    with Judge(unsafe) as judge:
        clock = Clock()
        verdicts = [judge.judge(problem.program(problem.solution), problem.tests) for problem in problems]
        spent = clock.spent(len(problems))
    failed = [problem.name for problem, verdict in zip(problems, verdicts, strict=True) if not verdict.passed]
    if failed:
        print(f"{len(failed)} of {len(problems)} do not pass: {', '.join(failed[:5])}")
    return spent


def main(argv=None):
    (flags,) = read_flags(argv, __doc__, {Flags: "flags"})
    solved = [problem for problem in read_problems(flags.problems) if problem.solution][:flags.num_programs]
    if not solved:
        raise BadInput(f"--problems={flags.problems} has no solutions to judge: name a file with some")
    contenders = {"without a sandbox": partial(judge_all, solved, True),
                  "in the sandbox": partial(judge_all, solved, False)}
    compare("a program", contenders, flags.rounds, reference="without a sandbox")
