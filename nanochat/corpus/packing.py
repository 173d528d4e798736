"""Joins the files of a project into documents, headers before the files that include them. data/projects.py has the
format of the text, and reads it."""
import posixpath
import re
from collections import defaultdict

from nanochat.data.projects import SEPARATOR

DOCUMENT_BYTES = 1 << 18  # of a document at most, unless one file alone is longer
HEADERS = (".h", ".hh", ".hpp", ".hxx", ".h++", ".inl", ".ipp", ".tcc", ".tpp", ".txx", ".cuh")
_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)


def join_files(texts):
    """Yields (paths, text) of the documents of a project, {path: text, bytes}. A project longer than DOCUMENT_BYTES
    becomes several documents, so that the lanes mix projects."""
    paths = []
    parts = []
    size = 0
    for path in dependency_order(texts):
        part = SEPARATOR.encode() + path.replace("\n", "\ufffd").encode(errors="replace") + b"\n" + texts[path]
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


def dependency_order(texts):
    """Returns the paths of {path: text, bytes}, each file as closely as possible after what it includes by
    `#include "…"`."""
    # A depth-first search from the files that are not headers, sorted by path. In a circle of includes, the line that
    # closes the circle does not count.
    by_name = defaultdict(list)
    for path in sorted(texts):
        by_name[posixpath.basename(path)].append(path)
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
    count = 0
    for ours, theirs in zip(path.split("/")[:-1], other.split("/")[:-1], strict=False):
        if ours != theirs:
            break
        count += 1
    return count
