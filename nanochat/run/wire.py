"""Messages and files between hosts, over TCP connections: each message is a JSON object after its length in bytes."""
import json
import os
import socket
import struct
import threading
from contextlib import contextmanager
from dataclasses import dataclass

from nanochat.run.hosts import Host

MAX_MESSAGE_BYTES = 2**28
CHUNK_BYTES = 2**20
REQUEST_TIMEOUT_S = 60


def send(connection, message):
    """Sends a JSON object. Raises OSError (TimeoutError is one)."""
    text = json.dumps(message).encode()
    connection.sendall(struct.pack("!Q", len(text)) + text)


def receive(connection):
    """Returns the next JSON object. Raises EOFError if the connection has ended, OSError (TimeoutError is one), and
    ValueError for an invalid message."""
    length = struct.unpack("!Q", b"".join(_parts(connection, 8)))[0]
    if length > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {length} bytes")
    message = json.loads(b"".join(_parts(connection, length)))
    if not isinstance(message, dict):
        raise ValueError("a message that is no object")
    return message


def send_file(connection, path):
    with open(path, "rb") as file:
        send(connection, {"bytes": os.fstat(file.fileno()).st_size})
        connection.sendfile(file)


def receive_file(connection, path):
    """Writes the next file to `path`, a part at a time, and returns once it is on disk. Raises as `receive` does."""
    with open(path, "wb") as file:
        file.writelines(_parts(connection, receive(connection)["bytes"]))
        file.flush()
        os.fsync(file.fileno())


def _parts(connection, length):
    """Yields the next `length` bytes, as they come."""
    while length:
        part = connection.recv(min(length, CHUNK_BYTES))
        if not part:
            raise EOFError("the connection has ended")
        yield part
        length -= len(part)


# Between the first host and the others


def connect(host):
    """Returns a connection to the first host, from the address by which it knows this one."""
    # A machine may have several addresses, and the first host accepts connections only from those in its list.
    own = socket.gethostbyname(host.addresses[host.index])
    connection = socket.create_connection((host.addresses[0], host.port), timeout=REQUEST_TIMEOUT_S,
                                          source_address=(own, 0))
    # Messages are small, and ranks wait for the answers: the kernel must send each at once.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


@dataclass(frozen=True)
class Link:
    """What a process of any host, a rank for example, needs to send requests to the first host."""
    host: Host
    token: str

    @contextmanager
    def request(self, **message):
        """Connects to the first host for the block, and sends it the message."""
        with connect(self.host) as connection:
            send(connection, {**message, "token": self.token})
            yield connection


class Member:
    """The connection to another host."""
    def __init__(self, connection):
        self.connection = connection
        self._lock = threading.Lock()  # messages of several threads must not mix

    def send(self, message):
        with self._lock:
            send(self.connection, message)
