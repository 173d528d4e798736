"""One thread that runs the model, and the requests that wait for it.

The event loop's thread calls all methods except Job.on_text and Job.keep_going, so nothing here needs a lock.
"""
import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

from nanochat.common import BadInput
from nanochat.serve.access import Refused

MAX_WAITING = 16
# nginx's "client closed request". After 409 or 503, OpenAI's package would retry.
STATUS_REPLACED = 499


class Job:
    """A request from its arrival to its last piece of text."""

    def __init__(self, timeout_s):
        self._loop = asyncio.get_running_loop()
        self._events = asyncio.Queue()
        self._deadline = time.monotonic() + timeout_s
        self._is_cancelled = False
        self.future = None
        self.refusal = None

    def on_text(self, sample, text):
        self._put((sample, text))

    def keep_going(self):
        """Returns whether the model thread shall generate another token."""
        return not self._is_cancelled and time.monotonic() < self._deadline

    def is_waiting(self):
        return not self.future.running() and not self.future.done()

    def cancel(self, refusal=None):
        """Withdraws a waiting request, and ends a running one with its next token. refusal: for its client."""
        self._is_cancelled = True
        self.refusal = self.refusal or refusal
        # The model thread may start the job at any moment. If future.cancel() comes too late, keep_going still ends the
        # job before its first token, because the flag is set first.
        self.future.cancel()  # a no-op once the model thread has started it

    def _put(self, event):
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)
        except RuntimeError:  # the server has stopped and closed its event loop
            pass

    async def events(self, request):
        """Yields each piece of text as (sample, text), and at last the completion. Raises Refused. The job is cancelled
        when the client of `request` hangs up, or when the generator is closed."""
        client_gone = asyncio.ensure_future(hung_up(request))
        client_gone.add_done_callback(self._note_client_gone)
        # The future itself is the last event. It enters the queue by the same call_soon_threadsafe as the texts, after
        # them, so it overtakes none.
        self.future.add_done_callback(self._put)
        timer = self._loop.call_at(self._loop.time() + self._deadline - time.monotonic(), self._expire)
        try:
            while (event := await self._events.get()) is not self.future:
                yield event
            yield self._result()
        finally:
            timer.cancel()
            client_gone.cancel()
            self.cancel()

    def _note_client_gone(self, task):
        if not task.cancelled():
            self.cancel(Refused(499, "you hung up"))

    def _expire(self):
        # keep_going ends a running job at the deadline, and the client gets the text so far.
        if self.is_waiting():
            self.cancel(Refused(503, "the request timed out (--timeout_s) while the model was busy: try again"))

    def _result(self):
        if self._is_cancelled:
            raise self.refusal
        if isinstance(self.future.exception(), BadInput):
            raise Refused(400, str(self.future.exception()))
        return self.future.result()


async def hung_up(request):
    """Returns once the client closes its connection. The request's body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


class ModelThread:
    def __init__(self):
        self._executor = ThreadPoolExecutor(1, "model")
        self._jobs = {}  # Job: its client

    def num_waiting(self):
        return sum(job.is_waiting() for job in self._jobs)

    def start(self, work, client, timeout_s):
        """Queues a call of work(job) for the model thread, and returns the Job. Raises Refused if too many wait.

        client: a name, whose waiting request this one replaces, or None. timeout_s: the limit, waiting included.
        """
        for old, other in self._jobs.items():
            if client is not None and other == client and old.is_waiting():
                old.cancel(Refused(STATUS_REPLACED, "a newer request of the same client replaced this one"))
        if self.num_waiting() >= MAX_WAITING:
            raise Refused(503, f"{MAX_WAITING} requests are waiting for the model already: try again later")
        job = Job(timeout_s)
        job.future = self._executor.submit(work, job)
        self._jobs = {old: other for old, other in self._jobs.items() if not old.future.done()}
        self._jobs[job] = client
        return job

    def stop(self):
        """Ends the running request with its next token, and withdraws the waiting ones."""
        for job in self._jobs:
            job.cancel(Refused(503, "the server is stopping"))
        self._executor.shutdown(wait=False, cancel_futures=True)
