"""Projects as documents: their files one behind the other, the headers before the files that include them.

    text:    "\\0" path "\\n" file "\\0" path "\\n" file …
    tokens:  BOS <|file_sep|> path "\\n" file <|file_sep|> path "\\n" file …

The separator is the character 0, which no file of a corpus has (corpus.clean), and only shards that say so are read
like this (Shard.is_packed). A project longer than DOCUMENT_BYTES is several documents, so that the lanes mix projects.
"""
import posixpath
import re
from collections import defaultdict

import numpy as np

SEPARATOR, FILE_SEP = "\0", "<|file_sep|>"
DOCUMENT_BYTES = 1 << 18  # of a document at most, unless one file alone is longer
HEADERS = (".h", ".hh", ".hpp", ".hxx", ".h++", ".inl", ".ipp", ".tcc", ".tpp", ".txx", ".cuh")
_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)


# -----------------------------------------------------------------------------
# Writing


def dependency_order(texts):
    """Returns the paths of {path: text, bytes} in an order in which a file comes behind what it includes by
    `#include "…"`, and as near behind it as that allows.

    Files that are not headers begin, sorted by path: each comes behind those that it includes and that have not come
    yet, in the order of its lines. Where files include each other in a circle, the line that closes it does not count.
    """
    by_name = defaultdict(list)
    for path in sorted(texts):
        by_name[posixpath.basename(path)].append(path)
    order = []
    seen = set()
    for root in sorted(texts, key=lambda path: (path.lower().endswith(HEADERS), path)):
        if root in seen:
            continue
        seen.add(root)
        waiting = [(root, included(root, texts, by_name))]  # a stack instead of a recursion, which may go too deep
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
    """Yields the files of the project that the file `path` includes, in the order of its lines: the one that stands
    there beside it, else the one of that name that has most folders in common with it."""
    for match in _INCLUDE.finditer(texts[path]):
        name = match[1].decode("utf-8", "replace")
        beside = posixpath.normpath(posixpath.join(posixpath.dirname(path), name))
        wanted = "/" + re.sub(r"^(?:\.\.?/)+", "", posixpath.normpath(name))
        found = [beside] if beside in texts else [
            other for other in by_name[posixpath.basename(name)] if f"/{other}".endswith(wanted)]
        if found:
            yield min(found, key=lambda other: (-_common_folders(path, other), len(other), other))


def _common_folders(path, other):
    pairs = zip(path.split("/")[:-1], other.split("/")[:-1], strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(path.count("/"), other.count("/")))


def join_files(texts):
    """Yields (paths, text) of the documents of a project, {path: text, bytes}."""
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


# -----------------------------------------------------------------------------
# Reading


def encode_documents(pieces, tokenizer):
    """Returns the same as tokenizer.encode_documents for the texts of a list of TextPieces, those of packed shards with
    <|file_sep|> for each separator."""
    parts = []
    counts = []  # parts of each piece
    for piece in pieces:
        # A project's text begins with a separator. So its first part is empty, and nothing but BOS comes of it.
        separator = SEPARATOR if isinstance(piece.text, str) else SEPARATOR.encode()
        own = piece.text.split(separator) if piece.is_packed else [piece.text]
        parts += own
        counts.append(len(own))
    encoded = tokenizer.encode_documents(parts)
    if len(parts) == len(pieces):
        return encoded
    separator = tokenizer.special(FILE_SEP)
    documents = []
    left = iter(encoded)
    for count in counts:
        own = [np.array(next(left)) for _ in range(count)]  # each of them begins with BOS
        for later in own[1:]:
            later[0] = separator
        documents.append(np.concatenate(own).data)
    return documents
