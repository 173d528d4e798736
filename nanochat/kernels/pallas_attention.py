"""Causal attention for TPUs, as two Pallas kernels: rotary positions, QK-norm and attention, and their gradients.

Operands and results have the shape (B, T, heads × 128) of the matrix products, and a head is one column of blocks of
128. Nothing of size T × T, no norm and no rotated copy ever reaches HBM. The softmax needs no maximum, because QK-norm
bounds every score by √128 < 12, and exp(12) × MAX_SEQ_LEN is far from the limit of fp32. The forward pass keeps the
logarithm of each query's sum of exponentials, so that the backward pass knows every probability as soon as it knows the
score.
"""
from nanochat.kernels import pallas_long, pallas_short
from nanochat.kernels.flash_shapes import MAX_WHOLE, segment_of


def _run(name, place, q, *others, max_whole=None, **options):
    length, max_whole = q.shape[2], max_whole or MAX_WHOLE
    if length <= max_whole:
        return getattr(pallas_short, name)(place, q, *others, **options)
    return getattr(pallas_long, name)(place, q, *others, segment=segment_of(length, max_whole), **options)


def forward(place, q, *others, **options):
    """[attention's output, (B, T, H × 128); the logarithms to base 2 of its sums, as log_sums_shape] of one layer.

    place: int32 (2,), the layer and its window: a query sees itself and the window - 1 positions before it.
    q: a stack (layers, B, T, H × 128); others: k and v, (layers, B, T, H_kv × 128), and cos and sin, as in
    pallas_parts.rotated_norm, fp32.
    options: `windows`, the sizes that occur, ints; empty: all layers see all positions, and place[1] says nothing.
    `matrix_unit`, the width of the chip's matrix units; `max_whole`, the positions of a sequence that it has in VMEM as
    a whole, MAX_WHOLE by default; `eps`; `interpret`.
    """
    return _run("forward", place, q, *others, **options)


def backward(place, q, *others, **options):
    """Gradients of the layer's q, k and v from that of its output. others: k and v; log_sums, a stack (layers, …) of
    what `forward` returned; d_out (B, T, H × 128); cos and sin. The rest as in `forward`."""
    return _run("backward", place, q, *others, **options)
