"""What would make a run faster, from its metrics and flags, the largest loss of time first."""
import json
import math
from dataclasses import dataclass

from nanochat.analysis.summary import text
from nanochat.checkpoint.format import META, Meta, list_checkpoints
from nanochat.record.metrics import format_duration

# From these fractions of the time on, advice is given:
DATA_WAIT = 0.05  # waiting for data
HOST_BOUND = 0.80  # dispatching or waiting for data: nearly all the time, so the device waits for the host
NOT_TRAINING = 0.05  # any one kind of work that is not training
# Fractions of the device's memory up to which twice the batch
MEMORY_FREE = 0.48  # fits, because it takes less than twice the memory
MEMORY_TIGHT = 0.70  # may fit, because weights and optimizer do not grow with it
GIB = 2**30


@dataclass(frozen=True)
class Advice:
    fraction: float  # of the run's time that is lost, as measured; 0 if the gain is not known
    text: str


def flags_of(run):
    """Returns the flags {name: value} of the run's newest checkpoint whose meta.json can be read, or {} if there is
    none."""
    for path in reversed(list_checkpoints(run.directory)):
        try:
            return Meta.from_json(json.loads((path / META).read_text())).flags
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
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
    """Returns the value of a flag in brackets, or "" if it is not known."""
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
    # Below HOST_BOUND the host still waits for the device, which hides its work. If it waits for data most of the time,
    # about_data says so.
    if dispatch + wait < HOST_BOUND or wait > dispatch:
        return
    remedies = []
    batch = flags.get("device_batch_size")
    if batch and rows_per_step(run, flags) > batch:
        remedies.append(f"--device_batch_size={2 * batch} (now {batch}), if a step has several micro-steps and it fits")
    if flags.get("log_every", 10) < 10:
        remedies.append(f"--log_every=10{now(flags, 'log_every')}: every line waits for the device")
    remedies = "; ".join(remedies) or "a larger --total_batch_size with a larger --device_batch_size"
    # Twice the rows in a program are half as many programs, so half of the time is to be gained.
    yield Advice(dispatch / 2, f"The host is busy dispatching programs for {dispatch:.0%} of the time, so the device "
                               f"waits for it: {remedies}")


def rows_per_step(run, flags):
    """Returns the rows of a step on all devices together, or 0 if they are not known."""
    steps, tokens = run.series("tokens")
    if len(steps) < 2 or not flags.get("max_seq_len"):
        return 0
    # The last two records, because a batch may become larger during a run.
    return (tokens[-1] - tokens[-2]) / (steps[-1] - steps[-2]) / flags["max_seq_len"]


def about_compiling(run):
    found = [text for record in run.records for text in record.get("recompiled", ())]
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
        # compile_s adds up from the start of a process. It falls where a new process began, whose first compilations
        # are not meant.
        compiled = record.get("compile_s", before)
        if record.get("recompiled") and before is not None:
            seconds += max(compiled - before, 0.0)
        before = compiled
    return seconds


def about_time_not_training(run, flags):
    """Yields Advice on evaluating, sampling, saving, interruptions and compiling."""
    seconds = run.seconds()
    total = max(sum(seconds.values()), 1e-9)
    for kind, flag, activity in (("evaluate", "eval_every", "evaluating"), ("sample", "sample_every", "sampling"),
                             ("save", "save_every", "saving")):
        fraction = seconds.get(kind, 0.0) / total
        if fraction > NOT_TRAINING:
            remedy = f"a larger --{flag}"
            if every := flags.get(flag):
                # The smallest multiple with which it would take NOT_TRAINING of the time at most, if each time costs
                # the same.
                remedy = f"--{flag}={every * math.ceil(fraction / NOT_TRAINING)} (now {every})"
            if kind == "evaluate":
                remedy += f", or fewer --eval_tokens{now(flags, 'eval_tokens')}"
            yield Advice(fraction, f"{fraction:.0%} of the time goes into {activity}: {remedy}")
    lost = seconds.get("lost", 0.0) / total
    interruptions = int(run.last("interruptions") or 0)
    if lost > NOT_TRAINING and interruptions:
        times = "1 interruption" if interruptions == 1 else f"{interruptions} interruptions"
        yield Advice(lost, f"{lost:.0%} of the time was lost to {times} (work done again, and nothing running): a "
                           f"smaller --save_every{now(flags, 'save_every')}, or a VM that is replaced sooner "
                           "(deploy/watch.sh with more zones)")
    compiling = seconds.get("compile", 0.0) / total
    starts = len(run.interruptions()) + 1
    if compiling > NOT_TRAINING and interruptions:
        yield Advice(compiling, f"{compiling:.0%} of the time goes into compiling, at each of {starts} "
                                "starts: zones with fewer preemptions, or --on_demand (deploy/watch.sh)")


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
        return  # a step is one micro-step of one device, so a larger device batch would change the run
    larger = f"--device_batch_size={2 * batch} (now {batch})" if batch else "twice the --device_batch_size"
    if peak / limit <= MEMORY_FREE:
        yield Advice(0, f"{used}: {larger} fits, because it takes less than twice as much")
    else:
        same = "".join(f" --{name}={flags[name]}" for name in ("depth", "max_seq_len", "kernel") if name in flags)
        yield Advice(0, f"{used}: {larger} may fit; python3 -m scripts.tpu_preflight "
                        f"--accelerator=TYPE --find_batch{same} finds out")


def about_kernel(run, flags):
    if run.median("mfu") is not None and flags.get("kernel") == "current":
        yield Advice(0, "--kernel=flash (now current) keeps attention scores out of the device's memory; it needs jax")

