"""Reads a run's metrics.jsonl and advises what would make the run faster, the largest loss of time first.

    python3 -m scripts.tpu_advice RUN

RUN is the name of a run, its directory, or its metrics.jsonl. The fractions of time are medians since the newest
process started, or fractions of the whole wall time. The flags are read from the run's newest checkpoint.
"""
import json
import math
from dataclasses import dataclass

from nanochat.checkpoint.format import META, Meta, list_checkpoints
from nanochat.common import ArgumentParser, run_script
from nanochat.record.history import read_run
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


def main(argv=None):
    parser = ArgumentParser(prog="python3 -m scripts.tpu_advice", description=__doc__)
    parser.add_argument("run", metavar="RUN", help="name of a run, its directory, or its metrics.jsonl")
    run = read_run(parser.parse_args(argv).run)
    flags = read_flags(run)
    print(describe(run))
    advice = advise(run, flags)
    for number, item in enumerate(advice, start=1):
        print(f"{number}. {item.text}")
    if not advice:
        print("nothing to advise: what was measured shows nothing wrong")
    if advice and not flags:
        print("(no checkpoint next to the metrics, so the values of its flags are not known)")


def read_flags(run):
    """Returns the flags {name: value} of the run's newest checkpoint whose meta.json can be read, whatever its format
    version, or {} if there is none."""
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
        value = run.median(name)
        facts += [form.format(value)] if value is not None else []
    goodput = run.last("goodput")
    return ", ".join(facts + ([f"goodput {goodput:.0%}"] if goodput is not None else []))


def advise(run, flags):
    """Returns all Advice, the largest fraction first."""
    found = [*about_data(run, flags), *about_host(run, flags), *about_compiling(run),
             *about_time_not_training(run, flags), *about_memory(run, flags), *about_kernel(run, flags)]
    return sorted(found, key=lambda advice: -advice.fraction)


def now(flags, name):
    """Returns the value of a flag in brackets, or "" if it is not known."""
    return f" (now {flags[name]})" if flags.get(name) is not None else ""


def about_data(run, flags):
    wait = run.median("data_wait") or 0.0
    if wait > DATA_WAIT:
        threads = 2 * flags.get("tokenizer_threads", 2)
        yield Advice(wait, f"Training waits for data for {wait:.0%} of the time: --tokenizer_threads={threads}"
                           f"{now(flags, 'tokenizer_threads')}, if the host has idle cores")


def about_host(run, flags):
    dispatch, wait = run.median("host_dispatch") or 0.0, run.median("data_wait") or 0.0
    if dispatch + wait < HOST_BOUND or wait > dispatch:
        return
    remedies = []
    batch = flags.get("device_batch_size")
    if batch and rows_per_step(run, flags) > batch:
        remedies.append(f"--device_batch_size={2 * batch} (now {batch}), if a step has several micro-steps and it fits")
    if flags.get("log_every", 10) < 10:
        remedies.append(f"--log_every=10{now(flags, 'log_every')}: every line waits for the device")
    remedies = "; ".join(remedies) or "a larger --total_batch_size with a larger --device_batch_size"
    yield Advice(dispatch / 2, f"The host is busy dispatching programs for {dispatch:.0%} of the time, so the device "
                               f"waits for it: {remedies}")


def rows_per_step(run, flags):
    """Returns the rows of a step on all devices together, or 0 if they are not known."""
    steps, tokens = run.series("tokens")
    if len(steps) < 2 or not flags.get("max_seq_len"):
        return 0
    return (tokens[-1] - tokens[-2]) / (steps[-1] - steps[-2]) / flags["max_seq_len"]


def about_compiling(run):
    found = [text for record in run.records for text in record.get("recompiled", ())]
    if not found:
        return
    seconds = recompiling_s(run)
    fraction = seconds / max(run.records[-1]["time"] - run.records[0]["time"], 1e-9)
    several = f" and {len(set(found)) - 3} more" if len(set(found)) > 3 else ""
    yield Advice(fraction, f"Programs were compiled again {len(found)} times after the warm-up, for "
                        f"{format_duration(seconds)}: keep these constant: "
                        + "; ".join(sorted(set(found))[:3]) + several)


def recompiling_s(run):
    """Returns the seconds spent compiling before those console lines that report a program compiled again."""
    before, seconds = None, 0.0
    for record in run.records:
        compiled = record.get("compile_s")
        if record.get("recompiled") and compiled is not None and before is not None:
            seconds += max(compiled - before, 0.0)
        before = before if compiled is None else compiled
    return seconds


def about_time_not_training(run, flags):
    """Yields Advice on evaluating, sampling, saving, interruptions and compiling."""
    seconds = run.seconds()
    total = max(sum(seconds.values()), 1e-9)
    for kind, flag, activity in (("evaluate", "eval_every", "evaluating"), ("sample", "sample_every", "sampling"),
                             ("save", "save_every", "saving")):
        fraction = seconds.get(kind, 0.0) / total
        if fraction > NOT_TRAINING:
            every = flags.get(flag)
            rarer = f"--{flag}={every * math.ceil(fraction / NOT_TRAINING)} (now {every})" if every else \
                f"a larger --{flag}"
            fewer = f", or fewer --eval_tokens{now(flags, 'eval_tokens')}" if kind == "evaluate" else ""
            yield Advice(fraction, f"{fraction:.0%} of the time goes into {activity}: {rarer}{fewer}")
    lost, interruptions = seconds.get("lost", 0.0) / total, int(run.last("interruptions") or 0)
    if lost > NOT_TRAINING and interruptions:
        times = f"{interruptions} interruption{'s' * (interruptions > 1)}"
        yield Advice(lost, f"{lost:.0%} of the time was lost to {times} (work done again, and nothing running): a "
                           f"smaller --save_every{now(flags, 'save_every')}, or a VM that is replaced sooner "
                           "(deploy/watch.sh with more zones)")
    compiling, starts = seconds.get("compile", 0.0) / total, len(run.interruptions()) + 1
    if compiling > NOT_TRAINING and interruptions:
        yield Advice(compiling, f"{compiling:.0%} of the time goes into compiling, at each of {starts} "
                                "starts: zones with fewer preemptions, or --on_demand (deploy/watch.sh)")


def about_memory(run, flags):
    peak, limit = run.last("device_memory_peak_bytes"), run.last("device_memory_limit_bytes")
    if not peak or not limit or peak / limit > MEMORY_TIGHT:
        return
    used = f"Device memory peaks at {peak / limit:.0%} of {limit / GIB:.1f} GiB"
    if flags.get("activation_checkpointing") in ("qkv", "all", True):  # True: of an older checkpoint
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


if __name__ == "__main__":
    run_script(main)
