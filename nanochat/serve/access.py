"""Who may use the server, and what everybody else is told."""
import hmac
import re

from fastapi.responses import JSONResponse

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
WITHOUT_KEY = ("/", "/health")


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


def has_key(api_key, headers):
    """Returns whether a request has the key. headers: pairs of bytes, names in lower case. api_key: None: no key is
    needed."""
    scheme, _, sent = dict(headers).get(b"authorization", b"").partition(b" ")
    # In constant time, so that the time does not tell how much of a guess is right.
    return api_key is None or scheme.lower() == b"bearer" and hmac.compare_digest(sent.strip(), api_key.encode())


def check_access(request, api_key):
    """Raises Refused unless this request may be answered."""
    host = request.headers.get("host", "")
    path = request.scope["path"]
    # The page of another site whose name was given this machine's address is of the same origin to the browser.
    if api_key is None and re.sub(r":\d+$", "", host).lower() not in LOOPBACK:
        raise Refused(400, "the header Host names another machine than this one: ask 127.0.0.1 or localhost, or start "
                           "the server with an --api_key")
    if path != "/" and is_of_another_site(request.headers, host):
        raise Refused(403, "the pages of other sites may not use this server")
    if path not in WITHOUT_KEY and not has_key(api_key, request.scope["headers"]):
        raise Refused(401, "this server needs its --api_key, as the header Authorization: Bearer KEY")
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
