"""Measures the share of a model's C++ that compiles and passes tests, for scripts/code_eval.py."""
from collections import deque
from concurrent.futures import ThreadPoolExecutor

from nanochat.common import BadInput, say
from nanochat.infer.sample import ignore
from nanochat.judge.gaps import make_gaps
from nanochat.judge.results import difference, read_results

TASKS = ("functions", "infill_functions")
OF_THE_CHECKPOINT = ("checkpoint", "weights", "device_type")  # settings in which two evaluations may differ


def make_items(flags, problems, seed):
    """Returns the problems or Gaps of --task, one of TASKS. Raises BadInput if there are none."""
    if flags.task == "functions":
        return problems
    gaps = make_gaps(problems, flags.num_tasks, seed)
    if not gaps:
        raise BadInput(f"--task={flags.task} finds no gaps to fill: the problems of --problems have no solutions")
    return gaps


def evaluate(items, writer, judge, workers, show=ignore):
    """Returns the records of all items, problems or Gaps, in their order. `workers` threads judge while the model
    writes the next items. show(1) is called after each item."""
    found = []
    pending = deque()  # for each item, its records and their verdicts in flight

    def finish_first():
        for record, verdict in pending.popleft():
            found.append(record | vars(verdict.result()))
        show(1)

    with ThreadPoolExecutor(workers) as pool:
        for item in items:
            records = writer.write(item)
            pending.append([(record, pool.submit(item.verdict, judge, record["text"])) for record in records])
            # The model runs at most two items for each worker ahead of the judging, so that Ctrl-C does not wait long.
            while pending and (len(pending) > 2 * workers or all(verdict.done() for _, verdict in pending[0])):
                finish_first()
        while pending:
            finish_first()
    return found


def read_others(path, settings):
    """Returns the records of the evaluation in `path`. Raises BadInput unless its task and settings are the same."""
    found, records = read_results(path / "samples.jsonl" if path.is_dir() else path)
    ours = dict(settings)
    for key in OF_THE_CHECKPOINT:
        ours.pop(key, None)
        found.pop(key, None)
    if ours != found:
        raise BadInput(f"--against={path} is not comparable: {difference(found, ours)}")
    return records


def check_solutions(problems, judge, workers):
    """Judges all solutions, prints how many pass, and returns the exit status."""
    solved = [problem for problem in problems if problem.solution]
    if not solved:
        raise BadInput("--check needs solutions: the problems of --problems have none")
    num_passed = 0
    with ThreadPoolExecutor(workers) as pool:
        found = [pool.submit(judge.judge, problem.program(problem.solution), problem.tests) for problem in solved]
        for problem, verdict in zip(solved, found, strict=True):
            verdict = verdict.result()
            num_passed += verdict.passed
            if not verdict.passed:
                say(f"{problem.name}: {verdict.status}\n{verdict.message}", keep="\n\t")
    print(f"{num_passed} of {len(solved)} solutions pass", flush=True)
    return int(num_passed < len(solved))
