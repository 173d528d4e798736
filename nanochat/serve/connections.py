"""Connections on which a client keeps the server waiting.

uvicorn limits how many connections there are, and how long one may be idle between two requests, but not how long a
client may take for a request's first lines. So a hundred connections on which nothing is said would keep out everybody.
"""
from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_TIMEOUT_S = 10  # for the headers, from the connection or the first byte on; server.py limits the body


class TimedConnection(H11Protocol):
    """A connection that is closed if a request does not come to the end of its headers in time, or if more of a body
    comes after the answer to it."""
    _timer = None

    def connection_made(self, transport):
        super().connection_made(transport)
        self._begin_to_wait()

    def connection_lost(self, exc):
        self._end_waiting()
        super().connection_lost(exc)

    def data_received(self, data):
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before:  # a whole request
            self._end_waiting()
        elif before is None or before.response_complete:
            self._begin_to_wait()

    def _begin_to_wait(self):
        if self._timer is None:
            self._timer = self.loop.call_later(REQUEST_TIMEOUT_S, self.transport.close)

    def _end_waiting(self):
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
