"""Worker processes that end with the process that started them, and how far their work is."""
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager

from tqdm import tqdm

from nanochat.common import end_with_parent


@contextmanager
def worker_pool(workers):
    """Yields a function run(function, calls, done), which calls `function` in `workers` processes.

    `calls` is a list of tuples of arguments. done(i, result) is called when call number i has ended, in any order.
    """
    if workers == 1:
        def run(function, calls, done):
            for i, arguments in enumerate(calls):
                done(i, function(*arguments))
        yield run
        return
    # spawn, because this process has threads by now (apt's downloads, pyarrow, tqdm), and fork would break them
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=end_with_parent,
                             initargs=(os.getpid(),)) as pool:
        def run(function, calls, done):
            futures = {pool.submit(function, *arguments): i for i, arguments in enumerate(calls)}
            try:
                for future in as_completed(futures):
                    done(futures[future], future.result())
            except BaseException:
                # Otherwise the end of the block would wait until all calls that are still queued were done.
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        yield run


class Progress:
    """Shows progress: a tqdm bar on a terminal, otherwise plain lines, at most one in ten seconds."""

    def __init__(self, label, total, unit="B"):
        self.label = label
        self.total = total
        self.unit = unit
        self.done = 0
        self.started = time.monotonic()
        self.printed = self.started
        self.bar = tqdm(total=total, desc=label, unit=unit, unit_scale=True) if sys.stderr.isatty() else None

    def update(self, amount):
        self.done += amount
        if self.bar:
            self.bar.update(amount)
        elif self.done < self.total and time.monotonic() - self.printed > 10:
            self._print()

    def _print(self):
        self.printed = time.monotonic()
        print(tqdm.format_meter(self.done, self.total, self.printed - self.started, ncols=0, prefix=self.label,
                                unit=self.unit, unit_scale=True), flush=True)

    def close(self):
        if self.bar:
            self.bar.close()
        else:
            self._print()
