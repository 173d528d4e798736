"""Searches for C++ that compiles and passes your tests, with the compiler as the judge, within a budget of tokens:

    python3 -m scripts.solve --checkpoint=RUN --prompt_file=half_written.cpp
    python3 -m scripts.solve --checkpoint=RUN --prompt='int add(int a, int b) {' --tests=FILE

Prints the code with its verdict as a comment on standard output, and the search on standard error. The exit status is 0
if the code compiles and passes the tests, and 1 if not. Needs g++ and bubblewrap: apt-get install g++ bubblewrap
"""
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from nanochat.checkpoint.on_disk import find_checkpoint
from nanochat.common import BadInput, expand_path, flag, printable, read_flags, read_named, run_script, say
from nanochat.device.ranks import compute_cleanup, compute_init, prepare_xla_environment
from nanochat.infer.flags import ModelFlags, resolve_inference_device_type
from nanochat.judge.flags import WriterFlags
from nanochat.judge.judge import PASSED, Judge, JudgeFlags
from nanochat.judge.problems import problem_of_prompt
from nanochat.judge.search import COMPILES, Budget, Search, check_prompt, tree

TOKENS_PER_CALL = 4


@dataclass(frozen=True)
class ProblemFlags:
    prompt: str | None = flag(None, "C++ whose last function or class is to be completed: a comment and a signature")
    prompt_file: Path | None = flag(None, "file with such C++", of=expand_path)
    tests: Path | None = flag(None, "C++ whose main() returns 0 if the code is right", of=expand_path)

    def read(self):
        """Returns the Problem to solve. Raises BadInput if it cannot be read."""
        if (self.prompt is None) == (self.prompt_file is None):
            raise BadInput("give one of --prompt and --prompt_file")
        name = "--prompt"
        prompt = os.fsencode(self.prompt or "")
        if self.prompt_file:
            name = f"--prompt_file={self.prompt_file}"
            prompt = read_named("prompt_file", self.prompt_file)
        tests = ""
        if self.tests:
            tests = as_text(read_named("tests", self.tests))
            if not re.search(r"\bmain\b", tests):
                raise BadInput(f"--tests={self.tests} has no main(), which runs the tests")
        return problem_of_prompt(name, as_text(prompt), tests)


@dataclass(frozen=True)
class SearchFlags(WriterFlags, JudgeFlags):
    budget: int = flag(512, "tokens to draw", at_least=16, at_most=1_000_000)
    compiler_calls: int = flag(-1, f"calls of g++; -1: one for {TOKENS_PER_CALL} tokens", at_least=1, unset=-1)

    @property
    def spending(self):
        """The Budget."""
        calls = self.budget // TOKENS_PER_CALL if self.compiler_calls == -1 else self.compiler_calls
        return Budget(self.budget, calls)


def as_text(data):
    """Returns the bytes of a flag or a file as text that can be written again."""
    return data.decode(errors="replace").replace("\r\n", "\n")


def note(text):
    say(text, sys.stderr, keep="\n\t")


def main(argv=None):
    of_model, of_problem, flags = read_flags(argv, __doc__, {
        ModelFlags: "model", ProblemFlags: "what it solves", SearchFlags: "search"}, gone={
            "method": "there is the best one alone: leave it out",
            "problems": "give --prompt_file and --tests, or run python3 -m dev.bench_search"})
    from nanochat.infer.load import load_language_meta, load_model
    from nanochat.judge.writer import Writer
    problem = of_problem.read()
    device_type = resolve_inference_device_type(of_model.device_type)
    prepare_xla_environment(device_type)
    path = find_checkpoint(of_model.checkpoint)
    sampling = flags.sampling(load_language_meta(path).model_config.context)
    with Judge() as judge:
        check_prompt(judge, problem)  # before the model is loaded
        dist = compute_init(device_type)
        model, tokenizer, _ = load_model(path, dist, tokenizer_dir=of_model.tokenizer_dir, quantize=of_model.quantize)
        writer = Writer(model, tokenizer, dist, sampling)
        search = Search(writer, judge, problem, flags.spending, flags.num_workers, note)
        tree(search)
    answer = search.answer
    code = problem.program(answer.text + problem.closing()).rstrip()
    if sys.stdout.isatty():
        code = printable(code, keep="\n\t")
    print(f"{code}\n\n// {answer.status}: {search.num_tokens} of {search.budget.tokens} tokens, "
          f"{search.num_calls} calls of g++", flush=True)
    if answer.message:
        note(answer.message)
    compute_cleanup(dist)
    return int(answer.status not in (PASSED, COMPILES))


if __name__ == "__main__":
    run_script(main, "searching")
