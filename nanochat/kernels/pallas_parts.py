"""Parts of the attention kernels: norms and rotations of transposed heads, masks, and sums that fit the registers."""
import functools

import jax
import jax.numpy as jnp

from nanochat.kernels.flash_shapes import HEAD_DIM

VMEM_LIMIT_BYTES = 96 * 2**20
SCALE = HEAD_DIM**-0.5
LOG2_E = 1.4426950408889634  # the kernels compute powers of 2, as the chip does


def dot(a, b, contract=(1, 0)):
    """fp32 product of a and b over dimension contract[0] of a and contract[1] of b."""
    return jax.lax.dot_general(a, b, (((contract[0],), (contract[1],)), ((), ())), preferred_element_type=jnp.float32)


def swap_halves(x):
    return jnp.concatenate([x[HEAD_DIM // 2:], x[:HEAD_DIM // 2]])


def rotated_norm(x, cos, sin, eps):
    """RMSNorm of x (128, T) after its rotation, fp32, and the reciprocal of the root mean square, (1, T).

    cos is (cos, cos) and sin (sin, -sin) of layers.rotary_tables, (128, T)."""
    x = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x * x, axis=0, keepdims=True) + eps)
    return (x * cos + swap_halves(x) * sin) * scale, scale


def d_rotated_norm(d_normed, normed, scale, cos, sin):
    d_rotated = scale * (d_normed - normed * jnp.mean(d_normed * normed, axis=0, keepdims=True))
    return d_rotated * cos + swap_halves(d_rotated * sin)


def masked(values, tile, window, keys_axis):
    """Returns `values` of a tile of scores, and 0 where the query may not look at the key."""
    first, last = tile.queries.start + tile.offset, tile.queries.stop + tile.offset - 1
    on_diagonal = tile.keys.stop > first
    on_edge = window is not None and tile.keys.start <= last - window
    if not on_diagonal and not on_edge:
        return values
    queries = first + jax.lax.broadcasted_iota(jnp.int32, values.shape, 1 - keys_axis)
    distance = queries - (tile.keys.start + jax.lax.broadcasted_iota(jnp.int32, values.shape, keys_axis))
    visible = distance >= 0 if on_diagonal else distance < window
    if on_diagonal and on_edge:
        visible &= distance < window
    return jnp.where(visible, values, 0.0)


def sums_of_eighths(x):
    """Returns (8, N), sums over every eighth row of x, which are rows of registers; of a small x (1, N)."""
    return jnp.sum(x.reshape(-1, 8, x.shape[1]), axis=0) if len(x) % 8 == 0 else x.sum(0, keepdims=True)


def sums_of_128(x):
    """Returns (T, 128), sums over every 128th column of x, which are columns of registers; of a small x (T, 1)."""
    columns = x.shape[1]
    if columns % HEAD_DIM:
        return jnp.sum(x, axis=1, keepdims=True)
    return sum(x[:, start:start + HEAD_DIM] for start in range(0, columns, HEAD_DIM))


def add_to(totals, tile, value, axis=1):
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


def in_columns(row):
    """Returns (T, 128) whose columns are all the row (1, T)."""
    return jnp.broadcast_to(row, (HEAD_DIM, row.shape[1])).T


def minus_columns(x, columns):
    """Returns x (T, N) minus a column of `columns` (T, 128), whose columns are equal."""
    repeats = -(-x.shape[1] // HEAD_DIM)
    return x - jnp.concatenate([columns] * repeats, axis=1)[:, :x.shape[1]]


def log_sums_shape(batch, length, width):
    """The shape of what the forward pass keeps for the backward pass, fp32, of one layer."""
    return batch, width // HEAD_DIM, 1, length


def by_window(call, window, length, windows):
    """Returns call(window=…) by the kernel that is made for `window`, an int32 scalar. There is one for each of
    `windows` that is shorter than the sequence, from the shortest, and the last has none."""
    sizes = sorted({min(size, length) for size in windows} or {length})
    kernels = [functools.partial(call, window=size if size < length else None) for size in sizes]
    if len(kernels) == 1:
        return kernels[0]()
    return jax.lax.switch(sum((window > size).astype(jnp.int32) for size in sizes[:-1]), kernels)
