"""Lists parquet shards, checks them, and reads their text.

A shard is a parquet file with a column of text; only read_columns reads other columns. Each of its rows is called a
document here, because a row is one sequence of the training batch. Shards may come from anywhere and have row groups of
a gigabyte. So no file stays open, and memory holds no more text than the caller asks for. cache.py fetches shards
from buckets and the Hub, one row group at a time.

    shards = open_text(flags, "val")      # what a script's TextFlags name, checked
    fingerprint(shards)                   # changes when the data changes
    read_pieces(shards[0], 3, 0, 100)     # documents 0 to 99 of row group 3, or the first megabytes of their text
    whole_texts(shards)                   # yields the text of one document after the other
"""
import hashlib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from nanochat.common import BadInput, flag, get_base_dir
from nanochat.data.cache import CACHE_GB, LocalFile, RemoteFile, data_files, fetch_footers
from nanochat.data.storage import data_place

DEFAULT_DIRS = {"train": "parquet/base_data_v3", "val": "parquet/val"}  # under the base directory
TEXT = "text"  # the column
STRINGS = (pa.string(), pa.large_string(), pa.string_view())
PIECE_BYTES = 256 * 1024  # longer documents are read and tokenized piece by piece
READ_BATCH_BYTES = 1 << 20  # bytes of text that Arrow decodes at a time
LONGEST_BATCH_BYTES = 32 << 20  # … if texts share bytes in the file, as in a dictionary


@dataclass(frozen=True)
class TextFlags:
    """The flags of every script that reads shards; open_text opens what they name."""
    data_dir: str | None = flag(None, "folder of parquet shards with a column text, gs://… or hf://…; default: in "
                                "$NANOCHAT_BASE_DIR/parquet, base_data_v3 for training and val for evaluations",
                                of=data_place)
    data_cache_gb: float = flag(CACHE_GB, "gigabytes of this machine's disk for a cache of shards that are elsewhere",
                                above=0, at_most=1e6)

    def folder(self, split):
        """Returns the folder of a split, train or val, or None for the default one."""
        return self.data_dir


@dataclass(frozen=True)
class Shard:
    """A parquet file with text, as its footer describes it."""
    file: LocalFile | RemoteFile
    n_bytes: int  # size of the file
    row_group_documents: tuple[int, ...]  # number of documents in each row group
    digest: str  # SHA-256 of name, size, commit on the Hub, and footer
    largest_group_bytes: int = 0  # of its largest row group, compressed

    @property
    def num_documents(self):
        return sum(self.row_group_documents)


class TextPiece(NamedTuple):
    """The text of a document; if it is longer than PIECE_BYTES, a part of the text of at most PIECE_BYTES."""
    document: int  # number within the row group
    index: int  # 0 for the first piece of a document
    is_last: bool
    text: str | bytes  # bytes if the text is not valid UTF-8


# Finding and checking


def saved_text_flags(flags):
    """Returns the TextFlags among all flags of a run, {name: value}."""
    own = {field.name: flags[field.name] for field in fields(TextFlags) if field.name in flags}
    return TextFlags(**own)


def open_text(flags, split="train"):
    """Returns the Shards of a split, train or val, that TextFlags name."""
    return open_shards(list_shards(flags.folder(split), split, flags.data_cache_gb))


def list_shards(data_dir=None, split="train", cache_gb=CACHE_GB):
    """Returns the shards (cache.data_files) in `data_dir`, or in the default directory of `split`, sorted by name.
    Those that are elsewhere share a cache of `cache_gb` gigabytes. Raises BadInput if there are none."""
    place = str(data_dir or get_base_dir() / DEFAULT_DIRS[split])
    advice = "make some with python3 -m scripts.prepare_data, or name a folder that has some"
    if place.endswith(".toml"):
        advice = "only --data_dir of base_train takes a mixture: name one of its folders"
    try:
        files = data_files(place, cache_gb)
    except OSError as error:
        raise BadInput(f"no {split} data: {place} cannot be read ({error.strerror}): {advice}") from None
    if not files:
        raise BadInput(f"no {split} data: {place} has no *.parquet file in it: {advice}")
    return sorted(files, key=lambda file: (file.name, str(file).split("/")))


def open_shards(paths):
    """Reads the footers of files, as list_shards returns them or paths, and returns a list of Shards.

    Raises BadInput if a file is not a whole parquet file with a column of text, and if every document is empty.
    """
    files = [LocalFile(Path(path)) if isinstance(path, str | Path) else path for path in paths]
    fetch_footers(files)
    shards = list(map(_open_shard, files))
    if next(all_pieces(shards), None) is None:
        names = ", ".join(map(str, files[:3]))
        more = " …" if len(files) > 3 else ""
        raise BadInput(f"no text in {names}{more}: every document is empty")
    return shards


def _open_shard(file):
    try:
        with file.open_footer() as source:
            metadata = pq.read_metadata(source)
            schema = metadata.schema.to_arrow_schema()
            size = source.seek(0, 2)
            source.seek(size - 8 - metadata.serialized_size)
            footer = source.read()
        # A file with encrypted columns has a signature after its metadata. To ask pyarrow for such a column would end
        # the process.
        if int.from_bytes(footer[-8:-4], "little") != metadata.serialized_size:
            raise BadInput(f"{file} has encrypted columns: decrypt it, or name other data")
    except UnicodeError:
        raise BadInput(f"the path {file} is not UTF-8, which pyarrow needs: rename the folder or file") from None
    except (pa.ArrowException, OSError) as error:
        raise BadInput(f"{file} is not a whole parquet file ({_first_line(error)}): copy or prepare it again") from None
    # Earlier versions could write whole projects, whose files a character 0 keeps apart.
    if (metadata.metadata or {}).get(b"pack") == b"project":
        raise BadInput(f"{file} holds a whole project in each document (prepare_data --pack=project, which is gone): "
                       "prepare the corpus again, without --pack")
    check_text_column(file, schema)
    documents = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    compressed = []
    for row_group in map(metadata.row_group, range(metadata.num_row_groups)):
        columns = {column.path_in_schema: column for column in map(row_group.column, range(row_group.num_columns))}
        compressed.append(columns[TEXT].total_compressed_size)
    # The footer says where each column of a row group lies, how large it is, and how many documents it has. The text
    # itself is read only when its turn comes.
    digest = hashlib.sha256(f"{file.name} {size} {file.commit}".encode() + footer).hexdigest()
    return Shard(file, size, tuple(documents), digest, max(compressed, default=0))


def check_text_column(file, schema, name=TEXT, advice="name other data"):
    """Raises BadInput unless a file has one column of this name, of strings."""
    there = f"(it has {', '.join(schema.names)})"
    if schema.names.count(name) != 1:
        found = "several columns" if name in schema.names else "no column"
        raise BadInput(f"{file} has {found} named {name} {there}: {advice}")
    kind = schema.field(name).type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if kind not in (*STRINGS, pa.binary(), pa.large_binary(), pa.binary_view(), pa.null()):
        raise BadInput(f"{file}: its column {name} holds {kind}, not strings {there}: {advice}")


def fingerprint(shards):
    """Returns a hex string that changes when a shard is added, removed, renamed or rewritten. Reads no file."""
    return hashlib.sha256("".join(shard.digest for shard in shards).encode()).hexdigest()[:16]


# Reading


def read_pieces(shard, row_group, document, stop, first_piece=0, max_bytes=4 << 20):
    """Reads documents `document` to `stop` - 1 of a row group, without the first `first_piece` pieces of the first.

    Returns a list of TextPieces and the number of the document with which to continue: the last piece's document if
    that goes on, else the next. Reading ends early once the pieces have `max_bytes`. Empty documents have no piece.
    Raises BadInput if the row group cannot be read.
    """
    # Parquet decodes a row group from its beginning, so later documents take longer.
    pieces = []
    n_bytes = 0
    for piece in _decode(shard, row_group, document, stop):
        if piece.document == document and piece.index < first_piece:
            continue
        pieces.append(piece)
        n_bytes += len(piece.text)
        if n_bytes >= max_bytes:
            return pieces, piece.document + piece.is_last
    return pieces, stop


def _decode(shard, row_group, document, stop):
    """Yields the TextPieces of these documents."""
    begin = 0  # the first document of the batch
    for batch in _batches(shard, row_group, [TEXT]):
        end = begin + len(batch)
        first = max(begin, document)
        if first < end:
            part = batch.slice(first - begin, min(end, stop) - first)
            for number, text in enumerate(_bytes_in(part[TEXT]), first):
                if text:
                    yield from _cut(number, text)
        if end >= stop:
            return
        begin = end


def _bytes_in(column):
    """Returns the values of a column of text as bytes: a column of strings may hold malformed UTF-8."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    return column.cast(pa.large_binary()).to_pylist()


# A file is opened for each portion of text. Kept open, the file of each lane would hold pages of 10 MB: a row group of
# 337 MB took 14,272 instead of 733 ns per token then, and 5.4 GB of memory (dev/log).
def _batches(shard, row_group, columns):
    """Yields Arrow batches of columns, for all documents of a row group. Raises BadInput."""
    found = 0
    try:
        source, metadata = shard.file.open_row_group(row_group, columns)
        # Buffered and without pre_buffer, Arrow holds one page at a time and not the whole column.
        with source, pq.ParquetFile(source, metadata=metadata, buffer_size=READ_BATCH_BYTES,
                                    page_checksum_verification=True) as file:
            size = _batch_size(file.metadata.row_group(row_group))
            for batch in file.iter_batches(size, [row_group], columns, use_threads=False):
                found += len(batch)
                yield batch
        expected = shard.row_group_documents[row_group]
        if found < expected:
            raise pa.ArrowInvalid(f"it ends after {found} of {expected} documents")
    except (pa.ArrowException, OSError) as error:
        advice = "copy or prepare the file again"
        if getattr(error, "errno", None):  # the file or its disk is missing, perhaps temporarily
            advice = "make it readable again"
        raise BadInput(f"{shard.file}: row group {row_group} cannot be read ({_first_line(error)}): {advice}") from None


def _batch_size(group):
    """Returns how many documents of a row group are decoded at a time."""
    size = min(4096, READ_BATCH_BYTES * group.num_rows // max(1, group.total_byte_size))
    # A dictionary holds a text once that many documents may have. So the text may be many times as long as the row
    # group, but each document's at most as long as the dictionary.
    for column in map(group.column, range(group.num_columns)):
        if column.path_in_schema == TEXT and column.has_dictionary_page:
            longest = column.total_uncompressed_size
            if column.data_page_offset > column.dictionary_page_offset:
                dictionary = column.data_page_offset - column.dictionary_page_offset
                longest = dictionary * longest // max(1, column.total_compressed_size)  # by the column's compression
            size = min(size, LONGEST_BATCH_BYTES // max(1, longest))
    return max(1, size)


def all_pieces(shards):
    """Yields the TextPieces of all documents of the Shards, in their order. Raises what read_pieces does."""
    for shard in shards:
        for row_group, num_documents in enumerate(shard.row_group_documents):
            document = first_piece = 0
            while document < num_documents:
                pieces, document = read_pieces(shard, row_group, document, num_documents, first_piece)
                yield from pieces
                first_piece = 0
                if pieces and not pieces[-1].is_last:  # continue inside a long document
                    first_piece = pieces[-1].index + 1


def whole_texts(shards):
    """Yields the texts of the documents that are one TextPiece and valid UTF-8: nearly all."""
    for piece in all_pieces(shards):
        if piece.index == 0 and piece.is_last and isinstance(piece.text, str):
            yield piece.text


def read_columns(shard, *names):
    """Yields (text as bytes, *values of the columns `names`) of every document that is not empty. The value of a
    missing column is "unknown". Raises what read_pieces does."""
    with shard.file.open_footer() as source:
        there = set(names) & set(pq.read_schema(source).names)
    for row_group, num_documents in enumerate(shard.row_group_documents):
        if not num_documents:
            continue
        for batch in _batches(shard, row_group, [TEXT, *there]):
            unknown = ["unknown"] * len(batch)
            values = [batch[name].to_pylist() if name in there else unknown for name in names]
            for document in zip(_bytes_in(batch[TEXT]), *values, strict=True):
                if document[0]:
                    yield document


# A long document is cut where a line begins with a letter, because no split pattern joins the text before it with the
# text after it: the pieces have the tokens of the whole text. Nearly every PIECE_BYTES of C++ have such a line; text
# without one may get a few other tokens.
def _cut(document, text):
    begin = 0
    index = 0
    while len(text) - begin > PIECE_BYTES:
        last = _last_of_piece(text, begin, begin + PIECE_BYTES)
        yield TextPiece(document, index, False, _as_str(text[begin:last + 1]))
        begin = last + 1
        index += 1
    yield TextPiece(document, index, True, _as_str(text[begin:]))


def _last_of_piece(text, begin, end):
    """Returns the place of the last byte of a piece that begins at `begin` and ends before `end`: a newline before a
    letter, else any newline, else the last byte of a UTF-8 character."""
    last = text.rfind(b"\n", begin, end)
    while last >= 0 and not text[last + 1:last + 2].isalpha():
        last = text.rfind(b"\n", begin, last)
    if last < 0:
        last = text.rfind(b"\n", begin, end)
    if last < 0:
        last = end - 1
        while last > end - 4 and text[last + 1] & 0xC0 == 0x80:
            last -= 1
    return last


def _as_str(text):
    try:
        return str(text, "utf-8")
    except UnicodeDecodeError:
        return text


def _first_line(error):
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return text.splitlines()[0].rstrip(".")
