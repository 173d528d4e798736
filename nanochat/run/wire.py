"""Messages and files over a TCP connection: each message is a JSON object after its length in bytes."""
import json
import os
import struct

MAX_MESSAGE_BYTES = 2**28
CHUNK_BYTES = 2**22


def send(connection, message):
    """Sends a JSON object. Raises OSError, of which TimeoutError is one."""
    text = json.dumps(message).encode()
    connection.sendall(struct.pack("!Q", len(text)) + text)


def receive(connection):
    """Returns the next JSON object. Raises EOFError if the connection has ended, OSError, of which TimeoutError is one,
    and ValueError for what is no message."""
    length = struct.unpack("!Q", _read(connection, 8))[0]
    if length > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {length} bytes")
    message = json.loads(_read(connection, length))
    if not isinstance(message, dict):
        raise ValueError("a message that is no object")
    return message


def send_file(connection, path):
    """Sends the contents of a file."""
    with open(path, "rb") as file:
        send(connection, {"bytes": os.fstat(file.fileno()).st_size})
        connection.sendfile(file)


def receive_file(connection, path):
    """Writes the next file to `path`, a piece at a time, and returns once it is on disk. Raises what `receive` does."""
    left, buffer = receive(connection)["bytes"], bytearray(CHUNK_BYTES)
    with open(path, "wb", buffering=0) as file:
        while left:
            count = connection.recv_into(buffer, min(left, CHUNK_BYTES))
            if not count:
                raise EOFError(f"the connection has ended {left} bytes before the end of {path.name}")
            view = memoryview(buffer)[:count]
            while view:
                view = view[file.write(view):]
            left -= count
        os.fsync(file.fileno())
    return path


def _read(connection, length):
    parts = []
    while length:
        part = connection.recv(min(length, CHUNK_BYTES))
        if not part:
            raise EOFError("the connection has ended")
        parts.append(part)
        length -= len(part)
    return b"".join(parts)
