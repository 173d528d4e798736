"""Requests to Google Cloud Storage: the JSON API over http. storage.py is the door to it.

Google's command gcloud supplies the access token, and a new one when the bucket refuses the old one: on a VM the token
of its service account, elsewhere that of `gcloud auth login`. dev/log says why Google's own client, pyarrow's
GcsFileSystem and gcsfs did not serve.
"""
import base64
import hashlib
import http.client
import json
import os
import re
import shutil
import subprocess
import threading
import urllib.error
import urllib.request
from contextlib import contextmanager, suppress
from urllib.parse import quote, urlencode

from nanochat.common import BadInput
from nanochat.data.remote import MAX_PAGES, ODD_JSON, PART_BYTES, TRY_TIMEOUT_S, Interruption, StoredFile

LOGIN_TIMEOUT_S = 60
FIELDS = "items(name,size,generation),nextPageToken"

# What gcloud says if it has no login and retrying is useless. Any other message may be an outage.
_NO_LOGIN = re.compile(
    r"PERMISSION_DENIED|UNAUTHENTICATED|INVALID_ARGUMENT|HTTPError 40[0134]|active account|(valid|invalid) credentials|"
    r"reauthentication|invalid_grant|authentication scopes", re.IGNORECASE)


class _NotFound(Exception):
    """No such bucket, or no such file in it."""


# Reading


def list_files(url):
    """Returns the StoredFiles in a folder, at every depth; none if the folder does not exist."""
    bucket, name = _parts(url)
    query = {"prefix": f"{name}/" if name else "", "fields": FIELDS}
    files = []
    for _ in range(MAX_PAGES):
        try:
            with _open(f"b/{bucket}/o?{urlencode(query)}", url) as answer:
                page = json.loads(answer.read())
            for item in page.get("items", []):
                file = f"gs://{bucket}/{item['name']}"
                files.append(StoredFile(file, int(item["size"]), str(item["generation"])))
            token = page.get("nextPageToken")
        except _NotFound as error:
            raise BadInput(f"{url}: {error}: correct the bucket's name") from None
        except ODD_JSON as error:
            raise Interruption(f"its answer is cut, or not Cloud Storage's ({type(error).__name__}: {error})") from None
        if not token:
            return files
        query["pageToken"] = token
    raise BadInput(f"{url}: the list of its files does not end after {MAX_PAGES} pages: name a folder with fewer files")


def read_range(file, begin, end):
    """Yields the bytes of a StoredFile from `begin` to `end`, in parts. A broken connection may end it early."""
    query = urlencode({"alt": "media", "generation": file.generation})
    headers = {"Range": f"bytes={begin}-{end - 1}"}
    try:
        with _open(f"{_object(file.url)}?{query}", file.url, headers=headers) as answer:
            if answer.status != 206:
                raise BadInput(f"{file.url}: the bucket sends it only as a whole: store it without Content-Encoding")
            while begin < end and (part := answer.read(min(PART_BYTES, end - begin))):
                begin += len(part)
                yield part
    except _NotFound as error:
        raise BadInput(f"{file.url} was replaced or deleted after it was listed ({error}): put it back, or begin a "
                       "new run with the data as it is now") from None


# Writing


def upload(path, url):
    """Copies the file at a path to this URL, where it appears once it is whole."""
    bucket, name = _parts(url)
    # A request without content opens a session. So a refusal is read before gigabytes are sent, and is not lost in a
    # connection that the bucket closes meanwhile.
    query = urlencode({"uploadType": "resumable", "name": name})
    headers = {"Content-Type": "application/json", "X-Upload-Content-Type": "application/octet-stream"}
    try:
        with _open(f"b/{bucket}/o?{query}", url, "POST", b"{}", headers) as answer:
            session = answer.headers["Location"] or ""
    except _NotFound as error:
        raise BadInput(f"{url}: {error}: correct the bucket's name") from None
    digest = hashlib.md5()
    headers = {"Content-Type": "application/octet-stream", "Content-Length": str(os.path.getsize(path))}
    try:
        request = urllib.request.Request(session, _content(path, digest), headers, method="PUT")
        with _opener.open(request, timeout=TRY_TIMEOUT_S) as answer:
            received = json.loads(answer.read())["md5Hash"]
    except (OSError, http.client.HTTPException, *ODD_JSON) as error:
        raise Interruption(_why(error)) from None
    if received != base64.b64encode(digest.digest()).decode():
        raise Interruption("the bucket received other bytes than were sent")


def _content(path, digest):
    with open(path, "rb") as file:
        while part := file.read(PART_BYTES):
            digest.update(part)
            yield part


def delete_file(url):
    """Deletes the file of this URL, if it is there."""
    with suppress(_NotFound), _open(_object(url), url, "DELETE") as answer:
        answer.read()


# Requests


class _StayHere(urllib.request.HTTPRedirectHandler):
    """Follows no redirection: the token is for this server only, and so are the bytes."""
    def redirect_request(self, *request):
        return None


_opener = urllib.request.build_opener(_StayHere)


def endpoint():
    """Returns the address of the JSON API: gcloud's setting in the environment, else Google's."""
    return os.environ.get("CLOUDSDK_API_ENDPOINT_OVERRIDES_STORAGE") or "https://storage.googleapis.com/storage/v1/"


def _parts(url):
    bucket, _, name = url.removeprefix("gs://").partition("/")
    return bucket, name


def _object(url):
    bucket, name = _parts(url)
    return f"b/{bucket}/o/{quote(name, safe='')}"


@contextmanager
def _open(query, url, method="GET", content=None, headers=None):
    """Gives the open answer to a request; one that breaks off is an Interruption, too. url: named in errors."""
    address = endpoint()
    if method == "POST":
        address = address.replace("/storage/v1/", "/upload/storage/v1/")
    # Once with the known token, and once more with a new one if that has expired.
    token = None
    for is_second in (False, True):
        token = _token(url, stale=token)
        headers = {**(headers or {}), "Authorization": f"Bearer {token}"}
        request = urllib.request.Request(address + query, content, headers, method=method)
        try:
            with _opener.open(request, timeout=TRY_TIMEOUT_S) as answer:
                yield answer
                return
        except urllib.error.HTTPError as error:
            with error:
                problem = _message(error, token)
            if error.code == 401 and not is_second:
                continue
            if error.code in (408, 429) or error.code >= 500:
                raise Interruption(f"{error.code} {problem}") from None
            if error.code == 404:
                raise _NotFound(problem) from None
            raise BadInput(f"{url}: {error.code} {problem}: let the account of gcloud, on a VM its service account, "
                           "use the bucket (roles/storage.objectViewer to read, objectUser to write), or correct the "
                           "URL") from None
        except (OSError, http.client.HTTPException) as error:
            raise Interruption(_why(error)) from None


def _why(error):
    return str(getattr(error, "reason", error)) or type(error).__name__


def _message(error, token):
    """Returns the message in the body of an HTTPError, in one line, without the token."""
    try:
        text = json.loads(error.read())["error"]["message"]
    except (OSError, http.client.HTTPException, *ODD_JSON):
        text = error.reason
    return " ".join(str(text).replace(token, "[token]").split())[:300].rstrip(".")


# The login

_tokens = {}
_tokens_lock = threading.Lock()


def _token(url, stale=None):
    """Returns gcloud's access token; not `stale`, which the bucket has refused."""
    with _tokens_lock:
        # A thread that comes while another asks gcloud waits for the lock, and finds the new token.
        if _tokens.get("newest") in (None, stale):
            _tokens["newest"] = _ask_gcloud(url)
        return _tokens["newest"]


def _ask_gcloud(url):
    if not shutil.which("gcloud"):
        raise BadInput(f"{url} needs gcloud, which is not here: install it, or use a folder of this machine")
    # `timeout` gives gcloud a group of its own: its helpers end with it, and Ctrl-C reaches only the script. When the
    # script ends, Linux sends SIGTERM to `timeout`, which passes it on to them all.
    process = subprocess.run(["setpriv", "--pdeathsig=TERM", "timeout", "--kill-after=1", str(LOGIN_TIMEOUT_S),
                              "gcloud", "auth", "print-access-token"],
                             stdin=subprocess.DEVNULL, capture_output=True, errors="replace")
    if process.returncode in (124, 137):
        raise Interruption(f"gcloud auth has not ended after {LOGIN_TIMEOUT_S} s")
    if process.returncode == 0:
        # http.client puts an invalid header into its error, which would show the token
        if token := re.fullmatch(r"\s*([!-~]+)\s*", process.stdout):
            return token[1]
        raise Interruption("gcloud auth print-access-token printed no token")
    problem = next((line for line in reversed(process.stderr.splitlines()) if "ERROR" in line),
                   process.stderr.strip()[-200:])
    problem = problem.removeprefix("ERROR: ").removesuffix(".") or f"gcloud ended with status {process.returncode}"
    if _NO_LOGIN.search(problem):
        raise BadInput(f"{url}: {problem}: log in with gcloud auth login")
    raise Interruption(problem)
