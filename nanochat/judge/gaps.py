"""Makes gaps: cuts a span out of a text, which a model shall write again.

The texts are held-out documents, or the solutions of problems with tests as in HumanEval-Infilling (Bavarian et al.,
arXiv 2207.14255). The same texts and seed make the same gaps in any order of the texts.
"""
import hashlib
import random
import re
from dataclasses import dataclass

from nanochat.data.shards import whole_texts

DOCUMENT_KINDS = ("single line", "several lines", "random span", "block", "arguments", "condition")
FUNCTION_KINDS = ("single line", "several lines")
ONE_LINE_KINDS = ("single line", "arguments", "condition")
MIN_DOCUMENT_CHARACTERS = 500
MAX_DOCUMENT_CHARACTERS = 50_000
MAX_SPAN_CHARACTERS = 800
MAX_LINES = 8

# Brackets, and what may contain other brackets: comments, texts, letters. Numbers come first, for the quotes in 1'000.
_CODE_TOKEN = re.compile(r"""//[^\n]* | /\*.*?\*/ | R"(\w*)\(.*?\)\1" | "(?:\\.|[^"\\\n])*" | \d[\w']* |
                         '(?:\\.|[^'\\\n])*' | [(){}]""", re.VERBOSE | re.DOTALL)
OPENING = {")": "(", "}": "{"}
_CALL = re.compile(r"(\w+)\s*$")
_NO_CALL = {"if", "while", "for", "switch", "return", "catch", "sizeof", "alignof", "decltype", "defined"}


@dataclass(frozen=True)
class Gap:
    name: str
    kind: str
    prefix: str
    middle: str  # cut out
    suffix: str
    problem: object = None  # whose tests decide, if there are any

    def verdict(self, judge, text):
        """Returns the Verdict of a text in the gap, or None if the whole file does not compile by itself."""
        if self.problem:
            return judge.judge(f"{self.problem.preamble}{self.prefix}{text}{self.suffix}\n", self.problem.tests)
        if not judge.check_syntax(self.prefix + self.middle + self.suffix).passed:
            return None
        return judge.check_syntax(self.prefix + text + self.suffix)


def document_gaps(texts, num_per_kind, seed):
    """Returns up to `num_per_kind` Gaps of each of DOCUMENT_KINDS, at most one of a kind from each of the `texts`."""
    gaps = {kind: [] for kind in DOCUMENT_KINDS}
    # Sorted by a hash, so the first texts are a random choice.
    for key, text in sorted((_key(seed, text), text) for text in texts):
        rng = random.Random(key)
        for kind in DOCUMENT_KINDS:
            if kind == "random span":
                begin = rng.randrange(len(text))
                found = [(begin, min(len(text), begin + rng.randint(5, 200)))]
            else:
                found = spans(text, kind)
            if found and len(gaps[kind]) < num_per_kind:
                gaps[kind].append(_cut(text, *rng.choice(found), kind))
        if all(len(found) == num_per_kind for found in gaps.values()):
            break
    return sum(gaps.values(), [])


def function_gaps(problems, num_per_kind, seed):
    """Returns up to `num_per_kind` Gaps of each of FUNCTION_KINDS, cut from the solutions of `problems`."""
    gaps = []
    for kind in FUNCTION_KINDS:
        found = []
        for problem in problems:
            if not problem.solution:
                continue
            shift = len(problem.prompt)
            for begin, end in spans(problem.solution, kind):
                text = problem.prompt + problem.solution
                found.append(_cut(text, begin + shift, end + shift, kind, problem))
        found.sort(key=lambda gap: _key(seed, gap.name))
        gaps += found[:num_per_kind]
    return gaps


def read_documents(shards):
    """Yields the texts of Shards that are neither very short nor very long."""
    for text in whole_texts(shards):
        if MIN_DOCUMENT_CHARACTERS <= len(text) <= MAX_DOCUMENT_CHARACTERS:
            yield text


def _key(seed, text):
    return hashlib.blake2b(f"{seed}:{text}".encode(errors="replace"), digest_size=8).hexdigest()


def _cut(text, begin, end, kind, problem=None):
    prefix = text[:begin]
    middle = text[begin:end]
    suffix = text[end:]
    # The separators keep apart two gaps of one text: joined without them, their parts are the same.
    parts = "\0".join([kind, prefix, middle, suffix])
    name = hashlib.blake2b(parts.encode(errors="replace"), digest_size=8).hexdigest()
    if problem:
        name = f"{problem.name}/{name[:6]}"
    return Gap(name, kind, prefix, middle, suffix, problem)


def spans(text, kind):
    """Returns the (begin, end) of all spans of this kind: lines without the last newline, or a text in brackets."""
    if kind == "single line":
        found = []
        for match in re.finditer(r"^[^\n]*\w[^\n]*$", text, re.MULTILINE):
            if len(match[0].strip()) >= 5:
                found.append(match.span())
    elif kind == "several lines":
        lines = [match.span() for match in re.finditer(r"^.*\S.*$", text, re.MULTILINE)]
        found = []
        for count in range(2, MAX_LINES + 1):
            found += [(first[0], last[1]) for first, last in zip(lines, lines[count - 1:], strict=False)]
    else:
        opening = "{" if kind == "block" else "("
        found = []
        for begin, end in sorted(brackets(text)[0]):
            if text[begin] == opening and _is(kind, text, begin + 1, end):
                found.append((begin + 1, end))
    return [(begin, end) for begin, end in found if end - begin <= MAX_SPAN_CHARACTERS]


def _is(kind, text, begin, end):
    """Returns whether the text between two brackets makes a gap of this kind."""
    inside = text[begin:end]
    if kind == "block":
        return "\n" in inside and bool(inside.strip())
    # The bracket is at begin - 1. The search for the name before it tries every word, so it gets 80 characters only.
    before = _CALL.search(text, max(0, begin - 80), begin - 1)
    if not before or "\n" in inside or not inside.strip():
        return False
    if kind == "condition":
        return before[1] in ("if", "while")
    return before[1] not in _NO_CALL


def brackets(code):
    """Returns [(begin, end)] of the pairs of brackets in `code`, and [begin] of the open ones."""
    pairs = []
    opened = []
    for match in _CODE_TOKEN.finditer(code):
        # A closing bracket that does not match the last open one is skipped: a macro's, or a model's mistake.
        if match[0] in ("(", "{"):
            opened.append(match.start())
        elif match[0] in (")", "}") and opened and code[opened[-1]] == OPENING[match[0]]:
            pairs.append((opened.pop(), match.start()))
    return pairs, opened
