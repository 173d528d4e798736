"""Reads sets of programming problems: a prompt to complete, tests that decide, and mostly a solution.

The project's own set is the folder problem_set, a C++ program for each problem, whose parts begin with lines such as
`//@ solution`. Two formats of other sets are read, JSON lines, also compressed by gzip:

- HumanEval-X (Zheng et al., arXiv 2303.17568), with the keys task_id, prompt, declaration, canonical_solution and test
- MultiPL-E (Cassano et al., arXiv 2208.08227), with the keys name, prompt and tests
"""
import gzip
import hashlib
import json
import re
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path

from nanochat.common import BadInput, expand_path
from nanochat.judge.unfinished import closers

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
            return f"\n{closers(self.prompt) or closers('{')}"
        return "\n};\n" if self.solution.rstrip().endswith("};") else "\n}\n"

    def missing_header(self):
        """Returns the name of a library's header that the problem includes and that is not installed, or None."""
        for name in re.findall(r"#\s*include\s*<((?:boost|openssl)/[^>]*)>", self.preamble + self.prompt):
            if not Path("/usr/include", name).exists():
                return name
        return None


def read_problems(path=None, flag="--problems"):
    """Returns the Problems in the file or folder `path`, or else the project's own. Raises BadInput, which names the
    flag that the path is from."""
    path = Path(path or OWN)
    try:
        if path.is_dir():
            problems = [_own(file.stem, file.read_text(encoding="utf-8")) for file in sorted(path.glob("*.cpp"))]
        else:
            data = path.read_bytes()
            text = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode()
            problems = [_foreign(_texts(json.loads(line))) for line in text.splitlines() if line.strip()]
    except OSError as error:
        raise BadInput(f"{flag}={path} cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError, AttributeError, EOFError, RecursionError, zlib.error) as error:
        raise BadInput(f"{flag}={path} is not a file of problems in the format of HumanEval-X or MultiPL-E, nor a "
                       f"folder in that of this project: {type(error).__name__} {error}") from None
    if not problems:
        raise BadInput(f"{flag}={path} holds no problem")
    names = [problem.name for problem in problems]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise BadInput(f"{flag}={path} has two problems with the name {repeated}")
    return problems


def read_excluded(names):
    """Returns the Problems of --exclude_problems, a list of paths and of "own". Raises BadInput."""
    return [problem for name in names
            for problem in read_problems(None if name == "own" else expand_path(name), "--exclude_problems")]


def _own(name, text):
    """Returns the Problem of a C++ program with the parts `difficulty`, `prompt`, `solution` and `tests`."""
    parts = dict(re.findall(r"^//@ (\w+)(?:: *|\n)(.*?)(?=^//@|\Z)", text, re.DOTALL | re.MULTILINE))
    return Problem(name, parts["prompt"], parts["tests"], parts["solution"], parts["difficulty"].strip())


def _texts(row):
    """Returns the entries of a JSON object that are texts. Raises ValueError for text that UTF-8 cannot write."""
    texts = {key: value for key, value in row.items() if isinstance(value, str)}
    "".join(texts.values()).encode()
    return texts


def _foreign(row):
    """Returns the Problem of a line of HumanEval-X or MultiPL-E."""
    if "canonical_solution" in row:
        includes = [line for line in row["declaration"].splitlines() if line.startswith("#include")]
        extra = [line for line in includes if line not in row["prompt"]]
        return Problem(row["task_id"], row["prompt"], row["test"], row["canonical_solution"],
                       preamble="".join(f"{line}\n" for line in extra))
    tests = row["tests"].lstrip()  # they begin with the brace that closes the function
    return Problem(row["name"], row["prompt"], tests.removeprefix("}"), row.get("solution"))


def usable(problems):
    """Returns the problems without those that need a library that is not installed, and names these."""
    missing = {problem.name: problem.missing_header() for problem in problems if problem.missing_header()}
    if missing:
        print("left out, because a header is not installed: "
              + ", ".join(f"{name} ({header})" for name, header in missing.items()), file=sys.stderr)
    return [problem for problem in problems if problem.name not in missing]


def digest(problems):
    """Returns a hexadecimal number that stands for these problems and no others."""
    return hashlib.sha256(repr(problems).encode()).hexdigest()[:16]


def without_one_line(solution):
    """Returns all texts that a solution becomes when one of its lines is deleted, blank lines and comments excepted."""
    lines = solution.splitlines(keepends=True)
    return ["".join(lines[:i] + lines[i + 1:]) for i, line in enumerate(lines)
            if line.strip() and not line.strip().startswith("//")]
