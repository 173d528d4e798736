"""Completes text at a cursor: makes a prompt of the text around it, and shapes the model's text for an editor."""
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from nanochat.infer.engine import Engine
from nanochat.infer.load import load_model
from nanochat.infer.prompt import fills_gaps, gap_prompt
from nanochat.infer.sample import GREEDY_BELOW, Sampling, ignore, never_stop, overlaps

COPIED = (64, 48, 32, 24, 16, 12, 8, 6)  # characters before the cursor that must stand elsewhere in the file
LONGEST_COPY = 400  # characters: a longer line is data
_REST_OF_LINE = re.compile(r"(\r?\n)?[^\r\n]*")  # at a line's end, the next line


@dataclass(frozen=True)
class Options:
    """How a completion is generated."""
    sampling: Sampling
    min_indent: int = 0  # the text ends before a line that is indented less; 0: at no line
    max_ms: float | None = None  # after so many milliseconds of generation, the text ends with its line


@dataclass(frozen=True)
class Completion:
    texts: list  # one for each sample
    reasons: list  # why each ended: "end" (of the middle or document), "stop" or "length"
    timings: object  # the engine's
    is_cut: bool  # whether the prefix or the suffix did not fit


@dataclass
class Completer:
    """Completes with one engine. Only one thread may use it at a time."""
    engine: object
    fim: bool  # whether the model was trained to fill in the middle; if not, it reads nothing after the cursor
    extra_tokens: int = 0  # most tokens of other files
    copies: bool = True  # offers what follows the text before the cursor where it stands elsewhere in the file
    windows: dict = field(default_factory=dict)  # where the last prompts were cut

    def complete(self, prefix, suffix, extra, options, on_text=ignore, keep_going=never_stop):
        """Returns a Completion of the text between `prefix` and `suffix`.

        suffix: None to continue the prefix. extra: (path, text) of other files, the nearest last. With
        options.sampling.max_tokens = 0, it only reads the prompt, so that the next completion begins sooner.
        on_text(sample, text) gets each new piece of text. keep_going() is asked before every token; once it returns
        False, the completion ends.
        """
        room = self.engine.model.config.max_seq_len - max(options.sampling.max_tokens, 1)
        newline = newline_at(prefix, suffix or "")
        shapers = [Shaper(suffix or "", options, partial(on_text, i), newline)
                   for i in range(options.sampling.num_samples)]
        prefix = with_lf(prefix)
        suffix = None if suffix is None else with_lf(suffix)
        extra = [(path, with_lf(text)) for path, text in extra]
        sampling = replace(options.sampling, stop=tuple(map(with_lf, options.sampling.stop or ())))
        prompt = gap_prompt(self.engine.tokenizer, prefix, suffix if self.fim else None, room, extra, self.extra_tokens,
                            self.windows)

        def add(i, text):
            shapers[i].add(text)

        def goes_on():
            return keep_going() and not all(shaper.ended for shaper in shapers)

        copy = "", 0
        if self.copies and suffix is not None and sampling.temperature < GREEDY_BELOW:
            copy = self._copy(prefix, suffix, extra, options)
        samples = self.engine.completions(prompt.parts, sampling, add, keep_going=goes_on, copy=copy)
        # The engine says "stopped" for either way to stop it: a text whose shaper has ended is whole, another was cut.
        reasons = []
        for sample, shaper in zip(samples, shapers, strict=True):
            if shaper.ended:
                reasons.append("end")
            elif sample.reason == "stopped":
                reasons.append("length")
            else:
                reasons.append(sample.reason)
        return Completion([shaper.finish() for shaper in shapers], reasons, self.engine.timings, prompt.is_cut)

    def _copy(self, prefix, suffix, extra, options):
        """Returns a copy for the gap, and the nats by which the model may find a token of it unlikely; or ("", 0)."""
        text, length = copied(prefix, suffix, extra)
        if len(text) > LONGEST_COPY or suffix.startswith(text):
            return "", 0
        shaper = Shaper(suffix, options, ignore)
        shaper.add(text)
        text = shaper.finish()
        # Each character that agrees lets tokens be e times unlikelier.
        return (text, length) if text.strip() else ("", 0)


def copied(before, after, others=()):
    """Returns what follows the last characters of `before` where most of them stand once more, up to the end of the
    line, or of the next one; and how many these are. It looks into `before` and `after`, then into (path, text) of
    other files, the last one first. Returns ("", 0) if they stand nowhere."""
    # The file itself comes first, even with few characters that agree, and in it the longest end: what follows is the
    # likelier the same. The search in `before` stops one character early, or the end would find itself.
    for texts in ((before, after), [text for _, text in reversed(others)]):
        for length in COPIED:
            end = before[-length:]
            for text in texts:
                at = before.rfind(end, 0, len(before) - 1) if text is before else text.find(end)
                if at != -1 and len(end) == length:
                    return _REST_OF_LINE.match(text, at + length)[0], length
    return "", 0


def load_completer(of_model, path, extra_tokens, dist):
    """Returns a Completer of the checkpoint at `path`, whose programs are compiled. of_model: ModelFlags."""
    model, tokenizer, meta = load_model(path, dist, tokenizer_dir=of_model.tokenizer_dir, quantize=of_model.quantize)
    completer = Completer(Engine(model, tokenizer, dist), fills_gaps(meta), extra_tokens)
    if not completer.fim:
        print(f"{path} was trained without --fim_rate: completions ignore the text after the cursor", file=sys.stderr)
    completer.complete("int main() {\n", "}\n", [], Options(Sampling(max_tokens=1, temperature=0)))
    return completer


# What an editor can insert


def with_lf(text):
    """Returns `text` with LF at the ends of its lines, as the model and the shaping of its text know them."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def newline_at(before, after):
    """Returns what ends the lines at a cursor between two texts: LF, CRLF or CR."""
    found = re.findall(r"\r\n|\n|\r", before)[-1:] or re.findall(r"\r\n|\n|\r", after)[:1]
    return found[0] if found else "\n"


@dataclass
class Shaper:
    """The text of one sample for the editor. It ends with its block, and does not repeat the text after the cursor."""
    suffix: str
    options: Options
    on_text: Callable
    newline: str = "\n"  # that its text gets for the editor
    text: str = ""
    num_shown: int = 0
    begin: float | None = None  # when the first text came
    ended: bool = False

    def __post_init__(self):
        self.suffix = with_lf(self.suffix)

    def add(self, text):
        """Adds the model's new text, unless the sample has ended."""
        if self.ended:
            return
        self.begin = self.begin or time.monotonic()
        self.text += text.replace("\r", "")
        self._end_at(end_of_block(self.text, self.options.min_indent))
        max_ms = self.options.max_ms
        if not self.ended and max_ms is not None and (time.monotonic() - self.begin) * 1000 > max_ms:
            # After the time limit, the text ends with a line, but not before the text that the editor already shows.
            line_end = self.text.rfind("\n")
            if line_end > 0:
                self._end_at(max(line_end, self.num_shown))
        repeated = self.text[len(without_repetition(self.text, self.suffix)):]
        if repeated.rpartition("\n")[0].strip():  # a whole line: the model has reached the suffix
            self.ended = True
        elif not self.ended:
            self._show_up_to(len(self.text) - self._len_unsettled())

    def _end_at(self, end):
        if end is not None:
            self.text = self.text[:end]
            self.ended = True

    def finish(self):
        """Ends the sample and returns its text."""
        self.ended = True
        self.text = without_repetition(self.text, self.suffix)
        self._show_up_to(len(self.text))
        return self._for_editor(self.text)

    def _len_unsettled(self):
        """Returns how many characters at the end may yet repeat the suffix, or begin a line that is indented less."""
        unsettled = max(overlaps(self.text, self.suffix), default=0)
        if self.options.min_indent:  # before such a line, the text ends without its white space
            end = self.text.rstrip()
            unsettled = max(unsettled, len(self.text) - len(end) + max(overlaps(end, self.suffix), default=0))
        return unsettled

    def _show_up_to(self, length):
        if length > self.num_shown:
            self.on_text(self._for_editor(self.text[self.num_shown:length]))
            self.num_shown = length

    def _for_editor(self, text):
        return text.replace("\n", self.newline)


def end_of_block(text, min_indent):
    """Returns where `text` ends before a line, not its first, that is indented by fewer than `min_indent` characters,
    or None. Blank lines do not count, nor does a last line of white space, which may grow."""
    start = text.find("\n")
    while start != -1 and min_indent:
        line = text[start + 1:].partition("\n")[0]
        if line.strip() and len(line) - len(line.lstrip(" \t")) < min_indent:
            return len(text[:start].rstrip())
        start = text.find("\n", start + 1)
    return None


# An apparent repetition stays if it begins or ends inside a word, or closes a bracket of the text: in `f(|)`, with the
# cursor at |, `g(x)` is whole, and `g(x))` repeats a bracket.
def without_repetition(text, suffix):
    """Returns `text` without an end that repeats the beginning of `suffix`."""
    for length in reversed(overlaps(text, suffix)):
        rest = text[:-length]
        cuts_word = is_word(rest[-1:] + suffix[:1]) or is_word(suffix[length - 1:length + 1])
        if not cuts_word and num_unclosed(rest) == num_unclosed(text):
            return rest
    return text


def is_word(pair):
    return len(pair) == 2 and all(character.isalnum() or character == "_" for character in pair)


def num_unclosed(text):
    """Returns the number of brackets that `text` leaves open, those in strings and comments included."""
    depth = 0
    for character in text:
        if character in "([{":
            depth += 1
        elif character in ")]}" and depth:
            depth -= 1
    return depth
