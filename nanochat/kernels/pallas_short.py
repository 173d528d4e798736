"""The attention of sequences that are in VMEM as a whole: one program of a kernel computes one head of one sequence.

What makes the kernels fast (dev/LOG.md has what each part is worth):
- The scores are computed in tiles. Those above the diagonal, or out of the window's reach, are left out, and only those
  on the edge are masked.
- Several tiles are under way at a time: the matrix units multiply for one while the vector units compute another. The
  compiler keeps the order in which the products stand in the program, so the order here is a choice.
- Operands are transposed once, to (128, T). Then the halves of a head that the rotation swaps are rows, the norms are
  sums of rows, and the tile of probabilities, which is square, is the side of the product that a matrix unit of
  256 × 256 holds: the other side is 128 wide, and would leave half of the unit idle.
"""
from collections import Counter
from functools import partial
from itertools import groupby

import jax.numpy as jnp
from jax.experimental import pallas as pl

from nanochat.kernels.attention_tiles import BACKWARD_TILES, FORWARD_TILES, Once, list_tiles, num_scores, pipeline
from nanochat.kernels.flash_shapes import HEAD_DIM
from nanochat.kernels.pallas_parts import (
    LOG2_E,
    SCALE,
    Operands,
    add_to,
    backward_results,
    backward_scratch,
    by_window,
    d_rotated_norm,
    dot,
    forward_results,
    forward_scratch,
    in_columns,
    masked,
    minus_columns,
    rotated_norm,
    run,
    sums_of_128,
    sums_of_eighths,
)

# -----------------------------------------------------------------------------
# The forward kernel


def forward_tiles(tiles, refs, finish, *, eps, window):
    """Computes the Tiles of scores, and calls finish(rows, out, sums) when those of a block of queries are done: out
    (128, rows), not yet divided, and the sums of the exponentials, in 8 rows (or 1).

    The products are keys × queries, so that the sums over the keys are sums of rows. refs: q, k and v, their tables and
    pallas_parts.forward_scratch.
    """
    dtype, length = refs.q.dtype, refs.q.shape[2]

    def prepare_keys(chunk):
        normed, _ = rotated_norm(refs.k[0, 0, chunk].T, refs.cos_k[:, chunk], refs.sin_k[:, chunk], eps)
        refs.k_normed[chunk] = normed.astype(dtype).T
        refs.v_t[:, chunk] = refs.v[0, 0, chunk].T

    def prepare_queries(chunk):
        normed, _ = rotated_norm(refs.q[0, 0, chunk].T, refs.cos_q[:, chunk], refs.sin_q[:, chunk], eps)
        # The queries carry both factors of the scores, so that no tile has to be multiplied.
        refs.q_t[:, chunk] = (normed * (SCALE * LOG2_E)).astype(dtype)

    keys_once, queries_once = Once(length, prepare_keys), Once(length, prepare_queries)
    scores, weights, outs, sums = {}, {}, {}, {}

    def compute_scores(n):
        keys_once(tiles[n].keys)
        queries_once(tiles[n].queries)
        scores[n] = dot(refs.k_normed[tiles[n].keys], refs.q_t[:, tiles[n].queries])

    def compute_weights(n):
        exponentials = masked(jnp.exp2(scores.pop(n)), tiles[n], window, keys_axis=0)
        add_to(sums, tiles[n], sums_of_eighths(exponentials))
        weights[n] = exponentials.astype(dtype)

    def add_values(n):
        rows = tiles[n].rows
        add_to(outs, tiles[n], dot(refs.v_t[:, tiles[n].keys], weights.pop(n)))
        if tiles[n].is_last:
            finish(rows, outs.pop(rows.start), sums.pop(rows.start))

    # The products of a tile's scores stand two tiles before their exponentials: 6.67 Mcycles for 16 layers on v6e,
    # where one tile took 7.45 and three took 6.74.
    pipeline(len(tiles), [(0, compute_scores), (2, compute_weights), (4, add_values)])


def _forward_kernel(place, refs, *, tiles, eps, window):
    refs.cos_k, refs.sin_k = refs.cos_q, refs.sin_q  # queries and keys have the same positions

    def finish(rows, out, sums):
        total = jnp.sum(sums, axis=0, keepdims=True)
        refs.log_sums[0, 0, :, rows] = jnp.log2(total)
        refs.out[0, rows] = (out / total).astype(refs.out.dtype).T

    forward_tiles(tiles, refs, finish, eps=eps, window=window)


# -----------------------------------------------------------------------------
# The backward kernel


class Scores:
    """The stages with which each tile of a backward kernel begins, by its number, and what they have computed.

    refs: q, k and v, their tables, log_sums, d_out, and pallas_parts.backward_scratch. d_weights, the products of d out
    and v, probabilities and d_scores are {number: (queries, keys)}. The last two are rounded for the products that
    follow.
    """

    def __init__(self, tiles, refs, *, eps, window):
        self.tiles = tiles
        self.refs = refs
        self.eps = eps
        self.window = window
        self.dtype = refs.q.dtype
        self.scores = {}
        self.d_weights = {}
        self.probabilities = {}
        self.d_scores = {}
        self._keys_once = Once(refs.q.shape[2], self._prepare_keys)
        self._queries_once = Once(refs.q.shape[2], self._prepare_queries)

    def _kept_norm(self, which, x, cos, sin, chunk):
        refs = self.refs
        normed, scale = rotated_norm(x.T, cos[:, chunk], sin[:, chunk], self.eps)
        refs.normed_t[which, :, chunk] = normed
        refs.scales[which, :, chunk] = scale
        return normed

    def _prepare_keys(self, chunk):
        refs = self.refs
        normed = self._kept_norm(1, refs.k[0, 0, chunk], refs.cos_k, refs.sin_k, chunk).astype(self.dtype)
        refs.k_normed[chunk] = normed.T
        refs.k_t[:, chunk] = normed
        refs.v_t[:, chunk] = refs.v[0, 0, chunk].T

    def _prepare_queries(self, chunk):
        refs = self.refs
        normed = self._kept_norm(0, refs.q[0, 0, chunk], refs.cos_q, refs.sin_q, chunk)
        scaled = (normed * (SCALE * LOG2_E)).astype(self.dtype)
        transposed = scaled.T
        refs.q_t[:, chunk] = scaled
        refs.q_normed[chunk] = transposed
        refs.d_out_t[:, chunk] = refs.d_out[0, chunk].T
        refs.log_sum_columns[chunk] = in_columns(refs.log_sums[0, 0, 0, :, chunk])

    def compute_scores(self, n):
        tile = self.tiles[n]
        self._keys_once(tile.keys)
        self._queries_once(tile.rows)
        self.scores[n] = dot(self.refs.q_normed[tile.queries], self.refs.k_t[:, tile.keys])

    def compute_d_weights(self, n):
        tile = self.tiles[n]
        self.d_weights[n] = dot(self.refs.d_out[0, tile.queries], self.refs.v_t[:, tile.keys])

    def compute_probabilities(self, n):
        tile = self.tiles[n]
        p = jnp.exp2(minus_columns(self.scores.pop(n), self.refs.log_sum_columns[tile.queries]))
        self.probabilities[n] = masked(p, tile, self.window, keys_axis=1)

    def compute_d_scores(self, n, mean):
        """mean: of d_weights under the probabilities of the tile's `rows`, (rows, 1)."""
        tile = self.tiles[n]
        here = mean[tile.queries.start - tile.rows.start:tile.queries.stop - tile.rows.start]
        d_score = self.probabilities[n] * (self.d_weights.pop(n) - here)
        self.probabilities[n] = self.probabilities[n].astype(self.dtype)
        self.d_scores[n] = d_score.astype(self.dtype)


def write_gradients(rows, d_q, dk_sum, dv_sum, refs):
    """Writes the gradients of q, k and v at the slice `rows` from their sums: d_q (128, rows), dk_sum, dv_sum (128, T).
    refs: as of Scores, and dq, dk, dv."""
    def write(ref, which, d_normed, cos, sin):
        normed, scale = refs.normed_t[which, :, rows], refs.scales[which, :, rows]
        d_x = d_rotated_norm(d_normed, normed, scale, cos[:, rows], sin[:, rows])
        ref[0, rows] = d_x.astype(ref.dtype).T

    # d_scores are gradients of SCALE × (q · k). d_q is summed with plain keys, so it lacks SCALE. dk_sum is summed with
    # queries × SCALE × LOG2_E, so it has LOG2_E too much.
    write(refs.dq, 0, d_q * SCALE, refs.cos_q, refs.sin_q)
    write(refs.dk, 1, dk_sum[:, rows] / LOG2_E, refs.cos_k, refs.sin_k)
    refs.dv[0, rows] = dv_sum[:, rows].astype(refs.dv.dtype).T


# The exact mean takes 1.9 of the 12.8 Mcycles of 16 layers on v6e. In bfloat16, the errors of d q and d k are 0.36 and
# 0.35% with it, and 0.40 and 0.39% with that of out and d out; 0.34 and 0.35% against 0.52 and 0.53% where values and
# gradients have a common part.
class _Gradients(Scores):
    """The further stages. The mean is summed over all tiles of a row before d_scores: the product of out and d out is
    the same number (FlashAttention-2, arXiv 2307.08691), but out is rounded to bfloat16, and its errors do not cancel.

    refs: also dq_sum, dk_sum and dv_sum, fp32, the sums of the gradients so far, (128, T).
    """

    def __init__(self, tiles, refs, *, matrix_unit, **options):
        super().__init__(tiles, refs, **options)
        self.is_wide = matrix_unit > HEAD_DIM
        self.means = {}
        self.begun = set()  # (id of a sum, first position) of the chunks of 128 that something has been added to

    def add_to_means(self, n):
        self.compute_probabilities(n)
        tile = self.tiles[n]
        add_to(self.means, tile, sums_of_128(self.probabilities[n] * self.d_weights[n]), axis=0)
        if tile.is_last:
            self.means[tile.rows.start] = jnp.sum(self.means[tile.rows.start], axis=1, keepdims=True)

    def compute_d_scores_of_row(self, n):
        self.compute_d_scores(n, self.means[self.tiles[n].rows.start])

    def add_to_v(self, n):
        product = dot(self.refs.d_out_t[:, self.tiles[n].queries], self.probabilities.pop(n))
        self._add(self.refs.dv_sum, self.tiles[n].keys, product)

    def add_to_k(self, n):
        product = dot(self.refs.q_t[:, self.tiles[n].queries], self.d_scores[n])
        self._add(self.refs.dk_sum, self.tiles[n].keys, product)

    def add_to_q(self, n):
        tile, d_score = self.tiles[n], self.d_scores.pop(n)
        if self.is_wide:
            self._add(self.refs.dq_sum, tile.queries, dot(self.refs.k_t[:, tile.keys], d_score, (1, 1)))
        else:  # libtpu 0.0.21 fails on that for v5e, where it would gain nothing (mxu_lmr_transform.cc)
            self._add(self.refs.dq_sum, tile.queries, dot(d_score, self.refs.k_normed[tile.keys]), axis=0)
        if tile.is_last:  # no tile that is still to come reaches these queries, or these keys
            dq_sum = self.refs.dq_sum
            d_q = dq_sum[:, tile.rows] if self.is_wide else dq_sum[tile.rows].T
            write_gradients(tile.rows, d_q, self.refs.dk_sum, self.refs.dv_sum, self.refs)

    def _add(self, total, positions, value, axis=1):
        """Adds to a sum, or writes it where nothing has been added yet."""
        chunks = range(positions.start, positions.stop, HEAD_DIM)
        for is_begun, group in groupby(chunks, lambda start: (id(total), start) in self.begun):
            group = list(group)
            part = slice(group[0], min(group[-1] + HEAD_DIM, positions.stop))
            inside = slice(part.start - positions.start, part.stop - positions.start)
            at, inside = ((slice(None), part), (slice(None), inside)) if axis else (part, inside)
            if is_begun:
                total[at] += value[inside]
            else:
                total[at] = value[inside]
        self.begun.update((id(total), start) for start in chunks)


def _backward_kernel(place, refs, *, tiles, eps, window, matrix_unit, group):
    """With p = 2^(s - log sum), the probabilities: d v = pᵀ d out and d s = p (d out vᵀ - mean), the mean under p. Its
    tiles are queries × keys."""
    refs.cos_k, refs.sin_k = refs.cos_q, refs.sin_q  # queries and keys have the same positions
    work = _Gradients(tiles, refs, matrix_unit=matrix_unit, eps=eps, window=window)
    if group > 1:  # the query heads of a group follow one another and add to the same gradients of k and v
        for total in (refs.dk_sum, refs.dv_sum):
            work.begun.update((id(total), start) for start in range(0, refs.q.shape[2], HEAD_DIM))

        @pl.when(pl.program_id(2) == 0)
        def _():
            refs.dk_sum[...] = refs.dv_sum[...] = jnp.zeros_like(refs.dk_sum)

    # A tile's d_scores wait for the mean over its row, so that a whole row of tiles is under way between add_to_means
    # and compute_d_scores_of_row. Within a turn the products are in the order v, k, scores, d_weights, q: of six that
    # were tried the fastest, by 2 to 8% on v6e. add_to_q must stay behind add_to_k, as it drops the tile's d_scores.
    longest = max(Counter(tile.rows.start for tile in tiles).values())
    row = longest + 1  # turns after which a tile's row has its mean
    pipeline(len(tiles), [(row + 2, work.add_to_v), (row + 2, work.add_to_k), (0, work.compute_scores),
                          (0, work.compute_d_weights), (row + 2, work.add_to_q), (1, work.add_to_means),
                          (row, work.compute_d_scores_of_row)])


# -----------------------------------------------------------------------------
# Calling them


def forward(place, q, k, v, cos, sin, *, windows, matrix_unit, eps, interpret=False):
    """As pallas_attention.forward."""
    length = q.shape[2]
    inputs = {"q": ("q stack", q), "k": ("k stack", k), "v": ("k stack", v),
              "cos_q": ("q table", cos), "sin_q": ("q table", sin)}
    operands = Operands(inputs, forward_results(q), forward_scratch(length, q.dtype))

    def call(window):
        tiles = list_tiles(length, FORWARD_TILES[matrix_unit], window)
        kernel = partial(_forward_kernel, tiles=tiles, eps=eps, window=window)
        return run(kernel, place, operands, length, _cost(tiles, products=2), interpret=interpret)

    return by_window(call, place[1], length, windows)


def backward(place, q, k, v, log_sums, d_out, cos, sin, *, windows, matrix_unit, eps, interpret=False):
    """As pallas_attention.backward."""
    length, group = q.shape[2], q.shape[3] // k.shape[3]
    inputs = {"q": ("q stack", q), "k": ("k stack", k), "v": ("k stack", v), "log_sums": ("q sums stack", log_sums),
              "d_out": ("q head", d_out), "cos_q": ("q table", cos), "sin_q": ("q table", sin)}
    rows, columns = (length, HEAD_DIM), (HEAD_DIM, length)
    sums = {"dq_sum": (columns if matrix_unit > HEAD_DIM else rows, jnp.float32),
            "dk_sum": (columns, jnp.float32), "dv_sum": (columns, jnp.float32)}
    operands = Operands(inputs, backward_results(q, k, v), backward_scratch(length, q.dtype) | sums)

    def call(window):
        tiles = list_tiles(length, BACKWARD_TILES[matrix_unit], window)
        kernel = partial(_backward_kernel, tiles=tiles, eps=eps, window=window, matrix_unit=matrix_unit, group=group)
        return run(kernel, place, operands, length, _cost(tiles, products=5), interpret=interpret)

    return by_window(call, place[1], length, windows)


def _cost(tiles, products):
    """Returns the cost of a head: of `products` of each tile with 128 columns, and an exponential of each score."""
    scores = num_scores(tiles)
    return 2 * products * scores * HEAD_DIM, scores
