"""The attention of pallas_short.py for sequences that are too long to be in VMEM as a whole.

Positions are divided into segments. A step of a program computes the scores of the queries of one segment with the keys
of one, itself or an earlier one, and adds to sums that stay in VMEM: because no maximum is needed, partial sums just
add. Pairs of segments out of the window's reach are no steps. The bodies of the three kinds of pairs (the same segment,
wholly visible, on the window's edge) are parts of the same kernel.

The backward pass goes through the pairs of a segment of queries twice. First it sums the mean that each query's scores
need, then come the gradients. That is 7 products where pallas_short.py needs 5.
"""
import functools
import math
from itertools import chain

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from nanochat.kernels.attention_tiles import BACKWARD_TILES, FORWARD_TILES, list_tiles, num_scores, pipeline
from nanochat.kernels.flash_shapes import HEAD_DIM, SEGMENT
from nanochat.kernels.pallas_parts import VMEM_LIMIT_BYTES, by_window, dot, log_sums_shape, sums_of_128
from nanochat.kernels.pallas_short import begin_backward, forward_tiles, write_gradients


def list_pairs(segments, segment, window):
    """Returns the pairs (segment of queries, segment of keys) of which something is visible: from the last queries to
    the first, and for each from the first keys to the last."""
    farthest = segments if window is None else (window + segment - 2) // segment  # distance in segments
    return [(i, j) for i in reversed(range(segments)) for j in range(max(0, i - farthest), i + 1)]


def list_cases(pairs, segment, tiles, window):
    """Returns the kinds of pairs, [(smallest distance in segments, largest, Tiles of scores)]."""
    cases = {}
    for distance in sorted({i - j for i, j in pairs}):
        is_whole = distance and (window is None or (distance + 1) * segment <= window)
        same = next((first for first, (_, whole, _) in cases.items() if whole), distance) if is_whole else distance
        cases[same] = (distance, is_whole, list_tiles(segment, tiles, None if is_whole else window, distance * segment))
    return [(first, last, found) for first, (last, _, found) in cases.items()]


def _here(place, num_steps):
    """Returns this step's segments of queries and keys, and whether the step before had other queries."""
    step = pl.program_id(3)
    i, j = place[2 + step], place[2 + num_steps + step]
    return i, j, (step == 0) | (place[2 + jnp.maximum(step, 1) - 1] != i)


# -----------------------------------------------------------------------------
# The kernels


def _forward_kernel(place, q_ref, k_ref, v_ref, cos_q, sin_q, cos_k, sin_k, out_ref, log_sums_ref, q_t, k, v_t,
                    out_sum, weight_sum, *, eps, window, cases, num_steps):
    i, j, is_first = _here(place, num_steps)

    @pl.when(is_first)
    def _():
        out_sum[...], weight_sum[...] = jnp.zeros_like(out_sum), jnp.zeros_like(weight_sum)

    def add(rows, out, sums):
        out_sum[:, rows] += out
        weight_sum[:, rows] += sums

    def finish(rows, out, sums):  # the pair of a segment with itself is its last
        total = jnp.sum(weight_sum[:, rows] + sums, axis=0, keepdims=True)
        log_sums_ref[0, 0, :, rows] = jnp.log2(total)
        out_ref[0, rows] = ((out_sum[:, rows] + out) / total).astype(out_ref.dtype).T

    for first, last, tiles in cases:
        @pl.when((i - j >= first) & (i - j <= last))
        def _(tiles=tiles, end=add if first else finish):
            forward_tiles(tiles, (q_ref, k_ref, v_ref), (cos_q, sin_q), (cos_k, sin_k), (q_t, k, v_t), end, eps=eps,
                          window=window)


def _backward_kernel(place, q_ref, k_ref, v_ref, log_sums_ref, d_out_ref, cos_q, sin_q, cos_k, sin_k, dq_ref, dk_ref,
                     dv_ref, q, q_t, k, k_t, v_t, d_out_t, normed_t, scales, log_sums, mean_sum, dq_sum, dk_sum, dv_sum,
                     *, eps, window, cases, num_steps, matrix_unit):
    """As in pallas_short.py, with mean_sum (S, 128), dq_sum of this segment of queries, and dk_sum and dv_sum of all
    segments of keys, (segments, 128, S)."""
    i, j, is_first = _here(place, num_steps)
    adds_gradients = place[2 + 2 * num_steps + pl.program_id(3)]
    dtype = q_ref.dtype

    @pl.when(is_first)
    def _():
        mean_sum[...], dq_sum[...] = jnp.zeros_like(mean_sum), jnp.zeros_like(dq_sum)

    @pl.when((pl.program_id(2) == 0) & (pl.program_id(3) == 0))
    def _():  # the query heads of a group follow one another and add to the same gradients of k and v
        dk_sum[...], dv_sum[...] = jnp.zeros_like(dk_sum), jnp.zeros_like(dv_sum)

    def work(tiles, is_second, is_last):
        (compute_scores, compute_d_weights, compute_probabilities), d_weights, probabilities = begin_backward(
            tiles, (q_ref, k_ref, v_ref, log_sums_ref, d_out_ref), (cos_q, sin_q), (cos_k, sin_k),
            (q, q_t, k, k_t, v_t, d_out_t, normed_t, scales, log_sums), eps=eps, window=window)
        means, d_scores = {}, {}

        def add_to_means(n):
            mean_sum[tiles[n].queries] += sums_of_128(probabilities.pop(n) * d_weights.pop(n))

        def compute_d_scores(n):
            start = tiles[n].rows.start
            if start not in means:
                means[start] = jnp.sum(mean_sum[tiles[n].rows], axis=1, keepdims=True)
            mean = means[start][tiles[n].queries.start - start:tiles[n].queries.stop - start]
            d_score = probabilities[n] * (d_weights.pop(n) - mean)
            probabilities[n], d_scores[n] = probabilities[n].astype(dtype), d_score.astype(dtype)

        def add_to_v(n):
            dv_sum[j, :, tiles[n].keys] += dot(d_out_t[:, tiles[n].queries], probabilities.pop(n))

        def add_to_k(n):
            dk_sum[j, :, tiles[n].keys] += dot(q_t[:, tiles[n].queries], d_scores[n])

        def add_to_q(n):
            queries, keys, d_score = tiles[n].queries, tiles[n].keys, d_scores.pop(n)
            if matrix_unit > HEAD_DIM:
                dq_sum[:, queries] += dot(k_t[:, keys], d_score, (1, 1))
            else:
                dq_sum[queries] += dot(d_score, k[keys])
            if is_last and tiles[n].is_last:
                finish(tiles[n].rows)

        def finish(rows):  # no tile that is still to come reaches these queries, or these keys
            d_q = dq_sum[:, rows] if matrix_unit > HEAD_DIM else dq_sum[rows].T
            write_gradients(rows, d_q, dk_sum.at[j], dv_sum.at[j], (cos_q, sin_q), (cos_k, sin_k),
                            (normed_t, scales), (dq_ref, dk_ref, dv_ref))

        if is_second:
            stages = [(3, add_to_v), (3, add_to_k), (0, compute_scores), (0, compute_d_weights), (3, add_to_q),
                      (1, compute_probabilities), (2, compute_d_scores)]
        else:
            stages = [(0, compute_scores), (0, compute_d_weights), (1, compute_probabilities), (2, add_to_means)]
        pipeline(len(tiles), stages)

    for first, last, tiles in cases:
        for is_second in (0, 1):
            @pl.when((i - j >= first) & (i - j <= last) & (adds_gradients == is_second))
            def _(tiles=tiles, is_second=is_second, is_last=first == 0):
                work(tiles, is_second, is_last)


# -----------------------------------------------------------------------------
# Calling them


def _call(kernel, place, steps, operands, results, scratch, segment, flops, exponentials, interpret=False, **options):
    """Runs `kernel` for every sequence, key head, query head that shares it, and step.

    steps: (segment of queries, segment of keys, …) each. operands, results: (kind, array or its shape) each. The kernel
    gets the segment of queries ("q …") or of keys ("k …"): of one head ("… head", or "… stack" in layer place[0] of a
    stack), of the sums ("q sums"), or of a "… table". Of results it is always the segment of queries.
    """
    _, batch, _, width = operands[0][1].shape
    kv_heads = operands[1][1].shape[3] // HEAD_DIM
    group, num_steps = width // HEAD_DIM // kv_heads, len(steps)
    place = jnp.concatenate([place, jnp.asarray(list(chain(*zip(*steps, strict=True))), jnp.int32)])

    def spec(kind, is_result=False):
        side, what = kind.split()
        begin = 2 + num_steps * (side == "k" and not is_result)
        head = (lambda h, g: h) if side == "k" else (lambda h, g: h * group + g)
        shape, index = {
            "table": ((HEAD_DIM, segment), lambda b, h, g, s, place: (0, place[begin + s])),
            "sums": ((1, 1, 1, 1, segment)[is_result:],
                     lambda b, h, g, s, place: (place[0], b, head(h, g), 0, place[begin + s])[is_result:]),
            "stack": ((1, 1, segment, HEAD_DIM), lambda b, h, g, s, place: (place[0], b, place[begin + s], head(h, g))),
            "head": ((1, segment, HEAD_DIM), lambda b, h, g, s, place: (b, place[begin + s], head(h, g))),
        }[what]
        return pl.BlockSpec(shape, index)

    num_bytes = sum(math.prod(array.shape[kind.endswith("stack"):]) * array.dtype.itemsize
                    for kind, array in operands + results)
    programs = batch * kv_heads * group
    return pl.pallas_call(
        functools.partial(kernel, num_steps=num_steps, **options),
        out_shape=[result for _, result in results],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1, grid=(batch, kv_heads, group, num_steps),
            in_specs=[spec(kind) for kind, _ in operands], out_specs=[spec(kind, True) for kind, _ in results],
            scratch_shapes=[pltpu.VMEM(shape, dtype) for shape, dtype in scratch]),
        cost_estimate=pl.CostEstimate(flops=programs * flops, transcendentals=programs * exponentials,
                                      bytes_accessed=num_bytes),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT_BYTES),
        interpret=interpret,
    )(place, *(array for _, array in operands))


def _scores(pairs, cases):
    """Returns how many scores the tiles of all pairs have."""
    return sum(num_scores(next(tiles for first, last, tiles in cases if first <= i - j <= last)) for i, j in pairs)


def forward(place, q, k, v, cos, sin, *, windows, matrix_unit, segment=SEGMENT, **options):
    """As pallas_attention.forward. segment: positions of a segment, of which the sequence has a whole number."""
    _, batch, length, width = q.shape
    operands = [("q stack", q), ("k stack", k), ("k stack", v), ("q table", cos), ("q table", sin), ("k table", cos),
                ("k table", sin)]
    results = [("q head", jax.ShapeDtypeStruct(q.shape[1:], q.dtype)),
               ("q sums", jax.ShapeDtypeStruct(log_sums_shape(batch, length, width), jnp.float32))]
    columns = (HEAD_DIM, segment)
    scratch = [(columns, q.dtype), ((segment, HEAD_DIM), q.dtype), (columns, q.dtype), (columns, jnp.float32),
               ((8, segment), jnp.float32)]

    def call(window):
        pairs = list_pairs(length // segment, segment, window)
        cases = list_cases(pairs, segment, FORWARD_TILES[matrix_unit], window)
        scores = _scores(pairs, cases)
        return _call(_forward_kernel, place, pairs, operands, results, scratch, segment, 4 * HEAD_DIM * scores, scores,
                     cases=cases, window=window, **options)

    return by_window(call, place[1], length, windows)


def backward(place, q, k, v, log_sums, d_out, cos, sin, *, windows, matrix_unit, segment=SEGMENT, **options):
    """As pallas_attention.backward. segment: as in `forward`."""
    length, dtype = q.shape[2], q.dtype
    operands = [("q stack", q), ("k stack", k), ("k stack", v), ("q sums", log_sums), ("q head", d_out),
                ("q table", cos), ("q table", sin), ("k table", cos), ("k table", sin)]
    results = [(f"{side} head", jax.ShapeDtypeStruct(array.shape[1:], dtype))
               for side, array in (("q", q), ("k", k), ("k", v))]
    rows, columns, all_columns = (segment, HEAD_DIM), (HEAD_DIM, segment), (length // segment, HEAD_DIM, segment)
    scratch = [*((shape, dtype) for shape in (rows, columns, rows, columns, columns, columns)),
               *((shape, jnp.float32) for shape in (
                   (2, *columns), (2, 1, segment), rows, rows, columns if matrix_unit > HEAD_DIM else rows, all_columns,
                   all_columns))]

    def call(window):
        pairs = list_pairs(length // segment, segment, window)
        steps = [(i, j, is_second) for query in reversed(range(length // segment)) for is_second in (0, 1)
                 for i, j in pairs if i == query]
        cases = list_cases(pairs, segment, BACKWARD_TILES[matrix_unit], window)
        scores = _scores(pairs, cases)
        return _call(_backward_kernel, place, steps, operands, results, scratch, segment, 14 * HEAD_DIM * scores,
                     2 * scores, cases=cases, window=window, matrix_unit=matrix_unit, **options)

    return by_window(call, place[1], length, windows)
