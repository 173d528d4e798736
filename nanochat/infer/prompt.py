"""Prompts: special tokens, the prompt for a gap, and healing the end of a prompt.

A gap is the missing text between two texts, as at the cursor of an editor. The prompt for it is

    BOS other files <|fim_prefix|> the lines before <|fim_suffix|> the text after <|fim_middle|> the line at the gap

and the completion continues the line at the gap. A public model that lends its tokens gets

    BOS other files <|fim_suffix|> the text after <|fim_prefix|> the text before

because it continues text well, and a <|fim_middle|> that it has hardly learned makes it worse (dev/DECISIONS.md).
Training shows no other files: a model that only reads them when it completes was better (dev/DECISIONS.md). Editors,
the evaluation of code, the search and the benchmarks all use gap_prompt.
"""
from bisect import bisect_left, bisect_right
from dataclasses import dataclass

from nanochat.data.fim import CODE_TOKEN
from nanochat.data.tokenizer import FIM_TOKENS

LONGEST_TOKEN = 16  # characters. Few tokens have more, so a text is cut to this many per token before tokenization.
LEN_OF_BEGIN = 200  # characters by which a Window recognises its last cut
MAX_TAKEN_BACK = 3  # tokens, by healing


@dataclass(frozen=True)
class Special:
    """A special token in a prompt, such as Special("<|fim_prefix|>")."""
    name: str


BOS = Special("<|bos|>")
PREFIX, SUFFIX, MIDDLE, FILE_SEP = map(Special, FIM_TOKENS)


def encode_prompt(tokenizer, parts):
    """Returns the ids of a prompt, a list of texts and Specials, and how many of the last ids are text."""
    ids = []
    num_last = 0
    for part in parts:
        if isinstance(part, Special):
            ids.append(tokenizer.special(part.name))
            num_last = 0
        else:
            new = tokenizer.encode(part)
            ids += new
            num_last = len(new)
    return ids, num_last


def fills_gaps(meta):
    """Returns whether the model of a Meta was trained to fill gaps: with --fim_rate, or before its import. Qwen's plain
    models have the tokens for gaps, too, but only those called Coder were trained with them."""
    source = meta.source
    is_coder = source and source["model_type"].startswith("qwen") and "coder" in source["model"].lower()
    return meta.flags.get("fim_rate", 0) > 0 or bool(is_coder)


@dataclass(frozen=True)
class GapPrompt:
    """The prompt for a gap, cut to the room that the model has."""
    head: list  # texts and Specials, up to `line`
    line: str  # what the completion continues: the beginning of that line, or `before` if the suffix came first
    before: str  # the part of the prefix that is read, with `line`
    is_cut: bool  # the prefix or the suffix did not fit

    @property
    def parts(self):
        """The prompt of Engine.completions."""
        return [*self.head, self.line] if self.line else self.head


# The line at the gap comes last: while it is typed, the model reads only its end again, and training shows middles that
# begin with a line. Other files get at most a quarter of the room, and the suffix a quarter of the rest, as in
# llama.cpp's server; prefix and suffix each get the room that the other leaves.
def gap_prompt(tokenizer, prefix, suffix, room, extra=(), extra_tokens=0, windows=None):
    """Returns the GapPrompt for the gap between `prefix` and `suffix`, of at most `room` tokens.

    suffix: None if it is unknown, or the model was not trained to fill gaps: it then reads the prefix alone. extra:
    (path, text) of other files, the nearest last, of which at most `extra_tokens` tokens are read. windows: a dict that
    remembers cuts and where the gap began between calls, as text is typed.
    """
    if windows is None:
        windows = {}
    room -= 4  # the special tokens

    def last(name, text, num_tokens):
        return windows.setdefault(name, Window(tokenizer)).last(text, num_tokens)

    def count(text):
        return len(tokenizer.encode(text))

    if suffix is None:
        kept = last("document", prefix, room)
        return GapPrompt([BOS], kept, kept, len(kept) < len(prefix))
    line_begin = prefix.rfind("\n") + 1
    begun, old_suffix = windows.get("gap", ("", None))
    # While lines are typed, they stay behind the suffix, as the begun middle, so that the suffix is not read again.
    if suffix == old_suffix and prefix.startswith(begun) and count(prefix[len(begun):]) <= room // 8:
        line_begin = len(begun)
    windows["gap"] = prefix[:line_begin], suffix
    line = last("line", prefix[line_begin:], room // 8)  # an eighth is many more tokens than a line has
    before = prefix[:len(prefix) - len(line)]
    room -= room // 8
    others, num_others = other_files(tokenizer, extra, min(extra_tokens, room // 4))
    room -= num_others
    after = first_tokens(tokenizer, suffix, room // 4)
    kept = last("prefix", before, room - count(after))
    if kept == before:  # the prefix leaves room
        after = first_tokens(tokenizer, suffix, room - count(kept))
    read = kept + line
    if tokenizer.suffix_first:
        head = [part for part in (BOS, *others, SUFFIX, after, PREFIX) if part]
        line = read
    else:
        head = [part for part in (BOS, *others, PREFIX, kept, SUFFIX, after, MIDDLE) if part]
    return GapPrompt(head, line, read, len(kept) < len(before) or len(after) < len(suffix))


def other_files(tokenizer, extra, most):
    """Returns a list of texts and Specials for the last (path, text) of `extra`, and the number of their tokens, which
    is at most `most`. The end of the first text may be cut off."""
    parts = []
    left = most
    for path, text in reversed(extra):
        if left <= 1:
            break
        text = first_tokens(tokenizer, " ".join(path.splitlines()) + "\n" + condensed(text), left - 1)
        if text.count("\n") > 1:  # more than the path
            parts = [FILE_SEP, text, *parts]
            left -= 1 + len(tokenizer.encode(text))
    return parts, most - left


def condensed(text):
    """Returns C++ without comments and blank lines."""
    without = CODE_TOKEN.sub(lambda match: "" if match[0].startswith(("//", "/*")) else match[0], text)
    return "".join(f"{line.rstrip()}\n" for line in without.split("\n") if line.strip())


@dataclass
class Window:
    """Cuts growing texts to their last tokens, and keeps the place of the cut as long as it can. If the cut moved with
    every new line, the model would have to read everything after it again."""
    tokenizer: object
    begin: str = ""  # of the text that was kept last time, if it was cut

    def last(self, text, num_tokens):
        """Returns the last part of `text`, from a line's start where possible, with at most `num_tokens` tokens."""
        if num_tokens <= 0:
            return ""
        text = text[-num_tokens * LONGEST_TOKEN:]
        # The last cut holds as long as the text after it fits, and fills at least half of the room.
        at = text.find(self.begin) if self.begin else -1
        if at > 0 and num_tokens // 2 <= len(self.tokenizer.encode(text[at:])) <= num_tokens:
            return text[at:]
        self.begin = ""
        if len(self.tokenizer.encode(text)) > num_tokens:
            text = cut_to(self.tokenizer, text, slice(-max(num_tokens * 3 // 4, 1), None))  # leaves room for new lines
            line_start = text.find("\n") + 1
            if line_start <= len(text) // 2:
                text = text[line_start:]
            self.begin = text[:LEN_OF_BEGIN]
        return text


def first_tokens(tokenizer, text, num_tokens):
    """Returns the first part of `text`, to a line's end where possible, with at most `num_tokens` tokens."""
    if num_tokens <= 0:
        return ""
    text = text[:num_tokens * LONGEST_TOKEN]
    kept = cut_to(tokenizer, text, slice(num_tokens))
    line_end = kept.rfind("\n") + 1
    if kept != text and line_end >= len(kept) // 2:
        return kept[:line_end]
    return kept


def cut_to(tokenizer, text, part):
    """Returns the text of the slice `part` of its tokens; tokenized again, it is no longer than the slice."""
    ids = tokenizer.encode(text)
    while len(ids[part]) < len(ids):
        text = tokenizer.decode_bytes(ids[part]).decode("utf-8", "ignore")  # without half a character at the cut
        ids = tokenizer.encode(text)
    return text


# Healing: a prompt may end anywhere, in white space or inside a name. The model learned texts whose tokens are as long
# as possible. After a prompt that ends in `retu`, it hardly ever draws `rn`, because `return` is one token. So the last
# tokens of the prompt are taken back, and the first new tokens must begin with their bytes.
#
# At 1,870 random places in C++, the tokens before the place began the whole text's tokens in 19%. With up to 1, 2, 3
# and 6 tokens taken back, the whole text's tokens were possible in 77, 94, 99.1 and 99.4%.
class Vocabulary:
    """The tokens of a tokenizer, sorted, so that tokens with a common beginning are neighbours."""

    def __init__(self, tokenizer):
        self._ids = tokenizer.tokens()  # {bytes: id}, without special tokens
        self._sorted = sorted(self._ids)

    def num_taken_back(self, pieces):
        """Returns how many of the last tokens of a text a continuation could change: the largest number whose joined
        bytes begin a longer token. pieces: their bytes, a list."""
        for number in range(len(pieces), 0, -1):
            data = b"".join(pieces[-number:])
            first, end = self._range(data)
            if end - first > (data in self._ids):
                return number
        return 0

    def fitting(self, known):
        """Returns the ids of the tokens that may come next in a text that continues with the bytes `known`: those that
        begin with `known`, and those that `known` begins with."""
        first, end = self._range(known)
        shorter = [known[:length] for length in range(1, len(known))]
        return [self._ids[token] for token in [*self._sorted[first:end], *shorter] if token in self._ids]

    def _range(self, data):
        """Returns the range, in sorted order, of the tokens that begin with `data`."""
        first = bisect_left(self._sorted, data)
        return first, bisect_right(self._sorted, data, lo=first, key=lambda token: token[:len(data)])
