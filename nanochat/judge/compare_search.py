"""Compares methods of search on problems with tests, at equal budgets: the records, and the table."""
import queue
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from nanochat.infer.sample import ignore
from nanochat.judge.eval_report import compare, compiles, in_percent, mean, score
from nanochat.judge.judge import PASSED
from nanochat.judge.search import METHODS, Search

BASELINE = "best_of"


def search_problem(writer, judge, problem, methods, budgets):
    """Returns a record for each method and budget: the answer, its cost, and the verdict of the problem's tests.

    The search does not see these tests, and judging its answer is not charged to it.
    """
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


def compare_methods(writers, judge, problems, methods, budgets, results, show=ignore):
    """Adds to `results` the records of all problems, each searched in a thread with one of `writers`.

    Records are written in the order of the problems, so that a killed comparison continues the same file.
    show(num_done) is called with the number of problems that `results` held before, and with 1 after each one.
    """
    # A kill may lose some records of a problem. It is searched again, and the records that the file holds are skipped.
    num_whole, num_written = divmod(len(results.records), len(methods) * len(budgets))
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

    show(num_whole)
    with ThreadPoolExecutor(len(writers)) as pool:
        try:
            for records in pool.map(work, problems[num_whole:]):
                for record in records[num_written:]:
                    results.add(record)
                num_written = 0
                show(1)
        finally:
            pool.shutdown(cancel_futures=True)  # after Ctrl-C or an error


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
    tokens = mean(record["tokens"] for record in records)
    calls = mean(record["calls"] for record in records)
    return f"| {budget:,} | `{method}` | {compile_share} | {against} | {pass_share} | {tokens:.0f} | {calls:.1f} |"


def compared(found, baseline):
    """Returns in words how many more programs compile than with BASELINE. found, baseline: {name: record}."""
    names = [name for name in found if name in baseline]
    if not names:
        return ""
    difference = compare([compiles(found[name]) for name in names], [compiles(baseline[name]) for name in names])
    return (f"{100 * difference.mean:+.1f} [{100 * difference.low:+.1f}, {100 * difference.high:+.1f}], "
            f"p = {difference.p_value:.4f}")
