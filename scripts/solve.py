"""Searches for C++ that compiles and passes your tests, with the compiler as the judge, within a budget of tokens:

    python3 -m scripts.solve --checkpoint=RUN --prompt_file=half_written.cpp
    python3 -m scripts.solve --checkpoint=RUN --prompt='int add(int a, int b) {' --tests=FILE
    python3 -m scripts.solve --checkpoint=RUN --problems=own    # compares the methods

The code goes to standard output, and its verdict in a comment below it; the search is shown on standard error. The exit
status is 0 if the code compiles and passes the tests, and 1 if not. It needs g++ and bubblewrap: apt-get install g++
bubblewrap
"""
import hashlib
import os
import re
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from tqdm import tqdm

from nanochat.checkpoint.format import find_checkpoint
from nanochat.common import BadInput, expand_path, flag, get_base_dir, read_flags, require_writable_dir, run_script
from nanochat.device.ranks import compute_cleanup, compute_init, prepare_xla_environment
from nanochat.infer.load import (
    ModelFlags,
    load_language_meta,
    load_model,
    resolve_inference_device_type,
    weights_of,
)
from nanochat.judge.compare_search import compare_methods, table
from nanochat.judge.evaluate import Results, Sampling, Writer
from nanochat.judge.judge import PASSED, Judge, JudgeFlags
from nanochat.judge.problems import Problem, digest, read_problems, usable
from nanochat.judge.search import COMPILES, METHODS, Budget, Search
from nanochat.judge.unfinished import brackets, closers

DEFAULT_METHOD, DEFAULT_BUDGET = "tree", 512
BUDGETS = (256, 512, 1024)  # of a comparison
TOKENS_PER_CALL = 4


def as_text(data):
    """Returns a flag's value or a file's bytes as text that can be written again."""
    data = os.fsencode(data) if isinstance(data, str) else data
    return data.decode(errors="replace").replace("\r\n", "\n")


def methods_of(text):
    found = list(dict.fromkeys(text.split(",")))
    if unknown := [name for name in found if name not in METHODS]:
        raise BadInput(f"there is no method {unknown[0] or '(empty)'}: choose of {', '.join(METHODS)}")
    return found


def budgets_of(text):
    try:
        found = sorted({int(number) for number in text.split(",")})
    except ValueError:
        found = []
    if not found or found[0] < 16 or found[-1] > 1_000_000:
        raise BadInput("it must be whole numbers from 16 to 1,000,000, separated by commas")
    return found


@dataclass(frozen=True)
class TaskFlags:
    prompt: str | None = flag(None, "C++ whose last function or class is to be completed: a comment and a signature")
    prompt_file: Path | None = flag(None, "file with such a text", of=expand_path)
    tests: Path | None = flag(None, "C++ that ends with main(): the code must pass it, and the search may see it",
                              of=expand_path)
    problems: str | None = flag(None, "compare methods on these problems: own, or a file or folder as for code_eval")

    def read(self):
        """Returns the Problems to solve. Raises BadInput if they cannot be read."""
        if [self.prompt, self.prompt_file, self.problems].count(None) != 2:
            raise BadInput("give one of --prompt, --prompt_file and --problems")
        if self.problems is not None:
            if self.tests is not None:
                raise BadInput("--tests are for --prompt and --prompt_file: --problems has its own")
            problems = usable(read_problems(None if self.problems == "own" else expand_path(self.problems)))
            if not problems:
                raise BadInput(f"--problems={self.problems} has none that can be judged here")
            return problems
        name = "--prompt" if self.prompt_file is None else f"--prompt_file={self.prompt_file}"
        prompt = read_text(self.prompt_file, "--prompt_file") if self.prompt is None else as_text(self.prompt)
        prompt = prompt.rstrip()
        if not prompt:
            raise BadInput(f"{name} is empty: give a comment and a signature")
        prompt += "" if brackets(prompt)[1] else " {"
        if not brackets(prompt)[1]:
            raise BadInput(f"{name} ends with a comment: give the signature after it")
        tests = "" if self.tests is None else read_text(self.tests, "--tests")
        if self.tests is not None and not re.search(r"\bmain\b", tests):
            raise BadInput(f"--tests={self.tests} has no main(), which runs the tests")
        return [Problem(name, prompt + "\n", tests)]


def read_text(path, name):
    try:
        return as_text(path.read_bytes())
    except OSError as error:
        raise BadInput(f"{name}={path} cannot be read: {error.strerror}") from None


@dataclass(frozen=True)
class SearchFlags:
    method: list | None = flag(None, f"{', '.join(METHODS)}; several for --problems, separated by commas; default: "
                                f"{DEFAULT_METHOD}, and all for --problems", of=methods_of)
    budget: list | None = flag(None, "tokens that may be drawn; several for --problems, separated by commas; default: "
                               f"{DEFAULT_BUDGET}, and {', '.join(map(str, BUDGETS))} for --problems", of=budgets_of)
    compiler_calls: int = flag(-1, f"calls of g++ that a search may make; -1: one for {TOKENS_PER_CALL} tokens",
                               at_least=1, unset=-1)
    max_tokens: int = flag(-1, "tokens of a function; -1: 256, at most half of the context", at_least=1, unset=-1)
    temperature: float = flag(0.8, "of the tokens that are drawn", above=0)
    top_p: float = flag(0.95, "draw from the likeliest tokens that have this probability together", above=0, at_most=1)
    seed: int = flag(0, "the same seed gives the same code", at_least=0)

    def budgets(self, default):
        return [Budget(tokens, tokens // TOKENS_PER_CALL if self.compiler_calls == -1 else self.compiler_calls)
                for tokens in self.budget or default]


@dataclass(frozen=True)
class ResultFlags(JudgeFlags):
    out_dir: Path | None = flag(None, "folder of a comparison's results; default: one in $NANOCHAT_BASE_DIR/solve",
                                of=expand_path)


def main(argv=None):
    of_model, of_task, flags, judging = read_flags(argv, __doc__, {
        ModelFlags: "model", TaskFlags: "what it solves", SearchFlags: "search", ResultFlags: "judging"})
    workers = judging.num_workers
    problems = of_task.read()
    is_comparison = of_task.problems is not None
    methods = flags.method or (list(METHODS) if is_comparison else [DEFAULT_METHOD])
    budgets = flags.budgets(BUDGETS if is_comparison else [DEFAULT_BUDGET])
    if not is_comparison and len(methods) * len(budgets) > 1:
        raise BadInput("several of --method and --budget are for --problems: give one of each")
    device_type = resolve_inference_device_type(of_model.device_type)
    prepare_xla_environment(device_type)
    path = find_checkpoint(of_model.checkpoint)
    meta = load_language_meta(path)
    sampling = Sampling(1, max_tokens(flags.max_tokens, meta.config["max_seq_len"]), flags.temperature, flags.top_p,
                        flags.seed)
    methods = fitting(methods, meta, is_comparison)

    def load(num_writers, weights=None):
        dist = compute_init(device_type)
        model, tokenizer, _ = load_model(path, dist, tokenizer_dir=of_model.tokenizer_dir, quantize=of_model.quantize,
                                         weights=weights)
        num_writers = num_writers if dist.device_type == "cpu" else 1
        return [Writer(model, tokenizer, dist, sampling) for _ in range(num_writers)]

    if not is_comparison:
        with Judge(judging.unsafe) as judge:
            check_prompt(judge, problems[0])
            [writer] = load(1)
            status = solve(Search(writer, judge, problems[0], budgets[0], workers, say), methods[0])
        compute_cleanup(writer.dist)
        return status
    settings = {
        "format": 1, "task": "search", "items": digest(problems), "num_items": len(problems), "methods": methods,
        "budgets": [asdict(budget) for budget in budgets], **asdict(sampling), "quantize": of_model.quantize,
        "checkpoint": f"{path.parent.name}/{path.name}",
        "weights": weights_of(path), "device_type": device_type}
    out_dir = require_writable_dir(judging.out_dir or get_base_dir() / "solve" / "_".join(
        [path.parent.name, path.name, hashlib.sha256(repr(settings).encode()).hexdigest()[:8]]))
    try:
        with (FileLock(out_dir / ".lock", timeout=0), Judge(judging.unsafe) as judge,
              Results(out_dir / "searches.jsonl", settings) as results):
            torch.set_num_threads(1)  # the searches themselves run at the same time
            writers = load(workers, settings["weights"])
            with progress(len(problems)) as show:
                compare_methods(writers, judge, problems, methods, budgets, results, show)
            compute_cleanup(writers[0].dist)
    except Timeout:
        raise BadInput(f"another solve is writing to {out_dir}: wait for it, or choose another --out_dir") from None
    lines = table(results.records)
    (out_dir / "table.txt").write_text("\n".join(lines) + "\n")
    print("\n".join(lines) + f"\n\n{out_dir}: searches.jsonl, table.txt")


def max_tokens(requested, context):
    """Returns the most tokens of a function. Raises BadInput if the context is too short for them."""
    if requested > context // 2:
        raise BadInput(f"--max_tokens={requested} is more than half of the {context} tokens that the model sees")
    return min(256, context // 2) if requested == -1 else requested


def fitting(methods, meta, is_comparison):
    """Returns the methods that this model can do. Raises BadInput if it is none."""
    if "repair" not in methods or meta.flags.get("fim_rate", 0) > 0:
        return methods
    message = "--method=repair needs a model that was trained with --fim_rate"
    if not is_comparison or methods == ["repair"]:
        raise BadInput(f"{message}: choose another method, or another --checkpoint")
    print(f"{message}: it is left out", file=sys.stderr)
    return [method for method in methods if method != "repair"]


def check_prompt(judge, problem):
    """Raises BadInput if nothing that follows the prompt can compile."""
    verdict = judge.check_syntax(problem.program("") + closers(problem.prompt))
    if not verdict.passed:
        first = next((line for line in verdict.message.splitlines() if "error" in line), verdict.message)
        raise BadInput(f"{problem.name} does not compile by itself, with its brackets closed: {first}")


def say(text):
    print(text, file=sys.stderr, flush=True)


def solve(search, method):
    """Searches, prints the code with its verdict, and returns the exit status."""
    begun = time.monotonic()
    METHODS[method](search)
    answer, problem = search.answer, search.problem
    code = problem.program(answer.text + problem.closing()).rstrip()
    print(f"{code}\n\n// {answer.status}: {method}, {search.num_tokens} of {search.budget.tokens} tokens, "
          f"{search.num_calls} calls of g++", flush=True)
    if answer.message:
        say(answer.message)
    say(f"{time.monotonic() - begun:.1f} s")
    return int(answer.status not in (PASSED, COMPILES))


@contextmanager
def progress(num_problems):
    """Yields a function that shows that some more problems are done: a bar on a terminal, plain lines in a log."""
    with tqdm(total=num_problems, unit="problem", disable=not sys.stderr.isatty()) as bar:
        num_done, said = 0, time.monotonic()

        def show(count):
            nonlocal num_done, said
            num_done += count
            bar.update(count)
            if bar.disable and time.monotonic() - said > 10:
                said = time.monotonic()
                say(f"{num_done} of {num_problems} problems are done")
        yield show


if __name__ == "__main__":
    run_script(main)
