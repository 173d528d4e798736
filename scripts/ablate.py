"""Compares variants of a training run: trains each with several seeds, one run after the other.

    python3 -m scripts.ablate rates.toml --accelerator=v5litepod-8

The table is a TOML file. Its keys are flags of base_train; the first variant is the reference:

    seeds = [0, 1, 2]
    [flags]                # of all runs
    depth = 4
    [variants.default]
    [variants.half]
    matrix_lr = 0.01

It may be killed at any time: the same command goes on where it was, and repeats no finished run. It prints which
variants differ from the reference by more than their seeds do, and draws validation over tokens, FLOPs, seconds and,
with --accelerator, the preflight's chip-seconds. docs/ablations.md says more.
"""
import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout

from nanochat.analysis.ablation import compare, read_curve
from nanochat.analysis.trials import read_trials, require_same_flags
from nanochat.common import (
    BadInput,
    end_with_parent,
    expand_path,
    flag,
    get_base_dir,
    is_disk_full,
    read_flags,
    require_writable_dir,
    run_script,
)
from nanochat.device import tpu
from nanochat.model.rates import OptimConfig
from nanochat.record.history import read_run
from nanochat.record.metrics import format_count
from nanochat.train.flags import RecordFlags, RunFlags
from scripts.report import format_table, make_page, save_figure

STOPPED = 75  # as base_train: start the same command again
DOES_NOT_FIT = 3  # exit status of tpu_preflight
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22")


@dataclass(frozen=True)
class Flags:
    table: Path = flag(None, "the TOML file with seeds, flags and variants", positional=True, of=expand_path,
                       metavar="TABLE")
    accelerator: str | None = flag(None, "also compare by the chip-seconds that tpu_preflight estimates for this TPU, "
                                   "such as v5litepod-8")
    dry_run: bool = flag(False, "check the table, print the runs, and train nothing")


def main(argv=None):
    (flags,) = read_flags(argv, __doc__, {Flags: "flags"})
    require_packages()
    trials = read_trials(flags.table)
    accelerator = flags.accelerator and tpu.parse_accelerator(flags.accelerator).accelerator
    for trial in trials:
        require_same_flags(trial)
        if trial.is_finished():
            curve_of(trial)
    describe_plan(trials)
    if flags.dry_run:
        return 0
    folder = require_writable_dir(get_base_dir() / "ablations" / flags.table.stem)
    try:
        with FileLock(folder / ".lock", timeout=0), stop_on_sigterm():
            return run_all(trials, accelerator, folder)
    except Timeout:
        raise BadInput(f"{flags.table} is in use: another process holds {folder / '.lock'}") from None
    except KeyboardInterrupt:
        print("stopped: the same command goes on where it was", flush=True)
        return STOPPED


def require_packages():
    """Raises BadInput if a package for the results is missing: before the runs, not after them."""
    try:
        import matplotlib  # noqa: F401
        import scipy  # noqa: F401
    except ImportError as error:
        raise BadInput(f"there is no {error.name}: pip install '.[report]'") from None


def one_of_each(trials):
    """Returns one Trial of each variant."""
    return list({trial.variant: trial for trial in trials}.values())


def describe_plan(trials):
    """Prints what will be run."""
    rows = [("variant", ["parameters", "batch", "steps", "tokens", "FLOPs"])]
    for trial in one_of_each(trials):
        plan, tokens = trial.plan, trial.plan.tokens(0, trial.plan.num_iterations)
        rows.append((trial.variant, [format_count(sum(plan.parameters.values())), f"{plan.total_batch_size:,}",
                                     f"{plan.num_iterations:,}", format_count(tokens),
                                     f"{plan.flops(0, plan.num_iterations):.3g}"]))
    print(format_table(rows))
    done = sum(trial.is_finished() for trial in trials)
    print(f"{len(trials)} runs, seeds {', '.join(str(seed) for seed in dict.fromkeys(t.seed for t in trials))}; "
          f"{done} finished before", flush=True)


# -----------------------------------------------------------------------------
# The runs


@contextmanager
def stop_on_sigterm():
    """Makes SIGTERM raise KeyboardInterrupt in the block, as Ctrl-C does."""
    def stop(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run_all(trials, accelerator, folder):
    """Trains what is not finished, and writes the results after every run. Returns the exit status."""
    chip_seconds = {trial.variant: chip_seconds_per_token(trial, accelerator, folder)
                    for trial in one_of_each(trials)} if accelerator else {}
    failed = []
    for number, trial in enumerate(trials, 1):
        if trial.is_finished():
            continue
        print(f"run {number} of {len(trials)}: {trial.variant}, seed {trial.seed}", flush=True)
        log_path = folder / f"{trial.variant}.{trial.seed}.log"
        status = run_trial(trial, log_path)
        if status == STOPPED:
            raise KeyboardInterrupt
        if status or not trial.is_finished():
            failed.append(trial)
            print(f"warning: {trial.variant}, seed {trial.seed} ended with status {status}: see {log_path}", flush=True)
        else:
            print(f"  {read_run(str(trial.directory)).last('val_bpb'):.4f} bits per byte", flush=True)
            write_results(trials, chip_seconds, folder)
    if len(failed) < len(trials):
        print("\n" + write_results(trials, chip_seconds, folder) + f"\n\n{folder / 'report.html'}", flush=True)
    if failed:
        print(f"error: {len(failed)} of {len(trials)} runs failed; the same command tries them again", file=sys.stderr)
    return 1 if failed else 0


def run_trial(trial, log_path):
    """Trains one run in a process of its own, with its output in a file. Returns its exit status.

    KeyboardInterrupt stops that process, after a checkpoint. It is told to stop, too, if this process is killed.
    """
    begun, cpu_before = trial.notes(), cpu_seconds()
    trial.write_notes(None)
    with open(log_path, "a") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "scripts.base_train", *trial.argv], stdout=log, stderr=log, stdin=subprocess.DEVNULL,
            start_new_session=True, preexec_fn=partial(end_with_parent, os.getpid(), signal.SIGTERM),
            env={"WANDB_MODE": "disabled", **os.environ})
        try:
            status = process.wait()
        except KeyboardInterrupt:
            print("stopping, after a checkpoint (again: at once)", flush=True)
            process.terminate()
            try:
                process.wait()
            except KeyboardInterrupt:
                process.kill()
                process.wait()
                raise
            status = STOPPED
    earlier = begun.get("cpu_s") if begun else 0.0
    trial.write_notes(None if earlier is None else earlier + cpu_seconds() - cpu_before)
    return status


def cpu_seconds():
    """Returns the CPU seconds of all processes so far that this one has started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def chip_seconds_per_token(trial, accelerator, folder):
    """Returns the chip-seconds that the preflight estimates for a token of this run, or None if it does not fit.

    The preflight is run once for variants whose programs are the same. Raises BadInput if it fails.
    """
    without = {field.name for group in (RunFlags, RecordFlags, OptimConfig) for field in fields(group)}
    without |= {"device_type"}
    argv = sorted(word for word in trial.argv if word.partition("=")[0].removeprefix("--") not in without)
    digest = hashlib.sha256(json.dumps([accelerator, asdict(trial.plan.config), argv]).encode()).hexdigest()[:12]
    path = folder / f"preflight_{digest}.json"
    if not path.exists():
        print(f"preflight of {trial.variant} for {accelerator}", flush=True)
        unfinished = path.with_suffix(".tmp")
        result = subprocess.run(
            [sys.executable, "-m", "scripts.tpu_preflight", f"--accelerator={accelerator}", f"--json={unfinished}",
             "--programs=micro_step,update", *argv], capture_output=True, text=True, stdin=subprocess.DEVNULL,
            preexec_fn=partial(end_with_parent, os.getpid()))
        if result.returncode not in (0, DOES_NOT_FIT):
            last = (result.stderr.strip() or "no message").splitlines()[-1]
            raise BadInput(f"--accelerator={accelerator}: the preflight of variant {trial.variant} ended with status "
                           f"{result.returncode}: {last}")
        unfinished.replace(path)
    report = json.loads(path.read_text())
    if not report["fits"] or "estimate" not in report:
        print(f"warning: {trial.variant} does not fit into a chip of {accelerator}", flush=True)
        return None
    run = report["estimate"]  # of a step in the last stage, and of all of them
    is_of_last = run["hours"] / run.get("hours_of_last", run["hours"])
    return is_of_last * run["step_s"] * report["chips"] / report["plan"]["total_batch_size"]


# -----------------------------------------------------------------------------
# The results


def write_results(trials, chip_seconds, folder):
    """Writes report.html, ablation.png and results.json of all finished runs, and returns the table as text."""
    curves = {}
    for trial in trials:
        if trial.is_finished():
            curves.setdefault(trial.variant, []).append(curve_of(trial))
    plans = {trial.variant: trial.plan for trial in trials}
    names = [name for name in plans if name in curves]
    finals = {name: [curve.bits_per_byte[-1] for curve in curves[name]] for name in names}
    comparisons = compare(finals, reference=trials[0].variant)
    costs = {name: cost_of(curves[name], plans[name], chip_seconds.get(name)) for name in names}
    rows = make_rows(comparisons, curves, costs)
    results = {name: asdict(comparisons[name]) | costs[name] | {"seeds": {
        curve.seed: curve.bits_per_byte[-1] for curve in curves[name]}} for name in names}
    with replacing(folder / "ablation.png") as partial_path:
        draw(partial_path, {name: curves[name] for name in names}, plans, chip_seconds)
    with replacing(folder / "report.html") as partial_path:
        partial_path.write_text(make_page([folder], rows, [folder / "ablation.png"]), encoding="utf-8")
    with replacing(folder / "results.json") as partial_path:
        partial_path.write_text(json.dumps(results, indent=1))
    return format_table(rows)


def curve_of(trial):
    """Returns the Curve of a finished trial. Raises BadInput if its record does not end with the trial's last step."""
    last, remedy = trial.plan.num_iterations, f"delete {trial.directory}, and the same command trains it again"
    try:
        run = read_run(str(trial.directory))
    except BadInput as error:
        raise BadInput(f"{trial.variant}, seed {trial.seed}, has finished, but its record is lost ({error}): "
                       f"{remedy}") from None
    steps = run.series("val_bpb")[0]
    if not len(steps) or steps[-1] != last:
        where = f"step {steps[-1]:g}" if len(steps) else "none"
        raise BadInput(f"{trial.variant}, seed {trial.seed}: its last evaluation is of {where}, not of step {last}, so "
                       f"it was trained on by hand, or its metrics.jsonl is damaged: {remedy}")
    return read_curve(run, trial.seed, trial.notes().get("cpu_s"))


@contextmanager
def replacing(path):
    """Gives the path of a file that takes the name `path` when the block ends. Raises BadInput if it cannot."""
    partial_path = path.with_name(f"partial_{path.name}")
    try:
        yield partial_path
        partial_path.replace(path)
    except OSError as error:
        if is_disk_full(error):
            raise
        raise BadInput(f"{path} cannot be written ({error.strerror}): move it away, and start the same command "
                       "again") from None
    finally:
        partial_path.unlink(missing_ok=True)


def cost_of(curves, plan, chip_s_per_token):
    """Returns what one run of a variant costs, {unit: number or None}; the seconds are medians over seeds."""
    tokens = plan.tokens(0, plan.num_iterations)
    cpu_s = [curve.cpu_s for curve in curves if curve.cpu_s is not None]
    return {"tokens": tokens, "flops": plan.flops(0, plan.num_iterations),
            "train_s": float(np.median([curve.seconds[-1] for curve in curves])),
            "cpu_s": float(np.median(cpu_s)) if cpu_s else None,
            "chip_s": None if chip_s_per_token is None else chip_s_per_token * tokens}


def make_rows(comparisons, curves, costs):
    """Returns the rows of the table for a person, (name, [texts]), the names of the columns first."""
    def number(value, form):
        return "" if value is None else form.format(value)

    rows = [("variant", ["seeds", "bits per byte", "± s.d.", "difference", "p", "", "tokens", "FLOPs", "train s",
                         "CPU s", "chip-s"])]
    for name, found in comparisons.items():
        cost = costs[name]
        rows.append((name, [str(len(curves[name])), f"{found.mean:.4f}", number(found.deviation, "{:.4f}"),
                            number(found.difference, "{:+.4f}"), number(found.p_value, "{:.2g}"), found.verdict,
                            format_count(cost["tokens"]), f"{cost['flops']:.3g}", f"{cost['train_s']:.0f}",
                            number(cost["cpu_s"], "{:.0f}"), number(cost["chip_s"], "{:.3g}")]))
    return rows


def draw(path, curves, plans, chip_seconds):
    """Writes the picture of validation over tokens, FLOPs, seconds and chip-seconds, and returns its path."""
    panels = [("tokens", lambda name, curve: curve.tokens),
              ("FLOPs", lambda name, curve: flops_at(plans[name], curve.tokens)),
              ("seconds of training on this machine", lambda name, curve: curve.seconds)]
    if any(chip_seconds.values()):
        panels.append(("estimated chip-seconds", lambda name, curve: curve.tokens * (chip_seconds[name] or np.nan)))
    return save_figure(path, "Validation, bits per byte", [
        lambda axes, label=label, x_of=x_of: draw_curves(axes, curves, label, x_of) for label, x_of in panels])


def flops_at(plan, tokens):
    """Returns the FLOPs after which a run has seen so many tokens, an array; rows that become longer cost more."""
    steps = [0, *plan.switches, plan.num_iterations]
    return np.interp(tokens, [plan.tokens(0, step) for step in steps], [plan.flops(0, step) for step in steps])


def draw_curves(axes, curves, label, x_of):
    """Draws every run thinly and the mean of each variant's seeds. The first evaluation, before training, is left out,
    because beside it the others would look alike."""
    for index, (name, runs) in enumerate(curves.items()):
        style = {"color": COLOURS[index % len(COLOURS)], "linestyle": ("-", "--", ":")[index // len(COLOURS) % 3]}
        for curve in runs:
            axes.plot(x_of(name, curve)[1:], curve.bits_per_byte[1:], linewidth=0.7, alpha=0.4, **style)
        common = min(len(curve.tokens) for curve in runs)
        axes.plot(np.mean([x_of(name, curve)[1:common] for curve in runs], axis=0),
                  np.mean([curve.bits_per_byte[1:common] for curve in runs], axis=0),
                  linewidth=1.6, marker="o", markersize=3, label=name, **style)
    axes.set(xlabel=label, ylabel="bits per byte")
    axes.legend(fontsize="small")


if __name__ == "__main__":
    run_script(main)
