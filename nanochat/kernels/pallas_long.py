"""The attention of pallas_short.py for sequences that are too long to be in VMEM as a whole.

Positions are divided into segments. A step of a program computes the scores of the queries of one segment with the keys
of one, itself or an earlier one, and adds to sums that stay in VMEM: because no maximum is needed, partial sums just
add. Pairs of segments out of the window's reach are no steps. The bodies of the three kinds of pairs (the same segment,
wholly visible, on the window's edge) are parts of the same kernel.

The backward pass goes through the pairs of a segment of queries twice. First it sums the mean that each query's scores
need, then come the gradients. That is 7 products where pallas_short.py needs 5.
"""
from functools import partial

import jax.numpy as jnp
from jax.experimental import pallas as pl

from nanochat.kernels.attention_tiles import BACKWARD_TILES, FORWARD_TILES, list_tiles, num_scores, pipeline
from nanochat.kernels.flash_shapes import HEAD_DIM, SEGMENT
from nanochat.kernels.pallas_parts import (
    Operands,
    backward_results,
    backward_scratch,
    by_window,
    dot,
    forward_results,
    forward_scratch,
    run,
    sums_of_128,
)
from nanochat.kernels.pallas_short import Scores, forward_tiles, write_gradients


def list_pairs(segments, segment, window):
    """Returns the pairs (segment of queries, segment of keys) of which something is visible: from the last queries to
    the first, and for each from the first keys to the last."""
    # ceil((window - 1) / segment): the first query of a segment sees the window - 1 positions before it.
    farthest = segments if window is None else (window + segment - 2) // segment  # distance in segments
    return [(i, j) for i in reversed(range(segments)) for j in range(max(0, i - farthest), i + 1)]


def list_cases(pairs, segment, tiles, window):
    """Returns the kinds of pairs, [(smallest distance in segments, largest, Tiles of scores)]."""
    cases = {}
    for distance in sorted({i - j for i, j in pairs}):
        is_whole = distance and (window is None or (distance + 1) * segment <= window)
        # Segments of keys that are wholly visible have the same tiles, without masks, at every distance. These
        # distances follow one another, so they are one case, which is one body in the kernel.
        same = next((first for first, (_, whole, _) in cases.items() if whole), distance) if is_whole else distance
        cases[same] = (distance, is_whole, list_tiles(segment, tiles, None if is_whole else window, distance * segment))
    return [(first, last, found) for first, (last, _, found) in cases.items()]


def _here(place, num_steps):
    """Returns this step's segments of queries and keys, and whether the step before had other queries."""
    # `place` is: layer, window, the segment of queries of each step, the segment of keys of each step, and in the
    # backward kernel whether each step adds gradients (see pallas_parts.run).
    step = pl.program_id(3)
    i, j = place[2 + step], place[2 + num_steps + step]
    return i, j, (step == 0) | (place[2 + jnp.maximum(step, 1) - 1] != i)


def _clear(*sums):
    zeros = [jnp.zeros_like(total) for total in sums]
    for total, zero in zip(sums, zeros, strict=True):
        total[...] = zero


# -----------------------------------------------------------------------------
# The kernels


def _forward_kernel(place, refs, *, eps, window, cases, num_steps):
    i, j, is_first = _here(place, num_steps)

    @pl.when(is_first)
    def _():
        _clear(refs.out_sum, refs.weight_sum)

    def add(rows, out, sums):
        refs.out_sum[:, rows] += out
        refs.weight_sum[:, rows] += sums

    def finish(rows, out, sums):  # the pair of a segment with itself is its last
        total = jnp.sum(refs.weight_sum[:, rows] + sums, axis=0, keepdims=True)
        refs.log_sums[0, 0, :, rows] = jnp.log2(total)
        refs.out[0, rows] = ((refs.out_sum[:, rows] + out) / total).astype(refs.out.dtype).T

    for first, last, tiles in cases:
        @pl.when((i - j >= first) & (i - j <= last))
        def _(tiles=tiles, end=add if first else finish):
            forward_tiles(tiles, refs, end, eps=eps, window=window)


class _Gradients(Scores):
    """The further stages for the tiles of a pair of segments. refs: also the fp32 sums mean_sum (S, 128) and dq_sum, of
    this segment of queries, and dk_sum and dv_sum, of all segments of keys, (segments, 128, S)."""

    def __init__(self, tiles, refs, segment_of_keys, *, is_last, matrix_unit, **options):
        super().__init__(tiles, refs, **options)
        self.j = segment_of_keys
        self.is_last = is_last  # of the pairs of this segment of queries
        self.is_wide = matrix_unit > HEAD_DIM
        self.means = {}

    def add_to_means(self, n):
        queries = self.tiles[n].queries
        self.refs.mean_sum[queries] += sums_of_128(self.probabilities.pop(n) * self.d_weights.pop(n))

    def compute_d_scores_of_row(self, n):
        rows = self.tiles[n].rows
        if rows.start not in self.means:
            self.means[rows.start] = jnp.sum(self.refs.mean_sum[rows], axis=1, keepdims=True)
        self.compute_d_scores(n, self.means[rows.start])

    def add_to_v(self, n):
        refs, tile = self.refs, self.tiles[n]
        refs.dv_sum[self.j, :, tile.keys] += dot(refs.d_out_t[:, tile.queries], self.probabilities.pop(n))

    def add_to_k(self, n):
        refs, tile = self.refs, self.tiles[n]
        refs.dk_sum[self.j, :, tile.keys] += dot(refs.q_t[:, tile.queries], self.d_scores[n])

    def add_to_q(self, n):
        refs, tile, d_score = self.refs, self.tiles[n], self.d_scores.pop(n)
        if self.is_wide:
            refs.dq_sum[:, tile.queries] += dot(refs.k_t[:, tile.keys], d_score, (1, 1))
        else:
            refs.dq_sum[tile.queries] += dot(d_score, refs.k_normed[tile.keys])
        # No tile that is still to come reaches these queries, or these keys. The query heads of a group share the keys:
        # each writes the sums so far, and the last one those of all.
        if self.is_last and tile.is_last:
            d_q = refs.dq_sum[:, tile.rows] if self.is_wide else refs.dq_sum[tile.rows].T
            write_gradients(tile.rows, d_q, refs.dk_sum.at[self.j], refs.dv_sum.at[self.j], refs)


def _backward_kernel(place, refs, *, eps, window, cases, num_steps, matrix_unit):
    i, j, is_first = _here(place, num_steps)
    adds_gradients = place[2 + 2 * num_steps + pl.program_id(3)]

    @pl.when(is_first)
    def _():
        _clear(refs.mean_sum, refs.dq_sum)

    @pl.when((pl.program_id(2) == 0) & (pl.program_id(3) == 0))
    def _():  # the query heads of a group follow one another and add to the same gradients of k and v
        _clear(refs.dk_sum, refs.dv_sum)

    def work(tiles, is_second, is_last):
        pair = _Gradients(tiles, refs, j, is_last=is_last, matrix_unit=matrix_unit, eps=eps, window=window)
        first = [(0, pair.compute_scores), (0, pair.compute_d_weights)]
        if is_second:
            # As in pallas_short._backward_kernel, but the means are known: a tile waits for no other one.
            stages = [(3, pair.add_to_v), (3, pair.add_to_k), *first, (3, pair.add_to_q),
                      (1, pair.compute_probabilities), (2, pair.compute_d_scores_of_row)]
        else:
            stages = [*first, (1, pair.compute_probabilities), (2, pair.add_to_means)]
        pipeline(len(tiles), stages)

    for first, last, tiles in cases:
        for is_second in (0, 1):
            @pl.when((i - j >= first) & (i - j <= last) & (adds_gradients == is_second))
            def _(tiles=tiles, is_second=is_second, is_last=first == 0):
                work(tiles, is_second, is_last)


# -----------------------------------------------------------------------------
# Calling them


def _scores(pairs, cases):
    """Returns how many scores the tiles of all pairs have."""
    return sum(num_scores(next(tiles for first, last, tiles in cases if first <= i - j <= last)) for i, j in pairs)


def _tables(cos, sin):
    return {"cos_q": ("q table", cos), "sin_q": ("q table", sin), "cos_k": ("k table", cos), "sin_k": ("k table", sin)}


def forward(place, q, k, v, cos, sin, *, windows, matrix_unit, eps, segment=SEGMENT, interpret=False):
    """As pallas_attention.forward. segment: positions of a segment, of which the sequence has a whole number."""
    length = q.shape[2]
    inputs = {"q": ("q stack", q), "k": ("k stack", k), "v": ("k stack", v), **_tables(cos, sin)}
    sums = {"out_sum": ((HEAD_DIM, segment), jnp.float32), "weight_sum": ((8, segment), jnp.float32)}
    operands = Operands(inputs, forward_results(q), forward_scratch(segment, q.dtype) | sums)

    def call(window):
        pairs = list_pairs(length // segment, segment, window)
        cases = list_cases(pairs, segment, FORWARD_TILES[matrix_unit], window)
        scores = _scores(pairs, cases)
        kernel = partial(_forward_kernel, cases=cases, num_steps=len(pairs), eps=eps, window=window)
        return run(kernel, place, operands, segment, (4 * HEAD_DIM * scores, scores), pairs, interpret)

    return by_window(call, place[1], length, windows)


def backward(place, q, k, v, log_sums, d_out, *tables, windows, matrix_unit, eps, segment=SEGMENT, interpret=False):
    """As pallas_attention.backward. segment: as in `forward`."""
    length = q.shape[2]
    inputs = {"q": ("q stack", q), "k": ("k stack", k), "v": ("k stack", v), "log_sums": ("q sums", log_sums),
              "d_out": ("q head", d_out), **_tables(*tables)}
    rows, columns, all_columns = (segment, HEAD_DIM), (HEAD_DIM, segment), (length // segment, HEAD_DIM, segment)
    sums = {"mean_sum": (rows, jnp.float32), "dq_sum": (columns if matrix_unit > HEAD_DIM else rows, jnp.float32),
            "dk_sum": (all_columns, jnp.float32), "dv_sum": (all_columns, jnp.float32)}
    operands = Operands(inputs, backward_results(q, k, v), backward_scratch(segment, q.dtype) | sums)

    def call(window):
        pairs = list_pairs(length // segment, segment, window)
        # For each segment of queries: all pairs for the means, then all pairs for the gradients.
        steps = [(i, j, is_second) for query in reversed(range(length // segment)) for is_second in (0, 1)
                 for i, j in pairs if i == query]
        cases = list_cases(pairs, segment, BACKWARD_TILES[matrix_unit], window)
        scores = _scores(pairs, cases)
        kernel = partial(_backward_kernel, cases=cases, num_steps=len(steps), eps=eps, window=window,
                         matrix_unit=matrix_unit)
        return run(kernel, place, operands, segment, (14 * HEAD_DIM * scores, 2 * scores), steps, interpret)

    return by_window(call, place[1], length, windows)
