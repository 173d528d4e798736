"""From parquet shards to full rows of tokens: the same rows for any number of ranks, restored exactly.

    with DataLoader(list_shards(), tokenizer, batch_size=8, seq_len=1024, rank=r, world_size=w) as loader:
        for batch in loader:           # endless; a fresh tensor each time
            batch.rows                 # int32 (8, 1025): inputs are rows[:, :-1], targets rows[:, 1:]
            batch.state                # {lane: JSON value} of this rank's lanes, as of after this batch
            loader.stats               # rows, tokens, dropped, documents, epoch, dropped_share up to this batch

    DataLoader(shards, tokenizer, *, batch_size, seq_len, rank=0, world_size=1, seed=0, num_lanes=64, threads=2,
               state=None)             # state: the lane states of *all* ranks in one dict, of any world size
    SyntheticLoader(n_vocab, *, the same from batch_size on)   # random tokens, without data
    loader.fingerprint                 # of the data; both loaders have it

**Lanes.** The data is read by a fixed number of lanes and not by ranks. Row n of the run comes from lane n mod
num_lanes, and row n belongs to rank n mod world_size, which therefore owns lanes rank, rank + world_size, … Each lane
is a stream of its own that never ends and knows nothing of the others. So which tokens a step sees depends on the
data, the seed and the step, and not on how many ranks share its rows.

**Units.** A lane reads units: a row group each, or slices of row groups where there are fewer row groups than lanes.
Every epoch has all units in an order of its own; the units of all epochs, one after the other, are dealt to the lanes
in turn. So even one document keeps every lane busy, and an epoch has nothing twice.

**Packing.** Each lane fills its rows from the documents that it holds ready, oldest first, each led by BOS. The oldest
goes into the row if it fits; then others are looked for that fill the row to the last token (a subset sum, over bits
of one integer: microseconds). A document longer than a row takes what is left of a row and goes on at the start of the
next one, which repeats one token, so that every token is predicted once. If nothing fills a row exactly, a long
document is begun in it; and only where there is none, a document is cropped, the one that loses least.

**State.** A lane's state names documents and holds no tokens: where to read on, which documents were read and not yet
begun, where in a document the next row begins. They are read and tokenized again on restoring.

**Threads.** Workers read and tokenize one chunk ahead for every lane; a packer makes batches ahead from those.
"""
import math
import queue
import threading
from collections import deque
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from nanochat.common import BadInput
from nanochat.dataset import fingerprint, open_shards, read_pieces

NUM_LANES = 64
READ_AHEAD_BYTES = 128 << 20  # text that all lanes of a rank hold together
CHUNK_BYTES = 256 << 10  # text that a worker tokenizes at a time
BUFFER_DOCUMENTS, BUFFER_TOKENS = 32, 1 << 17  # what a lane chooses from, at most (but two rows at least)
PATIENCE_ROWS = 256  # how long a document may wait for a row with room for it
BATCHES_AHEAD = 4
TIMEOUT_S = 300


class Piece(NamedTuple):
    """The tokens of a document, or of a piece of one that is too long to be read at once."""
    ref: tuple  # (unit, document, piece), counted within the lane, the unit, and the document
    is_last: bool
    tokens: np.ndarray  # int32; those of a first piece begin with BOS


class LaneState(NamedTuple):
    """Where a lane stands between two rows."""
    rows: int  # made so far
    next: tuple  # ref of the piece to read next
    buffer: tuple  # Pieces of documents that were read and not begun, oldest first
    pending: tuple | None  # (Piece, offset): what the next row begins with
    waited: int  # rows since the oldest document became the oldest
    tokens: int  # in rows so far, repeated ones not counted
    dropped: int
    documents: int

    def to_json(self):
        pending = self.pending and [*self.pending[0].ref, self.pending[1]]
        return {**self._asdict(), "next": list(self.next), "buffer": [list(piece.ref) for piece in self.buffer],
                "pending": pending}


NEW_LANE = LaneState(0, (0, 0, 0), (), None, 0, 0, 0, 0)


@dataclass(frozen=True)
class Batch:
    rows: torch.Tensor  # int32 (batch_size, seq_len + 1)
    lanes: dict = field(repr=False)  # lane -> LaneState
    run: dict = field(repr=False)  # what the states are valid for

    @property
    def state(self):
        """{lane: JSON value} of this rank's lanes, as of after this batch."""
        return {lane: {"run": self.run, **state.to_json()} for lane, state in self.lanes.items()}


# -----------------------------------------------------------------------------
# Which documents a lane reads


class Units:
    """The units of the data, and which of them each lane reads one after the other."""

    def __init__(self, shards, num_lanes, seed):
        self.num_lanes, self.seed = num_lanes, seed
        row_groups = [(shard, row_group, rows) for shard in shards
                      for row_group, rows in enumerate(shard.row_group_rows) if rows]
        # Reaching a slice costs decoding the row group up to it: no more slices than it takes to give each lane one.
        slices = -(-num_lanes // len(row_groups))
        self.units = []  # (shard, row group, first document, document after the last)
        for shard, row_group, rows in row_groups:
            cuts = np.linspace(0, rows, min(slices, rows) + 1).astype(int).tolist()
            self.units += [(shard, row_group, first, stop) for first, stop in zip(cuts[:-1], cuts[1:], strict=True)]
        self._order = lru_cache(maxsize=4)(self._order_of_epoch)

    def _order_of_epoch(self, epoch):
        # Raw bits, because NumPy promises that these stay the same from version to version.
        bits = np.random.Philox(np.random.SeedSequence([self.seed, epoch])).random_raw(len(self.units))
        return np.argsort(bits, kind="stable")

    def get(self, lane, number):
        """The unit that `lane` reads after `number` others."""
        epoch, place = divmod(number * self.num_lanes + lane, len(self.units))
        return self.units[self._order(epoch)[place]]


class Source:
    """A lane's endless stream of pieces. One worker at a time calls `tokenize_chunk`."""

    def __init__(self, lane, units, tokenizer, read_bytes, saved):
        """`saved`: the LaneState's JSON value; what it names comes first, then what it had not read."""
        self.lane, self.units, self.tokenizer, self.read_bytes = lane, units, tokenizer, read_bytes
        self.next = tuple(saved["next"])
        self.again = {(unit, document, piece) for unit, document, piece in saved["buffer"]}
        if saved["pending"]:
            self.again.add(tuple(saved["pending"][:3]))
        self.place = "waiting for a worker"
        self._texts = self._read(*min({self.next} | self.again))

    def _read(self, number, document, piece):
        while True:
            shard, row_group, first, stop = self.units.get(self.lane, number)
            while first + document < stop:
                self.place = f"{shard.path}, row group {row_group}"
                pieces, document = read_pieces(shard, row_group, first + document, stop, piece, self.read_bytes)
                document, piece = document - first, 0
                for text in pieces:
                    yield (number, text.document - first, text.index), text
                if pieces and not pieces[-1].is_last:
                    piece = pieces[-1].index + 1
            number, document = number + 1, 0

    def tokenize_chunk(self):
        """The next Pieces, of CHUNK_BYTES of text or a little more."""
        chunk, n_bytes = [], 0
        while n_bytes < CHUNK_BYTES:
            ref, text = next(self._texts)
            if ref < self.next and ref not in self.again:
                continue
            n_bytes += len(text.text)
            ids = self.tokenizer.encode_to_numpy(text.text)
            is_first = ref[2] == 0
            tokens = np.empty(len(ids) + is_first, dtype=np.int32)
            tokens[:is_first] = self.tokenizer.bos_id
            tokens[is_first:] = ids
            chunk.append(Piece(ref, text.is_last, tokens))
        return chunk


# -----------------------------------------------------------------------------
# Packing


def smallest_cover(lengths, space):
    """Indices of those `lengths` whose sum is the least that reaches `space`, and that sum; None if no sum does.

    Bit i of an integer says whether a sum of i can be had. Earlier ones are preferred among equals.
    """
    reach, mask = [1], (1 << space + max(lengths, default=0)) - 1
    for length in lengths:
        reach.append((reach[-1] | reach[-1] << length) & mask)
        if reach[-1] >> space & 1:
            break
    over = reach[-1] >> space
    if not over:
        return None
    total = left = space + (over & -over).bit_length() - 1
    chosen = []
    for i in range(len(reach) - 2, -1, -1):
        if not reach[i] >> left & 1:  # not without this one
            chosen.append(i)
            left -= lengths[i]
    return chosen, total


class Lane:
    """Makes rows. `fetch()` returns the next chunk, a list of Pieces, waiting for it if need be."""

    def __init__(self, row_tokens, saved, fetch):
        """`saved` is a state's to_json()."""
        self.row_tokens, self.fetch = row_tokens, fetch
        self.incoming, self.buffer, self.pending = deque(), [], None
        self.rows, self.waited, self.tokens, self.dropped, self.documents = (
            saved[name] for name in ("rows", "waited", "tokens", "dropped", "documents"))
        self._to_restore = saved

    def state(self):
        return LaneState(self.rows, self.next, tuple(self.buffer), self.pending, self.waited, self.tokens, self.dropped,
                         self.documents)

    def restore(self):
        """Fetches again the documents that the saved state names."""
        saved = self._to_restore
        for _ in range(len(saved["buffer"]) + bool(saved["pending"])):
            piece = self._take()
            if saved["pending"] and piece.ref == tuple(saved["pending"][:3]):
                self.pending = piece, saved["pending"][3]
            else:
                self.buffer.append(piece)
        self.next = tuple(saved["next"])

    def fill(self, row):
        """Writes the next row into `row` (seq_len + 1)."""
        oldest = self.buffer[0].ref if self.buffer else None
        self.tokens += len(row) - bool(self.pending)
        filled = self._continue(row, 0)
        while filled < len(row):
            self._refill()
            filled = self._add_documents(row, filled)
        self.rows += 1
        self.waited = self.waited + 1 if self.buffer and self.buffer[0].ref == oldest else 0

    def _peek(self):
        while not self.incoming:
            self.incoming.extend(self.fetch())
        return self.incoming[0]

    def _take(self):
        piece = self._peek()
        self.incoming.popleft()
        unit, document, index = piece.ref
        self.next = (unit, document + 1, 0) if piece.is_last else (unit, document, index + 1)
        return piece

    def _refill(self):
        n_tokens = sum(len(piece.tokens) for piece in self.buffer)
        two_rows = 2 * self.row_tokens
        while n_tokens < two_rows or (len(self.buffer) < BUFFER_DOCUMENTS and n_tokens < BUFFER_TOKENS):
            if self._peek().ref[2]:
                return  # the newest document is not read to its end: that happens once it is begun
            self.buffer.append(self._take())
            n_tokens += len(self.buffer[-1].tokens)

    def _is_long(self, piece):
        return len(piece.tokens) > self.row_tokens or not piece.is_last

    def _add_documents(self, row, filled):
        for i in (chosen := self._choose(len(row) - filled)):
            piece = self.buffer[i]
            self.documents += 1
            if self._is_long(piece):
                self.pending = piece, 0
                filled = self._continue(row, filled)
            else:
                part = piece.tokens[:len(row) - filled]
                self.dropped += len(piece.tokens) - len(part)
                row[filled:filled + len(part)] = part
                filled += len(part)
        for i in sorted(chosen, reverse=True):
            del self.buffer[i]
        return filled

    def _choose(self, space):
        """Indices of the buffered documents that go into the `space` left in a row, in this order.

        All are short and go in whole but the last, which may be a long one, or is cropped.
        """
        oldest = self.buffer[0]
        if self._is_long(oldest):
            return [0]
        chosen = [0] if len(oldest.tokens) <= space else []
        space -= len(chosen) * len(oldest.tokens)
        if not space:
            return chosen
        short = [i for i in range(len(chosen), len(self.buffer)) if not self._is_long(self.buffer[i])]
        cover = smallest_cover([len(self.buffer[i].tokens) for i in short], space)
        if cover is None or cover[1] > space and self.waited < PATIENCE_ROWS:
            for i, piece in enumerate(self.buffer):
                if self._is_long(piece):
                    return chosen + [i]
        # Of a least sum the longest document is longer than the excess.
        return chosen + sorted((short[i] for i in cover[0]), key=lambda i: len(self.buffer[i].tokens))

    def _continue(self, row, filled):
        """Writes more of the pending document, if there is one, and returns how far the row is filled."""
        while self.pending and filled < len(row):
            piece, offset = self.pending
            part = piece.tokens[offset:offset + len(row) - filled]
            row[filled:filled + len(part)] = part
            filled += len(part)
            offset += len(part)
            if offset == len(piece.tokens) and piece.is_last:
                self.pending = None
            elif filled == len(row):
                self.pending = piece, offset - 1  # the last token of this row is the first of the next
            else:
                self.pending = self._take(), 0
        return filled


# -----------------------------------------------------------------------------
# The loaders


class DataLoader:
    """Endless iterator over this rank's batches. The module's docstring describes it.

    Raises BadInput for data, sizes or a state that cannot be used; what goes wrong in a background thread is raised by
    `next()`. Close it, or use it as a context manager: its threads keep it alive.
    """

    def __init__(self, shards, tokenizer, *, batch_size, seq_len, rank=0, world_size=1, seed=0, num_lanes=NUM_LANES,
                 threads=2, state=None):
        shards = open_shards(shards)
        self.fingerprint = fingerprint(shards)
        self.batch_size, self.seq_len, self.world_size = batch_size, seq_len, world_size
        self.run = {"num_lanes": num_lanes, "seed": seed, "seq_len": seq_len, "data": self.fingerprint,
                    "tokenizer": tokenizer.sha256}
        state = _check_state(state, self.run, world_size)
        self._next_row = rank + sum(saved["rows"] for saved in state.values())
        self._n_documents = sum(sum(shard.row_group_rows) for shard in shards)
        units = Units(shards, num_lanes, seed)
        self._wanted = queue.SimpleQueue()  # lanes whose next chunk a worker shall make; None ends the worker
        self._sources, self._chunks, self._lanes = {}, {}, {}
        own_lanes = range(rank, num_lanes, world_size)
        for lane in own_lanes:
            self._sources[lane] = Source(lane, units, tokenizer, READ_AHEAD_BYTES // len(own_lanes), state[lane])
            self._chunks[lane] = queue.SimpleQueue()  # at most one list of Pieces, or the error that came instead
            self._lanes[lane] = Lane(seq_len + 1, state[lane], lambda lane=lane: self._fetch(lane))
            self._wanted.put(lane)
        self._condition = threading.Condition()  # guards the next three
        self._ready, self._error, self._closed = deque(), None, False
        self._doing = "starting"
        self._last = None
        self._threads = [threading.Thread(target=self._work, name=f"tokenize-{i}", daemon=True) for i in range(threads)]
        self._threads.append(threading.Thread(target=self._pack, name="pack", daemon=True))
        for thread in self._threads:
            thread.start()

    def __iter__(self):
        return self

    def __next__(self):
        with self._condition:
            if not self._condition.wait_for(lambda: self._ready or self._error or self._closed, TIMEOUT_S):
                raise TimeoutError(f"waited {TIMEOUT_S} s for a batch; the loader is {self._doing}")
            if self._closed:
                raise RuntimeError("the loader is closed")
            if not self._ready:
                raise self._error
            self._last = self._ready.popleft()
            self._condition.notify_all()
        return self._last

    @property
    def stats(self):
        """Of this rank's lanes up to the last batch, since the run began."""
        lanes = self._last.lanes if self._last else {}
        counts = {name: sum(getattr(state, name) for state in lanes.values())
                  for name in ("rows", "tokens", "dropped", "documents")}
        counts["dropped_share"] = counts["dropped"] / max(1, counts["tokens"] + counts["dropped"])
        counts["epoch"] = counts["documents"] * self.world_size / self._n_documents
        return counts

    def close(self):
        """Ends the threads. Safe to call twice."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        for chunks in self._chunks.values():
            chunks.put(_Closed())
        for _ in self._threads:
            self._wanted.put(None)
        for thread in self._threads:
            thread.join(timeout=10)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _work(self):
        while (lane := self._wanted.get()) is not None and not self._closed:
            try:
                self._chunks[lane].put(self._sources[lane].tokenize_chunk())
            except Exception as error:
                self._chunks[lane].put(error)

    def _fetch(self, lane):
        self._doing = f"tokenizing for lane {lane}: {self._sources[lane].place}"
        chunk = self._chunks[lane].get()
        if isinstance(chunk, Exception):
            raise chunk
        self._wanted.put(lane)
        return chunk

    def _pack(self):
        try:
            for lane in self._lanes.values():
                lane.restore()
            states = {number: lane.state() for number, lane in self._lanes.items()}
            while not self._closed:
                rows = np.empty((self.batch_size, self.seq_len + 1), dtype=np.int32)
                for row in rows:
                    number = self._next_row % self.run["num_lanes"]
                    self._lanes[number].fill(row)
                    states[number] = self._lanes[number].state()
                    self._next_row += self.world_size
                batch = Batch(torch.from_numpy(rows), dict(states), self.run)
                with self._condition:
                    self._condition.wait_for(lambda: self._closed or len(self._ready) < BATCHES_AHEAD)
                    self._ready.append(batch)
                    self._condition.notify_all()
        except _Closed:
            pass
        except Exception as error:
            with self._condition:
                self._error = error
                self._condition.notify_all()


class _Closed(Exception):
    """Ends the packer."""


class SyntheticLoader:
    """Random tokens in the same shape, with the same attributes: to try a machine without data."""

    fingerprint = "synthetic"

    def __init__(self, n_vocab, *, batch_size, seq_len, rank=0, world_size=1, seed=0, num_lanes=NUM_LANES, state=None):
        self.n_vocab, self.batch_size, self.seq_len, self.world_size = n_vocab, batch_size, seq_len, world_size
        self.run = {"num_lanes": num_lanes, "seed": seed, "seq_len": seq_len, "data": self.fingerprint,
                    "tokenizer": f"{n_vocab} random tokens"}
        state = _check_state(state, self.run, world_size)
        self._next_row = rank + sum(saved["rows"] for saved in state.values())
        self._rows = {lane: state[lane]["rows"] for lane in range(rank, num_lanes, world_size)}

    def __iter__(self):
        return self

    def __next__(self):
        rows = np.empty((self.batch_size, self.seq_len + 1), dtype=np.int32)
        for row in rows:
            row[:] = np.random.default_rng([self.run["seed"], self._next_row]).integers(self.n_vocab, size=len(row))
            self._rows[self._next_row % self.run["num_lanes"]] += 1
            self._next_row += self.world_size
        states = {lane: NEW_LANE._replace(rows=n, tokens=n * self.seq_len) for lane, n in self._rows.items()}
        return Batch(torch.from_numpy(rows), states, self.run)

    @property
    def stats(self):
        n_rows = sum(self._rows.values())
        return {"rows": n_rows, "tokens": n_rows * self.seq_len, "dropped": 0, "documents": 0, "dropped_share": 0.0,
                "epoch": 0.0}

    def close(self):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def _check_state(state, run, world_size):
    """The saved states of all lanes, {int: JSON value}; new ones if `state` is None. BadInput if they do not fit."""
    num_lanes = run["num_lanes"]
    if num_lanes % world_size:
        raise BadInput(f"{num_lanes} lanes cannot be shared by {world_size} ranks: "
                       f"use {_divisors_near(num_lanes, world_size)} ranks")
    if state is None:
        return dict.fromkeys(range(num_lanes), NEW_LANE.to_json())
    state = {int(lane): saved for lane, saved in state.items()}
    for saved in state.values():
        for name, value in saved["run"].items():
            if value != run.get(name):
                raise BadInput(f"the saved place in the data is for {name} {value}, but this run has {run.get(name)}: "
                               "resume with what the run began with")
    missing = sorted(set(range(num_lanes)) - state.keys())
    if missing:
        raise BadInput(f"the saved place in the data lacks lanes {', '.join(map(str, missing))}: "
                       "it takes the states that all ranks saved")
    n_rows = sum(saved["rows"] for saved in state.values())
    if any(state[lane]["rows"] != -(-(n_rows - lane) // num_lanes) for lane in state):
        raise BadInput("the saved lanes are of different steps: resume from another checkpoint")
    if n_rows % world_size:
        raise BadInput(f"{n_rows} rows were read so far, which {world_size} ranks cannot have done: "
                       f"use {_divisors_near(math.gcd(n_rows, num_lanes), world_size)} ranks")
    return state


def _divisors_near(n, wanted):
    """The divisors of n next to `wanted`, as text."""
    divisors = [d for d in range(1, n + 1) if n % d == 0]
    below = [d for d in divisors if d < wanted][-1:]
    return " or ".join(map(str, below + [d for d in divisors if d > wanted][:1]))
