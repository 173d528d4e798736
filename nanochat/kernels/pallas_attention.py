"""Causal attention for TPUs, as two Pallas kernels: rotary positions, QK-norm and attention, and their gradients.

Operands and results have the shape (B, T, heads × 128) of the matrix products, and a head is one column of blocks of
128. Nothing of size T × T, no norm and no rotated copy ever reaches HBM. The softmax needs no maximum, because QK-norm
bounds every score by √128 < 12, and exp(12) × MAX_SEQ_LEN is far from the limit of fp32. The forward pass keeps the
logarithm of each query's sum of exponentials, so that the backward pass knows a probability as soon as it knows the
score.

Heads of the Llama family come without a norm (pallas_parts.Heads), and rotated. The forward kernel finds the maximum of
each query's scores first, which only pallas_short.py does.

pallas_short.py computes sequences that fit into VMEM as a whole. The kernels here divide longer ones into segments. A
step of a program computes the scores of one segment's queries with one segment's keys, the same or an earlier one, and
adds to sums that stay in VMEM: without a maximum, partial sums just add. Pairs of segments out of the window's reach
are no steps. The bodies of the three kinds of pairs (the same segment, wholly visible, on the window's edge) are parts
of one kernel.

The backward pass goes through the pairs of a segment of queries twice: first for the mean that each query's scores
need, then for the gradients. That is 7 products where pallas_short.py needs 5.
"""
from functools import partial

import jax.numpy as jnp
from jax.experimental import pallas as pl

from nanochat.kernels import attention_tiles as tiling
from nanochat.kernels import pallas_parts as parts
from nanochat.kernels import pallas_short
from nanochat.kernels.attention_tiles import HEAD_DIM, MAX_WHOLE


def forward(place, q, *others, max_whole=MAX_WHOLE, **options):
    """[attention's output, (B, T, H × 128); the logarithms to base 2 of its sums, as log_sums_shape] of one layer.

    place: int32 (2,), the layer and its window: a query sees itself and the window - 1 positions before it.
    q: a stack (layers, B, T, H × 128); others: k and v, (layers, B, T, H_kv × 128), and cos and sin, as in
    pallas_parts.rotated_norm, fp32.
    max_whole: the longest sequence that is in VMEM as a whole.
    options: `windows`, the different sizes, ints; empty: all layers see all positions, and place[1] is ignored.
    `matrix_unit`, the width of the chip's matrix units; `heads`, pallas_parts.Heads; `interpret`.
    """
    if q.shape[2] <= max_whole:
        return pallas_short.forward(place, q, *others, **options)
    return forward_in_segments(place, q, *others, segment=tiling.segment_of(q.shape[2], max_whole), **options)


def backward(place, q, *others, max_whole=MAX_WHOLE, **options):
    """Gradients of the layer's q, k and v from that of its output. others: k and v; log_sums, a stack (layers, …) of
    what `forward` returned; d_out (B, T, H × 128); cos and sin. The rest as in `forward`."""
    if q.shape[2] <= max_whole:
        return pallas_short.backward(place, q, *others, **options)
    return backward_in_segments(place, q, *others, segment=tiling.segment_of(q.shape[2], max_whole), **options)


# Without a window, three segments have the pairs (queries, keys) (2, 0) (2, 1) (2, 2) (1, 0) (1, 1) (0, 0). They have
# two cases: distance 0, a segment with itself, and distances 1 and 2, wholly visible. So the kernel has two bodies,
# however long the sequence is. With a window of two segments there is a third one: at distance 2, a query sees a part.
def list_pairs(segments, segment, window):
    """Returns the pairs (segment of queries, segment of keys) that are not entirely masked: from the last queries to
    the first, and for each from the first keys to the last."""
    farthest = segments  # distance in segments
    if window is not None:
        # ceil((window - 1) / segment): the first query of a segment sees the window - 1 positions before it.
        farthest = (window + segment - 2) // segment
    pairs = []
    for i in reversed(range(segments)):
        for j in range(max(0, i - farthest), i + 1):
            pairs.append((i, j))
    return pairs


def list_cases(pairs, segment, tiles, window):
    """Returns the kinds of pairs, [(smallest distance in segments, largest, Tiles of scores)]."""
    cases = []
    for distance in sorted({i - j for i, j in pairs}):
        is_whole = distance and (window is None or (distance + 1) * segment <= window)
        if is_whole and distance > 1:
            # Wholly visible segments of keys have the same tiles, without masks, at every distance. These distances
            # are 1, 2, …: they are one case, which is one body in the kernel.
            first, _, found = cases.pop()
        else:
            first = distance
            found = tiling.list_tiles(segment, tiles, None if is_whole else window, distance * segment)
        cases.append((first, distance, found))
    return cases


def _here(place, num_steps):
    """Returns this step's segments of queries and keys, and whether the step before had other queries."""
    # `place` is: layer, window, each step's segment of queries, each step's segment of keys, and in the backward kernel
    # whether each step adds gradients (see pallas_parts.run).
    step = pl.program_id(3)
    i = place[2 + step]
    j = place[2 + num_steps + step]
    return i, j, (step == 0) | (place[2 + jnp.maximum(step, 1) - 1] != i)


def _clear(*sums):
    zeros = [jnp.zeros_like(total) for total in sums]
    for total, zero in zip(sums, zeros, strict=True):
        total[...] = zero


def _forward_kernel(place, refs, *, heads, window, cases, num_steps):
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
            pallas_short.Outputs(tiles, refs, end, heads=heads, window=window).compute()


class _Gradients(pallas_short.Scores):
    """The other stages for the tiles of a pair of segments. refs: also the fp32 sums mean_sum (S, 128) and dq_sum, of
    this segment of queries, and dk_sum and dv_sum, of all segments of keys, (segments, 128, S)."""

    def __init__(self, tiles, refs, segment_of_keys, *, is_last, matrix_unit, **options):
        super().__init__(tiles, refs, **options)
        self.j = segment_of_keys
        self.is_last = is_last  # among the pairs of this segment of queries
        self.is_wide = matrix_unit > HEAD_DIM
        self.means = {}

    def add_to_means(self, n):
        queries = self.tiles[n].queries
        self.refs.mean_sum[queries] += parts.sums_of_128(self.probabilities.pop(n) * self.d_weights.pop(n))

    def compute_d_scores_of_row(self, n):
        rows = self.tiles[n].rows
        if rows.start not in self.means:
            self.means[rows.start] = jnp.sum(self.refs.mean_sum[rows], axis=1, keepdims=True)
        self.compute_d_scores(n, self.means[rows.start])

    def add_to_v(self, n):
        tile = self.tiles[n]
        product = parts.dot(self.refs.d_out_t[:, tile.queries], self.probabilities.pop(n))
        self.refs.dv_sum[self.j, :, tile.keys] += product

    def add_to_k(self, n):
        tile = self.tiles[n]
        self.refs.dk_sum[self.j, :, tile.keys] += parts.dot(self.refs.q_t[:, tile.queries], self.d_scores[n])

    def add_to_q(self, n):
        refs = self.refs
        tile = self.tiles[n]
        d_score = self.d_scores.pop(n)
        if self.is_wide:
            refs.dq_sum[:, tile.queries] += parts.dot(refs.k_t[:, tile.keys], d_score, (1, 1))
        else:
            refs.dq_sum[tile.queries] += parts.dot(d_score, refs.k_normed[tile.keys])
        # No later tile reaches these queries or these keys. The query heads of a group share the keys: each writes the
        # sums so far, and the last one the final sums.
        if self.is_last and tile.is_last:
            d_q = refs.dq_sum[:, tile.rows] if self.is_wide else refs.dq_sum[tile.rows].T
            pallas_short.write_gradients(tile.rows, d_q, refs.dk_sum.at[self.j], refs.dv_sum.at[self.j], refs,
                                         self.heads)


def _backward_kernel(place, refs, *, heads, window, cases, num_steps, matrix_unit):
    i, j, is_first = _here(place, num_steps)
    adds_gradients = place[2 + 2 * num_steps + pl.program_id(3)]

    @pl.when(is_first)
    def _():
        _clear(refs.mean_sum, refs.dq_sum)

    @pl.when((pl.program_id(2) == 0) & (pl.program_id(3) == 0))
    def _():  # the query heads of a group follow one another and add to the same gradients of k and v
        _clear(refs.dk_sum, refs.dv_sum)

    def work(tiles, is_second, is_last):
        pair = _Gradients(tiles, refs, j, is_last=is_last, matrix_unit=matrix_unit, heads=heads, window=window)
        first = [(0, pair.compute_scores), (0, pair.compute_d_weights)]
        if is_second:
            # As in pallas_short._backward_kernel, but the means are known: no tile waits for another.
            stages = [(3, pair.add_to_v), (3, pair.add_to_k), *first, (3, pair.add_to_q),
                      (1, pair.compute_probabilities), (2, pair.compute_d_scores_of_row)]
        else:
            stages = [*first, (1, pair.compute_probabilities), (2, pair.add_to_means)]
        tiling.pipeline(len(tiles), stages)

    for first, last, tiles in cases:
        for is_second in (0, 1):
            @pl.when((i - j >= first) & (i - j <= last) & (adds_gradients == is_second))
            def _(tiles=tiles, is_second=is_second, is_last=first == 0):
                work(tiles, is_second, is_last)


def _scores(pairs, cases):
    """Returns how many scores the tiles of all pairs have."""
    total = 0
    for i, j in pairs:
        for first, last, tiles in cases:
            if first <= i - j <= last:
                total += tiling.num_scores(tiles)
    return total


def _tables(cos, sin):
    return {"cos_q": ("q table", cos), "sin_q": ("q table", sin), "cos_k": ("k table", cos), "sin_k": ("k table", sin)}


def forward_in_segments(place, q, k, v, cos, sin, *, windows, matrix_unit, segment, heads=parts.WITH_NORM,
                        interpret=False):
    """As `forward`. segment: positions of a segment; it divides the sequence."""
    length = q.shape[2]
    inputs = {"q": ("q stack", q), "k": ("k stack", k), "v": ("k stack", v), **_tables(cos, sin)}
    sums = {"out_sum": ((HEAD_DIM, segment), jnp.float32), "weight_sum": ((8, segment), jnp.float32)}
    operands = parts.Operands(inputs, parts.forward_results(q), parts.forward_scratch(segment, q.dtype) | sums)

    def call(window):
        pairs = list_pairs(length // segment, segment, window)
        cases = list_cases(pairs, segment, tiling.FORWARD_TILES[matrix_unit], window)
        scores = _scores(pairs, cases)
        kernel = partial(_forward_kernel, cases=cases, num_steps=len(pairs), heads=heads, window=window)
        return parts.run(kernel, place, operands, segment, (4 * HEAD_DIM * scores, scores), pairs, interpret)

    return parts.by_window(call, place[1], length, windows)


def backward_in_segments(place, q, k, v, log_sums, d_out, *tables, windows, matrix_unit, segment,
                         heads=parts.WITH_NORM, interpret=False):
    """As `backward`. segment: as in forward_in_segments."""
    length = q.shape[2]
    inputs = {"q": ("q stack", q), "k": ("k stack", k), "v": ("k stack", v), "log_sums": ("q sums", log_sums),
              "d_out": ("q head", d_out), **_tables(*tables)}
    rows = segment, HEAD_DIM
    columns = HEAD_DIM, segment
    all_columns = length // segment, HEAD_DIM, segment
    sums = {"mean_sum": (rows, jnp.float32), "dq_sum": (columns if matrix_unit > HEAD_DIM else rows, jnp.float32),
            "dk_sum": (all_columns, jnp.float32), "dv_sum": (all_columns, jnp.float32)}
    operands = parts.Operands(inputs, parts.backward_results(q, k, v), parts.backward_scratch(segment, q.dtype) | sums)

    def call(window):
        pairs = list_pairs(length // segment, segment, window)
        # For each segment of queries: all pairs for the means, then all pairs for the gradients.
        steps = []
        for query in reversed(range(length // segment)):
            keys = [j for i, j in pairs if i == query]
            for is_second in (0, 1):
                steps += [(query, j, is_second) for j in keys]
        cases = list_cases(pairs, segment, tiling.BACKWARD_TILES[matrix_unit], window)
        scores = _scores(pairs, cases)
        kernel = partial(_backward_kernel, cases=cases, num_steps=len(steps), heads=heads, window=window,
                         matrix_unit=matrix_unit)
        return parts.run(kernel, place, operands, segment, (14 * HEAD_DIM * scores, 2 * scores), steps, interpret)

    return parts.by_window(call, place[1], length, windows)
