"""Who may use the server, which only programs of this machine reach, and what everybody else is told."""
import re

from fastapi import Request
from fastapi.responses import JSONResponse

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


class Refused(Exception):
    """A request without a completion: the HTTP status, and the reason."""

    def __init__(self, status, message):
        super().__init__(message)
        self.status = status
        self.message = message


def error_answer(status, message):
    """Returns the answer to a refused request, an ASGI application."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    # A client whose body was not read to its end would keep sending it.
    headers = {"Connection": "close"} if status in (408, 413, 503) else None
    return JSONResponse({"error": {"message": message, "code": status, "type": kind}}, status, headers)


async def check_access(request: Request):
    """Raises Refused unless this request may be answered: no page of another site may use the server."""
    host = request.headers.get("host", "")
    # The page of another site whose name was given this machine's address is of the same origin to the browser.
    if re.sub(r":\d+$", "", host).lower() not in LOOPBACK:
        raise Refused(400, "the header Host names another machine than this one: ask 127.0.0.1 or localhost")
    if request.scope["path"] != "/" and is_of_another_site(request.headers, host):
        raise Refused(403, "the pages of other sites may not use this server")
    # Browsers let any page send other types without asking the server first.
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if request.method == "POST" and content_type != "application/json":
        raise Refused(415, "the header Content-Type must be application/json")


def is_of_another_site(headers, host):
    """Returns whether a browser sends a request for the page of another site. Programs send neither header."""
    site = headers.get("sec-fetch-site")
    if site == "same-origin":  # behind a proxy, too, which may change Host
        return False
    origin = headers.get("origin")
    return site in ("same-site", "cross-site") or origin is not None and origin.partition("://")[2] != host
