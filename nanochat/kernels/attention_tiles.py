"""The tiles in which the attention kernels compute the scores, and the order in which they work on them."""
import math
from typing import NamedTuple

CHUNK = 256  # positions that are normalised and transposed at a time


class Tiles(NamedTuple):
    """The sizes of the tiles of scores: queries × keys, and on the diagonal, queries × `diagonal` keys."""
    queries: int
    keys: int
    diagonal: int


# On the diagonal, narrow tiles leave out more of what is masked. Elsewhere, large ones overlap better. On v5e, the
# forward kernel of 16 layers takes 3.17 Mcycles so, and 3.99 with tiles of 128 × 128 throughout.
FORWARD_TILES = {128: Tiles(256, 512, 128), 256: Tiles(256, 256, 256)}  # by the width of the chip's matrix units
BACKWARD_TILES = {128: Tiles(512, 256, 128), 256: Tiles(256, 256, 256)}


class Tile(NamedTuple):
    """A tile of scores. Its queries and keys are slices of positions; `is_last` of the tiles of its rows."""
    queries: slice
    keys: slice
    rows: slice  # the block of queries that it is of: the same, or on the diagonal or a window's edge, some more
    is_last: bool
    offset: int = 0  # positions from the first of the keys' segment to the first of the queries'


def list_tiles(length, tiles, window=None, offset=0):
    """Returns the Tiles of scores of `length` positions that are not all masked, from the last queries to the first.

    window: a query sees itself and the window - 1 positions before it; None: all before it. offset: 0, or the keys are
    those of a segment of `length` positions that begins as much earlier, at least `length`.
    """
    found = []

    def add(queries, keys, rows):
        if window is not None:  # the last queries may be too far from these keys
            end = math.ceil((keys.stop + window - 1 - offset) / tiles.diagonal) * tiles.diagonal
            queries = slice(queries.start, min(queries.stop, end))
        found.append(Tile(queries, keys, rows, keys.stop == (length if offset else rows.stop), offset))

    # Only its own and later queries see a key. So with the last tile of a block of queries, the gradients of the keys
    # at its positions are complete, too: the backward kernels rely on it.
    for start in reversed(range(0, length, tiles.queries)):
        rows = slice(start, min(start + tiles.queries, length))
        reach = 0 if window is None else max(0, start + offset - window + 1) // tiles.diagonal * tiles.diagonal
        # Keys from reach to before are seen by the whole block, but for the window's edge.
        before = length if offset else start
        for first in range(reach, before, tiles.keys):
            add(rows, slice(first, min(first + tiles.keys, before)), rows)
        for first in range(start, start if offset else rows.stop, tiles.diagonal):
            add(slice(first, rows.stop), slice(first, min(first + tiles.diagonal, rows.stop)), rows)
    return found


def num_scores(tiles):
    """Returns how many scores the Tiles have."""
    return sum((tile.queries.stop - tile.queries.start) * (tile.keys.stop - tile.keys.start) for tile in tiles)


def pipeline(count, stages):
    """Traces every stage(n) for n from 0 to count - 1, of (delay, stage), so that a stage works on tile n at the same
    time as another with one more of delay works on tile n - 1."""
    # A kernel is unrolled while it is traced, and the compiler keeps the order of the products. So within a turn the
    # list is the order in the program. Stages of equal delay work on one tile, and those of other delays on other
    # tiles.
    for turn in range(count + max(delay for delay, _ in stages)):
        for delay, stage in stages:
            if 0 <= turn - delay < count:
                stage(turn - delay)


# The chunks that are done are known while a kernel is traced. So norms and rotations stand next to the first tile that
# needs them, where they overlap with products: 6.59 Mcycles for the forward kernel on v6e, and 6.67 with all of them at
# its beginning.
class Once:
    """Calls prepare(chunk) for each chunk of positions when it is first needed."""

    def __init__(self, length, prepare):
        self.length, self.prepare, self.done = length, prepare, set()

    def __call__(self, positions):
        for start in range(positions.start // CHUNK * CHUNK, positions.stop, CHUNK):
            if start not in self.done:
                self.done.add(start)
                self.prepare(slice(start, min(start + CHUNK, self.length)))
