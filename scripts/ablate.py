"""Compares variants of a training run: trains each with several seeds, one run after the other.

    python3 -m scripts.ablate rates.toml --accelerator=v5litepod-8

The table is a TOML file. Its keys are flags of base_train; the first variant is the reference:

    seeds = [0, 1, 2]
    [flags]                # of all runs
    depth = 4
    [variants.default]
    [variants.half]
    matrix_lr = 0.01

It may be killed at any time: the same command resumes, and repeats no finished run. It prints which variants differ
from the reference by more than their seeds do, and draws validation over tokens, FLOPs, seconds and, with
--accelerator, the preflight's chip-seconds. docs/ablations.md says more.
"""
import sys
from dataclasses import dataclass
from pathlib import Path

from nanochat.analysis.figures import require_packages
from nanochat.analysis.history import read_run
from nanochat.analysis.results import curve_of, finish_or_reopen, write_results
from nanochat.analysis.running import STOPPED, chip_seconds_per_token, run_trial, stop_on_sigterm
from nanochat.analysis.summary import format_table
from nanochat.analysis.trials import read_trials, require_same_flags
from nanochat.common import expand_path, flag, get_base_dir, locked, read_flags, require_writable_dir, run_script
from nanochat.device import tpu
from nanochat.record.metrics import format_count

BASE_TRAIN = [sys.executable, "-m", "scripts.base_train"]
TPU_PREFLIGHT = [sys.executable, "-m", "scripts.tpu_preflight"]


@dataclass(frozen=True)
class Flags:
    table: Path = flag(None, "the TOML file with seeds, flags and variants", positional=True, of=expand_path,
                       metavar="TABLE")
    accelerator: str | None = flag(None, "also compare by the chip-seconds that tpu_preflight estimates for this TPU, "
                                   "such as v5litepod-8")
    dry_run: bool = flag(False, "check the table, print the runs, and train nothing")


def describe_plan(trials):
    """Prints the runs."""
    rows = [("variant", ["parameters", "batch", "steps", "tokens", "FLOPs"])]
    for name, plan in {trial.variant: trial.plan for trial in trials}.items():
        rows.append((name, [format_count(sum(plan.parameters.values())), f"{plan.total_batch_size:,}",
                            f"{plan.num_iterations:,}", format_count(plan.tokens(0, plan.num_iterations)),
                            f"{plan.flops(0, plan.num_iterations):.3g}"]))
    seeds = dict.fromkeys(str(trial.seed) for trial in trials)
    done = sum(trial.is_finished() for trial in trials)
    print(format_table(rows))
    print(f"{len(trials)} runs, seeds {', '.join(seeds)}; {done} finished before", flush=True)


def run_all(trials, accelerator, folder):
    """Trains the unfinished runs, and writes the results after each. Returns the exit status."""
    chip_seconds = {}
    if accelerator:
        for name, trial in {trial.variant: trial for trial in trials}.items():
            chip_seconds[name] = chip_seconds_per_token(trial, accelerator, TPU_PREFLIGHT, folder)
    num_failed = 0
    for number, trial in enumerate(trials, 1):
        if trial.is_finished():
            continue
        print(f"run {number} of {len(trials)}: {trial.variant}, seed {trial.seed}", flush=True)
        log_path = folder / f"{trial.variant}.{trial.seed}.log"
        status = run_trial(trial, BASE_TRAIN, log_path)
        # The trial has saved and can resume. Whoever stopped it, the same command begins with it again.
        if status == STOPPED:
            raise KeyboardInterrupt
        if status or not finish_or_reopen(trial):
            num_failed += 1
            print(f"warning: {trial.variant}, seed {trial.seed} ended with status {status}: see {log_path}", flush=True)
        else:
            print(f"  {read_run(str(trial.directory)).last('val_bpb'):.4f} bits per byte", flush=True)
            write_results(trials, chip_seconds, folder)
    if num_failed < len(trials):
        print("\n" + write_results(trials, chip_seconds, folder) + f"\n\n{folder / 'report.html'}", flush=True)
    if num_failed:
        print(f"error: {num_failed} of {len(trials)} runs failed; the same command tries them again", file=sys.stderr)
        return 1
    return 0


def main(argv=None):
    (flags,) = read_flags(argv, __doc__, {Flags: "flags"})
    require_packages("matplotlib", "scipy")  # before the runs, not after them
    trials = read_trials(flags.table)
    accelerator = flags.accelerator and tpu.parse_accelerator(flags.accelerator).accelerator
    # All runs are checked before the first one trains: errors come now, and not after hours.
    for trial in trials:
        require_same_flags(trial)
        if trial.is_finished():
            curve_of(trial)
    describe_plan(trials)
    if flags.dry_run:
        return 0
    folder = require_writable_dir(get_base_dir() / "ablations" / flags.table.stem)
    lock_file = folder / ".lock"
    try:
        with (locked(lock_file, f"{flags.table} is in use: another process holds {lock_file}; wait for its end"),
              stop_on_sigterm()):
            return run_all(trials, accelerator, folder)
    except KeyboardInterrupt:
        print("stopped: the same command resumes", flush=True)
        return STOPPED


if __name__ == "__main__":
    run_script(main)
