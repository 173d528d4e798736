"""A language server of LSP 3.18's textDocument/inlineCompletion, which asks a running completion server. scripts/lsp.py
runs it."""
import json
import os
import re
from contextlib import suppress
from functools import cache
from itertools import islice
from os.path import commonprefix
from pathlib import Path
from urllib.parse import unquote

import httpx
from lsprotocol import types
from pygls.lsp.server import LanguageServer
from pygls.uris import to_fs_path
from pygls.workspace import TextDocument

from nanochat.common import SUFFIXES, BadInput

TIMEOUT_S = 60
MAX_TOKENS = 64  # of a completion
MAX_SIDE = 1 << 15  # characters before, and after, the cursor that are sent: more than a model reads
MAX_OTHERS = 1 << 16  # characters of other files that are sent
MAX_FILES = 256  # more are refused
MAX_BESIDE = 64  # files of the folder that are sent
MAX_ENTRIES = 4096  # of the folder that are looked at
STATUS_REPLACED = 499

_LINE = re.compile(r"[^\r\n]*(?:\r\n|\n|\r)|[^\r\n]+")
_INCLUDE = re.compile(r"""^[ \t]*\#[ \t]*include[ \t]*["<]([^">\n\0]+)[">]""", re.MULTILINE)

# pygls would also end lines at form feeds, which old C++ has, and at other characters that end no line of LSP.
TextDocument.lines = property(lambda document: tuple(_LINE.findall(document.source)))


def make_language_server(url):
    """Returns a language server that asks the completion server at `url`. Raises BadInput if that is no address."""
    headers = {"Content-Type": "application/json",
               # Of several editors, none replaces the waiting requests of another.
               "User-Agent": f"nanochat-lsp/{os.getpid()}"}
    if not re.fullmatch(r"https?://(\[[\da-fA-F:]+\]|[\w.-]+)(:\d+)?/?", url):
        raise BadInput(f"--url={url} is no address of a server: give one such as http://127.0.0.1:8012")
    client = httpx.AsyncClient(base_url=url, headers=headers, timeout=TIMEOUT_S, trust_env=False)
    server = LanguageServer("nanochat", "1")
    last_said = [""]

    # If the editor cancels the request, pygls cancels this coroutine. That closes the connection, and frees the model.
    @server.feature(types.TEXT_DOCUMENT_INLINE_COMPLETION, types.InlineCompletionOptions())
    async def complete(ls: LanguageServer, params: types.InlineCompletionParams):
        documents = ls.workspace.text_documents
        uri = unquote(params.text_document.uri)
        document = documents.pop(uri, None)
        if document is None:  # the editor has closed it, or never opened it
            return []
        documents[uri] = document  # the last used one comes last
        span, typed, body = request_at(ls.workspace, document, params)
        text, message = await ask(client, url, body)
        # Once, because editors ask with each key.
        if message and message != last_said[0]:
            ls.window_show_message(types.ShowMessageParams(types.MessageType.Warning, f"nanochat: {message}"))
        last_said[0] = message
        return [types.InlineCompletionItem(typed + text, range=span)] if text else []

    return server


async def ask(client, url, body):
    """Returns the server's completion and "", or "" and what the user must know."""
    try:
        answer = await client.post("/infill", content=json.dumps(body).encode())
        if answer.status_code == STATUS_REPLACED:  # by a newer request of this editor
            return "", ""
        answer = answer.json()
        if "error" in answer:
            return "", answer["error"]["message"]
        return answer["content"], ""
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        return "", f"no answer of {url} ({type(error).__name__}): start python3 -m scripts.serve"


def request_at(workspace, document, params):
    """Returns the Range that the completion replaces, the text that it begins with, and the body of an /infill."""
    span = types.Range(params.position, params.position)
    typed = ""
    if chosen := params.context.selected_completion_info:  # of a menu: the completion must extend its item
        span = chosen.range
        typed = chosen.text
    source = document.source
    prefix = source[:document.offset_at_position(span.start)] + typed
    suffix = source[document.offset_at_position(span.end):]
    others = [{"filename": path, "text": text} for path, text in other_files(workspace, document)]
    return span, typed, {"input_prefix": prefix[-MAX_SIDE:], "input_suffix": suffix[:MAX_SIDE], "input_extra": others,
                         "n_predict": MAX_TOKENS, "n_indent": indentation(prefix), "id_slot": 0}


def indentation(prefix):
    """Returns by how many characters the line at the cursor is indented: a completion does not leave its block."""
    line = re.split("[\r\n]", prefix)[-1]
    if not line.strip():
        return 0
    return len(line) - len(line.lstrip(" \t"))


def other_files(workspace, document):
    """Returns (path in its root, text) of files that may help to complete `document`, the most helpful one last: what
    it includes, then each other open file and what that includes, then the files of its folder. A text that does not
    fit into the rest of MAX_OTHERS is left out."""
    find = cache(real_path)  # because open files include the same headers
    opened = {place_of(other, find): other.source for other in workspace.text_documents.values()}
    roots = []
    for folder in workspace.folders.values():
        if path := to_fs_path(folder.uri):
            roots.append(find(path))
    if not roots and workspace.root_path:
        roots = [find(workspace.root_path)]
    here = place_of(document, find)
    # The most helpful come first here, so that the room is theirs, and last in the result. `here` has no text among
    # them: the prompt has it already.
    candidates = [*included(here, opened[here], roots, find)]
    for path in reversed(opened):
        candidates += [path, *included(path, opened[path], roots, find)]
    if here.is_absolute():
        candidates += beside(here)
    texts = {here: ""}
    room = MAX_OTHERS
    for path in candidates:
        if path not in texts:
            text = opened.get(path)
            if text is None:
                text = read_up_to(path, room)
            if len(text) > room:
                text = ""
            texts[path] = text
            room -= len(text)
    found = []
    for path, text in reversed(texts.items()):
        if text:
            around = [root for root in roots if path.is_relative_to(root)]
            found.append((str(path.relative_to(around[0])) if around else path.name, text))
    return found[-MAX_FILES:]


def included(path, text, roots, find):
    """Yields the files beside the file `path`, and in the folders `roots`, that its text includes. find: real_path."""
    folders = [path.parent, *roots, *(root / "include" for root in roots)]
    for name in dict.fromkeys(_INCLUDE.findall(text, 0, MAX_OTHERS)):
        for folder in folders:
            file = os.path.join(folder, name)
            if not os.path.isfile(file):  # for most names there is none, and this says so fastest
                continue
            found = find(file)
            if any(map(found.is_relative_to, (path.parent, *roots))):
                yield found
                break


def beside(path):
    """Returns up to MAX_BESIDE C and C++ files of the folder of the file `path`, first those whose names begin like its
    name."""
    names = []
    with suppress(OSError), os.scandir(path.parent) as entries:
        for entry in islice(entries, MAX_ENTRIES):
            if entry.name.lower().endswith(SUFFIXES) and entry.is_file(follow_symlinks=False):
                names.append(entry.name)
    names.sort(key=lambda name: (-len(commonprefix([path.name, name])), name))
    return [path.parent / name for name in names[:MAX_BESIDE]]


def place_of(document, find):
    """Returns the real path of a document that is a file. Another one, such as untitled:1 or a page, is near no file of
    this machine, so it gets a relative path. find: real_path."""
    return find(document.path) if document.uri.startswith("file:///") else Path(f"./{document.uri}")


def real_path(path):
    path = path.replace("\0", "").encode(errors="replace").decode()  # a URI may contain %00, and half a surrogate
    return Path(os.path.realpath(path))


def read_up_to(path, num_bytes):
    """Returns the text of a file; "" if it has more bytes or cannot be read."""
    try:
        return path.read_text(errors="replace") if path.stat().st_size <= num_bytes else ""
    except OSError:
        return ""
