"""The server's socket, and the limits of its connections."""
import ipaddress
import socket
from functools import partial

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from nanochat.common import BadInput
from nanochat.serve.access import error_answer, has_key

MAX_CONNECTIONS = 100
MAX_WITHOUT_KEY = 10  # of one address, if the server has a key
REQUEST_TIMEOUT_S = 10  # for the headers, from the connection or the first byte on; server.py limits the body
KEEP_ALIVE_S = 75  # longer than a person's pause, after which an editor reuses its connection


def listen(host, port, api_key=None):
    """Returns a socket that listens at --host and --port. Raises BadInput, also for other machines without a key."""
    if api_key is not None and not (api_key.isascii() and api_key.isprintable() and api_key.strip() == api_key != ""):
        raise BadInput("--api_key must be printable ASCII, not empty, without white space at its ends, also in a file "
                       "or in $NANOCHAT_API_KEY")
    try:
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        raise BadInput(f"--host={host} is not an IP address: give 127.0.0.1, or 0.0.0.0 for other machines") from None
    if not address.is_loopback and api_key is None:
        raise BadInput(f"--host={host} can be reached from other machines: give an --api_key, or leave --host out")
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    # With IPPROTO_TCP, asyncio sets TCP_NODELAY. Without it, some answers wait 40 ms for the client.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((str(address), port))
        listening.listen()
    except OSError as error:
        listening.close()
        raise BadInput(f"--host={host} --port={port}: {error.strerror}: choose another port; 0: a free one") from None
    return listening


def make_runner(app, api_key=None, request_timeout_s=REQUEST_TIMEOUT_S, max_connections=MAX_CONNECTIONS,
                timeout_keep_alive=KEEP_ALIVE_S):
    """Returns the uvicorn.Server of an application: run(sockets=[…]) serves until a signal, or until `should_exit`."""
    # uvicorn's log of requests would show queries; the server logs each completion itself. A lifespan, which the
    # application does without, would log a second Ctrl-C as a failure.
    return uvicorn.Server(uvicorn.Config(
        app, log_config=None, access_log=False, log_level="warning", ws="none", lifespan="off",
        http=partial(LimitedConnection, api_key, request_timeout_s, max_connections), timeout_graceful_shutdown=2,
        timeout_keep_alive=timeout_keep_alive))


# uvicorn limits the idle time between two requests, but not the time for a request's headers. A hundred silent
# connections would keep out everybody.
class LimitedConnection(H11Protocol):
    """A connection that closes if the headers of a request are late, if a body continues after its answer, and after
    the answer to a client without the key. If too many are open, it gets 503. If its address has too many without the
    key, it is closed without an answer."""

    def __init__(self, api_key, request_timeout_s, max_connections, *arguments, **options):
        super().__init__(*arguments, **options)
        self._api_key = api_key
        self._request_timeout_s = request_timeout_s
        self._max_connections = max_connections
        self._timer = None
        self.is_stranger = api_key is not None  # until it sends the key

    @property
    def address(self):
        return self.client and self.client[0]  # None: the client is gone already

    def connection_made(self, transport):
        super().connection_made(transport)
        self._begin_to_wait()
        num_strangers = 0
        for other in self.connections:
            num_strangers += other.is_stranger and other.address == self.address
        if num_strangers > MAX_WITHOUT_KEY:
            self.transport.close()
        elif len(self.connections) > self._max_connections:
            self.app = error_answer(503, f"{self._max_connections} connections are open already: try again later")

    def connection_lost(self, exc):
        self._end_waiting()
        super().connection_lost(exc)

    def data_received(self, data):
        # uvicorn makes a new cycle when the headers of a request are whole. The client's time runs until then and after
        # an answer, not during it.
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before:  # a whole request
            self._end_waiting()
            self.is_stranger = not has_key(self._api_key, self.headers)
            if self.is_stranger:
                self.headers.append((b"connection", b"close"))  # as if the client had asked for it
        elif before is None or before.response_complete:
            self._begin_to_wait()

    def _begin_to_wait(self):
        if self._timer is None:
            self._timer = self.loop.call_later(self._request_timeout_s, self.transport.close)

    def _end_waiting(self):
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
