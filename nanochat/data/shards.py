"""Lists parquet shards, checks them, and reads their text.

A shard is a parquet file with a column `text`; other columns are never read. Each of its rows is called a document
here, because a row is something else: one sequence of the training batch. Shards may come from anywhere and have row
groups of a gigabyte. So no file stays open, and no more text is held than the caller asks for; only if all shards
together are small, their text stays in memory. Where the shards are in a bucket, bucket.py fetches what is read.

    paths = list_shards(data_dir)         # or list_shards(split="val"), from the default directory
    shards = open_shards(paths)           # checked: BadInput names the file and what is wrong with it
    fingerprint(shards)                   # changes when the data changes
    read_pieces(shards[0], 3, 0, 100)     # documents 0 to 99 of row group 3, or the first megabytes of their text
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
from nanochat.data.bucket import CACHE_GB, BucketFile, fetch_footers, in_bucket, list_bucket, text_range

DEFAULT_DIRS = {"train": "parquet/base_data_v3", "val": "parquet/val"}  # under the base directory
PIECE_BYTES = 256 * 1024  # longer documents are read and tokenized piece by piece
READ_BATCH_BYTES = 1 << 20  # bytes of text that Arrow decodes at a time
PACKED = {"pack": "project"}  # in the metadata of a shard whose documents are projects
KEPT_BYTES = 64 << 20  # decoded text stays in memory if all shards together are smaller than this


class CorruptRowGroup(BadInput):
    """A row group cannot be decoded. `pieces` are the TextPieces that read_pieces found before the damage."""

    def __init__(self, message, pieces):
        super().__init__(message)
        self.pieces = pieces


@dataclass(frozen=True)
class Shard:
    """A parquet file with text, as its footer describes it."""
    path: Path | BucketFile
    n_bytes: int  # size of the file
    row_group_documents: tuple[int, ...]  # number of documents in each row group
    digest: str  # SHA-256 of name, size and footer
    is_packed: bool = False  # its documents are projects, see projects.py
    row_group_bytes: int = 0  # of the text of its largest row group, compressed


class TextPiece(NamedTuple):
    """The text of a document; if it is longer than PIECE_BYTES, a part of the text of at most PIECE_BYTES."""
    document: int  # number within the row group
    index: int  # 0 for the first piece of a document
    is_last: bool
    text: str | bytes  # bytes if the text is not valid UTF-8
    is_packed: bool = False  # it is of a project, see projects.py


def list_shards(data_dir=None, split="train", cache_gb=CACHE_GB):
    """Returns the paths of the parquet files in `data_dir`, or in the default directory of `split`, sorted by name; for
    a `data_dir` in a bucket, BucketFiles, of which at most `cache_gb` gigabytes are on this machine's disk.

    If there are none, those one level deeper are returned, because `gcloud storage cp -r` nests the directory that it
    copies. Raises BadInput if there are none at all.
    """
    if data_dir and in_bucket(data_dir):
        files = list_bucket(data_dir, cache_gb)
        if not files:
            raise BadInput(f"no {split} data: {data_dir} has no *.parquet file in it: correct the URL, or copy some "
                           "there with gcloud storage cp")
        return sorted(files, key=lambda file: (file.name, file.url.split("/")))
    data_dir = Path(data_dir) if data_dir else get_base_dir() / DEFAULT_DIRS[split]
    try:
        paths = list(data_dir.glob("*.parquet")) or list(data_dir.glob("*/*.parquet"))
        next(data_dir.iterdir(), None)  # which fails where glob says nothing, in a folder that may not be read
    except (FileNotFoundError, NotADirectoryError):
        paths = []
    except OSError as error:
        raise BadInput(f"{split} data: {data_dir} cannot be read ({error.strerror}): give yourself the right to read "
                       "it, or name another directory") from None
    if not paths:
        why = "has no *.parquet file in it" if data_dir.is_dir() else "is not a directory"
        raise BadInput(f"no {split} data: {data_dir} {why}; make some with python3 -m scripts.prepare_data, "
                       "or name a directory that has it")
    return sorted(paths, key=lambda path: (path.name, path))


def open_shards(paths, skip_bad=False):
    """Reads the footers of the files `paths` and returns a list of Shards.

    Raises BadInput for a file that is not a whole parquet file with a column of text (with `skip_bad`, prints a warning
    and leaves it out instead), and if every document is empty.
    """
    fetch_footers([path for path in paths if isinstance(path, BucketFile)])
    shards = []
    for path in paths:
        try:
            shards.append(_open_shard(path if isinstance(path, BucketFile) else Path(path)))
        except BadInput as error:
            if not skip_bad:
                raise
            _report_skipped(error)
    for shard in shards:
        for row_group, n_documents in enumerate(shard.row_group_documents):
            document = 0
            while document < n_documents:
                pieces, document = _read_or_skip(skip_bad, shard, row_group, document, n_documents)
                if pieces:
                    return shards
    raise BadInput(f"no text in {', '.join(map(str, paths[:3]))}{' …' if len(paths) > 3 else ''}: "
                   "every document is empty")


def _open_shard(path):
    try:
        with path.open_footer() if isinstance(path, BucketFile) else path.open("rb") as file:
            metadata = pq.read_metadata(file if isinstance(path, BucketFile) else path)
            schema = metadata.schema.to_arrow_schema()
            size = file.seek(0, 2)
            file.seek(size - 8 - metadata.serialized_size)
            footer = file.read()
    except UnicodeError:
        raise BadInput(f"the path {path} is not UTF-8, which pyarrow needs: rename the folder or file") from None
    except (pa.ArrowException, OSError) as error:
        raise BadInput(f"{path} is not a whole parquet file ({_first_line(error)}): copy or prepare it again") from None
    if (found := schema.names.count("text")) != 1:
        raise BadInput(f"{path} has {'several columns' if found else 'no column'} named text (it has "
                       f"{', '.join(schema.names)}): name other data")
    text_type = schema.field("text").type
    text_type = text_type.value_type if pa.types.is_dictionary(text_type) else text_type
    if not any(is_text(text_type) for is_text in (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary,
                                                  pa.types.is_large_binary)):
        raise BadInput(f"{path}: its column text holds {text_type}, not strings: name other data")
    n_documents = tuple(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups))
    digest = hashlib.sha256(f"{path.name} {size} ".encode() + footer).hexdigest()
    is_packed = PACKED["pack"].encode() == (metadata.metadata or {}).get(b"pack")
    largest = max((text_range(metadata, i)[1] for i in range(metadata.num_row_groups)), default=0)
    return Shard(path, size, n_documents, digest, is_packed, largest)


def require_files(shards, what):
    """Raises BadInput if a shard holds projects, for `what`, which reads files."""
    if packed := [shard.path for shard in shards if shard.is_packed]:
        raise BadInput(f"{packed[0]} holds whole projects (prepare_data --pack=project), and {what} needs single "
                       "files: name a corpus without --pack")


def fingerprint(shards):
    """Returns a hex string that changes when a shard is added, removed, renamed or written again. Reads no file."""
    return hashlib.sha256("".join(shard.digest for shard in shards).encode()).hexdigest()[:16]


def read_pieces(shard, row_group, document, stop, first_piece=0, max_bytes=4 << 20):
    """Reads documents of a row group, from number `document` up to but not including `stop`, as a list of TextPieces.

    The first `first_piece` pieces of the first document are left out, and an empty or null document has no piece.
    Reading ends early once the pieces have `max_bytes`. Returns the pieces and the number of the document with which to
    continue: that of the last piece if it does not end its document, else the next.

    Parquet can reach a document only by decoding those before it in the row group, so this takes longer for later ones.
    Raises CorruptRowGroup if the row group cannot be decoded, and BadInput if the file cannot be read at all.
    """
    pieces, n_bytes = [], 0
    try:
        # Buffered and without pre_buffer, Arrow holds one page at a time and not the whole column.
        source, metadata = shard.path, None
        if isinstance(source, BucketFile):
            source, metadata = source.open_row_group(row_group)
        with pq.ParquetFile(source, metadata=metadata, buffer_size=READ_BATCH_BYTES,
                            page_checksum_verification=True) as file:
            begin = end = 0  # documents of the batch
            batch_size = _documents_per_batch(file.metadata.row_group(row_group))
            for batch in file.iter_batches(batch_size, [row_group], ["text"], use_threads=False):
                begin, end = end, end + len(batch)
                for number, text in _texts(batch.column(0), begin, max(begin, document), min(end, stop)):
                    for piece in _cut(number, text):
                        piece = piece._replace(is_packed=True) if shard.is_packed else piece
                        if piece.index >= first_piece or number > document:
                            pieces.append(piece)
                            n_bytes += len(piece.text)
                            if n_bytes >= max_bytes:
                                return pieces, number + piece.is_last
                if end >= stop:
                    return pieces, stop
        raise pa.ArrowInvalid(f"it ends after {end} of {shard.row_group_documents[row_group]} documents")
    except (pa.ArrowException, OSError) as error:
        message = f"{shard.path}: row group {row_group} cannot be read ({_first_line(error)}): "
        if getattr(error, "errno", None):  # the file or its disk is missing, perhaps only for a while
            raise BadInput(message + "make it readable again") from None
        raise CorruptRowGroup(message + "copy or prepare the file again, or use --skip_bad_shards", pieces) from None


def all_pieces(shards):
    """Yields the TextPieces of all documents of the Shards, in their order. Raises what read_pieces does."""
    for shard in shards:
        for row_group, num_documents in enumerate(shard.row_group_documents):
            document = first_piece = 0
            while document < num_documents:
                pieces, document = read_pieces(shard, row_group, document, num_documents, first_piece)
                first_piece = pieces[-1].index + 1 if pieces and not pieces[-1].is_last else 0
                yield from pieces


def whole_texts(shards):
    """Yields the texts of the documents that are one piece and valid UTF-8, which nearly all are."""
    for piece in all_pieces(shards):
        if piece.index == 0 and piece.is_last and isinstance(piece.text, str):
            yield piece.text


def _read_or_skip(skip_bad, shard, row_group, document, stop, *args, **kwargs):
    """Returns the same as read_pieces; with `skip_bad` a row group ends before the first batch that is corrupt.

    Batches are the same wherever reading begins and however much is asked for, so every run skips the same documents.
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
    """Prints a warning, once in a process. Every rank does so, because rank 0 may never meet this error."""
    message = str(error).rsplit(": ", 1)[0]
    if message not in _skipped:
        _skipped.add(message)
        print(f"warning: skipped what cannot be read: {message}", flush=True)


def _documents_per_batch(row_group):
    return max(1, min(4096, READ_BATCH_BYTES * row_group.num_rows // max(1, row_group.total_byte_size)))


def _texts(column, begin, document, stop):
    """Yields (number, memoryview of the text) of the documents from `document` to `stop` that are not empty.

    `begin` is the number of the first document in the column. The buffers are read directly: as_py fails on malformed
    UTF-8, which a column of strings may hold, and a pyarrow scalar for each document took 8% of the loader's time.
    """
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    column = column.cast(pa.large_binary())  # copies only the offsets
    _, offsets, data = column.buffers()  # a null is as long as an empty text
    ends = np.frombuffer(offsets, np.int64)[column.offset:][document - begin:stop - begin + 1].tolist()
    data = memoryview(data)
    for number, first, end in zip(range(document, stop), ends, ends[1:], strict=False):
        if first < end:
            yield number, data[first:end]


def _cut(document, text):
    """Returns the TextPieces of a document. A long one is cut where a line begins with a letter.

    Nearly every PIECE_BYTES of C++ have such a line. The split patterns of tokenizers break there too (elsewhere they
    may join a newline with the white space or punctuation after it), so the pieces have the tokens of the whole text.
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
            while last > end - 4 and text[last + 1] & 0xC0 == 0x80:  # never inside a UTF-8 character
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
    """The units of the data, and the order in which each lane reads them.

    A unit is a row group, or a slice of one if there are fewer row groups than lanes. Every epoch has all units, in a
    random order of its own. The units of all epochs, one after the other, are dealt to the lanes in turn.
    """

    def __init__(self, shards, num_lanes, seed, skip_bad=False):
        self.num_lanes, self.seed, self.skip_bad = num_lanes, seed, skip_bad
        row_groups = [(shard, row_group, n_documents) for shard in shards
                      for row_group, n_documents in enumerate(shard.row_group_documents) if n_documents]
        # To reach a slice, the row group must be decoded up to it: so only as many slices as give each lane a unit.
        slices = -(-num_lanes // len(row_groups))
        self.units = []  # (shard, row group, first document, document after the last)
        for shard, row_group, n_documents in row_groups:
            cuts = np.linspace(0, n_documents, min(slices, n_documents) + 1).astype(int).tolist()
            self.units += [(shard, row_group, first, stop) for first, stop in zip(cuts[:-1], cuts[1:], strict=True)]
        self._order = lru_cache(maxsize=4)(self._order_of_epoch)
        # Small data is read again and again, in slices, so it stays in memory.
        self._kept, self._room = {}, KEPT_BYTES if sum(shard.n_bytes for shard in shards) < KEPT_BYTES else 0

    def _order_of_epoch(self, epoch):
        # Raw bits, because NumPy guarantees only for these that they do not change from version to version.
        bits = np.random.Philox(np.random.SeedSequence([self.seed, epoch])).random_raw(len(self.units))
        return np.argsort(bits, kind="stable")

    def get(self, lane, number):
        """Returns a unit of `lane`: (shard, row group, first document, document after the last).

        A lane reads its units in the order of `number`, which begins at 0.
        """
        epoch, index = divmod(number * self.num_lanes + lane, len(self.units))
        return self.units[self._order(epoch)[index]]

    def read_ahead(self, lane, number):
        """Lets the row group of a unit be fetched, if it is in a bucket, before it is read."""
        shard, row_group, _, _ = self.get(lane, number)
        if isinstance(shard.path, BucketFile) and (shard.digest, row_group) not in self._kept:
            shard.path.read_ahead(row_group)

    def number_in_epoch(self, lane):
        """Returns how many units of `lane` are in the first epoch."""
        return len(range(lane, len(self.units), self.num_lanes))

    def read(self, unit, document, first_piece, max_bytes):
        """Returns the same as read_pieces, from `document` (its number in the row group) to the end of the unit."""
        shard, row_group, _, stop = unit
        pieces = self._keep(shard, row_group)
        if pieces is None:
            return _read_or_skip(self.skip_bad, shard, row_group, document, stop, first_piece, max_bytes)
        return pieces[bisect_left(pieces, (document, first_piece)):bisect_left(pieces, (stop, 0))], stop

    def _keep(self, shard, row_group):
        """Returns all TextPieces of a row group and keeps them in memory, or None if there is no room for them."""
        key = shard.digest, row_group
        if key not in self._kept and self._room > 0:
            stop = shard.row_group_documents[row_group]
            pieces, end = _read_or_skip(self.skip_bad, shard, row_group, 0, stop, max_bytes=self._room)
            self._room -= sum(len(piece.text) for piece in pieces)
            if end == stop:
                self._kept[key] = pieces
        return self._kept.get(key)
