"""The checks of a TPU that train: the kernels in a small run, the run's own programs, what a run survives, and whether
the host feeds it. chip.py has the others."""
import json
import math
import os
import re
import signal
import time
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from nanochat.checkpoint import on_disk
from nanochat.common import BadInput, get_base_dir
from nanochat.data.loader import DataLoader, RankRows
from nanochat.data.remote import Interruption
from nanochat.data.shards import open_shards
from nanochat.data.storage import copy_files, delete_file, is_remote
from nanochat.device.ranks import compute_init, prepare_xla_environment
from nanochat.device.tpu import GIB
from nanochat.model.config import GPTConfig
from nanochat.preflight.chip import Finding, anonymous, compared, last_error
from nanochat.record.history import read_run
from nanochat.run.hosts import metadata
from nanochat.run.processes import started_module
from nanochat.run.stopping import EXIT_STATUS as STOPPED
from nanochat.train.plan import make_plan
from nanochat.train.start import run_tokenizer

STEPS = 20
SHORT = {"synthetic_data": True, "eval_every": -1, "sample_every": -1, "save_every": -1, "log_every": 5,
         "num_iterations": STEPS, "teacher": "", "init_from": "", "seq_len_ramp": ""}
SMALL_DEPTH = 4  # of the runs that are compared with one another
SAME_LOSS = 0.005  # two kernels round differently
FIRST_LOSS = 0.5  # from ln V
STEADY_FROM = 3  # from this step on, nothing is compiled
LONG_ROWS = "long rows"
LONG_STEPS = {"tpu": 100, "xla": 10}  # of a run that a signal must reach before its end
NAMED_S = 30  # within which a killed rank must be named
MOST_HEADERS = 3000  # of torch, as text for the loader
LOADER_S = 5
COPIED_BYTES = 256_000_000


def write_config(setting, name, micro_steps=1, **changes):
    """Writes the flags of a short run on random tokens for --config, and returns the path. changes: {flag: value}."""
    own_tokenizer = get_base_dir() / "tokenizer"  # the run has another base directory
    if own_tokenizer.exists():
        changes.setdefault("tokenizer_dir", setting.flags.data.tokenizer_dir or str(own_tokenizer))
    flags = setting.flags.replace(**SHORT | {
        "run": name, "device_type": setting.device_type, "checkpoint_mirror": setting.mirror} | changes)
    readers = setting.chips // flags.devices.mesh_tensor
    path = setting.folder / f"{name}.toml"
    tokens = flags.batch.device_batch_size * row_length(flags) * readers * micro_steps
    path.write_text(flags.replace(total_batch_size=tokens).as_toml())
    return path


@contextmanager
def started(setting, name, micro_steps=1, **changes):
    """Yields the process of a short run, whose log is NAME.log."""
    config = write_config(setting, name, micro_steps, **changes)
    env = os.environ | {"NANOCHAT_BASE_DIR": str(setting.folder), "WANDB_MODE": "disabled", "WEBHOOK": ""}
    with open(setting.folder / f"{name}.log", "a") as log, \
            started_module(setting.trainer, f"--config={config}", env=env, output=log) as process:
        yield process


def train(setting, name, micro_steps=1, **changes):
    """Trains to the end. Returns the History, or None and why there is none here. On several hosts, all call this."""
    with started(setting, name, micro_steps, **changes) as process:
        status = process.wait()
    if status == 0 and not setting.is_first:
        return None, "the first host has the record"
    if status == 0:
        return read_run(run_directory(setting, name)), "it trains"
    return None, last_error(setting.folder / f"{name}.log") or f"status {status}"


def row_length(flags):
    return flags.model.max_seq_len or GPTConfig.max_seq_len


def run_directory(setting, name):
    return setting.folder / "checkpoints" / name


def has_logged(setting, name, pattern):
    """Returns whether the pattern is in the log of a run."""
    return bool(re.search(pattern, (setting.folder / f"{name}.log").read_text(errors="replace")))


def small_flags(setting):
    """Returns {flag: value} of a small run."""
    return {"depth": min(SMALL_DEPTH, setting.flags.model.depth or SMALL_DEPTH), "mesh_fsdp": 1, "mesh_tensor": 1,
            "products": "bfloat16"}


# Training


def training(setting):
    """Whether a small run has the same losses with each kernel, with an all-reduce inside its step."""
    reference = None
    for kernel in ("current", "chunked", "flash"):
        run, outcome = train(setting, kernel, kernel=kernel, shard_optimizer="off", **small_flags(setting))
        breaks = "run" if kernel == "current" else kernel
        if not run:
            yield Finding(f"{kernel} trains", False, outcome, "it trains", breaks)
            continue
        losses = run.series("loss")[1]
        reference = losses if reference is None else reference
        apart = float(abs(losses / reference - 1).max())
        yield Finding(f"{kernel} trains", apart <= SAME_LOSS, f"losses {apart:.2%} apart", f"{SAME_LOSS:.1%}", breaks)


def programs(setting):
    """Whether a run of the flags asked for compiles once, learns, and takes the time and the memory of the preflight's
    estimate. With one micro-step in a step, and with four, which tells their times apart."""
    vocab_size = run_tokenizer(setting.flags).n_vocab
    plan = make_plan(setting.flags, vocab_size, setting.device_type, setting.chips)
    with estimating(setting, "micro_step"), estimating(setting, LONG_ROWS, **with_long_rows(setting.flags)):
        (one, outcome), (four, outcome_of_four) = (train(setting, f"{count}_micro_steps", count) for count in (1, 4))
    trains = bool(one and four)
    yield Finding(f"depth {plan.config.n_layer} trains with {plan.kernel}", trains, outcome_of_four if one else outcome,
                  "it trains", "run" if plan.kernel == "current" else plan.kernel)
    if not trains:
        return
    loss, expected = float(one.series("loss")[1][0]), math.log(vocab_size)
    yield Finding("loss of the first step", abs(loss - expected) < FIRST_LOSS, f"{loss:.2f}", f"{expected:.2f}")
    again = [record["step"] for run in (one, four) for record in run.records
             if "recompiled" in record and record["step"] >= STEADY_FROM]
    yield Finding("it compiles once", not again, f"again at {len(again)} steps", "at none")
    yield Finding("tokens/s", True, f"{four.median('tokens_per_s'):,.0f}")
    report = read_estimate(setting, "micro_step")
    update_ms = update_time(one, four)
    yield compare_time("micro_step", one.median("step_ms") - update_ms, report["programs"].get("micro_step"))
    yield compare_time("update", update_ms, report["programs"].get("update"))
    peak = float(max(four.series("device_memory_peak_bytes")[1], default=0))
    if peak and report.get("peak_bytes"):
        yield compared("memory", peak / GIB, report["peak_bytes"] / GIB, "{:.2f} GiB",
                       peak <= report["usable_hbm_bytes"])


def attention(setting):
    """On a TPU: how long a micro-step with longer rows takes, of which attention takes a larger part. So the preflight
    learns the factors of attention and of products."""
    if setting.device_type != "tpu":
        return
    run, _ = train(setting, "long_rows", **with_long_rows(setting.flags))
    try:
        one, four = (read_run(run_directory(setting, f"{count}_micro_steps")) for count in (1, 4))
    except BadInput:  # they have not trained
        return
    if run:  # they may be too much for the memory
        yield compare_time(LONG_ROWS, run.median("step_ms") - update_time(one, four),
                           read_estimate(setting, LONG_ROWS)["programs"].get("micro_step"))


def with_long_rows(flags):
    """Returns {flag: value} of a run whose rows are twice as long, and half as many."""
    return {"max_seq_len": 2 * row_length(flags), "device_batch_size": max(1, flags.batch.device_batch_size // 2)}


def update_time(one, four):
    """Returns the milliseconds of an update, by the Histories of runs with one and with four micro-steps in a step."""
    return (4 * one.median("step_ms") - four.median("step_ms")) / 3


def compare_time(what, ms, estimate):
    """Returns the Finding of a program that takes so many milliseconds. estimate: of report_program, or None."""
    if not estimate:
        return Finding(what, ms > 0, f"{ms:.1f} ms", "not estimated")
    return compared(what, ms, 1000 * estimate["estimated_s"], "{:.1f} ms", ms > 0,
                    None if what == "update" else estimate["parts_s"])


def estimating(setting, what, **changes):
    """Returns a context in which the preflight estimates the run with these flags changed, on the host's CPU; what is
    not ready in time is not known."""
    if not setting.accelerator:
        return nullcontext()
    config = write_config(setting, f"estimate of {what}", micro_steps=4, **changes)
    return started_module(setting.preflight, f"--config={config}", f"--accelerator={setting.accelerator}",
                          "--programs=micro_step,update", f"--json={setting.folder / what}.estimate")


def read_estimate(setting, what):
    """Returns the report of a preflight that `estimating` began."""
    try:
        return json.loads((setting.folder / f"{what}.estimate").read_text())
    except (OSError, ValueError):  # it is not ready
        return {"programs": {}}


# What a run survives


def survival(setting):
    """Whether a run that is told to stop resumes with the same bits, and a rank that is killed is named."""
    steps = LONG_STEPS[setting.device_type]
    long = small_flags(setting) | {"num_iterations": steps, "log_every": 1, "save_every": steps}
    _, outcome = train(setting, "whole", **long)
    status, _ = train_until(setting, "stopped", signal.SIGTERM, **long)
    yield Finding("SIGTERM stops a run", status == STOPPED, f"status {status}", f"status {STOPPED}")
    resumed, outcome_of_resumed = train(setting, "stopped", **long)
    is_resumed = bool(resumed) and has_logged(setting, "stopped", "resuming from")
    yield Finding("it resumes", is_resumed, outcome_of_resumed, "it trains")
    files, others = checkpoint_files(setting, "whole"), checkpoint_files(setting, "stopped")
    different = [name for name in files if files[name] != others.get(name)]
    yield Finding("with the same bits", bool(files) and not different, ", ".join(different) or outcome,
                  "no file differs")
    status, seconds = train_until(setting, "killed", signal.SIGKILL, **long)
    is_named = has_logged(setting, "killed", r"rank [0-9, ]+ \(process [0-9]+\) was ended by SIGKILL")
    yield Finding("a killed rank is named", status == 1 and is_named and seconds < NAMED_S, f"{seconds:.1f} s",
                  f"{NAMED_S} s")
    if setting.device_type == "tpu":
        notice = metadata("preempted")
        yield Finding("notice of preemption", notice in ("TRUE", "FALSE"), notice or "no answer", "FALSE")


def train_until(setting, name, number, **changes):
    """Trains until a signal after the first step: SIGTERM for the run, or SIGKILL for its last rank. Returns the exit
    status, and the seconds from the signal to the end."""
    with started(setting, name, **changes) as process:
        while process.poll() is None and not has_logged(setting, name, "step 00001/"):
            time.sleep(0.05)
        pid = process.pid
        begun = time.monotonic()
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            if number == signal.SIGKILL:
                for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
                    if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                        pid = int(child)
            os.kill(pid, number)
        return process.wait(), time.monotonic() - begun


def checkpoint_files(setting, name):
    """Returns {name: SHA-256} of the files in the newest checkpoint of a run that are equal in equal runs."""
    path = on_disk.latest(run_directory(setting, name))
    sums = on_disk.read_sums(path) if path else {}
    return {file: digest for file, digest in sums.items() if file != on_disk.META}


# The host


def host(setting):
    """Whether the host feeds the chips: tokenizing, copying, and uploading, if the run has a mirror in a bucket."""
    path = setting.folder / "headers.parquet"
    headers = sorted(Path(torch.__file__).parent.glob("include/**/*.h"))[:MOST_HEADERS]
    pq.write_table(pa.table({"text": [header.read_text(errors="replace") for header in headers]}), path,
                   row_group_size=64)
    if setting.is_first:  # which knows how fast the runs are
        rate = setting.chips * loader_rate(setting.flags, path)  # each rank has a loader
        try:
            eaten = read_run(run_directory(setting, "4_micro_steps")).median("tokens_per_s")
        except BadInput:  # it has not trained
            eaten = 0
        yield Finding("host: the loaders feed the chips", rate > eaten, f"{rate:,.0f} tokens/s",
                      f"{eaten:,.0f} tokens/s", factor=max(1, eaten / rate))  # a step takes as long as its data
    prepare_xla_environment(setting.device_type)
    device = compute_init(setting.device_type).device
    torch.ones(1).to(device).cpu()  # starts the runtime
    begun = time.monotonic()
    torch.ones(COPIED_BYTES // 4).to(device)[:1].cpu()
    gb_per_s = COPIED_BYTES / 1e9 / (time.monotonic() - begun)
    yield Finding("copy to the device", gb_per_s > 0.1, f"{gb_per_s:.1f} GB/s", "0.1 GB/s")
    mirror = setting.flags.record.checkpoint_mirror
    if is_remote(mirror) and setting.is_first:  # the others would write the same file
        yield try_bucket(path, f"{mirror}/tpu_check.parquet")


def loader_rate(flags, path):
    """Returns how many tokens a second a loader makes of the text in `path`."""
    rows = RankRows(flags.batch.device_batch_size, row_length(flags))
    with DataLoader(open_shards([path]), run_tokenizer(flags), rows) as loader:
        next(loader)
        begun = time.monotonic()
        tokens = 0
        while time.monotonic() - begun < LOADER_S:
            tokens += next(loader).rows.numel()
        return tokens / (time.monotonic() - begun)


def try_bucket(path, url):
    begun = time.monotonic()
    try:
        copy_files([(path, url)])
        delete_file(url)
    except (BadInput, Interruption) as error:
        return Finding("upload to the bucket", False, anonymous(str(error)), "it takes a file")
    mb_per_s = path.stat().st_size / 1e6 / (time.monotonic() - begun)
    return Finding("upload to the bucket", True, f"{mb_per_s:.1f} MB/s")
