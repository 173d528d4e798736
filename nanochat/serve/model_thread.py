"""One thread that uses the model, and the requests that wait for it.

All methods but Job.on_text and Job.keep_going belong to the event loop's thread, so nothing here needs a lock.
"""
import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

from nanochat.common import BadInput

MAX_WAITING = 16
# "Client closed request" of nginx. Not 409 or 503, after which OpenAI's package would send the old request again.
STATUS_REPLACED = 499


class Refused(Exception):
    """A request that gets no completion: the HTTP status, and a sentence that says why."""

    def __init__(self, status, message):
        super().__init__(message)
        self.status = status
        self.message = message


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
        """Whether the model thread shall generate another token."""
        return not self._is_cancelled and time.monotonic() < self._deadline

    def is_waiting(self):
        return not self.future.running() and not self.future.done()

    def cancel(self, refusal=None):
        """Takes the request back if it still waits, and else ends it with the next token. refusal: what its client
        gets."""
        self._is_cancelled = True
        self.refusal = self.refusal or refusal
        # The model thread may begin with the job at any moment. Either this comes first, and the job never begins, or
        # keep_going ends it before its first token: the flag was set before.
        self.future.cancel()  # does nothing once the model thread has begun

    def _put(self, event):
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)
        except RuntimeError:  # the server has ended, and its event loop is closed
            pass

    async def events(self, request):
        """Yields each piece of text as (sample, text), and at last the completion. Raises Refused. When the client of
        `request` hangs up, or nobody iterates any more, the job is cancelled."""
        client_gone = asyncio.ensure_future(hung_up(request))
        client_gone.add_done_callback(self._note_client_gone)
        # The future itself is the last event. It is put into the queue by the same call_soon_threadsafe as the texts,
        # and after them, so it cannot overtake one.
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
        # Once the model works on the job, keep_going ends it at the deadline, and the client gets the text so far.
        if self.is_waiting():
            self.cancel(Refused(503, "the model was busy with other requests for the whole time limit of this one "
                                     "(--timeout_s): try again"))

    def _result(self):
        if self._is_cancelled:
            raise self.refusal
        if isinstance(self.future.exception(), BadInput):
            raise Refused(400, str(self.future.exception()))
        return self.future.result()


async def hung_up(request):
    """Returns when the client has closed its connection; the request's body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


class ModelThread:
    def __init__(self):
        self._executor = ThreadPoolExecutor(1, "model")
        self._jobs = {}  # Job: its client

    def num_waiting(self):
        return sum(job.is_waiting() for job in self._jobs)

    def start(self, work, client, timeout_s):
        """Has the model thread call work(job) as soon as it is free. Returns the Job.

        client: a name. A request that still waits gives its place to a newer one of the same client; those of None all
        wait. timeout_s: the time limit, waiting included. Raises Refused if too many are waiting.
        """
        for old, other in self._jobs.items():
            if client is not None and other == client and old.is_waiting():
                old.cancel(Refused(STATUS_REPLACED, "a newer request of the same client took the place of this one"))
        if self.num_waiting() >= MAX_WAITING:
            raise Refused(503, f"{MAX_WAITING} requests are waiting for the model already: try again later")
        job = Job(timeout_s)
        job.future = self._executor.submit(work, job)
        self._jobs = {old: other for old, other in self._jobs.items() if not old.future.done()}
        self._jobs[job] = client
        return job

    def stop(self):
        """Ends what is generated with its next token, and takes back what is waiting."""
        for job in self._jobs:
            job.cancel(Refused(503, "the server is stopping"))
        self._executor.shutdown(wait=False, cancel_futures=True)
