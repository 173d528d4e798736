"""What reading from servers has in common, a bucket's and the Hub's: files as they were listed, failures, retries."""
import math
import os
import threading
import time
from dataclasses import dataclass

from nanochat.common import Outage, say

TRY_TIMEOUT_S = 30  # for the next bytes from or to a server
SAY_S = 30  # between two warnings of a process about an outage; shorter waits pass without one
FIRST_PAUSE_S = 1.0  # between two attempts; each pause doubles
LONGEST_PAUSE_S = 30.0
OUTAGE_S = 480  # less than loader.TIMEOUT_S, and than the default of --step_timeout_s, so that this is reported first
PART_BYTES = 1 << 20
MAX_PAGES = 1000  # of a listing, each of up to 1000 files
ODD_JSON = (ValueError, LookupError, TypeError, AttributeError, RecursionError)  # of an answer of another kind


class Interruption(Exception):
    """A failure that may pass: the same call may succeed later, but not within wait_s seconds."""

    def __init__(self, problem, wait_s=0):
        super().__init__(problem)
        self.wait_s = wait_s


@dataclass(frozen=True)
class StoredFile:
    """A file in a bucket or on the Hub, as it was when it was listed."""
    url: str
    size: int
    generation: str  # changes with the bytes
    commit: str = ""  # of the Hub


# Who retries for how long. Reading data: OUTAGE_S, 8 minutes without an answer, and then the run ends with the status
# of an Outage. A copy of the mirror: storage.BLIP_S for each file, because the Uploader itself tries again, with pauses
# of up to a minute and as long as the run lasts. The start of a run: mirror.OUTAGE_S, 10 minutes.
class Retries:
    """Retries until the server has not answered for limit_s."""
    silent_until = 0.0

    def __init__(self, url, limit_s):
        self.url = url
        self.limit_s = limit_s
        self.begin()

    def begin(self):
        self.deadline = time.monotonic() + self.limit_s
        self.pause_s = FIRST_PAUSE_S

    def wait(self, error):
        """Waits before the next attempt, with a warning; raises `error`, an Interruption, if none is left."""
        now = time.monotonic()
        left_s = self.deadline - now
        if left_s <= error.wait_s:
            raise error
        if self.limit_s > SAY_S and now >= Retries.silent_until:
            Retries.silent_until = now + SAY_S
            say(f"warning: {self.url} cannot be reached ({error}); waiting for it, for up to "
                f"{math.ceil(left_s / 60)} more minutes")
        time.sleep(max(min(self.pause_s, left_s), error.wait_s))
        self.pause_s = min(2 * self.pause_s, LONGEST_PAUSE_S)

    def call(self, function, *args):
        """Returns function(*args), retried while it raises Interruption."""
        self.begin()
        while True:
            try:
                return function(*args)
            except Interruption as error:
                self.wait(error)


def patiently(place, limit_s, function, *args):
    """Returns function(*args), retried while it raises Interruption. Raises Outage after limit_s seconds."""
    try:
        return Retries(place, limit_s).call(function, *args)
    except Interruption as error:
        raise outage(place, limit_s, error) from None


def outage(place, waited_s, error):
    """Returns the Outage of a place that was waited for, whose last failure was `error`, an Interruption."""
    why = f"has not been reached for {waited_s / 60:.0f} minutes"
    if error.wait_s > waited_s:
        why = f"asks to wait for {error.wait_s / 60:,.0f} minutes"
    return Outage(f"{place} {why} ({error}): start the same command again later")


def side_by_side(function, items, num_threads):
    """Calls function(item) for each item of a list, in several threads at the same time; raises the first error."""
    items = iter(items)  # all threads take from it
    errors = []

    def work():
        try:
            for item in items:
                if errors:
                    return
                function(item)
        except Exception as error:
            errors.append(error)

    # Daemons, unlike the threads of a ThreadPoolExecutor: the end of the process does not wait for a copy.
    threads = [threading.Thread(target=work, name="side-by-side", daemon=True) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def download(read, descriptor, begin, end, retries):
    """Writes what read(begin, end) yields, the bytes of a file, to the same place of an open file. After a broken
    connection it continues from there, as long as the Retries allow."""
    while begin < end:
        try:
            for part in read(begin, end):
                written = os.pwrite(descriptor, part, begin)
                begin += written
                if written < len(part):  # the next part would not be at its place
                    raise Interruption("the disk took only a part of it")
                retries.begin()  # a slow server still answers
            if begin < end:
                raise Interruption("the connection was cut")
        except Interruption as error:
            retries.wait(error)
