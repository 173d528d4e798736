"""What a run says about itself, on rank 0: metrics.jsonl, one console line, WandB; and the arithmetic behind it.

metrics.jsonl has one JSON object per line with `step` (optimizer steps completed) and `time` (Unix time, s). Names with
a place of their own in the console line: loss (mean over the global batch, nats; null if it was not finite),
lr_multiplier, step_ms, tokens_per_s, mfu (0 to 1), tokens (seen so far), time_left_s, val_bpb, recompiled (a text for
each program that was compiled again). The rest is for the file: bad_steps (updates skipped so far), interruptions (how
often the run was resumed), seconds (since the run began) and where they went: seconds_train, _compile, _load, _save,
_evaluate, _sample, _lost (see Goodput), _other; and what observe.py measures.
"""
import errno
import json
import math
import os
import secrets
import time
from pathlib import Path

from nanochat.record import wandb_log

METRICS_FILE = "metrics.jsonl"


class MetricsLogger:
    """Writes records; rank 0 only. `log` waits for the disk's cache at most: never for the disk, nor for WandB."""

    def __init__(self, run_dir, run, config, *, total_steps=None, resume_step=None, wandb_project="nanochat-tpu",
                 wandb_id=None, console=print):
        """
        run: the run's name; WandB is used unless it is "dummy". config: a JSON object for WandB.
        resume_step: the step of the checkpoint that the run goes on from; later records are taken out of the file.
            None: a new run; the file of an older one is kept as metrics.jsonl.aside.
        wandb_id: `wandb_id` of the run that goes on, from the checkpoint's meta.
        console: called with each line, and with the one warning about WandB there may be.
        """
        self.path = Path(run_dir) / METRICS_FILE
        self.wandb_id = wandb_id or secrets.token_hex(4)
        self._total_steps, self._resume_step, self._console = total_steps, resume_step, console
        self._names_at_resume = _rewind(self.path, resume_step)
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._unwritten, self._is_disk_full = b"", False
        self._wandb = None
        if run != "dummy":
            self._wandb = wandb_log.WandbLog(console, project=wandb_project, name=run, id=self.wandb_id, config=config,
                                 dir=str(run_dir))

    def log(self, step, record, quiet=False):
        """Records {name: number or list of texts} for `step`; `quiet`: without a line on the console."""
        if step == self._resume_step:  # an evaluation of this step may have been done before the interruption
            record = {name: value for name, value in record.items() if name not in self._names_at_resume}
            if not record:
                return
        record = {name: None if isinstance(value, float) and not math.isfinite(value) else value
                  for name, value in record.items()}  # JSON has no NaN
        record = {"step": step, "time": round(time.time(), 3), **record}
        self._unwritten += json.dumps(record).encode() + b"\n"
        try:
            self.flush()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            if not self._is_disk_full:
                self._console(f"warning: {self.path}: {error.strerror}: records wait in memory")
            self._is_disk_full = True
        if not quiet:
            self._console(format_line(record, self._total_steps))
        if self._wandb:
            self._wandb.log(record)

    def flush(self):
        """Writes the records that wait; OSError if the disk is full."""
        while self._unwritten:
            self._unwritten = self._unwritten[os.write(self._file, self._unwritten):]
        self._is_disk_full = False

    def close(self, timeout_s=wandb_log.FINISH_TIMEOUT_S):
        """Ends the record; WandB is given `timeout_s` to take what it has not yet taken."""
        self.flush()
        os.close(self._file)
        if self._wandb:
            self._wandb.finish(timeout_s)


def _rewind(path, resume_step):
    """Takes records after `resume_step` out of the file, in one replacement, and half a line at its end.

    Returns the names that records of `resume_step` itself have.
    """
    if not path.exists():
        return set()
    if resume_step is None:
        path.replace(path.with_suffix(".jsonl.aside"))
        return set()
    kept, names = [], set()
    for line in path.read_text(errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue  # what a crash left of a line
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


_CONSOLE_FORMATS = {
    "loss": lambda value: f"loss {value:.4f}",
    "lr_multiplier": lambda value: f"lr {value:.3f}",
    "step_ms": lambda value: f"{value:,.0f} ms",
    "tokens_per_s": lambda value: f"{value:,.0f} tok/s",
    "mfu": lambda value: f"mfu {100 * value:.1f}%",
    "tokens": lambda value: f"{format_count(value)} tokens",
    "time_left_s": lambda value: f"{format_duration(value)} left",
    "val_bpb": lambda value: f"validation {value:.4f} bits per byte",
    "recompiled": lambda value: f"compiled again: {value[0]}" + (f" (and {len(value) - 1} more)" if value[1:] else ""),
}


def format_line(record, total_steps=None):
    """The console line of a record: `step 00100/01000 | loss 3.2101 | …`."""
    step = f"step {record['step']:05d}" + (f"/{total_steps:05d}" if total_steps else "")
    parts = [step] + [form(record[name]) for name, form in _CONSOLE_FORMATS.items() if record.get(name) is not None]
    return " | ".join(parts)


def format_count(count):
    """1234567 as "1.23M"."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if count >= 0.9995 * size:  # 999,999 is 1M
            return f"{count / size:.3g}{unit}"
    return str(count)


def format_duration(seconds):
    """3725 as "1h02m", 125 as "2m05s"."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{seconds:02d}s" if minutes else f"{seconds}s"
