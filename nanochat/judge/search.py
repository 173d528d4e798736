"""Searches for code that compiles and passes tests, with a budget of sampled tokens and of calls of the compiler.

    sample    the first text that is drawn
    best_of   draws whole functions
    tree      draws line by line, and goes on only from lines that the compiler accepts
    repair    draws whole functions; the line that the compiler names is cut out and filled in again

Of all functions that a method has found, the answer is the best: those that pass the tests come first, then those that
compile, and among these the one whose text is the likeliest for the model, by bits per byte.
"""
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from nanochat.infer.engine import Special
from nanochat.infer.healing import MAX_TAKEN_BACK
from nanochat.judge.evaluate import SPARE_TOKENS, size
from nanochat.judge.judge import DOES_NOT_COMPILE, NO_CODE, PASSED, Verdict, has_code
from nanochat.judge.problems import STOP
from nanochat.judge.unfinished import block_of, closers, end_of_function, ends_statement, error_lines

COMPILES = "compiles"  # the verdict where there are no tests
UNFINISHED = "unfinished"  # the model did not write the end of the function
NOT_CALLED = Verdict(DOES_NOT_COMPILE, "the budget of compiler calls was used up")
MAX_BEAM = 3  # states of a tree that are continued at the same time
LINES = 5  # that are drawn from each
MAX_LINE_TOKENS = 48
MAX_STATES = 64  # of a tree that are remembered
MAX_COMMENTS = 2  # lines of comments or blank lines in a row: small models write nothing else for long
ROUNDS = 2  # of repair
_COMMENT = re.compile(r"\s*(//|/\*|\*(\s|/|$)|$)")


@dataclass(frozen=True)
class Budget:
    tokens: int  # all that are drawn, also those that come to nothing
    calls: int  # of g++; asking again about the same program is no call


@dataclass
class Answer:
    text: str  # continues the prompt, without the line that closes the function
    status: str
    message: str  # the compiler's or the program's
    bits_per_byte: float | None = None  # of the text, where it was needed to choose

    @property
    def compiles(self):
        return self.rank >= 2

    @property
    def rank(self):
        if self.status == UNFINISHED:
            return 0
        return 1 if self.status in (DOES_NOT_COMPILE, NO_CODE) else 3 if self.status == PASSED else 2


class Search:
    """What one search has spent and found."""

    def __init__(self, writer, judge, problem, budget, workers=1, say=lambda text: None):
        """problem: its `tests` are those that the search may see. workers: calls of the compiler at the same time.
        say: called with a line for each thing that is found."""
        self.writer, self.judge, self.problem, self.budget, self.workers = writer, judge, problem, budget, workers
        self.num_tokens = self.num_calls = 0
        self.answer = Answer("", UNFINISHED, "")
        self._say, self._seed, self._programs = say, writer.sampling.seed, set()

    @property
    def is_over(self):
        return (self.budget.tokens - self.num_tokens <= MAX_TAKEN_BACK or self.num_calls >= self.budget.calls
                or self.answer.status == PASSED)

    def say(self, text):
        self._say(f"{self.num_tokens:5} tokens {self.num_calls:4} g++  {text}")

    def draw(self, prompt, num, max_tokens, stop, **options):
        """Returns up to `num` Samples: fewer, or shorter ones, where the budget ends."""
        left = self.budget.tokens - self.num_tokens
        num = min(num, left // (MAX_TAKEN_BACK + 1))
        if num < 1:
            return []
        sampling = self.writer.sampling
        samples = self.writer.engine.completions(
            prompt, num_samples=num, max_tokens=min(max_tokens, left // num - MAX_TAKEN_BACK), stop=stop, top_k=0,
            temperature=sampling.temperature, top_p=sampling.top_p, seed=self._seed, score=True, **options)
        self._seed += num
        self.num_tokens += sum(sample.num_drawn for sample in samples)
        return samples

    def draw_function(self):
        """Draws a function. Returns its text, and whether the model has ended it."""
        prompt, pieces = self.problem.prompt, []
        [drawn] = self.draw(
            prompt, 1, self.writer.sampling.max_tokens, [STOP], on_text=lambda _, piece: pieces.append(piece),
            keep_going=lambda: end_of_function(prompt, "".join(pieces)) is None)
        end = end_of_function(prompt, drawn.text)
        return drawn.text[:end], end is not None or drawn.reason in ("stop", "end")

    def draw_and_offer(self):
        """Draws a function and judges it. Returns its text, and its Verdict or None if the model has not ended it."""
        text, is_ended = self.draw_function()
        if is_ended:
            return text, self.offer(text)
        self.leave_unfinished(text)
        return text, None

    def offer(self, text):
        """Judges a whole function, keeps it if it is the best so far, and returns its Verdict."""
        tests, program = self.problem.tests, self.problem.program(text + self.problem.closing())
        if not has_code(text):
            verdict = Verdict(NO_CODE, "")
        elif not self._charge(program):
            verdict = NOT_CALLED
        else:
            verdict = self.judge.judge(program, tests) if tests else self.judge.check_syntax(program)
        status = COMPILES if verdict.passed and not tests else verdict.status
        self._keep(Answer(text, status, verdict.message))
        self.say(f"a whole function: {status}")
        return verdict

    def leave_unfinished(self, text):
        self._keep(Answer(text, UNFINISHED, ""))

    def find_errors(self, texts):
        """Returns, for each beginning of a function, the first of its lines, counted from 0, that cannot be right
        whatever follows, or None."""
        programs = [self.problem.program(text) + closers(self.problem.prompt + text) for text in texts]
        to_ask = [program for program in programs if self._charge(program)]
        with ThreadPoolExecutor(self.workers) as pool:
            verdicts = dict(zip(to_ask, pool.map(self.judge.check_syntax, to_ask), strict=True))
        return [self._first_error(text, verdicts.get(program, NOT_CALLED))
                for text, program in zip(texts, programs, strict=True)]

    def _first_error(self, text, verdict):
        if verdict.passed:
            return None
        last = text.count("\n") - 1
        if not error_lines(verdict.message):  # the compiler has reached a limit
            return last
        found = self.lines_in_text(error_lines(verdict.message, only_certain=not ends_statement(text)))
        return min((line for line in found if line <= last), default=None)

    def lines_in_text(self, lines):
        """Returns lines of a program, counted from 1, as lines of what was drawn, counted from 0."""
        num_before = self.problem.program("").count("\n") - 1
        return [max(line - 1 - num_before, 0) for line in lines]

    def _charge(self, program):
        """Returns whether g++ may be called for `program`."""
        if program in self._programs:
            return True
        if self.num_calls >= self.budget.calls:
            return False
        self._programs.add(program)
        self.num_calls += 1
        return True

    def _keep(self, answer):
        best = self.answer
        if answer.rank == best.rank and answer.compiles and answer.text != best.text:
            for each in (best, answer):
                if each.bits_per_byte is None:
                    each.bits_per_byte = self.writer.bits(self.problem.prompt, each.text) / size(each.text)
            is_better = answer.bits_per_byte < best.bits_per_byte
        else:
            is_better = answer.rank > best.rank or answer.rank == best.rank == 0 and len(answer.text) > len(best.text)
        if is_better:
            self.answer = answer


def sample(search):
    search.draw_and_offer()


def best_of(search):
    while not search.is_over:
        search.draw_and_offer()


# -----------------------------------------------------------------------------
# Line by line


@dataclass(order=True)
class State:
    """The first lines of a function. The smallest is continued first: the longest, then the likeliest."""
    order: tuple = field(init=False)
    text: str
    num_lines: int = 0
    log_prob: float = 0.0
    num_tokens: int = 0
    num_comments: int = 0  # its last lines that are comments or blank

    def __post_init__(self):
        self.order = -self.num_lines, -self.log_prob / max(1, self.num_tokens)


def tree(search):
    """Grows trees, one after the other: the first with a beam of one state, so that a small budget reaches the end of a
    function, the next ones wider (iterative broadening, Ginsberg and Harvey 1990)."""
    beam = 0
    while not search.is_over:
        beam, states = min(beam + 1, MAX_BEAM), [State("")]
        while states and not search.is_over:
            found, wrong, is_finished = grow(search, states[:beam])
            if is_finished:
                break
            states = [state for state in [*found, *states[beam:]] if not state.text.startswith(tuple(wrong))]
            states = sorted(states)[:MAX_STATES]
            search.leave_unfinished(states[0].text if states else "")


def grow(search, states):
    """Draws lines from each of `states`. Returns the new states, the beginnings of texts that were found to be wrong,
    and whether a whole function that compiles was found."""
    prompt, max_tokens, found = search.problem.prompt, search.writer.sampling.max_tokens, {}
    for state in states:
        for drawn in search.draw(prompt + state.text, LINES, MAX_LINE_TOKENS, ["\n"]):
            text = state.text + drawn.text
            end = end_of_function(prompt, text)
            num_tokens, is_comment = state.num_tokens + drawn.num_tokens, bool(_COMMENT.match(drawn.text))
            if end is not None or drawn.reason == "end":
                if search.offer(text[:end]).compiles:
                    return [], [], True
            elif drawn.reason == "stop" and num_tokens < max_tokens and state.num_comments + is_comment <= MAX_COMMENTS:
                found[text + "\n"] = State(
                    text + "\n", state.num_lines + 1, state.log_prob + drawn.log_prob, num_tokens,
                    state.num_comments + 1 if is_comment else 0)
    wrong = []
    to_check = [text for text, state in found.items() if not state.num_comments]
    for text, line in zip(to_check, search.find_errors(to_check), strict=True):
        search.say(f"{'alive' if line is None else 'wrong'}  {text.splitlines()[-1]}")
        if line is not None:
            wrong.append("".join(text.splitlines(keepends=True)[:line + 1]))
    return list(found.values()), wrong, False


# -----------------------------------------------------------------------------
# Filling in again


def repair(search):
    while not search.is_over:
        text, verdict = search.draw_and_offer()
        for _ in range(ROUNDS):
            if verdict is None or verdict.status != DOES_NOT_COMPILE or search.is_over:
                break
            text, verdict = refill(search, text, verdict)


def refill(search, text, verdict):
    """Cuts out the line with the first error, then also its neighbours, then the block around it, and lets the model
    fill the gap. Returns the first text that compiles, or else the one whose first error comes last, and its Verdict.
    """
    best = first_error(search, text, verdict), text, verdict
    lines = text.splitlines()
    if not lines:
        return text, verdict
    index = best[0]
    for begin, end in ((index, index + 1), (max(index - 1, 0), index + 2), block_of(text, index)):
        prefix = search.problem.prompt + "".join(f"{line}\n" for line in lines[:begin])
        suffix = "".join(f"\n{line}" for line in lines[end:]) + search.problem.closing()
        old = "\n".join(lines[begin:end])
        drawn = fill(search, prefix, suffix, old, is_line=end - begin == 1)
        if drawn is None:
            continue
        new = "\n".join([*lines[:begin], *([drawn] if drawn else []), *lines[end:]])
        search.say(f"line {begin + 1} to {end}: {drawn}")
        found = search.offer(new)
        if found.compiles:
            return new, found
        best = max(best, (first_error(search, new, found), new, found), key=lambda each: each[0])
    return best[1:]


def first_error(search, text, verdict):
    """Returns the line of `text`, counted from 0, with the first error: the last line for an error behind the text."""
    last = max(len(text.splitlines()) - 1, 0)
    return min(last, *search.lines_in_text(error_lines(verdict.message)), last)


def fill(search, prefix, suffix, old, is_line):
    """Returns what the model writes between two texts, or None if it does not come to an end."""
    writer = search.writer
    context = writer.model.config.max_seq_len
    max_tokens = min(2 * len(writer.tokenizer.encode(old)) + 16, context // 2)
    room = context - max_tokens - 4 - SPARE_TOKENS  # four special tokens
    prefix, suffix = writer.cut(prefix, suffix, room)
    parts = [Special("<|bos|>"), Special("<|fim_prefix|>"), prefix, Special("<|fim_suffix|>"), suffix,
             Special("<|fim_middle|>")]
    drawn = search.draw(parts, 1, max_tokens, ["\n"] if is_line else [])
    if not drawn or drawn[0].reason == "length":
        return None
    return drawn[0].text


METHODS = {"sample": sample, "best_of": best_of, "tree": tree, "repair": repair}
