"""Messages between hosts, over TCP connections to the first host: each is a JSON object in a line."""
import json
import socket
import threading
from contextlib import closing
from dataclasses import dataclass

from nanochat.run.hosts import Host

MAX_MESSAGE_BYTES = 2**28
REQUEST_TIMEOUT_S = 60


class Channel:
    """A connection to another host."""

    def __init__(self, connection, timeout_s):
        """timeout_s: how long `send` and `receive` wait for the other side."""
        connection.settimeout(timeout_s)
        # Messages are small, and ranks wait for the answers: the kernel must send each at once.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._lines = connection.makefile("rb")
        self._lock = threading.Lock()  # messages of several threads must not mix

    def send(self, message):
        """Sends a JSON object. Raises OSError (TimeoutError is one)."""
        with self._lock:
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self):
        """Returns the next JSON object. Raises EOFError if the connection has ended, OSError (TimeoutError is one), and
        ValueError for an invalid message."""
        line = self._lines.readline(MAX_MESSAGE_BYTES)
        if not line.endswith(b"\n"):
            raise EOFError("the connection has ended")
        message = json.loads(line)
        if not isinstance(message, dict):
            raise ValueError("a message that is no object")
        return message

    def end_sending(self):
        """Ends this direction: the other side reads the last messages, and its own are still read here."""
        self._connection.shutdown(socket.SHUT_WR)

    def close(self):
        self._lines.close()
        self._connection.close()


def connect(host, timeout_s=REQUEST_TIMEOUT_S):
    """Returns a Channel to the first host, from the address by which it knows this one. Raises OSError."""
    # A machine may have several addresses, and the first host accepts connections only from those in its list.
    own = socket.gethostbyname(host.addresses[host.index])
    connection = socket.create_connection((host.addresses[0], host.port), timeout=REQUEST_TIMEOUT_S,
                                          source_address=(own, 0))
    return Channel(connection, timeout_s)


@dataclass(frozen=True)
class Link:
    """What a process of any host, a rank for example, needs to ask the first host."""
    host: Host
    token: str

    def ask(self, **message):
        """Returns the first host's answer to a message. Raises as Channel does."""
        with closing(connect(self.host)) as channel:
            channel.send({**message, "token": self.token})
            return channel.receive()
