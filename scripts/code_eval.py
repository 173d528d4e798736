"""Measures whether the C++ that a checkpoint writes compiles and works, by g++ in a sandbox:

    python3 -m scripts.code_eval --checkpoint=RUN                   # functions, from a comment and a signature
    python3 -m scripts.code_eval --checkpoint=RUN --task=infill     # gaps in held-out files
    python3 -m scripts.code_eval --checkpoint=RUN --against=FOLDER  # is it better than another checkpoint?
    python3 -m scripts.code_eval --check                            # judges the problems' solutions; needs no model

It may be killed at any time: the same command goes on. It needs g++ and bubblewrap: apt-get install g++ bubblewrap
"""
import hashlib
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from filelock import FileLock, Timeout
from tqdm import tqdm

from nanochat.checkpoint.format import find_checkpoint
from nanochat.common import BadInput, expand_path, flag, get_base_dir, read_flags, require_writable_dir, run_script
from nanochat.data.shards import TextFlags, open_text
from nanochat.device.ranks import (
    DEVICE_TYPES,
    compute_cleanup,
    compute_init,
    prepare_xla_environment,
    resolve_device_type,
)
from nanochat.infer.load import load_language_meta, load_model, weights_of
from nanochat.judge.eval_report import compare_results, format_differences, format_scores, make_page, summarise
from nanochat.judge.evaluate import (
    Results,
    Sampling,
    Writer,
    difference,
    evaluate,
    judge_function,
    judge_gap,
    read_results,
)
from nanochat.judge.infilling import document_tasks, function_tasks, read_documents
from nanochat.judge.judge import Judge, JudgeFlags
from nanochat.judge.problems import digest, read_problems, usable, without_one_line

TASKS = ("functions", "infill", "infill_functions")
OF_THE_CHECKPOINT = ("checkpoint", "weights", "device_type")  # settings in which two evaluations may differ


def task_name(text):
    if text not in TASKS:
        raise BadInput(f"choose one of {', '.join(TASKS)}")
    return text


@dataclass(frozen=True)
class ModelFlags:
    checkpoint: str = flag("", "a run (its newest checkpoint), RUN/step_000100 or a path; none: the newest")
    tokenizer_dir: Path | None = flag(None, "default: $NANOCHAT_BASE_DIR/tokenizer if it exists, else the shipped one",
                                      of=expand_path)
    device_type: str = flag("auto", "one of " + ", ".join(DEVICE_TYPES))


@dataclass(frozen=True)
class TaskFlags(TextFlags):
    task: str = flag("functions", "functions (to be completed), infill (gaps in held-out files) or infill_functions "
                     "(gaps in the solutions of problems)", of=task_name)
    problems: Path | None = flag(None, "problems in the format of HumanEval-X or MultiPL-E; default: the project's own",
                                 of=expand_path)
    num_tasks: int = flag(100, "gaps of each kind", at_least=1, at_most=10_000)
    check: bool = flag(False, "judge the solutions of the problems, and each with one line deleted, instead of a model")


@dataclass(frozen=True)
class SamplingFlags:
    num_samples: int = flag(10, "samples that are drawn for each function, besides the greedy one", at_least=0,
                            at_most=1000)
    max_tokens: int = flag(256, "tokens per sample", at_least=1)
    temperature: float = flag(0.8, "of the samples that are drawn", above=0)
    top_p: float = flag(0.95, "draw from the likeliest tokens that have this probability together", above=0, at_most=1)
    seed: int = flag(0, "the same seed gives the same file, and chooses the same gaps", at_least=0)


@dataclass(frozen=True)
class ResultFlags(JudgeFlags):
    out_dir: Path | None = flag(None, "folder of the results; default: one in $NANOCHAT_BASE_DIR/code_eval",
                                of=expand_path)
    against: Path | None = flag(None, "folder of the results of another checkpoint, to compare with", of=expand_path)


def main(argv=None):
    of_model, of_task, sampling, judging = read_flags(argv, __doc__, {
        ModelFlags: "model", TaskFlags: "what it does", SamplingFlags: "sampling", ResultFlags: "judging"})
    workers = judging.num_workers
    problems = usable(read_problems(of_task.problems))
    if of_task.check:
        with Judge(judging.unsafe) as judge:
            return check(problems, judge, workers, sampling.seed)
    device_type = resolve_device_type(of_model.device_type)
    prepare_xla_environment(device_type)
    path = find_checkpoint(of_model.checkpoint)
    items, digest_of_items = make_items(of_task, problems, sampling.seed)
    context = load_language_meta(path).config["max_seq_len"]
    if sampling.max_tokens > context // 2:
        raise BadInput(f"--max_tokens={sampling.max_tokens} is more than half of the {context} tokens that the model "
                       "sees")
    settings = {
        "format": 1, "task": of_task.task, "items": digest_of_items, "num_items": len(items), **asdict(sampling),
        "checkpoint": f"{path.parent.name}/{path.name}",
        "weights": weights_of(path), "device_type": device_type}
    others = read_others(judging.against, settings) if judging.against else []
    out_dir = require_writable_dir(judging.out_dir or get_base_dir() / "code_eval" / "_".join(
        [path.parent.name, path.name, of_task.task, hashlib.sha256(repr(settings).encode()).hexdigest()[:8]]))
    try:
        with (FileLock(out_dir / ".lock", timeout=0), Judge(judging.unsafe) as judge,
              Results(out_dir / "samples.jsonl", settings) as results):
            dist = compute_init(device_type)
            model, tokenizer, _ = load_model(path, dist, tokenizer_dir=of_model.tokenizer_dir,
                                             weights=settings["weights"])
            writer = Writer(model, tokenizer, dist, Sampling(**asdict(sampling)))
            run(of_task.task, items, problems, writer, judge, results, workers)
            compute_cleanup(dist)
    except Timeout:
        raise BadInput(f"another code_eval is writing to {out_dir}: wait for it, or choose another --out_dir") from None
    report(out_dir, settings, results.records, items, others)


def make_items(flags, problems, seed):
    """Returns the problems or infilling tasks, and a digest of them. Raises BadInput if there are none."""
    if flags.task == "functions":
        return problems, digest(problems)
    if flags.task == "infill":
        tasks = document_tasks(read_documents(open_text(flags, "val")), flags.num_tasks, seed)
    else:
        tasks = function_tasks(problems, flags.num_tasks, seed)
    if not tasks:
        raise BadInput(f"--task={flags.task} finds no text with a gap to fill: " + (
            "--data_dir has no fitting file" if flags.task == "infill" else "--problems has no solutions"))
    return tasks, digest(tasks)


def read_others(path, settings):
    """Returns the records of the evaluation in `path`. Raises BadInput unless it is of the same task and settings."""
    found, records, _ = read_results(path / "samples.jsonl" if path.is_dir() else path)
    ours, theirs = ({key: value for key, value in each.items() if key not in OF_THE_CHECKPOINT}
                    for each in (settings, found))
    if ours != theirs:
        raise BadInput(f"--against={path} is not comparable: {difference(theirs, ours)}")
    return records


def run(task, items, problems, writer, judge, results, workers):
    """Evaluates all items that `results` does not have yet."""
    by_name = {problem.name: problem for problem in problems}
    if task == "functions":
        write, decide = writer.write_functions, partial(judge_function, judge)
    else:
        write = writer.fill_gap

        def decide(item, text):
            return judge_gap(judge, item, by_name.get(item.problem), text)
    with tqdm(total=len(items), unit="problem", disable=not sys.stderr.isatty()) as bar:
        num_done, said = 0, time.monotonic()

        def show(count):
            nonlocal num_done, said
            num_done += count
            bar.update(count)
            if bar.disable and time.monotonic() - said > 10:  # plain lines for a log
                said = time.monotonic()
                print(f"{num_done} of {len(items)} are judged", file=sys.stderr, flush=True)

        evaluate(items, write, decide, results, workers, show)


def report(out_dir, settings, records, items, others):
    """Prints the scores, and writes them and the page."""
    rows = summarise(records)
    print("\n".join(format_scores(rows)))
    differences = format_differences(compare_results(records, others)) if others else []
    if differences:
        print("\nthe difference to --against, each problem compared with itself:\n" + "\n".join(differences))
    texts = {item.name: (item.prompt, item.closing()) if hasattr(item, "prompt") else
             (item.prefix[-1500:], item.suffix[:1500]) for item in items}
    (out_dir / "page.html").write_text(make_page(settings, records, texts, differences), encoding="utf-8")
    (out_dir / "scores.txt").write_text("\n".join([*format_scores(rows), *differences]) + "\n", encoding="utf-8")
    print(f"\n{out_dir}: samples.jsonl, scores.txt, page.html")


def check(problems, judge, workers, seed):
    """Judges all solutions, and each with one line deleted. Returns 1 if a solution does not pass."""
    solved = [problem for problem in problems if problem.solution]
    if not solved:
        raise BadInput("--check needs solutions, and the problems of --problems have none")
    with ThreadPoolExecutor(workers) as pool:
        def share(programs, what):
            verdicts = list(pool.map(lambda program: judge.judge(program[0].program(program[1]), program[0].tests),
                                     programs))
            passed = sum(verdict.passed for verdict in verdicts)
            print(f"{passed} of {len(programs)} {what} pass", flush=True)
            return verdicts

        verdicts = share([(problem, problem.solution) for problem in solved], "solutions")
        for problem, verdict in zip(solved, verdicts, strict=True):
            if not verdict.passed:
                print(f"{problem.name}: {verdict.status}\n{verdict.message}")
        broken = [(problem, without_one_line(problem.solution)) for problem in solved]
        share([(problem, texts[(seed + i) % len(texts)]) for i, (problem, texts) in enumerate(broken) if texts],
              "solutions with one line deleted")
    return int(not all(verdict.passed for verdict in verdicts))


if __name__ == "__main__":
    run_script(main)
