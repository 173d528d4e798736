"""The channel between the hosts of a run: a TCP connection from the parent process of every host to that of the first.

Through it the hosts join, agree (agreement.py), and notice within 20 seconds that one has died or cannot be reached;
then all end. The ranks' gradients do not pass here: they go from chip to chip.

The first message of a connection names its kind: "join", which lasts as long as the run, or a request for which
`serves` has a function. The first host accepts connections from the addresses of the run's hosts only, and serves
requests only to those that know its token, which it tells the hosts that have joined.
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
from nanochat.run import wire
from nanochat.run.stopping import EXIT_STATUS

RETRY_S = 0.5
END = "that their ranks have ended"  # the last thing that all hosts say


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
        self.names = []  # of all hosts, once they have joined
        self.link = None  # for requests to the first host, once this one has joined
        self.failure = None  # the PodError with which the run ends here
        self._handlers = {"value": self._on_value, "values": self._on_values,
                          "failed": self._on_failed}  # kind -> function(index, message)
        self.serves = {}  # kind of request -> function(connection, message), on the first host
        self._listener = None
        self._token = secrets.token_hex(16)
        self._is_over = threading.Event()
        self._changed = threading.Condition(threading.RLock())  # guards all below, and tells when they change
        self._members = {}  # index -> Member: on the first host all others, on another host the first
        self._readers = []  # the threads that read from them
        self._hellos = {}  # index -> what that host says of itself, on the first host
        self._said = {}  # name -> {index: value}, see gather; on the first host
        self._values = {}  # name -> the values of all hosts

    # Joining

    def join(self, about):
        """Waits for all hosts, and returns what each says about itself, a list. about: what this one says. Raises
        PodError if one does not join, and BadInput if the first host refuses this one."""
        if self.host.is_first:
            hellos = self._wait_for_others(about)
        else:
            hellos = self._join_first(about)
        names = [hello["name"] for hello in hellos]
        for name, address in zip(names, self.host.addresses, strict=True):
            if names.count(name) > 1:
                name = f"{name} ({address})"
            self.names.append(name)
        self.link = wire.Link(self.host, self._token)
        self._readers = [self._start(self._read, index) for index in self._members]
        self._start(self._beat)
        others = [name for index, name in enumerate(self.names) if index != self.host.index]
        say(f"host {self.host.index} of {self.host.count}: {self.names[self.host.index]}, joined to "
            f"{', '.join(others)}")
        return [hello["about"] for hello in hellos]

    # Joining, on the first host

    def _wait_for_others(self, about):
        """Returns the hellos of all hosts, and sends them to the others."""
        self._listen()
        began = time.monotonic()
        with self._changed:
            self._hellos[0] = {"about": about, "name": self.host.name}
            while len(self._hellos) < self.host.count:
                missing = [address for index, address in enumerate(self.host.addresses) if index not in self._hellos]
                self._wait(began, self._limits.join_s, f"these hosts to join this one: {', '.join(missing)}")
            hellos = [self._hellos[index] for index in range(self.host.count)]
        for index in self._members:
            self.tell(index, {"hellos": hellos, "token": self._token})
        return hellos

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
                self._start(self._serve, connection)
            else:
                connection.close()

    def _serve(self, connection):
        connection.settimeout(self._limits.lost_s)
        try:
            message = wire.receive(connection)
            kind = message.get("kind")
            if kind == "join":
                return self._serve_join(connection, message)
            with connection:
                if kind in self.serves and hmac.compare_digest(str(message.get("token")), self._token):
                    self.serves[kind](connection, message)
        except (OSError, EOFError, ValueError, KeyError):  # the other side sees the connection end
            connection.close()

    def _serve_join(self, connection, message):
        index = message.get("index")
        with self._changed:
            is_new = index in range(1, self.host.count) and index not in self._hellos
            if is_new and message.get("addresses") == list(self.host.addresses):
                self._hellos[index] = {"about": message["about"], "name": str(message["name"])}
                self._members[index] = wire.Member(connection)
                self._changed.notify_all()
                return
        wire.send(connection, {"refused": f"host {index} has joined the first host already, or has other hosts than "
                                          f"{', '.join(self.host.addresses)}: start the same command once on every "
                                          "host, with the same NANOCHAT_HOSTS"})
        connection.close()

    # Joining, on the others

    def _join_first(self, about):
        """Returns the hellos of all hosts, once they have joined the first."""
        first = f"{self.host.addresses[0]}:{self.host.port}"
        connection = self._reach(first)
        wire.send(connection, {"kind": "join", "index": self.host.index, "name": self.host.name, "about": about,
                               "addresses": list(self.host.addresses)})
        connection.settimeout(self._limits.join_s + self._limits.lost_s)
        try:
            message = wire.receive(connection)
        except (OSError, EOFError, ValueError) as error:
            raise PodError(f"the first host, at {first}, has ended before all hosts had joined ({error})", 1) from None
        if "refused" in message:
            raise BadInput(message["refused"])
        if message.get("kind") == "failed":
            raise PodError(message["message"], message["status"])
        connection.settimeout(self._limits.lost_s)
        self._token = message["token"]
        self._members[0] = wire.Member(connection)
        return message["hellos"]

    def _reach(self, first):
        deadline = time.monotonic() + self._limits.join_s
        say(f"waiting for the first host at {first}, for up to {self._limits.join_s} s")
        while True:
            try:
                return wire.connect(self.host)
            except OSError as error:
                if time.monotonic() > deadline:
                    raise PodError(f"the first host has not been reached at {first} for {self._limits.join_s} s "
                                   f"({error}): start the run there, too, and let hosts reach each other at this port",
                                   1) from None
            time.sleep(RETRY_S)

    # Messages. A thread for each connection reads them and calls the handler of their kind. No handler waits for
    # another host, so a host that hangs blocks no message of the others. Each host sends a heartbeat every second, and
    # is lost after 20 seconds of silence.

    def tell(self, index, message):
        """Sends a message, {"kind": …, …}, to the handler for its kind on the host `index`. Ignores errors: the silence
        of an unreachable host is noticed."""
        if index == self.host.index:
            self._handlers[message["kind"]](index, message)
            return
        with suppress(OSError):
            self._members[index].send(message)

    # Each host tells the first its value, and the first sends all values to each. So all hosts decide from the same
    # values, and a host that has them knows that all others have come this far.
    def gather(self, name, value, timeout_s=None):
        """Returns the values that all hosts pass to this call with the same name, a list. Raises PodError if the run
        has ended on another host, or after `timeout_s` (default: gather_s)."""
        self.tell(0, {"kind": "value", "name": name, "value": value})
        began = time.monotonic()
        with self._changed:
            while self.failure or name not in self._values:  # all hosts may say that they have ended after a failure
                missing = [self.names[0]]
                if self.host.is_first:
                    said = self._said.get(name, {})
                    missing = [host for index, host in enumerate(self.names) if index not in said]
                self._wait(began, timeout_s or self._limits.gather_s, f"{', '.join(missing)} to say {name}")
            return self._values.pop(name)

    def _on_value(self, index, message):
        with self._changed:
            said = self._said.setdefault(message["name"], {})
            said[index] = message["value"]
            is_whole = len(said) == self.host.count
            if is_whole:
                del self._said[message["name"]]
        if is_whole:
            if message["name"] == END:  # here, because a host that has the values may close its connection at once
                self._is_over.set()
            values = [said[index] for index in range(self.host.count)]
            # Itself last: the message may wake the main thread, which then closes the connections to the others.
            for index in reversed(range(self.host.count)):
                self.tell(index, {"kind": "values", "name": message["name"], "values": values})

    def _on_values(self, index, message):
        with self._changed:
            self._values[message["name"]] = message["values"]
            if message["name"] == END:  # here, because the first host may close its connections at once
                self._is_over.set()
            self._changed.notify_all()

    def _wait(self, began, timeout_s, what):
        """Waits, holding self._changed, until something changes. Raises the run's failure, and a PodError once
        `timeout_s` seconds have passed since `began`. what: this host waits for, in words."""
        if self.failure:
            raise self.failure
        if time.monotonic() > began + timeout_s:
            raise PodError(f"waited {timeout_s} s for {what}: look at their logs, and start the run again on all hosts",
                           1)
        # At most a second: a limit that passes notifies nobody.
        self._changed.wait(1)

    def _beat(self):
        while not self._is_over.wait(self._limits.beat_s):
            for index in list(self._members):
                self.tell(index, {"kind": "beat"})

    def _read(self, index):
        """Handles the messages of another host until its end."""
        connection = self._members[index].connection
        while True:
            try:
                message = wire.receive(connection)
            except TimeoutError:
                what = f"has been silent for {self._limits.lost_s} s: it died, or the network did"
                break
            except (OSError, EOFError, ValueError) as error:
                what = f"has ended without a word ({error})"
                break
            if message["kind"] != "beat":
                self._handlers[message["kind"]](index, message)
        if not self._is_over.is_set():
            self._fail(f"host {self.names[index]} {what}", 1)
        connection.close()

    # The end

    def fail(self, message, status):
        """Ends the run on all hosts with this status, unless it has failed already. message: what is wrong here."""
        if not self._is_over.is_set():
            name = self.names[self.host.index] if self.names else self.host.name
            self._fail(f"host {name}: {message}", status)

    # Only the first failure counts, so a message that comes back is not forwarded. The watchdog sees the failure and
    # ends the ranks; whatever the main thread does then, this process ends half a minute later.
    def _fail(self, message, status):
        with self._changed:
            if self.failure:
                return
            self.failure = PodError(message, status)
            for index in list(self._members):  # the first host tells all, the others tell the first
                self.tell(index, {"kind": "failed", "message": message, "status": status})
            self._changed.notify_all()  # only now: a waiting thread may close the connections
        self._start(self._end_at_last)

    def _end_at_last(self):
        if not self._is_over.wait(self._limits.grace_s):
            say(f"error: {self.failure}", sys.stderr)
            os._exit(self.failure.status)

    def _on_failed(self, index, message):
        self._fail(message["message"], message["status"])

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
        for member in self._members.values():
            with suppress(OSError):
                # One direction ends: the others read the last messages, and theirs are still read here.
                member.connection.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + 3
        for reader in self._readers:
            reader.join(max(0, deadline - time.monotonic()))
        for member in self._members.values():
            member.connection.close()
        if self._listener:
            self._listener.close()

    def _start(self, function, *arguments):
        thread = threading.Thread(target=function, args=arguments, name="pod", daemon=True)
        thread.start()
        return thread


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
