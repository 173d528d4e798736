"""Reads C++ that is not finished: what would close it, where the compiler found errors, which lines belong together."""
import re

from nanochat.judge.gaps import CODE_TOKEN

OPENING = {")": "(", "}": "{"}
_CONDITION = re.compile(r"^[ \t]*#[ \t]*(if|endif)", re.MULTILINE)
_ERROR = re.compile(r"(?:fatal )?error: ")
# Errors that nothing can mend that follows on the same line or later.
_CERTAIN = re.compile("not declared|not been declared|not a member|no member named|does not name a type|at block scope|"
                      "stray|not allowed here|no type named|no template named|unterminated|missing terminating")
_PLACE = re.compile(r"source\.cpp:(\d+)")  # the judge's name of the file
_TYPE = re.compile(r"\b(class|struct|union|enum)\b[^()]*$")
_EXPRESSION = re.compile(r"(=|\breturn|\]|\]\s*\([^()]*\)[^;{}()]*)$")  # before a brace: a list of values, a lambda


def brackets(code):
    """Returns [(begin, end)] of the pairs of brackets in `code`, and [begin] of those that are not closed."""
    pairs = []
    opened = []
    for match in CODE_TOKEN.finditer(code):
        # A closing bracket that does not fit the last open one is left out: it may be a macro's, or a model's mistake.
        if match[0] in ("(", "{"):
            opened.append(match.start())
        elif match[0] in (")", "}") and opened and code[opened[-1]] == OPENING[match[0]]:
            pairs.append((opened.pop(), match.start()))
    return pairs, opened


def end_of_function(prompt, text):
    """Returns where in `text`, after `prompt`, the last brace is closed that `prompt` leaves open; or None."""
    opened = brackets(prompt)[1]
    for begin, end in brackets(prompt + text)[0]:
        if begin in opened[-1:]:
            return end - len(prompt)
    return None


def closers(code):
    """Returns the shortest text with which `code`, cut off after a whole statement, may compile: it closes brackets
    and #if."""
    num_conditions = 0
    for match in _CONDITION.finditer(code):
        if match[1] == "if":
            num_conditions += 1
        else:
            num_conditions = max(0, num_conditions - 1)
    # A condition that is still open was mostly begun inside the function, so #endif comes before the closing brackets.
    found = "#endif\n" * num_conditions
    opened = brackets(code)[1]
    while opened:
        found += _closer(code, opened.pop(), is_argument=bool(opened) and code[opened[-1]] == "(")
    return found


def _closer(code, at, is_argument):
    """Returns what closes the bracket at `at` and ends its statement. is_argument: it stands within parentheses, whose
    closer ends the statement."""
    if code[at] == "(":
        return ");\n"
    if is_argument:
        return "}"
    # What stands before a brace in its statement says what the brace opens. 300 characters are enough for nearly all.
    head = re.split(r"[;{}]", code[:at][-300:])[-1].rstrip()
    if re.search(r"\bdo$", head):
        return "} while (false);\n"
    if re.search(r"\btry$", head):
        return "} catch (...) {}\n"
    return "};\n" if _TYPE.search(head) or _EXPRESSION.search(head) else "}\n"


def ends_statement(text):
    """Returns whether `text` ends after a whole statement or an opening brace, comments left out."""
    code = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL).rstrip()
    return code.endswith((";", "{", "}"))


def error_lines(message, only_certain=False):
    """Returns the lines, counted from 1, at which g++ found errors; for an error in a header, the line that led to it.
    only_certain: leaves out errors that more code on the same line could mend."""
    found = []
    line = None
    for text in message.splitlines():
        place = _PLACE.search(text)
        if place:
            line = int(place[1])
        if line and _ERROR.search(text) and (_CERTAIN.search(text) or not only_certain):
            found.append(line)
    return found


def block_of(text, line):
    """Returns (first, end) of the lines of the innermost block around a line of `text`, or that begins in it, with the
    lines of its braces. What is not closed, such as the function itself, reaches from the line to the end."""
    def line_of(at):
        return text.count("\n", 0, at)
    pairs, opened = brackets(text)
    num_lines = len(text.splitlines())
    # Blocks nest, so of those around a line the innermost begins last. One that is on a single line is no block.
    blocks = [(line_of(begin), line_of(end) + 1) for begin, end in pairs] + [(line_of(at), num_lines) for at in opened]
    return max((block for block in blocks if block[0] <= line < block[1] and block[1] - block[0] > 1),
               default=(line, num_lines))
