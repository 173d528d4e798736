"""Where the server listens, and the connections on which a client keeps it waiting."""
import ipaddress
import socket
from functools import partial

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from nanochat.common import BadInput

MAX_CONNECTIONS = 100
REQUEST_TIMEOUT_S = 10  # for the headers, from the connection or the first byte on; server.py limits the body
KEEP_ALIVE_S = 75  # after a person's pause, an editor's next request shall not meet a connection that is being closed


def listen(host, port, api_key=None):
    """Returns a socket that listens at --host and --port. Raises BadInput, also if others than this machine could use
    the server without a key."""
    if api_key is not None and not (api_key.isascii() and api_key.isprintable() and api_key.strip() == api_key != ""):
        raise BadInput("--api_key must be printable ASCII, not empty, without white space at its ends")
    try:
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        raise BadInput(f"--host={host} is not an IP address: give 127.0.0.1 or ::1 for this machine alone, or 0.0.0.0 "
                       "for all its addresses") from None
    if not address.is_loopback and api_key is None:
        raise BadInput(f"--host={host} can be reached from other machines: give an --api_key that clients must send, "
                       "or leave --host out")
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    # With the protocol named, asyncio sends each answer at once (TCP_NODELAY); else some wait 40 ms for the client.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((str(address), port))
        listening.listen()
    except OSError as error:
        listening.close()
        raise BadInput(f"cannot listen at --host={host} --port={port} ({error.strerror}): choose another port, or 0 "
                       "for a free one") from None
    return listening


def make_runner(app, request_timeout_s=REQUEST_TIMEOUT_S, limit_concurrency=MAX_CONNECTIONS,
                timeout_keep_alive=KEEP_ALIVE_S):
    """Returns the uvicorn.Server of an application: its run(sockets=[…]) serves until a signal, or until its
    `should_exit` is set."""
    # uvicorn's log of requests would show queries; the server logs what happens to each completion by itself.
    return uvicorn.Server(uvicorn.Config(
        app, log_config=None, access_log=False, log_level="warning", ws="none",
        http=partial(TimedConnection, request_timeout_s), limit_concurrency=limit_concurrency,
        timeout_graceful_shutdown=2, timeout_keep_alive=timeout_keep_alive))


# uvicorn limits how many connections there are, and how long one may be idle between two requests, but not how long a
# client may take for a request's first lines. A hundred connections on which nothing is said would keep out everybody.
class TimedConnection(H11Protocol):
    """A connection that is closed if a request does not come to the end of its headers in time, or if more of a body
    comes after the answer to it."""

    def __init__(self, request_timeout_s, *arguments, **options):
        super().__init__(*arguments, **options)
        self._request_timeout_s = request_timeout_s
        self._timer = None

    def connection_made(self, transport):
        super().connection_made(transport)
        self._begin_to_wait()

    def connection_lost(self, exc):
        self._end_waiting()
        super().connection_lost(exc)

    def data_received(self, data):
        # uvicorn makes a new cycle when the headers of a request are whole. Until then, and after an answer, the
        # client's time runs; while a request is answered, it does not.
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before:  # a whole request
            self._end_waiting()
        elif before is None or before.response_complete:
            self._begin_to_wait()

    def _begin_to_wait(self):
        if self._timer is None:
            self._timer = self.loop.call_later(self._request_timeout_s, self.transport.close)

    def _end_waiting(self):
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
