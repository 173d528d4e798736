"""Chooses the rows of a table by a condition such as `score >= 3 and language == "C++"`. Nothing in it is run: it may
only hold names of columns, constants, comparisons, `in`, `and`, `or` and `not`."""
import ast
import operator

import pyarrow as pa
import pyarrow.compute as pc

from nanochat.common import BadInput

_COMPARE = {ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
            ast.Gt: operator.gt, ast.GtE: operator.ge}
_JOIN = {ast.And: operator.and_, ast.Or: operator.or_}


# A condition is parsed as Python, and translated node by node into an expression of Arrow, which computes columns.
# A comparison with null is null, and a row is chosen only if the condition is true, as in SQL.


def find_places(text, known):
    """Returns {name in a condition, such as meta.score: (column, fields in it)}. known: {name: column}. Raises BadInput
    if a name is not known, or the text not in Python's syntax."""
    names = set()
    inner = set()  # meta in meta.score, which is one name
    for node in ast.walk(_parse(text)):  # from the outside in
        if isinstance(node, ast.Attribute):
            inner.add(node.value)
        if isinstance(node, (ast.Name, ast.Attribute)) and node not in inner:
            names.add(ast.unparse(node))
    places = {}
    for name in sorted(names):
        first, *fields = name.split(".")
        if first not in known:
            raise BadInput(f"--where={text}: no column is called {first}, of {', '.join(sorted(known))}")
        places[name] = (known[first], *fields)
    return places


def value_at(row, place):
    """Returns the value of a place (column, fields in it) in a row, {column: value}; None if it has no such field."""
    for name in place:
        row = row.get(name) if isinstance(row, dict) else None
    return row.decode("utf-8", "replace") if isinstance(row, bytes) else row


def type_at(types, place):
    """Returns the type of a place (column, fields in it): null if it is unknown, and None if there is no such field.
    types: {column: its type}."""
    column, *fields = place
    kind = types.get(column, pa.null())
    for field in fields:
        if pa.types.is_null(kind):
            return kind
        if not pa.types.is_struct(kind) or kind.get_field_index(field) < 0:
            return None
        kind = kind.field(field).type
    return kind


def chosen(text, columns, num_rows):
    """Returns the numbers of the rows for which a condition is true. columns: {name in it: array}; other names are null
    in every row. Raises BadInput for anything but conditions on columns."""
    table = pa.table({**columns, "": pa.array(range(num_rows), pa.int64())})
    try:
        condition = _condition(_parse(text), table.schema)
    except (pa.ArrowException, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise BadInput(f"--where={text}: {error}") from None
    return table.filter(condition)[""]


def _parse(text):
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = getattr(error, "msg", error)
        raise BadInput(f"--where={text} cannot be read ({reason}): write conditions such as score >= 3 and language == "
                       '"C++"') from None


def _condition(node, schema):
    """Returns the expression of a node that is true or false."""
    if isinstance(node, ast.BoolOp):
        parts = [_condition(value, schema) for value in node.values]
        joined = parts[0]
        for part in parts[1:]:
            joined = _JOIN[type(node.op)](joined, part)
        return joined
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return ~_condition(node.operand, schema)
    if isinstance(node, ast.Compare):
        return _comparison(node, schema)
    return _column(node, schema, pa.bool_())


def _comparison(node, schema):
    joined = None
    left = node.left
    for sign, right in zip(node.ops, node.comparators, strict=True):
        if isinstance(sign, (ast.In, ast.NotIn)):
            values = pa.array(_constant(right, is_list=True))
            part = _column(left, schema, values.type).isin(values)
        elif isinstance(sign, (ast.Is, ast.IsNot)) and isinstance(right, ast.Constant) and right.value is None:
            part = _column(left, schema, pa.null()).is_null()
        elif type(sign) in _COMPARE:
            part = _COMPARE[type(sign)](_value(left, schema), _value(right, schema))
        else:
            raise ValueError(f"{ast.unparse(node)} is no condition: is and is not need None")
        if isinstance(sign, (ast.NotIn, ast.IsNot)):
            part = ~part
        joined = part if joined is None else joined & part
        left = right
    return joined


def _value(node, schema):
    if isinstance(node, (ast.Name, ast.Attribute)):
        return _column(node, schema, pa.null())
    return pc.scalar(_constant(node))


def _column(node, schema, kind):
    """Returns the column of a name. A column without values has no type, so it becomes a null of the type `kind`."""
    if not isinstance(node, (ast.Name, ast.Attribute)):
        raise ValueError(f"{ast.unparse(node)} is no condition on a column: compare columns with constants")
    name = ast.unparse(node)
    if name not in schema.names or pa.types.is_null(schema.field(name).type):
        return pc.scalar(pa.scalar(None, kind))
    return pc.field(name)


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
