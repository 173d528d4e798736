"""Compares variants of a training run: trains each with several seeds, one run after the other.

    python3 -m scripts.ablate rates.toml

The table is a TOML file. Its keys are flags of base_train; the first variant is the reference:

    seeds = [0, 1, 2]
    [flags]                # of all runs
    depth = 4
    [variants.default]
    [variants.half]
    matrix_lr = 0.01

It may be killed at any time: the same command resumes, and repeats no finished run. It prints which variants differ
from the reference by more than their seeds do. docs/ablations.md says more.
"""
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nanochat.checkpoint.on_disk import list_checkpoints
from nanochat.common import BadInput, expand_path, flag, read_flags, read_toml, run_script, say, to_flags
from nanochat.data.hub_files import require_commits
from nanochat.device.ranks import prepare_xla_environment, resolve_device_type
from nanochat.judge.eval_report import require_scipy
from nanochat.record.history import read_run
from nanochat.run.processes import expected_world_size, started_module

ENDS = (2, 75)  # statuses of base_train that end a table, too: refused, for example in use; told to stop
NOT_FOR_TABLES = ("run", "seed", "resume", "help", "config")
LEVEL = 0.05  # of the tests, for a whole table


@dataclass(frozen=True)
class Flags:
    table: Path = flag(None, "the TOML file with seeds, flags and variants", positional=True, of=expand_path,
                       metavar="TABLE")
    dry_run: bool = flag(False, "check the table, count its runs, and train nothing")


@dataclass(frozen=True)
class Trial:
    """One run of the table."""
    variant: str
    argv: list  # the flags of base_train
    directory: Path
    num_iterations: int

    def is_finished(self):
        from nanochat.train.prepare import FINISHED_FILE
        return (self.directory / FINISHED_FILE).exists()


def main(argv=None):
    (flags,) = read_flags(argv, __doc__, {Flags: "flags"})
    require_scipy()
    trials = read_trials(flags.table)
    print(f"{len(trials)} runs; {sum(trial.is_finished() for trial in trials)} finished before", flush=True)
    if flags.dry_run:
        return 0
    finals = {trial.variant: [] for trial in trials}
    failed = []
    for trial in trials:
        if not trial.is_finished():
            env = {"WANDB_MODE": "disabled", **os.environ}
            with started_module("scripts.base_train", *trial.argv, env=env) as process:
                status = process.wait()
            if status in ENDS:
                return status
            if status:
                failed.append(trial.directory.name)
                continue
        finals[trial.variant] += final_of(trial)
    print_results(finals)
    if failed:
        say(f"error: {', '.join(failed)} failed; the same command tries again", sys.stderr)
    return 1 if failed else 0


def read_trials(path):
    """Returns the Trials of a table: all variants with the first seed, then with the second, and so on. Raises
    BadInput."""
    table = read_toml(path)
    seeds, shared, variants = table.pop("seeds", [0]), table.pop("flags", {}), table.pop("variants", {})
    if table:
        raise BadInput(f"{path}: {min(table)} is unknown: a table has seeds, [flags] and [variants.NAME]")
    is_whole = isinstance(seeds, list) and all(type(seed) is int for seed in seeds)
    if not is_whole or not seeds or len(set(seeds)) < len(seeds):
        raise BadInput(f"{path}: seeds = {seeds} is not a list of different whole numbers, such as [0, 1, 2]")
    sections = [variants, shared, *variants.values()] if isinstance(variants, dict) else []
    if not variants or not sections or not all(isinstance(each, dict) for each in sections):
        raise BadInput(f"{path} names no variants: write [flags], and a section [variants.NAME] for each variant, with "
                       "one flag per line below it")
    trials = []
    for seed in seeds:
        for variant, own in variants.items():
            try:
                for name in (shared | own).keys() & NOT_FOR_TABLES:
                    raise BadInput(f"{name} is not for a table: leave it out")
                argv = [*to_flags(shared | own), f"--run={path.stem}.{variant}.{seed}", f"--seed={seed}"]
                trials.append(make_trial(variant, argv))
            except BadInput as error:
                raise BadInput(f"{path}: variant {variant}: {error}") from None
    return trials


def make_trial(variant, argv):
    """Returns a Trial, after all checks that need no device: errors come now, and not after hours."""
    from nanochat.checkpoint.meta import load_meta, require_same
    from nanochat.train.flags import parse_flags
    from nanochat.train.language import make_task
    from nanochat.train.prepare import run_directory
    flags = parse_flags(argv)
    for places in (flags.data.data_dir, flags.data.val_dir):
        require_commits(places)  # all runs must read the same data
    directory = run_directory(flags)
    device_type = resolve_device_type(flags.devices.device_type)
    prepare_xla_environment(device_type)
    if flags.record.eval_every < 0:
        raise BadInput("--eval_every=-1: a comparison needs evaluations, so give it a number of steps")
    # The table decides: the run must not take its architecture from an earlier checkpoint of that name.
    task = make_task(flags, device_type, expected_world_size(device_type), directory)
    for path in list_checkpoints(directory)[-1:]:
        meta = load_meta(path)
        now = task.flags.as_dict()
        require_same(path, {f"--{name}": (meta.flags[name], now[name]) for name in now if name in meta.flags} | {
            "the hash of the tokenizer": (meta.tokenizer_sha256, task.tokenizer.sha256),
            "the hash of the data": (meta.data_fingerprint, task.data_fingerprint)})
    return Trial(variant, argv, directory, task.plan.num_iterations)


def final_of(trial):
    """Returns [the bits per byte at the end of a finished run], or [] if there are none."""
    steps, bits_per_byte = read_run(str(trial.directory)).series("val_bpb")
    if not len(steps) or steps[-1] != trial.num_iterations:
        print(f"warning: {trial.directory.name} is left out: it has no evaluation of its last step")
        return []
    return [bits_per_byte[-1]]


def print_results(finals):
    """Prints the table of {variant: [final bits per byte, one of each seed]}. The first variant is the reference."""
    name, *others = finals
    reference = finals[name]
    width = max(map(len, finals))
    print(f"\n{'variant':{width}}  seeds  bits per byte  ± s.d.  difference       p")
    for variant, values in finals.items():
        line = f"{variant:{width}}  {len(values):5}"
        if values:
            deviation = f"{np.std(values, ddof=1):.4f}" if len(values) > 1 else ""
            line += f"  {np.mean(values):13.4f}  {deviation:>6}"
        if variant == name:
            line += "  the reference"
        elif values and reference:
            difference = np.mean(values) - np.mean(reference)
            line += f"  {difference:+10.4f}  {verdict(values, reference, len(others))}"
        print(line, flush=True)


def verdict(values, reference, tests):
    """Returns the p-value of Welch's test (1947) that two samples, whose spreads may differ, have the same mean, and
    what follows from it. tests: how many the table has."""
    # It does not pair the seeds: with two of them, a paired test needs a difference of 12.7 standard errors, and
    # Welch's 4.3 or more.
    from scipy.stats import ttest_ind
    if min(len(values), len(reference)) < 2:
        return "        needs two seeds"
    p_value = float(values[0] == reference[0])
    if np.ptp(values) or np.ptp(reference):  # else the seed changes nothing
        p_value = ttest_ind(values, reference, equal_var=False).pvalue
    # Bonferroni's correction: a table without any true difference shows one with a probability of at most LEVEL.
    p_value = min(1.0, tests * p_value)
    if p_value >= LEVEL:
        return f"{p_value:6.2g}  not beyond the spread of seeds"
    return f"{p_value:6.2g}  {'better' if np.mean(values) < np.mean(reference) else 'worse'}"


if __name__ == "__main__":
    run_script(main)
