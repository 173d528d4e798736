"""All reads from and writes to buckets of Google Cloud Storage.

    list_files("gs://bucket/folder")                               # its StoredFiles, and the URLs of its folders
    read_range(file, 0, 100)                                       # yields its bytes 0 to 99, in parts
    download(partial(read_range, file), descriptor, 0, 100, Retries(url, 60))   # … into a file, past broken connections
    copy_files([("/tmp/name", "gs://bucket/folder/name")])         # there or back, several at a time
    delete_file("gs://bucket/folder/name")

All raise BadInput if the bucket refuses for good, and Interruption for a failure that may pass; Retries limit how long
a call is retried.

The module speaks the JSON API over http. Google's command gcloud supplies the access token, and a new one when the
bucket refuses the old one: on a VM the token of its service account, elsewhere that of `gcloud auth login`. dev/log
says why pyarrow's GcsFileSystem and gcsfs did not serve.
"""
import base64
import hashlib
import http.client
import json
import math
import os
import queue
import re
import shutil
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from urllib.parse import quote, urlencode

from nanochat.common import BadInput, say

TRY_TIMEOUT_S = 30  # for the next bytes from or to the bucket
LOGIN_TIMEOUT_S = 60
SAY_S = 30  # between two warnings of a process about an outage; shorter waits pass without one
FIRST_PAUSE_S = 1.0  # between two attempts; each pause doubles
LONGEST_PAUSE_S = 30.0
PART_BYTES = 1 << 20
COPIES_AT_ONCE = 4
BLIP_S = 3  # for which a copy is retried at once, so that an odd failure costs one file and not the whole copy
MAX_PAGES = 1000  # of a listing, each of up to 1000 files
FIELDS = "prefixes,items(name,size,generation),nextPageToken"

# What gcloud says if it has no login and retrying is useless. Any other message may be an outage.
_NO_LOGIN = re.compile(
    r"PERMISSION_DENIED|UNAUTHENTICATED|INVALID_ARGUMENT|HTTPError 40[0134]|active account|(valid|invalid) credentials|"
    r"reauthentication|invalid_grant|authentication scopes", re.IGNORECASE)


class Interruption(Exception):
    """A failure that may pass: the same call may succeed later, but not within wait_s seconds."""

    def __init__(self, problem, wait_s=0):
        super().__init__(problem)
        self.wait_s = wait_s


class _NotFound(Exception):
    """No such bucket, or no such file in it."""


@dataclass(frozen=True)
class StoredFile:
    """A file in a bucket or on the Hub, as it was when it was listed."""
    url: str
    size: int
    generation: str  # changes with the bytes
    commit: str = ""  # of the Hub


# Who retries for how long. Reading data: bucket.OUTAGE_S, 8 minutes without an answer, and then the run ends with the
# status of an Outage. A copy of the mirror: BLIP_S for each file, because the Uploader itself tries again, with pauses
# of up to a minute and as long as the run lasts. The start of a run: mirror.OUTAGE_S, 10 minutes.
class Retries:
    """Retries until the bucket has not answered for limit_s."""
    silent_until = 0.0

    def __init__(self, url, limit_s):
        self.url = url
        self.limit_s = limit_s
        self.begin()

    def begin(self):
        self.deadline = time.monotonic() + self.limit_s
        self.pause_s = FIRST_PAUSE_S

    def wait(self, error):
        """Waits before the next attempt, with a warning; raises `error`, an Interruption, if none is left."""
        now = time.monotonic()
        left_s = self.deadline - now
        if left_s <= error.wait_s:
            raise error
        if self.limit_s > SAY_S and now >= Retries.silent_until:
            Retries.silent_until = now + SAY_S
            say(f"warning: {self.url} cannot be reached ({error}); waiting for it, for up to "
                f"{math.ceil(left_s / 60)} more minutes")
        time.sleep(max(min(self.pause_s, left_s), error.wait_s))
        self.pause_s = min(2 * self.pause_s, LONGEST_PAUSE_S)

    def call(self, function, *args):
        """Returns function(*args), retried while it raises Interruption."""
        self.begin()
        while True:
            try:
                return function(*args)
            except Interruption as error:
                self.wait(error)


# Reading


def list_files(url, delimiter="/"):
    """Returns the StoredFiles directly in a folder, and the URLs of its folders; both are empty if the folder does not
    exist. With delimiter="" it returns the files at every depth, and no folders."""
    bucket, name = _parts(url)
    query = {"prefix": f"{name}/" if name else "", "delimiter": delimiter, "fields": FIELDS}
    files = []
    folders = []

    def read(page):
        files.extend(_stored(bucket, item) for item in page.get("items", []))
        folders.extend(f"gs://{bucket}/{prefix.rstrip('/')}" for prefix in page.get("prefixes", []))
        return page.get("nextPageToken")

    for _ in range(MAX_PAGES):
        token = _ask_for_json(f"b/{bucket}/o?{urlencode(query)}", url, "correct the bucket's name", read)
        if not token:
            return files, folders
        query["pageToken"] = token
    raise BadInput(f"{url}: the list of its files does not end after {MAX_PAGES} pages: name a folder with fewer files")


def _stored(bucket, item):
    return StoredFile(f"gs://{bucket}/{item['name']}", int(item["size"]), str(item["generation"]))


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
    except (OSError, http.client.HTTPException) as error:
        raise Interruption(_why(error)) from None


def download(read, descriptor, begin, end, retries):
    """Writes what read(begin, end) yields, the bytes of a file, to the same place of an open file. After a broken
    connection it continues from there, as long as the Retries allow."""
    while begin < end:
        try:
            for part in read(begin, end):
                written = os.pwrite(descriptor, part, begin)
                begin += written
                if written < len(part):  # the next part would not be at its place
                    raise Interruption("the disk took only a part of it")
                retries.begin()  # a slow bucket still answers
            if begin < end:
                raise Interruption("the connection was cut")
        except Interruption as error:
            retries.wait(error)


# Copying and deleting


def copy_files(pairs):
    """Copies files, [(source, target)], a path and a URL, a few at a time; raises the first error. A file appears in a
    bucket only once it is whole."""
    waiting = queue.SimpleQueue()
    for pair in pairs:
        waiting.put(pair)
    errors = []

    def work():
        try:
            while not errors:
                _copy_file(*waiting.get_nowait())
        except queue.Empty:
            pass
        except Exception as error:
            errors.append(error)

    threads = []
    for _ in range(COPIES_AT_ONCE):
        # A daemon, unlike the threads of a ThreadPoolExecutor: the end of the process does not wait for a copy.
        threads.append(threading.Thread(target=work, name="copy", daemon=True))
        threads[-1].start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _copy_file(source, target):
    if target.startswith("gs://"):
        Retries(target, BLIP_S).call(_upload, source, target)
        return
    retries = Retries(source, BLIP_S)
    file = retries.call(_find_file, source)
    with open(target, "wb") as copy:
        download(partial(read_range, file), copy.fileno(), 0, file.size, retries)


def _find_file(url):
    bucket, _ = _parts(url)
    return _ask_for_json(_object(url), url, "put it back, or correct the URL", partial(_stored, bucket))


def _upload(path, url):
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
    with suppress(_NotFound):
        _ask(_object(url), url, "DELETE")


# Requests

ODD_JSON = (ValueError, LookupError, TypeError, AttributeError, RecursionError)


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


def _ask_for_json(query, url, advice, read):
    """Returns read(the answer to a request, as an object). Raises BadInput with this advice if nothing is found."""
    try:
        return read(json.loads(_ask(query, url)))
    except _NotFound as error:
        raise BadInput(f"{url}: {error}: {advice}") from None
    except ODD_JSON as error:
        raise Interruption(f"its answer is cut, or not Cloud Storage's ({type(error).__name__}: {error})") from None


def _ask(query, url, method="GET"):
    try:
        with _open(query, url, method) as answer:
            return answer.read()
    except (OSError, http.client.HTTPException) as error:
        raise Interruption(_why(error)) from None


def _open(query, url, method="GET", content=None, headers=None):
    """Returns the open answer to a request. url: named in errors."""
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
            return _opener.open(request, timeout=TRY_TIMEOUT_S)
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
    for program in ("gcloud", "setpriv", "timeout"):
        if not shutil.which(program):
            raise BadInput(f"{url} needs {program}, which is not here: install it, or use a folder of this machine")
    # In a session of its own, so that its helpers end with it, and Ctrl-C reaches only the script. When the script
    # ends, Linux sends SIGTERM to `timeout`, which passes it on to them all.
    process = subprocess.Popen(["setpriv", "--pdeathsig=TERM", "timeout", "--kill-after=1", "0", "gcloud", "auth",
                                "print-access-token"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, errors="replace", start_new_session=True)
    try:
        output, said = process.communicate(timeout=LOGIN_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise Interruption(f"gcloud auth has not ended after {LOGIN_TIMEOUT_S} s") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode == 0:
        # http.client puts an invalid header into its error, which would show the token
        if token := re.fullmatch(r"\s*([!-~]+)\s*", output):
            return token[1]
        raise Interruption("gcloud auth print-access-token printed no token")
    problem = next((line for line in reversed(said.splitlines()) if "ERROR" in line), said.strip()[-200:])
    problem = problem.removeprefix("ERROR: ").removesuffix(".") or f"gcloud ended with status {process.returncode}"
    if _NO_LOGIN.search(problem):
        raise BadInput(f"{url}: {problem}: log in with gcloud auth login")
    raise Interruption(problem)
