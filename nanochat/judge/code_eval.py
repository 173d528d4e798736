"""Measures the share of a model's C++ that compiles and passes tests, for scripts/code_eval.py."""
import hashlib
import json
from collections import deque
from concurrent.futures import ThreadPoolExecutor

from nanochat.common import BadInput, get_base_dir, require_writable_dir, say, written_whole
from nanochat.infer.sample import ignore
from nanochat.judge.gaps import make_gaps

TASKS = ("functions", "infill_functions")
OF_THE_CHECKPOINT = ("checkpoint", "weights", "device_type")  # settings in which two evaluations may differ
SAMPLES = "samples.jsonl"  # the settings, then a line for each sample


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


def make_results_dir(out_dir, name, settings):
    """Makes and returns the folder of the results: `out_dir`, or one in $NANOCHAT_BASE_DIR/code_eval. Raises BadInput,
    also if it holds those of other settings."""
    digest = hashlib.sha256(repr(settings).encode()).hexdigest()[:8]
    out_dir = require_writable_dir(out_dir or get_base_dir() / "code_eval" / f"{name}_{digest}")
    if (out_dir / SAMPLES).exists():
        _require_same(f"choose another --out_dir than {out_dir}, which holds results of another evaluation",
                      read_results(out_dir)[0], settings)
    return out_dir


def write_results(out_dir, settings, records):
    """Writes SAMPLES."""
    with written_whole(out_dir / SAMPLES) as unfinished:
        unfinished.write_text("".join(f"{json.dumps(line)}\n" for line in [settings, *records]))


def read_results(out_dir):
    """Returns (settings, records) of the SAMPLES in a folder. Raises BadInput."""
    path = out_dir / SAMPLES
    try:
        settings, *records = [dict(json.loads(line)) for line in path.read_bytes().splitlines()]
        if "format" not in settings or not all({"name", "group", "status"} <= record.keys() for record in records):
            raise ValueError("a line is no sample with its verdict")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise BadInput(f"{out_dir} has no results of code_eval ({SAMPLES}: {error}): name another folder") from None
    return settings, records


def read_others(out_dir, settings):
    """Returns the records of the evaluation in a folder. Raises BadInput unless its task and settings are the same."""
    found, records = read_results(out_dir)
    _require_same(f"--against={out_dir} is not comparable", *(
        {key: value for key, value in each.items() if key not in OF_THE_CHECKPOINT} for each in (found, settings)))
    return records


def _require_same(refusal, theirs, ours):
    """Raises BadInput with the first setting that differs."""
    for key in {**ours, **theirs}:
        if ours.get(key) != theirs.get(key):
            raise BadInput(f"{refusal} ({key} is {theirs.get(key)} there and {ours.get(key)} here)")


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
