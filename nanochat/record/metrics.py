"""The metrics of a run, which rank 0 writes to metrics.jsonl, to the console and to WandB.

metrics.jsonl has one JSON object per line with `step` (optimizer steps completed) and `time` (Unix time, s).
The console line shows those that CONSOLE lists, and those for which the task has a text; all others are in the file
only. CONSOLE lists:
    mean_loss       mean of the finite losses of the steps since the last line
    lr_multiplier, step_ms, tokens_per_s, time_left_s
    mfu             0 to 1
    tokens          seen so far
    val_bpb         bits per byte of the validation text
    code_bpb        with --code_eval_every, bits per byte of the solutions of problems; code_compiles and code_pass are
                    the shares of what the model writes that compile and pass the tests
    fim_bpb         with --fim_rate, bits per byte of middles in it, given what is before and after them
    recompiled      a list of texts, one for each program that was compiled again
    mirror_behind_s with --checkpoint_mirror, for how many seconds it has lacked the newest checkpoint; shown from a
                    minute on
The file has, too:
    loss            of one step, every step: mean over the global batch, nats per token; null if it was not finite
    grad_norm, epoch, goodput (0 to 1)
    seq_len         with --seq_len_ramp, the positions per row of the last step
    bad_steps       updates skipped so far because they were not finite
    interruptions   how often the run was resumed
    seconds         since the run began; seconds_train, seconds_compile, … are its parts, see goodput.py
    data_wait, host_dispatch, compilations, compile_s, device_memory_…: see observe.py
"""
import json
import math
import os
import secrets
import threading
import time
from pathlib import Path

from nanochat.common import is_disk_full
from nanochat.record import wandb_log

METRICS_FILE = "metrics.jsonl"
MIRROR_BEHIND_S = 60  # the console line shows a mirror that is further behind


class MetricsLogger:
    """Writes the records of a run; rank 0 only. It never waits for the disk, only for its cache, nor for WandB."""

    def __init__(self, run_dir, run, config, *, total_steps=None, resume_step=None, wandb_project="nanochat-tpu",
                 wandb_id=None, console=print, of_task=None):
        """
        run: the run's name; WandB is used unless it is "dummy". config: a JSON object for WandB.
        resume_step: the step of the checkpoint that the run resumes from; later records are deleted from the file.
            None means a new run; the file of an older run of this name is kept as metrics.jsonl.aside.
        wandb_id: WandB's id of the run to resume, as in the checkpoint's Meta.
        console: called with each line and each warning. of_task: {metric: how the console shows it} of those that only
            this task has.
        """
        self.path = Path(run_dir) / METRICS_FILE
        self.wandb_id = wandb_id or secrets.token_hex(4)
        self._total_steps = total_steps
        self._resume_step = resume_step
        self._console = console
        self._of_task = of_task
        self._names_at_resume = _rewind(self.path, resume_step)
        # Without a buffer of Python's: a record that was logged is in the kernel's hands, and survives a kill of this
        # process.
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._unwritten = b""
        self._is_disk_full = False
        self._writing = threading.Lock()  # the thread that saves a checkpoint flushes, too
        self._wandb = None
        if run != "dummy":
            self._wandb = wandb_log.WandbLog(console, project=wandb_project, name=run, id=self.wandb_id, config=config,
                                             dir=str(run_dir))

    def log(self, step, record, quiet=False):
        """Records {name: number or list of texts} for `step`, with a line on the console unless `quiet`."""
        if step == self._resume_step:  # the file may have this step's evaluation already
            record = {name: value for name, value in record.items() if name not in self._names_at_resume}
            if not record:
                return
        record = {name: None if isinstance(value, float) and not math.isfinite(value) else value
                  for name, value in record.items()}  # JSON has no NaN
        record = {"step": step, "time": round(time.time(), 3), **record}
        with self._writing:
            # Through this buffer, so that records that found a full disk go first, in their order, once there is room
            # again.
            self._unwritten += json.dumps(record).encode() + b"\n"
        try:
            self.flush()
        except OSError as error:
            if not is_disk_full(error):
                raise
            if not self._is_disk_full:
                self._console(f"warning: {self.path}: {error.strerror}: records wait in memory")
            self._is_disk_full = True
        if not quiet:
            self._console(format_line(record, self._total_steps, self._of_task))
        if self._wandb:
            self._wandb.log(record)

    def flush(self):
        """Writes the records that wait in memory. Raises OSError if the disk is full."""
        with self._writing:
            while self._unwritten:
                # On a disk that is nearly full, a write may take only a part. What it took is cut off here, so that the
                # next attempt continues inside the line.
                self._unwritten = self._unwritten[os.write(self._file, self._unwritten):]
            self._is_disk_full = False

    def close(self, timeout_s=wandb_log.FINISH_TIMEOUT_S):
        """Closes the file, and waits at most `timeout_s` seconds until WandB has all records."""
        self.flush()
        os.close(self._file)
        if self._wandb:
            self._wandb.finish(timeout_s)


def _rewind(path, resume_step):
    """Deletes from the file all records after `resume_step` and an incomplete last line; replaces the file atomically.

    Returns the names of the metrics that the file has for `resume_step` itself.
    """
    if not path.exists():
        return set()
    if resume_step is None:
        path.replace(path.with_suffix(".jsonl.aside"))
        return set()
    kept = []
    names = set()
    for line in path.read_text(errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue  # a crash left an incomplete line
        if record["step"] <= resume_step:
            kept.append(line)
        if record["step"] == resume_step:
            names |= record.keys()
    rewound = path.with_suffix(".jsonl.tmp")
    with open(rewound, "w") as file:
        file.writelines(line + "\n" for line in kept)
        file.flush()
        os.fsync(file.fileno())
    rewound.replace(path)
    return names


def format_line(record, total_steps=None, of_task=None):
    """Returns the console line of a record: `step 00100/01000 | loss 3.2101 | …`. of_task: see MetricsLogger."""
    parts = [f"step {record['step']:05d}"]
    if total_steps:
        parts[0] += f"/{total_steps:05d}"
    for name, text in (CONSOLE | (of_task or {})).items():
        value = record.get(name)
        if value is not None:
            parts.append(text.format(_WORDS[name](value) if name in _WORDS else value))
        elif name in record and name in _NOT_FINITE:
            parts.append(_NOT_FINITE[name])
    return " | ".join(filter(None, parts))


def format_count(count):
    """Returns 1234567 as "1.23M"."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if count >= 0.9995 * size:  # 999,999 is 1M
            return f"{count / size:.3g}{unit}"
    return str(count)


def format_duration(seconds):
    """Returns 3725 as "1h02m" and 125 as "2m05s"."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{seconds:02d}s" if minutes else f"{seconds}s"


def _repeated_compilation(texts):
    return f"compiled again: {texts[0]}" + (f" (and {len(texts) - 1} more)" if texts[1:] else "")


def _whole_text(is_whole):
    return "all of the validation text, which is shorter than --eval_tokens" if is_whole else ""


def _mirror_behind(seconds):
    return f"mirror behind by {format_duration(seconds)}" if seconds >= MIRROR_BEHIND_S else ""


# How the metrics are shown that the console line has, in its order. All others are in the file only.
CONSOLE = {
    "mean_loss": "loss {:.4f}",
    "lr_multiplier": "lr {:.3f}",
    "step_ms": "{:,.0f} ms",
    "tokens_per_s": "{:,.0f} tok/s",
    "mfu": "mfu {:.1%}",
    "tokens": "{} tokens",
    "time_left_s": "{} left",
    "code_compiles": "{:.1%} of its code compiles",
    "code_pass": "{:.1%} passes",
    "code_bpb": "solutions {:.4f} bits per byte",
    "val_bpb": "validation {:.4f} bits per byte",
    "fim_bpb": "middles {:.4f}",
    "val_bytes": "of {} bytes",
    "val_whole_text": "{}",
    "recompiled": "{}",
    "mirror_behind_s": "{}",
}
_WORDS = {"tokens": format_count, "val_bytes": format_count, "time_left_s": format_duration,
          "val_whole_text": _whole_text, "recompiled": _repeated_compilation, "mirror_behind_s": _mirror_behind}
_NOT_FINITE = {"mean_loss": "loss not finite", "val_bpb": "validation not finite"}
