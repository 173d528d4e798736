"""Causal attention for TPUs, as two Pallas kernels: rotary positions, QK-norm and attention, and their gradients.

Operands and results have the shape (B, T, heads × 128) of the matrix products, and a head is one column of blocks of
128. So nothing is transposed, and nothing of size T × T, no norm and no rotated copy ever reaches HBM. One program
computes one head of one sequence: for T up to MAX_SEQ_LEN its keys, values and one block of scores fit into VMEM. So
the softmax is computed in one piece. It needs no maximum, because QK-norm bounds every score by √128 < 12, and
exp(12) × MAX_SEQ_LEN is far from the limit of fp32. The backward pass computes the scores again from q and k, and needs
nothing else from the forward pass.
"""
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from nanochat.kernels.flash_shapes import HEAD_DIM

QUERY_BLOCK = 256  # queries whose scores are computed at a time
VMEM_LIMIT_BYTES = 96 * 2**20


def _dot(a, b, contract):
    """fp32 product of a and b over dimension contract[0] of a and contract[1] of b."""
    return jax.lax.dot_general(a, b, (((contract[0],), (contract[1],)), ((), ())), preferred_element_type=jnp.float32)


def _swap_halves(x):
    return pltpu.roll(x, HEAD_DIM // 2, 1)


def _rotate(x, cos, sin):
    """Rotary positions of x (T, 128); cos is (cos, cos) and sin (sin, -sin) of gpt.rotary_tables, (T, 128)."""
    return x * cos + _swap_halves(x) * sin


def _rotate_back(x, cos, sin):
    return x * cos + _swap_halves(x * sin)


def _rotated_norm(x, cos, sin, eps):
    """RMSNorm of the rotated x, fp32, and the reciprocal of the root mean square, (T, 1)."""
    x = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x * x, axis=1, keepdims=True) + eps)
    return _rotate(x, cos, sin) * scale, scale


def _d_rotated_norm(d_normed, normed, scale, cos, sin):
    d_rotated = scale * (d_normed - normed * jnp.mean(d_normed * normed, axis=1, keepdims=True))
    return _rotate_back(d_rotated, cos, sin)


def _weights(q, k, start, window):
    """exp(scores) of the queries from position `start` on with the keys before their end; 0 where they may not look."""
    scores = _dot(q, k, (1, 1))
    queries = start + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 0)
    distance = queries - jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
    visible = distance >= 0
    if window is not None:
        visible &= distance < window
    return jnp.where(visible, jnp.exp(scores), 0.0)


def _blocks(length):
    size = min(QUERY_BLOCK, length)
    return [(start, min(start + size, length)) for start in range(0, length, size)]


def _forward_kernel(layer_window, q_ref, k_ref, v_ref, cos_ref, sin_ref, out_ref, *, eps, windowed):
    tables = cos_ref[...], sin_ref[...]
    dtype = q_ref.dtype
    q = (_rotated_norm(q_ref[0, 0], *tables, eps)[0] * HEAD_DIM**-0.5).astype(dtype)
    k = _rotated_norm(k_ref[0, 0], *tables, eps)[0].astype(dtype)
    v = v_ref[0, 0]
    for start, end in _blocks(q.shape[0]):
        weights = _weights(q[start:end], k[:end], start, layer_window[1] if windowed else None)
        out = _dot(weights.astype(dtype), v[:end], (1, 0)) / jnp.sum(weights, axis=1, keepdims=True)
        out_ref[0, start:end] = out.astype(dtype)


def _backward_kernel(layer_window, q_ref, k_ref, v_ref, d_out_ref, cos_ref, sin_ref, dq_ref, dk_ref, dv_ref,
                     dk_sum, dv_sum, *, eps, windowed):
    tables = cos_ref[...], sin_ref[...]
    dtype = q_ref.dtype
    q_normed, q_scale = _rotated_norm(q_ref[0, 0], *tables, eps)
    k_normed, k_scale = _rotated_norm(k_ref[0, 0], *tables, eps)
    q, k, v = (q_normed * HEAD_DIM**-0.5).astype(dtype), k_normed.astype(dtype), v_ref[0, 0]

    @pl.when(pl.program_id(2) == 0)  # the first of the query heads that share these keys
    def _():
        dk_sum[...] = jnp.zeros_like(dk_sum)
        dv_sum[...] = jnp.zeros_like(dv_sum)

    dq = []
    for start, end in _blocks(q.shape[0]):
        d_out = d_out_ref[0, start:end]
        weights = _weights(q[start:end], k[:end], start, layer_window[1] if windowed else None)
        probabilities = weights / jnp.sum(weights, axis=1, keepdims=True)
        dv_sum[:end] += _dot(probabilities.astype(dtype), d_out, (0, 0))
        d_probabilities = _dot(d_out, v[:end], (1, 1))
        mean = jnp.sum(probabilities * d_probabilities, axis=1, keepdims=True)
        d_scores = (probabilities * (d_probabilities - mean)).astype(dtype)
        dq.append(_dot(d_scores, k[:end], (1, 0)) * HEAD_DIM**-0.5)
        dk_sum[:end] += _dot(d_scores, q[start:end], (0, 0))
    dq_ref[0] = _d_rotated_norm(jnp.concatenate(dq), q_normed, q_scale, *tables).astype(dtype)

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _():
        dk_ref[0] = _d_rotated_norm(dk_sum[...], k_normed, k_scale, *tables).astype(dtype)
        dv_ref[0] = dv_sum[...].astype(dtype)


def _call(kernel, layer_window, operands, results, products, scratch=0, interpret=False, **options):
    """Runs `kernel` for every sequence, every key head, and every query head that shares it.

    operands, results: (kind, array) each. The kernel gets one query head ("q") or key head ("k") of the array, or of
    layer layer_window[0] of a stack ("q stack", "k stack"), or a whole "table". products: the number of products of
    queries × keys × 128 in the kernel, for its declared cost; blocks above the diagonal are not computed.
    """
    _, batch, length, width = operands[0][1].shape
    kv_heads = operands[1][1].shape[3] // HEAD_DIM
    group = width // HEAD_DIM // kv_heads

    def spec(kind):
        if kind == "table":
            return pl.BlockSpec((length, HEAD_DIM), lambda *_: (0, 0))
        head = (lambda h, g: h * group + g) if kind.startswith("q") else (lambda h, g: h)
        if kind.endswith("stack"):
            return pl.BlockSpec((1, 1, length, HEAD_DIM),
                                lambda b, h, g, layer_window: (layer_window[0], b, 0, head(h, g)))
        return pl.BlockSpec((1, length, HEAD_DIM), lambda b, h, g, layer_window: (b, 0, head(h, g)))

    scores = batch * kv_heads * group * sum((end - start) * end for start, end in _blocks(length))
    widths = [array.shape[-1] for _, array in operands] + [shape[-1] for _, shape in results]
    return pl.pallas_call(
        functools.partial(kernel, **options),
        out_shape=[jax.ShapeDtypeStruct(shape, operands[0][1].dtype) for _, shape in results],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1, grid=(batch, kv_heads, group),
            in_specs=[spec(kind) for kind, _ in operands], out_specs=[spec(kind) for kind, _ in results],
            scratch_shapes=[pltpu.VMEM((length, HEAD_DIM), jnp.float32) for _ in range(scratch)]),
        cost_estimate=pl.CostEstimate(flops=2 * products * scores * HEAD_DIM, transcendentals=scores,
                                      bytes_accessed=2 * batch * length * sum(widths)),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary"),
                                             vmem_limit_bytes=VMEM_LIMIT_BYTES),
        interpret=interpret,
    )(layer_window, *(array for _, array in operands))


def forward(layer_window, q, k, v, cos, sin, **options):
    """[attention's output, (B, T, H × 128)] of one layer.

    layer_window: int32 (2,), the layer and the window: a query sees itself and the window - 1 positions before it, if
    `windowed`, else all before it. q: a stack (layers, B, T, H × 128); k, v: (layers, B, T, H_kv × 128); cos, sin: as
    in _rotate, fp32. options: eps, windowed, interpret.
    """
    operands = [("q stack", q), ("k stack", k), ("k stack", v), ("table", cos), ("table", sin)]
    return _call(_forward_kernel, layer_window, operands, [("q", q.shape[1:])], products=2, **options)


def backward(layer_window, q, k, v, d_y, cos, sin, **options):
    """Gradients of the layer's q, k and v from that of its output, d_y (B, T, H × 128). The rest as in `forward`."""
    operands = [("q stack", q), ("k stack", k), ("k stack", v), ("q", d_y), ("table", cos), ("table", sin)]
    results = [("q", q.shape[1:]), ("k", k.shape[1:]), ("k", v.shape[1:])]
    return _call(_backward_kernel, layer_window, operands, results, products=5, scratch=2, **options)
