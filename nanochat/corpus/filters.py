"""What a corpus leaves out if it is asked to: keys and tokens, e-mail addresses, licences that are not permissive."""
import re

from nanochat.common import SECRET_FORMS, BadInput

SECRETS = "secrets"  # a filter that drops documents
EMAILS = "emails"  # a filter that replaces addresses and drops nothing
FILTERS = (SECRETS, EMAILS)


def parse_filters(text):
    """Returns the names of filters in a list with commas; "all": of all."""
    names = {name.strip() for name in text.split(",") if name.strip()}
    if unknown := names - {*FILTERS, "all"}:
        raise BadInput(f"there is no filter {', '.join(sorted(unknown))}: give all, or some of {', '.join(FILTERS)}")
    return tuple(name for name in FILTERS if name in names or "all" in names)


_SECRETS = [re.compile(form) for form in SECRET_FORMS]


def has_secret(text):
    """Returns whether a document, bytes, has a key or token of a known form."""
    return any(pattern.search(text) for pattern in _SECRETS)


_EMAIL = re.compile(rb"(?<![\w.+-])[\w.+-]+@(?:[\w-]+\.)+[A-Za-z]{2,}(?![\w-])")


def replace_emails(text):
    """Returns the text with another e-mail address in the place of each."""
    return _EMAIL.sub(b"name@example.com", text) if b"@" in text else text


# Licences

_PERMISSIVE = set("""0bsd afl-2.1 afl-3.0 apache-1.1 apache-2 apache-2.0 artistic-2.0 blueoak-1.0.0 boost-1.0 bsd
    bsd-1-clause bsd-2-clause bsd-3-clause bsd-4-clause bsl-1.0 bzip2-1.0.6 cc0 cc0-1.0 curl ecl-2.0 expat ftl hpnd icu
    ijg isc libpng libpng-2.0 libtiff mit mit-0 ms-pl ncsa ntp openssl php-3.01 postgresql public-domain python-2.0
    sgi-b-2.0 tcl unicode-3.0 unicode-dfs-2016 unlicense upl-1.0 w3c wtfpl x11 zlib zlib-acknowledgement""".split())


LICENCE_BYTES = 4096  # of a file, in which it says its licence
LONGEST = 200  # characters of a tag
_TAG = re.compile(rb"SPDX-Licen[cs]e-Identifier[^\w(\r\n]*([^\r\n]*)", re.IGNORECASE)
_GNU = re.compile(rb"GNU[\s*/#]+(?:(?:Lesser|Library|Affero)[\s*/#]+)?General[\s*/#]+Public[\s*/#]+Licen[cs]e",
                  re.IGNORECASE)


def licence_in(text, otherwise):
    """Returns the licence of a document, bytes, by its first LICENCE_BYTES: what all SPDX tags say, word for word, else
    the licence `otherwise`, which is no longer permissive if they name the GNU General Public License."""
    found = []
    beginning = text[:2 * LICENCE_BYTES]
    lower = beginning.lower()  # re looks for letters of both cases far more slowly
    for tag in _TAG.finditer(beginning) if b"spdx" in lower else ():
        if tag.start() < LICENCE_BYTES:
            words = " ".join(tag[1].decode("utf-8", "replace").split())
            words = re.sub(r"[^\w+)]+$", "", words)  # the end of the comment
            if words.count(")") > words.count("("):  # the comment is in parentheses
                words = words[:-1]
            found.append(words if 0 < len(words) <= LONGEST else "unknown")
    if found:
        return found[0] if len(set(found)) == 1 else " AND ".join(f"({words})" for words in dict.fromkeys(found))
    if b"gnu" in lower and _GNU.search(text, 0, LICENCE_BYTES) and is_permissive(otherwise):
        return f"{otherwise} AND GPL"
    return otherwise


def is_permissive(licence):
    """Returns whether an expression of SPDX, or Debian's, names permissive licences: one of those around OR is enough,
    of those around AND all are needed. An exception (WITH) only permits more. Anything else is not permissive."""
    if len(licence) > 1000:
        return False
    # "MIT OR (GPL-2.0 AND ISC)" becomes "1|(0&1)", which is reduced from the inside.
    words = {"and": "&", "or": "|", **dict.fromkeys(_PERMISSIVE, "1")}
    expression = re.sub(r"\bWITH\s+[\w.-]+-exception\b[\w.-]*", "", licence, flags=re.IGNORECASE)
    expression = re.sub(r"[^\s()]+", lambda word: words.get(word[0].lower(), "0"), expression)
    expression = re.sub(r"\s", "", expression)
    before = ""
    while before != expression:
        before = expression
        expression = re.sub("[01](?:&[01])+", lambda part: str(int("0" not in part[0])), expression)
        expression = re.sub(r"(?<!&)[01](?:\|[01])+(?!&)", lambda part: str(int("1" in part[0])), expression)
        expression = re.sub(r"\(([01])\)", r"\1", expression)
    return expression == "1"
