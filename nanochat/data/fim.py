"""Fill in the middle: documents rewritten so that a model learns to write what belongs at a cursor.

    BOS <|fim_prefix|> prefix <|fim_suffix|> suffix <|fim_middle|> middle <|file_sep|>

The text is divided at characters and not at tokens, because an editor's cursor is usually inside a token of the whole
text: of ours, 12% of the line starts are token boundaries. The end of the middle is a token, because rows are filled to
the last token and a document at the end of a row would show no end. A document longer than a row is first cut at line
starts into parts, each of which fits into a row as a document of its own: otherwise a middle would be in another row
than its suffix.

All random choices follow from the seed and from where the document is in the data, so they are the same whenever it is
read. The format is that of arXiv 2207.14255 (prefix, suffix, middle), with the names that Qwen and llama.cpp use.
"""
import hashlib
import math
import re
import struct
from dataclasses import dataclass

from nanochat.data.tokenizer import Infill

KINDS = ("random", "line", "structure")  # kinds of middles, each as often as the others
MIN_SEQ_LEN = 64  # shorter rows have no room for a middle with its context
MAX_LINES = 30  # of a middle by lines
MAX_STRUCTURE_CHARS = 1500  # of a middle by structure; also how far the scanner reads for its end


@dataclass(frozen=True)
class Infilling:
    """Which documents are rewritten, and how. rate: the share of the documents; kinds: of their middles."""
    rate: float
    seed: int
    kinds: tuple = KINDS

    def encode(self, lane, texts, tokenizer, row_tokens):
        """Returns for each text a list of (tokens, is_infill) of its parts.

        tokens: a memoryview of uint32; it begins with BOS, except in later pieces of a document that is read in several
        is_infill: whether the part is rewritten; then it is at most a row long. A text that is not is one part, and so
            is every piece of a document that is read in several
        texts: a list of (ref, TextPiece) of the lane with this number
        """
        # A token of C++ has about log2(vocabulary) / 3.3 characters. With this estimate, 5% of the parts turn out
        # longer than a row, and are encoded once more as two.
        part_chars = int(row_tokens * math.log2(tokenizer.n_vocab) / 4)
        found, waiting = [{} for _ in texts], []  # for each text {beginning of a part: its tokens}
        for i, (ref, text) in enumerate(texts):
            place = (self.seed, lane, *ref)
            if ref[2] or not text.is_last or draws(place)(1 << 53) >= self.rate * (1 << 53):
                waiting.append((i, None, text.text))
            else:
                characters = _as_characters(text.text)
                waiting += [self._rewritten(i, text.text, characters, place, cut)
                            for cut in cut_at_lines(characters, part_chars, place)]
        while waiting:
            encoded = tokenizer.encode_documents([document for _, _, document in waiting])
            halves = []
            for (i, cut, _), tokens in zip(waiting, encoded, strict=True):
                if cut and len(tokens) > row_tokens:
                    ref, text = texts[i]
                    characters = _as_characters(text.text)
                    halves += [self._rewritten(i, text.text, characters, (self.seed, lane, *ref), half)
                               for half in halve(characters, *cut)]
                else:
                    found[i][cut] = (tokens[1:] if texts[i][0][2] else tokens), cut is not None
            waiting = halves
        return [[parts[cut] for cut in sorted(parts)] for parts in found]

    def _rewritten(self, i, text, characters, place, cut):
        """Returns (i, cut, document) of a part of text number `i`. cut: its beginning and end in `characters`."""
        part = characters[cut[0]:cut[1]]
        begin, end = choose_middle(part, self.kinds, draws((*place, *cut)))
        pieces = part[:begin], part[end:], part[begin:end]
        if not isinstance(text, str):
            pieces = [piece.encode("utf-8", "surrogateescape") for piece in pieces]
        return i, cut, Infill(*pieces)


def _as_characters(text):
    """Returns a text (str or bytes) as str. Malformed bytes become lone surrogates, which can be turned into the bytes
    again."""
    return text if isinstance(text, str) else text.decode("utf-8", "surrogateescape")


def draws(key):
    """Returns a function below(n) that returns up to eight random integers from 0 to n - 1, which follow from `key`, a
    tuple of integers."""
    words = iter(struct.unpack("<8Q", hashlib.blake2b(",".join(map(str, key)).encode()).digest()))
    return lambda n: next(words) * n >> 64


def cut_at_lines(text, part_chars, place):
    """Yields (begin, end) of parts of a text, at most `part_chars` long. They begin where lines begin; only a line that
    is longer than that is cut. Half of them are as long as possible, for the sake of long contexts, and half are short,
    because rows can be filled without loss only with documents of many lengths: equal parts had 6.7% of the tokens
    dropped. place: a tuple of integers, from which the lengths follow."""
    begin = 0
    while len(text) - begin > part_chars:
        part = 2 * draws((*place, begin))(1 << 53) / (1 << 53)
        end = begin + (part_chars if part > 1 else int(part_chars * (0.05 + 0.45 * part)) + 1)
        end = text.rfind("\n", begin, end) + 1 or end
        yield begin, end
        begin = end
    yield begin, len(text)


def halve(text, begin, end):
    """Returns two (begin, end) that divide a part of a text, at the start of a line if there is one in its first half.
    """
    middle = (begin + end) // 2
    middle = text.rfind("\n", begin, middle) + 1 or middle
    return (begin, middle), (middle, end)


# -----------------------------------------------------------------------------
# Middles


def choose_middle(text, kinds, below):
    """Returns (begin, end) of a random middle of `text`, of a random one of `kinds`; below: as `draws` returns it.

    A text without the structure that was drawn gets a middle by lines.
    """
    kind = kinds[below(len(kinds))]
    if kind == "random":
        return tuple(sorted((below(len(text) + 1), below(len(text) + 1))))
    return (kind == "structure" and choose_structure(text, below)) or choose_lines(text, below)


def choose_lines(text, below):
    """Returns (begin, end) of 1 to 30 lines, short middles more often than long ones.

    It begins at a line's start or, as often, inside a line, and ends before the end of a line. A middle of nothing but
    white space goes on to the next line that has more: it would teach that nothing belongs into an empty line.
    """
    begin = below(len(text) + 1)
    if below(2):
        begin = text.rfind("\n", 0, begin) + 1
    lines = int((MAX_LINES + 1) ** (below(1 << 53) / (1 << 53)))
    end = begin - 1
    while end < len(text) and (lines > 0 or not text[begin:end].strip()):
        end, lines = text.find("\n", end + 1), lines - 1
        end = len(text) if end < 0 else end
    return begin, end - (text[begin:end + 1].endswith("\r\n"))


def choose_structure(text, below):
    """Returns (begin, end) of the first body, argument list, statement or group of directives after a random line start
    of C++, or None if there is none."""
    find = (find_brackets, find_brackets, find_statement, find_directives)[choice := below(4)]
    begin = text.rfind("\n", 0, below(len(text) + 1)) + 1
    return find(text, begin, *("{}", "()")[choice:choice + 1])


# What the scanner stops at: comments, strings and directives, which it skips, and brackets and semicolons. Each
# alternative begins with a literal character: Python then looks for these characters before it tries an alternative.
_TOKEN = re.compile(r"""
    /(?:/[^\n]*|\*.*?(?:\*/|\Z))
    | R"([^()\\\s]{0,16})\(.*?(?:\)\1"|\Z)
    | "(?:[^"\\\n]|\\.)*"?
    | '(?<!\w')(?:[^'\\\n]|\\.)*'?  # 1'000 is a number
    | \#(?:[^\n\\]|\\.)*
    | \{ | \} | \( | \) | ;""", re.DOTALL | re.VERBOSE)


def find_brackets(text, begin, pair):
    """Returns (begin, end) of what is between the next two brackets that belong together, of a pair such as "{}". If
    that is too long it is the outermost pair inside, and if there is none, None."""
    opening, closing = pair
    first = _code_line(text, text.find(opening, begin))
    if first is None:
        return None
    opened, found = [], None
    for match in _TOKEN.finditer(text, first, first + MAX_STRUCTURE_CHARS):
        token = match[0]
        if token == opening:
            opened.append(match.end())
        elif token == closing and opened:
            inside = opened.pop()
            if match.start() > inside:
                found = inside, match.start()
            if found and not opened:
                break
    return found


def find_statement(text, begin):
    """Returns (begin, end) of the next statement with its semicolon, or None if there is none."""
    first = _code_line(text, begin)
    if first is None:
        return None
    depth = 0  # of parentheses: those of `for` have semicolons inside
    for match in _TOKEN.finditer(text, first, first + MAX_STRUCTURE_CHARS):
        token = match[0]
        if token == "(":
            depth += 1
        elif token == ")":
            depth = max(0, depth - 1)
        elif not depth and token == ";" and (statement := text[first:match.start()].lstrip()):
            return match.start() - len(statement), match.end()
        elif token in "{}" or not depth and token[0] in ";/#":
            first, depth = match.end(), 0
    return None


def find_directives(text, begin):
    """Returns (begin, end) of the next lines that begin with #, with those that continue them. None if there are none.
    """
    first = begin if text.startswith("#", begin) else text.find("\n#", begin) + 1
    if not text.startswith("#", first):
        return None
    end = first
    while text.startswith("#", end) or end > first and text[end - 2:end] == "\\\n":
        end = text.find("\n", end) + 1 or len(text) + 1
    return first, end - 1


def _code_line(text, position):
    """Returns the beginning of the line of `position`, from which a scanner may begin, or None if position is negative
    or the line seems to be inside a comment."""
    first = text.rfind("\n", 0, max(position, 0)) + 1
    return None if position < 0 or text[first:position + 1].lstrip().startswith("*") else first
