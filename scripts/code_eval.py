"""Measures whether the C++ of a checkpoint compiles and passes tests, with g++ in a sandbox:

    python3 -m scripts.code_eval --checkpoint=RUN                   # functions, from a comment and a signature
    python3 -m scripts.code_eval --checkpoint=RUN --task=infill_functions   # gaps in solutions of problems
    python3 -m scripts.code_eval --checkpoint=RUN --against=FOLDER  # is it better than another checkpoint?
    python3 -m scripts.code_eval --check                            # judges the problems' solutions; needs no model

Needs apt-get install g++ bubblewrap, and pip install '.[judge]'.

The prompt for a gap is that of an editor: the beginning of the gap's line comes right before the model's text.
"""
from dataclasses import dataclass
from pathlib import Path

from nanochat.checkpoint.on_disk import find_checkpoint
from nanochat.common import expand_path, flag, read_flags, run_script
from nanochat.device.ranks import compute_cleanup, compute_init, prepare_xla_environment
from nanochat.infer.flags import CheckpointFlags, resolve_inference_device_type
from nanochat.judge.code_eval import (
    TASKS,
    check_solutions,
    evaluate,
    make_items,
    make_results_dir,
    read_others,
    write_results,
)
from nanochat.judge.eval_report import require_scipy, write_report
from nanochat.judge.flags import WriterFlags
from nanochat.judge.judge import Judge, JudgeFlags
from nanochat.judge.problems import digest, read_sets
from nanochat.record.progress import Progress


@dataclass(frozen=True)
class TaskFlags:
    task: str = flag("functions", "functions, or infill_functions: gaps in the problems' solutions", choices=TASKS)
    problems: str = flag("own", "sets of docs/evaluation.md#problems, separated by commas; own: the project's")
    num_tasks: int = flag(100, "gaps of each kind", at_least=1, at_most=10_000)
    check: bool = flag(False, "judge the problems' solutions instead of a model")


@dataclass(frozen=True)
class SamplingFlags(WriterFlags):
    num_samples: int = flag(10, "samples drawn for each function, besides the greedy one", at_least=0, at_most=1000)


@dataclass(frozen=True)
class ResultFlags(JudgeFlags):
    out_dir: Path | None = flag(None, "of the results; default: in $NANOCHAT_BASE_DIR/code_eval", of=expand_path)
    against: Path | None = flag(None, "folder of the results of another checkpoint, to compare with", of=expand_path)


def main(argv=None):
    of_model, of_task, of_samples, judging = read_flags(argv, __doc__, {
        CheckpointFlags: "model", TaskFlags: "what it does", SamplingFlags: "sampling", ResultFlags: "judging"})
    problems = read_sets(of_task.problems)
    if of_task.check:
        with Judge() as judge:
            return check_solutions(problems, judge, judging.num_workers)
    require_scipy()
    from nanochat.infer.load import load_language_meta, load_model, weights_of
    from nanochat.judge.writer import Writer
    device_type = resolve_inference_device_type(of_model.device_type)
    prepare_xla_environment(device_type)
    path = find_checkpoint(of_model.checkpoint)
    items = make_items(of_task, problems, of_samples.seed)
    sampling = of_samples.sampling(load_language_meta(path).model_config.context, of_samples.num_samples)
    # Everything that determines the records. The first line of the results holds it, and a file with other settings is
    # not overwritten. `weights` are a part of the checksum, so a replaced checkpoint counts as another one.
    settings = {
        "format": 1, "task": of_task.task, "items": digest(items), "num_items": len(items),
        "num_samples": sampling.num_samples, "max_tokens": sampling.max_tokens, "temperature": sampling.temperature,
        "top_p": sampling.top_p, "seed": sampling.seed,
        "checkpoint": f"{path.parent.name}/{path.name}", "weights": weights_of(path), "device_type": device_type}
    others = read_others(judging.against, settings) if judging.against else []
    name = f"{path.parent.name}_{path.name}_{of_task.task}"
    out_dir = make_results_dir(judging.out_dir, name, settings)
    with Judge() as judge:
        dist = compute_init(device_type)
        model, tokenizer, _ = load_model(path, dist, tokenizer_dir=of_model.tokenizer_dir)
        writer = Writer(model, tokenizer, dist, sampling)
        with Progress("problems", len(items), unit="") as progress:
            records = evaluate(items, writer, judge, judging.num_workers, progress.update)
        compute_cleanup(dist)
    write_results(out_dir, settings, records)
    write_report(out_dir, records, others)


if __name__ == "__main__":
    run_script(main, "writing and judging code")
