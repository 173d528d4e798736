"""Searches for code that compiles and passes tests, within a budget of sampled tokens and of calls of the compiler:
draws line by line, and continues only lines that the compiler accepts.

The answer is the best function found: one that passes the tests, else one that compiles, and among these the likeliest
for the model, by bits per byte.
"""
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from nanochat.common import BadInput
from nanochat.infer.prompt import MAX_TAKEN_BACK
from nanochat.infer.sample import ignore
from nanochat.judge.judge import DOES_NOT_COMPILE, NO_CODE, PASSED, UNFINISHED, Judge, Verdict, has_code
from nanochat.judge.problems import Problem, size
from nanochat.judge.unfinished import closers, end_of_function, ends_statement, error_lines

COMPILES = "compiles"  # the verdict without tests
NOT_CALLED = Verdict(DOES_NOT_COMPILE, "the budget of compiler calls was used up")
MAX_BEAM = 3  # states of a tree that are continued at the same time
LINES = 5  # drawn from each state
MAX_LINE_TOKENS = 48
MAX_STATES = 64  # remembered of a tree
MAX_COMMENTS = 2  # comments or blank lines in a row: small models get stuck in them
_COMMENT = re.compile(r"\s*(//|/\*|\*(\s|/|$)|$)")


@dataclass(frozen=True)
class Budget:
    tokens: int  # drawn, dropped texts included
    calls: int  # of g++; the same program counts once


@dataclass
class Answer:
    text: str  # continues the prompt, without the line that closes the function
    status: str
    message: str  # the compiler's or the program's
    bits_per_byte: float | None = None  # of the text, computed only to choose between equals

    @property
    def compiles(self):
        return self.rank >= 2

    @property
    def rank(self):
        """The larger, the better."""
        return {UNFINISHED: 0, DOES_NOT_COMPILE: 1, NO_CODE: 1, PASSED: 3}.get(self.status, 2)


@dataclass
class Search:
    """The state of one search: what it spent, and the best answer."""
    writer: object  # a Writer
    judge: Judge
    problem: Problem  # with the tests that the search may see
    budget: Budget
    workers: int = 1  # calls of the compiler at the same time
    show: Callable = ignore  # called with a line for each step
    num_tokens: int = 0
    num_samples: int = 0
    programs: set = field(default_factory=set)  # that the compiler was called for
    answer: Answer = field(default_factory=lambda: Answer("", UNFINISHED, ""))

    @property
    def num_calls(self):
        return len(self.programs)

    @property
    def tokens_left(self):
        return self.budget.tokens - self.num_tokens

    @property
    def is_over(self):
        return (self.tokens_left <= MAX_TAKEN_BACK or self.num_calls >= self.budget.calls
                or self.answer.status == PASSED)

    def say(self, text):
        self.show(f"{self.num_tokens:5} tokens {self.num_calls:4} g++  {text}")

    # Besides max_tokens, a sample may draw MAX_TAKEN_BACK tokens that only repeat the end of its prompt. Each sample
    # leaves room for them.
    def draw(self, prompt, num, max_tokens, stop, **options):
        """Returns up to `num` Samples: fewer, or shorter ones, at the end of the budget. options: of the engine."""
        num = min(num, self.tokens_left // (MAX_TAKEN_BACK + 1))
        if num < 1:
            return []
        max_tokens = min(max_tokens, self.tokens_left // num - MAX_TAKEN_BACK)
        drawn = self.writer.sampling
        sampling = replace(drawn, num_samples=num, max_tokens=max_tokens, stop=stop, seed=drawn.seed + self.num_samples,
                           score=True)
        # The engine draws sample i of a call with seed + i, so each sample of a search has its own seed.
        samples = self.writer.engine.completions(prompt, sampling, **options)
        self.num_samples += num
        self.num_tokens += sum(sample.num_drawn for sample in samples)
        return samples

    def offer(self, text):
        """Judges a whole function, keeps it if it is the best, and returns its Verdict."""
        tests = self.problem.tests
        program = self.problem.program(text + self.problem.closing())
        if not has_code(text):
            verdict = Verdict(NO_CODE, "")
        elif not self._charge(program):
            verdict = NOT_CALLED
        elif tests:
            verdict = self.judge.judge(program, tests)
        else:
            verdict = self.judge.check_syntax(program)
        status = COMPILES if verdict.passed and not tests else verdict.status
        self.keep(Answer(text, status, verdict.message))
        self.say(f"a whole function: {status}")
        return verdict

    def find_errors(self, texts):
        """Returns for each beginning of a function its first line, from 0, that no later text can fix, or None."""
        programs = [self.problem.program(text) + closers(self.problem.prompt + text) for text in texts]
        to_ask = []
        for program in programs:
            if self._charge(program):
                to_ask.append(program)
        with ThreadPoolExecutor(self.workers) as pool:
            verdicts = dict(zip(to_ask, pool.map(self.judge.check_syntax, to_ask), strict=True))
        found = [verdicts.get(program, NOT_CALLED) for program in programs]
        return list(map(self._first_error, texts, found))

    # The closing brackets are ours, so errors behind the text do not count. Later text may fix an error in a last line
    # that does not end a statement, unless it is of a certain kind.
    def _first_error(self, text, verdict):
        if verdict.passed:
            return None
        last = text.count("\n") - 1
        if not error_lines(verdict.message):  # the compiler hit a limit
            return last
        num_before = self.problem.program("").count("\n") - 1  # lines of the program before the text
        lines = error_lines(verdict.message, only_certain=not ends_statement(text))
        found = [max(line - 1 - num_before, 0) for line in lines]
        return min((line for line in found if line <= last), default=None)

    def _charge(self, program):
        """Returns whether g++ may be called for `program`."""
        if program not in self.programs and self.num_calls < self.budget.calls:
            self.programs.add(program)
        return program in self.programs

    def keep(self, answer):
        """Makes it the answer if it is better than the best so far."""
        if self._is_better(answer, self.answer):
            self.answer = answer

    def _is_better(self, answer, best):
        if answer.rank != best.rank:
            return answer.rank > best.rank
        if answer.rank == 0:
            return len(answer.text) > len(best.text)
        if not answer.compiles or answer.text == best.text:
            return False
        # The bits take a pass of the model, so they decide only between answers of one rank.
        for each in (best, answer):
            if each.bits_per_byte is None:
                each.bits_per_byte = self.writer.bits(self.problem.prompt, each.text) / size(each.text)
        return answer.bits_per_byte < best.bits_per_byte


# Line by line


@dataclass
class State:
    """The first lines of a function."""
    text: str
    num_lines: int = 0
    log_prob: float = 0.0
    num_tokens: int = 0
    num_comments: int = 0  # comments and blank lines at its end

    def order(self):
        """Returns what sorts states: the longest is continued first, of these the likeliest."""
        return -self.num_lines, -self.log_prob / max(1, self.num_tokens), self.text

    def with_line(self, drawn):
        """Returns the State with one more line, a Sample."""
        num_comments = 0
        if _COMMENT.match(drawn.text):
            num_comments = self.num_comments + 1
        return State(f"{self.text}{drawn.text}\n", self.num_lines + 1, self.log_prob + drawn.log_prob,
                     self.num_tokens + drawn.num_tokens, num_comments)


# The first tree has a beam of one state, so that a small budget reaches the end of a function. The next ones are wider
# (iterative broadening, Ginsberg and Harvey 1990). A state that begins with a wrong text is dropped.
def tree(search):
    """Grows trees, one after the other."""
    beam = 0
    while not search.is_over:
        # A line has about nine tokens: with 256 tokens, a tree of 3 states and 5 lines is about two lines deep.
        beam = min(beam + 1, MAX_BEAM)
        states = [State("")]
        while states and not search.is_over:
            found = grow(search, states[:beam])
            if found is None:
                break
            wrong = find_wrong(search, found)
            states = [state for state in found + states[beam:] if not state.text.startswith(wrong)]
            states = sorted(states, key=State.order)[:MAX_STATES]
            search.keep(Answer(states[0].text if states else "", UNFINISHED, ""))


def grow(search, states):
    """Draws lines from each of `states`. Returns the new States, or None once a whole function compiles."""
    prompt = search.problem.prompt
    max_tokens = min(MAX_LINE_TOKENS, search.writer.sampling.max_tokens)
    found = {}
    for state in states:
        for drawn in search.draw(prompt + state.text, LINES, max_tokens, ("\n",)):
            text = state.text + drawn.text
            end = end_of_function(prompt, text)
            if end is not None or drawn.reason == "end":
                if search.offer(text[:end]).compiles:
                    return None
            elif drawn.reason == "stop":
                new = state.with_line(drawn)
                if new.num_tokens < search.writer.sampling.max_tokens and new.num_comments <= MAX_COMMENTS:
                    found[new.text] = new
    return list(found.values())


def find_wrong(search, states):
    """Returns a tuple of beginnings of `states` that no later text can fix. A comment at the end needs no new check."""
    to_check = [state.text for state in states if not state.num_comments]
    wrong = []
    for text, line in zip(to_check, search.find_errors(to_check), strict=True):
        status = "alive"
        if line is not None:
            status = "wrong"
            wrong.append("".join(text.splitlines(keepends=True)[:line + 1]))
        search.say(f"{status}  {text.splitlines()[-1]}")
    return tuple(wrong)


def check_prompt(judge, problem):
    """Raises BadInput if the prompt itself does not compile, with its brackets closed."""
    verdict = judge.check_syntax(problem.program("") + closers(problem.prompt))
    if not verdict.passed:
        first = next((line for line in verdict.message.splitlines() if "error" in line), verdict.message)
        raise BadInput(f"{problem.name} does not compile by itself, with its brackets closed: {first}")
