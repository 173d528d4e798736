"""Evaluates a checkpoint on the project's own problems and prints one table: make eval CHECKPOINT=RUN

Runs code_eval on functions and on gaps in their solutions, and solve with every method at three budgets. Writes to
$NANOCHAT_BASE_DIR/eval. A model of 9M parameters takes 49 minutes on two cores.
"""
from dataclasses import dataclass
from pathlib import Path

from nanochat.checkpoint.on_disk import find_checkpoint
from nanochat.common import expand_path, flag, get_base_dir, read_flags, require_writable_dir, run_script
from nanochat.infer.load import CheckpointFlags, load_language_meta, resolve_inference_device_type, weights_of
from nanochat.infer.prompt import fills_gaps
from nanochat.infer.sample import default_max_tokens
from nanochat.judge import eval_report, solve
from nanochat.judge.results import records_of
from nanochat.run.processes import run_module


@dataclass(frozen=True)
class Flags(CheckpointFlags):
    problems: str = flag("own", "problems with tests and solutions: own, or a file or folder as for code_eval")
    out_dir: Path | None = flag(None, "default: in $NANOCHAT_BASE_DIR/eval", of=expand_path)


def main(argv=None):
    (flags,) = read_flags(argv, __doc__, {Flags: "flags"})
    eval_report.require_scipy()
    device_type = resolve_inference_device_type(flags.device_type)
    path = find_checkpoint(flags.checkpoint)
    meta = load_language_meta(path)
    max_tokens = default_max_tokens(meta.config["max_seq_len"])
    out_dir = require_writable_dir(flags.out_dir or get_base_dir() / "eval" / f"{path.parent.name}_{path.name}")
    weights = weights_of(path)
    common = [f"--checkpoint={path.absolute()}", f"--device_type={device_type}", f"--max_tokens={max_tokens}",
              f"--problems={flags.problems}"]
    if flags.tokenizer_dir:
        common.append(f"--tokenizer_dir={flags.tokenizer_dir}")
    tasks = ["functions"]
    if fills_gaps(meta):  # without fill in the middle, a model has never seen the prompt of a gap
        tasks.append("infill_functions")
    found = {}
    for task in tasks:
        run_module("scripts.code_eval", *common, f"--task={task}", f"--out_dir={out_dir / task}")
        found[task] = records_of(out_dir / task / "samples.jsonl", path, weights)
    run_module("scripts.solve", *common, f"--out_dir={out_dir / 'search'}")
    searches = records_of(out_dir / "search" / "searches.jsonl", path, weights)
    lines = [f"Checkpoint `{path.parent.name}/{path.name}`. In brackets: the 95% interval over problems or gaps.", "",
             *eval_report.table(found), "", *solve.table(searches)]
    (out_dir / "table.txt").write_text("\n".join(lines) + "\n")
    print("\n" + "\n".join(lines) + f"\n\n{out_dir / 'table.txt'}")


if __name__ == "__main__":
    run_script(main)
