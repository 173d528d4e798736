"""Makes gaps: cuts a span out of the solution of a problem, which a model shall write again, as in HumanEval-Infilling
(Bavarian et al., arXiv 2207.14255). The same problems and seed make the same gaps in any order of the problems.
"""
import hashlib
import re
from dataclasses import dataclass

from nanochat.data.fim import CODE_TOKEN

ONE_LINE = "single line"
KINDS = (ONE_LINE, "several lines")
MAX_SPAN_CHARACTERS = 800
MAX_LINES = 8

OPENING = {")": "(", "}": "{"}


@dataclass(frozen=True)
class Gap:
    name: str
    kind: str
    prefix: str
    middle: str  # cut out
    suffix: str
    problem: object  # whose tests decide

    def verdict(self, judge, text):
        """Returns the Verdict of a text in the gap."""
        return judge.judge(f"{self.problem.preamble}{self.prefix}{text}{self.suffix}\n", self.problem.tests)


def make_gaps(problems, num_per_kind, seed):
    """Returns up to `num_per_kind` Gaps of each of KINDS, cut from the solutions of `problems`."""
    gaps = []
    for kind in KINDS:
        found = []
        for problem in problems:
            for begin, end in spans(problem.solution or "", kind):
                found.append(_cut(problem, begin, end, kind))
        found.sort(key=lambda gap: _hash(f"{seed}:{gap.name}"))
        gaps += found[:num_per_kind]
    return gaps


def _hash(text):
    return hashlib.blake2b(text.encode(errors="replace"), digest_size=8).hexdigest()


def _cut(problem, begin, end, kind):
    """Returns the Gap at these places of a problem's solution."""
    prefix = problem.prompt + problem.solution[:begin]
    middle = problem.solution[begin:end]
    suffix = problem.solution[end:]
    # The separators keep apart two gaps of one text: joined without them, their parts are the same.
    name = _hash("\0".join([kind, prefix, middle, suffix]))[:6]
    return Gap(f"{problem.name}/{name}", kind, prefix, middle, suffix, problem)


def spans(text, kind):
    """Returns the (begin, end) of all spans of this kind: lines without the last newline."""
    found = []
    if kind == ONE_LINE:
        for match in re.finditer(r"^[^\n]*\w[^\n]*$", text, re.MULTILINE):
            if len(match[0].strip()) >= 5:
                found.append(match.span())
    else:
        lines = [match.span() for match in re.finditer(r"^.*\S.*$", text, re.MULTILINE)]
        for count in range(2, MAX_LINES + 1):
            found += [(first[0], last[1]) for first, last in zip(lines, lines[count - 1:], strict=False)]
    return [(begin, end) for begin, end in found if end - begin <= MAX_SPAN_CHARACTERS]


def brackets(code):
    """Returns [(begin, end)] of the pairs of brackets in `code`, and [begin] of the open ones."""
    pairs = []
    opened = []
    for match in CODE_TOKEN.finditer(code):
        # A closing bracket that does not match the last open one is skipped: a macro's, or a model's mistake.
        if match[0] in ("(", "{"):
            opened.append(match.start())
        elif match[0] in (")", "}") and opened and code[opened[-1]] == OPENING[match[0]]:
            pairs.append((opened.pop(), match.start()))
    return pairs, opened
