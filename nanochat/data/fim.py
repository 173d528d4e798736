"""Fill in the middle: rewrites documents so that a model learns to complete text at a cursor.

    BOS <|fim_prefix|> prefix <|fim_suffix|> suffix <|fim_middle|> middle <|file_sep|>

With tokens that a public model lends (hub_tokenizer.LENT), suffix and prefix change places: the model has learned to
continue a prefix, and need not learn first that <|fim_middle|> points back to it.

The text is divided at characters, not at tokens, because an editor's cursor is usually inside a token of the whole
text: only a tenth of the line starts are token boundaries. A token marks the end of the middle, because a document at
the end of a full row would show no end. A document longer than a row is first cut at line starts into parts, each a
document of its own: otherwise a middle would be in another row than its suffix. Surplus tokens of a part become a small
document from left to right.

All random choices follow from the seed and the document's place in the data, so they repeat whenever it is read. The
format is that of arXiv 2207.14255 (prefix, suffix, middle), with the names that Qwen and llama.cpp use.
"""
import hashlib
import re
import struct
from dataclasses import dataclass
from functools import cache

from nanochat.common import BadInput
from nanochat.data.tokenizer import FIM_TOKENS, Infill, joined

KINDS = ("random", "line", "structure")  # kinds of middles, equally frequent
MIN_SEQ_LEN = 64  # shorter rows have no room for a middle with the text around it
SURPLUS = 1.22  # length of the parts of a long document, in rows
MAX_LINES = 30  # of a middle by lines
MAX_STRUCTURE_CHARS = 1500  # of a middle by structure; also how far the scanner reads for its end

# Estimates the characters of C++ in a token.
SAMPLE = """
  // Returns the number of elements that are not equal to `value`, or -1 if the range is empty.
  template <typename Iterator, typename T>
  int64_t CountOthers(Iterator begin, Iterator end, const T& value) {
    if (begin == end) {
      return -1;
    }
    int64_t count = 0;
    for (auto it = begin; it != end; ++it) {
      count += static_cast<int64_t>(*it != value);
    }
    return count;
  }

  std::shared_ptr<Node> node_ = nullptr;
  std::vector<std::string> names_{"first", "second"};

  void SetOptions(const std::string& name, uint32_t flags = 0x1F, bool is_default = false);
  virtual ~Container() override;
"""

_EIGHT_INTEGERS = struct.Struct("<8Q")


@dataclass(frozen=True)
class Infilling:
    """Which documents to rewrite, and how. rate: the share of the documents; kinds: of their middles."""
    rate: float
    seed: int
    kinds: tuple = KINDS

    def encode(self, lane, group, tokenizer, row_tokens):
        """Returns a list for each (ref, TextPiece) of `group`: the tokens of its parts, as memoryviews of uint32 that
        begin with BOS. It is empty if the text is not rewritten, as no piece of a document that is read in pieces is.
        ref: the place of the text in the lane with this number.
        """
        # Right after a call of the tokenizer, Python takes 1.4 times as long. So all texts are rewritten
        # first, and then one call encodes them.
        part_chars = part_chars_for(tokenizer, row_tokens)
        rewritten = [self._rewrite(lane, ref, piece, part_chars) for ref, piece in group]
        encoded = iter(tokenizer.encode_infills([part for parts in rewritten for part in parts]))
        found = []
        for parts in rewritten:
            documents = []
            for _ in parts:
                documents += fit_into_row(*next(encoded), row_tokens)
            found.append(documents)
        return found

    def _rewrite(self, lane, ref, piece, part_chars):
        """Returns a list of Infills, the parts of a TextPiece, or none if it is not to be rewritten."""
        if ref[2] or not piece.is_last:
            return []
        place = f"{self.seed},{lane},{ref[0]},{ref[1]},{ref[2]}"
        below = draws(place)
        if below(1 << 53) >= self.rate * (1 << 53):
            return []
        # Malformed bytes become lone surrogates, and then bytes again.
        text = piece.text
        characters = text if isinstance(text, str) else text.decode("utf-8", "surrogateescape")
        parts = []
        begin = 0
        while begin < len(characters):
            if begin:
                below = draws(f"{place},{begin}")
            end = begin + part_chars
            if end < len(characters):
                end = characters.rfind("\n", begin, end) + 1 or end
            part = characters[begin:end]
            first, last = choose_middle(part, self.kinds, below)
            parts.append(Infill(part[:first], part[last:], part[first:last]))
            begin = end
        return parts


# Most parts of a long document are then a little longer than a row, and cut to its length: documents a little shorter
# than a row leave gaps that are hard to fill.
@cache
def part_chars_for(tokenizer, row_tokens):
    """Returns the characters of a part of a document that is longer than a row."""
    return int(SURPLUS * row_tokens * len(SAMPLE) / len(tokenizer.encode(SAMPLE)))


def check_fim(flag, tokenizer, seq_len):
    """Raises BadInput, which names `flag`, if a tokenizer or the length of rows does not fit fill in the middle."""
    for name in FIM_TOKENS:
        if name not in tokenizer.special_tokens:
            raise BadInput(f"{flag} needs a tokenizer with the special token {name}, which this one lacks: leave it "
                           "out, or give another --tokenizer_dir")
    if seq_len < MIN_SEQ_LEN:
        raise BadInput(f"{flag} needs rows with room for a middle and the text around it, and --max_seq_len={seq_len} "
                       f"is less than {MIN_SEQ_LEN}: give at least that, or leave it out")


def fit_into_row(tokens, prefix, suffix, row_tokens):
    """Returns a list of documents with the text of one that may be longer than a row. prefix, suffix: their slices of
    the tokens (see encode_infills)."""
    # Surplus tokens at the end of the suffix, or else at the beginning of the prefix, become a document of their own,
    # from left to right. If both are too short for that, the whole text becomes one.
    excess = len(tokens) - row_tokens
    if excess <= 0:
        return [joined((tokens,))]
    bos = tokens[:1]
    middle = slice(max(prefix.stop, suffix.stop) + 1, -1)
    cut = suffix.stop - excess  # the suffix ends here
    rest = prefix.start + excess  # the prefix begins here
    if cut >= suffix.start:
        parts = [(tokens[:cut], tokens[suffix.stop:]), (bos, tokens[cut:suffix.stop])]
    elif rest <= prefix.stop:
        parts = [(bos, tokens[prefix.start:rest]), (tokens[:prefix.start], tokens[rest:])]
    else:
        parts = [(bos, tokens[prefix], tokens[middle], tokens[suffix])]
    return [joined(part) for part in parts]


def draws(key):
    """Returns a function below(n), to be called up to eight times, that returns random integers from 0 to n - 1. They
    follow from the text `key`."""
    # A hash of 64 bytes is eight words, so no document needs a generator. The bits of word × n above the lowest 64 are
    # uniform from 0 to n - 1, except for n / 2^64.
    words = iter(_EIGHT_INTEGERS.unpack(hashlib.blake2b(key.encode()).digest()))
    return lambda n: next(words) * n >> 64


# Middles


def choose_middle(text, kinds, below):
    """Returns (begin, end) of a random middle of `text`, of a random one of `kinds`; below: as `draws` returns it. A
    text without structures gets a middle by lines."""
    kind = kinds[below(len(kinds))]
    if kind == "random":
        return tuple(sorted((below(len(text) + 1), below(len(text) + 1))))
    found = choose_structure(text, below) if kind == "structure" else None
    return found or choose_lines(text, below)


def choose_lines(text, below):
    """Returns (begin, end) of 1 to 30 lines, short middles more often than long ones."""
    # It begins at a line's start or, as often, inside a line, and ends before the end of a line. A middle of white
    # space extends to the next line with text: alone it would teach that empty lines stay empty.
    begin = below(len(text) + 1)
    if below(2):
        begin = text.rfind("\n", 0, begin) + 1
    # 31^u with u from 0 to 1: the logarithm of the number of lines is uniform.
    lines = int((MAX_LINES + 1) ** (below(1 << 53) / (1 << 53)))
    end = begin - 1
    while end < len(text) and (lines > 0 or not text[begin:end].strip()):
        end = text.find("\n", end + 1)
        lines -= 1
        if end < 0:
            end = len(text)
    return begin, end - (end > begin and text.startswith("\r\n", end - 1))


def choose_structure(text, below):
    """Returns (begin, end) of the first body, argument list or statement, whichever is drawn, after a random line start
    of C++. If there is none, it tries the others in turn; None if it finds nothing."""
    count = len(STRUCTURES)
    choice = below(count)
    begin = text.rfind("\n", 0, below(len(text) + 1)) + 1
    for find, *arguments in (STRUCTURES * 2)[choice:choice + count]:
        if found := find(text, begin, *arguments):
            return found
    return None


# The scanner skips comments, strings and directives, and stops at brackets and semicolons. Each alternative begins with
# a literal character: Python then looks for these characters before it tries an alternative.
CODE_TOKEN = re.compile(r"""
    /(?:/[^\n]*|\*.*?(?:\*/|\Z))
    | R"([^()\\\s]{0,16})\(.*?(?:\)\1"|\Z)
    | "(?:[^"\\\n]|\\.)*"?
    | '(?<!\w')(?:[^'\\\n]|\\.)*'?  # 1'000 is a number
    | \#(?:[^\n\\]|\\.)*
    | \{ | \} | \( | \) | ;""", re.DOTALL | re.VERBOSE)


# The pair that leaves no bracket open is the outermost. If the scan comes to its limit before that, the last pair that
# closed is taken: an inner pair closes before those around it.
def find_brackets(text, begin, pair):
    """Returns (begin, end) of the text inside the next two matching brackets; pair: such as "{}". If that is too long,
    it is the outermost pair inside, or None."""
    opening, closing = pair
    first = _code_line(text, text.find(opening, begin))
    if first is None:
        return None
    opened = []  # where the text inside each open bracket begins
    found = None
    for match in CODE_TOKEN.finditer(text, first, first + MAX_STRUCTURE_CHARS):
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


# `first` is where a statement may begin: behind the last brace, and outside of parentheses behind the last semicolon,
# comment or directive. White space alone before a semicolon is no statement.
def find_statement(text, begin):
    """Returns (begin, end) of the next statement with its semicolon, or None."""
    first = _code_line(text, begin)
    if first is None:
        return None
    depth = 0  # of parentheses: those of `for` have semicolons inside
    for match in CODE_TOKEN.finditer(text, first, first + MAX_STRUCTURE_CHARS):
        token = match[0]
        if token == "(":
            depth += 1
        elif token == ")":
            depth = max(0, depth - 1)
        elif not depth and token == ";" and (statement := text[first:match.start()].lstrip()):
            return match.start() - len(statement), match.end()
        elif token in "{}" or not depth and token[0] in ";/#":
            first = match.end()
            depth = 0
    return None


def _code_line(text, position):
    """Returns the beginning of the line of `position`, or None if position is negative or the line seems to be inside a
    comment."""
    if position < 0:
        return None
    first = text.rfind("\n", 0, position) + 1
    return None if text[first:position + 1].lstrip().startswith("*") else first


# Groups of directives are no structure here: lines choose them as often as they stand in files. When they were one of
# four, a third of the middles at a line's start began with #, and models wrote #endif into functions.
STRUCTURES = ((find_brackets, "{}"), (find_brackets, "()"), (find_statement,))
