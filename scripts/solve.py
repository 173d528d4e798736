"""Searches for C++ that compiles and passes your tests, with the compiler as the judge, within a budget of tokens:

    python3 -m scripts.solve --checkpoint=RUN --prompt_file=half_written.cpp
    python3 -m scripts.solve --checkpoint=RUN --prompt='int add(int a, int b) {' --tests=FILE
    python3 -m scripts.solve --checkpoint=RUN --problems=own    # compares the methods

Prints the code with its verdict as a comment on standard output, and the search on standard error. The exit status is 0
if the code compiles and passes the tests, and 1 if not. Needs g++ and bubblewrap: apt-get install g++ bubblewrap
"""
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from nanochat.checkpoint.on_disk import find_checkpoint
from nanochat.common import expand_path, flag, read_flags, run_script
from nanochat.device.ranks import compute_cleanup, prepare_xla_environment
from nanochat.infer.flags import ModelFlags, resolve_inference_device_type
from nanochat.judge.eval_report import require_scipy
from nanochat.judge.judge import Judge, JudgeFlags
from nanochat.judge.problems import ProblemFlags, digest
from nanochat.judge.results import results_dir, results_file, write_results
from nanochat.judge.solve import SearchFlags, compare_methods, fitting, load_writers, solve, table
from nanochat.record.progress import Progress


@dataclass(frozen=True)
class ResultFlags(JudgeFlags):
    out_dir: Path | None = flag(None, "of a comparison; default: in $NANOCHAT_BASE_DIR/solve", of=expand_path)


def main(argv=None):
    of_model, of_problems, flags, judging = read_flags(argv, __doc__, {
        ModelFlags: "model", ProblemFlags: "what it solves", SearchFlags: "search", ResultFlags: "judging"})
    if of_problems.is_comparison:
        require_scipy()
    import torch

    from nanochat.infer.load import load_language_meta, weights_of
    problems = of_problems.read()
    methods, budgets = flags.methods_and_budgets(of_problems.is_comparison)
    device_type = resolve_inference_device_type(of_model.device_type)
    prepare_xla_environment(device_type)
    path = find_checkpoint(of_model.checkpoint)
    meta = load_language_meta(path)
    sampling = flags.sampling(meta.config["max_seq_len"])
    methods = fitting(methods, meta, of_problems.is_comparison)
    load = partial(load_writers, of_model, path, device_type, sampling)
    if not of_problems.is_comparison:
        with Judge() as judge:
            return solve(judge, load, problems[0], methods[0], budgets[0], judging.num_workers)
    settings = {
        "format": 1, "task": "search", "items": digest(problems), "num_items": len(problems), "methods": methods,
        "budgets": [asdict(budget) for budget in budgets], "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature, "top_p": sampling.top_p, "seed": sampling.seed,
        "quantize": of_model.quantize, "checkpoint": f"{path.parent.name}/{path.name}",
        "weights": weights_of(path), "device_type": device_type}
    out_dir = results_dir(judging.out_dir, "solve", f"{path.parent.name}_{path.name}", settings)
    file = results_file(out_dir, "searches.jsonl", settings)
    with Judge() as judge:
        torch.set_num_threads(1)  # the searches themselves run in parallel
        writers = load(judging.num_workers)
        with Progress("problems", len(problems), unit="") as progress:
            records = compare_methods(writers, judge, problems, methods, budgets, progress.update)
        compute_cleanup(writers[0].dist)
    write_results(file, settings, records)
    lines = table(records)
    (out_dir / "table.txt").write_text("\n".join(lines) + "\n")
    print("\n".join(lines) + f"\n\n{out_dir}: searches.jsonl, table.txt")


if __name__ == "__main__":
    run_script(main, "searching")
