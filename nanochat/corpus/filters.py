"""Filters that drop documents which teach little: each gives a document a number, and drops it above a limit.

None is on by default. FILTERS names them all; the ideas are those of Gopher (arXiv 2112.11446), StarCoder (2305.06161)
and OpenCoder (2411.04905), the limits were chosen by looking at C++ on both sides of them.
"""
import heapq
import re
import zlib
from pathlib import Path

from nanochat.common import BadInput
from nanochat.record.page import fill

EXAMPLES, EXAMPLE_BYTES = 20, 1500  # of each filter on either side of its limit
_COMMENT_OR_STRING = re.compile(rb"""
    /(?:/(?:[^\\\n]|\\.)*|\*.*?(?:\*/|\Z))
    | (?:\b(?:u8|[uUL])?R)?"(?:(?<=R")([^()\\\s]{0,16})\(.*?(?:\)\1"|\Z)|(?:[^"\\\n]|\\.)*"?)
    | (?:(?<!\w)|(?<=\b[uUL])|(?<=\bu8))'(?:[^'\\\n]|\\.){1,8}'  # 1'000 is a number
    """, re.DOTALL | re.VERBOSE)
_NUMBER = re.compile(rb"(?<!\w)\.?\d[\w.']*")
_NAME = re.compile(rb"[A-Za-z_]\w+")
_NOT_BRACKETS = bytes(set(range(256)) - set(b"()[]{}"))
_SPACE = b" \t\r\n\f\v"
MOST_DEPTH = 100  # of brackets


class Code:
    """A document, divided into comments, strings and the rest."""

    def __init__(self, text):
        self.text = text
        self.visible = max(1, len(text.translate(None, _SPACE)))
        self.comments = 0  # visible bytes
        self.strings = 0  # visible bytes, without names of headers
        rest = []
        begin = 0
        for match in _COMMENT_OR_STRING.finditer(text):
            found = match[0]
            rest.append(text[begin:match.start()])
            begin = match.end()
            if found.startswith(b"/"):
                self.comments += len(found.translate(None, _SPACE))
                rest.append(b" ")
            else:
                if b"include" not in text[max(0, match.start() - 9):match.start()]:
                    self.strings += len(found.translate(None, _SPACE))
                rest.append(b'""')
        rest.append(text[begin:])
        self.rest = b"".join(rest)  # the text without comments, and with "" for strings


def repeated_lines(code):
    """Returns the fraction of the visible bytes that are in lines which the document has had before, such as rows of a
    table or copied statements. Lines below 12 bytes, such as a brace or break, do not count."""
    lines = [line for line in map(bytes.strip, code.text.split(b"\n")) if len(line) >= 12]
    return (sum(map(len, lines)) - sum(map(len, set(lines)))) / len(code.text)


def repeated_text(code):
    """Returns the fraction of the bytes that zlib saves, because sequences of bytes repeat. Short documents: 0."""
    return 1 - len(zlib.compress(code.text, 1)) / len(code.text) if len(code.text) >= 1000 else 0.0


def comments(code):
    """Returns the fraction of the visible bytes that are in comments, licence texts among them."""
    return code.comments / code.visible


def data(code):
    """Returns the fraction of the visible bytes outside of comments that are numbers, commas and strings: tables,
    images and fonts, in hexadecimal too."""
    numbers = sum(map(len, _NUMBER.findall(code.rest)))
    return (numbers + code.rest.count(b",") + code.strings) / max(1, code.visible - code.comments)


def identifiers(code):
    """Returns the visible bytes outside of comments for each different word."""
    return (code.visible - code.comments) / max(1, len(set(_NAME.findall(code.rest))))


def long_lines(code):
    """Returns how often the lines are too long: above 100 bytes on average, or the longest above 1,000."""
    lines = code.text.split(b"\n")
    return max(len(code.text) / len(lines) / 100, max(map(len, lines)) / 1000)


def unbalanced(code):
    """Returns the number of brackets without a partner. Of #if … #else, the first branch counts."""
    left = _first_branches(code.rest).translate(None, _NOT_BRACKETS)
    for _ in range(MOST_DEPTH):
        shorter = left.replace(b"()", b"").replace(b"[]", b"").replace(b"{}", b"")
        if len(shorter) == len(left):
            break
        left = shorter
    return len(left)


def _first_branches(rest):
    if not re.search(rb"^[ \t]*#[ \t]*el", rest, re.MULTILINE):
        return rest
    kept = []
    skipped = [False]  # for each #if around the line: whether an #else or #elif came, here or around it
    for line in rest.replace(b"\\\n", b" ").split(b"\n"):
        directive = re.match(rb"[ \t]*#[ \t]*(if|el|endif)", line)
        if directive and directive[1] == b"if":
            skipped.append(skipped[-1])
        elif directive and len(skipped) > 1:
            skipped[-1] = True
            if directive[1] == b"endif":
                skipped.pop()
        elif not skipped[-1]:
            kept.append(line)
    return b"\n".join(kept)


# Tokens whose form tells what they are. Each begins with fixed bytes, for which re looks at 1 GB/s or more; all of
# detect-secrets' detectors together read 0.07 MB/s.
_SECRETS = [re.compile(pattern) for pattern in (
    rb"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----[^-]{0,200}?[A-Za-z0-9+/]{40}",
    rb"A(?:KIA|SIA|BIA|CCA)[0-9A-Z]{16}(?![0-9A-Z])", rb"gh[pousr]_[A-Za-z0-9]{36}", rb"github_pat_\w{60}",
    rb"glpat-[\w-]{20}", rb"xox[abposr]-[\w-]{20}", rb"hooks\.slack\.com/services/T\w{1,20}/B\w{1,20}/\w{20}",
    rb"[rs]k_live_\w{24}", rb"AIza[\w-]{35}", rb"SG\.[\w-]{22}\.[\w-]{43}", rb"npm_[A-Za-z0-9]{36}",
    rb"pypi-AgE[\w-]{50}", rb"sk-[\w-]{20,200}T3BlbkFJ", rb"hf_[A-Za-z]{34}",
    rb"eyJ[\w-]{10,500}\.eyJ[\w-]{10,2000}\.[\w-]{20}", rb"AccountKey=[A-Za-z0-9+/=]{80}")]


def secrets(code):
    """Returns the number of kinds of keys and tokens in the document."""
    return sum(1 for pattern in _SECRETS if pattern.search(code.text))


FILTERS = {  # {name: (function, limit, what its number is)}
    "repeated_lines": (repeated_lines, 0.5, "fraction of the bytes in lines that came before"),
    "repeated_text": (repeated_text, 0.9, "fraction of the bytes that zlib saves"),
    "comments": (comments, 0.9, "fraction of the bytes in comments"),
    "data": (data, 0.7, "fraction of the bytes of code in numbers, commas and strings"),
    "identifiers": (identifiers, 1000, "bytes of code for each different word"),
    "long_lines": (long_lines, 1, "length of lines by the limits, 100 bytes on average and 1,000 at most"),
    "unbalanced": (unbalanced, 10, "brackets without a partner"),
    "secrets": (secrets, 0, "kinds of keys and tokens")}
EMAILS = "emails"  # a filter that replaces addresses and drops nothing
_EMAIL = re.compile(rb"(?<![\w.+-])[\w.+-]+@(?:[\w-]+\.)+[A-Za-z]{2,}(?![\w-])")


def replace_emails(text):
    """Returns the text with another e-mail address in the place of each."""
    return _EMAIL.sub(b"name@example.com", text) if b"@" in text else text


def parse_filters(text):
    """Returns the names of filters in a list with commas; "all": of all."""
    every = (*FILTERS, EMAILS)
    names = {name.strip() for name in text.split(",") if name.strip()}
    if unknown := names - {*every, "all"}:
        raise BadInput(f"there is no filter {', '.join(sorted(unknown))}: give all, or some of {', '.join(every)}")
    return tuple(name for name in every if name in names or "all" in names)


# Licences

_PERMISSIVE = set("""0bsd afl-2.1 afl-3.0 apache-1.1 apache-2 apache-2.0 artistic-2.0 blueoak-1.0.0 boost-1.0 bsd
    bsd-1-clause bsd-2-clause bsd-3-clause bsd-4-clause bsl-1.0 bzip2-1.0.6 cc0 cc0-1.0 curl ecl-2.0 expat ftl hpnd icu
    ijg isc libpng libpng-2.0 libtiff mit mit-0 ms-pl ncsa ntp openssl php-3.01 postgresql public-domain python-2.0
    sgi-b-2.0 tcl unicode-3.0 unicode-dfs-2016 unlicense upl-1.0 w3c wtfpl x11 zlib zlib-acknowledgement""".split())


def is_permissive(licence):
    """Returns whether an expression of SPDX, or Debian's, names permissive licences: one of those around OR is enough,
    of those around AND all are needed. An exception (WITH) only permits more. An unknown licence is not permissive."""
    # "MIT OR (GPL-2.0 AND ISC)" becomes "1|(0&1)", which is reduced from the inside.
    words = {"and": "&", "or": "|", **dict.fromkeys(_PERMISSIVE, "1")}
    expression = re.sub(r"\bWITH\s+[^\s()]+", "", licence[:1000], flags=re.IGNORECASE)
    expression = re.sub(r"[^\s()]+", lambda word: words.get(word[0].lower(), "0"), expression).replace(" ", "")
    before = ""
    while before != expression:
        before = expression
        expression = re.sub("[01](?:&[01])+", lambda part: str(int("0" not in part[0])), expression)
        expression = re.sub(r"(?<!&)[01](?:\|[01])+(?!&)", lambda part: str(int("1" in part[0])), expression)
        expression = re.sub(r"\(([01])\)", r"\1", expression)
    return expression == "1"


# Applying them


class Filters:
    """Applies filters to documents, and keeps for each one documents that it dropped, by chance, and those that it just
    kept."""

    def __init__(self, names):
        self.names = [name for name in names if name in FILTERS]
        self.examples = {name: {"dropped": [], "kept": []} for name in self.names}

    def dropping(self, text, title, key):
        """Returns the name of the first filter that drops a document, or "". key: a hash of its text."""
        if not self.names:
            return ""
        code = Code(text)
        numbers = {}
        for name in self.names:
            function, limit, _ = FILTERS[name]
            numbers[name] = function(code)
            if numbers[name] > limit:
                self._keep(name, "dropped", key, numbers[name], title, text)
                return name
        for name, number in numbers.items():
            if number > 0:
                self._keep(name, "kept", number, number, title, text)
        return ""

    def _keep(self, name, side, rank, number, title, text):
        """Keeps the examples of the highest rank."""
        heap = self.examples[name][side]
        if len(heap) < EXAMPLES or rank > heap[0][0]:
            heapq.heappush(heap, (rank, title, number, text[:EXAMPLE_BYTES].decode("utf-8", "replace")))
            if len(heap) > EXAMPLES:
                heapq.heappop(heap)


def page(found, dropped, num_files):
    """Returns a page of HTML. found: the examples of all sources, each Filters.examples. dropped: {filter: number of
    documents}."""
    filters = []
    for name in found[0]:
        _, limit, what = FILTERS[name]
        sides = []
        for side, title in (("dropped", "Dropped, by chance"), ("kept", "Just kept")):
            examples = []
            for one in found:
                examples += map(tuple, one[name][side])
            sides.append((title, sorted(examples, reverse=True)[:EXAMPLES]))
        count = dropped.get(name, 0)
        share = f"{count:,} of {num_files:,} documents dropped ({count / max(1, num_files):.3%})"
        filters.append((name, share, limit, what, sides))
    return fill(Path(__file__).with_name("filters.html"), filters=filters)
