"""Reads sets of programming problems: a prompt to complete, tests that decide, and mostly a solution.

The project's own set is the folder problem_set, a C++ program for each problem, whose parts begin with lines such as
`//@ solution`. Two formats of other sets are read, JSON lines, also compressed by gzip:

- HumanEval-X (Zheng et al., arXiv 2303.17568), with the keys task_id, prompt, declaration, canonical_solution and test
- MultiPL-E (Cassano et al., arXiv 2208.08227), with the keys name, prompt and tests
"""
import gzip
import hashlib
import json
import os
import re
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path

from nanochat.common import BadInput, expand_path
from nanochat.judge.judge import NO_CODE, Verdict, has_code
from nanochat.judge.unfinished import brackets, closers

OWN = Path(__file__).with_name("problem_set")
STOP = "\n}"  # the first line that is not indented ends a function or a class


@dataclass(frozen=True)
class Problem:
    name: str
    prompt: str
    tests: str  # with main()
    solution: str | None = None  # continues the prompt, to the end of the function or class
    difficulty: str = ""
    preamble: str = ""  # headers that a program needs and the model does not see

    def program(self, completion):
        """Returns the code of the prompt with a completion: what a model writes before STOP, or the whole solution."""
        return f"{self.preamble}{self.prompt}{completion}\n"

    def closing(self):
        """Returns what ends a completion that was stopped at STOP."""
        if self.solution is None:
            # The prompt alone says what is open where there is no solution: a function ends with "}", a class with
            # "};".
            return f"\n{closers(self.prompt) or closers('{')}"
        return "\n};\n" if self.solution.rstrip().endswith("};") else "\n}\n"

    def verdict(self, judge, text):
        """Returns the Verdict of a completion that ends before STOP."""
        if not has_code(text):
            return Verdict(NO_CODE, "")
        return judge.judge(self.program(text + self.closing()), self.tests)

    def missing_header(self):
        """Returns the name of a library's header that the problem includes and that is not installed, or None."""
        for name in re.findall(r"#\s*include\s*<((?:boost|openssl)/[^>]*)>", self.preamble + self.prompt):
            if not Path("/usr/include", name).exists():
                return name
        return None


def read_problems(path=None, flag="--problems"):
    """Returns the Problems in the file or folder `path`; None and "own": the project's own. Raises BadInput, which
    names the flag that the path is from."""
    path = OWN if path in (None, "own") else expand_path(path)
    try:
        problems = _read_own(path) if path.is_dir() else _read_foreign(path)
    except OSError as error:
        raise BadInput(f"{flag}={path} cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError, AttributeError, EOFError, RecursionError, zlib.error) as error:
        raise BadInput(f"{flag}={path} is not a file of problems in the format of HumanEval-X or MultiPL-E, nor a "
                       f"folder in that of this project: {type(error).__name__} {error}") from None
    if not problems:
        raise BadInput(f"{flag}={path} holds no problem")
    names = set()
    for problem in problems:
        if problem.name in names:
            raise BadInput(f"{flag}={path} has two problems with the name {problem.name}")
        names.add(problem.name)
    return problems


def problem_of_prompt(name, prompt, tests):
    """Returns the Problem of C++ whose last function or class is to be completed. name: where the prompt is from.
    Raises BadInput if nothing is left open in it."""
    prompt = prompt.rstrip()
    if not prompt:
        raise BadInput(f"{name} is empty: give a comment and a signature")
    # A signature without its brace gets one. If nothing is open even then, the brace became part of a comment.
    if not brackets(prompt)[1]:
        prompt += " {"
    if not brackets(prompt)[1]:
        raise BadInput(f"{name} ends with a comment: give the signature after it")
    return Problem(name, prompt + "\n", tests)


def as_text(data):
    """Returns a flag's value or a file's bytes as text that can be written again."""
    if isinstance(data, str):
        data = os.fsencode(data)
    return data.decode(errors="replace").replace("\r\n", "\n")


def read_text(path, flag):
    """Returns the text of the file that a flag names. Raises BadInput."""
    try:
        return as_text(path.read_bytes())
    except OSError as error:
        raise BadInput(f"{flag}={path} cannot be read: {error.strerror}") from None


def read_excluded(names):
    """Returns the Problems of --exclude_problems, a list of paths and of "own". Raises BadInput."""
    problems = []
    for name in names:
        problems += read_problems(name, "--exclude_problems")
    return problems


def _read_own(folder):
    """Returns the Problems in a folder of C++ programs, with the parts `difficulty`, `prompt`, `solution`, `tests`."""
    problems = []
    for file in sorted(folder.glob("*.cpp")):
        text = file.read_text(encoding="utf-8")
        # A part is `//@ NAME: VALUE` in one line, or `//@ NAME` and all lines before the next part.
        parts = dict(re.findall(r"^//@ (\w+)(?:: *|\n)(.*?)(?=^//@|\Z)", text, re.DOTALL | re.MULTILINE))
        problems.append(Problem(file.stem, parts["prompt"], parts["tests"], parts["solution"],
                                parts["difficulty"].strip()))
    return problems


def _read_foreign(file):
    """Returns the Problems in a file of HumanEval-X or MultiPL-E."""
    data = file.read_bytes()
    if data[:2] == b"\x1f\x8b":
        data = gzip.decompress(data)
    return [_foreign(json.loads(line)) for line in data.decode().splitlines() if line.strip()]


def _foreign(row):
    """Returns the Problem of a line of HumanEval-X or MultiPL-E. Raises ValueError for text that UTF-8 cannot write."""
    row = {key: value for key, value in row.items() if isinstance(value, str)}
    "".join(row.values()).encode()
    if "canonical_solution" in row:
        # Of the declaration only the headers are taken, because that of CPP/38 has an error.
        includes = [line for line in row["declaration"].splitlines() if line.startswith("#include")]
        extra = [f"{line}\n" for line in includes if line not in row["prompt"]]
        return Problem(row["task_id"], row["prompt"], row["test"], row["canonical_solution"], preamble="".join(extra))
    tests = row["tests"].lstrip()  # they begin with the brace that closes the function
    return Problem(row["name"], row["prompt"], tests.removeprefix("}"), row.get("solution"))


def usable(problems):
    """Returns the problems without those that need a library that is not installed, and names these."""
    found = []
    missing = []
    for problem in problems:
        header = problem.missing_header()
        if header:
            missing.append(f"{problem.name} ({header})")
        else:
            found.append(problem)
    if missing:
        print(f"left out, because a header is not installed: {', '.join(missing)}", file=sys.stderr)
    return found


def digest(problems):
    """Returns a hexadecimal number that stands for these problems and no others."""
    return hashlib.sha256(repr(problems).encode()).hexdigest()[:16]


def without_one_line(solution):
    """Returns all texts that a solution becomes when one of its lines is deleted, blank lines and comments excepted."""
    lines = solution.splitlines(keepends=True)
    found = []
    for i, line in enumerate(lines):
        if line.strip() and not line.strip().startswith("//"):
            found.append("".join(lines[:i] + lines[i + 1:]))
    return found
