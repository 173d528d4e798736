"""Completes text at a cursor: what stands before and after it becomes a prompt, and the model's text becomes what an
editor inserts.

The prompt is BOS <|fim_prefix|> the lines before <|fim_suffix|> the text after <|fim_middle|> the line at the cursor.
The line at the cursor comes last, because the model then reads nothing again but the end of that line while it is
typed, and because the training shows middles that begin with a line.
"""
import time
from dataclasses import dataclass, field, replace

from nanochat.infer.engine import Special

SPECIAL_TOKENS = BOS, PREFIX, SUFFIX, MIDDLE = (
    "<|bos|>", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
LONGEST_TOKEN = 16  # characters. Few tokens have more, so a text is cut to so many per token before it is tokenized.
LEN_OF_BEGIN = 200  # characters by which a Window recognises where it cut last time


@dataclass(frozen=True)
class Options:
    """How a completion is generated; the first seven are the engine's."""
    max_tokens: int
    num_samples: int = 1
    temperature: float = 0.0
    top_k: int = 40
    top_p: float = 1.0
    stop: tuple = ()
    seed: int = 0
    min_indent: int = 0  # a line with fewer white characters in front ends the text before it; 0: none does
    max_ms: float | None = None  # after so many milliseconds of generation, the text ends with the next line


@dataclass(frozen=True)
class Completion:
    texts: list  # one for each sample
    reasons: list  # why each ended: "end" (of the middle or document), "stop" or "length"
    num_tokens: int  # generated, of all samples together
    timings: object  # the engine's
    is_cut: bool  # whether the prefix or the suffix did not fit


@dataclass
class Infiller:
    """Completes with one engine. Only one thread may use it at a time."""
    engine: object
    fim: bool  # whether the model was trained to fill in the middle; else it reads nothing after the cursor
    extra_tokens: int = 0  # so many tokens of other files may stand before the prefix where it leaves room
    windows: dict = field(default_factory=dict)

    @property
    def context(self):
        return self.engine.model.config.max_seq_len

    def complete(self, prefix, suffix, extra, options, on_text=lambda sample, text: None, keep_going=lambda: True):
        """Returns a Completion of the text between `prefix` and `suffix`.

        suffix: None if the end of the prefix is only to be continued, and nothing is known of what follows. extra:
        texts of other files. options.max_tokens is cut to half of the context; 0 only reads the prompt, so that the
        next completion begins sooner. on_text(sample, text) is called with each new piece of text. keep_going() is
        asked before every token; once it returns False, what is there is returned.
        """
        options = replace(options, max_tokens=min(options.max_tokens, self.context // 2))
        prompt, is_cut = self.prompt(prefix, suffix, extra, options.max_tokens)
        shapers = [Shaper(suffix, options, lambda text, i=i: on_text(i, text)) for i in range(options.num_samples)]
        is_warm_up = options.max_tokens == 0
        samples = self.engine.completions(
            prompt, num_samples=options.num_samples, max_tokens=max(options.max_tokens, 1),
            temperature=options.temperature, top_k=options.top_k, top_p=options.top_p, stop=options.stop,
            seed=options.seed, on_text=lambda i, text: shapers[i].add(text),
            keep_going=lambda: keep_going() and not all(shaper.ended for shaper in shapers))
        reasons = ["end" if shaper.ended else "length" if sample.reason == "stopped" else sample.reason
                   for sample, shaper in zip(samples, shapers, strict=True)]
        texts = ["" if is_warm_up else shaper.finish() for shaper in shapers]
        return Completion(texts, reasons, 0 if is_warm_up else sum(sample.num_tokens for sample in samples),
                          replace(self.engine.timings), is_cut)

    def prompt(self, prefix, suffix, extra, max_tokens):
        """Returns the engine's prompt, a list of texts and Specials, and whether text was left out of it."""
        room = self.context - max(max_tokens, 1) - len(SPECIAL_TOKENS)
        if suffix is None or not self.fim:
            kept = self._last("document", prefix, room)
            return [Special(BOS), kept], len(kept) < len(prefix)
        line_begin = prefix.rfind("\n") + 1
        line = self._last("line", prefix[line_begin:], room // 8)  # an eighth is many more tokens than a line has
        before = prefix[:len(prefix) - len(line)]
        room -= room // 8
        after = first_tokens(self.engine.tokenizer, suffix, room // 4)
        kept, others = self._last("prefix", before, room - self._count(after)), ""
        if kept == before:  # the prefix leaves room
            after = first_tokens(self.engine.tokenizer, suffix, room - self._count(kept))
            left = min(room - self._count(kept) - self._count(after), self.extra_tokens)
            others = self._last("extra", "".join(f"{text}\n" for text in extra), left)
        is_cut = len(kept) < len(before) or len(after) < len(suffix)
        parts = [Special(BOS), Special(PREFIX), others, kept, Special(SUFFIX), after, Special(MIDDLE), line]
        return [part for part in parts if part], is_cut

    def _count(self, text):
        return len(self.engine.tokenizer.encode(text))

    def _last(self, name, text, num_tokens):
        return self.windows.setdefault(name, Window(self.engine.tokenizer)).last(text, num_tokens)


# -----------------------------------------------------------------------------
# What fits


@dataclass
class Window:
    """Cuts growing texts to their last tokens, and keeps the place of the cut as long as it can.

    If the cut moved with every new line, the model would have to read everything behind it again.
    """
    tokenizer: object
    begin: str = ""  # how the text began that was kept last time

    def last(self, text, num_tokens):
        """Returns the last part of `text`, from a line's start where possible, with at most `num_tokens` tokens."""
        if num_tokens <= 0:
            return ""
        text = text[-num_tokens * LONGEST_TOKEN:]
        at = text.find(self.begin) if self.begin else -1
        if at > 0 and num_tokens // 2 <= len(self.tokenizer.encode(text[at:])) <= num_tokens:
            return text[at:]
        if len(self.tokenizer.encode(text)) > num_tokens:
            kept = cut_to(self.tokenizer, text, slice(-max(num_tokens * 3 // 4, 1), None))  # leaves room for new lines
            line_start = kept.find("\n") + 1
            text = kept[line_start:] if line_start <= len(kept) // 2 else kept
        self.begin = text[:LEN_OF_BEGIN]
        return text


def first_tokens(tokenizer, text, num_tokens):
    """Returns the first part of `text`, to a line's end where possible, with at most `num_tokens` tokens."""
    if num_tokens <= 0:
        return ""
    text = text[:num_tokens * LONGEST_TOKEN]
    kept = cut_to(tokenizer, text, slice(num_tokens))
    line_end = kept.rfind("\n") + 1
    return kept[:line_end] if kept != text and line_end >= len(kept) // 2 else kept


def cut_to(tokenizer, text, part):
    """Returns the text of this slice of its tokens, which is again no longer than the slice when it is tokenized."""
    ids = tokenizer.encode(text)
    while len(ids[part]) < len(ids):
        text = tokenizer.decode_bytes(ids[part]).decode("utf-8", "ignore")  # without half a character at the cut
        ids = tokenizer.encode(text)
    return text


# -----------------------------------------------------------------------------
# What an editor can insert


class Shaper:
    """The text of one sample on its way to the editor. It ends where the indentation does, and does not repeat what
    already stands after the cursor."""

    def __init__(self, suffix, options, on_text):
        self._suffix, self._options, self._on_text = suffix or "", options, on_text
        self._text, self._num_shown, self._begin = "", 0, None
        self.ended = False

    def add(self, text):
        """Adds what the model has written since the last call. After the end it is ignored."""
        if self.ended:
            return
        self._begin = self._begin or time.monotonic()
        self._text += text
        end = end_of_block(self._text, self._options.min_indent)
        if end is not None:
            self._text, self.ended = self._text[:end], True
        elif self._options.max_ms is not None and (time.monotonic() - self._begin) * 1000 > self._options.max_ms:
            line_end = self._text.rfind("\n")
            if line_end > 0:
                self._text, self.ended = self._text[:max(line_end, self._num_shown)], True
        repeated = self._text[len(without_repetition(self._text, self._suffix)):]
        if any(line.strip() for line in repeated.split("\n")[:-1]):  # a whole line: the model writes on in the suffix
            self.ended = True
        elif not self.ended:
            self._show_up_to(len(self._text) - self._len_unsettled())

    def finish(self):
        """Returns the whole text."""
        self.ended = True
        self._text = without_repetition(self._text, self._suffix)
        self._show_up_to(len(self._text))
        return self._text

    def _len_unsettled(self):
        """Returns how many characters at the end may still turn out to be the suffix, or the start of a line that is
        indented less."""
        repeated = max(overlaps(self._text, self._suffix), default=0)
        blank = len(self._text) - len(self._text.rstrip(" \t\r\n")) if self._options.min_indent else 0
        return max(repeated, blank)

    def _show_up_to(self, length):
        if length > self._num_shown:
            self._on_text(self._text[self._num_shown:length])
            self._num_shown = length


def end_of_block(text, min_indent):
    """Returns where the first line after the first one begins that is indented by fewer than `min_indent` white
    characters, with the line's end before it; None if there is none. Blank lines, and a last line of nothing but white
    space, which may grow, do not count."""
    start = text.find("\n")
    while start != -1 and min_indent:
        line = text[start + 1:].partition("\n")[0]
        if line.strip() and len(line) - len(line.lstrip(" \t")) < min_indent:
            return len(text[:start].rstrip())
        start = text.find("\n", start + 1)
    return None


def overlaps(text, suffix):
    """Returns the numbers of characters that are both the end of `text` and the beginning of `suffix`."""
    suffix = suffix[:len(text)]
    return [length for length in range(1, len(suffix) + 1) if text.endswith(suffix[:length])]


def without_repetition(text, suffix):
    """Returns `text` without an end that repeats the beginning of `suffix`.

    What looks like a repetition stays if it begins or ends inside a word, or closes a bracket that the text opens: in
    `f(|)`, where | is the cursor, `g(x)` is whole, and `g(x))` is not.
    """
    for length in reversed(overlaps(text, suffix)):
        rest = text[:-length]
        if (not is_word(rest[-1:] + suffix[:1]) and not is_word(suffix[length - 1:length + 1])
                and num_unclosed(rest) == num_unclosed(text)):
            return rest
    return text


def is_word(pair):
    return len(pair) == 2 and all(character.isalnum() or character == "_" for character in pair)


def num_unclosed(text):
    """Returns how many brackets `text` opens and does not close. It does not know strings and comments."""
    depth = 0
    for character in text:
        if character in "([{":
            depth += 1
        elif character in ")]}" and depth:
            depth -= 1
    return depth
