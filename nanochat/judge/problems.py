"""Reads sets of programming problems: a prompt to complete, tests that decide, and usually a solution.

The project's own set is the folder problem_set: a C++ program for each problem, whose parts begin with lines such as
`//@ solution`. Two other formats are read, as JSON lines, also compressed by gzip:

- HumanEval-X (Zheng et al., arXiv 2303.17568), with the keys task_id, prompt, declaration, canonical_solution and test
- MultiPL-E (Cassano et al., arXiv 2208.08227), of HumanEval or MBPP, with the keys name, prompt and tests
"""
import gzip
import hashlib
import json
import re
import zlib
from dataclasses import dataclass, replace
from pathlib import Path

from nanochat.common import BadInput, expand_path, require_file
from nanochat.judge.gaps import brackets
from nanochat.judge.judge import NO_CODE, Verdict, has_code
from nanochat.judge.unfinished import closers

OWN = Path(__file__).with_name("problem_set")
STOP = "\n}"  # the first line that is not indented ends a function or a class


@dataclass(frozen=True)
class Problem:
    name: str
    prompt: str
    tests: str  # with main(), which returns 0 for right code
    solution: str | None = None  # continues the prompt, to the end of the function or class
    difficulty: str = ""
    preamble: str = ""  # headers that the program needs, hidden from the model

    def program(self, completion):
        """Returns the code of the prompt with a completion: a model's text before STOP, or the whole solution."""
        return f"{self.preamble}{self.prompt}{completion}\n"

    def closing(self):
        """Returns the end of a completion that was stopped at STOP."""
        if self.solution is None:
            # Without a solution the prompt alone says what is open: a function ends with "}", a class with "};".
            return f"\n{closers(self.prompt) or closers('{')}"
        return "\n};\n" if self.solution.rstrip().endswith("};") else "\n}\n"

    def verdict(self, judge, text):
        """Returns the Verdict of a completion that ends before STOP."""
        if not has_code(text):
            return Verdict(NO_CODE, "")
        return judge.judge(self.program(text + self.closing()), self.tests)


def read_problems(path=None, name="--problems"):
    """Returns the Problems in the file or folder `path`; None and "own": the project's own. name: the flag's."""
    path = OWN if path in (None, "own") else expand_path(path)
    try:
        if path.is_dir():
            problems = _read_own(path)
        else:
            require_file(path)
            data = path.read_bytes()
            if data[:2] == b"\x1f\x8b":
                data = gzip.decompress(data)
            problems = _read_foreign(data)
    except OSError as error:
        raise BadInput(f"{name}={path} cannot be read: {error.strerror or error}") from None
    except (ValueError, EOFError, zlib.error) as error:
        raise BadInput(f"{name}={path} is no set of problems of HumanEval-X, MultiPL-E or this project: {error}"
                       ) from None
    if not problems:
        raise BadInput(f"{name}={path} holds no problem")
    return _distinct(problems, f"{name}={path}")


def read_sets(text, name="--problems"):
    """Returns the Problems of the sets that the flag `name` names, separated by commas. Of several, each set is a group
    of the table."""
    paths = [path for path in map(str.strip, text.split(",")) if path]
    if not paths:
        raise BadInput(f"{name}={text} names no set: give own, or a file or folder")
    problems = []
    for path in paths:
        found = read_problems(path, name)
        if len(paths) > 1:
            found = [replace(problem, difficulty=Path(path).stem) for problem in found]
        problems += found
    return _distinct(problems, f"{name}={text}")


def _distinct(problems, source):
    names = set()
    for problem in problems:
        if problem.name in names:
            raise BadInput(f"{source} has two problems with the name {problem.name}")
        names.add(problem.name)
    return problems


def problem_of_prompt(name, prompt, tests):
    """Returns the Problem of C++ whose last function or class is to be completed. name: the flag's, for BadInput."""
    prompt = prompt.rstrip()
    if not prompt:
        raise BadInput(f"{name} is empty: give a comment and a signature")
    # A signature without its brace gets one. If nothing is open even then, the brace became part of a comment.
    if not brackets(prompt)[1]:
        prompt += " {"
    if not brackets(prompt)[1]:
        raise BadInput(f"{name} ends with a comment: give the signature after it")
    return Problem(name, prompt + "\n", tests)


def _read_own(folder):
    """Returns the Problems in a folder of C++ programs, with the parts `difficulty`, `prompt`, `solution`, `tests`.
    Raises ValueError."""
    problems = []
    for file in sorted(folder.glob("*.cpp")):
        text = file.read_text(encoding="utf-8")
        # A part is `//@ NAME: VALUE` in one line, or `//@ NAME` and all lines before the next part.
        parts = dict(re.findall(r"^//@ (\w+)(?:: *|\n)(.*?)(?=^//@|\Z)", text, re.DOTALL | re.MULTILINE))
        try:
            problems.append(Problem(file.stem, parts["prompt"], parts["tests"], parts["solution"],
                                    parts["difficulty"].strip()))
        except KeyError as error:
            raise ValueError(f"{file.name} has no part {error}") from None
    return problems


def _read_foreign(data):
    """Returns the Problems in a file of another set. Raises ValueError."""
    problems = []
    for number, line in enumerate(data.splitlines(), 1):
        try:
            if line.strip():
                problems.append(_foreign(json.loads(line)))
        except (ValueError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"row {number}: {type(error).__name__} {error}") from None
    return problems


def _foreign(row):
    """Returns the Problem of a row of another set. Raises ValueError for text that is no UTF-8."""
    # An empty text counts as missing: without its tests, no code would pass.
    row = {key: value for key, value in row.items() if isinstance(value, str) and value.strip()}
    "".join(row.values()).encode()
    if "canonical_solution" not in row:
        tests = row["tests"].lstrip()  # they begin with the brace that closes the function
        return Problem(row["name"], row["prompt"], tests.removeprefix("}"), row.get("solution"))
    # Only the headers of the declaration are used, because the declaration of CPP/38 has an error.
    preamble = ""
    for line in row["declaration"].splitlines():
        if line.startswith("#include") and line not in row["prompt"]:
            preamble += f"{line}\n"
    return Problem(row["task_id"], row["prompt"], row["test"], row["canonical_solution"], preamble=preamble)


def digest(problems):
    """Returns a hexadecimal number that identifies these problems."""
    return hashlib.sha256(repr(problems).encode()).hexdigest()[:16]


def size(text):
    """Returns the bytes of a text."""
    return len(text.encode(errors="replace"))
