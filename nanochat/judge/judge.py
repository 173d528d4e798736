"""Decides whether C++ works: g++ compiles it together with its tests, and the program runs, both in the sandbox."""
import hashlib
import os
import re
import secrets
import shutil
import subprocess
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

from nanochat.common import flag
from nanochat.judge.sandbox import MIB, Limits, Sandbox, need

COMPILER_LIMITS = Limits(cpu_s=10, wall_s=60, memory_bytes=2048 * MIB, output_bytes=32 * MIB)
PROGRAM_LIMITS = Limits(cpu_s=5, wall_s=20, memory_bytes=1024 * MIB, output_bytes=65536)
GXX = ["g++", "-std=c++17", "-w", "-fmax-errors=5"]
MESSAGE_CHARACTERS = 4000
MAX_VERDICTS = 10_000  # that are remembered

# The verdicts.
PASSED = "passed"
FAILED = "failed"  # a test did not hold, or the program ended before its tests did
CRASHED = "crashed"  # ended by a signal, such as a segmentation fault
TIMEOUT = "timeout"
TOO_MUCH_OUTPUT = "too much output"
DOES_NOT_COMPILE = "does not compile"
NO_CODE = "no code"  # only comments, which would compile
UNFINISHED = "unfinished"  # of a search: the model did not write the end of the function


@dataclass(frozen=True)
class Verdict:
    status: str
    message: str  # of the compiler or the program

    @property
    def passed(self):
        return self.status == PASSED

    @property
    def compiles(self):
        return self.status not in (DOES_NOT_COMPILE, NO_CODE, UNFINISHED)


@dataclass(frozen=True)
class JudgeFlags:
    """How a script judges a model's code."""
    workers: int = flag(-1, "programs judged at the same time; -1: one per core", at_least=1, at_most=1000, unset=-1)
    unsafe: bool = flag(False, "limits only, without a sandbox: the model's code can read and change files")

    @property
    def num_workers(self):
        return len(os.sched_getaffinity(0)) if self.workers == -1 else self.workers


class Judge:
    """Judges programs, each distinct one once. Threads may share it. A context manager."""

    def __init__(self, unsafe=False, compiler_limits=COMPILER_LIMITS, program_limits=PROGRAM_LIMITS):
        """Raises BadInput if there is no g++ or no sandbox (see Sandbox)."""
        need("g++", "g++")
        self.sandbox = Sandbox(unsafe)
        self.compiler_limits = compiler_limits
        self.program_limits = program_limits
        self._lock = threading.Lock()  # of the header
        self._verdicts = {}
        self._header_folder = None
        self._end_mark = secrets.token_hex(8)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if self._header_folder:
            shutil.rmtree(self._header_folder, ignore_errors=True)

    # A program that calls exit(0) succeeds without running its tests. So it prints a secret mark before the last brace
    # of main(), and passes only if its output ends with the mark.
    def judge(self, code, tests=""):
        """Returns the Verdict of the program code + tests. main() is at the end of `tests`, if there are any."""
        marked = tests
        if not re.search(r"\breturn\b(?!\s+0\s*;)[^;]*;\s*\}\s*$", tests):  # then the status alone decides
            mark = rf'__builtin_puts("{self._end_mark}");\n\1'
            marked = re.sub(r"((?:\breturn\s+0\s*;\s*)?\}\s*)$", mark, tests)
        return self._once("judge", code + marked, lambda source: self._compile_and_run(source, marked != tests))

    def check_syntax(self, code, folders=()):
        """Returns the Verdict of the compiler alone: "passed" or "does not compile". folders: of headers."""
        def check(source):
            includes = [f"-I{folder}" for folder in folders]
            _, failure = self._compile(source, ["-fsyntax-only", *includes], folders)
            return failure or Verdict(PASSED, "")
        return self._once(("syntax", *folders), code, check)

    def _once(self, kind, source, decide):
        key = kind, hashlib.sha256(source.encode(errors="replace")).digest()
        # Without a lock: two threads with the same program may both judge it, and reach the same verdict.
        verdict = self._verdicts.get(key)
        if verdict is None:
            if len(self._verdicts) >= MAX_VERDICTS:
                self._verdicts.clear()
            verdict = self._verdicts[key] = decide(source)
        return verdict

    def _compile(self, source, options, folders=()):
        """Returns (the standard output of g++, None) or (None, the Verdict)."""
        if re.search(r"^\s*#\s*include\s*<bits/stdc\+\+\.h>", source, re.MULTILINE):
            header = self._precompiled_header()
            options = [*options, "-include", str(header)]
            folders = [*folders, header.parent]
        # The sandbox's files vanish with it, so the program comes back as standard output. `sh -c` takes the first word
        # after the script, the g++ of GXX, as its own name, and passes the others as "$@".
        command = ["sh", "-c", 'g++ "$@" source.cpp && if [ -e program ]; then cat program; fi', *GXX, *options]
        result = self.sandbox.run(command, self.compiler_limits, {"source.cpp": source.encode(errors="replace")},
                                  folders)
        if result.status == 0:
            return result.stdout, None
        if result.stderr.startswith(b"bwrap: "):  # says nothing about the code: memory or processes may have run out
            raise RuntimeError(f"the sandbox failed: {readable(result.stderr)}")
        message = readable(result.stderr) or ending(result)
        return None, Verdict(DOES_NOT_COMPILE, message)

    def _compile_and_run(self, source, has_mark):
        libraries = ["-lcrypto"] if re.search(r"#\s*include\s*<openssl/", source) else []
        # Libraries come after the source: the linker reads from left to right.
        program, verdict = self._compile(source, ["-o", "program", "-Wl,--no-as-needed", *libraries])
        if verdict:
            return verdict
        result = self.sandbox.run(["./program"], self.program_limits, {"program": program})
        output = result.stdout.decode(errors="replace")
        is_at_end = output.endswith(self._end_mark + "\n")
        message = readable(output.removesuffix(self._end_mark + "\n").encode() + result.stderr)
        if result.status == 0 and (is_at_end or not has_mark):
            return Verdict(PASSED, message)
        if result.status == 0:
            return Verdict(FAILED, f"{message}\nthe program ended before its tests".strip())
        if result.stopped_by == "output":
            return Verdict(TOO_MUCH_OUTPUT, message)
        # The sandbox limits wall time, and the kernel CPU time, by a signal.
        if result.stopped_by or result.status == 128 + 24:  # SIGXCPU
            return Verdict(TIMEOUT, message)
        message = f"{message}\n{ending(result)}".strip()
        if result.status <= 128 or result.status == 128 + 6:  # SIGABRT: of assert(), or of an uncaught exception
            return Verdict(FAILED, message)
        return Verdict(CRASHED, message)

    def _precompiled_header(self):
        """Returns the path of a precompiled <bits/stdc++.h>: g++ takes seconds to read the plain one."""
        with self._lock:
            if not self._header_folder:
                folder = Path(tempfile.mkdtemp(prefix="nanochat_header_"))
                folder.chmod(0o755)
                (folder / "all.h").write_text("#include <bits/stdc++.h>\n")
                # With GXX, as in _compile: g++ uses a precompiled header only with the options that made it.
                subprocess.run([*GXX, "-x", "c++-header", "all.h"], cwd=folder, check=True, capture_output=True)
                self._header_folder = folder
        return self._header_folder / "all.h"


def has_code(text):
    """Returns whether C++ holds more than comments, white space and empty statements."""
    return bool(re.sub(r"//[^\n]*|/\*.*?(?:\*/|$)|[\s;{}]", "", text, flags=re.DOTALL))


def readable(data):
    """Returns a program's output as text; a long one loses its middle."""
    text = data.decode(errors="replace").strip()
    if len(text) <= MESSAGE_CHARACTERS:
        return text
    half = MESSAGE_CHARACTERS // 2
    return f"{text[:half]}\n…\n{text[-half:]}"


def ending(result):
    """Returns in words how a failed program ended."""
    if result.stopped_by:
        return f"stopped: the limit of its {result.stopped_by}"
    if result.status > 128:
        return f"ended by signal {result.status - 128}"
    return f"ended with status {result.status}"

