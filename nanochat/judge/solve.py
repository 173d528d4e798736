"""Solves one problem by a search, or compares methods of search at equal budgets: for scripts/solve.py."""
import queue
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from statistics import fmean

from nanochat.common import BadInput, flag, printable, say
from nanochat.device.ranks import compute_cleanup, compute_init
from nanochat.infer.prompt import fills_gaps
from nanochat.infer.sample import ignore
from nanochat.judge.eval_report import compare, compiles, in_percent, score
from nanochat.judge.flags import WriterFlags
from nanochat.judge.judge import PASSED
from nanochat.judge.search import COMPILES, METHODS, Budget, Search, check_prompt

DEFAULT_METHOD = "tree"
DEFAULT_BUDGET = 512
BUDGETS = (256, 512, 1024)  # of a comparison
TOKENS_PER_CALL = 4
BASELINE = "best_of"


def methods_of(text):
    found = list(dict.fromkeys(text.split(",")))
    for name in found:
        if name not in METHODS:
            raise BadInput(f"there is no method {name or '(empty)'}: choose of {', '.join(METHODS)}")
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
class SearchFlags(WriterFlags):
    method: list | None = flag(None, f"{', '.join(METHODS)}; several for --problems, separated by commas; default: "
                                f"{DEFAULT_METHOD}, and all for --problems", of=methods_of)
    budget: list | None = flag(None, "tokens to draw; several for --problems, separated by commas; default: "
                               f"{DEFAULT_BUDGET}, and {', '.join(map(str, BUDGETS))} for --problems", of=budgets_of)
    compiler_calls: int = flag(-1, f"calls of g++; -1: one for {TOKENS_PER_CALL} tokens", at_least=1, unset=-1)

    def methods_and_budgets(self, is_comparison):
        """Returns the names of the methods and the Budgets. Raises BadInput for several without a comparison."""
        if is_comparison:
            methods = self.method or list(METHODS)
            tokens_of_budgets = self.budget or BUDGETS
        else:
            methods = self.method or [DEFAULT_METHOD]
            tokens_of_budgets = self.budget or [DEFAULT_BUDGET]
            if len(methods) > 1 or len(tokens_of_budgets) > 1:
                raise BadInput("several of --method and --budget are for --problems: give one of each")
        budgets = []
        for tokens in tokens_of_budgets:
            calls = self.compiler_calls
            if calls == -1:
                calls = tokens // TOKENS_PER_CALL
            budgets.append(Budget(tokens, calls))
        return methods, budgets


def fitting(methods, meta, is_comparison):
    """Returns the methods that the model of a checkpoint can run. Raises BadInput if none is left."""
    if "repair" not in methods or fills_gaps(meta):
        return methods
    message = "--method=repair needs a model that was trained with --fim_rate"
    if not is_comparison or methods == ["repair"]:
        raise BadInput(f"{message}: choose another method, or another --checkpoint")
    note(f"{message}: it is left out")
    return [method for method in methods if method != "repair"]


def load_writers(flags, path, device_type, sampling, number):
    """Returns `number` Writers of one model; on an accelerator, one. flags: ModelFlags."""
    from nanochat.infer.load import load_model
    from nanochat.judge.writer import Writer
    dist = compute_init(device_type)
    model, tokenizer, _ = load_model(path, dist, tokenizer_dir=flags.tokenizer_dir, quantize=flags.quantize)
    if dist.device_type != "cpu":
        number = 1
    return [Writer(model, tokenizer, dist, sampling) for _ in range(number)]


def solve(judge, load, problem, method, budget, workers):
    """Searches, prints the code with its verdict, and returns the exit status. load(number): returns Writers."""
    check_prompt(judge, problem)  # before the model is loaded
    [writer] = load(1)
    search = Search(writer, judge, problem, budget, workers, note)
    METHODS[method](search)
    answer = search.answer
    code = problem.program(answer.text + problem.closing()).rstrip()
    if sys.stdout.isatty():
        code = printable(code, keep="\n\t")
    print(f"{code}\n\n// {answer.status}: {method}, {search.num_tokens} of {budget.tokens} tokens, "
          f"{search.num_calls} calls of g++", flush=True)
    if answer.message:
        note(answer.message)
    compute_cleanup(writer.dist)
    return int(answer.status not in (PASSED, COMPILES))


def note(text):
    say(text, sys.stderr, keep="\n\t")


# The comparison


def search_problem(writer, judge, problem, methods, budgets):
    """Returns a record for each method and budget. The search neither sees the problem's tests nor pays for them."""
    # All methods get the same budgets of tokens and compiler calls, so a method with cheaper steps may take more of
    # them. The tests decide only what the table says.
    records = []
    for method in methods:
        for budget in budgets:
            search = Search(writer, judge, replace(problem, tests=""), budget)
            METHODS[method](search)
            # The search judged without the tests. An Answer has the status and message of a Verdict, so one that does
            # not compile needs no other verdict.
            verdict = answer = search.answer
            if answer.compiles:
                verdict = problem.verdict(judge, answer.text)
            records.append({"name": problem.name, "group": problem.difficulty, "method": method,
                            "budget": budget.tokens, "tokens": search.num_tokens, "calls": search.num_calls,
                            "text": answer.text, "status": verdict.status, "message": verdict.message})
    return records


def compare_methods(writers, judge, problems, methods, budgets, show=ignore):
    """Returns the records of all problems in their order, each searched in a thread with one of `writers`. show(1) is
    called after each one."""
    # A writer's engine serves one thread at a time. As many threads as writers: no thread waits for one.
    free = queue.SimpleQueue()
    for writer in writers:
        free.put(writer)

    def work(problem):
        writer = free.get()
        try:
            return search_problem(writer, judge, problem, methods, budgets)
        finally:
            free.put(writer)

    found = []
    with ThreadPoolExecutor(len(writers)) as pool:
        try:
            for records in pool.map(work, problems):
                found += records
                show(1)
        finally:
            pool.shutdown(cancel_futures=True)  # after Ctrl-C or an error
    return found


def table(records):
    """Returns the lines of a Markdown table: a row for each method and budget."""
    found = {}  # {(budget, method): {name: record}}
    for record in records:
        found.setdefault((record["budget"], record["method"]), {})[record["name"]] = record
    lines = [f"| tokens | method | compiles | against {BASELINE}, in points | pass@1 | tokens used | calls of g++ |",
             "|---|---|---|---|---|---|---|"]
    for budget in sorted({budget for budget, _ in found}):
        for method in METHODS:
            if (budget, method) in found:
                by_name = found[budget, method]
                against = ""
                if method != BASELINE:
                    against = compared(by_name, found.get((budget, BASELINE), {}))
                lines.append(row(budget, method, list(by_name.values()), against))
    return lines


def row(budget, method, records, against):
    """Returns a line of the table. against: the comparison with BASELINE, in words."""
    compile_share = in_percent(score([compiles(record) for record in records]))
    pass_share = in_percent(score([record["status"] == PASSED for record in records]))
    tokens = fmean(record["tokens"] for record in records)
    calls = fmean(record["calls"] for record in records)
    return f"| {budget:,} | `{method}` | {compile_share} | {against} | {pass_share} | {tokens:.0f} | {calls:.1f} |"


def compared(found, baseline):
    """Returns in words how many more programs compile than with BASELINE. found, baseline: {name: record}."""
    names = [name for name in found if name in baseline]
    if not names:
        return ""
    difference = compare([compiles(found[name]) for name in names], [compiles(baseline[name]) for name in names])
    return (f"{100 * difference.mean:+.1f} [{100 * difference.low:+.1f}, {100 * difference.high:+.1f}], "
            f"p = {difference.p_value:.4f}")
