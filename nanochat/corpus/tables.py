"""Sources that are tables, whose rows are documents: files and folders of parquet and JSON Lines, as The Stack, Spark
and Hugging Face's datasets lay them out. sources.py has the other kinds.

    source = open_table(path)       # None if it is a folder of C++
    for piece in pieces(source):    # a task each
        for row in iter_rows(piece):
            row.read()
"""
import io
import json
import os
import re
import zlib
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from nanochat.common import SUFFIXES, BadInput, say
from nanochat.corpus.archives import unpacked
from nanochat.corpus.sources import directory_source, readable, walk
from nanochat.data.shards import STRINGS, check_text_column

# What a column is for, and the names under which public corpora have it: the first that is there counts.
ROLES = {
    "text": ("text", "content", "code", "contents", "source_code"),
    "path": ("path", "max_stars_repo_path", "file_path", "filepath", "file_name", "filename"),
    "project": ("project", "repo_name", "max_stars_repo_name", "repository_name", "repo", "repository"),
    "licence": ("licence", "license", "licenses", "max_stars_repo_licenses", "detected_licenses"),
    "language": ("language", "lang", "programming_language"),
}
LANGUAGES = {"c", "c++", "cpp", "cuda", "c/c++"}
KIND = re.compile(r"\.(?:parquet|(?:jsonl|ndjson|json)(?:\.(?:gz|zst))?)$")
_ABOUT = re.compile(r"(?:dataset_infos?|dataset_dict|state)\.json")  # Hugging Face's notes beside the data
_SURROGATE = re.compile(rb"\\u[dD]|\xed[\xa0-\xbf]")  # perhaps half of a character, which is no Unicode
ROWS, BATCH_BYTES = 64, 16 << 20  # that are decoded at a time: fewer rows if they are long
SAMPLE_ROWS, LINES_BYTES = 100, 4 << 20  # of JSON Lines: to find the columns, and what is parsed at a time
LONGEST_LINE = 64 << 20  # of JSON
BAD_LINES, BAD_SHARE = 10, 0.001  # a file with more bad lines than both of these is refused


class Row(NamedTuple):
    """A document of a table, or a file."""
    path: str
    nbytes: int
    read: Callable[[], bytes]
    refused: str = ""  # why it is dropped unseen
    project: str = ""  # as everything below, "" if it is unknown
    licence: str = ""
    group: str = ""  # what is held out as a whole: a project or path


# Finding


def open_table(path, text_column=None):
    """Returns a Source with all files of the table `path`, or None if it is no table but a tarball or a folder of C++.
    Prints its columns. Raises BadInput if it has no documents or lacks a column."""
    with readable():
        if path.is_dir():
            directory = path.resolve()
            files = _data_files(directory)
            if files is None:
                return None
        elif path.is_file() and KIND.search(path.name):
            directory = path.parent.resolve()
            files = [path.name]
        else:
            return None
    if not files:
        raise BadInput(f"--source={path} has neither C or C++ files nor parquet or JSON Lines: name a folder that does")
    schemas = {file: schema for file in files if (schema := _schema(directory / file))}
    files = list(schemas)
    if not files:
        raise BadInput(f"--source={path} has no documents: its files are empty")
    there = dict.fromkeys(name for schema in schemas.values() for name in schema.names)
    columns = _find_columns(path, there, text_column)
    for file, schema in schemas.items():
        check_text_column(directory / file, schema, columns["text"], "name another --text_column")
    listed = ", ".join(f"{role} = {column}" for role, column in columns.items())
    say(f"{path}: {len(files)} files of documents, {listed}")
    name = KIND.sub("", path.resolve().name) or "root"
    return directory_source(name, directory, files, columns=tuple(columns.items()))


def _data_files(directory):
    """Returns the relative paths of the data in a folder, or None if it has C or C++ files."""
    found = []
    for file in walk(directory, with_links=True):
        if file.lower().endswith(SUFFIXES):
            return None
        path = Path(file)
        is_note = any(part.startswith("_") for part in path.parts)  # what Spark writes about its data
        if is_note or path.name.startswith(".") or _ABOUT.fullmatch(path.name):
            continue
        if KIND.search(path.name):
            found.append(str(path))
    # A file .json beside others is seldom data.
    return [file for file in found if not file.endswith(".json")] or found


def _schema(path):
    """Returns the names and types of a file's columns, or None if it has no documents, as many of Spark's. Raises
    BadInput if it cannot be read."""
    with _reading(path):
        if path.suffix == ".parquet":
            with pq.ParquetFile(path) as file:
                rows = file.metadata.num_rows
                schema = file.schema_arrow
        else:
            sample = [row for row in next(_json_batches(path, SAMPLE_ROWS), []) if row is not None]
            rows = len(sample)
            names = dict.fromkeys(name for row in sample for name in row)
            schema = pa.schema([(name, pa.null()) for name in names])  # each line's values may have other types
    return schema if rows else None


def _find_columns(path, there, text_column):
    """Returns {role: name of the column}. Raises BadInput if there is no text."""
    named = {**ROLES, "text": (text_column,)} if text_column else ROLES
    found = {}
    for role, names in named.items():
        present = [name for name in names if name in there]
        if present:
            found[role] = present[0]
    if "text" not in found:
        wanted = f"no column {text_column}" if text_column else "none of the columns " + ", ".join(ROLES["text"])
        raise BadInput(f"--source={path} has {wanted}: name its text with --text_column, of {', '.join(there)}")
    return found


def pieces(source):
    """Returns the Sources into which tasks divide a table: its files. A source that is no table is one piece."""
    if not source.columns:
        return [source]
    return [directory_source(source.name, source.directory, [file], columns=source.columns, origin=source.origin)
            for file in source.files]


# Reading


def iter_rows(source):
    """Yields the Rows of a piece of a table. Raises BadInput if its file cannot be read."""
    columns = dict(source.columns)
    path = Path(source.directory, source.files[0])
    with _reading(path):
        for rows in _batches(path, columns):
            for row in rows:
                if row is None:
                    yield Row("", 0, bytes, "bad_line")
                    continue
                text = row.get(columns["text"]) or b""
                known = {role: _as_text(row.get(name)) for role, name in columns.items() if role != "text"}
                yield _row(source.files[0], known, text if isinstance(text, bytes) else text.encode())


def _row(file, known, text):
    """Returns the Row of what its columns say."""
    path = known.get("path", "").lstrip("/")
    language = known.get("language", "").lower()
    is_cpp = path.lower().endswith(SUFFIXES)
    if not os.path.splitext(path)[1]:
        is_cpp = language in LANGUAGES or not (path or language)
    project = known.get("project", "")
    return Row(path or file, len(text), lambda: text, "" if is_cpp else "not_c_or_cpp", project,
               known.get("licence", ""), project or path)


def _as_text(value):
    """Returns the value of a column as text: "" for null, and the values of a list with AND between them."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, list):
        return " AND ".join(map(_as_text, value))
    return "" if value is None else str(value)


def _batches(path, columns):
    """Yields lists of the rows of a file, dicts of these columns, {role: name}; None for a bad line of JSON. Texts are
    bytes or str."""
    if path.suffix != ".parquet":
        yield from _json_batches(path, text=columns["text"])
        return
    with pq.ParquetFile(path, buffer_size=1 << 20, page_checksum_verification=True) as file:
        there = [name for name in file.schema_arrow.names if name in columns.values()]
        groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
        nbytes = max(1, sum(group.total_byte_size for group in groups))
        size = max(1, min(ROWS, BATCH_BYTES * file.metadata.num_rows // nbytes))
        # Buffered and without pre_buffer, Arrow holds one page of a column at a time.
        for batch in file.iter_batches(size, columns=there, use_threads=False):
            yield _as_bytes(pa.Table.from_batches([batch])).to_pylist()


def _as_bytes(table):
    """Returns the table with bytes for strings, which may hold malformed UTF-8."""
    for number, field in enumerate(table.schema):
        kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
        if kind in STRINGS:
            table = table.set_column(number, field.name, table[number].cast(kind).cast(pa.large_binary()))
    return table


def _json_batches(path, most_rows=4096, text=None):
    """Yields lists of the objects in a file of JSON Lines, which may be compressed; None for a bad line, as one whose
    column `text` holds none. Raises ArrowInvalid if all or many lines are bad."""
    rows = []
    nbytes = 0
    num_bad = 0
    first_bad = ""
    is_empty = True
    with open(path, "rb") as raw, io.BufferedReader(unpacked(path.suffix[1:], raw), 1 << 20) as stream:
        number = 0
        while line := stream.readline(LONGEST_LINE):
            number += 1
            if len(line) == LONGEST_LINE:
                raise pa.ArrowInvalid(f"line {number} is longer than {LONGEST_LINE >> 20} MiB")
            if line.strip():
                try:
                    rows.append(_parse(line, number, text))
                    is_empty = False
                except ValueError as error:
                    rows.append(None)
                    num_bad += 1
                    first_bad = first_bad or str(error)
                    if num_bad > max(BAD_LINES, number * BAD_SHARE):
                        raise pa.ArrowInvalid(f"{num_bad} of its first {number} lines are bad: {first_bad}") from None
            nbytes += len(line)
            if nbytes >= LINES_BYTES or len(rows) >= most_rows:
                yield rows
                rows = []
                nbytes = 0
    if num_bad and is_empty:
        raise pa.ArrowInvalid(first_bad)
    if rows:
        yield rows
    if num_bad:
        say(f"warning: {path}: {num_bad} of {number} lines are skipped: {first_bad}")


def _parse(line, number, text):
    try:
        row = json.loads(line.rstrip())
        if _SURROGATE.search(line):
            row = json.loads(json.dumps(row, ensure_ascii=False).encode(errors="replace"))
    except (ValueError, RecursionError) as error:
        reason = str(error).partition(": line ")[0].removesuffix(" at")  # the rest counts the lines of this line
        raise ValueError(f"line {number} is not JSON: {reason}") from None
    if not isinstance(row, dict):
        raise ValueError(f"line {number} is not an object of JSON, such as {{\"text\": …}}")
    if not isinstance(row.get(text) or "", str):
        raise ValueError(f"line {number}: {text} is not text in {json.dumps(row)[:60]}…")
    return row


@contextmanager
def _reading(path):
    """Turns what Arrow says of the file into a BadInput."""
    try:
        yield
    except UnicodeEncodeError:
        raise BadInput(f"the path {path} is not UTF-8, which pyarrow needs: rename the folder or file") from None
    except (pa.ArrowException, OSError, EOFError, zlib.error, OverflowError, UnicodeDecodeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise BadInput(f"{path} cannot be read ({reason}): copy it again, or leave it out") from None
