"""Reads unfinished C++: the text that would close it, the lines with errors."""
import re

from nanochat.judge.gaps import brackets

_CONDITION = re.compile(r"^[ \t]*#[ \t]*(if|endif)", re.MULTILINE)
_ERROR = re.compile(r"(?:fatal )?error: ")
# Errors that no later text can fix.
_CERTAIN = re.compile("not declared|not been declared|not a member|no member named|does not name a type|at block scope|"
                      "stray|not allowed here|no type named|no template named|unterminated|missing terminating")
# The judge's names of the files. "from tests.cpp:1" stands after the line of the code that includes a header.
_PLACE = re.compile(r"(source|(?<!from )tests)\.cpp:(\d+)")
_TYPE = re.compile(r"\b(class|struct|union|enum)\b[^()]*$")
_EXPRESSION = re.compile(r"(=|\breturn|\]|\]\s*\([^()]*\)[^;{}()]*)$")  # before a brace: a list of values, a lambda


def end_of_function(prompt, text):
    """Returns where `text`, which follows `prompt`, closes the last brace that `prompt` leaves open; or None."""
    opened = brackets(prompt)[1]
    for begin, end in brackets(prompt + text)[0]:
        if begin in opened[-1:]:
            return end - len(prompt)
    return None


# `int f(int x) { if (x) { g(` gets `); } }`, and `struct A { int x;` gets `};`: what follows a closing bracket depends
# on what the opening one began. The search asks the compiler about a function that is not written to its end, and an
# error of the closing text must never look like one of the model's.
def closers(code):
    """Returns the shortest text that closes the brackets and #if of `code`, which was cut after a statement."""
    num_conditions = 0
    for match in _CONDITION.finditer(code):
        if match[1] == "if":
            num_conditions += 1
        else:
            num_conditions = max(0, num_conditions - 1)
    # An open condition usually began inside the function, so #endif comes before the closing brackets.
    found = "#endif\n" * num_conditions
    opened = brackets(code)[1]
    while opened:
        found += _closer(code, opened.pop(), is_argument=bool(opened) and code[opened[-1]] == "(")
    return found


def _closer(code, at, is_argument):
    """Returns the text that closes the bracket at `at`, and ends its statement unless it is an argument in another."""
    if code[at] == "(":
        return ");\n"
    if is_argument:
        return "}"
    # The statement before a brace says what the brace opens. 300 characters are nearly always enough.
    head = re.split(r"[;{}]", code[:at][-300:])[-1].rstrip()
    if re.search(r"\bdo$", head):
        return "} while (false);\n"
    if re.search(r"\btry$", head):
        return "} catch (...) {}\n"
    if _TYPE.search(head) or _EXPRESSION.search(head):
        return "};\n"
    return "}\n"


def ends_statement(text):
    """Returns whether `text` without its comments ends after a whole statement or an opening brace."""
    code = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL).rstrip()
    return code.endswith((";", "{", "}"))


def error_lines(message, only_certain=False):
    """Returns the lines, from 1, of the errors of g++. only_certain: without those that later text may fix."""
    found = []
    line = None
    for text in message.splitlines():
        place = _PLACE.search(text)
        if place:
            line = int(place[2]) if place[1] == "source" else None
        if line and _ERROR.search(text) and (_CERTAIN.search(text) or not only_certain):
            found.append(line)
    return found
