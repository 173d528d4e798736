"""Reads a bucket of Google Cloud Storage by its JSON API, with the login of gcloud.

    list_folder("gs://bucket/folder")                              # its parquet files, and its folders
    read_range("gs://bucket/folder/file", "17", 0, 100)            # yields the bytes 0 to 99 of generation 17

Raises BadInput if the bucket refuses for good, and Interruption for what may succeed later. A Patience says for how
long that is tried.
"""
import http.client
import json
import math
import os
import threading
import time
import urllib.error
import urllib.request
from urllib.parse import quote, urlencode

from nanochat.common import BadInput, Outage
from nanochat.data.gcloud import gcloud, problem_in

TRY_TIMEOUT_S = 30  # for the bucket's next bytes
LOGIN_TIMEOUT_S = 60
SAY_S = 30  # between two lines of a process about that
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0  # between attempts; each is twice as long as the one before
READ_BYTES = 1 << 20
FIELDS = "prefixes,items(name,size,generation),nextPageToken"


class Interruption(Exception):
    """An attempt that may succeed later."""


class _NotFound(Exception):
    """There is no such bucket, or no such file in it."""


class Patience:
    """The wait for a bucket that does not answer, for at most limit_s from the last time that it did."""
    silent_until = 0.0

    def __init__(self, url, limit_s):
        self.url, self.limit_s = url, limit_s
        self.begin()

    def begin(self):
        """Begins to count again."""
        self.deadline, self.pause_s = time.monotonic() + self.limit_s, FIRST_PAUSE_S

    def wait(self, error):
        """Says so and waits before the next attempt; raises Outage if there is none."""
        left_s = self.deadline - time.monotonic()
        if left_s <= 0:
            raise Outage(f"{self.url} has not been reached for {self.limit_s / 60:.0f} minutes ({error}): start the "
                         "same command again later")
        if time.monotonic() >= Patience.silent_until:
            Patience.silent_until = time.monotonic() + SAY_S
            print(f"warning: {self.url} cannot be reached ({error}); waiting for it, for up to "
                  f"{math.ceil(left_s / 60)} more minutes", flush=True)
        time.sleep(min(self.pause_s, left_s))
        self.pause_s = min(2 * self.pause_s, LONGEST_PAUSE_S)


def list_folder(url, outage_s):
    """Returns [(URL, size, generation)] of the parquet files right in a folder, and the URLs of its folders. Raises
    Outage if the bucket has not answered for outage_s seconds."""
    bucket, name = _parts(url)
    query = {"prefix": f"{name}/" if name else "", "delimiter": "/", "fields": FIELDS}
    files, folders, patience = [], [], Patience(url, outage_s)
    while True:
        try:
            with _request(f"b/{bucket}/o?{urlencode(query)}", url) as answer:
                page = json.loads(answer.read())
        except _NotFound as error:
            raise BadInput(f"{url}: {error}: correct the bucket's name") from None
        except (Interruption, http.client.HTTPException, OSError, ValueError) as error:
            patience.wait(error)
            continue
        patience.begin()
        files += [(f"gs://{bucket}/{item['name']}", int(item["size"]), str(item["generation"]))
                  for item in page.get("items", []) if item["name"].endswith(".parquet")]
        folders += [f"gs://{bucket}/{prefix.rstrip('/')}" for prefix in page.get("prefixes", [])]
        if "nextPageToken" not in page:
            return files, folders
        query["pageToken"] = page["nextPageToken"]


def read_range(url, generation, begin, end):
    """Yields the bytes of a file from `begin` to `end`, which may end too early, in parts."""
    bucket, name = _parts(url)
    query = f"b/{bucket}/o/{quote(name, safe='')}?" + urlencode({"alt": "media", "generation": generation})
    try:
        with _request(query, url, {"Range": f"bytes={begin}-{end - 1}"}) as answer:
            if answer.status != 206:
                raise BadInput(f"{url}: the bucket sends it whole and not in parts: store it without Content-Encoding")
            while begin < end and (part := answer.read(min(READ_BYTES, end - begin))):
                begin += len(part)
                yield part
    except _NotFound as error:
        raise BadInput(f"{url} was replaced or deleted after it was listed ({error}): put it back, or begin a new run "
                       "with the data that is there now") from None
    except (OSError, http.client.HTTPException) as error:
        raise Interruption(_why(error)) from None


def _parts(url):
    bucket, _, name = url.removeprefix("gs://").partition("/")
    return bucket, name


def endpoint():
    """Returns the address of the JSON API: that of gcloud's settings in the environment, or Google's."""
    return os.environ.get("CLOUDSDK_API_ENDPOINT_OVERRIDES_STORAGE") or "https://storage.googleapis.com/storage/v1/"


def _request(query, url, headers=None):
    """Returns the answer to a GET request, about `url`."""
    token = None
    while True:
        token, is_second = _token(url, stale=token), token is not None
        request = urllib.request.Request(endpoint() + query,
                                         headers={"Authorization": f"Bearer {token}", **(headers or {})})
        try:
            return urllib.request.urlopen(request, timeout=TRY_TIMEOUT_S)
        except urllib.error.HTTPError as error:
            with error:
                problem = _message(error)
            if error.code == 401 and not is_second:  # the token has expired
                continue
            if error.code in (408, 429) or error.code >= 500:
                raise Interruption(f"{error.code} {problem}") from None
            if error.code == 404:
                raise _NotFound(problem) from None
            raise BadInput(f"{url}: {error.code} {problem}: let the account of gcloud, on a VM its service account, "
                           "read the bucket (roles/storage.objectViewer), or correct the URL") from None
        except (OSError, http.client.HTTPException) as error:
            raise Interruption(_why(error)) from None


def _why(error):
    return str(getattr(error, "reason", error)) or type(error).__name__


def _message(error):
    """Returns what the body of an HTTPError says, in one line."""
    try:
        text = json.loads(error.read())["error"]["message"]
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError):
        text = error.reason
    return " ".join(str(text).split())[:300].rstrip(".")


_tokens, _tokens_lock = {}, threading.Lock()


def _token(url, stale=None):
    """Returns the token with which gcloud is logged in; another one than `stale`, which the bucket has refused."""
    with _tokens_lock:
        if _tokens.get("newest") in (None, stale):
            try:
                status, output, said = gcloud("auth", "print-access-token", timeout_s=LOGIN_TIMEOUT_S)
            except TimeoutError as error:
                raise Interruption(str(error)) from None
            except OSError as error:
                raise BadInput(f"{url} needs gcloud, which cannot be started here ({error.strerror}): install it, or "
                               "copy the data to this machine") from None
            if status:
                problem, is_refusal = problem_in(said, status)
                if is_refusal:
                    raise BadInput(f"{url}: {problem}: log in with gcloud auth login")
                raise Interruption(problem)
            _tokens["newest"] = output.strip()
        return _tokens["newest"]
