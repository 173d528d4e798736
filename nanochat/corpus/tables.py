"""Sources that are tables, whose rows are documents: files and folders of parquet, JSON Lines and Arrow streams, as The
Stack, Spark (Hive) and Hugging Face's datasets lay them out. sources.py has the other kinds.

    source = open_table(path, text_column=None, where="score >= 3")     # None if it is a folder of C++
    for piece in pieces(source):                                         # a task each
        for row in iter_rows(piece):
            row.read()
"""
import io
import json
import os
import re
import zlib
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

from nanochat.common import SUFFIXES, BadInput, say
from nanochat.corpus.archives import unpacked
from nanochat.corpus.sources import Table, directory_source, readable, walk
from nanochat.corpus.where import chosen, find_places, type_at, value_at

# What a column is for, and the names under which public corpora have it: the first that is there counts.
ROLES = {
    "text": ("text", "content", "code", "contents", "source_code"),
    "path": ("path", "max_stars_repo_path", "file_path", "filepath", "file_name", "filename"),
    "project": ("project", "repo_name", "max_stars_repo_name", "repository_name", "repo", "repository"),
    "licence": ("licence", "license", "licenses", "max_stars_repo_licenses", "detected_licenses"),
    "language": ("language", "lang", "programming_language"),
    "score": ("score", "int_score", "edu_score", "quality_score"),
}
LANGUAGES = {"c", "c++", "cpp", "cuda", "c/c++"}
KIND = re.compile(r"\.(?:parquet|arrow|(?:jsonl|ndjson|json)(?:\.(?:gz|zst))?)$")
_OTHER_KIND = re.compile(r"\.(?:parquet|parq|pq|arrow|feather|jsonl?|ndjson|csv|tsv|orc|avro)(?:\.\w+)?$", re.I)
_ABOUT = re.compile(r"(?:dataset_infos?|dataset_dict|state)\.json")  # Hugging Face's notes beside the data
_SURROGATE = re.compile(rb"\\u[dD]|\xed[\xa0-\xbf]")  # perhaps half of a character, which is no Unicode
_STRINGS = (pa.string(), pa.large_string(), pa.string_view())
ROWS, BATCH_BYTES = 64, 16 << 20  # that are decoded at a time: fewer rows if they are long
SAMPLE_ROWS, LINES_BYTES = 100, 4 << 20  # of JSON Lines: to find the columns, and what is parsed at a time
LONGEST_LINE = 64 << 20  # of JSON
MOST_PADDING = 1 << 20  # zeros behind a packed file, which fill the block of a tape or a disk
OWN_ZEROS = 8  # with which a packed file itself may end
BAD_LINES, BAD_SHARE = 10, 0.001  # a file with more bad lines than both of these is refused
PIECE_BYTES = 1 << 28  # of a parquet file that one task reads, unpacked


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


def open_table(path, text_column=None, where=""):
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
    partitions = _partitions(files)
    there = {}  # {column: itself}, in the order of the files
    for file, schema in schemas.items():
        for name in (*schema.names, *partitions[file]):
            there[name] = name
    columns = _find_columns(path, there, text_column)
    places = {}
    if where:
        places = find_places(where, columns | there)
        _check_where(where, places, directory, schemas, partitions)
    for file, schema in schemas.items():
        _check_text(directory / file, schema, columns["text"])
    listed = ", ".join(f"{role} = {column}" for role, column in columns.items())
    say(f"{path}: {len(files)} files of documents, {listed}")
    name = KIND.sub("", path.resolve().name) or "root"
    return directory_source(name, directory, files, table=Table(tuple(columns.items()), where, tuple(places.items())))


def _data_files(directory):
    """Returns the relative paths of the data in a folder, or None if it has C or C++ files."""
    found = []
    left_out = []
    for file in walk(directory, with_links=True):
        if file.lower().endswith(SUFFIXES):
            return None
        path = Path(file)
        is_note = any(part.startswith("_") for part in path.parts)  # what Spark writes about its data
        if is_note or path.name.startswith(".") or _ABOUT.fullmatch(path.name):
            continue
        if KIND.search(path.name):
            found.append(str(path))
        elif _OTHER_KIND.search(path.name):
            left_out.append(str(path))
    if left_out:
        say(f"warning: {len(left_out)} files of {directory} are not read, such as {min(left_out)}: convert or rename "
            "them to .parquet, .jsonl, .jsonl.gz, .jsonl.zst or .arrow")
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
        elif path.suffix == ".arrow":
            with pa.ipc.open_stream(pa.memory_map(str(path))) as stream:
                rows = sum(map(len, stream))
                schema = stream.schema
        else:
            sample = [row for row in next(_json_batches(path, SAMPLE_ROWS), []) if row is not None]
            rows = len(sample)
            names = dict.fromkeys(name for row in sample for name in row)
            schema = pa.schema([(name, _type_of(sample, name)) for name in names])
    return schema if rows else None


def _type_of(rows, name):
    try:
        return pa.array([row.get(name) for row in rows]).type
    except (pa.ArrowException, OverflowError):
        return pa.null()  # values of several types; if the column is needed, reading it says so


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


def _check_where(where, places, directory, schemas, partitions):
    """Raises BadInput unless the condition fits the types of all files, and each of its places is in one of them."""
    absent = set(places)
    for file, schema in schemas.items():
        known = {name: pa.scalar(value).type for name, value in partitions[file].items()}
        known |= dict(zip(schema.names, schema.types, strict=True))
        types = {name: kind for name, place in places.items() if (kind := type_at(known, place)) is not None}
        with _reading(directory / file, f"check --where={where}"):
            chosen(where, {name: pa.nulls(0, kind) for name, kind in types.items()}, 0)
        absent -= types.keys()
    if absent:
        raise BadInput(f"--where={where}: no file has {', '.join(sorted(absent))}: check the field's name")


def _check_text(path, schema, name):
    if schema.names.count(name) != 1:
        number = "several columns" if name in schema.names else "no column"
        raise BadInput(f"{path} has {number} {name}: name another --text_column, of {', '.join(schema.names)}")
    kind = schema.field(name).type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if kind not in (*_STRINGS, pa.binary(), pa.large_binary(), pa.binary_view(), pa.null()):
        raise BadInput(f"{path}: its column {name} holds {kind}, not text: name another --text_column, of "
                       f"{', '.join(schema.names)}")


def _partitions(files):
    """Returns {file: {column: value}} that the folders of Hive say, such as lang=cpp/part-0.parquet. The values of a
    column are numbers if all of them are."""
    found = {}
    for file in files:
        pairs = [part.split("=", 1) for part in Path(file).parent.parts if "=" in part]
        found[file] = {name: None if "__HIVE_DEFAULT" in value else unquote(value) for name, value in pairs}
    for name in set().union(*found.values()):
        values = [values[name] for values in found.values() if values.get(name) is not None]
        if all(re.fullmatch("-?[0-9]{1,18}", value) for value in values):
            for own in found.values():
                if own.get(name) is not None:
                    own[name] = int(own[name])
    return found


def pieces(source):
    """Returns the Sources into which tasks divide a table: its files, and groups of row groups of long parquet files. A
    source that is no table is one piece."""
    if not source.table:
        return [source]
    found = []
    for file, values in _partitions(source.files).items():
        piece = directory_source(source.name, source.directory, [file], origin=source.origin)
        groups = _row_groups(Path(source.directory, file))
        for row_groups in groups:
            table = replace(source.table, partitions=tuple(values.items()), row_groups=row_groups)
            found.append(replace(piece, table=table, nbytes=piece.nbytes // len(groups)))
    return found


def _row_groups(path):
    """Returns the numbers of the row groups of each piece of a file; () is the whole file."""
    if path.suffix != ".parquet":
        return [()]
    found = [()]
    with _reading(path):
        metadata = pq.read_metadata(path)
    nbytes = 0
    for number in range(metadata.num_row_groups):
        if nbytes >= PIECE_BYTES:
            found.append(())
            nbytes = 0
        found[-1] += (number,)
        nbytes += metadata.row_group(number).total_byte_size
    return found


# Reading


def iter_rows(source):
    """Yields the Rows of a piece of a table. Raises BadInput if its file cannot be read."""
    table = source.table
    path = Path(source.directory, source.files[0])
    columns = dict(table.columns)
    for rows, refused in _batches(path, table):
        for reason, number in refused.items():
            for _ in range(number):
                yield Row("", 0, bytes, reason)
        for row in rows:
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


def _batches(path, table):
    """Yields (rows, {why rows are refused: their number}) of a file. A row is a dict; its texts are bytes or str."""
    with _reading(path):
        for lines in _read_batches(path, table):
            rows = [dict(table.partitions) | row for row in lines if row is not None]
            kept = rows
            if table.where:
                columns = {}
                for name, place in table.where_columns:
                    columns[name] = pa.array([value_at(row, place) for row in rows])
                kept = [rows[number] for number in chosen(table.where, columns, len(rows)).to_pylist()]
            yield kept, {"bad_line": len(lines) - len(rows), "where": len(rows) - len(kept)}


def _read_batches(path, table):
    """Yields lists of the rows of a file, dicts of the columns that are used; None for a bad line of JSON."""
    names = {*dict(table.columns).values(), *(column for _, (column, *_) in table.where_columns)}
    if path.suffix not in (".parquet", ".arrow"):
        yield from _json_batches(path, text=dict(table.columns)["text"])
        return
    reader = _arrow_batches if path.suffix == ".arrow" else _parquet_batches
    for batch in reader(path, names, table.row_groups):
        yield _as_bytes(pa.Table.from_batches([batch])).to_pylist()


def _parquet_batches(path, names, row_groups):
    with pq.ParquetFile(path, buffer_size=1 << 20, page_checksum_verification=True) as file:
        there = [name for name in file.schema_arrow.names if name in names]
        groups = [file.metadata.row_group(number) for number in row_groups]
        nbytes = max(1, sum(group.total_byte_size for group in groups))
        size = max(1, min(ROWS, BATCH_BYTES * sum(group.num_rows for group in groups) // nbytes))
        # Buffered and without pre_buffer, Arrow holds one page of a column at a time.
        yield from file.iter_batches(size, row_groups, there, use_threads=False)


def _arrow_batches(path, names, row_groups):
    with pa.ipc.open_stream(pa.memory_map(str(path))) as stream:
        for batch in stream:
            for start in range(0, len(batch), ROWS):
                yield batch.select([name for name in batch.schema.names if name in names]).slice(start, ROWS)


def _as_bytes(table):
    """Returns the table with bytes for strings, which may hold malformed UTF-8."""
    for number, field in enumerate(table.schema):
        kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
        if kind in _STRINGS:
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
    with open(path, "rb") as raw, io.BufferedReader(_unpacked(path, raw), 1 << 20) as stream:
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


def _unpacked(path, raw):
    """Returns the stream of what an open file holds, without the zeros behind a packed one. gzip reads past them."""
    if path.suffix != ".zst":
        return unpacked(path.suffix[1:], raw)
    size = path.stat().st_size
    begin = raw.seek(max(0, size - MOST_PADDING))
    end = begin + len(raw.read().rstrip(b"\0"))

    def up_to(end):
        return pa.CompressedInputStream(pa.OSFile(str(path)).get_stream(0, end), "zstd")

    # How many zeros are the file's own, only unpacking it tells.
    for own_end in range(end, end + OWN_ZEROS + 1) if size - end > OWN_ZEROS else ():
        with suppress(OSError), up_to(own_end) as stream:
            while stream.read(1 << 20):
                pass
            return up_to(own_end)
    return up_to(size)


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
def _reading(path, advice="copy it again, or leave it out"):
    """Turns what Arrow says of the file into a BadInput."""
    try:
        yield
    except UnicodeEncodeError:
        raise BadInput(f"the path {path} is not UTF-8, which pyarrow needs: rename the folder or file") from None
    except (pa.ArrowException, OSError, EOFError, zlib.error, OverflowError, UnicodeDecodeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise BadInput(f"{path} cannot be read ({reason}): {advice}") from None
