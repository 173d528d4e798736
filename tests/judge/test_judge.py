"""What the judge says of right, wrong, broken and dishonest code, and of the project's own problems."""
import gc
import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from nanochat.common import BadInput
from nanochat.corpus.scan import telling_sequences
from nanochat.judge.judge import Judge, has_code
from nanochat.judge.problems import STOP, read_problems
from nanochat.judge.sandbox import MIB

DOUBLE = "int twice(int x) { %s }\n"
TESTS = "#include <cassert>\nint main() { assert(twice(3) == 6); return 0; }\n"


@pytest.mark.parametrize("body, status, message", [
    ("return 2 * x;", "passed", ""),
    ("return x;", "failed", "Assertion `twice(3) == 6' failed"),
    ("return y;", "does not compile", "source.cpp:1:27: error: 'y' was not declared"),
    ("return *(volatile int*)0;", "crashed", "signal 11"),
    ("throw 1;", "failed", "terminate called"),
    ("x *= 2;", "crashed", "signal 4"),  # it ends without its value, which chance may have left in a register
    ("__builtin_exit(0);", "failed", "before main() returned 0"),
])
def test_verdicts(judge, body, status, message):
    verdict = judge.judge(DOUBLE % body, TESTS)
    assert verdict.status == status and message in verdict.message


RETURNS = "int main() { return twice(3) == 6 ? 0 : 1; }\n"
WRONG = "#include <cstdlib>\n#include <unistd.h>\n#include <sys/wait.h>\n%s\nint twice(int x) { %s }\n"


@pytest.mark.parametrize("code, tests, status", [
    ("#define NDEBUG\nint twice(int x) { throw 1; }\n", TESTS, "failed"),
    ("#include <cassert>\nint twice(int x) { return x; }\n#undef assert\n#define assert(x)\n",
     TESTS.replace("#include <cassert>\n", ""), "failed"),
    ("#include <cassert>\n#define __assert_fail(...) 0\nint twice(int x) { return x; }\n", TESTS, "failed"),
    ("int twice(int x) { return x; }\n#define return return 0 *\n", "int main() { return twice(3) != 6; }\n", "failed"),
    ("int twice(int x) { return x; }\n#define if(x) if (false)\n",
     "int main() { if (twice(3) != 6) return 1; }\n", "failed"),
    ("int twice(int x) { return x; }\nint main() { return 0; }\n#define main unused", TESTS, "does not compile"),
    ("int twice(int x) { return x; }\n// \\", TESTS, "failed"),
    ("int twice(int x) { return x; }\n/*", TESTS, "does not compile"),
    (DOUBLE % "__builtin_exit(0);", RETURNS, "failed"),
    (DOUBLE % "__builtin_exit(0);", TESTS + "// main\n", "failed"),
    (DOUBLE % "return 2 * x;", "int main(int argc, char** argv) { return twice(argc) != 2 || !argv[0]; }", "passed"),
    ('#line 1 "bwrap: x"\nint x = y;', TESTS, "does not compile"),
    pytest.param("/" * (17 * MIB), TESTS, "does not compile", id="17 MiB"),
    # These end the program with 0 after its tests.
    (WRONG % ("struct Last { ~Last() { _exit(0); } } last;", "return x;"), RETURNS, "failed"),
    (WRONG % ("int n = std::atexit([] { _exit(0); });", "return x;"), RETURNS, "failed"),
    (WRONG % ("int n = on_exit([](int, void*) { _exit(0); }, nullptr);", "return x;"), RETURNS, "failed"),
    (WRONG % ("", "if (fork()) { wait(nullptr); _exit(0); } return x;"), RETURNS, "failed"),
    (WRONG % ("", "if (fork()) { wait(nullptr); _exit(0); } return 2 * x;"), RETURNS, "failed"),
])
def test_the_code_does_not_change_what_its_tests_say(judge, code, tests, status):
    verdict = judge.judge(code, tests)
    assert verdict.status == status, verdict


@pytest.mark.parametrize("body", [
    "std::wcout << L'x' << std::flush;", "std::fclose(stdout);", "close(1);",
    'std::freopen("/dev/null", "w", stdout);'])
def test_right_code_may_do_with_its_output_what_it_likes(judge, body):
    code = f"#include <cstdio>\n#include <iostream>\n#include <unistd.h>\nint twice(int x) {{ {body} return 2 * x; }}\n"
    verdict = judge.judge(code, TESTS)
    assert verdict.passed, verdict


@pytest.mark.parametrize("code", ["%s", "%s#include <bits/stdc++.h>\n"])
def test_code_compiles_without_what_only_its_tests_include(judge, code):
    code %= "int twice(int x) { return std::max(2, 1) * x; }\n"
    verdict = judge.judge(code, "#include <bits/stdc++.h>\n" + TESTS)
    assert verdict.status == "does not compile" and "'max' is not a member of 'std'" in verdict.message


LOG = r"""#include <cstdio>
struct Log { ~Log() { std::puts("\033[2Jclosed"); } };
Log& the_log() { static Log log; return log; }
"""


def test_equal_programs_get_equal_messages_without_control_characters_or_the_judges_own_names(judge):
    """The first writes after main(). The second lacks main(), which the linker misses in the judge's own file."""
    with Judge() as other:
        found = [(each.judge(LOG, "int main() { return &the_log() != &the_log(); }"), each.judge("int x;", "int y;"))
                 for each in (judge, other)]
    assert found[0] == found[1]
    assert found[0][0].passed and found[0][0].message == r"\x1b[2Jclosed"
    assert found[0][1].message.startswith("/usr/bin/ld: guard.o: ")


@pytest.mark.parametrize("text, has", [
    ("  ///\n  // x\n", False), ("/* x\n y */ ;\n", False), ("/* never closed", False), ("", False),
    ("  // x\n  return 1;", True), ("x", True)])
def test_comments_are_no_code(text, has):
    assert has_code(text) == has


def test_equal_programs_are_compiled_once(judge, monkeypatch):
    verdict = judge.judge(DOUBLE % "return 2 * x;", TESTS)
    monkeypatch.setattr(judge.sandbox, "run", None)
    assert judge.judge(DOUBLE % "return 2 * x;", TESTS) is verdict


def test_a_judge_without_a_compiler_that_works_leaves_no_folder(judge, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("nanochat.judge.judge.GXX", ["false"])
    with pytest.raises(BadInput, match="g\\+\\+ cannot compile the judge's own files"):
        Judge()
    gc.collect()
    assert not list(tmp_path.iterdir())


def test_the_compiler_alone_says_whether_a_file_compiles_and_sees_no_file_of_the_machine(judge):
    assert judge.check_syntax("int f() { return 1; }").passed
    assert not judge.check_syntax("int f() { return 1 }").compiles
    message = judge.check_syntax('#include "/etc/passwd"').message
    assert message.startswith("source.cpp:1:10: fatal error: /etc/passwd: No such file")


@pytest.mark.slow
def test_programs_with_all_headers_are_compiled_with_a_precompiled_one(judge, tmp_path):
    """Its name is not in the message, and a line's number is that of the program. Those of MBPP have all headers."""
    code = "#include <bits/stdc++.h>\nusing namespace std;\nint twice(int x) { return %s; }\n"
    assert judge.judge(code % "max(2, 1) * x", TESTS).passed
    assert "source.cpp:3:27: error: 'y'" in judge.judge(code % "y", TESTS).message
    (tmp_path / "mbpp.jsonl").write_text(json.dumps(MBPP))
    [problem] = read_problems(tmp_path / "mbpp.jsonl")
    for text, status in [("    return n % 2 == 0 && n > 2;", "passed"), ("    return false;", "failed")]:
        assert problem.verdict(judge, text).status == status, text


# The problems


def test_a_stop_string_ends_each_own_solution_and_nothing_before():
    problems = read_problems()
    assert len(problems) >= 40 and {problem.difficulty for problem in problems} == {"easy", "medium", "hard"}
    for problem in problems:
        written, _, rest = problem.solution.partition(STOP)
        assert rest.strip("; \n") == "" and written + problem.closing() == problem.solution, problem.name


def without_one_line(solution):
    """Returns the texts of a solution with one line deleted, for each line except blank lines and comments."""
    lines = solution.splitlines(keepends=True)
    return ["".join(lines[:i] + lines[i + 1:]) for i, line in enumerate(lines)
            if line.strip() and not line.strip().startswith("//")]


@pytest.mark.slow
def test_own_solutions_pass_and_with_a_line_deleted_nine_in_ten_fail(judge):
    problems = read_problems()
    programs = [(problem, solution) for problem in problems
                for solution in [problem.solution, *without_one_line(problem.solution)[::8]]]
    with ThreadPoolExecutor(2) as pool:
        verdicts = list(pool.map(lambda pair: judge.judge(pair[0].program(pair[1]), pair[0].tests), programs))
    outcomes = list(zip(programs, verdicts, strict=True))
    assert not [problem.name for (problem, solution), verdict in outcomes
                if solution == problem.solution and not verdict.passed]
    broken = [verdict.passed for (problem, solution), verdict in outcomes if solution != problem.solution]
    assert len(broken) > 50 and sum(broken) <= 0.1 * len(broken)


HUMANEVAL_X = """{"task_id": "CPP/0", "prompt": "#include<vector>\\nint f(int x){\\n", "declaration": \
"#include<vector>\\n#include<math.h>\\nint f(int x){\\n", "canonical_solution": "    return abs(x);\\n}\\n", \
"test": "#include<assert.h>\\nint main(){ assert(f(-1) == 1); }\\n"}\n"""
MULTIPL_E = """{"name": "HumanEval_0_f", "prompt": "long f(long x) {\\n", "tests": \
"}\\nint main() { return f(1) != 2; }\\n", "stop_tokens": ["\\n}"]}\n"""
MBPP = {
    "name": "mbpp_3_is_not_prime", "language": "cpp", "prompt": "#include<assert.h>\n#include<bits/stdc++.h>\n"
    "// Write a cppthon function to identify non-prime numbers.\nbool is_not_prime(long n) {\n",
    "doctests": "transform", "original": "mbpp_3_is_not_prime.py", "prompt_terminology": "reworded",
    "tests": "}\nint main() {\n    auto candidate = is_not_prime;\n    assert(candidate((2)) == (false));\n"
    "    assert(candidate((10)) == (true));\n}\n", "stop_tokens": ["\n}"]}


def test_the_formats_of_others_are_read(judge, tmp_path):
    # Some editors write a byte-order mark. Characters of Unicode that end a line end no line of JSON.
    (tmp_path / "problems.jsonl").write_text(
        "\ufeff" + HUMANEVAL_X + "\n" + MULTIPL_E.replace("_0_", "_\u2028_\x85_") + json.dumps(MBPP))
    first, second, third = read_problems(tmp_path / "problems.jsonl")
    assert judge.judge(first.program(first.solution), first.tests).passed
    assert first.preamble == "#include<math.h>\n" and "math" not in first.prompt
    assert judge.judge(second.program("    return x + 1;" + second.closing()), second.tests).passed
    assert third.name == "mbpp_3_is_not_prime" and telling_sequences([third.prompt])


@pytest.mark.parametrize("content, message", [
    ("", "holds no problem"), ("{}", "HumanEval-X"), ("[1]", "HumanEval-X"),
    (MULTIPL_E.replace('"tests": "', '"tests": null, "x": "'), "HumanEval-X"), ("[" * 10**5, "HumanEval-X"),
    (MULTIPL_E.replace("HumanEval_0_f", r"\ud800"), "HumanEval-X"),
    (MULTIPL_E + MULTIPL_E[:50], "project: row 2: JSONDecodeError"),
    (HUMANEVAL_X.replace("declaration", "d"), "row 1: KeyError 'declaration'"),
    (MULTIPL_E + json.dumps(MBPP | {"tests": " "}), "project: row 2: KeyError 'tests'"),
    ("\x1f\x8bxxx", "HumanEval-X"),
    (MULTIPL_E * 2, "two problems with the name HumanEval_0_f"),
])
def test_a_file_without_problems_is_one_line(tmp_path, content, message):
    (tmp_path / "problems.jsonl").write_bytes(content.encode("latin-1"))
    with pytest.raises(BadInput, match=f"--problems=.*{message}"):
        read_problems(tmp_path / "problems.jsonl")


def test_an_own_problem_without_a_part_is_one_line(tmp_path):
    (tmp_path / "a.cpp").write_text("//@ difficulty: easy\n//@ prompt\nint f() {\n")
    with pytest.raises(BadInput, match="a.cpp has no part 'tests'"):
        read_problems(tmp_path)
