"""Compares the search of scripts.solve with whole functions drawn at the same budgets:

    python3 -m dev.bench_search --checkpoint=RUN --problems=own --budget=256,512,1024

The search neither sees the tests of the problems nor pays for them: they decide only what the table says.
"""
from collections import defaultdict
from dataclasses import dataclass, replace
from statistics import fmean

from nanochat.checkpoint.on_disk import find_checkpoint
from nanochat.common import BadInput, flag, read_flags, run_script
from nanochat.device.ranks import compute_cleanup, compute_init, prepare_xla_environment
from nanochat.infer.flags import ModelFlags, resolve_inference_device_type
from nanochat.judge.eval_report import PASSED, compare, compiles, require_scipy, score
from nanochat.judge.flags import WriterFlags
from nanochat.judge.judge import Judge, JudgeFlags
from nanochat.judge.problems import read_sets
from nanochat.judge.search import UNFINISHED, Answer, Budget, Search, tree
from nanochat.judge.unfinished import end_of_function
from nanochat.record.progress import Progress

TOKENS_PER_CALL = 4


def budgets_of(text):
    try:
        found = sorted({int(number) for number in text.split(",")})
    except ValueError:
        found = []
    if not found or found[0] < 16 or found[-1] > 1_000_000:
        raise BadInput("it must be whole numbers from 16 to 1,000,000, separated by commas")
    return found


@dataclass(frozen=True)
class Flags(WriterFlags, JudgeFlags):
    problems: str = flag("own", "sets of problems, as for code_eval")
    budget: list | None = flag(None, "tokens to draw, separated by commas; default: 256,512,1024", of=budgets_of)


def best_of(search):
    """Draws whole functions."""
    while not search.is_over:
        draw_and_offer(search)


def draw_and_offer(search):
    """Draws a function, and judges it if the model ended it."""
    prompt = search.problem.prompt
    sampling = search.writer.sampling
    pieces = []

    def note(_, piece):
        pieces.append(piece)

    def is_open():
        return end_of_function(prompt, "".join(pieces)) is None

    [drawn] = search.draw(prompt, 1, sampling.max_tokens, sampling.stop, on_text=note, keep_going=is_open)
    end = end_of_function(prompt, drawn.text)
    text = drawn.text[:end]
    if end is not None or drawn.reason in ("stop", "end"):
        search.offer(text)
    else:
        search.keep(Answer(text, UNFINISHED, ""))


METHODS = {"best_of": best_of, "tree": tree}


def search_problem(writer, judge, problem, budgets, workers):
    """Yields (tokens of the budget, method, record) of all searches for a problem."""
    for tokens in budgets:
        for name, method in METHODS.items():
            search = Search(writer, judge, replace(problem, tests=""), Budget(tokens, tokens // TOKENS_PER_CALL),
                            workers)
            method(search)
            # The search judged without the tests. What does not compile needs no other verdict.
            verdict = answer = search.answer
            if answer.compiles:
                verdict = problem.verdict(judge, answer.text)
            yield tokens, name, {"status": verdict.status, "tokens": search.num_tokens, "calls": search.num_calls}


def table(found):
    """Returns the lines of a Markdown table. found: {(tokens, method): records}."""
    lines = ["| tokens | method | compiles | in points, against `best_of` | pass@1 | tokens used | calls of g++ |",
             "|---|---|---|---|---|---|---|"]
    for (tokens, name), records in found.items():
        compiled = [compiles(record) for record in records]
        against = compare(compiled, [compiles(record) for record in found[tokens, "best_of"]])
        cells = [f"{tokens:,}", f"`{name}`", in_percent(score(compiled)),
                 f"{in_percent(against)}, p = {against.p_value:.4f}" if name != "best_of" else "",
                 in_percent(score([record["status"] == PASSED for record in records])),
                 f"{fmean(record['tokens'] for record in records):.0f}",
                 f"{fmean(record['calls'] for record in records):.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def in_percent(found):
    """Returns a Score in words."""
    return f"{100 * found.mean:.1f}% [{100 * found.low:.1f}, {100 * found.high:.1f}]"


def main(argv=None):
    of_model, flags = read_flags(argv, __doc__, {ModelFlags: "model", Flags: "search"})
    require_scipy()
    from nanochat.infer.load import load_language_meta, load_model
    from nanochat.judge.writer import Writer
    problems = read_sets(flags.problems)
    device_type = resolve_inference_device_type(of_model.device_type)
    prepare_xla_environment(device_type)
    path = find_checkpoint(of_model.checkpoint)
    sampling = flags.sampling(load_language_meta(path).model_config.context)
    found = defaultdict(list)
    with Judge() as judge:
        dist = compute_init(device_type)
        model, tokenizer, _ = load_model(path, dist, tokenizer_dir=of_model.tokenizer_dir, quantize=of_model.quantize)
        writer = Writer(model, tokenizer, dist, sampling)
        with Progress("problems", len(problems), unit="") as progress:
            for problem in problems:
                searches = search_problem(writer, judge, problem, flags.budget or (256, 512, 1024), flags.num_workers)
                for tokens, name, record in searches:
                    found[tokens, name].append(record)
                progress.update(1)
        compute_cleanup(dist)
    print("\n".join(table(found)))


if __name__ == "__main__":
    run_script(main, "searching")
