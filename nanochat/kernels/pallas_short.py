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
import functools
import math
from collections import Counter
from itertools import groupby

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from nanochat.kernels.attention_tiles import BACKWARD_TILES, FORWARD_TILES, Once, list_tiles, num_scores, pipeline
from nanochat.kernels.flash_shapes import HEAD_DIM
from nanochat.kernels.pallas_parts import (
    LOG2_E,
    SCALE,
    VMEM_LIMIT_BYTES,
    add_to,
    by_window,
    d_rotated_norm,
    dot,
    in_columns,
    log_sums_shape,
    masked,
    minus_columns,
    rotated_norm,
    sums_of_128,
    sums_of_eighths,
)

# -----------------------------------------------------------------------------
# The forward kernel


def forward_tiles(tiles, operands, q_tables, k_tables, scratch, finish, *, eps, window):
    """Computes the Tiles of scores, and calls finish(rows, out, sums) when those of a block of queries are done: out
    (128, rows), not yet divided, and the sums of the exponentials, in 8 rows (or 1).

    The products are keys × queries, so that the sums over the keys are sums of rows. operands: q, k and v; q_tables,
    k_tables: cos and sin of their positions. scratch: q_t (128, T) and k (T, 128) rotated and normalised, v_t (128, T).
    """
    (q_ref, k_ref, v_ref), (q_t, k, v_t) = operands, scratch
    dtype, length = q_ref.dtype, q_ref.shape[2]

    def prepare_keys(chunk):
        normed, _ = rotated_norm(k_ref[0, 0, chunk].T, *(table[:, chunk] for table in k_tables), eps)
        k[chunk] = normed.astype(dtype).T
        v_t[:, chunk] = v_ref[0, 0, chunk].T

    def prepare_queries(chunk):
        normed, _ = rotated_norm(q_ref[0, 0, chunk].T, *(table[:, chunk] for table in q_tables), eps)
        q_t[:, chunk] = (normed * (SCALE * LOG2_E)).astype(dtype)

    keys_once, queries_once = Once(length, prepare_keys), Once(length, prepare_queries)
    scores, weights, outs, sums = {}, {}, {}, {}

    def compute_scores(n):
        keys_once(tiles[n].keys)
        queries_once(tiles[n].queries)
        scores[n] = dot(k[tiles[n].keys], q_t[:, tiles[n].queries])

    def compute_weights(n):
        exponentials = masked(jnp.exp2(scores.pop(n)), tiles[n], window, keys_axis=0)
        add_to(sums, tiles[n], sums_of_eighths(exponentials))
        weights[n] = exponentials.astype(dtype)

    def add_values(n):
        rows = tiles[n].rows
        add_to(outs, tiles[n], dot(v_t[:, tiles[n].keys], weights.pop(n)))
        if tiles[n].is_last:
            finish(rows, outs.pop(rows.start), sums.pop(rows.start))

    pipeline(len(tiles), [(0, compute_scores), (2, compute_weights), (4, add_values)])


def _forward_kernel(place, q_ref, k_ref, v_ref, cos_ref, sin_ref, out_ref, log_sums_ref, *scratch, eps, window,
                    matrix_unit):
    def finish(rows, out, sums):
        total = jnp.sum(sums, axis=0, keepdims=True)
        log_sums_ref[0, 0, :, rows] = jnp.log2(total)
        out_ref[0, rows] = (out / total).astype(out_ref.dtype).T

    tables = cos_ref, sin_ref
    forward_tiles(list_tiles(q_ref.shape[2], FORWARD_TILES[matrix_unit], window), (q_ref, k_ref, v_ref), tables, tables,
                  scratch, finish, eps=eps, window=window)


# -----------------------------------------------------------------------------
# The backward kernel


def begin_backward(tiles, operands, q_tables, k_tables, scratch, *, eps, window):
    """Returns the stages with which each tile begins, functions of its number, and what the last two of them compute,
    {number: fp32 (queries, keys)}: the scores; the products of d out and v; the probabilities.

    operands: q, k, v, log_sums and d_out; q_tables, k_tables: cos and sin of their positions; scratch: see
    _backward_kernel."""
    q_ref, k_ref, v_ref, log_sums_ref, d_out_ref = operands
    q, q_t, k, k_t, v_t, d_out_t, normed_t, scales, log_sums = scratch
    dtype = q_ref.dtype

    def kept_norm(which, x, tables, chunk):
        normed, scale = rotated_norm(x.T, *(table[:, chunk] for table in tables), eps)
        normed_t[which, :, chunk], scales[which, :, chunk] = normed, scale
        return normed

    def prepare_keys(chunk):
        normed = kept_norm(1, k_ref[0, 0, chunk], k_tables, chunk).astype(dtype)
        k[chunk], k_t[:, chunk] = normed.T, normed
        v_t[:, chunk] = v_ref[0, 0, chunk].T

    def prepare_queries(chunk):
        scaled = (kept_norm(0, q_ref[0, 0, chunk], q_tables, chunk) * (SCALE * LOG2_E)).astype(dtype)
        q_t[:, chunk], q[chunk] = scaled, scaled.T
        d_out_t[:, chunk] = d_out_ref[0, chunk].T
        log_sums[chunk] = in_columns(log_sums_ref[0, 0, 0, :, chunk])

    keys_once, queries_once = (Once(q_ref.shape[2], prepare) for prepare in (prepare_keys, prepare_queries))
    scores, d_weights, probabilities = {}, {}, {}

    def compute_scores(n):
        keys_once(tiles[n].keys)
        queries_once(tiles[n].rows)
        scores[n] = dot(q[tiles[n].queries], k_t[:, tiles[n].keys])

    def compute_d_weights(n):
        d_weights[n] = dot(d_out_ref[0, tiles[n].queries], v_t[:, tiles[n].keys])

    def compute_probabilities(n):
        p = jnp.exp2(minus_columns(scores.pop(n), log_sums[tiles[n].queries]))
        probabilities[n] = masked(p, tiles[n], window, keys_axis=1)

    return (compute_scores, compute_d_weights, compute_probabilities), d_weights, probabilities


def write_gradients(rows, d_q, dk_sum, dv_sum, q_tables, k_tables, norms, refs):
    """Writes the gradients of q, k and v at the slice `rows` from their sums: d_q (128, rows), dk_sum, dv_sum (128, T).
    norms: normed_t and scales of _backward_kernel."""
    def write(ref, which, d_normed, tables):
        normed, scale = (kept[which, :, rows] for kept in norms)
        d_x = d_rotated_norm(d_normed, normed, scale, *(table[:, rows] for table in tables))
        ref[0, rows] = d_x.astype(ref.dtype).T

    dq_ref, dk_ref, dv_ref = refs
    write(dq_ref, 0, d_q * SCALE, q_tables)
    write(dk_ref, 1, dk_sum[:, rows] / LOG2_E, k_tables)
    dv_ref[0, rows] = dv_sum[:, rows].astype(dv_ref.dtype).T


def _backward_kernel(place, q_ref, k_ref, v_ref, log_sums_ref, d_out_ref, cos_ref, sin_ref, dq_ref, dk_ref, dv_ref, q,
                     q_t, k, k_t, v_t, d_out_t, normed_t, scales, log_sums, dq_sum, dk_sum, dv_sum,
                     *, eps, window, matrix_unit, group):
    """With p = 2^(s - log sum), the probabilities: d v = pᵀ d out and d s = p (d out vᵀ - mean), the mean under p. Its
    tiles are queries × keys. The mean is summed over all tiles of a row before d s: the product of out and d out is the
    same number (FlashAttention-2, arXiv 2307.08691), but out is rounded to bfloat16, and its errors do not cancel.

    Scratch: operands of the products, (T, 128), or (128, T) with the suffix _t; fp32: normed_t and scales of q and k,
    log_sums in 128 equal columns, and the sums of the gradients so far, (128, T).
    """
    dtype, length = q_ref.dtype, q_ref.shape[2]
    tiles = list_tiles(length, BACKWARD_TILES[matrix_unit], window)
    begun = set()  # (id of a sum, first position) of the chunks of 128 that something has been added to

    tables = cos_ref, sin_ref
    (compute_scores, compute_d_weights, compute_probabilities), d_weights, probabilities = begin_backward(
        tiles, (q_ref, k_ref, v_ref, log_sums_ref, d_out_ref), tables, tables,
        (q, q_t, k, k_t, v_t, d_out_t, normed_t, scales, log_sums), eps=eps, window=window)
    means, d_scores = {}, {}

    def add_to_means(n):
        compute_probabilities(n)
        add_to(means, tiles[n], sums_of_128(probabilities[n] * d_weights[n]), axis=0)
        if tiles[n].is_last:
            start = tiles[n].rows.start
            means[start] = jnp.sum(means[start], axis=1, keepdims=True)

    def compute_d_scores(n):
        start, queries = tiles[n].rows.start, tiles[n].queries
        d_score = probabilities[n] * (d_weights.pop(n) - means[start][queries.start - start:queries.stop - start])
        probabilities[n], d_scores[n] = probabilities[n].astype(dtype), d_score.astype(dtype)

    def add(total, positions, value, axis=1):
        chunks = range(positions.start, positions.stop, HEAD_DIM)
        for is_begun, group in groupby(chunks, lambda start: (id(total), start) in begun):
            group = list(group)
            part = slice(group[0], min(group[-1] + HEAD_DIM, positions.stop))
            inside = slice(part.start - positions.start, part.stop - positions.start)
            at, inside = ((slice(None), part), (slice(None), inside)) if axis else (part, inside)
            if is_begun:
                total[at] += value[inside]
            else:
                total[at] = value[inside]
        begun.update((id(total), start) for start in chunks)

    def add_to_v(n):
        add(dv_sum, tiles[n].keys, dot(d_out_t[:, tiles[n].queries], probabilities.pop(n)))

    def add_to_k(n):
        add(dk_sum, tiles[n].keys, dot(q_t[:, tiles[n].queries], d_scores[n]))

    def add_to_q(n):
        queries, keys, d_score = tiles[n].queries, tiles[n].keys, d_scores.pop(n)
        if matrix_unit > HEAD_DIM:
            add(dq_sum, queries, dot(k_t[:, keys], d_score, (1, 1)))
        else:  # libtpu 0.0.21 fails on that for v5e, where it would gain nothing (mxu_lmr_transform.cc)
            add(dq_sum, queries, dot(d_score, k[keys]), axis=0)
        if tiles[n].is_last:
            finish(tiles[n].rows)

    def finish(rows):  # no tile that is still to come reaches these queries, or these keys
        d_q = dq_sum[:, rows] if matrix_unit > HEAD_DIM else dq_sum[rows].T
        write_gradients(rows, d_q, dk_sum, dv_sum, tables, tables, (normed_t, scales), (dq_ref, dk_ref, dv_ref))

    if group > 1:  # the query heads of a group follow one another and add to the same gradients of k and v
        begun.update((id(total), start) for total in (dk_sum, dv_sum) for start in range(0, length, HEAD_DIM))

        @pl.when(pl.program_id(2) == 0)
        def _():
            dk_sum[...] = dv_sum[...] = jnp.zeros_like(dk_sum)

    longest = max(Counter(tile.rows.start for tile in tiles).values())
    row = longest + 1  # turns after which a tile's row has its mean
    pipeline(len(tiles), [(row + 2, add_to_v), (row + 2, add_to_k), (0, compute_scores), (0, compute_d_weights),
                           (row + 2, add_to_q), (1, add_to_means), (row, compute_d_scores)])


# -----------------------------------------------------------------------------
# Calling them


def _call(kernel, place, operands, results, scratch, tiles, products, interpret=False, **options):
    """Runs `kernel` for every sequence, every key head, and every query head that shares it.

    operands, results: (kind, array or its shape) each. The kernel gets one query head ("q") or key head ("k") of the
    array, or of layer place[0] of a stack ("q stack", "k stack", "sums stack"), or a whole "table". tiles: those of the
    scores; products: of a tile and 128 columns, in the kernel, for its declared cost.
    """
    _, batch, length, width = operands[0][1].shape
    kv_heads = operands[1][1].shape[3] // HEAD_DIM
    group = width // HEAD_DIM // kv_heads

    def spec(kind):
        if kind == "table":
            return pl.BlockSpec((HEAD_DIM, length), lambda *_: (0, 0))
        head = (lambda h, g: h) if kind.startswith("k") else (lambda h, g: h * group + g)
        if kind == "sums":
            return pl.BlockSpec((1, 1, 1, length), lambda b, h, g, place: (b, head(h, g), 0, 0))
        if kind == "sums stack":
            return pl.BlockSpec((1, 1, 1, 1, length), lambda b, h, g, place: (place[0], b, head(h, g), 0, 0))
        if kind.endswith("stack"):
            return pl.BlockSpec((1, 1, length, HEAD_DIM), lambda b, h, g, place: (place[0], b, 0, head(h, g)))
        return pl.BlockSpec((1, length, HEAD_DIM), lambda b, h, g, place: (b, 0, head(h, g)))

    scores = batch * kv_heads * group * num_scores(tiles)
    num_bytes = sum(math.prod(array.shape[kind.endswith("stack"):]) * array.dtype.itemsize
                    for kind, array in operands + results)
    return pl.pallas_call(
        functools.partial(kernel, **options),
        out_shape=[result for _, result in results],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1, grid=(batch, kv_heads, group),
            in_specs=[spec(kind) for kind, _ in operands], out_specs=[spec(kind) for kind, _ in results],
            scratch_shapes=[pltpu.VMEM(shape, dtype) for shape, dtype in scratch]),
        cost_estimate=pl.CostEstimate(flops=2 * products * scores * HEAD_DIM, transcendentals=scores,
                                      bytes_accessed=num_bytes),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary"),
                                             vmem_limit_bytes=VMEM_LIMIT_BYTES),
        interpret=interpret,
    )(place, *(array for _, array in operands))


def forward(place, q, k, v, cos, sin, *, windows, matrix_unit, **options):
    """As pallas_attention.forward."""
    _, batch, length, width = q.shape
    operands = [("q stack", q), ("k stack", k), ("k stack", v), ("table", cos), ("table", sin)]
    results = [("q", jax.ShapeDtypeStruct(q.shape[1:], q.dtype)),
               ("sums", jax.ShapeDtypeStruct(log_sums_shape(batch, length, width), jnp.float32))]
    scratch = [((HEAD_DIM, length), q.dtype), ((length, HEAD_DIM), q.dtype), ((HEAD_DIM, length), q.dtype)]

    def call(window):
        tiles = list_tiles(length, FORWARD_TILES[matrix_unit], window)
        return _call(_forward_kernel, place, operands, results, scratch, tiles, products=2, window=window,
                     matrix_unit=matrix_unit, **options)

    return by_window(call, place[1], length, windows)


def backward(place, q, k, v, log_sums, d_out, cos, sin, *, windows, matrix_unit, **options):
    """As pallas_attention.backward."""
    length, dtype, group = q.shape[2], q.dtype, q.shape[3] // k.shape[3]
    operands = [("q stack", q), ("k stack", k), ("k stack", v), ("sums stack", log_sums), ("q", d_out), ("table", cos),
                ("table", sin)]
    results = [(kind, jax.ShapeDtypeStruct(array.shape[1:], dtype)) for kind, array in (("q", q), ("k", k), ("k", v))]
    rows, columns = (length, HEAD_DIM), (HEAD_DIM, length)
    scratch = [*((shape, dtype) for shape in (rows, columns, rows, columns, columns, columns)),
               *((shape, jnp.float32) for shape in (
                   (2, *columns), (2, 1, length), rows, columns if matrix_unit > HEAD_DIM else rows, columns,
                   columns))]

    def call(window):
        tiles = list_tiles(length, BACKWARD_TILES[matrix_unit], window)
        return _call(_backward_kernel, place, operands, results, scratch, tiles, products=5, window=window,
                     matrix_unit=matrix_unit, group=group, **options)

    return by_window(call, place[1], length, windows)
