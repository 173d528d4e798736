"""Where the parquet shards lie, how they are listed and checked, and how their text is read.

A shard is a parquet file with a column `text`; other columns are never read. Shards come from anywhere and may have row
groups of a gigabyte: no file stays open, and no more text is held than was asked for (but little data is kept).

    paths = list_shards(data_dir)         # or list_shards(split="val"): the default places
    shards = open_shards(paths)           # checked: BadInput names the file and what is wrong with it
    fingerprint(shards)                   # changes when the data does
    read_pieces(shards[0], 3, 0, 100)     # the text of documents 0 to 99 of row group 3, or the first megabytes of it
"""
import hashlib
from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nanochat.common import BadInput, get_base_dir

DEFAULT_DIRS = {"train": "parquet/base_data_v3", "val": "parquet/val"}  # under the base directory
PIECE_BYTES = 256 * 1024  # longer documents are read and tokenized piece by piece
READ_BATCH_BYTES = 1 << 20  # how much text Arrow decodes at a time
KEPT_BYTES = 64 << 20  # all data together; more than that is not kept


class CorruptRowGroup(BadInput):
    """A row group that cannot be decoded; `pieces` are the TextPieces before the damage, as of read_pieces."""

    def __init__(self, message, pieces):
        super().__init__(message)
        self.pieces = pieces


@dataclass(frozen=True)
class Shard:
    path: Path
    n_bytes: int  # of the file
    row_group_rows: tuple[int, ...]  # documents in each row group
    digest: str  # of name, size and footer


class TextPiece(NamedTuple):
    """A document's text, or a stretch of at most PIECE_BYTES of it if it is longer."""
    document: int  # row number within the row group
    index: int  # 0 for the document's first piece
    is_last: bool
    text: str | bytes  # bytes if they are not UTF-8


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


def open_shards(paths, skip_bad=False):
    """Reads the footers of `paths` and returns a list of Shards. Raises BadInput unless there is some text in them.

    `skip_bad`: a file that is no whole parquet file with text is reported and left out, and not an error.
    """
    shards = []
    for path in paths:
        try:
            shards.append(_open_shard(Path(path)))
        except BadInput as error:
            if not skip_bad:
                raise
            _report_skipped(error)
    for shard in shards:
        for row_group, rows in enumerate(shard.row_group_rows):
            document = 0
            while document < rows:
                pieces, document = _read_or_skip(skip_bad, shard, row_group, document, rows)
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
    return Shard(path, size, rows, digest)


def fingerprint(shards):
    """Hex string that changes when a shard is added, removed, renamed or written again. Reads nothing."""
    return hashlib.sha256("".join(shard.digest for shard in shards).encode()).hexdigest()[:16]


def read_pieces(shard, row_group, document, stop, first_piece=0, max_bytes=4 << 20):
    """Reads from `document` of a row group on: to document `stop`, or until `max_bytes` are exceeded.

    Returns a list of TextPieces (none for an empty or null document, and without the first `first_piece` pieces of the
    first document) and the number of the document after the last piece: the same document if that was not its end.
    Parquet has no way to a row but through those before it in the row group; they are decoded and forgotten.
    Raises CorruptRowGroup if it cannot be decoded, and BadInput if the file cannot be read at all.
    """
    pieces, n_bytes = [], 0
    try:
        # Buffered and without pre_buffer, Arrow holds one page at a time and not the whole column.
        with pq.ParquetFile(shard.path, buffer_size=READ_BATCH_BYTES, page_checksum_verification=True) as file:
            row = 0
            for batch in file.iter_batches(_rows_per_batch(file.metadata.row_group(row_group)), [row_group], ["text"],
                                           use_threads=False):
                begin, row = row, row + len(batch)
                for number, text in _texts(batch.column(0), begin, max(begin, document), min(row, stop)):
                    for piece in _cut(number, text):
                        if piece.index >= first_piece or number > document:
                            pieces.append(piece)
                            n_bytes += len(piece.text)
                            if n_bytes >= max_bytes:
                                return pieces, number + piece.is_last
                if row >= stop:
                    return pieces, stop
        raise pa.ArrowInvalid(f"it ends after {row} of {shard.row_group_rows[row_group]} documents")
    except (pa.ArrowException, OSError) as error:
        message = f"{shard.path}: row group {row_group} cannot be read ({_first_line(error)}): "
        if getattr(error, "errno", None):  # the file or its disk is gone; it may be there at the next start
            raise BadInput(message + "make it readable again") from None
        raise CorruptRowGroup(message + "copy or prepare the file again, or use --skip_bad_shards", pieces) from None


def _read_or_skip(skip_bad, shard, row_group, document, stop, *args, **kwargs):
    """What read_pieces returns; with `skip_bad` a row group ends before the first batch that cannot be decoded.

    Wherever reading begins and however much is asked for, it is the same batch: so every run leaves out the same.
    """
    try:
        return read_pieces(shard, row_group, document, stop, *args, **kwargs)
    except CorruptRowGroup as error:
        if not skip_bad:
            raise
        _report_skipped(error)
        return error.pieces, stop


_skipped = set()


def _report_skipped(error):
    """Says it once in a process. Whichever rank meets it: perhaps rank 0 never does."""
    message = str(error).rsplit(": ", 1)[0]
    if message not in _skipped:
        _skipped.add(message)
        print(f"warning: skipped what cannot be read: {message}", flush=True)


def _rows_per_batch(row_group):
    return max(1, min(4096, READ_BATCH_BYTES * row_group.num_rows // max(1, row_group.total_byte_size)))


def _texts(column, begin, document, stop):
    """Yields (number, memoryview of the text) of documents with text; `begin` is the number of the column's first.

    Not through as_py: a column of strings may hold malformed UTF-8. Not a scalar for each: 8% of the time.
    """
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    column = column.cast(pa.large_binary())  # copies the offsets only
    _, offsets, data = column.buffers()  # a null is as long as an empty text
    ends = np.frombuffer(offsets, np.int64)[column.offset:][document - begin:stop - begin + 1].tolist()
    data = memoryview(data)
    for number, first, end in zip(range(document, stop), ends, ends[1:], strict=False):
        if first < end:
            yield number, data[first:end]


def _cut(document, text):
    """Cuts a long document where a line begins with a letter, which nearly every PIECE_BYTES of C++ have.

    Split patterns break there too (they may join a newline to white space or punctuation that follows), so that the
    tokens are those of the whole text.
    """
    if len(text) <= PIECE_BYTES:
        return [TextPiece(document, 0, True, _as_str(text))]
    return _cut_long(document, bytes(text))


def _cut_long(document, text):
    begin = index = 0
    while len(text) - begin > PIECE_BYTES:
        last = end = begin + PIECE_BYTES
        while (last := text.rfind(b"\n", begin, last)) >= 0 and not text[last + 1:last + 2].isalpha():
            pass
        if last < 0:
            last = text.rfind(b"\n", begin, end)
        if last < 0:  # one endless line
            last = end - 1
            while last > end - 4 and text[last + 1] & 0xC0 == 0x80:  # not inside a UTF-8 character
                last -= 1
        yield TextPiece(document, index, False, _as_str(text[begin:last + 1]))
        begin, index = last + 1, index + 1
    yield TextPiece(document, index, True, _as_str(text[begin:]))


def _as_str(text):
    try:
        return str(text, "utf-8")
    except UnicodeDecodeError:
        return bytes(text)


def _first_line(error):
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


class Units:
    """The units of the data, and which of them each lane reads one after the other."""

    def __init__(self, shards, num_lanes, seed, skip_bad=False):
        self.num_lanes, self.seed, self.skip_bad = num_lanes, seed, skip_bad
        row_groups = [(shard, row_group, rows) for shard in shards
                      for row_group, rows in enumerate(shard.row_group_rows) if rows]
        # Reaching a slice costs decoding the row group up to it: no more slices than it takes to give each lane one.
        slices = -(-num_lanes // len(row_groups))
        self.units = []  # (shard, row group, first document, document after the last)
        for shard, row_group, rows in row_groups:
            cuts = np.linspace(0, rows, min(slices, rows) + 1).astype(int).tolist()
            self.units += [(shard, row_group, first, stop) for first, stop in zip(cuts[:-1], cuts[1:], strict=True)]
        self._order = lru_cache(maxsize=4)(self._order_of_epoch)
        # Little data is read again and again, in slices: it is kept.
        self._kept, self._room = {}, KEPT_BYTES if sum(shard.n_bytes for shard in shards) < KEPT_BYTES else 0

    def _order_of_epoch(self, epoch):
        # Raw bits, because NumPy promises that these stay the same from version to version.
        bits = np.random.Philox(np.random.SeedSequence([self.seed, epoch])).random_raw(len(self.units))
        return np.argsort(bits, kind="stable")

    def get(self, lane, number):
        """The unit that `lane` reads after `number` others."""
        epoch, place = divmod(number * self.num_lanes + lane, len(self.units))
        return self.units[self._order(epoch)[place]]

    def read(self, unit, document, first_piece, max_bytes):
        """What read_pieces returns for the rest of a unit from `document` (counted in its row group) on."""
        shard, row_group, _, stop = unit
        pieces = self._keep(shard, row_group)
        if pieces is None:
            return _read_or_skip(self.skip_bad, shard, row_group, document, stop, first_piece, max_bytes)
        return pieces[bisect_left(pieces, (document, first_piece)):bisect_left(pieces, (stop, 0))], stop

    def _keep(self, shard, row_group):
        """All TextPieces of a row group if there is room for them, else None."""
        key = shard.digest, row_group
        if key not in self._kept and self._room > 0:
            rows = shard.row_group_rows[row_group]
            pieces, end = _read_or_skip(self.skip_bad, shard, row_group, 0, rows, max_bytes=self._room)
            self._room -= sum(len(piece.text) for piece in pieces)
            if end == rows:
                self._kept[key] = pieces
        return self._kept.get(key)
