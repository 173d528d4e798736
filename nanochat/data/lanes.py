"""A lane turns documents into full rows of tokens, for endless training. It can be restored to any row.

    shared = SharedByLanes(units, tokenizer, read_bytes=1 << 22)
    lane = Lane(3, LaneState(), shared, row_tokens=1025)
    rows, states = lane.make_rows(32)    # int32 (32, 1025), and the fields of the LaneState after each row
    Lane(3, LaneState(*states[7]), …)    # its first row is rows[8]
    Lane(3, LaneState(), …, num_units=2) # ends with its second unit; the rows after that are PADDING

A row is one sequence of the training batch: T + 1 tokens. Invariants:

- A lane's rows depend only on the data, the tokenizer, the seed, the number of lanes and the length of a row: not on
  the ranks, the other lanes, or how many rows are made at a time.
- A LaneState names documents and holds no tokens; a restored lane reads and tokenizes those documents again.
- Every row is full, up to the end of the data, and every document begins with BOS. A document that continues in the
  next row repeats its last token there, so that each token is predicted exactly once. `dropped` counts the tokens that
  are left out.

PieceReader reads and tokenizes, Lane packs. units.py says which row group a lane reads next, and shards.py reads its
parquet rows: one row is a document. The loader (loader.py) makes the lanes of a rank and calls make_rows from
its threads. docs/design.md explains the design.
"""
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from nanochat.common import BadInput
from nanochat.data.fim import Infilling
from nanochat.data.tokenizer import Tokenizer
from nanochat.data.units import Units

NUM_LANES = 64
PADDING = -1  # instead of a token, after the end of the data
BUFFER_DOCUMENTS = 16  # documents from which a lane chooses while one of them is longer than a row
BUFFER_SHORT_DOCUMENTS = 128  # documents from which it chooses otherwise: more, because it crops what does not fit
BUFFER_TOKENS = 1 << 17  # the buffer holds about this many tokens at most, but at least those of two rows
GROUP_PIECES = 32  # of text that fill in the middle rewrites, and then tokenizes, together: see Infilling.encode
COUNTS = ("tokens", "dropped", "documents")  # fields of a LaneState
PATIENCE_ROWS = 256  # a short document that has waited for this many rows goes before any further long one


class Piece(NamedTuple):
    """The tokens of a document, of one piece of a document that is too long to be read at once, or of one part of a
    document for fill in the middle, which is like a whole document except for its number."""
    ref: tuple  # (unit = row group or slice, document, piece or part): numbers in the lane, unit and document
    is_last: bool  # these are the last tokens of the document or part
    tokens: memoryview  # uint32; the first piece of a document begins with BOS, and each part does
    next: tuple  # ref of the Piece to read after this one


class LaneState(NamedTuple):
    """The position of a lane between two rows. Checkpoints hold it as JSON, by the names of these fields."""
    rows: int = 0  # rows made so far
    next: tuple = (0, 0, 0)  # ref of the next piece to read
    buffer: tuple = ()  # refs of the documents that were read and are in no row yet
    pending: tuple | None = None  # (*ref, offset): the piece, and the token in it, with which the next row begins
    waited: int = 0  # number of rows for which the oldest short document has been waiting
    tokens: int = 0  # tokens in all rows so far; repeated tokens count once
    dropped: int = 0  # tokens left out so far
    documents: int = 0  # documents begun so far
    sources: tuple = ()  # of a mixture: the LaneState of each source; then the fields above, but for counts, are unused


@dataclass(frozen=True)
class SharedByLanes:
    """The sources and settings of all lanes of a rank."""
    units: Units
    tokenizer: Tokenizer
    read_bytes: int  # of text that a lane reads at a time
    infilling: Infilling | None = None  # rewrites documents for fill in the middle


# Refs alone say where a lane stands. Say that documents 3 and 7 of unit 5 wait in the buffer, that the last row ended
# within document 9, and that 12 is the next to read:
#
#     buffer (5, 3, 0), (5, 7, 0)        pending (5, 9, 0) and the token        next (5, 12, 0)
#
# Documents 4, 5, 6, 8, 10 and 11 are in earlier rows. A lane that is restored there reads the texts of 3 to 11 again,
# but tokenizes only 3, 7 and 9. Then it goes on with 12.
class PieceReader:
    """Reads and tokenizes the documents of a lane: first the Pieces that a LaneState names, then all from its `next`
    on, up to the lane's unit number `num_units`."""

    def __init__(self, number, state, shared, row_tokens, num_units):
        self.number = number
        self.shared = shared
        self.row_tokens = row_tokens
        self.num_units = num_units
        self.place = "nothing yet"  # the file and row group that it reads, for messages
        self.next = tuple(state.next)  # ref of the Piece after the last that was taken
        self._pieces = self._tokenize(state)
        self._peeked = None
        if state.next[0] < num_units:
            shared.units.read_ahead(number, state.next[0])

    def peek(self):
        """Returns the next Piece, or None at the end of the data."""
        if self._peeked is None:
            self._peeked = next(self._pieces, None)
        return self._peeked

    def take(self):
        """Returns the next Piece, and goes on to the one after it."""
        piece = self.peek()
        self._peeked = None
        self.next = max(self.next, piece.next)  # what a state names comes before its `next`
        return piece

    def _tokenize(self, state):
        begin = tuple(state.next)
        in_state = {tuple(ref) for ref in state.buffer}
        if state.pending:
            in_state.add(tuple(state.pending[:3]))
        unit, document, first_piece = min({begin} | in_state)
        divided_again = set()  # documents of which the state has a part that fill in the middle made
        if self.shared.infilling:
            first_piece = 0  # the parts of a document are made from the whole text, which is piece 0
            divided_again = {ref[:2] for ref in in_state | {begin}}
        for group in self._read(unit, document, first_piece):
            wanted = []
            for ref, text in group:
                is_whole = text.is_last and not text.index
                if ref >= begin or ref in in_state or is_whole and ref[:2] in divided_again:
                    wanted.append((ref, text))
            encoded = self._encode(wanted)
            if self.shared.infilling:
                # A whole group first: Python is slower when it takes turns with the tokenizer.
                encoded = list(encoded)
            for (ref, text), parts in zip(wanted, encoded, strict=True):
                for piece in pieces_of(ref, text, parts):
                    if piece.ref >= begin or piece.ref in in_state:
                        yield piece

    def _encode(self, group):
        """Yields a list for each (ref, TextPiece) of `group`: the tokens of its parts. All begin with BOS, except later
        pieces of a document that is read in pieces."""
        tokenizer = self.shared.tokenizer
        rewritten = [[]] * len(group)
        if self.shared.infilling:
            rewritten = self.shared.infilling.encode(self.number, group, tokenizer, self.row_tokens)
        for (ref, text), parts in zip(group, rewritten, strict=True):
            if not parts:
                [tokens] = tokenizer.encode_documents([text.text])
                parts = [tokens[1:] if ref[2] else tokens]
            yield parts

    def _read(self, unit_number, document, first_piece):
        """Yields lists of (ref, TextPiece), from this piece of this document of the lane's unit `unit_number` on."""
        units = self.shared.units
        while unit_number < self.num_units:
            unit = units.get(self.number, unit_number)
            if unit_number + 1 < self.num_units:
                units.read_ahead(self.number, unit_number + 1)
            while unit.first + document < unit.stop:
                self.place = f"{unit.shard.file}, row group {unit.row_group}"
                texts, following = units.read(unit, unit.first + document, first_piece, self.shared.read_bytes)
                document = following - unit.first
                first_piece = 0
                named = [((unit_number, text.document - unit.first, text.index), text) for text in texts]
                for i in range(0, len(named), GROUP_PIECES):
                    yield named[i:i + GROUP_PIECES]
                if texts and not texts[-1].is_last:
                    first_piece = texts[-1].index + 1
            unit_number += 1
            document = 0


# A row is made of slices of documents. All that it leaves to the next row is `pending`, the document that its end cuts,
# and the buffer. Both are determined by refs and an offset: so a LaneState needs no token, and a lane that is restored
# goes on with the very next slice. A short document never becomes pending: what does not fit of it is dropped, and
# counted.
class Lane:
    """Packs the documents of one lane into rows. Only one thread may use it at a time."""

    def __init__(self, number, state, shared, row_tokens, num_units=math.inf):
        self.number = number
        self.shared = shared
        self.row_tokens = row_tokens
        self.pieces = PieceReader(number, state, shared, row_tokens, num_units)
        self.rows = state.rows
        self.waited = state.waited
        self.tokens = state.tokens
        self.dropped = state.dropped
        self.documents = state.documents
        # The buffer: first pieces of documents, oldest first, those that fit into a row and those that do not.
        self.short = []
        self.short_lengths = []  # number of tokens of each in `short`
        self.long = []
        self.buffered_tokens = 0
        self.refs = {}  # refs of the buffered documents, as keys, in the order in which they were read
        self.buffer = None  # the same as a tuple, until they change
        self.pending = None  # (Piece, offset): the piece and the token with which the next row begins
        self.to_restore = state

    @property
    def place(self):
        """The file and row group that it reads, for messages."""
        return self.pieces.place

    def make_rows(self, count):
        """Returns the next rows, int32 (count, row_tokens), and a list with the LaneState's fields after each row.
        Raises BadInput if a row group, or a document of the state, cannot be read."""
        # Here and not in __init__, because a worker calls this: the lanes of a rank are restored concurrently.
        if self.to_restore:
            self._restore(self.to_restore)
            self.to_restore = None
        slices = []  # of documents, joined once at the end: each NumPy call costs a microsecond
        states = []
        for _ in range(count):
            self._fill(slices)
            states.append(self._state())
        return np.frombuffer(b"".join(slices), np.int32).reshape(count, self.row_tokens), states

    def _state(self):
        # Every row makes a state. Plain tuples, and refs as the keys of a dict, save 3 to 4 of 16 ns of packing per
        # token.
        if self.buffer is None:
            self.buffer = tuple(self.refs)
        pending = self.pending and (*self.pending[0].ref, self.pending[1])
        return self.rows, self.pieces.next, self.buffer, pending, self.waited, self.tokens, self.dropped, self.documents

    def _restore(self, state):
        """Takes the Pieces that the state names, which `pieces` has first."""
        buffered = {tuple(ref) for ref in state.buffer}
        for _ in range(len(state.buffer) + bool(state.pending)):
            piece = self.pieces.take()
            if state.pending and piece.ref == tuple(state.pending[:3]):
                self.pending = piece, state.pending[3]
            elif piece.ref in buffered:
                self._keep(piece)
            else:  # its row group is skipped by now
                raise BadInput(f"a document that the saved position in the data names cannot be read any more (lane "
                               f"{self.number}): restore the data, or begin a new run")

    def _fill(self, slices):
        """Appends the slices of documents that make up the next row to `slices`."""
        first_short = self.short[0] if self.short else None
        # A row that continues a document repeats its last token, which counts once.
        self.tokens += self.row_tokens - bool(self.pending)
        space = self._continue(slices, self.row_tokens)
        while space:
            self._refill()
            if not self.refs:  # the end of the data
                slices.append(np.full(space, PADDING, np.int32))
                self.tokens -= space
                break
            for piece in self._choose(space):
                length = len(piece.tokens)
                self.documents += not piece.ref[2]
                self.buffered_tokens -= length
                del self.refs[piece.ref]
                if length <= space and piece.is_last:  # the whole document fits
                    slices.append(piece.tokens)
                    space -= length
                    continue
                self.pending = piece, 0
                space = self._continue(slices, space)
                if self.pending and not self._is_long(piece):
                    # It did not fit, and its rest is dropped: all after the row's last token, where `pending` is.
                    self.dropped += len(piece.tokens) - self.pending[1] - 1
                    self.pending = None
            self.buffer = None
        self.rows += 1
        self.waited = self.waited + 1 if self.short and self.short[0] is first_short else 0

    def _is_long(self, piece):
        return len(piece.tokens) > self.row_tokens or not piece.is_last

    def _keep(self, piece):
        if self._is_long(piece):
            self.long.append(piece)
        else:
            self.short.append(piece)
            self.short_lengths.append(len(piece.tokens))
        self.buffered_tokens += len(piece.tokens)
        self.refs[piece.ref] = self.buffer = None

    # With more documents to choose from, they fit better, and a restart has to read more again.
    def _refill(self):
        """Reads documents into the buffer until it holds enough."""
        while True:
            enough = BUFFER_DOCUMENTS if self.long else BUFFER_SHORT_DOCUMENTS
            is_full = self.buffered_tokens >= BUFFER_TOKENS or len(self.refs) >= enough
            if is_full and self.buffered_tokens >= 2 * self.row_tokens:
                return
            piece = self.pieces.peek()
            if piece is None or piece.tokens[0] != self.shared.tokenizer.bos_id:
                return  # the next piece belongs to a document in the buffer, and is read once that is begun
            self._keep(self.pieces.take())

    def _choose(self, space):
        """Removes the Pieces that come next from the buffer and returns them, for a row with `space` tokens left. All
        of them fit except perhaps the last."""
        # Rows may cut long documents, but not short ones. So short ones fill the row exactly if some of them can, else
        # a long one takes the rest of the row, and without a long one, or after PATIENCE_ROWS, a short one is cropped.
        # The document that was read first goes first, so that none waits forever.
        if self.long and not (self.short and self.short[0].ref < self.long[0].ref):
            return [self.long.pop(0)]
        lengths = self.short_lengths
        if self.shared.infilling and space == self.row_tokens and space in lengths:
            return self._pop_short([lengths.index(space)])  # fim cuts parts to a row: they fit only into an empty one
        chosen = []
        if lengths[0] <= space:
            chosen = [0]
            space -= lengths[0]
        others = lengths[len(chosen):]
        cover = smallest_cover(others, space, space)
        if cover is None:
            if self.long and (self.waited < PATIENCE_ROWS or sum(others) < space):
                return self._pop_short(chosen) + [self.long.pop(0)]
            cover = smallest_cover(others, space, space + self.row_tokens)
            if cover is None:  # at the end of the data: everything left fits
                cover = range(len(others))
        chosen += [i + len(chosen) for i in cover]
        # The sum exceeds the space by less than the longest length: otherwise the cover without it would be smaller.
        return sorted(self._pop_short(sorted(chosen, reverse=True)), key=lambda piece: len(piece.tokens))

    def _pop_short(self, indices):
        for i in indices:
            del self.short_lengths[i]
        return [self.short.pop(i) for i in indices]

    def _continue(self, slices, space):
        """Appends as much of the pending document as fits into `space` tokens; returns the space left in the row."""
        while self.pending and space:
            piece, offset = self.pending
            tokens = piece.tokens[offset:offset + space]
            slices.append(tokens)
            space -= len(tokens)
            offset += len(tokens)
            if offset == len(piece.tokens) and piece.is_last:
                self.pending = None
            elif not space:
                self.pending = piece, offset - 1  # the last token of this row is the first of the next
            else:  # on to the next piece of the same document
                self.pending = (self.pieces.take(), 0) if self.pieces.peek() else None
        return space


def pieces_of(ref, text, parts):
    """Yields the Pieces of a TextPiece. parts: the tokens of each."""
    unit, document, first = ref
    last = first + len(parts) - 1
    for number, tokens in enumerate(parts, first):
        following = (unit, document, number + 1)
        if text.is_last and number == last:
            following = (unit, document + 1, 0)
        yield Piece((unit, document, number), text.is_last, tokens, following)


def smallest_cover(lengths, space, limit):
    """Returns the indices of the `lengths` with the smallest sum from `space` to `limit`, or None if there is none.
    Among several subsets, earlier indices win."""
    # This is the subset sum problem, solved by dynamic programming over the bits of an integer: bit limit - i of
    # `reach` says whether some of the lengths add up to i, so a shift to the right drops what exceeds the limit.
    reach = 1 << limit
    exact = 1 << limit - space
    before = []  # `reach` before each used length
    used = []  # the indices of these
    # One shift and one or of an integer of `limit` bits for each length: microseconds for all of them.
    for i, length in enumerate(lengths):
        if length <= limit:
            before.append(reach)
            used.append(i)
            reach |= reach >> length
            if reach & exact:
                break
    over = reach & 2 * exact - 1
    if not over:
        return None
    # The highest bit of `over` is the smallest sum. From the last length back, a length belongs to it if the lengths
    # before cannot reach the rest of the sum.
    left = limit + 1 - over.bit_length()
    indices = []
    while left:
        without = before.pop()
        i = used.pop()
        if not without >> limit - left & 1:
            indices.append(i)
            left -= lengths[i]
    return indices


class RandomLane:
    """Makes rows of random tokens, with the interface of a Lane."""
    place = "random tokens"

    def __init__(self, number, state, n_vocab, row_tokens, seed):
        self.number = number
        self.state = state
        self.n_vocab = n_vocab
        self.row_tokens = row_tokens
        self.seed = seed

    def make_rows(self, count):
        rows = []
        states = []
        for _ in range(count):
            rng = np.random.default_rng([self.seed, self.number, self.state.rows])
            rows.append(rng.integers(self.n_vocab, size=self.row_tokens))
            self.state = LaneState(rows=self.state.rows + 1, tokens=self.state.tokens + self.row_tokens)
            states.append(self.state)
        return rows, states
