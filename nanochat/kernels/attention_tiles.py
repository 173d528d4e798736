"""The shapes that the Pallas kernels of attention can run, the tiles in which they compute the scores, and the order of
the tiles. It imports no jax."""
import math
from typing import NamedTuple

from nanochat.common import BadInput

HEAD_DIM = 128  # also the width of the TPU's vector registers
SEGMENT = 2048  # positions that a kernel for longer sequences works on at a time
MAX_WHOLE = 4096  # positions of a sequence that fits into VMEM as a whole
MAX_SEQ_LEN = 32768
CHUNK = 256  # positions that are normalised and transposed at a time


def require_shapes(kernel, config, device_type):
    """Raises BadInput if `kernel` is flash and cannot run a config's model on `device_type`."""
    head_dim = config.head_dim
    length = config.max_seq_len
    step = 128 if device_type == "tpu" else 1
    if kernel == "flash" and config.has_layer_by_hand and (head_dim != HEAD_DIM or not is_length(length, step)):
        raise BadInput(f"--kernel=flash has heads of {HEAD_DIM} and sequences of up to {MAX_WHOLE:,} in steps of 128 "
                       f"and up to {MAX_SEQ_LEN:,} in steps of {SEGMENT:,}, not heads of {head_dim} and {length}: "
                       "change --num_heads or --max_seq_len, or use --kernel=chunked")


def is_length(length, step=128):
    """Whether the kernels can run sequences of this length. step: between lengths up to MAX_WHOLE."""
    if length <= MAX_WHOLE:
        return length % step == 0
    return length % SEGMENT == 0 and length <= MAX_SEQ_LEN


def segment_of(length, max_whole):
    """Returns how many positions of a longer sequence a kernel works on at a time, on a chip with room for whole
    sequences of `max_whole`: at most half of that, because some sums span all segments."""
    return next(segment for segment in range(max_whole // 2, 0, -128) if length % segment == 0)


class Tiles(NamedTuple):
    """The sizes of the tiles of scores: queries × keys, and on the diagonal, queries × `diagonal` keys."""
    queries: int
    keys: int
    diagonal: int


# On the diagonal, narrow tiles compute fewer masked scores. Elsewhere, large ones overlap better. On v5e, the forward
# kernel of 16 layers takes 3.17 Mcycles, and 3.99 with tiles of 128 × 128 throughout.
FORWARD_TILES = {128: Tiles(256, 512, 128), 256: Tiles(256, 256, 256)}  # by the width of the chip's matrix units
BACKWARD_TILES = {128: Tiles(512, 256, 128), 256: Tiles(256, 256, 256)}


class Tile(NamedTuple):
    """A tile of scores. Its queries and keys are slices of positions; `is_last` among the tiles of its rows."""
    queries: slice
    keys: slice
    rows: slice  # its block of queries: the same, or more on the diagonal or a window's edge
    is_last: bool
    offset: int = 0  # positions from the first of the keys' segment to the first of the queries'


# The tiles of 1,024 positions, with 512 × 512 queries and keys in a tile, and 256 keys on the diagonal. Each letter is
# one tile. Only a to d cross the diagonal, and need a mask; above it there are no tiles. The order is c's and d's block
# of queries first: w, c, d, a, b.
#                keys 0    256    512    768
#     queries   0     a
#             256     a      b
#             512     w      w      c
#             768     w      w      c      d
def list_tiles(length, tiles, window=None, offset=0):
    """Returns the Tiles of scores of `length` positions that are not entirely masked, from the last queries to the
    first.

    window: a query sees itself and the window - 1 positions before it; None: all before it. offset: how much earlier
    the keys' segment of `length` positions begins, 0 or at least `length`.
    """
    found = []

    def add(queries, keys, rows):
        if window is not None:  # the last queries may be too far from these keys
            end = math.ceil((keys.stop + window - 1 - offset) / tiles.diagonal) * tiles.diagonal
            queries = slice(queries.start, min(queries.stop, end))
        found.append(Tile(queries, keys, rows, keys.stop == (length if offset else rows.stop), offset))

    # Only its own and later queries see a key. So with the last tile of a block of queries, the gradients of the keys
    # at its positions are complete, too. The backward kernels rely on it.
    for start in reversed(range(0, length, tiles.queries)):
        rows = slice(start, min(start + tiles.queries, length))
        reach = 0
        if window is not None:
            reach = max(0, start + offset - window + 1) // tiles.diagonal * tiles.diagonal
        # The whole block sees the keys from reach to before, except at the window's edge.
        before = length if offset else start
        for first in range(reach, before, tiles.keys):
            add(rows, slice(first, min(first + tiles.keys, before)), rows)
        if not offset:
            for first in range(start, rows.stop, tiles.diagonal):
                add(slice(first, rows.stop), slice(first, min(first + tiles.diagonal, rows.stop)), rows)
    return found


def num_scores(tiles):
    return sum((tile.queries.stop - tile.queries.start) * (tile.keys.stop - tile.keys.start) for tile in tiles)


def pipeline(count, stages):
    """Traces stage(n) for n from 0 to count - 1 of each (delay, stage), so that a stage works on tile n while another,
    with a delay greater by one, works on tile n - 1."""
    # A kernel is unrolled while it is traced, and the compiler keeps the order of the products. So within a turn the
    # list is the order in the program. Stages of equal delay work on one tile, stages of other delays on other tiles.
    for turn in range(count + max(delay for delay, _ in stages)):
        for delay, stage in stages:
            if 0 <= turn - delay < count:
                stage(turn - delay)


# Tracing knows which chunks are done. So norms and rotations stand next to the first tile that needs them, where they
# overlap with products: the forward kernel takes 6.59 Mcycles on v6e, and 6.67 with all of them at its beginning.
class Once:
    """Calls prepare(chunk) for each chunk of positions when it is first needed."""

    def __init__(self, length, prepare):
        self.length = length
        self.prepare = prepare
        self.done = set()

    def __call__(self, positions):
        for start in range(positions.start // CHUNK * CHUNK, positions.stop, CHUNK):
            if start not in self.done:
                self.done.add(start)
                self.prepare(slice(start, min(start + CHUNK, self.length)))
