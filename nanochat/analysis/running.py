"""Runs the trials of an ablation, each in a process of its own, and the preflights that say what they cost on a TPU."""
import hashlib
import json
import os
import resource
import signal
import subprocess
from contextlib import contextmanager
from dataclasses import asdict, fields
from functools import partial

from nanochat.common import BadInput, end_with_parent, written_whole
from nanochat.model.rates import OptimConfig
from nanochat.train.flags import RecordFlags, RunFlags

STOPPED = 75  # as base_train: start the same command again
DOES_NOT_FIT = 3  # exit status of tpu_preflight


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


def run_trial(trial, base_train, log_path):
    """Trains one run in a process of its own, with its output in a file. Returns its exit status. base_train: the
    command, a list of words. KeyboardInterrupt, or the end of this process, stops it after a checkpoint."""
    earlier = trial.notes()
    cpu_before = cpu_seconds()
    # If this process is killed now, nobody counts the trial's CPU time: None says that it is unknown.
    trial.write_notes(None)
    command = [*base_train, *trial.argv]
    with open(log_path, "a") as log:
        # In a session of its own, a trial does not get the terminal's Ctrl-C, but the one SIGTERM from here, and has
        # the time to save.
        process = subprocess.Popen(
            command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True,
            preexec_fn=partial(end_with_parent, os.getpid(), signal.SIGTERM),
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
    # The CPU seconds of a start that was killed are unknown.
    cpu_of_earlier = earlier.get("cpu_s") if earlier else 0.0
    if cpu_of_earlier is not None:
        trial.write_notes(cpu_of_earlier + cpu_seconds() - cpu_before)
    return status


def cpu_seconds():
    """Returns the CPU seconds of all processes that this one started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def chip_seconds_per_token(trial, accelerator, tpu_preflight, folder):
    """Returns the chip-seconds that the preflight estimates for a token of this run, or None if it does not fit.
    tpu_preflight: the command, a list of words. Variants with the same programs share one preflight, and the reports
    stay in `folder`. Raises BadInput if it fails."""
    # Seeds, rates and what is logged change no program.
    no_matter = {"device_type"}
    for group in (RunFlags, RecordFlags, OptimConfig):
        no_matter |= {field.name for field in fields(group)}
    argv = sorted(word for word in trial.argv if word.partition("=")[0].removeprefix("--") not in no_matter)
    digest = hashlib.sha256(json.dumps([accelerator, asdict(trial.plan.config), argv]).encode()).hexdigest()[:12]
    path = folder / f"preflight_{digest}.json"
    if not path.exists():
        print(f"preflight of {trial.variant} for {accelerator}", flush=True)
        with written_whole(path) as unfinished:
            run_preflight(trial.variant, [*tpu_preflight, f"--accelerator={accelerator}", f"--json={unfinished}",
                                          "--programs=micro_step,update", *argv])
    report = json.loads(path.read_text())
    if not report["fits"] or "estimate" not in report:
        print(f"warning: {trial.variant} does not fit into a chip of {accelerator}", flush=True)
        return None
    # step_s is that of the last stage. With rows that become longer, the mean step takes a fraction of it.
    run = report["estimate"]
    fraction = run["hours"] / run.get("hours_of_last", run["hours"])
    return fraction * run["step_s"] * report["chips"] / report["plan"]["total_batch_size"]


def run_preflight(variant, command):
    result = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL,
                            preexec_fn=partial(end_with_parent, os.getpid()))
    if result.returncode not in (0, DOES_NOT_FIT):
        last = (result.stderr.strip() or "no message").splitlines()[-1]
        raise BadInput(f"the preflight of variant {variant} ended with status {result.returncode}: {last}")
