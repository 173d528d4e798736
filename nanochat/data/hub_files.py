"""Reads data sets of Hugging Face's Hub, and never writes there. A place is hf://datasets/ORG/NAME/FOLDER, or
hf://datasets/ORG/NAME@REVISION/FOLDER.

    commit = commit_of("ORG/NAME", "main")                                 # of a branch, when this process first asked
    files = list_files(f"hf://datasets/ORG/NAME@{commit}/train")           # the StoredFiles at every depth
    read_range(files[0], 0, 100)                                           # yields its bytes 0 to 99, in parts

Raises BadInput and Interruption, as storage.py does, which is the door to it. huggingface_hub supplies the session and
the token, $HF_TOKEN; its own requests could wait without a limit.
"""
import re
from contextlib import contextmanager
from functools import cache, partial
from urllib.parse import quote, unquote, urlsplit

from nanochat.common import BadInput
from nanochat.data import remote
from nanochat.data.remote import MAX_PAGES, ODD_JSON, PART_BYTES, TRY_TIMEOUT_S, Interruption, StoredFile, patiently

PLACE = re.compile(r"hf://datasets/(?P<name>\w[\w.-]*/\w[\w.-]*)"
                   r"(?:@(?P<revision>refs/(?:convert/[\w.-]+|pr/\d+)|[^/,@]+))?(?P<path>(?:/[^,]*)?)", re.ASCII)
COMMIT = re.compile("[0-9a-f]{40}")


def on_hub(place):
    """Returns whether a folder, as data_place returns it or None, is on the Hub."""
    return str(place).startswith("hf://")


def pinned(text, saved=None):
    """Returns the value of a flag, or None, with a commit in each place on the Hub: the one that the place has in
    `saved`, the flag's value in a checkpoint, else the one to which its branch points. Raises Outage."""
    return text and PLACE.sub(partial(_at_commit, saved or ""), text)


def _at_commit(saved, place):
    name, revision, path = place.groups()
    if COMMIT.fullmatch(revision or ""):
        return place[0]
    commits = {*re.findall(rf"hf://datasets/{re.escape(name)}@({COMMIT.pattern}){re.escape(path)}(?:,|$)", saved)}
    if len(commits) != 1:
        commits = {patiently(place[0], remote.OUTAGE_S, commit_of, name, revision or "main")}
    return f"hf://datasets/{name}@{commits.pop()}{path}"


def require_commits(text):
    """Raises BadInput if a place on the Hub, in the value of a flag or None, has another revision than a commit."""
    for name, revision, path in PLACE.findall(text or ""):
        if not COMMIT.fullmatch(revision):
            raise BadInput(f"hf://datasets/{name} is given without a commit, and a branch may move: write "
                           f"hf://datasets/{name}@COMMIT{path}, with the 40 digits of the commit")


@cache
def commit_of(name, revision):
    return _ask(f"api/datasets/{name}/revision/{quote(unquote(revision), safe='')}",
                f"hf://datasets/{name}@{revision}", lambda page: COMMIT.fullmatch(page["sha"])[0])[0]


def list_files(url):
    """Returns the StoredFiles of a folder at a commit, at every depth."""
    name, commit, path = PLACE.fullmatch(url).groups()

    def read(page):
        return [StoredFile(f"hf://datasets/{name}@{commit}/{item['path']}", int(item["size"]), item["oid"], commit)
                for item in page if item["type"] == "file"]

    files = []
    query = "recursive=true"
    for _ in range(MAX_PAGES):
        found, following = _ask(f"api/datasets/{name}/tree/{commit}{quote(path)}?{query}", url, read)
        files += found
        if not following:
            return files
        query = urlsplit(following).query
    raise BadInput(f"{url}: the list of its files does not end after {MAX_PAGES} pages: name a folder with fewer files")


def read_range(file, begin, end):
    """Yields the bytes of a StoredFile from `begin` to `end`, in parts. A broken connection may end it early."""
    name, _, path = file.url.removeprefix("hf://").partition(f"@{file.commit}/")
    headers = {"Range": f"bytes={begin}-{end - 1}", "Accept-Encoding": "identity"}
    with _open(f"{name}/resolve/{file.commit}/{quote(path)}", file.url, headers) as answer:
        if answer.status_code != 206 and begin:
            raise BadInput(f"{file.url}: the Hub sends it only as a whole: copy it to this machine")
        for part in answer.iter_raw(PART_BYTES):
            yield part[:end - begin]
            begin += len(part)
            if begin >= end:
                return


def _ask(path, url, read):
    """Returns read(the JSON at a path of the Hub), and the address of the next page or None."""
    with _open(path, url, {}) as answer:
        answer.read()
        try:
            return read(answer.json()), answer.links.get("next", {}).get("url")
        except ODD_JSON as error:
            raise Interruption(f"its answer is cut, or not the Hub's ({type(error).__name__}: {error})") from None


@contextmanager
def _open(path, url, headers):
    """Gives the open answer to a request for a path of the Hub. url: named in errors."""
    from huggingface_hub import constants, errors
    from huggingface_hub.utils import build_hf_headers, get_session
    headers = build_hf_headers() | headers
    token = headers.get("authorization", "").removeprefix("Bearer ")
    if not re.fullmatch("[!-~]*", token):  # the session's error would show it
        raise BadInput(f"{url}: HF_TOKEN has characters that are in no token: copy it again")
    try:
        with get_session().stream("GET", f"{constants.ENDPOINT}/{path}", headers=headers,
                                  timeout=TRY_TIMEOUT_S) as answer:
            if answer.status_code >= 400:
                raise _refusal(answer, url, token)
            yield answer
    except errors.OfflineModeIsEnabled:
        raise BadInput(f"{url}: HF_HUB_OFFLINE is set: unset it, or give a folder of this machine") from None
    except (OSError, errors.HTTPError) as error:
        raise Interruption(_line(error, token) or type(error).__name__) from None


def _refusal(answer, url, token):
    """Returns the exception for an answer that refuses."""
    code = answer.status_code
    problem = f"{code} {_line(answer.headers.get('X-Error-Message') or answer.reason_phrase, token)}"
    if code in (408, 429) or code >= 500:
        asked = answer.headers.get("Retry-After") or answer.headers.get("RateLimit", "")  # 9, or "api";r=0;t=9
        wait = re.search(r"^(?:.*\bt=)?(\d{1,9})$", asked)
        return Interruption(problem, int(wait[1]) if wait else 0)
    return BadInput(f"{url}: {problem}: correct it, or set HF_TOKEN to the token of an account that may read it")


def _line(text, token):
    """Returns the text of an answer or error in one line, without the token."""
    return " ".join(str(text).replace(token or "\0", "[token]").split())[:300].rstrip(".")
