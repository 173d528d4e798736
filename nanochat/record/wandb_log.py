"""WandB as one more reader of a run's records: its absence or failure never stops or delays a run."""
import queue
import threading

QUEUE_RECORDS = 1000
FINISH_TIMEOUT_S = 60


class WandbLog:
    """Sends records to WandB from a daemon thread behind a bounded queue. All its failures together are one warning."""

    def __init__(self, report, **init_arguments):
        """report: called with the warning. init_arguments: those of wandb.init."""
        self._report = report
        self._queue = queue.Queue(QUEUE_RECORDS)
        self._warned = False
        self._thread = threading.Thread(target=self._work, args=(init_arguments,), name="wandb", daemon=True)
        self._thread.start()

    def log(self, record):
        """Queues a record {name: value} with its "step"; drops it if the queue is full."""
        try:
            if self._thread.is_alive():
                self._queue.put_nowait(record)
        except queue.Full:
            self._warn("does not keep up: it lacks some records")

    def finish(self, timeout_s):
        """Waits until WandB has all queued records, for at most `timeout_s` seconds."""
        # None ends the thread. In a full queue there is no place for it, and the time below ends the wait instead.
        self.log(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._warn(f"did not finish within {timeout_s} s")

    def _work(self, init_arguments):
        try:
            import wandb
            # Without these settings WandB would ask for a login on the console and wait for a person, and a server
            # that never answers would keep the process from ending.
            settings = wandb.Settings(console="off", silent=True, login_timeout=1, init_timeout=FINISH_TIMEOUT_S,
                                      finish_timeout=FINISH_TIMEOUT_S)
            run = wandb.init(resume="allow", settings=settings, **init_arguments)
            while (record := self._queue.get()) is not None:
                run.log(record, step=record["step"])
            run.finish()
        except BaseException as error:  # wandb raises KeyboardInterrupt and SystemExit, too
            self._warn(f"failed ({type(error).__name__}: {' '.join(str(error).split())})")

    def _warn(self, problem):
        if not self._warned:
            self._warned = True
            self._report(f"warning: WandB {problem}. The run continues; metrics.jsonl has every record.")
