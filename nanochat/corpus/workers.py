"""Runs tasks in worker processes that end with the process that started them, and lets tasks write files whole."""
import functools
import multiprocessing.util
import os
import signal
import uuid
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager

from nanochat.common import end_with_parent


@contextmanager
def worker_pool(workers):
    """Yields a function run(function, calls, done), which calls `function` in `workers` processes. `calls` is a list of
    tuples of arguments. run calls done(i, result) when call number i has ended, in any order."""
    if workers == 1:
        yield _run_here
        return
    # spawn, because this process has threads by now (pyarrow, tqdm), and fork would break them
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=end_with_parent,
                             initargs=(os.getpid(),)) as pool:
        try:
            yield functools.partial(_run_in, pool)
        except BaseException:
            _end(pool)
            raise


def _run_in(pool, function, calls, done):
    # The processes begin here, and inherit the mask: Ctrl-C reaches all, and the parent's end is theirs. Here another
    # thread may take the signal, and Python would raise it in this one while a process begins.
    held = []
    handler = signal.signal(signal.SIGINT, lambda *_: held.append(True))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    futures = {pool.submit(function, *arguments): i for i, arguments in enumerate(calls)}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    signal.signal(signal.SIGINT, handler)
    if held and callable(handler):
        handler(signal.SIGINT, None)
    for future in as_completed(futures):
        done(futures[future], future.result())


def _end(pool):
    """Ends the workers at once, and frees the pool's semaphores: after Ctrl-C run_script ends this process, and Python
    would complain of leaked ones."""
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C would stop what follows halfway
    manager = pool._executor_manager_thread
    for process in multiprocessing.active_children():
        process.kill()
    pool.shutdown(wait=False, cancel_futures=True)
    if manager is not None:
        manager.join(5)  # without end in Python 3.10, if a long argument was on its way
    multiprocessing.util._run_finalizers(0)
    signal.signal(signal.SIGINT, handler)


def _run_here(function, calls, done):
    for i, arguments in enumerate(calls):
        done(i, function(*arguments))


@contextmanager
def whole_file(path):
    """Yields an open file that becomes `path` when the block ends without an error and every byte is on disk."""
    # Each try has a file of its own: a task whose node was believed lost may still run beside its repetition.
    partial = path.with_name(f"{path.name}.{os.getpid()}_{uuid.uuid4().hex}.partial")
    with open(partial, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)
