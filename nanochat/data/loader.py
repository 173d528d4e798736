"""From parquet shards to full rows of tokens: the same rows for any number of ranks, restored exactly.

    with DataLoader(list_shards(), tokenizer, batch_size=8, seq_len=1024, rank=r, world_size=w) as loader:
        for batch in loader:           # endless; a fresh tensor each time
            batch.rows                 # int32 (8, 1025): inputs are rows[:, :-1], targets rows[:, 1:]
            batch.state                # {lane: JSON value} of this rank's lanes, as of after this batch
            loader.stats               # rows, tokens, dropped, documents, epoch, dropped_share up to this batch

    DataLoader(shards, tokenizer, *, batch_size, seq_len, rank=0, world_size=1, seed=0, num_lanes=64, threads=2,
               state=None,             # the lane states of *all* ranks in one dict, of any world size
               skip_bad=False)         # leave out what cannot be decoded, instead of raising BadInput
    SyntheticLoader(n_vocab, *, the same from batch_size on)   # random tokens, without data
    loader.fingerprint                 # of the data; both loaders have it

**Lanes.** The data is read by a fixed number of lanes and not by ranks. Row n of the run comes from lane n mod
num_lanes, and row n belongs to rank n mod world_size, which therefore owns lanes rank, rank + world_size, … Each lane
is a stream of its own that never ends and knows nothing of the others. So which tokens a step sees depends on the
data, the seed and the step, and not on how many ranks share its rows.

**Units.** A lane reads units: a row group each, or slices of row groups where there are fewer row groups than lanes.
Every epoch has all units in an order of its own; the units of all epochs, one after the other, are dealt to the lanes
in turn. So even one document keeps every lane busy, and an epoch has nothing twice.

**Packing.** Each lane fills its rows from documents that it holds ready, each led by BOS. The oldest goes first, if it
fits; then others are looked for that fill the row to the last token (a subset sum, over the bits of an integer:
microseconds). A document longer than a row takes what is left of a row and goes on at the start of the next one. That
repeats one token, so that every token is predicted once. If nothing fills a row exactly, a long document is begun in
it; only where there is none, a document is cropped, so that the least is lost.

**State.** A lane's state names documents and holds no tokens: where to read on, which documents were read and not yet
begun, where in a document the next row begins. They are read and tokenized again on restoring.

**Threads.** Workers read, tokenize and pack one block of rows ahead for every lane; `next()` copies rows from blocks.
A worker does all of it, because rows are packed fastest where their tokens are still in the cache.
"""
import math
import queue
import threading
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from nanochat.common import BadInput
from nanochat.data.shards import Units, fingerprint, open_shards

NUM_LANES = 64
READ_AHEAD_BYTES = 256 << 20  # text that all lanes of a rank hold together, at most
BLOCK_TOKENS = 1 << 15  # tokens in the rows that a worker makes at a time (but one row at least)
GROUP_CHARS = 1 << 20  # that a lane tokenizes together: the other work takes the core's cache from the tokenizer
BUFFER_DOCUMENTS = 16  # that a lane chooses from, if there is a long one among them;
BUFFER_SHORT_DOCUMENTS = 128  # without one it looks further, because what does not fit will be cropped,
BUFFER_TOKENS = 1 << 17  # but not beyond this (it holds at least two rows)
PATIENCE_ROWS = 256  # a short document that has waited for so long is not put off by another long one
TIMEOUT_S = 300


class Piece(NamedTuple):
    """The tokens of a document, or of a piece of one that is too long to be read at once."""
    ref: tuple  # (unit, document, piece), counted within the lane, the unit, and the document
    is_last: bool
    tokens: memoryview  # uint32; those of a first piece begin with BOS


class LaneState(NamedTuple):
    """Where a lane stands between two rows."""
    rows: int = 0  # made so far
    next: tuple = (0, 0, 0)  # ref of the piece to take next
    buffer: tuple = ()  # refs of documents that were taken and not begun
    pending: tuple | None = None  # ref of a piece and an offset in its tokens: what the next row begins with
    waited: int = 0  # rows that the oldest short document has waited
    tokens: int = 0  # in rows so far, repeated ones not counted
    dropped: int = 0
    documents: int = 0  # begun so far


@dataclass(frozen=True)
class Batch:
    rows: torch.Tensor  # int32 (batch_size, seq_len + 1)
    lanes: dict = field(repr=False)  # lane -> fields of the LaneState after this batch, of this rank's lanes
    run: dict = field(repr=False)  # what the states are valid for

    @property
    def state(self):
        """{lane: JSON value} of this rank's lanes, as of after this batch."""
        return {lane: {"run": self.run, **LaneState(*state)._asdict()} for lane, state in self.lanes.items()}


# -----------------------------------------------------------------------------
# A lane

class Lane:
    """A lane's endless rows, from parquet to packing. One thread at a time may use it."""

    def __init__(self, number, state, units, tokenizer, row_tokens, read_bytes):
        self.number, self.units, self.tokenizer, self.read_bytes = number, units, tokenizer, read_bytes
        self.row_tokens, self.place = row_tokens, "not begun"
        self.rows, self.next, _, _, self.waited, self.tokens, self.dropped, self.documents = state
        self.short, self.long, self.buffered_tokens = [], [], 0  # documents not begun, oldest first
        self.short_lengths = []  # tokens of each
        self.refs, self.buffer = {}, None  # of all of them, as keys; and as a tuple while they stay the same
        self.pending = None  # (Piece, offset): what the next row begins with
        self.to_restore = state
        self._pieces = self._tokenize(state)
        self._peeked = None

    def make_rows(self, count):
        """The next rows, int32 (count, row_tokens), and the fields of the LaneState after each of them."""
        if self.to_restore:
            self._restore(self.to_restore)
            self.to_restore = None
        parts, states = [], []  # stretches of documents; joined at once, because NumPy costs a microsecond each time
        for _ in range(count):
            self._fill(parts)
            states.append(self._state())
        return np.frombuffer(b"".join(parts), np.int32).reshape(count, self.row_tokens), states

    def _state(self):
        if self.buffer is None:
            self.buffer = tuple(self.refs)
        pending = self.pending and (*self.pending[0].ref, self.pending[1])
        return self.rows, self.next, self.buffer, pending, self.waited, self.tokens, self.dropped, self.documents

    def _restore(self, state):
        for _ in range(len(state.buffer) + bool(state.pending)):
            piece = self._take()
            if state.pending and piece.ref == tuple(state.pending[:3]):
                self.pending = piece, state.pending[3]
            elif list(piece.ref) in map(list, state.buffer):
                self._keep(piece)
            else:  # skipped since then
                raise BadInput(f"a document that the saved place in the data names cannot be read any more (lane "
                               f"{self.number}): restore the data, or begin a new run")
        self.next = tuple(state.next)

    # Reading and tokenizing

    def _tokenize(self, state):
        """Yields Pieces: first those that `state` names, then all from `state.next` on."""
        begin, again = tuple(state.next), set(map(tuple, state.buffer))
        if state.pending:
            again.add(tuple(state.pending[:3]))
        for texts in self._read(*min({begin} | again)):
            wanted = [(ref, text) for ref, text in texts if ref >= begin or ref in again]
            for group in _groups(wanted):
                documents = self.tokenizer.encode_documents([text.text for _, text in group])
                for (ref, text), tokens in zip(group, documents, strict=True):
                    yield Piece(ref, text.is_last, tokens[1:] if ref[2] else tokens)

    def _read(self, number, document, piece):
        """Yields lists of (ref, TextPiece) from there on."""
        while True:
            shard, row_group, first, stop = unit = self.units.get(self.number, number)
            while first + document < stop:
                self.place = f"{shard.path}, row group {row_group}"
                texts, document = self.units.read(unit, first + document, piece, self.read_bytes)
                document, piece = document - first, 0
                yield [((number, text.document - first, text.index), text) for text in texts]
                if texts and not texts[-1].is_last:
                    piece = texts[-1].index + 1
            number, document = number + 1, 0

    def _peek(self):
        if self._peeked is None:
            self._peeked = next(self._pieces)
        return self._peeked

    def _take(self):
        piece, self._peeked = self._peek(), None
        unit, document, index = piece.ref
        self.next = (unit, document + 1, 0) if piece.is_last else (unit, document, index + 1)
        return piece

    # Packing

    def _fill(self, parts):
        """Appends to `parts` what makes up the next row."""
        first_short = self.short[0] if self.short else None
        self.tokens += self.row_tokens - bool(self.pending)
        space = self._continue(parts, self.row_tokens)
        while space:
            self._refill()
            for piece in self._choose(space):
                self.documents += 1
                self.buffered_tokens -= len(piece.tokens)
                del self.refs[piece.ref]
                self.pending = piece, 0
                space = self._continue(parts, space)
                if self.pending and not self._is_long(piece):  # cropped
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

    def _refill(self):
        while True:
            wanted = BUFFER_DOCUMENTS if self.long else BUFFER_SHORT_DOCUMENTS
            if self.buffered_tokens >= 2 * self.row_tokens and (self.buffered_tokens >= BUFFER_TOKENS
                                                                or len(self.short) + len(self.long) >= wanted):
                return
            if self._peek().ref[2]:
                return  # more of a document whose first piece is in the buffer: taken once that is begun
            self._keep(self._take())

    def _choose(self, space):
        """Takes from the buffer what comes next into a row with `space` left. What does not fit is the last."""
        if self.long and not (self.short and self.short[0].ref < self.long[0].ref):
            return [self.long.pop(0)]
        lengths = self.short_lengths
        chosen = [0] if lengths[0] <= space else []  # the oldest goes first
        space -= sum(lengths[:len(chosen)])
        others = lengths[len(chosen):]
        cover = smallest_cover(others, space, space)
        if cover is None:
            if self.long and (self.waited < PATIENCE_ROWS or sum(others) < space):
                return self._pop_short(chosen) + [self.long.pop(0)]
            cover = smallest_cover(others, space, space + self.row_tokens)
        chosen += [i + len(chosen) for i in cover]
        # If the sum is too large, then by less than the longest: without that one it would be a smaller cover.
        return sorted(self._pop_short(sorted(chosen, reverse=True)), key=lambda piece: len(piece.tokens))

    def _pop_short(self, indices):
        for i in indices:
            del self.short_lengths[i]
        return [self.short.pop(i) for i in indices]

    def _continue(self, parts, space):
        """Appends more of the pending document, if there is one, to a row with `space` left; returns what is left."""
        while self.pending and space:
            piece, offset = self.pending
            part = piece.tokens[offset:offset + space]
            parts.append(part)
            space -= len(part)
            offset += len(part)
            if offset == len(piece.tokens) and piece.is_last:
                self.pending = None
            elif not space:
                self.pending = piece, offset - 1  # the last token of this row is the first of the next
            else:
                self.pending = self._take(), 0
        return space


def _groups(texts):
    """Cuts a list of (ref, TextPiece) where GROUP_CHARS are exceeded."""
    group, n_chars = [], 0
    for text in texts:
        group.append(text)
        n_chars += len(text[1].text)
        if n_chars >= GROUP_CHARS:
            yield group
            group, n_chars = [], 0
    if group:
        yield group


def smallest_cover(lengths, space, limit):
    """Indices of those `lengths` whose sum is the least from `space` to `limit`; None if there is no such sum.

    Bit i of an integer says whether a sum of i can be had. Of two ways the one with earlier indices is taken.
    """
    reach, before, used, mask, exact = 1, [], [], (1 << limit + 1) - 1, 1 << space
    for i, length in enumerate(lengths):
        if length <= limit:
            before.append(reach)
            used.append(i)
            reach |= reach << length & mask
            if reach >= exact and reach & exact:
                break
    over = reach >> space
    if not over:
        return None
    left = space + (over & -over).bit_length() - 1
    indices = []
    while left:
        without = before.pop()
        i = used.pop()
        if not without >> left & 1:
            indices.append(i)
            left -= lengths[i]
    return indices


# -----------------------------------------------------------------------------
# The loaders


class RowQueue:
    """The rows of a lane, made one block ahead by whichever worker takes this queue from `wanted`."""

    def __init__(self, lane, block_rows, wanted):
        self.lane, self.block_rows, self.wanted = lane, block_rows, wanted
        self._blocks = queue.SimpleQueue()  # at most one (rows, states), or the error that came instead
        self._block = iter(())
        wanted.put(self)

    def get(self):
        """The next row, and the fields of the LaneState after it."""
        for row_and_state in self._block:
            return row_and_state
        try:
            block = self._blocks.get(timeout=TIMEOUT_S)
        except queue.Empty:
            what = f"rows of lane {self.lane.number} ({self.lane.place})"
            raise TimeoutError(f"waited {TIMEOUT_S} s for {what}") from None
        if isinstance(block, Exception):
            raise block
        self.wanted.put(self)
        self._block = zip(*block, strict=True)
        return next(self._block)

    def work(self):
        """Makes the next block. Workers call it, one at a time for each queue."""
        try:
            self._blocks.put(self.lane.make_rows(self.block_rows))
        except Exception as error:
            self._blocks.put(error)


def _work(wanted):
    while (rows := wanted.get()) is not None:
        rows.work()


class DataLoader:
    """Endless iterator over this rank's batches. The module's docstring describes it.

    Raises BadInput for data, sizes or a state that cannot be used; what goes wrong in a background thread is raised by
    `next()`. Close it, or use it as a context manager: else its threads wait until the process ends.
    """

    def __init__(self, shards, tokenizer, *, batch_size, seq_len, rank=0, world_size=1, seed=0, num_lanes=NUM_LANES,
                 threads=2, state=None, skip_bad=False):
        shards = open_shards(shards, skip_bad)
        units = Units(shards, num_lanes, seed, skip_bad)
        read_bytes = READ_AHEAD_BYTES // max(16, num_lanes // world_size)
        self._n_documents = sum(sum(shard.row_group_rows) for shard in shards)
        self._begin({"num_lanes": num_lanes, "seed": seed, "seq_len": seq_len, "data": fingerprint(shards),
                     "tokenizer": tokenizer.sha256}, batch_size, rank, world_size, threads, state,
                    lambda *args: Lane(*args, units, tokenizer, seq_len + 1, read_bytes))

    def _begin(self, run, batch_size, rank, world_size, threads, state, make_lane):
        states = _check_state(state, run, world_size)
        self.run, self.fingerprint, self.seq_len = run, run["data"], run["seq_len"]
        self.batch_size, self.world_size = batch_size, world_size
        self._next_row = rank + sum(lane.rows for lane in states.values())
        self._states = {lane: states[lane] for lane in range(rank, run["num_lanes"], world_size)}
        self._wanted = queue.SimpleQueue()  # RowQueues whose next block is wanted; None ends a worker
        block_rows = max(1, BLOCK_TOKENS // self.seq_len)
        self._rows = {lane: RowQueue(make_lane(lane, lane_state), block_rows, self._wanted)
                      for lane, lane_state in self._states.items()}
        self._error = None
        self._threads = [threading.Thread(target=_work, args=[self._wanted], name=f"tokenize-{i}", daemon=True)
                         for i in range(threads)]
        for thread in self._threads:
            thread.start()

    def __iter__(self):
        return self

    def __next__(self):
        if self._error:
            raise self._error
        rows = np.empty((self.batch_size, self.seq_len + 1), dtype=np.int32)
        try:
            for i in range(self.batch_size):
                lane = self._next_row % self.run["num_lanes"]
                rows[i], self._states[lane] = self._rows[lane].get()
                self._next_row += self.world_size
        except BaseException as error:
            self._error = error  # some rows of this batch are gone
            raise
        return Batch(torch.from_numpy(rows), dict(self._states), self.run)

    @property
    def stats(self):
        """Of this rank's lanes, since the run began and up to the last batch."""
        states = [LaneState(*state) for state in self._states.values()]
        counts = {name: sum(getattr(state, name) for state in states)
                  for name in ("rows", "tokens", "dropped", "documents")}
        counts["dropped_share"] = counts["dropped"] / max(1, counts["tokens"] + counts["dropped"])
        counts["epoch"] = counts["documents"] * self.world_size / self._n_documents
        return counts

    def close(self):
        """Ends the threads. Safe to call twice."""
        self._error = RuntimeError("the loader is closed")
        while not self._wanted.empty():
            try:
                self._wanted.get_nowait()
            except queue.Empty:
                break
        for _ in self._threads:
            self._wanted.put(None)
        for thread in self._threads:
            thread.join(timeout=10)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class SyntheticLoader(DataLoader):
    """Random tokens in the same shape: to try a machine without data."""

    def __init__(self, n_vocab, *, batch_size, seq_len, rank=0, world_size=1, seed=0, num_lanes=NUM_LANES, threads=1,
                 state=None):
        self._n_documents = 1
        self._begin({"num_lanes": num_lanes, "seed": seed, "seq_len": seq_len, "data": "synthetic",
                     "tokenizer": f"{n_vocab} random tokens"}, batch_size, rank, world_size, threads, state,
                    lambda *args: RandomLane(*args, n_vocab, seq_len + 1, seed))


class RandomLane:
    place = "random tokens"

    def __init__(self, number, state, n_vocab, row_tokens, seed):
        self.number, self.state, self.n_vocab, self.row_tokens, self.seed = number, state, n_vocab, row_tokens, seed

    def make_rows(self, count):
        rows, states = [], []
        for _ in range(count):
            rng = np.random.default_rng([self.seed, self.number, self.state.rows])
            rows.append(rng.integers(self.n_vocab, size=self.row_tokens))
            self.state = LaneState(rows=self.state.rows + 1, tokens=self.state.tokens + self.row_tokens)
            states.append(self.state)
        return rows, states


def _check_state(state, run, world_size):
    """The LaneStates of all lanes: those of the saved `state`, or new ones. BadInput if it does not fit the run."""
    num_lanes = run["num_lanes"]
    if num_lanes % world_size:
        raise BadInput(f"{num_lanes} lanes cannot be shared by {world_size} ranks: "
                       f"use {_divisors_near(num_lanes, world_size)} ranks")
    if state is None:
        return dict.fromkeys(range(num_lanes), LaneState())
    lanes = {}
    for lane, saved in state.items():
        saved = dict(saved)
        for name, value in saved.pop("run").items():
            if value != run[name]:
                raise BadInput(f"the saved place in the data is for {name} {value}, but this run has {run[name]}: "
                               "resume with what the run began with")
        lanes[int(lane)] = LaneState(**saved)
    if missing := sorted(set(range(num_lanes)) - lanes.keys()):
        raise BadInput(f"the saved place in the data lacks lanes {', '.join(map(str, missing))}: "
                       "it takes the states that all ranks saved")
    n_rows = sum(lane.rows for lane in lanes.values())
    if any(lane.rows != -(-(n_rows - number) // num_lanes) for number, lane in lanes.items()):
        raise BadInput("the saved lanes are of different steps: resume from another checkpoint")
    if n_rows % world_size:
        raise BadInput(f"{n_rows} rows were read so far, which {world_size} ranks cannot have done: "
                       f"use {_divisors_near(math.gcd(n_rows, num_lanes), world_size)} ranks")
    return lanes


def _divisors_near(n, wanted):
    """The divisors of n next to `wanted`, as text."""
    divisors = [d for d in range(1, n + 1) if n % d == 0]
    below = [d for d in divisors if d < wanted][-1:]
    return " or ".join(map(str, below + [d for d in divisors if d > wanted][:1]))
