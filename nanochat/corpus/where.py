"""Turns a condition such as `score >= 3 and language == "C++"` into an expression of pyarrow. Nothing in it is run: it
may only hold names of columns, constants, comparisons, `in`, `and`, `or` and `not`."""
import ast
import operator

import pyarrow as pa
import pyarrow.compute as pc

from nanochat.common import BadInput

_COMPARE = {ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
            ast.Gt: operator.gt, ast.GtE: operator.ge}
_JOIN = {ast.And: operator.and_, ast.Or: operator.or_}


def names_in(text):
    """Returns the names of the columns in a condition, sorted. Raises BadInput if it is not Python's syntax."""
    return sorted({node.id for node in ast.walk(_parse(text)) if isinstance(node, ast.Name)})


def expression(text, columns):
    """Returns the pyarrow.compute.Expression of a condition. columns: {name in it: name in the data}. Raises BadInput
    for anything but conditions on these columns."""
    try:
        return _condition(_parse(text), columns)
    except (pa.ArrowException, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise BadInput(f"--where={text}: {error}") from None


def _parse(text):
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = getattr(error, "msg", error)
        raise BadInput(f"--where={text} cannot be read ({reason}): write conditions such as score >= 3 and language == "
                       '"C++"') from None


def _condition(node, columns):
    """Returns the expression of a node that is true or false."""
    if isinstance(node, ast.BoolOp):
        parts = [_condition(value, columns) for value in node.values]
        joined = parts[0]
        for part in parts[1:]:
            joined = _JOIN[type(node.op)](joined, part)
        return joined
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return ~_condition(node.operand, columns)
    if isinstance(node, ast.Compare):
        return _comparison(node, columns)
    return _column(node, columns)


def _comparison(node, columns):
    joined = None
    left = node.left
    for sign, right in zip(node.ops, node.comparators, strict=True):
        if isinstance(sign, (ast.In, ast.NotIn)):
            part = _column(left, columns).isin(_constant(right, is_list=True))
        elif isinstance(sign, (ast.Is, ast.IsNot)) and isinstance(right, ast.Constant) and right.value is None:
            part = _column(left, columns).is_null()
        elif type(sign) in _COMPARE:
            part = _COMPARE[type(sign)](_value(left, columns), _value(right, columns))
        else:
            raise ValueError(f"{ast.unparse(node)} is no condition: is and is not need None")
        if isinstance(sign, (ast.NotIn, ast.IsNot)):
            part = ~part
        joined = part if joined is None else joined & part
        left = right
    return joined


def _value(node, columns):
    if isinstance(node, (ast.Name, ast.Attribute)):
        return _column(node, columns)
    return pc.scalar(_constant(node))


def _column(node, columns):
    """Returns the field of a name, or of names with dots: meta.score is score in the column meta."""
    path = []
    while isinstance(node, ast.Attribute):
        path.insert(0, node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        raise ValueError(f"{ast.unparse(node)} is no condition on a column: compare columns with constants")
    if node.id not in columns:
        raise ValueError(f"no column is called {node.id}, of {', '.join(sorted(columns))}")
    return pc.field(columns[node.id], *path)


def _constant(node, is_list=False):
    """Returns the number, bool or string of a node, or the list of them."""
    try:
        value = ast.literal_eval(node)
    except ValueError:
        value = None
    if is_list and isinstance(value, (list, tuple, set)) and value:
        return list(value)
    if not is_list and isinstance(value, (str, int, float)):
        return value
    wanted = "a list with something in it" if is_list else "a number or a string"
    raise ValueError(f"{ast.unparse(node)} is not {wanted}")
