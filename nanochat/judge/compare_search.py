"""Compares methods of search on problems with tests, at equal budgets: the records, and the table."""
import queue
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from nanochat.judge.eval_report import compiles, mean
from nanochat.judge.judge import PASSED
from nanochat.judge.scores import compare, score
from nanochat.judge.search import METHODS, UNFINISHED, Search

BASELINE = "best_of"


def search_problem(writer, judge, problem, methods, budgets):
    """Returns a record for each method and budget: the answer, what was spent, and the verdict of the problem's tests.

    The search does not see these tests, and judging its answer is not charged to it.
    """
    records = []
    for method in methods:
        for budget in budgets:
            search = Search(writer, judge, replace(problem, tests=""), budget)
            METHODS[method](search)
            answer = search.answer
            status, message = answer.status, answer.message
            if answer.compiles:
                verdict = judge.judge(problem.program(answer.text + problem.closing()), problem.tests)
                status, message = verdict.status, verdict.message
            records.append({"name": problem.name, "group": problem.difficulty, "method": method,
                            "budget": budget.tokens, "tokens": search.num_tokens, "calls": search.num_calls,
                            "text": answer.text, "status": status, "message": message})
    return records


def compare_methods(writers, judge, problems, methods, budgets, results, show=lambda num_done: None):
    """Completes `results`, a Results, for all problems, each in a thread with one of `writers`.

    Records are written in the order of the problems, so that a comparison that was killed goes on to the same file.
    show(num_done): called with the number of problems that were there before, and with 1 after each one.
    """
    num_each = len(methods) * len(budgets)
    num_whole, num_written = divmod(len(results.records), num_each)
    free, pending = queue.SimpleQueue(), deque()
    for writer in writers:
        free.put(writer)

    def work(problem):
        writer = free.get()
        try:
            return search_problem(writer, judge, problem, methods, budgets)
        finally:
            free.put(writer)

    show(num_whole)
    with ThreadPoolExecutor(len(writers)) as pool:
        try:
            pending.extend(pool.submit(work, problem) for problem in problems[num_whole:])
            while pending:
                for record in pending.popleft().result()[num_written:]:
                    results.add(record)
                num_written = 0
                show(1)
        finally:
            pool.shutdown(cancel_futures=True)  # after Ctrl-C or an error


def has_compiled(record):
    return record["status"] != UNFINISHED and compiles(record)


def table(records):
    """Returns the lines of a Markdown table: a row for each method and budget."""
    found = {}
    for record in records:
        found.setdefault((record["budget"], record["method"]), {})[record["name"]] = record
    lines = [f"| tokens | method | compiles | against {BASELINE}, in points | pass@1 | tokens used | calls of g++ |",
             "|---|---|---|---|---|---|---|"]
    for budget, method in sorted(found, key=lambda key: (key[0], list(METHODS).index(key[1]))):
        of = found[budget, method]
        baseline = found.get((budget, BASELINE))
        names = [name for name in of if baseline and name in baseline]
        against = ""
        if names and method != BASELINE:
            difference = compare([has_compiled(of[name]) for name in names],
                                 [has_compiled(baseline[name]) for name in names])
            against = (f"{100 * difference.mean:+.1f} [{100 * difference.low:+.1f}, {100 * difference.high:+.1f}], "
                       f"p = {difference.p_value:.4f}")
        shares = [in_percent(score([bool(is_good(record)) for record in of.values()]))
                  for is_good in (has_compiled, lambda record: record["status"] == PASSED)]
        used = [mean(record[key] for record in of.values()) for key in ("tokens", "calls")]
        lines.append(f"| {budget:,} | `{method}` | {shares[0]} | {against} | {shares[1]} | {used[0]:.0f} | "
                     f"{used[1]:.1f} |")
    return lines


def in_percent(found):
    """Returns a Score in words."""
    return f"{100 * found.mean:.1f}% [{100 * found.low:.1f}, {100 * found.high:.1f}]"
