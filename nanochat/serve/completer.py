"""Completes text at a cursor: what stands before and after it becomes a prompt for a gap, and the model's text becomes
what an editor inserts."""
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from nanochat.infer.prompt import gap_prompt
from nanochat.infer.sample import Sampling, ignore, never_stop


@dataclass(frozen=True)
class Options:
    """How a completion is generated."""
    sampling: Sampling
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
class Completer:
    """Completes with one engine. Only one thread may use it at a time."""
    engine: object
    fim: bool  # whether the model was trained to fill in the middle; else it reads nothing after the cursor
    extra_tokens: int = 0  # so many tokens of other files may stand before the prefix where it leaves room
    windows: dict = field(default_factory=dict)  # where the last prompts were cut

    @property
    def context(self):
        return self.engine.model.config.max_seq_len

    def complete(self, prefix, suffix, extra, options, on_text=ignore, keep_going=never_stop):
        """Returns a Completion of the text between `prefix` and `suffix`.

        suffix: None if the end of the prefix is only to be continued, and nothing is known of what follows. extra:
        texts of other files. The number of tokens is cut to half of the context; 0 only reads the prompt, so that the
        next completion begins sooner. on_text(sample, text) is called with each new piece of text. keep_going() is
        asked before every token; once it returns False, what is there is returned.
        """
        num_samples = options.sampling.num_samples
        is_warm_up = options.sampling.max_tokens == 0
        max_tokens = max(1, min(options.sampling.max_tokens, self.context // 2))
        prompt = gap_prompt(self.engine.tokenizer, prefix, suffix if self.fim else None, self.context - max_tokens,
                            extra, self.extra_tokens, self.windows)
        shapers = [Shaper(suffix or "", options, partial(on_text, i)) for i in range(num_samples)]

        def add(i, text):
            shapers[i].add(text)

        def goes_on():
            return keep_going() and not all(shaper.ended for shaper in shapers)

        samples = self.engine.completions(prompt.parts, replace(options.sampling, max_tokens=max_tokens), on_text=add,
                                          keep_going=goes_on)
        reasons = [reason_of(sample, shaper) for sample, shaper in zip(samples, shapers, strict=True)]
        if is_warm_up:
            texts = [""] * num_samples
            num_tokens = 0
        else:
            texts = [shaper.finish() for shaper in shapers]
            num_tokens = sum(sample.num_tokens for sample in samples)
        return Completion(texts, reasons, num_tokens, replace(self.engine.timings), prompt.is_cut)


def reason_of(sample, shaper):
    """Returns why a sample ended, as a Completion says it."""
    if shaper.ended:
        return "end"
    return "length" if sample.reason == "stopped" else sample.reason


# -----------------------------------------------------------------------------
# What an editor can insert


@dataclass
class Shaper:
    """The text of one sample on its way to the editor. It ends where the indentation does, and does not repeat what
    already stands after the cursor."""
    suffix: str
    options: Options
    on_text: Callable
    text: str = ""
    num_shown: int = 0
    begin: float | None = None  # when the first text came
    ended: bool = False

    def add(self, text):
        """Adds what the model has written since the last call. After the end it is ignored."""
        if self.ended:
            return
        self.begin = self.begin or time.monotonic()
        self.text += text
        self._end_at(end_of_block(self.text, self.options.min_indent))
        if not self.ended and self._is_late():
            # After the time limit, the text ends with a line, but not before what the editor has been shown already.
            line_end = self.text.rfind("\n")
            self._end_at(max(line_end, self.num_shown) if line_end > 0 else None)
        repeated = self.text[len(without_repetition(self.text, self.suffix)):]
        if any(line.strip() for line in repeated.split("\n")[:-1]):  # a whole line: the model writes on in the suffix
            self.ended = True
        elif not self.ended:
            self._show_up_to(len(self.text) - self._len_unsettled())

    def _end_at(self, end):
        if end is not None:
            self.text = self.text[:end]
            self.ended = True

    def _is_late(self):
        max_ms = self.options.max_ms
        return max_ms is not None and (time.monotonic() - self.begin) * 1000 > max_ms

    def finish(self):
        """Returns the whole text."""
        self.ended = True
        self.text = without_repetition(self.text, self.suffix)
        self._show_up_to(len(self.text))
        return self.text

    def _len_unsettled(self):
        """Returns how many characters at the end may still turn out to be the suffix, or the start of a line that is
        indented less."""
        unsettled = max(overlaps(self.text, self.suffix), default=0)
        if self.options.min_indent:
            blank = len(self.text) - len(self.text.rstrip(" \t\r\n"))
            unsettled = max(unsettled, blank)
        return unsettled

    def _show_up_to(self, length):
        if length > self.num_shown:
            self.on_text(self.text[self.num_shown:length])
            self.num_shown = length


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


# What looks like a repetition stays if it begins or ends inside a word, or closes a bracket that the text opens: in
# `f(|)`, where | is the cursor, `g(x)` is whole, and `g(x))` is not.
def without_repetition(text, suffix):
    """Returns `text` without an end that repeats the beginning of `suffix`."""
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
