"""Advises what would make a run faster, from its metrics and flags."""
import math
from dataclasses import dataclass

from nanochat.analysis.summary import text
from nanochat.checkpoint.meta import load_meta
from nanochat.checkpoint.on_disk import list_checkpoints
from nanochat.common import BadInput
from nanochat.device.tpu import GIB
from nanochat.record.metrics import format_duration

# Advice follows from these fractions of the time on:
DATA_WAIT = 0.05  # waiting for data
HOST_BOUND = 0.80  # dispatching or waiting for data: nearly all the time, so the device waits for the host
NOT_TRAINING = 0.05  # any one kind of work that is not training
# Fractions of the device's memory up to which twice the batch
MEMORY_FREE = 0.48  # fits, because it takes less than twice the memory
MEMORY_TIGHT = 0.70  # may fit, because weights and optimizer do not grow with it


@dataclass(frozen=True)
class Advice:
    fraction: float  # of the run's time that is lost, as measured; 0 if the gain is unknown
    text: str


def flags_of(run):
    """Returns the flags {name: value} of the run's newest checkpoint whose meta.json can be read, {} without one."""
    for path in reversed(list_checkpoints(run.directory)):
        try:
            return load_meta(path).flags
        except BadInput:
            continue
    return {}


def describe(run):
    """Returns one line with the main measurements."""
    facts = [f"run {run.name}: step {run.records[-1]['step']:,}"]
    for name, form in (("tokens_per_s", "{:,.0f} tokens/s"), ("mfu", "MFU {:.1%}"), ("data_wait", "data {:.0%}"),
                       ("host_dispatch", "dispatch {:.0%}")):
        facts.append(text(run.median(name), form))
    facts.append(text(run.last("goodput"), "goodput {:.0%}"))
    return ", ".join(filter(None, facts))


def advise(run, flags):
    """Returns all Advice, the largest fraction first."""
    found = [*about_data(run, flags), *about_host(run, flags), *about_compiling(run),
             *about_time_not_training(run, flags), *about_memory(run, flags), *about_kernel(run, flags)]
    return sorted(found, key=lambda advice: -advice.fraction)


def now(flags, name):
    """Returns the value of a flag in brackets, or "" if it is unknown."""
    return text(flags.get(name), " (now {})")


def about_data(run, flags):
    wait = run.median("data_wait") or 0.0
    if wait > DATA_WAIT:
        threads = 2 * flags.get("tokenizer_threads", 2)
        yield Advice(wait, f"Training waits for data for {wait:.0%} of the time: --tokenizer_threads={threads}"
                           f"{now(flags, 'tokenizer_threads')}, if the host has idle cores")


def about_host(run, flags):
    dispatch = run.median("host_dispatch") or 0.0
    wait = run.median("data_wait") or 0.0
    # Below HOST_BOUND the host's work overlaps with the device's. If it waits for data most of the time, about_data
    # says so.
    if dispatch + wait < HOST_BOUND or wait > dispatch:
        return
    remedies = []
    batch = flags.get("device_batch_size")
    if batch and rows_per_step(run, flags) > batch:
        remedies.append(f"--device_batch_size={2 * batch} (now {batch}), if a step has several micro-steps and it fits")
    if flags.get("log_every", 10) < 10:
        remedies.append(f"--log_every=10{now(flags, 'log_every')}: every line waits for the device")
    remedies = "; ".join(remedies) or "a larger --total_batch_size with a larger --device_batch_size"
    # Twice the rows in a program make half as many programs, which gains half of the time.
    yield Advice(dispatch / 2, f"The host is busy dispatching programs for {dispatch:.0%} of the time, so the device "
                               f"waits for it: {remedies}")


def rows_per_step(run, flags):
    """Returns the rows of a step on all devices together, or 0 if they are unknown."""
    steps, tokens = run.series("tokens")
    if len(steps) < 2 or not flags.get("max_seq_len"):
        return 0
    # The last two records, because a batch may become larger during a run.
    return (tokens[-1] - tokens[-2]) / (steps[-1] - steps[-2]) / flags["max_seq_len"]


def about_compiling(run):
    found = []
    for record in run.records:
        found += record.get("recompiled", ())
    if not found:
        return
    seconds = recompiling_s(run)
    causes = sorted(set(found))
    shown = "; ".join(causes[:3])
    if len(causes) > 3:
        shown += f" and {len(causes) - 3} more"
    yield Advice(seconds / max(run.wall_s(), 1e-9), f"Programs were compiled again {len(found)} times after the "
                 f"warm-up, for {format_duration(seconds)}: keep these constant: {shown}")


def recompiling_s(run):
    """Returns the seconds spent compiling before those console lines that report a program compiled again."""
    before = None
    seconds = 0.0
    for record in run.records:
        # compile_s adds up from the start of a process. It falls when a new process starts, whose first compilations do
        # not count.
        compiled = record.get("compile_s", before)
        if record.get("recompiled") and before is not None:
            seconds += max(compiled - before, 0.0)
        before = compiled
    return seconds


def about_time_not_training(run, flags):
    """Yields Advice on evaluating, sampling, saving, interruptions and compiling."""
    seconds = run.seconds()
    total = max(sum(seconds.values()), 1e-9)
    saving = seconds.get("save", 0.0) / total
    lost = seconds.get("lost", 0.0) / total
    interruptions = int(run.last("interruptions") or 0)
    if not interruptions:
        lost = 0.0  # pauses, not interruptions
    save_flag = "save_every"
    if flags.get("save_every_minutes", -1) > 0:
        save_flag = "save_every_minutes"
    yield from about_events(seconds.get("evaluate", 0.0) / total, "evaluating", "eval_every", flags)
    yield from about_events(seconds.get("sample", 0.0) / total, "sampling", "sample_every", flags)
    # Fewer checkpoints lose more work at an interruption, so only the larger loss decides how often to save. The best
    # interval loses as much time to saving as to work done again (Young 1974).
    if saving >= lost:
        yield from about_events(saving, "saving", save_flag, flags)
    if lost > NOT_TRAINING:
        remedy = "a VM that is replaced sooner (deploy/watch.sh with more zones)"
        if flags.get(save_flag, 1) <= 0:
            remedy = f"checkpoints (--{save_flag} is off), or {remedy}"
        elif lost > saving:
            remedy = f"a smaller --{save_flag}{now(flags, save_flag)}, or {remedy}"
        times = "1 interruption" if interruptions == 1 else f"{interruptions} interruptions"
        yield Advice(lost, f"{lost:.0%} of the time was lost to {times} (work done again, and nothing running): "
                           f"{remedy}")
    compiling = seconds.get("compile", 0.0) / total
    # A run that was told to stop starts again without counting an interruption.
    starts = max(interruptions, len(run.interruptions())) + 1
    if compiling > NOT_TRAINING and interruptions:
        yield Advice(compiling, f"{compiling:.0%} of the time goes into compiling, at each of {starts} "
                                "starts: zones with fewer preemptions, or --on_demand (deploy/watch.sh)")


def about_events(fraction, activity, flag, flags):
    """Yields Advice on an activity that happens every so many steps or minutes, as a flag says."""
    if fraction <= NOT_TRAINING:
        return
    remedy = f"a larger --{flag}"
    every = flags.get(flag, -1)
    if every > 0 and fraction < 1:
        # The smallest multiple with which it would take NOT_TRAINING of the time at most. The other time stays, and
        # each event costs the same.
        times = math.ceil(fraction / (1 - fraction) * (1 - NOT_TRAINING) / NOT_TRAINING)
        remedy = f"--{flag}={every * times:.10g} (now {every})"
    if activity == "evaluating":
        remedy += f", or fewer --eval_tokens{now(flags, 'eval_tokens')}"
    yield Advice(fraction, f"{fraction:.0%} of the time goes into {activity}: {remedy}")


def about_memory(run, flags):
    peak = run.last("device_memory_peak_bytes")
    limit = run.last("device_memory_limit_bytes")
    if not peak or not limit or peak / limit > MEMORY_TIGHT:
        return
    used = f"Device memory peaks at {peak / limit:.0%} of {limit / GIB:.1f} GiB"
    if flags.get("activation_checkpointing") in ("qkv", "all"):
        yield Advice(0, f"{used}: try without --activation_checkpointing, which computes some or all of them twice")
        return
    batch = flags.get("device_batch_size")
    if batch and rows_per_step(run, flags) <= batch:
        return  # a step is one micro-step of one device: a larger device batch would change the run
    larger = "twice the --device_batch_size"
    if batch:
        larger = f"--device_batch_size={2 * batch} (now {batch})"
    if peak / limit <= MEMORY_FREE:
        yield Advice(0, f"{used}: {larger} fits, because it takes less than twice as much")
    else:
        command = "python3 -m scripts.tpu_preflight --accelerator=TYPE --find_batch"
        for name in ("depth", "max_seq_len", "kernel"):
            if name in flags:
                command += f" --{name}={flags[name]}"
        yield Advice(0, f"{used}: {larger} may fit; {command} finds out")


def about_kernel(run, flags):
    if run.median("mfu") is not None and flags.get("kernel") == "current":
        yield Advice(0, "--kernel=flash (now current) keeps attention scores out of the device's memory; it needs jax")
