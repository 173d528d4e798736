"""Evaluates a checkpoint on the project's own problems and prints one table: make eval CHECKPOINT=RUN

It runs code_eval on functions and on gaps in their solutions, and solve with every method at three budgets. Everything
is written to $NANOCHAT_BASE_DIR/eval. It may be killed at any time: the same command goes on. With a model of 9M
parameters it took 49 minutes on two cores.
"""
import time
from dataclasses import dataclass
from pathlib import Path

from nanochat.checkpoint.format import find_checkpoint
from nanochat.common import (
    BadInput,
    expand_path,
    flag,
    get_base_dir,
    read_flags,
    require_writable_dir,
    run_module,
    run_script,
)
from nanochat.infer.load import load_language_meta, resolve_inference_device_type, weights_of
from nanochat.judge import compare_search
from nanochat.judge.eval_report import ALL, summarise
from nanochat.judge.evaluate import read_results

MEASURES = {  # of code_eval, and their names in the table
    "functions": {"compiles": "compiles, greedy", "compiles, drawn": "compiles, drawn", "pass@1": "pass@1, greedy",
                  "pass@10, drawn": "pass@10, drawn", "bits per byte": "bits per byte of the solutions"},
    "infill_functions": {"exact match": "gaps in solutions: exact match", "edit similarity": "… edit similarity",
                         "compiles": "… compiles", "pass@1": "… pass@1", "bits per byte": "… bits per byte",
                         "bits per byte without suffix": "… bits per byte without the text after the gap"}}


@dataclass(frozen=True)
class Flags:
    checkpoint: str = flag("", "a run (its newest checkpoint), RUN/step_000100 or a path; none: the newest")
    tokenizer_dir: Path | None = flag(None, "default: $NANOCHAT_BASE_DIR/tokenizer if it exists, else the shipped one",
                                      of=expand_path)
    device_type: str = flag("auto", "as for scripts.generate")
    problems: str = flag("own", "problems with tests and solutions: own, or a file or folder as for code_eval")
    out_dir: Path | None = flag(None, "default: a folder of the checkpoint's name in $NANOCHAT_BASE_DIR/eval",
                                of=expand_path)
    unsafe: bool = flag(False, "as for code_eval: limits only, without a sandbox")


def main(argv=None):
    (flags,) = read_flags(argv, __doc__, {Flags: "flags"})
    device_type = resolve_inference_device_type(flags.device_type)
    path = find_checkpoint(flags.checkpoint)
    meta = load_language_meta(path)
    has_fim = meta.flags.get("fim_rate", 0) > 0
    max_tokens = min(256, meta.config["max_seq_len"] // 2)
    out_dir = require_writable_dir(flags.out_dir or get_base_dir() / "eval" / f"{path.parent.name}_{path.name}")
    common = [f"--checkpoint={path.absolute()}", f"--device_type={device_type}", f"--max_tokens={max_tokens}"]
    common += [f"--tokenizer_dir={flags.tokenizer_dir}"] if flags.tokenizer_dir else []
    common += ["--unsafe"] if flags.unsafe else []
    of_code_eval = [] if flags.problems == "own" else [f"--problems={flags.problems}"]
    found, weights = {}, weights_of(path)

    def results_of(file):
        settings, records, _ = read_results(file)
        if settings["weights"] != weights:
            raise BadInput(f"checkpoint {path} was replaced since this command began: start it again, with another "
                           "--out_dir")
        return records

    for task in MEASURES if has_fim else ["functions"]:
        run("scripts.code_eval", *common, *of_code_eval, f"--task={task}", f"--out_dir={out_dir / task}")
        found[task] = results_of(out_dir / task / "samples.jsonl")
    run("scripts.solve", *common, f"--problems={flags.problems}", f"--out_dir={out_dir / 'search'}")
    lines = [f"Checkpoint `{path.parent.name}/{path.name}`. In brackets: the 95% interval over problems or gaps.", "",
             *scores(found), "", *compare_search.table(results_of(out_dir / "search" / "searches.jsonl"))]
    (out_dir / "table.txt").write_text("\n".join(lines) + "\n")
    print("\n" + "\n".join(lines) + f"\n\n{out_dir / 'table.txt'}")


def run(module, *flags):
    """Runs a script of this project, see run_module, and prints how long it took."""
    begun = time.monotonic()
    run_module(module, *flags)
    print(f"({(time.monotonic() - begun) / 60:.1f} minutes)\n", flush=True)


def scores(found):
    """Returns the lines of a Markdown table. found: {task: records of code_eval}."""
    lines = ["| measure | | of |", "|---|---|---|"]
    for task, records in found.items():
        rows = {measure: of for measure, group, of in summarise(records) if group == ALL}
        for measure, name in MEASURES[task].items():
            if measure in rows:
                of = rows[measure]
                is_share = "bits" not in measure and "similarity" not in measure
                value = compare_search.in_percent(of) if is_share else f"{of.mean:.3f} [{of.low:.3f}, {of.high:.3f}]"
                lines.append(f"| {name} | {value} | {of.num_problems} |")
    return lines


if __name__ == "__main__":
    run_script(main)
