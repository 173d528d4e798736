"""Files of a project that stand together: joined into documents, headers before the files that include them; or as the
context of one file, the files beside it and what it includes. data/projects.py has the format of the text."""
import posixpath
import re
from bisect import bisect_left
from collections import defaultdict
from functools import cache
from os.path import commonprefix

from nanochat.data.fim import condensed
from nanochat.data.projects import SEPARATOR, alike_first

VERSION = 4  # to be increased when a change to this file makes another corpus from the same files
CONTEXT_BYTES = 1 << 13  # of a document's context at most, of which a file takes half at most
BESIDE = 64  # files before and after a file in its folder, of which its context chooses
DOCUMENT_BYTES = 1 << 18  # of a document at most, unless one file alone is longer
HEADERS = (".h", ".hh", ".hpp", ".hxx", ".h++", ".inl", ".ipp", ".tcc", ".tpp", ".txx", ".cuh")
# In angle brackets, a name without a folder is nearly always the system's.
_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*(?:"|<(?=[^>\n]*/))([^">\n]+)', re.MULTILINE)


def join_files(texts):
    """Yields (paths, text) of the documents of a project, {path: text, bytes}. A project longer than DOCUMENT_BYTES
    becomes several documents, so that the lanes mix projects."""
    paths = []
    parts = []
    size = 0
    for path in dependency_order(texts):
        part = _headed(path, texts[path])
        if parts and size + len(part) > DOCUMENT_BYTES:
            yield paths, b"".join(parts)
            paths = []
            parts = []
            size = 0
        paths.append(path)
        parts.append(part)
        size += len(part)
    if parts:
        yield paths, b"".join(parts)


def _headed(path, text):
    return SEPARATOR.encode() + path.replace("\n", "\ufffd").encode(errors="replace") + b"\n" + text


def contexts(texts):
    """Yields (path, context) of the files of a project, {path: text, bytes}: the nearest files, condensed, the nearest
    last, up to CONTEXT_BYTES."""
    by_name = _by_name(texts)
    folders = defaultdict(list)
    for path in sorted(texts):
        folders[posixpath.dirname(path)].append(path)

    @cache
    def includes(path):
        return list(included(path, texts, by_name))

    @cache
    def part(path):
        text = condensed(texts[path].decode(errors="replace")).encode()
        if len(text) > CONTEXT_BYTES // 2:
            text = text[:text.rfind(b"\n", 0, CONTEXT_BYTES // 2) + 1]
        return _headed(path, text) if text else b""

    for path in texts:
        parts = []
        left = CONTEXT_BYTES
        for other in nearest(path, includes, folders[posixpath.dirname(path)]):
            left -= len(part(other))
            if left < 0:
                break
            parts.append(part(other))
        yield path, b"".join(reversed(parts))


def nearest(path, includes, beside):
    """Yields other files, the nearest to `path` first: those `beside` it, of which the names that begin alike come
    first; then those that it includes, those that these include, and so on. includes(path): the files it includes.
    beside: the files of its folder, sorted."""
    found = [path]
    at = bisect_left(beside, path)
    around = beside[max(0, at - BESIDE):at + BESIDE]  # names that begin alike are neighbours
    for other in alike_first(around, path):
        if other != path:
            found.append(other)
            yield other
    for current in found:  # which grows
        for other in includes(current):
            if other not in found:
                found.append(other)
                yield other


def _by_name(texts):
    by_name = defaultdict(list)
    for path in sorted(texts):
        by_name[posixpath.basename(path)].append(path)
    return by_name


def dependency_order(texts):
    """Returns the paths of {path: text, bytes}, each file as closely as possible after what it includes."""
    # A depth-first search from the files that are not headers, sorted by path. In a circle of includes, the line that
    # closes the circle does not count.
    by_name = _by_name(texts)
    order = []
    seen = set()
    for root in sorted(texts, key=lambda path: (path.lower().endswith(HEADERS), path)):
        if root in seen:
            continue
        seen.add(root)
        waiting = [(root, included(root, texts, by_name))]  # a stack, because a recursion may go too deep
        while waiting:
            path, rest = waiting[-1]
            following = next((other for other in rest if other not in seen), None)
            if following is None:
                order.append(path)
                waiting.pop()
            else:
                seen.add(following)
                waiting.append((following, included(following, texts, by_name)))
    return order


def included(path, texts, by_name):
    """Yields the files of the project that the file `path` includes, in the order of its lines. Of several files that
    match a line, it takes the one beside `path`, else the one that shares most folders with it."""
    for match in _INCLUDE.finditer(texts[path]):
        name = match[1].decode("utf-8", "replace")
        beside = posixpath.normpath(posixpath.join(posixpath.dirname(path), name))
        if beside in texts:
            yield beside
            continue
        end = "/" + re.sub(r"^(?:\.\.?/)+", "", posixpath.normpath(name))
        found = [other for other in by_name[posixpath.basename(name)] if f"/{other}".endswith(end)]
        if found:
            yield min(found, key=lambda other: (-_common_folders(path, other), len(other), other))


def _common_folders(path, other):
    return len(commonprefix([path.split("/")[:-1], other.split("/")[:-1]]))
