"""The channel between the hosts of a run: a TCP connection from the parent process of every host to that of the first.

Through it the hosts join, agree (agreement.py), and notice within 20 seconds that one has died or cannot be reached;
then all end. The ranks' gradients do not pass here: they go from chip to chip.

The first message of a connection is "join", and the connection lasts as long as the run; or it is the only one, a
rank's request. The first host accepts connections from the addresses of the run's hosts only, and requests only with
its token, which it tells the hosts that join.
"""
import hmac
import os
import secrets
import socket
import sys
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from nanochat.common import BadInput, Failure, say
from nanochat.run.stopping import EXIT_STATUS
from nanochat.run.wire import Channel, Link, connect

RETRY_S = 0.5
JOINED = "that they have joined"  # the first thing that all hosts say
END = "that their ranks have ended"  # the last


@dataclass(frozen=True)
class PodLimits:
    """How long a host waits for the others, in seconds."""
    join_s: float = 300  # for all hosts to join
    gather_s: float = 3600  # for all hosts to say something: they may fetch or check a checkpoint before
    end_s: float = 7200  # for the first host, which saves and waits for its mirror at the end
    last_words_s: float = 300  # for the others, whose ranks finish before
    beat_s: float = 1  # between two heartbeats of a host
    lost_s: float = 20  # a host that is silent for so long is lost
    grace_s: float = 30  # from the run's failure to the end of this process, whatever it does


class PodError(Failure):
    """The run has ended on another host; `status` is the exit status with which all end."""

    def __init__(self, message, status):
        super().__init__(message)
        self.status = status


class Pod:
    """This host's end of the channel."""

    def __init__(self, host, limits=PodLimits()):
        self.host = host
        self._limits = limits
        self.names = list(host.addresses)  # of all hosts; their addresses until they have joined
        self.link = None  # for requests to the first host, once this one has joined
        self.answer = None  # a rank's request -> the message that answers it, on the first host
        self.failure = None  # the PodError with which the run ends here
        self._listener = None
        self._token = secrets.token_hex(16)
        self._is_over = threading.Event()
        self._changed = threading.Condition(threading.RLock())  # guards all below, and tells when they change
        self._channels = {}  # index -> Channel: on the first host to all others, on another host to the first
        self._said = {}  # name -> {index: value}, see gather; on the first host
        self._values = {}  # name -> the values of all hosts

    # Joining

    def join(self, about):
        """Waits for all hosts, and returns what each says about itself, a list. about: what this one says. Raises
        PodError if one does not join, or if the first host refuses this one."""
        if self.host.is_first:
            self._listen()
            timeout_s = self._limits.join_s
        else:
            self._reach_first()
            timeout_s = self._limits.join_s + self._limits.lost_s  # the first host gives up before, and says why
        self._start(self._beat)
        hellos = self.gather(JOINED, {"name": self.host.name, "about": about, "token": self._token}, timeout_s)
        self.names = [hello["name"] for hello in hellos]
        self.link = Link(self.host, hellos[0]["token"])
        others = [name for index, name in enumerate(self.names) if index != self.host.index]
        say(f"host {self.host.index} of {self.host.count}: {self.names[self.host.index]}, joined to "
            f"{', '.join(others)}")
        return [hello["about"] for hello in hellos]

    def _listen(self):
        first = self.host.addresses[0]
        try:
            known = {socket.gethostbyname(address) for address in self.host.addresses}
            self._listener = socket.create_server((first, self.host.port))
        except OSError as error:
            raise BadInput(f"the other hosts cannot join this one at {first}:{self.host.port} ({error.strerror}): end "
                           "the run that uses it, or correct NANOCHAT_HOSTS or NANOCHAT_POD_PORT on all") from None
        self._start(self._accept, known)

    def _accept(self, known):
        """Accepts connections from the known addresses until the listener is closed."""
        while True:
            try:
                connection, (peer, _) = self._listener.accept()
            except OSError:  # closed
                return
            if peer in known:
                self._start(self._serve, Channel(connection, self._limits.lost_s))
            else:
                connection.close()

    def _serve(self, channel):
        """Handles the messages of a connection to the first host."""
        try:
            message = channel.receive()
            if message["kind"] == "join":
                index = message["index"]
                if self._welcome(index, message["addresses"], channel):
                    return self._read(index)
                channel.send({"kind": "failed", "status": 2, "message":
                              f"host {index} has joined the first host already, or has other hosts than "
                              f"{', '.join(self.host.addresses)}: start the same command once on every host, with "
                              "the same NANOCHAT_HOSTS"})
            elif hmac.compare_digest(message["token"].encode(), self._token.encode()):
                channel.send(self.answer(message))
        except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError):
            pass  # the other side sees the connection end
        channel.close()

    def _welcome(self, index, addresses, channel):
        """Returns whether the host `index` may join."""
        with self._changed:
            is_welcome = index in range(1, self.host.count) and index not in self._channels and \
                addresses == list(self.host.addresses)
            if is_welcome:
                self._channels[index] = channel
            return is_welcome

    def _reach_first(self):
        first = f"{self.host.addresses[0]}:{self.host.port}"
        deadline = time.monotonic() + self._limits.join_s
        say(f"waiting for the first host at {first}, for up to {self._limits.join_s} s")
        while not self._channels:
            try:
                self._channels[0] = connect(self.host, self._limits.lost_s)
            except OSError as error:
                if time.monotonic() > deadline:
                    raise PodError(f"the first host has not been reached at {first} for {self._limits.join_s} s "
                                   f"({error}): start the run there, too, and let hosts reach each other at this port",
                                   1) from None
                time.sleep(RETRY_S)
        self._tell(0, {"kind": "join", "index": self.host.index, "addresses": list(self.host.addresses)})
        self._start(self._read, 0)

    # Messages. A thread for each connection reads and handles them. No handler waits for another host, so a host that
    # hangs blocks no message of the others. Each host sends a heartbeat every second, and is lost after 20 seconds of
    # silence.

    def _tell(self, index, message):
        """Sends a message, {"kind": …, …}, to the host `index`. Ignores errors: the silence of an unreachable host is
        noticed."""
        if index == self.host.index:
            self._handle(index, message)
        elif channel := self._channels.get(index):
            with suppress(OSError):
                channel.send(message)

    # Each host tells the first its value, and the first sends all values to each. So all hosts decide from the same
    # values, and a host that has them knows that all others have come this far.
    def gather(self, name, value, timeout_s=None):
        """Returns the values that all hosts pass to this call with the same name, a list. Raises PodError if the run
        has ended on another host, or after `timeout_s` (default: gather_s)."""
        timeout_s = timeout_s or self._limits.gather_s
        deadline = time.monotonic() + timeout_s
        self._tell(0, {"kind": "value", "name": name, "value": value})
        with self._changed:
            while self.failure or name not in self._values:  # all hosts may say that they have ended after a failure
                if self.failure:
                    raise self.failure
                if time.monotonic() > deadline:
                    missing = self.names[:1]
                    if self.host.is_first:
                        said = self._said.get(name, {})
                        missing = [host for index, host in enumerate(self.names) if index not in said]
                    raise PodError(f"waited {timeout_s} s for {', '.join(missing)} to say {name}: look at their logs, "
                                   "and start the run again on all hosts", 1)
                self._changed.wait(1)  # at most a second: a limit that passes notifies nobody
            return self._values.pop(name)

    def _handle(self, index, message):
        kind, name = message["kind"], message.get("name")
        with self._changed:
            if kind == "failed":
                self._fail(message["message"], message["status"])
            elif kind == "value":
                said = self._said.setdefault(name, {})
                said[index] = message["value"]
                if len(said) == self.host.count:
                    values = [value for _, value in sorted(self._said.pop(name).items())]
                    for other in range(self.host.count):
                        self._tell(other, {"kind": "values", "name": name, "values": values})
            elif kind == "values":
                self._values[name] = message["values"]
                if name == END:  # here, because the other side may close its connections at once
                    self._is_over.set()
                self._changed.notify_all()

    def _beat(self):
        while not self._is_over.wait(self._limits.beat_s):
            for index in list(self._channels):
                self._tell(index, {"kind": "beat"})

    def _read(self, index):
        """Handles the messages of another host until its end."""
        channel = self._channels[index]
        while True:
            try:
                message = channel.receive()
            except TimeoutError:
                what = f"has been silent for {self._limits.lost_s} s: it died, or the network did"
                break
            except (OSError, EOFError, ValueError) as error:
                what = f"has ended without a word ({error})"
                break
            self._handle(index, message)
        if not self._is_over.is_set():
            self._fail(f"host {self.names[index]} {what}", 1)
        channel.close()
        with self._changed:
            del self._channels[index]
            self._changed.notify_all()

    # The end

    def fail(self, message, status):
        """Ends the run on all hosts with this status, unless it has failed already. message: what is wrong here."""
        if not self._is_over.is_set():
            self._fail(f"host {self.names[self.host.index]}: {message}", status)

    # Only the first failure counts, so a message that comes back is not forwarded. The watchdog sees the failure and
    # ends the ranks; whatever the main thread does then, this process ends half a minute later.
    def _fail(self, message, status):
        with self._changed:
            if self.failure:
                return
            self.failure = PodError(message, status)
            for index in list(self._channels):  # the first host tells all, the others tell the first
                self._tell(index, {"kind": "failed", "message": message, "status": status})
            self._changed.notify_all()  # only now: a waiting thread may close the connections
        self._start(self._end_at_last)

    def _end_at_last(self):
        if not self._is_over.wait(self._limits.grace_s):
            say(f"error: {self.failure}", sys.stderr)
            os._exit(self.failure.status)

    def end(self, status, reason=""):
        """Returns the exit status of the run, the same on all hosts, once the ranks of all have ended. status: that of
        this host's ranks; reason: why it is neither 0 nor EXIT_STATUS, in a line."""
        if status not in (0, EXIT_STATUS):
            self.fail(reason or f"its ranks ended with status {status}", status)
        # The others wait for the first, which saves and waits for its mirror.
        timeout_s = self._limits.last_words_s if self.host.is_first else self._limits.end_s
        try:
            return self.gather(END, status, timeout_s)[0]
        except PodError as failure:
            return failure.status

    def close(self):
        """Closes the connections, once the others have read the last messages."""
        self._is_over.set()
        with self._changed:
            for channel in self._channels.values():
                with suppress(OSError):
                    channel.end_sending()
            self._changed.wait_for(lambda: not self._channels, 3)
        if self._listener:
            self._listener.close()

    def _start(self, function, *arguments):
        threading.Thread(target=function, args=arguments, name="pod", daemon=True).start()


@contextmanager
def membership(host):
    """Yields the Pod of a Host; None for None. An error that ends the block ends the run on all hosts: with the
    `status` of BadInput or a Failure, and 1 for any other error."""
    if host is None:
        yield None
        return
    pod = Pod(host)
    try:
        yield pod
    except BaseException as error:
        status = error.status if isinstance(error, BadInput | Failure) else 1
        pod.fail(" ".join(str(error).split()) or type(error).__name__, status)
        raise
    finally:
        pod.close()
