"""Causal attention for TPUs, as two Pallas kernels: rotary positions, QK-norm and attention, and their gradients.

Operands and results have the shape (B, T, heads × 128) of the matrix products, and a head is one column of blocks of
128. Nothing of size T × T, no norm and no rotated copy ever reaches HBM. One program of a kernel computes one head of
one sequence, whose operands fit into VMEM for T up to MAX_SEQ_LEN. The softmax needs no maximum, because QK-norm bounds
every score by √128 < 12, and exp(12) × MAX_SEQ_LEN is far from the limit of fp32. The forward pass keeps the logarithm
of each query's sum of exponentials, so that the backward pass knows every probability as soon as it knows the score.

What makes them fast (dev/LOG.md has what each part is worth):
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

from nanochat.kernels.attention_tiles import BACKWARD_TILES, FORWARD_TILES, Once, list_tiles, pipeline
from nanochat.kernels.flash_shapes import HEAD_DIM

VMEM_LIMIT_BYTES = 96 * 2**20
SCALE = HEAD_DIM**-0.5
LOG2_E = 1.4426950408889634  # the kernels compute powers of 2, as the chip does


# -----------------------------------------------------------------------------
# Parts of both kernels


def _dot(a, b, contract=(1, 0)):
    """fp32 product of a and b over dimension contract[0] of a and contract[1] of b."""
    return jax.lax.dot_general(a, b, (((contract[0],), (contract[1],)), ((), ())), preferred_element_type=jnp.float32)


def _swap_halves(x):
    return jnp.concatenate([x[HEAD_DIM // 2:], x[:HEAD_DIM // 2]])


def _rotated_norm(x, cos, sin, eps):
    """RMSNorm of x (128, T) after its rotation, fp32, and the reciprocal of the root mean square, (1, T).

    cos is (cos, cos) and sin (sin, -sin) of layers.rotary_tables, (128, T)."""
    x = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x * x, axis=0, keepdims=True) + eps)
    return (x * cos + _swap_halves(x) * sin) * scale, scale


def _d_rotated_norm(d_normed, normed, scale, cos, sin):
    d_rotated = scale * (d_normed - normed * jnp.mean(d_normed * normed, axis=0, keepdims=True))
    return d_rotated * cos + _swap_halves(d_rotated * sin)


def _masked(values, tile, window, keys_axis):
    """Returns `values` of a tile of scores, and 0 where the query may not look at the key."""
    on_diagonal = tile.keys.stop > tile.queries.start
    on_edge = window is not None and tile.keys.start <= tile.queries.stop - 1 - window
    if not on_diagonal and not on_edge:
        return values
    queries = tile.queries.start + jax.lax.broadcasted_iota(jnp.int32, values.shape, 1 - keys_axis)
    distance = queries - (tile.keys.start + jax.lax.broadcasted_iota(jnp.int32, values.shape, keys_axis))
    visible = distance >= 0 if on_diagonal else distance < window
    if on_diagonal and on_edge:
        visible &= distance < window
    return jnp.where(visible, values, 0.0)


# -----------------------------------------------------------------------------
# The forward kernel


def _forward_kernel(place, q_ref, k_ref, v_ref, cos_ref, sin_ref, out_ref, log_sums_ref, q_t, k, v_t,
                    *, eps, window, matrix_unit):
    """Its tiles are keys × queries, so that the sums over the keys are sums of rows. Scratch: q_t (128, T) and
    k (T, 128) rotated and normalised, v_t (128, T)."""
    dtype, length = q_ref.dtype, q_ref.shape[2]
    tiles = list_tiles(length, FORWARD_TILES[matrix_unit], window)

    def prepare_keys(chunk):
        normed, _ = _rotated_norm(k_ref[0, 0, chunk].T, cos_ref[:, chunk], sin_ref[:, chunk], eps)
        k[chunk] = normed.astype(dtype).T
        v_t[:, chunk] = v_ref[0, 0, chunk].T

    def prepare_queries(chunk):
        normed, _ = _rotated_norm(q_ref[0, 0, chunk].T, cos_ref[:, chunk], sin_ref[:, chunk], eps)
        q_t[:, chunk] = (normed * (SCALE * LOG2_E)).astype(dtype)

    keys_once, queries_once = Once(length, prepare_keys), Once(length, prepare_queries)
    scores, weights, outs, sums = {}, {}, {}, {}

    def compute_scores(n):
        keys_once(tiles[n].keys)
        queries_once(tiles[n].queries)
        scores[n] = _dot(k[tiles[n].keys], q_t[:, tiles[n].queries])

    def compute_weights(n):
        exponentials = _masked(jnp.exp2(scores.pop(n)), tiles[n], window, keys_axis=0)
        _add_to(sums, tiles[n], _sums_of_eighths(exponentials))
        weights[n] = exponentials.astype(dtype)

    def add_values(n):
        rows = tiles[n].rows
        _add_to(outs, tiles[n], _dot(v_t[:, tiles[n].keys], weights.pop(n)))
        if tiles[n].is_last:
            total = jnp.sum(sums.pop(rows.start), axis=0, keepdims=True)
            log_sums_ref[0, 0, :, rows] = jnp.log2(total)
            out_ref[0, rows] = (outs.pop(rows.start) / total).astype(dtype).T

    pipeline(len(tiles), [(0, compute_scores), (2, compute_weights), (4, add_values)])


def _sums_of_eighths(x):
    """Returns (8, N), sums over every eighth row of x, which are rows of registers; of a small x (1, N)."""
    return jnp.sum(x.reshape(-1, 8, x.shape[1]), axis=0) if len(x) % 8 == 0 else x.sum(0, keepdims=True)


def _sums_of_128(x):
    """Returns (T, 128), sums over every 128th column of x, which are columns of registers; of a small x (T, 1)."""
    columns = x.shape[1]
    if columns % HEAD_DIM:
        return jnp.sum(x, axis=1, keepdims=True)
    return sum(x[:, start:start + HEAD_DIM] for start in range(0, columns, HEAD_DIM))


def _add_to(totals, tile, value, axis=1):
    """Adds `value`, whose dimension `axis` is the tile's queries, to the totals of the tile's rows."""
    start, length = tile.rows.start, tile.rows.stop - tile.rows.start
    cuts = [cut for cut in (tile.queries.start - start, tile.queries.stop - start) if 0 < cut < length]
    if not cuts:
        totals[start] = totals[start] + value if start in totals else value
        return
    if start not in totals:
        totals[start] = jnp.zeros((*value.shape[:axis], length, *value.shape[axis + 1:]), value.dtype)
    parts = jnp.split(totals[start], cuts, axis=axis)
    parts[tile.queries.start > start] += value
    totals[start] = jnp.concatenate(parts, axis=axis)


# -----------------------------------------------------------------------------
# The backward kernel


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

    def rotated_norm(which, x, chunk):
        normed, scale = _rotated_norm(x.T, cos_ref[:, chunk], sin_ref[:, chunk], eps)
        normed_t[which, :, chunk], scales[which, :, chunk] = normed, scale
        return normed

    def prepare_keys(chunk):
        normed = rotated_norm(1, k_ref[0, 0, chunk], chunk).astype(dtype)
        k[chunk], k_t[:, chunk] = normed.T, normed
        v_t[:, chunk] = v_ref[0, 0, chunk].T

    def prepare_queries(chunk):
        scaled = (rotated_norm(0, q_ref[0, 0, chunk], chunk) * (SCALE * LOG2_E)).astype(dtype)
        q_t[:, chunk], q[chunk] = scaled, scaled.T
        d_out_t[:, chunk] = d_out_ref[0, chunk].T
        log_sums[chunk] = _in_columns(log_sums_ref[0, 0, 0, :, chunk])

    keys_once, queries_once = Once(length, prepare_keys), Once(length, prepare_queries)
    scores, d_weights, probabilities, means, d_scores = {}, {}, {}, {}, {}

    def compute_scores(n):
        keys_once(tiles[n].keys)
        queries_once(tiles[n].rows)
        scores[n] = _dot(q[tiles[n].queries], k_t[:, tiles[n].keys])

    def compute_d_weights(n):
        d_weights[n] = _dot(d_out_ref[0, tiles[n].queries], v_t[:, tiles[n].keys])

    def compute_probabilities(n):
        p = jnp.exp2(_minus_columns(scores.pop(n), log_sums[tiles[n].queries]))
        probabilities[n] = _masked(p, tiles[n], window, keys_axis=1)
        _add_to(means, tiles[n], _sums_of_128(probabilities[n] * d_weights[n]), axis=0)
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
        add(dv_sum, tiles[n].keys, _dot(d_out_t[:, tiles[n].queries], probabilities.pop(n)))

    def add_to_k(n):
        add(dk_sum, tiles[n].keys, _dot(q_t[:, tiles[n].queries], d_scores[n]))

    def add_to_q(n):
        queries, keys, d_score = tiles[n].queries, tiles[n].keys, d_scores.pop(n)
        if matrix_unit > HEAD_DIM:
            add(dq_sum, queries, _dot(k_t[:, keys], d_score, (1, 1)))
        else:  # libtpu 0.0.21 fails on that for v5e, where it would gain nothing (mxu_lmr_transform.cc)
            add(dq_sum, queries, _dot(d_score, k[keys]), axis=0)
        if tiles[n].is_last:
            finish(tiles[n].rows)

    def finish(rows):  # no tile that is still to come reaches these queries, or these keys
        d_q = dq_sum[:, rows] if matrix_unit > HEAD_DIM else dq_sum[rows].T
        for which, d_x, ref in ((0, d_q * SCALE, dq_ref), (1, dk_sum[:, rows] / LOG2_E, dk_ref)):
            d_x = _d_rotated_norm(d_x, normed_t[which, :, rows], scales[which, :, rows], cos_ref[:, rows],
                                  sin_ref[:, rows])
            ref[0, rows] = d_x.astype(dtype).T
        dv_ref[0, rows] = dv_sum[:, rows].astype(dtype).T

    if group > 1:  # the query heads of a group follow one another and add to the same gradients of k and v
        begun.update((id(total), start) for total in (dk_sum, dv_sum) for start in range(0, length, HEAD_DIM))

        @pl.when(pl.program_id(2) == 0)
        def _():
            dk_sum[...] = dv_sum[...] = jnp.zeros_like(dk_sum)

    longest = max(Counter(tile.rows.start for tile in tiles).values())
    row = longest + 1  # turns after which a tile's row has its mean
    pipeline(len(tiles), [(row + 2, add_to_v), (row + 2, add_to_k), (0, compute_scores), (0, compute_d_weights),
                           (row + 2, add_to_q), (1, compute_probabilities), (row, compute_d_scores)])


def _in_columns(row):
    """Returns (T, 128) whose columns are all the row (1, T)."""
    return jnp.broadcast_to(row, (HEAD_DIM, row.shape[1])).T


def _minus_columns(x, columns):
    """Returns x (T, N) minus a column of `columns` (T, 128), whose columns are equal."""
    repeats = -(-x.shape[1] // HEAD_DIM)
    return x - jnp.concatenate([columns] * repeats, axis=1)[:, :x.shape[1]]


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

    area = sum((tile.queries.stop - tile.queries.start) * (tile.keys.stop - tile.keys.start) for tile in tiles)
    scores = batch * kv_heads * group * area
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


def _by_window(call, window, length, windows):
    """Returns call(window=…) by the kernel that is made for `window`, an int32 scalar. There is one for each of
    `windows` that is shorter than the sequence, from the shortest, and the last has none."""
    sizes = sorted({min(size, length) for size in windows} or {length})
    kernels = [functools.partial(call, window=size if size < length else None) for size in sizes]
    if len(kernels) == 1:
        return kernels[0]()
    return jax.lax.switch(sum((window > size).astype(jnp.int32) for size in sizes[:-1]), kernels)


def log_sums_shape(batch, length, width):
    """The shape of what the forward pass keeps for the backward pass, fp32, of one layer."""
    return batch, width // HEAD_DIM, 1, length


def forward(place, q, k, v, cos, sin, *, windows, matrix_unit, **options):
    """[attention's output, (B, T, H × 128); the logarithms to base 2 of its sums, as log_sums_shape] of one layer.

    place: int32 (2,), the layer and its window: a query sees itself and the window - 1 positions before it. windows:
    the sizes that occur, ints; empty: all layers see all positions, and place[1] says nothing. q: a stack (layers, B,
    T, H × 128); k, v: (layers, B, T, H_kv × 128); cos, sin: as in _rotated_norm, fp32. matrix_unit: the width of the
    chip's matrix units. options: eps, interpret.
    """
    _, batch, length, width = q.shape
    operands = [("q stack", q), ("k stack", k), ("k stack", v), ("table", cos), ("table", sin)]
    results = [("q", jax.ShapeDtypeStruct(q.shape[1:], q.dtype)),
               ("sums", jax.ShapeDtypeStruct(log_sums_shape(batch, length, width), jnp.float32))]
    scratch = [((HEAD_DIM, length), q.dtype), ((length, HEAD_DIM), q.dtype), ((HEAD_DIM, length), q.dtype)]

    def call(window):
        tiles = list_tiles(length, FORWARD_TILES[matrix_unit], window)
        return _call(_forward_kernel, place, operands, results, scratch, tiles, products=2, window=window,
                     matrix_unit=matrix_unit, **options)

    return _by_window(call, place[1], length, windows)


def backward(place, q, k, v, log_sums, d_out, cos, sin, *, windows, matrix_unit, **options):
    """Gradients of the layer's q, k and v from that of its output, d_out (B, T, H × 128). log_sums: a stack (layers, …)
    of what `forward` returned. The rest as in `forward`."""
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

    return _by_window(call, place[1], length, windows)
