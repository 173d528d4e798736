"""The metrics of a run, which rank 0 writes to metrics.jsonl, to the console, to WandB and for TensorBoard.

metrics.jsonl has one JSON object per line, with `step` (optimizer steps completed), `time` (Unix time, s), metrics of
CONSOLE (below) and
    loss            of one step, every step: mean over the global batch, nats per token; null if it was not finite
    grad_norm, epoch, goodput (0 to 1)
    seq_len         with --seq_len_ramp, the positions per row of the last step
    bad_steps       updates skipped so far because they were not finite
    interruptions   how often the run was resumed
    seconds         since the run began; seconds_train, seconds_compile, … are its parts, see goodput.py
    data_wait, host_dispatch, compilations, compile_s, device_memory_…, host_memory_…: see observe.py
"""
import json
import math
import os
import queue
import threading
import time
from pathlib import Path

from nanochat.common import is_disk_full, move_aside, say, written_whole

METRICS_FILE = "metrics.jsonl"
QUEUE_RECORDS = 1000  # that wait for a reader
WANDB_TIMEOUT_S = 60


class MetricsLogger:
    """Writes the records of a run; rank 0 only. It waits for the disk's cache at most, and never for a Reader."""

    def __init__(self, run_dir, *, resume_step=None, total_steps=None, readers=(), console=say, of_task=None):
        """
        resume_step: the step of the checkpoint from which the run resumes; later records are deleted from the file.
            None means a new run: the file of an older run becomes metrics.jsonl.aside.
        readers: Readers. console: called with each line and each warning.
        of_task: {metric: its format on the console} of the metrics that only this task has.
        """
        self.path = Path(run_dir) / METRICS_FILE
        self._total_steps = total_steps
        self._console = console
        self._of_task = of_task
        self._readers = readers
        _rewind(self.path, resume_step)
        # Unbuffered: the kernel holds a logged record, which survives a kill of this process.
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._unwritten = b""
        self._is_disk_full = False
        self._writing = threading.Lock()  # the thread that saves a checkpoint flushes, too

    def log(self, step, record, quiet=False):
        """Records {name: number or list of texts} for `step`, with a line on the console unless `quiet`."""
        whole = {"step": step, "time": round(time.time(), 3)}
        for name, value in record.items():
            is_nan = isinstance(value, float) and not math.isfinite(value)  # JSON has none
            whole[name] = None if is_nan else value
        # The records that found a full disk precede it in this buffer, so all are written in their order.
        with self._writing:
            self._unwritten += json.dumps(whole).encode() + b"\n"
        try:
            self.flush()
        except OSError as error:
            if not is_disk_full(error):
                raise
            if not self._is_disk_full:
                self._console(f"warning: {self.path}: {error.strerror}: records wait in memory")
            self._is_disk_full = True
        if not quiet:
            self._console(format_line(whole, self._total_steps, self._of_task))
        for reader in self._readers:
            reader.log(whole)

    def flush(self):
        """Writes the records that wait in memory. Raises OSError if the disk is full."""
        with self._writing:
            while self._unwritten:
                # A nearly full disk may take a part of a line. The next attempt continues after that part.
                self._unwritten = self._unwritten[os.write(self._file, self._unwritten):]
            self._is_disk_full = False

    def close(self, timeout_s=WANDB_TIMEOUT_S):
        """Closes the file, and waits at most `timeout_s` seconds until each reader has all records."""
        self.flush()
        os.close(self._file)
        for reader in self._readers:
            reader.finish(timeout_s)


def parse_record(line):
    """Returns the record of a line of metrics.jsonl, or None if it is no record: a crash leaves an incomplete line."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if isinstance(record, dict) and type(record.get("step")) is int and type(record.get("time")) in (int, float):
        return record
    return None


def _rewind(path, resume_step):
    """Deletes the records that the run writes again, those after `resume_step` and of its evaluation, and all
    lines that are no records."""
    if not path.exists():
        return
    if resume_step is None:
        move_aside(path)
        return
    kept = []
    for line in path.read_text(errors="replace").splitlines():
        record = parse_record(line)
        if record is None:
            continue
        if record["step"] < resume_step or record["step"] == resume_step and "loss" in record:
            kept.append(line + "\n")
    with written_whole(path) as unfinished:
        unfinished.write_text("".join(kept))


# WandB and TensorBoard are more readers of the records that never stop or delay a run: a bounded queue feeds a daemon
# thread, a full queue drops records, and all failures together are one warning.
class Reader:
    """Hands records to a library in the background."""

    def __init__(self, name, read, /, **arguments):
        """name: the library's. read: called in a thread of its own, with an iterator of the records and `arguments`."""
        self._name = name
        self._queue = queue.Queue(QUEUE_RECORDS)
        self._warned = False
        self._thread = threading.Thread(target=self._work, args=(read, arguments), name=name, daemon=True)
        self._thread.start()

    def log(self, record):
        """Queues a record {name: value} with its "step"; drops it if the queue is full."""
        try:
            if self._thread.is_alive():
                self._queue.put_nowait(record)
        except queue.Full:
            self._warn("does not keep up: it lacks some records")

    def finish(self, timeout_s):
        """Waits until the library has all queued records, for at most `timeout_s` seconds."""
        self.log(None)  # ends the thread; a full queue drops it, and the wait times out
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._warn(f"did not finish within {timeout_s} s")

    def _work(self, read, arguments):
        try:
            read(iter(self._queue.get, None), **arguments)
        except BaseException as error:  # wandb raises KeyboardInterrupt and SystemExit, too
            self._warn(f"failed ({type(error).__name__}: {' '.join(str(error).split())})")

    def _warn(self, problem):
        if not self._warned:
            self._warned = True
            say(f"warning: {self._name} {problem}. The run continues; metrics.jsonl has every record.")


def send_to_wandb(records, **init_arguments):
    """Sends the records to WandB. init_arguments: those of wandb.init."""
    import wandb
    # By default WandB would wait on the console for a login, and a silent server would keep the process alive.
    settings = wandb.Settings(console="off", silent=True, login_timeout=1, init_timeout=WANDB_TIMEOUT_S,
                              finish_timeout=WANDB_TIMEOUT_S)
    try:
        run = wandb.init(resume="allow", settings=settings, **init_arguments)
    except BaseException as error:
        if "No API key" in str(error):
            return say("WandB gets no records: nobody has logged in here (wandb login). metrics.jsonl "
                       "has every record.")
        raise
    # The step is a metric like others. WandB's own counter never goes back: after a resume it would drop the steps
    # between the checkpoint and the end of the process before.
    run.define_metric("*", step_metric="step")
    for record in records:
        run.log(record)
    run.finish()
    if run.offline:  # each process writes a folder; one that is uploaded alone replaces those before
        folders = f"'{run.settings.wandb_dir}'/offline-run-*-{run.id}"
        say(f"WandB is offline: wandb sync --id={run.id} {folders} uploads the run")


def write_for_tensorboard(records, directory, resume_step):
    """Writes the numbers of the records to event files in `directory`. resume_step: see MetricsLogger."""
    from torch.utils.tensorboard import SummaryWriter
    purge_step = None
    if resume_step is None:
        move_aside(directory)
    else:
        purge_step = resume_step + 1  # TensorBoard forgets this step and those after it
    with SummaryWriter(directory, purge_step=purge_step) as writer:
        for record in records:
            for name, value in record.items():
                if name not in ("step", "time") and isinstance(value, (int, float)):
                    writer.add_scalar(name, value, record["step"], walltime=record["time"])
            writer.flush()  # a kill loses no step that a checkpoint has


def format_line(record, total_steps=None, of_task=None):
    """Returns the console line of a record: `step 00100/01000 | loss 3.2101 | …`. of_task: see MetricsLogger."""
    parts = [f"step {record['step']:05d}"]
    if total_steps:
        parts[0] += f"/{total_steps:05d}"
    for name, text in (CONSOLE | (of_task or {})).items():
        value = record.get(name)
        if value is not None:
            if name in _WORDS:
                value = _WORDS[name](value)
            parts.append(text.format(value))
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
    seconds = int(seconds)
    if seconds >= 3600:
        return f"{seconds // 3600}h{seconds // 60 % 60:02d}m"
    if seconds >= 60:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    return f"{seconds}s"


# The metrics on the console line, in its order.
CONSOLE = {
    "mean_loss": "loss {:.4f}",  # of the steps since the last line whose loss was finite
    "lr_multiplier": "lr {:.3f}",
    "step_ms": "{:,.0f} ms",
    "tokens_per_s": "{:,.0f} tok/s",
    "mfu": "mfu {:.1%}",
    "tokens": "{} tokens",  # seen so far
    "time_left_s": "{} left",
    "val_bpb": "validation {:.4f} bits per byte",
    "val_bytes": "of {} bytes",
    "fim_bpb": "middles {:.4f}",  # with --fim_rate: bits per byte of middles, given the text before and after
    "fim_bytes": "of {} bytes",
    "recompiled": "compiled again: {}",  # a list of programs
}
_WORDS = {"tokens": format_count, "val_bytes": format_count, "time_left_s": format_duration,
          "fim_bytes": format_count, "recompiled": ", ".join}
_NOT_FINITE = {"mean_loss": "loss not finite", "val_bpb": "validation not finite"}
