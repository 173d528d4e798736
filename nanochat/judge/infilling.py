"""Makes tasks of filling a gap: a text from which a span was cut, which a model is to write again.

The texts are held-out documents, or the solutions of problems with tests, as HumanEval-Infilling does it (Bavarian et
al., arXiv 2207.14255). The same texts and seed make the same tasks, whatever the order of the texts.
"""
import hashlib
import random
import re
from dataclasses import dataclass

from nanochat.data.shards import require_files, whole_texts

DOCUMENT_KINDS = ("single line", "several lines", "random span", "block", "arguments", "condition")
FUNCTION_KINDS = ("single line", "several lines")
ONE_LINE_KINDS = ("single line", "arguments", "condition")
MIN_DOCUMENT_CHARACTERS, MAX_DOCUMENT_CHARACTERS = 500, 50_000
MAX_SPAN_CHARACTERS = 800
MAX_LINES = 8

# Brackets, and what may contain brackets that are none. A number comes first because of the quotes in 1'000.
CODE_TOKEN = re.compile(r"""//[^\n]* | /\*.*?\*/ | R"(\w*)\(.*?\)\1" | "(?:\\.|[^"\\\n])*" | \d[\w']* |
                        '(?:\\.|[^'\\\n])*' | [(){}]""", re.VERBOSE | re.DOTALL)
_CALL = re.compile(r"(\w+)\s*$")
_NO_CALL = {"if", "while", "for", "switch", "return", "catch", "sizeof", "alignof", "decltype", "defined"}


@dataclass(frozen=True)
class Task:
    name: str
    kind: str
    prefix: str
    middle: str  # what was cut
    suffix: str
    problem: str | None = None  # the name of the problem whose tests decide


def document_tasks(documents, tasks_per_kind, seed):
    """Returns up to `tasks_per_kind` Tasks of each of DOCUMENT_KINDS, at most one of a kind from each document."""
    tasks = {kind: [] for kind in DOCUMENT_KINDS}
    for key, text in sorted((_key(seed, text), text) for text in documents):
        rng = random.Random(key)
        for kind in DOCUMENT_KINDS:
            found = spans(text, kind) if kind != "random span" else [_random_span(text, rng)]
            if found and len(tasks[kind]) < tasks_per_kind:
                tasks[kind].append(_cut(text, *rng.choice(found), kind))
        if all(len(found) == tasks_per_kind for found in tasks.values()):
            break
    return [task for found in tasks.values() for task in found]


def function_tasks(problems, tasks_per_kind, seed):
    """Returns up to `tasks_per_kind` Tasks of each of FUNCTION_KINDS, cut from the solutions of `problems`."""
    tasks = []
    for kind in FUNCTION_KINDS:
        found = [_cut(problem.prompt + problem.solution, begin + len(problem.prompt), end + len(problem.prompt), kind,
                      problem.name) for problem in problems if problem.solution
                 for begin, end in spans(problem.solution, kind)]
        tasks += sorted(found, key=lambda task: _key(seed, task.name))[:tasks_per_kind]
    return tasks


def read_documents(shards):
    """Yields the texts of Shards that are neither very short nor very long."""
    require_files(shards, "finding gaps")
    yield from (text for text in whole_texts(shards) if MIN_DOCUMENT_CHARACTERS <= len(text) <= MAX_DOCUMENT_CHARACTERS)


def _key(seed, text):
    return hashlib.blake2b(f"{seed}:{text}".encode(errors="replace"), digest_size=8).hexdigest()


def _cut(text, begin, end, kind, problem=None):
    prefix, middle, suffix = text[:begin], text[begin:end], text[end:]
    parts = "\0".join([kind, prefix, middle, suffix])
    name = hashlib.blake2b(parts.encode(errors="replace"), digest_size=8).hexdigest()
    return Task(f"{problem}/{name[:6]}" if problem else name, kind, prefix, middle, suffix, problem)


def _random_span(text, rng):
    begin = rng.randrange(len(text))
    return begin, min(len(text), begin + rng.randint(5, 200))


def spans(text, kind):
    """Returns the (begin, end) of all spans of this kind in `text`: whole lines without the last one's end, or what is
    between two brackets."""
    if kind == "single line":
        return [(match.start(), match.end()) for match in re.finditer(r"^[^\n]*\w[^\n]*$", text, re.MULTILINE)
                if len(match[0].strip()) >= 5 and len(match[0]) <= MAX_SPAN_CHARACTERS]
    if kind == "several lines":
        lines = [(match.start(), match.end()) for match in re.finditer(r"^.*\S.*$", text, re.MULTILINE)]
        return [(lines[i][0], lines[i + count - 1][1]) for count in range(2, MAX_LINES + 1)
                for i in range(len(lines) - count + 1) if lines[i + count - 1][1] - lines[i][0] <= MAX_SPAN_CHARACTERS]
    opening = "{" if kind == "block" else "("
    return [(begin, end) for begin, end in _brackets(text, opening)
            if text[begin:end].strip() and end - begin <= MAX_SPAN_CHARACTERS and _is(kind, text, begin, end)]


def _is(kind, text, begin, end):
    """Returns whether the text between two brackets is of this kind."""
    if kind == "block":
        return "\n" in text[begin:end]
    before = _CALL.search(text, max(0, begin - 80), begin - 1)
    if not before or "\n" in text[begin:end]:
        return False
    return before[1] in ("if", "while") if kind == "condition" else before[1] not in _NO_CALL


def _brackets(text, opening):
    """Returns the (begin, end) of what is inside each pair of matching brackets that opens with `opening`."""
    found, open_brackets = [], []
    for match in CODE_TOKEN.finditer(text):
        if match[0] in ("(", "{"):
            open_brackets.append((match[0], match.end()))
        elif match[0] in (")", "}") and open_brackets:
            bracket, begin = open_brackets.pop()
            if (bracket == "(") != (match[0] == ")"):
                open_brackets.clear()  # a macro's bracket: begin again
            elif bracket == opening:
                found.append((begin, match.start()))
    return sorted(found)
