"""Searches for C++ that compiles and passes your tests, with the compiler as the judge, within a budget of tokens:

    python3 -m scripts.solve --checkpoint=RUN --prompt_file=half_written.cpp
    python3 -m scripts.solve --checkpoint=RUN --prompt='int add(int a, int b) {' --tests=FILE
    python3 -m scripts.solve --checkpoint=RUN --problems=own    # compares the methods

The code goes to standard output, and its verdict in a comment below it; the search is shown on standard error. The exit
status is 0 if the code compiles and passes the tests, and 1 if not. It needs g++ and bubblewrap: apt-get install g++
bubblewrap
"""
import re
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from nanochat.checkpoint.format import find_checkpoint
from nanochat.common import BadInput, expand_path, flag, read_flags, run_script
from nanochat.device.ranks import compute_cleanup, compute_init, prepare_xla_environment
from nanochat.infer.load import (
    ModelFlags,
    load_language_meta,
    load_model,
    resolve_inference_device_type,
    weights_of,
)
from nanochat.infer.sample import Sampling, default_max_tokens
from nanochat.judge.compare_search import compare_methods, table
from nanochat.judge.judge import PASSED, Judge, JudgeFlags
from nanochat.judge.problems import as_text, digest, problem_of_prompt, read_problems, read_text, usable
from nanochat.judge.results import open_results, progress, results_dir
from nanochat.judge.search import COMPILES, METHODS, Budget, Search, check_prompt
from nanochat.judge.writer import Writer, require_half

DEFAULT_METHOD = "tree"
DEFAULT_BUDGET = 512
BUDGETS = (256, 512, 1024)  # of a comparison
TOKENS_PER_CALL = 4


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
        if self.problems is None:
            return [self._read_prompt()]
        if self.tests is not None:
            raise BadInput("--tests are for --prompt and --prompt_file: --problems has its own")
        problems = usable(read_problems(self.problems))
        if not problems:
            raise BadInput(f"--problems={self.problems} has none that can be judged here")
        return problems

    def _read_prompt(self):
        if self.prompt is None:
            name = f"--prompt_file={self.prompt_file}"
            prompt = read_text(self.prompt_file, "--prompt_file")
        else:
            name = "--prompt"
            prompt = as_text(self.prompt)
        tests = "" if self.tests is None else read_text(self.tests, "--tests")
        if self.tests is not None and not re.search(r"\bmain\b", tests):
            raise BadInput(f"--tests={self.tests} has no main(), which runs the tests")
        return problem_of_prompt(name, prompt, tests)


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
        """Returns a list of Budgets. default: numbers of tokens."""
        budgets = []
        for tokens in self.budget or default:
            calls = self.compiler_calls
            budgets.append(Budget(tokens, tokens // TOKENS_PER_CALL if calls == -1 else calls))
        return budgets

    def sampling(self, context):
        """Returns the Sampling for a model of this context. Raises BadInput if it is too short."""
        require_half(self.max_tokens, context)
        max_tokens = default_max_tokens(context) if self.max_tokens == -1 else self.max_tokens
        return Sampling(1, max_tokens, self.temperature, top_p=self.top_p, seed=self.seed)


@dataclass(frozen=True)
class ResultFlags(JudgeFlags):
    out_dir: Path | None = flag(None, "folder of a comparison's results; default: one in $NANOCHAT_BASE_DIR/solve",
                                of=expand_path)


def main(argv=None):
    of_model, of_task, flags, judging = read_flags(argv, __doc__, {
        ModelFlags: "model", TaskFlags: "what it solves", SearchFlags: "search", ResultFlags: "judging"})
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
    sampling = flags.sampling(meta.config["max_seq_len"])
    methods = fitting(methods, meta, is_comparison)
    load = partial(load_writers, of_model, path, device_type, sampling)
    if not is_comparison:
        return solve(load, problems[0], methods[0], budgets[0], judging)
    settings = {
        "format": 1, "task": "search", "items": digest(problems), "num_items": len(problems), "methods": methods,
        "budgets": [asdict(budget) for budget in budgets], "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature, "top_p": sampling.top_p, "seed": sampling.seed,
        "quantize": of_model.quantize, "checkpoint": f"{path.parent.name}/{path.name}",
        "weights": weights_of(path), "device_type": device_type}
    out_dir = results_dir(judging.out_dir, "solve", f"{path.parent.name}_{path.name}", settings)
    with Judge(judging.unsafe) as judge, open_results(out_dir / "searches.jsonl", settings) as results:
        torch.set_num_threads(1)  # the searches themselves run at the same time
        writers = load(judging.num_workers, settings["weights"])
        with progress(len(problems)) as show:
            compare_methods(writers, judge, problems, methods, budgets, results, show)
        compute_cleanup(writers[0].dist)
    lines = table(results.records)
    (out_dir / "table.txt").write_text("\n".join(lines) + "\n")
    print("\n".join(lines) + f"\n\n{out_dir}: searches.jsonl, table.txt")


def load_writers(flags, path, device_type, sampling, number, weights=None):
    """Returns up to `number` Writers of one model, each with an engine of its own; one on an accelerator."""
    dist = compute_init(device_type)
    model, tokenizer, _ = load_model(path, dist, tokenizer_dir=flags.tokenizer_dir, quantize=flags.quantize,
                                     weights=weights)
    if dist.device_type != "cpu":
        number = 1
    return [Writer(model, tokenizer, dist, sampling) for _ in range(number)]


def fitting(methods, meta, is_comparison):
    """Returns the methods that this model can do. Raises BadInput if it is none."""
    if "repair" not in methods or meta.flags.get("fim_rate", 0) > 0:
        return methods
    message = "--method=repair needs a model that was trained with --fim_rate"
    if not is_comparison or methods == ["repair"]:
        raise BadInput(f"{message}: choose another method, or another --checkpoint")
    say(f"{message}: it is left out")
    return [method for method in methods if method != "repair"]


def say(text):
    print(text, file=sys.stderr, flush=True)


def solve(load, problem, method, budget, judging):
    """Searches, prints the code with its verdict, and returns the exit status."""
    with Judge(judging.unsafe) as judge:
        # Before the model is loaded: what no completion can mend needs none.
        check_prompt(judge, problem)
        [writer] = load(1)
        search = Search(writer, judge, problem, budget, judging.num_workers, say)
        begun = time.monotonic()
        METHODS[method](search)
    answer = search.answer
    code = problem.program(answer.text + problem.closing()).rstrip()
    print(f"{code}\n\n// {answer.status}: {method}, {search.num_tokens} of {budget.tokens} tokens, "
          f"{search.num_calls} calls of g++", flush=True)
    if answer.message:
        say(answer.message)
    say(f"{time.monotonic() - begun:.1f} s")
    compute_cleanup(writer.dist)
    return int(answer.status not in (PASSED, COMPILES))


if __name__ == "__main__":
    run_script(main)
