"""The loader: micro-batches of token rows for one reader, made by background threads and restored exactly.

    rows = RankRows(batch_size=8, seq_len=1024, reader=r, readers=w)
    with DataLoader(open_text(flags), tokenizer, rows) as loader:
        for batch in loader:           # endless; a new tensor each time
            batch.rows                 # int32 (8, 1025): inputs are rows[:, :-1], targets rows[:, 1:]
            batch.state                # {lane: JSON value} of this reader's lanes after this batch
            loader.stats               # counts up to this batch: rows, tokens, dropped, …
    DataLoader(…, num_rows=1000)       # the run's rows 0 to 999, or fewer if one pass over the data has fewer
    SyntheticLoader(n_vocab, rows)     # random tokens, without data

A reader is a rank, or the ranks along the axis tensor, which read the same. Row n of a run comes from lane n mod
num_lanes and goes to reader n mod readers, which therefore owns every readers-th lane: a step sees the same tokens on
any number of ranks. Each lane prefetches one block of rows, at first of one row; blocks grow with the rows taken.

LanguageTask (train/language.py) opens one for training and one for each evaluation; base_eval opens one, too.
docs/design.md explains the design.
"""
import math
import queue
import threading
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np

from nanochat.common import BadInput
from nanochat.data.lanes import NUM_LANES, PADDING, Lane, LaneState, RandomLane, SharedByLanes
from nanochat.data.shards import fingerprint
from nanochat.data.units import Units
from nanochat.device.mesh import divisors_in_words

READ_AHEAD_BYTES = 256 << 20  # bytes of text that all lanes of a reader hold together, at most
BLOCK_TOKENS = 1 << 15  # tokens of the rows that a worker makes at a time, at most (but at least one row)
# An evaluation of few files, which may have fewer tokens than requested, reads them as one lane, of which every reader
# packs all rows: among many lanes some would have no text, and others more than requested.
SMALL_BYTES = 1 << 20  # of the files
SMALL_BYTES_PER_TOKEN = 4  # of the files, per requested token; a token takes about one byte there
TIMEOUT_S = 540  # longer than the wait for a bucket, less than a step may take by default


@dataclass(frozen=True)
class RankRows:
    """Which rows a reader reads, and in what micro-batches."""
    batch_size: int  # rows of a micro-batch
    seq_len: int  # T, one less than the tokens of a row
    reader: int = 0  # the number of this one, see Mesh.reader
    readers: int = 1
    seed: int = 0  # of the order of the data
    num_lanes: int = NUM_LANES
    seq_len_before: int | None = None  # of the rows before the state to resume from; None: the same


@dataclass(frozen=True)
class Batch:
    """A reader's rows of a micro-batch, and the positions in the data after it."""
    rows: object  # a torch.Tensor, int32 (batch_size, seq_len + 1)
    lanes: dict = field(repr=False)  # {lane: fields of its LaneState after this batch}, for this reader's lanes
    settings: dict = field(repr=False)  # for which the states are valid, see settings_of

    @property
    def state(self):
        """The states of this reader's lanes after this batch, as {lane: JSON value}."""
        return {lane: {"run": self.settings, **LaneState(*state)._asdict()} for lane, state in self.lanes.items()}


class RowQueue:
    """The rows of one lane, prefetched by one block by any worker that takes this queue from `wanted`. Blocks double
    from one row to block_rows, so that it prefetches no more than it has served. num_rows: the rows needed in all."""

    # At any time a queue has at most one block that is finished or in work, besides the one that `get` takes from: so
    # memory is bounded, only one worker at a time is in a lane, and the lanes need no locks.
    def __init__(self, lane, block_rows, wanted, num_rows):
        self.lane = lane
        self.block_rows = block_rows
        self.wanted = wanted
        self._left = num_rows
        self._blocks = queue.SimpleQueue()  # at most one item: (rows, states), or the error that occurred
        self._block = iter(())
        self._size = 1
        self._want()

    def _want(self):
        self._size = min(self._size, self.block_rows, self._left)
        self._left -= self._size
        if self._size:
            self.wanted.put(self)

    def get(self):
        """Returns the next row and the fields of the LaneState after it. Raises the error that a worker met."""
        row_and_state = next(self._block, None)
        if row_and_state is not None:
            return row_and_state
        try:
            block = self._blocks.get(timeout=TIMEOUT_S)
        except queue.Empty:
            what = f"rows of lane {self.lane.number} ({self.lane.place})"
            raise TimeoutError(f"waited {TIMEOUT_S} s for {what}") from None
        if isinstance(block, BaseException):
            raise block
        self._size *= 2
        self._want()
        self._block = zip(*block, strict=True)
        return next(self._block)

    def work(self):
        """Makes the next block. Only workers call it, and for each queue one worker at a time."""
        try:
            self._blocks.put(self.lane.make_rows(self._size))
        except BaseException as error:  # a panic of a tokenizer in Rust is no Exception
            self._blocks.put(error)


def _work(wanted):
    while (row_queue := wanted.get()) is not None:
        row_queue.work()


class Loader:
    """An iterator over the Batches of one reader, from lanes that each kind of loader makes: _make_lane(number, state,
    row_tokens).

    settings: those for which a saved state is valid, in addition to those of `rows`; num_documents: of an epoch.
    rows, state, num_rows: see DataLoader.
    """

    problem = None  # see loss_eval.HeldOutRows
    is_small = False  # whether every reader reads all of a small text, which may end before num_rows
    _part = slice(None)  # this reader's part of the rows of a batch

    def __init__(self, settings, rows, num_documents, *, state=None, num_rows=None, threads=2):
        settings |= {"num_lanes": rows.num_lanes, "seed": rows.seed, "seq_len": rows.seq_len}
        states = check_lane_states(state, settings | {"seq_len": rows.seq_len_before or rows.seq_len}, rows.readers)
        self.fingerprint = settings["data"]
        self.readers = rows.readers
        self._num_documents = num_documents
        self._num_threads = threads
        # The rows that all readers have read together, a multiple of their number (check_lane_states), and this one's
        # place in the next round of rows.
        self._next_row = rows.reader + sum(lane.rows for lane in states.values())
        self._states = {lane: states[lane] for lane in range(rows.reader, rows.num_lanes, rows.readers)}
        self._num_rows = math.inf if num_rows is None else num_rows
        self.unfinished_lanes = set(self._states)  # this reader's lanes that have not come to the end of the data
        self._start_threads(settings, rows.batch_size)

    # Any worker may make the block of any lane, in whatever order they come to it. Rows are served in the order of
    # their numbers all the same, because __next__ asks the lane whose turn it is and waits for it alone. So neither the
    # number of threads nor their speed changes a batch.
    def _start_threads(self, settings, batch_size):
        """Starts the threads that make rows from the lanes' states on, for batches of this size."""
        self.settings = settings
        self.seq_len = settings["seq_len"]
        self.batch_size = batch_size
        self._error = None
        self._wanted = queue.SimpleQueue()  # RowQueues that need their next block; None ends a worker
        self._queues = {}  # lane: its RowQueue
        block_rows = max(1, BLOCK_TOKENS // self.seq_len)
        for number, state in self._states.items():
            lane = self._make_lane(number, LaneState(*state), self.seq_len + 1)
            num_rows = math.inf
            if self._num_rows != math.inf:
                num_rows = len(range(number, self._num_rows, settings["num_lanes"]))
            self._queues[number] = RowQueue(lane, block_rows, self._wanted, num_rows)
        self._threads = []
        for i in range(self._num_threads):
            self._threads.append(threading.Thread(target=_work, args=[self._wanted], name=f"tokenize-{i}", daemon=True))
            self._threads[-1].start()

    def __iter__(self):
        return self

    def __next__(self):
        if self._error:
            raise self._error
        # The first row of the round of all readers. So all end after the same batch, also those that have no row in it.
        if self._next_row - self._next_row % self.readers >= self._num_rows:
            raise StopIteration
        rows = np.full((self.batch_size, self.seq_len + 1), PADDING, dtype=np.int32)
        try:
            for i in range(self.batch_size):
                lane = self._next_row % self.settings["num_lanes"]
                if self._next_row < self._num_rows:
                    rows[i], self._states[lane] = self._queues[lane].get()
                    if rows[i, -1] == PADDING:
                        self.unfinished_lanes.discard(lane)
                self._next_row += self.readers
        except BaseException as error:
            self._error = error  # rows of this batch are lost, so the loader cannot continue
            raise
        if self.is_small and (rows[:, 0] == PADDING).all():
            raise StopIteration  # the text has ended, for every reader
        import torch  # here: the flags of a mixture are read without it
        return Batch(torch.from_numpy(rows)[self._part], dict(self._states), self.settings)

    def change_rows(self, batch_size, seq_len):
        """Changes the length of rows from the next batch on, as a new loader would that begins with the states of the
        last batch. Only for endless loaders without fim_rate."""
        # The states are those after the served rows. The lanes have read further, so new ones replace them.
        self.close()
        self._start_threads(self.settings | {"seq_len": seq_len}, batch_size)

    @property
    def stats(self):
        """Counts of this reader's lanes, from the beginning of the run to the last batch, as a dict.

        rows, tokens (repeated ones count once), dropped tokens, documents begun; dropped_share, a fraction of all
        tokens; and epoch, the number of passes over the data, if the other readers read as fast.
        """
        counts = dict.fromkeys(("rows", "tokens", "dropped", "documents"), 0)
        for state in self._states.values():
            for name in counts:
                counts[name] += getattr(LaneState(*state), name)
        counts["dropped_share"] = counts["dropped"] / max(1, counts["tokens"] + counts["dropped"])
        counts["epoch"] = counts["documents"] * self.readers / self._num_documents
        return counts

    def close(self):
        """Ends the threads. Safe to call twice."""
        self._error = RuntimeError("the loader is closed")
        # Queues that still wait for a worker are dropped, so that each worker ends after its present block.
        with suppress(queue.Empty):
            while True:
                self._wanted.get_nowait()
        for _ in self._threads:
            self._wanted.put(None)
        for thread in self._threads:
            thread.join(timeout=10)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class DataLoader(Loader):
    """An iterator over the Batches of one reader from shards, endless or over some rows.

    shards: Shards. rows: which of their rows, RankRows.
    state: the lane states of all readers in one dict, saved with any number of them; None begins a new run.
    num_rows: for an evaluation, rows 0 to num_rows - 1 of a new run. It ends with the batch of the last row, or where
        the data ends, after equally many batches for every reader. No document repeats: missing rows are lanes.PADDING.
        For bits_per_byte, its tokens say which bytes they lost, see HubTokenizer.with_lost_bytes.
    infilling: rewrites documents for fill in the middle, see fim.py.

    Raises BadInput for unusable data, sizes or states. `next()` raises errors of the background threads. Close the
    loader, or use it as a context manager: otherwise its threads live until the process ends.
    """

    def __init__(self, shards, tokenizer, rows, *, state=None, num_rows=None, infilling=None, threads=2):
        num_documents = sum(shard.num_documents for shard in shards)
        n_bytes = sum(shard.n_bytes for shard in shards)
        if num_rows is not None and n_bytes < SMALL_BYTES and (
                num_documents < rows.num_lanes or n_bytes < SMALL_BYTES_PER_TOKEN * num_rows * rows.seq_len):
            self.is_small = True
            self._part = slice(rows.reader, None, rows.readers)
            rows = replace(rows, batch_size=rows.batch_size * rows.readers, reader=0, readers=1, num_lanes=1)
        if num_rows is not None and tokenizer.losses:
            tokenizer = tokenizer.with_lost_bytes()
        self._shared = shared_by_lanes(shards, tokenizer, rows, infilling)
        super().__init__(settings_of(shards, tokenizer, infilling), rows, num_documents, state=state,
                         num_rows=num_rows, threads=threads)

    def _make_lane(self, number, state, row_tokens):
        num_units = math.inf if self._num_rows == math.inf else self._shared.units.number_in_epoch(number)
        return Lane(number, state, self._shared, row_tokens, num_units)


class SyntheticLoader(Loader):
    """An iterator over Batches of random tokens, to try a machine without data."""

    def __init__(self, n_vocab, rows, *, state=None, num_rows=None):
        self._n_vocab = n_vocab
        super().__init__({"data": "synthetic", "tokenizer": f"{n_vocab} random tokens"}, rows, 1, state=state,
                         num_rows=num_rows, threads=1)

    def _make_lane(self, number, state, row_tokens):
        return RandomLane(number, state, self._n_vocab, row_tokens, self.settings["seed"])


def shared_by_lanes(shards, tokenizer, rows, infilling, sources=1):
    """Returns the SharedByLanes of a reader of the RankRows `rows`, from one of so many sources."""
    # All lanes hold text at the same time, so each gets its share; lanes count as 16 at least.
    read_bytes = READ_AHEAD_BYTES // max(16, rows.num_lanes // rows.readers) // sources
    return SharedByLanes(Units(shards, rows.num_lanes, rows.seed), tokenizer, read_bytes, infilling)


# Saved positions


def settings_of(shards, tokenizer, infilling):
    """Returns the settings on which the rows of the shards depend, besides those of RankRows."""
    settings = {"data": fingerprint(shards), "tokenizer": tokenizer.sha256}
    if infilling:
        settings |= {"fim_rate": infilling.rate, "fim_kinds": list(infilling.kinds)}
        if tokenizer.suffix_first:
            settings["suffix_first"] = True
    return settings


def check_lane_states(saved, settings, readers):
    """Returns {lane: LaneState} for all lanes: the `saved` states, or new ones if `saved` is None.

    `saved` is {lane: JSON value} of all lanes, as Batch.state returns it; `settings` are those of this
    run. Raises BadInput if the states do not fit them or the number of readers.
    """
    num_lanes = settings["num_lanes"]
    if num_lanes % readers:
        raise BadInput(f"{num_lanes} lanes cannot be divided among {readers} ranks: "
                       f"use {divisors_in_words(num_lanes, readers)} ranks")
    if saved is None:
        return dict.fromkeys(range(num_lanes), LaneState())
    lanes = {}
    for lane, fields in saved.items():
        fields = dict(fields)
        saved_settings = fields.pop("run")
        for name in {**saved_settings, **settings}:  # those of fill in the middle are missing without it
            before = saved_settings.get(name, 0)
            now = settings.get(name, 0)
            if before != now:
                raise BadInput(f"the saved position in the data is for {name} {before}, but this run has {now}: resume "
                               "with the data and the flags of the first start")
        lanes[int(lane)] = LaneState(**fields)
    if missing := sorted(set(range(num_lanes)) - lanes.keys()):
        raise BadInput(f"the saved position in the data lacks lanes {', '.join(map(str, missing))}: give the states "
                       "that all ranks saved")
    # Of the rows 0 to n - 1 of a run, lane l has made those with numbers l, l + lanes, …: ⌈(n - l) / lanes⌉ of them.
    n_rows = sum(lane.rows for lane in lanes.values())
    if any(lane.rows != -(-(n_rows - number) // num_lanes) for number, lane in lanes.items()):
        raise BadInput("the saved lanes come from different steps: resume from another checkpoint")
    if n_rows % readers:
        raise BadInput(f"{n_rows} rows were read so far, which is not possible with {readers} ranks: "
                       f"use {divisors_in_words(math.gcd(n_rows, num_lanes), readers)} ranks")
    return lanes
