"""Where the parquet shards lie, how they are listed and checked, and how their text is read.

A shard is a parquet file with a column `text`; other columns are never read. Nothing here keeps a file open or holds
more than the stretch of text that was asked for: shards come from anywhere and may have row groups of a gigabyte.

    paths = list_shards(data_dir)         # or list_shards(split="val"): the default places
    shards = open_shards(paths)           # checked: BadInput names the file and what is wrong with it
    fingerprint(shards)                   # changes when the data does
    read_pieces(shards[0], 3, 0, 100)     # the text of documents 0 to 99 of row group 3, or the first megabytes of it
"""
import hashlib
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from nanochat.common import BadInput, get_base_dir

DEFAULT_DIRS = {"train": "parquet/base_data_v3", "val": "parquet/val"}  # under the base directory
PIECE_BYTES = 256 * 1024  # longer documents are read and tokenized piece by piece
READ_BATCH_BYTES = 1 << 20  # how much text Arrow decodes at a time


@dataclass(frozen=True)
class Shard:
    path: Path
    row_group_rows: tuple[int, ...]  # documents in each row group
    digest: str  # of name, size and footer


@dataclass(frozen=True)
class Piece:
    """A document's text, or a stretch of at most PIECE_BYTES of it if it is longer."""
    document: int  # row number within the row group
    index: int  # 0 for the document's first piece
    is_last: bool
    text: bytes


def list_shards(data_dir=None, split="train"):
    """Paths of the parquet files in `data_dir`, sorted by name; without one, in the default place of `split`.

    If there are none, they are looked for one level deeper: a copy with `gcloud storage cp -r` nests the directory.
    """
    data_dir = Path(data_dir) if data_dir else get_base_dir() / DEFAULT_DIRS[split]
    paths = list(data_dir.glob("*.parquet")) or list(data_dir.glob("*/*.parquet"))
    if not paths:
        why = "has no *.parquet file in it" if data_dir.is_dir() else "is not a directory"
        raise BadInput(f"no {split} data: {data_dir} {why}; make some with python3 -m scripts.prepare_data, "
                       "or name a directory that has it")
    return sorted(paths, key=lambda path: (path.name, path))


def open_shards(paths):
    """Reads the footers of `paths` and returns a list of Shards. Raises BadInput unless there is some text in them."""
    shards = [_open_shard(Path(path)) for path in paths]
    for shard in shards:
        for row_group, rows in enumerate(shard.row_group_rows):
            document = 0
            while document < rows:
                pieces, document = read_pieces(shard, row_group, document, rows)
                if pieces:
                    return shards
    raise BadInput(f"no text in {', '.join(map(str, paths[:3]))}{' …' if len(paths) > 3 else ''}: "
                   "every document is empty")


def _open_shard(path):
    try:
        metadata = pq.read_metadata(path)
        schema = metadata.schema.to_arrow_schema()
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(size - 8 - metadata.serialized_size)
            footer = file.read()
    except (pa.ArrowException, OSError) as error:
        raise BadInput(f"{path} is not a whole parquet file ({_first_line(error)}): copy or prepare it again") from None
    if "text" not in schema.names:
        raise BadInput(f"{path} has no column named text (it has {', '.join(schema.names)}): name other data")
    text_type = schema.field("text").type
    text_type = text_type.value_type if pa.types.is_dictionary(text_type) else text_type
    if not any(is_text(text_type) for is_text in (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary,
                                                  pa.types.is_large_binary)):
        raise BadInput(f"{path}: its column text holds {text_type}, not strings: name other data")
    rows = tuple(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups))
    digest = hashlib.sha256(f"{path.name} {size} ".encode() + footer).hexdigest()
    return Shard(path, rows, digest)


def fingerprint(shards):
    """Hex string that changes when a shard is added, removed, renamed or written again. Reads nothing."""
    return hashlib.sha256("".join(shard.digest for shard in shards).encode()).hexdigest()[:16]


def read_pieces(shard, row_group, document, stop, first_piece=0, max_bytes=4 << 20):
    """Reads from `document` of a row group on: to document `stop`, or until `max_bytes` are exceeded.

    Returns a list of Pieces (none for an empty or null document; the first `first_piece` pieces of the first document
    are left out) and the number of the document after the last piece: the same document if that was not its end.
    Parquet has no way to a row but through those before it in the row group; they are decoded and forgotten.
    """
    pieces, n_bytes = [], 0
    try:
        # Buffered and without pre_buffer, Arrow holds one page at a time and not the whole column.
        with pq.ParquetFile(shard.path, buffer_size=READ_BATCH_BYTES, page_checksum_verification=True) as file:
            row = 0
            for batch in file.iter_batches(_rows_per_batch(file.metadata.row_group(row_group)), [row_group], ["text"],
                                           use_threads=False):
                begin, row = row, row + len(batch)
                for number in range(max(begin, document), min(row, stop)):
                    skip = first_piece if number == document else 0
                    for piece in _cut(number, _as_bytes(batch.column(0)[number - begin])):
                        if piece.index >= skip:
                            pieces.append(piece)
                            n_bytes += len(piece.text)
                            if n_bytes >= max_bytes:
                                return pieces, number + piece.is_last
                if row >= stop:
                    return pieces, stop
        raise pa.ArrowInvalid(f"it ends after {row} of {shard.row_group_rows[row_group]} documents")
    except (pa.ArrowException, OSError) as error:
        raise BadInput(f"{shard.path}: row group {row_group} cannot be read ({_first_line(error)}): "
                       "copy or prepare the file again") from None


def _rows_per_batch(row_group):
    return max(1, min(4096, READ_BATCH_BYTES * row_group.num_rows // max(1, row_group.total_byte_size)))


def _as_bytes(scalar):
    """Not through str: a column of strings may hold malformed UTF-8."""
    if isinstance(scalar, pa.DictionaryScalar):
        scalar = scalar.value
    return bytes(scalar.as_buffer() or b"")


def _cut(document, text):
    """Cuts a long document where a line begins with something other than white space, if there is such a place.

    A tokenizer's split pattern breaks there too, so that the tokens are those of the whole text.
    """
    begin = index = 0
    while len(text) - begin > PIECE_BYTES:
        end = begin + PIECE_BYTES
        cut = end
        while (cut := text.rfind(b"\n", begin, cut)) >= 0 and text[cut + 1:cut + 2].isspace():
            pass
        if cut < 0:
            cut = end - 1  # one endless line
            while cut > end - 4 and text[cut + 1] & 0xC0 == 0x80:  # not inside a UTF-8 character
                cut -= 1
        yield Piece(document, index, False, text[begin:cut + 1])
        begin, index = cut + 1, index + 1
    if text:
        yield Piece(document, index, True, text[begin:])


def _first_line(error):
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
