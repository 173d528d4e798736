"""Decides whether C++ works: g++ compiles it together with its tests, and the program runs, both in the sandbox."""
import hashlib
import os
import re
import secrets
import subprocess
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

from nanochat.common import BadInput, flag, printable
from nanochat.judge.sandbox import MIB, Limits, Sandbox, need

COMPILER_LIMITS = Limits(cpu_s=10, wall_s=60, memory_bytes=2048 * MIB, output_bytes=32 * MIB)
PROGRAM_LIMITS = Limits(cpu_s=5, wall_s=20, memory_bytes=1024 * MIB, output_bytes=65536)
# A function that ends without its value crashes. Otherwise, it would return what chance left, such as the right value.
GXX = ["g++", "-std=c++17", "-w", "-fmax-errors=5", "-fsanitize=return", "-fsanitize-undefined-trap-on-error"]
MESSAGE_CHARACTERS = 4000
# Names of C++ that tests rely on. A macro of the code must not change them.
NAMES = """alignas alignof asm auto bool break case catch char char16_t char32_t class const const_cast constexpr
continue decltype default delete do double dynamic_cast else enum explicit export extern false float for friend
goto if inline int long mutable namespace new noexcept nullptr operator private protected public register
reinterpret_cast return short signed sizeof static static_assert static_cast struct switch template this
thread_local throw true try typedef typeid typename union unsigned using virtual void volatile wchar_t while main
std NDEBUG __assert_fail""".split()
TESTS = '#include "source.cpp"\n' + "".join(f"#undef {name}\n" for name in NAMES) + "#include <cassert>\n#line 1\n%s"
# A program that calls exit(0) succeeds without running its tests. So it passes only if a secret mark is printed, too,
# which stands in this file alone. It is printed once the main() of the tests has returned 0 in the process that began
# it, to a descriptor that main() does not know. The linker takes __wrap_main for main, and that main for __real_main.
GUARD = """#include <unistd.h>
extern "C" int __real_main(int, char**, char**);
extern "C" int __wrap_main(int argc, char** argv, char** environment) {
    static const char mark[] = "%s\\n";
    int output = dup(STDOUT_FILENO);
    pid_t process = getpid();
    int status = __real_main(argc, argv, environment);
    if (status == 0 && getpid() == process)
        write(output, mark, sizeof mark - 1);
    return status;
}
"""
# A precompiled header comes first. So it stands for an #include that comes after other headers only.
ALL_HEADERS = re.compile(rb"""(?:[ \t]*(?:\#[ \t]*include[ \t]*<[^>\n]*>[ \t]*|//[^\n]*)?\r?\n)*
                             [ \t]*\#[ \t]*include[ \t]*<bits/stdc\+\+\.h>""", re.VERBOSE)

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

    @property
    def num_workers(self):
        return len(os.sched_getaffinity(0)) if self.workers == -1 else self.workers


class Judge:
    """Judges programs, each distinct one once. Threads may share it. A context manager."""

    def __init__(self, compiler_limits=COMPILER_LIMITS, program_limits=PROGRAM_LIMITS):
        """Raises BadInput if there is no g++ that works or no sandbox (see Sandbox)."""
        need("g++", "g++")
        self.sandbox = Sandbox()
        self.compiler_limits = compiler_limits
        self.program_limits = program_limits
        self._lock = threading.Lock()  # of the headers
        self._verdicts = {}
        self._mark = secrets.token_hex(8)
        self._temporary = tempfile.TemporaryDirectory(prefix="nanochat_judge_", ignore_cleanup_errors=True)
        self._folder = Path(self._temporary.name)  # of what is compiled once
        self._folder.chmod(0o755)
        (self._folder / "guard.cpp").write_text(GUARD % self._mark)
        self._compile_once("-c", "guard.cpp")

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._temporary.cleanup()

    def judge(self, code, tests=""):
        """Returns the Verdict of the program of `code` and then `tests`, which hold main() if there are any."""
        files = {"source.cpp": code}
        if tests:
            files["tests.cpp"] = TESTS % tests
        return self._once("judge", files, self._compile_and_run)

    def check_syntax(self, code):
        """Returns the Verdict of the compiler alone: "passed" or "does not compile"."""
        def check(files):
            _, failure = self._compile(files, ["-fsyntax-only"])
            return failure or Verdict(PASSED, "")
        return self._once("syntax", {"source.cpp": code}, check)

    def _once(self, kind, files, decide):
        files = {name: text.encode(errors="replace") for name, text in files.items()}
        if max(map(len, files.values())) > self.compiler_limits.file_bytes:
            limit = self.compiler_limits.file_bytes // MIB
            return Verdict(DOES_NOT_COMPILE, f"the program has more than {limit} MiB of text")
        key = kind, *(hashlib.sha256(data).digest() for data in files.values())
        # Without a lock: two threads with the same program may both judge it, and reach the same verdict.
        verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = self._verdicts[key] = decide(files)
        return verdict

    def _compile(self, files, options):
        """Returns (the standard output of g++, None) or (None, the Verdict). g++ reads the last of `files`."""
        if ALL_HEADERS.match(files["source.cpp"]):
            options = ["-include", str(self._precompiled_headers()), *options]
        # The sandbox's files vanish with it, so the program comes back as standard output. `sh -c` takes the first word
        # after the script, the g++ of GXX, as its own name, and passes the others as "$@".
        command = ["sh", "-c", 'g++ "$@" && if [ -e program ]; then cat program; fi', *GXX, list(files)[-1], *options]
        result = self.sandbox.run(command, self.compiler_limits, files, [self._folder])
        if result.status == 0:
            return result.stdout, None
        # Equal programs get equal messages, wherever the folder is.
        message = readable(result.stderr.replace(f"{self._folder}/".encode(), b""))
        return None, Verdict(DOES_NOT_COMPILE, message or ending(result))

    def _compile_and_run(self, files):
        options = ["-o", "program", "-Wl,--wrap=main", str(self._folder / "guard.o")]
        if any(re.search(rb"#\s*include\s*<openssl/", data) for data in files.values()):
            options.append("-lcrypto")
        program, verdict = self._compile(files, options)
        if verdict:
            return verdict
        result = self.sandbox.run(["./program"], self.program_limits, {"program": program})
        mark = f"{self._mark}\n".encode()
        message = readable(result.stdout.replace(mark, b"") + result.stderr)
        if result.status == 0 and mark in result.stdout:
            return Verdict(PASSED, message)
        if result.status == 0:
            return Verdict(FAILED, f"{message}\nended with status 0 before main() returned 0".strip())
        if result.stopped_by == "output":
            return Verdict(TOO_MUCH_OUTPUT, message)
        # The sandbox limits wall time, and the kernel CPU time, by a signal.
        if result.stopped_by == "wall time" or result.status == 128 + 24:  # SIGXCPU
            return Verdict(TIMEOUT, message)
        message = f"{message}\n{ending(result)}".strip()
        # SIGABRT: of assert(), or of an uncaught exception
        if result.status <= 128 or result.status == 128 + 6:
            return Verdict(FAILED, message)
        return Verdict(CRASHED, message)

    def _precompiled_headers(self):
        """Returns the path of a precompiled <bits/stdc++.h>: g++ takes seconds to read the plain one."""
        path = self._folder / "all.h"
        with self._lock:
            if not path.exists():
                path.write_text("#include <bits/stdc++.h>\n")
                self._compile_once("-x", "c++-header", "all.h")
        return path

    def _compile_once(self, *options):
        # With GXX, as in _compile: g++ uses a precompiled header only with the options that made it.
        done = subprocess.run([*GXX, *options], cwd=self._folder, capture_output=True)
        if done.returncode:
            raise BadInput(f"g++ cannot compile the judge's own files ({readable(done.stderr)}): install it again")


def has_code(text):
    """Returns whether C++ holds more than comments, white space and empty statements."""
    return bool(re.sub(r"//[^\n]*|/\*.*?(?:\*/|$)|[\s;{}]", "", text, flags=re.DOTALL))


def readable(data):
    """Returns a program's output as text that is safe to print; a long one loses its middle."""
    text = data.decode(errors="replace").strip()
    if len(text) > MESSAGE_CHARACTERS:
        half = MESSAGE_CHARACTERS // 2
        text = f"{text[:half]}\n…\n{text[-half:]}"
    return printable(text, keep="\n\t")


def ending(result):
    """Returns in words how a failed program ended."""
    if result.stopped_by:
        return f"stopped: the limit of its {result.stopped_by}"
    if result.status > 128:
        return f"ended by signal {result.status - 128}"
    return f"ended with status {result.status}"

