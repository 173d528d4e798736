"""Attention of sequences that fit into VMEM as a whole: one program of a kernel computes one head of one sequence.

What makes the kernels fast (dev/log has the gain of each part):
- The scores are computed in tiles. Those above the diagonal or out of the window's reach are skipped, and only those on
  the edge are masked.
- Several tiles are in flight: the matrix units multiply for one while the vector units compute another. The compiler
  keeps the order of the products in the program, so the order here is a choice.
- Operands are transposed once, to (128, T). Then the halves of a head that the rotation swaps are rows, the norms are
  sums of rows, and a matrix unit of 256 × 256 holds the square tile of probabilities: the other side of the product is
  128 wide and would leave half of the unit idle.
"""
from collections import Counter
from functools import partial
from itertools import groupby

import jax.numpy as jnp
from jax.experimental import pallas as pl

from nanochat.kernels import attention_tiles as tiling
from nanochat.kernels import pallas_parts as parts
from nanochat.kernels.attention_tiles import HEAD_DIM


class Outputs:
    """The stages of each tile of a forward kernel, by its number, and their results.

    finish(rows, out, sums) is called when all tiles of a block of queries are done: out (128, rows), not yet divided,
    and the sums of the exponentials, in 8 rows (or 1). The products are keys × queries, so that the sums over the keys
    are sums of rows. refs: q, k and v, their tables and pallas_parts.forward_scratch.
    """

    def __init__(self, tiles, refs, finish, *, heads, window):
        self.tiles = tiles
        self.refs = refs
        self.finish = finish
        self.heads = heads
        self.window = window
        self.dtype = refs.q.dtype
        self.scores = {}
        self.weights = {}
        self.outs = {}  # by the first row of a block of queries, as sums and maxima
        self.sums = {}
        self.maxima = {}  # of the scores
        self._keys_once = tiling.Once(refs.q.shape[2], self._prepare_keys)
        self._queries_once = tiling.Once(refs.q.shape[2], self._prepare_queries)

    def compute(self):
        # The products of a tile's scores stand two tiles before their exponentials: 6.67 Mcycles for 16 layers on v6e,
        # where one tile took 7.45 and three took 6.74.
        delay = 2
        if not self.heads.have_norm:  # the exponentials of a row of tiles wait for its maximum
            delay = 1 + max(Counter(tile.rows.start for tile in self.tiles).values())
        tiling.pipeline(len(self.tiles), [(0, self.compute_scores), (delay, self.compute_weights),
                                          (delay + 2, self.add_values)])

    def _prepare_keys(self, chunk):
        refs = self.refs
        if self.heads.have_norm:
            normed, _ = parts.rotated_norm(refs.k[0, 0, chunk].T, refs.cos_k[:, chunk], refs.sin_k[:, chunk],
                                           self.heads.eps)
            refs.k_normed[chunk] = normed.astype(self.dtype).T
        else:
            refs.k_normed[chunk] = refs.k[0, 0, chunk]
        refs.v_t[:, chunk] = refs.v[0, 0, chunk].T

    def _prepare_queries(self, chunk):
        refs = self.refs
        normed = refs.q[0, 0, chunk].T
        if self.heads.have_norm:
            normed, _ = parts.rotated_norm(normed, refs.cos_q[:, chunk], refs.sin_q[:, chunk], self.heads.eps)
        else:
            normed = normed.astype(jnp.float32)
        # The queries carry both factors of the scores, so that no tile has to be multiplied.
        refs.q_t[:, chunk] = (normed * (self.heads.scale * parts.LOG2_E)).astype(self.dtype)

    def compute_scores(self, n):
        tile = self.tiles[n]
        self._keys_once(tile.keys)
        self._queries_once(tile.queries)
        self.scores[n] = parts.dot(self.refs.k_normed[tile.keys], self.refs.q_t[:, tile.queries])
        if not self.heads.have_norm:
            self._find_maxima(n)

    def _find_maxima(self, n):
        tile = self.tiles[n]
        scores = self.scores[n] = parts.masked(self.scores[n], tile, self.window, 0, hidden=parts.LEAST)
        parts.add_to(self.maxima, tile, parts.eighths(scores, jnp.max), add=jnp.maximum, zero=parts.LEAST)
        if tile.is_last:
            self.maxima[tile.rows.start] = jnp.max(self.maxima[tile.rows.start], axis=0, keepdims=True)

    def compute_weights(self, n):
        tile = self.tiles[n]
        scores = self.scores.pop(n)
        if self.heads.have_norm:
            exponentials = parts.masked(jnp.exp2(scores), tile, self.window, keys_axis=0)
        else:
            start = tile.rows.start
            maxima = self.maxima[start][:, tile.queries.start - start:tile.queries.stop - start]
            exponentials = jnp.exp2(scores - maxima)
        parts.add_to(self.sums, tile, parts.eighths(exponentials))
        self.weights[n] = exponentials.astype(self.dtype)

    def add_values(self, n):
        tile = self.tiles[n]
        parts.add_to(self.outs, tile, parts.dot(self.refs.v_t[:, tile.keys], self.weights.pop(n)))
        if tile.is_last:
            self.finish(tile.rows, self.outs.pop(tile.rows.start), self.sums.pop(tile.rows.start))


def _forward_kernel(place, refs, *, tiles, heads, window):
    refs.cos_k = refs.cos_q  # queries and keys have the same positions
    refs.sin_k = refs.sin_q

    def finish(rows, out, sums):
        total = jnp.sum(sums, axis=0, keepdims=True)
        log_sums = jnp.log2(total)
        if not heads.have_norm:
            log_sums += work.maxima.pop(rows.start)
        refs.log_sums[0, 0, :, rows] = log_sums
        refs.out[0, rows] = (out / total).astype(refs.out.dtype).T

    work = Outputs(tiles, refs, finish, heads=heads, window=window)
    work.compute()


class Scores:
    """The first stages of each tile of a backward kernel, by its number, and their results.

    refs: q, k and v, their tables, log_sums, d_out, and pallas_parts.backward_scratch. d_weights, the products of d out
    and v, probabilities and d_scores are {number: (queries, keys)}. The last two are rounded for the next products.
    """

    def __init__(self, tiles, refs, *, heads, window):
        self.tiles = tiles
        self.refs = refs
        self.heads = heads
        self.window = window
        self.dtype = refs.q.dtype
        self.scores = {}
        self.d_weights = {}
        self.probabilities = {}
        self.d_scores = {}
        self._keys_once = tiling.Once(refs.q.shape[2], self._prepare_keys)
        self._queries_once = tiling.Once(refs.q.shape[2], self._prepare_queries)

    def _kept_norm(self, which, x, cos, sin, chunk):
        refs = self.refs
        if not self.heads.have_norm:
            return x.T.astype(jnp.float32)
        normed, scale = parts.rotated_norm(x.T, cos[:, chunk], sin[:, chunk], self.heads.eps)
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
        scaled = (normed * (self.heads.scale * parts.LOG2_E)).astype(self.dtype)
        transposed = scaled.T
        refs.q_t[:, chunk] = scaled
        refs.q_normed[chunk] = transposed
        refs.d_out_t[:, chunk] = refs.d_out[0, chunk].T
        refs.log_sum_columns[chunk] = parts.in_columns(refs.log_sums[0, 0, 0, :, chunk])

    def compute_scores(self, n):
        tile = self.tiles[n]
        self._keys_once(tile.keys)
        self._queries_once(tile.rows)
        self.scores[n] = parts.dot(self.refs.q_normed[tile.queries], self.refs.k_t[:, tile.keys])

    def compute_d_weights(self, n):
        tile = self.tiles[n]
        self.d_weights[n] = parts.dot(self.refs.d_out[0, tile.queries], self.refs.v_t[:, tile.keys])

    def compute_probabilities(self, n):
        tile = self.tiles[n]
        p = jnp.exp2(parts.minus_columns(self.scores.pop(n), self.refs.log_sum_columns[tile.queries]))
        self.probabilities[n] = parts.masked(p, tile, self.window, keys_axis=1)

    def compute_d_scores(self, n, mean):
        """mean: (rows, 1), of d_weights under the probabilities of the tile's `rows`."""
        tile = self.tiles[n]
        here = mean[tile.queries.start - tile.rows.start:tile.queries.stop - tile.rows.start]
        d_score = self.probabilities[n] * (self.d_weights.pop(n) - here)
        self.probabilities[n] = self.probabilities[n].astype(self.dtype)
        self.d_scores[n] = d_score.astype(self.dtype)


def write_gradients(rows, d_q, dk_sum, dv_sum, refs, heads):
    """Writes the gradients of q, k and v at the slice `rows` from their sums: d_q (128, rows), dk_sum, dv_sum (128, T).
    refs: those of Scores, and dq, dk, dv."""
    def write(ref, which, d_x, cos, sin):
        if heads.have_norm:
            normed = refs.normed_t[which, :, rows]
            scale = refs.scales[which, :, rows]
            d_x = parts.d_rotated_norm(d_x, normed, scale, cos[:, rows], sin[:, rows])
        ref[0, rows] = d_x.astype(ref.dtype).T

    # d_scores are gradients of scale × (q · k). d_q is summed with plain keys, so it lacks the scale. dk_sum is summed
    # with queries × scale × LOG2_E, so it includes LOG2_E.
    write(refs.dq, 0, d_q * heads.scale, refs.cos_q, refs.sin_q)
    write(refs.dk, 1, dk_sum[:, rows] / parts.LOG2_E, refs.cos_k, refs.sin_k)
    refs.dv[0, rows] = dv_sum[:, rows].astype(refs.dv.dtype).T


# The exact mean takes 1.9 of the 12.8 Mcycles of 16 layers on v6e. In bfloat16, the errors of d q and d k are 0.36 and
# 0.35% with it, and 0.40 and 0.39% with the product of out and d out; 0.34 and 0.35% against 0.52 and 0.53% if values
# and gradients have a common part.
class _Gradients(Scores):
    """The other stages. The mean is summed over all tiles of a row before d_scores. The product of out and d out is the
    same number (FlashAttention-2, arXiv 2307.08691), but out is rounded to bfloat16, and its errors do not cancel.

    refs: also dq_sum, dk_sum and dv_sum, fp32, the sums of the gradients so far, (128, T).
    """

    def __init__(self, tiles, refs, *, matrix_unit, **options):
        super().__init__(tiles, refs, **options)
        self.is_wide = matrix_unit > HEAD_DIM
        self.means = {}
        self.begun = set()  # (id of a sum, first position) of the chunks of 128 that have been written

    def add_to_means(self, n):
        self.compute_probabilities(n)
        tile = self.tiles[n]
        parts.add_to(self.means, tile, parts.sums_of_128(self.probabilities[n] * self.d_weights[n]), axis=0)
        if tile.is_last:
            self.means[tile.rows.start] = jnp.sum(self.means[tile.rows.start], axis=1, keepdims=True)

    def compute_d_scores_of_row(self, n):
        self.compute_d_scores(n, self.means[self.tiles[n].rows.start])

    def add_to_v(self, n):
        product = parts.dot(self.refs.d_out_t[:, self.tiles[n].queries], self.probabilities.pop(n))
        self._add(self.refs.dv_sum, self.tiles[n].keys, product)

    def add_to_k(self, n):
        product = parts.dot(self.refs.q_t[:, self.tiles[n].queries], self.d_scores[n])
        self._add(self.refs.dk_sum, self.tiles[n].keys, product)

    def add_to_q(self, n):
        tile = self.tiles[n]
        d_score = self.d_scores.pop(n)
        if self.is_wide:
            self._add(self.refs.dq_sum, tile.queries, parts.dot(self.refs.k_t[:, tile.keys], d_score, (1, 1)))
        else:  # libtpu 0.0.21 fails on that for v5e, where it would gain nothing (mxu_lmr_transform.cc)
            self._add(self.refs.dq_sum, tile.queries, parts.dot(d_score, self.refs.k_normed[tile.keys]), axis=0)
        if tile.is_last:  # no later tile reaches these queries or these keys
            dq_sum = self.refs.dq_sum
            d_q = dq_sum[:, tile.rows] if self.is_wide else dq_sum[tile.rows].T
            write_gradients(tile.rows, d_q, self.refs.dk_sum, self.refs.dv_sum, self.refs, self.heads)

    def _add(self, total, positions, value, axis=1):
        """Adds to a sum, or writes it where it has not been written yet."""
        # Tracing knows the order of the tiles. So the first tile that reaches a chunk writes it, and no sum is cleared
        # before. `positions` is cut into runs of chunks that have all been written, or none of which has.
        chunks = range(positions.start, positions.stop, HEAD_DIM)
        for is_begun, group in groupby(chunks, lambda start: (id(total), start) in self.begun):
            group = list(group)
            part = slice(group[0], min(group[-1] + HEAD_DIM, positions.stop))
            inside = slice(part.start - positions.start, part.stop - positions.start)
            at = part
            if axis:
                at = slice(None), part
                inside = slice(None), inside
            if is_begun:
                total[at] += value[inside]
            else:
                total[at] = value[inside]
        self.begun.update((id(total), start) for start in chunks)


def _backward_kernel(place, refs, *, tiles, heads, window, matrix_unit, group):
    """With the probabilities p = 2^(s - log sum): d v = pᵀ d out and d s = p (d out vᵀ - mean), the mean under p. Tiles
    are queries × keys."""
    refs.cos_k = refs.cos_q  # queries and keys have the same positions
    refs.sin_k = refs.sin_q
    work = _Gradients(tiles, refs, matrix_unit=matrix_unit, heads=heads, window=window)
    if group > 1:  # the query heads of a group follow one another and add to the same gradients of k and v
        for total in (refs.dk_sum, refs.dv_sum):
            work.begun.update((id(total), start) for start in range(0, refs.q.shape[2], HEAD_DIM))

        @pl.when(pl.program_id(2) == 0)
        def _():
            refs.dk_sum[...] = refs.dv_sum[...] = jnp.zeros_like(refs.dk_sum)

    # A tile's d_scores wait for the mean over its row, so a whole row of tiles is in flight between add_to_means and
    # compute_d_scores_of_row. Within a turn the products are in the order v, k, scores, d_weights, q: the fastest of
    # six orders, by 2 to 8% on v6e. add_to_q must follow add_to_k, because it drops the tile's d_scores.
    longest = max(Counter(tile.rows.start for tile in tiles).values())
    row = longest + 1  # turns after which a tile's row has its mean
    tiling.pipeline(len(tiles), [(row + 2, work.add_to_v), (row + 2, work.add_to_k), (0, work.compute_scores),
                          (0, work.compute_d_weights), (row + 2, work.add_to_q), (1, work.add_to_means),
                          (row, work.compute_d_scores_of_row)])


def forward(place, q, k, v, cos, sin, *, windows, matrix_unit, heads=parts.WITH_NORM, interpret=False):
    """As pallas_attention.forward."""
    length = q.shape[2]
    inputs = {"q": ("q stack", q), "k": ("k stack", k), "v": ("k stack", v),
              "cos_q": ("q table", cos), "sin_q": ("q table", sin)}
    operands = parts.Operands(inputs, parts.forward_results(q), parts.forward_scratch(length, q.dtype))

    def call(window):
        tiles = tiling.list_tiles(length, tiling.FORWARD_TILES[matrix_unit], window)
        kernel = partial(_forward_kernel, tiles=tiles, heads=heads, window=window)
        return parts.run(kernel, place, operands, length, _cost(tiles, products=2), interpret=interpret)

    return parts.by_window(call, place[1], length, windows)


def backward(place, q, k, v, log_sums, d_out, cos, sin, *, windows, matrix_unit, heads=parts.WITH_NORM,
             interpret=False):
    """As pallas_attention.backward."""
    length = q.shape[2]
    group = q.shape[3] // k.shape[3]
    inputs = {"q": ("q stack", q), "k": ("k stack", k), "v": ("k stack", v), "log_sums": ("q sums stack", log_sums),
              "d_out": ("q head", d_out), "cos_q": ("q table", cos), "sin_q": ("q table", sin)}
    rows = length, HEAD_DIM
    columns = HEAD_DIM, length
    sums = {"dq_sum": (columns if matrix_unit > HEAD_DIM else rows, jnp.float32),
            "dk_sum": (columns, jnp.float32), "dv_sum": (columns, jnp.float32)}
    operands = parts.Operands(inputs, parts.backward_results(q, k, v), parts.backward_scratch(length, q.dtype) | sums)

    def call(window):
        tiles = tiling.list_tiles(length, tiling.BACKWARD_TILES[matrix_unit], window)
        kernel = partial(_backward_kernel, tiles=tiles, heads=heads, window=window, matrix_unit=matrix_unit,
                         group=group)
        return parts.run(kernel, place, operands, length, _cost(tiles, products=5), interpret=interpret)

    return parts.by_window(call, place[1], length, windows)


def _cost(tiles, products):
    """Returns the cost of a head: `products` of each tile with 128 columns, and an exponential of each score."""
    scores = tiling.num_scores(tiles)
    return 2 * products * scores * HEAD_DIM, scores
