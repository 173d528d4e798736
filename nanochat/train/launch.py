"""Starts a training run: prepares it in the parent process, then trains in one process per chip.

    launch(flags, device_type, make_task)        # base_train.py and puzzle_train.py call it
        prepare(…)                               # in the parent: calls make_task, finds the checkpoint (prepare.py)
        spawn(run, watchdog)                     # a process per chip
            Trainer(run, dist).train()           # in each of them (trainer.py)

No line at module level touches the XLA runtime: each of these processes starts its own.
"""
import os
import sys
from functools import partial

from nanochat.common import BadInput, say, work
from nanochat.device import ranks
from nanochat.record.alerts import alert
from nanochat.run import stopping
from nanochat.run.agreement import Requests, agree_with_hosts
from nanochat.run.hosts import describe, require_alike, this_host
from nanochat.run.pod import membership
from nanochat.run.processes import begin_as_rank, exclusive_use, run_as_ranks
from nanochat.run.transfer import serve_lanes
from nanochat.run.watchdog import Heartbeats, Watchdog, print_stacks_on_signal
from nanochat.train.prepare import prepare, run_directory
from nanochat.train.trainer import Trainer


def launch(flags, device_type, make_task):
    """Trains, sends alerts, and returns the exit status. make_task: of the task, such as language.make_task,
    for prepare; device_type: from resolve_device_type."""
    print_stacks_on_signal()
    name = flags.run.run
    try:
        status = train_on(device_type, flags, make_task)
    except Exception as error:  # not Ctrl-C, which comes before training begins: run_script ends the process at once
        alert(f"run {name} failed: {error}")
        raise
    ends = {0: "finished", stopping.EXIT_STATUS: "was stopped, and what it has trained is saved"}
    alert(f"run {name} {ends.get(status, f'failed with status {status}')}")
    return status


def train_on(device_type, flags, make_task):
    """Trains, and returns the exit status."""
    host = this_host(device_type)
    if device_type in ("tpu", "xla"):
        return train_on_xla(flags, device_type, make_task, host)
    if host:
        raise BadInput(f"NANOCHAT_HOSTS={os.environ.get('NANOCHAT_HOSTS')} is for XLA devices, and this runs on "
                       f"{device_type}: unset it")
    return train_without_parent(flags, device_type, make_task)


def train_on_xla(flags, device_type, make_task, host):
    """Prepares the run in this process, and trains in processes that it spawns. Returns the exit status. host: this
    Host, if there are several."""
    if host and flags.record.checkpoint_mirror is None:
        raise BadInput("a run on several hosts needs --checkpoint_mirror, from which they fetch the checkpoint to "
                       "resume: give gs://BUCKET/FOLDER, or a directory that all hosts share")
    ranks.prepare_xla_environment(device_type)
    ranks.prepare_libtpu(device_type)
    # The order matters. All hosts have met and are alike before any touches its disk. The folder is locked before
    # prepare, which deletes the remains of interrupted saves. Until then Ctrl-C ends the command at once: signals
    # become requests only when ranks will obey them. They are blocked in this thread from then on, and the ranks,
    # spawned last, inherit that.
    with membership(host) as pod:
        if pod:
            found = pod.join(describe(flags, device_type))
            require_alike(pod.names, found, "start the same code with the same command on all hosts")
        with exclusive_use(run_directory(flags)):
            run = prepare(flags, device_type, make_task, pod)
            if run.finished_step:
                say_finished(run)
                return pod.end(0) if pod else 0
            requests = Requests(run.requests_file)
            stopping.stop_on_signals(requests)
            if device_type == "tpu":
                stopping.stop_on_preemption_notice(requests)
            if pod:
                return train_on_pod(run, pod, requests)
            return spawn(run, Watchdog(Heartbeats(run.heartbeats_file)))


def train_on_pod(run, pod, requests):
    """Trains on this host as one of several. Returns the exit status, equal on all."""
    if pod.host.is_first:
        serve_lanes(pod, run.directory)
    agree_with_hosts(pod, requests)
    watchdog = Watchdog(Heartbeats(run.heartbeats_file), pod)
    # The ranks of all hosts end at about the same time, but rank 0 still saves and waits for the mirror. The run's
    # status is known only after all parents have met in pod.end.
    status = spawn(run, watchdog)
    status = pod.end(status, watchdog.reason)
    if pod.failure and not watchdog.reason:
        say(f"error: {pod.failure}", sys.stderr)
    return status


def spawn(run, watchdog):
    """Trains in a process for each chip, or in a thread for each XLA device of a CPU. Returns the exit status."""
    work.begin("starting the devices and loading the model")
    with watchdog:
        status = run_as_ranks(_train_as_rank, run, begin=partial(begin_as_rank, run.directory),
                              has_reported=watchdog.has_reported)
        return 1 if status is None else status


def _train_as_rank(run):
    stopping.stop_on_signal_to_rank(Requests(run.requests_file))
    return train(run)


def train(run):
    """Trains as one rank of the run. Returns the exit status."""
    return Trainer(run, ranks.compute_init(run.plan.device_type, run.hosts)).train()


def train_without_parent(flags, device_type, make_task):
    """Trains on a GPU or eagerly on the CPU, in this process alone. Returns the exit status."""
    if device_type == "cpu":
        ranks.keep_freed_memory()
    with exclusive_use(run_directory(flags)):
        run = prepare(flags, device_type, make_task)
        if run.finished_step:
            say_finished(run)
            return 0
        stopping.stop_on_signals(Requests(run.requests_file))
        with Watchdog(Heartbeats(run.heartbeats_file)):
            return train(run)


def say_finished(run):
    """Says that nothing is left to train."""
    say(f"run {run.flags.run.run} has reached step {run.finished_step} ({run.checkpoint}): nothing left to do. "
        "Raise --num_iterations, choose another --run, or delete its folder to start over")
