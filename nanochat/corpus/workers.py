"""Worker processes that end with the process that started them."""
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager

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
