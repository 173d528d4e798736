"""What closes unfinished C++ is judged by the real compiler."""
import pytest

from nanochat.judge.unfinished import closers, end_of_function, ends_statement, error_lines

UNFINISHED = [
    "namespace n {\nclass A {\n    void f(int x) {\n        do {\n            while (x) {\n",
    "int f(int x) {\n    auto g = [&](int y) {\n        return x;\n",
    "void h(int);\ntemplate <class F> void each(F f) {}\nvoid f() {\n    each([](int x) {\n        h(x);\n",
    "int f() {\n    int values[] = {\n",
    "int f(int x) {\n    try {\n        switch (x) {\n            case 1: {\n#if 1\n                x = '}';  // {\n",
    'const char* f() {\n    if (true) {\n        return "({";\n    }\n',
]


@pytest.mark.parametrize("code", UNFINISHED)
def test_closed_code_compiles(judge, code):
    assert ends_statement(code)
    assert judge.check_syntax(code + closers(code)).message == ""
    assert not judge.check_syntax(code).passed


def test_errors_are_found_in_the_lines_that_led_to_them(judge):
    code = "#include <vector>\nstruct A {\n    A(A&) = delete;\n};\nvoid f() {\n    int x = 1;\n" \
           "    std::vector<A>(x).push_back(1);\n    y = 2;\n}\n"
    assert set(error_lines(judge.check_syntax(code).message)) == {7, 8}
    assert error_lines(judge.judge("int f();\n", "int main() { return g(); }\n").message) == []  # an error in the tests
    of_header = judge.judge("int f();\n#define vector\n#include <vector>\n", "int main() {}\n").message
    assert "from source.cpp:3" in of_header and "from tests.cpp:1" in of_header
    assert set(error_lines(of_header)) == {3}
    half = judge.check_syntax("int f(int x) {\n    return x +\n}\n").message
    assert error_lines(half) and not error_lines(half, only_certain=True)
    assert error_lines(judge.check_syntax("int f() {\n    return y +\n}\n").message, only_certain=True) == [2]


@pytest.mark.parametrize("text, end", [
    ("    x();\n}\nint g() {\n}\n", 9), ("    if (x) {\n    }\n", None), ("}", 0), ('    "}";\n', None)])
def test_a_function_ends_with_its_own_brace(text, end):
    assert end_of_function("namespace n {\nint f() {\n", text) == end
