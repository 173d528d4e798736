"""Parts of the attention kernels: norms and rotations of transposed heads, masks, sums that fit the registers, and how
a kernel is run."""
import functools
import math
from itertools import chain
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from nanochat.kernels.attention_tiles import HEAD_DIM
from nanochat.model.layers import NORM_EPS

VMEM_LIMIT_BYTES = 96 * 2**20
LEAST = -1e30  # of a score that no query sees
LOG2_E = 1.4426950408889634  # kernels and chip compute powers of 2


def dot(a, b, contract=(1, 0)):
    """fp32 product of a and b over dimension contract[0] of a and contract[1] of b."""
    return jax.lax.dot_general(a, b, (((contract[0],), (contract[1],)), ((), ())), preferred_element_type=jnp.float32)


def swap_halves(x):
    return jnp.concatenate([x[HEAD_DIM // 2:], x[:HEAD_DIM // 2]])


class Heads(NamedTuple):
    """How queries and keys become scores."""
    eps: float | None = NORM_EPS  # of the norm behind their rotation; None: they come rotated, and have no norm
    scale: float = HEAD_DIM**-0.5  # of a score

    @property
    def have_norm(self):
        """Whether a norm bounds the scores, so that the softmax needs no maximum."""
        return self.eps is not None


WITH_NORM = Heads()


def rotated_norm(x, cos, sin, eps):
    """RMSNorm of x (128, T) after its rotation, fp32, and the reciprocal of the root mean square, (1, T).

    cos is (cos, cos) and sin (sin, -sin) of layers.rotary_tables, (128, T)."""
    x = x.astype(jnp.float32)
    # A rotation keeps lengths, so the scale of x before it will do. Norms and rotations of all heads take 1.19 Mcycles
    # on v6e in (128, T), including both transpositions, and 1.77 in (T, 128).
    scale = jax.lax.rsqrt(jnp.mean(x * x, axis=0, keepdims=True) + eps)
    return (x * cos + swap_halves(x) * sin) * scale, scale


def d_rotated_norm(d_normed, normed, scale, cos, sin):
    d_rotated = scale * (d_normed - normed * jnp.mean(d_normed * normed, axis=0, keepdims=True))
    # This is the transposed rotation: swap_halves is its own transpose.
    return d_rotated * cos + swap_halves(d_rotated * sin)


def masked(values, tile, window, keys_axis, hidden=0.0):
    """Returns `values` of a tile of scores, with `hidden` where the query may not look at the key."""
    # Tracing knows where a tile lies, so only tiles that the diagonal or the window's edge cuts get a mask.
    first = tile.queries.start + tile.offset
    last = tile.queries.stop + tile.offset - 1
    on_diagonal = tile.keys.stop > first
    on_edge = window is not None and tile.keys.start <= last - window
    if not on_diagonal and not on_edge:
        return values
    queries = first + jax.lax.broadcasted_iota(jnp.int32, values.shape, 1 - keys_axis)
    distance = queries - (tile.keys.start + jax.lax.broadcasted_iota(jnp.int32, values.shape, keys_axis))
    visible = distance >= 0 if on_diagonal else distance < window
    if on_diagonal and on_edge:
        visible &= distance < window
    return jnp.where(visible, values, hidden)


# A vector register holds 8 × 128 numbers. Adding whole registers moves nothing within one. So sums over rows stay 8
# rows, and sums over columns 128 columns, until the last tile of a block of queries has been added.
def eighths(x, reduce=jnp.sum):
    """Returns (8, N), sums over every eighth row of x, which are rows of registers; of a small x (1, N). reduce: or
    jnp.max."""
    if len(x) % 8:
        return reduce(x, axis=0, keepdims=True)
    return reduce(x.reshape(-1, 8, x.shape[1]), axis=0)


def sums_of_128(x):
    """Returns (T, 128), sums over every 128th column of x, which are columns of registers; of a small x (T, 1)."""
    columns = x.shape[1]
    if columns % HEAD_DIM:
        return jnp.sum(x, axis=1, keepdims=True)
    return sum(x[:, start:start + HEAD_DIM] for start in range(0, columns, HEAD_DIM))


def add_to(totals, tile, value, axis=1, add=jnp.add, zero=0.0):
    """Adds `value`, whose dimension `axis` is the tile's queries, to the totals of the tile's rows. add: or
    jnp.maximum, of which LEAST is the zero."""
    # A total is a value, not memory, so it is cut and joined again. Tiles on the diagonal have the last of the rows,
    # tiles on the window's edge the first.
    start = tile.rows.start
    length = tile.rows.stop - start
    cuts = [cut for cut in (tile.queries.start - start, tile.queries.stop - start) if 0 < cut < length]
    if not cuts:
        totals[start] = add(totals[start], value) if start in totals else value
        return
    if start not in totals:
        totals[start] = jnp.full((*value.shape[:axis], length, *value.shape[axis + 1:]), zero, value.dtype)
    parts = jnp.split(totals[start], cuts, axis=axis)
    place = tile.queries.start > start
    parts[place] = add(parts[place], value)
    totals[start] = jnp.concatenate(parts, axis=axis)


# Subtracting one number from each row of a tile would spread it over the 128 columns of a register, for every tile
# again. The backward kernels do that once, and keep the columns.
def in_columns(row):
    """Returns (T, 128) whose columns are all the row (1, T)."""
    return jnp.broadcast_to(row, (HEAD_DIM, row.shape[1])).T


def minus_columns(x, columns):
    """Returns x (T, N) minus a column of `columns` (T, 128), whose columns are equal."""
    repeats = -(-x.shape[1] // HEAD_DIM)
    return x - jnp.concatenate([columns] * repeats, axis=1)[:, :x.shape[1]]


def log_sums_shape(batch, length, width):
    """The shape of the log_sums of one layer, fp32, which the forward pass keeps for the backward pass."""
    return batch, width // HEAD_DIM, 1, length


# The layers are one loop, whose body is traced once: a layer's window is a number on the device. But tracing decides
# which tiles a kernel has. So the body holds a kernel for each size, and the device picks one. With one kernel for all,
# which masks what it could leave out, 2,048 positions with windows of 512 took 12.18 Mcycles forward on v5e, not 6.97.
def by_window(call, window, length, windows):
    """Returns call(window=…) by the kernel for `window`, an int32 scalar. There is one kernel for each of `windows`
    that is shorter than the sequence, from the shortest, and a last one without a window."""
    sizes = sorted({min(size, length) for size in windows} or {length})
    kernels = [functools.partial(call, window=size if size < length else None) for size in sizes]
    if len(kernels) == 1:
        return kernels[0]()
    return jax.lax.switch(sum((window > size).astype(jnp.int32) for size in sizes[:-1]), kernels)


class Operands(NamedTuple):
    """The operands of a kernel, by names. It gets its blocks, and the scratch, as attributes of one object, `refs`.

    An input or a result is (kind, array or its shape). A kind is "SIDE WHAT". SIDE is q or k: a query head and the
    segment of queries, or the key head that it shares and the segment of keys. WHAT is
    - stack: layer place[0] of a stack (layers, B, T, width),
    - head: of an array (B, T, width),
    - sums, or sums stack: of log_sums_shape, or of a stack of them, counted as such in the cost,
    - table: (128, T), the same for every head.
    """
    inputs: dict
    results: dict
    scratch: dict  # {name: (shape, dtype)}

    def num_bytes(self):
        """Returns the bytes that a kernel reads and writes in HBM."""
        total = 0
        for kind, array in (*self.inputs.values(), *self.results.values()):
            shape = array.shape[1:] if kind.endswith("stack") else array.shape
            total += math.prod(shape) * array.dtype.itemsize
        return total


def run(kernel, place, operands, segment, cost, steps=None, interpret=False):
    """Runs kernel(place, refs) for every sequence, key head, query head that shares it, and step. Returns the results.

    segment: the positions of a block; without steps, all. steps: [(segment of queries, segment of keys, …), …]; the
    kernel gets all their first numbers after the two of `place`, then all second ones, and so on. A result belongs to
    the segment of queries. cost: floating-point operations and exponentials for a head of a sequence.
    """
    _, batch, _, width = operands.inputs["q"][1].shape
    kv_heads = operands.inputs["k"][1].shape[3] // HEAD_DIM
    group = width // HEAD_DIM // kv_heads
    # The query heads of a group add to the same sums in VMEM, and so do steps: they run one after the other. Sequences
    # and key heads may go to different cores.
    grid = [batch, kv_heads, group]
    semantics = ["parallel", "parallel", "arbitrary"]
    of_queries = of_keys = 2  # where in `place` the segments of the steps begin
    if steps:
        place = jnp.concatenate([place, jnp.asarray(list(chain(*zip(*steps, strict=True))), jnp.int32)])
        grid.append(len(steps))
        semantics.append("arbitrary")
        of_keys += len(steps)
    names = [*operands.inputs, *operands.results, *operands.scratch]

    def named(place, *refs):
        kernel(place, SimpleNamespace(**dict(zip(names, refs, strict=True))))

    in_specs = [_block(kind, array, group, segment, of_keys if kind.startswith("k") else of_queries)
                for kind, array in operands.inputs.values()]
    out_specs = [_block(kind, array, group, segment, of_queries) for kind, array in operands.results.values()]
    # `place` is in memory for scalars before a step begins, so that it can choose the blocks to fetch.
    specs = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1, grid=tuple(grid), in_specs=in_specs, out_specs=out_specs,
        scratch_shapes=[pltpu.VMEM(shape, dtype) for shape, dtype in operands.scratch.values()])
    programs = batch * kv_heads * group
    return pl.pallas_call(
        named, name=kernel.func.__name__, out_shape=[result for _, result in operands.results.values()],
        grid_spec=specs, interpret=interpret,
        cost_estimate=pl.CostEstimate(flops=programs * cost[0], transcendentals=programs * cost[1],
                                      bytes_accessed=operands.num_bytes()),
        compiler_params=pltpu.CompilerParams(dimension_semantics=tuple(semantics), vmem_limit_bytes=VMEM_LIMIT_BYTES),
    )(place, *(array for _, array in operands.inputs.values()))


# Pallas calls `index` for each step of the grid, and copies the block that it names into VMEM, unless the step before
# named the same. So the query heads of a group, which follow one another, fetch the keys of a whole sequence once.
def _block(kind, array, group, segment, first_step):
    """Returns the pl.BlockSpec of an input or a result, see Operands and run."""
    side, _, what = kind.partition(" ")
    is_sums = what.startswith("sums")
    is_stack = array.ndim == (5 if is_sums else 4)

    def index(b, h, g, *rest):
        *step, place = rest

        def head():
            return h if side == "k" else h * group + g

        def at():
            return place[first_step + step[0]] if step else 0

        layer = [place[0]] if is_stack else []
        if what == "table":
            return 0, at()
        if is_sums:
            return *layer, b, head(), 0, at()
        return *layer, b, at(), head()

    if what == "table":
        shape = HEAD_DIM, segment
    elif is_sums:
        shape = 1, 1, 1, segment
    else:
        shape = 1, segment, HEAD_DIM
    return pl.BlockSpec((*[1] * is_stack, *shape), index)


def forward_results(q):
    """The Operands.results of a forward kernel on the stack q: attention's output and the logarithms of its sums."""
    _, batch, length, width = q.shape
    return {"out": ("q head", jax.ShapeDtypeStruct(q.shape[1:], q.dtype)),
            "log_sums": ("q sums", jax.ShapeDtypeStruct(log_sums_shape(batch, length, width), jnp.float32))}


def backward_results(q, k, v):
    """The Operands.results of a backward kernel: the gradients of q, k and v."""
    return {"dq": ("q head", jax.ShapeDtypeStruct(q.shape[1:], q.dtype)),
            "dk": ("k head", jax.ShapeDtypeStruct(k.shape[1:], q.dtype)),
            "dv": ("k head", jax.ShapeDtypeStruct(v.shape[1:], q.dtype))}


def forward_scratch(positions, dtype):
    """The scratch of pallas_short.Outputs."""
    return {"q_t": ((HEAD_DIM, positions), dtype),  # (128, T): rotated and normalised, as k
            "k_normed": ((positions, HEAD_DIM), dtype),
            "v_t": ((HEAD_DIM, positions), dtype)}


def backward_scratch(positions, dtype):
    """The scratch of pallas_short.Scores: operands of the products, (T, 128), or (128, T) with the suffix _t, and the
    norms."""
    rows = positions, HEAD_DIM
    columns = HEAD_DIM, positions
    return {"q_normed": (rows, dtype), "q_t": (columns, dtype),
            "k_normed": (rows, dtype), "k_t": (columns, dtype),
            "v_t": (columns, dtype), "d_out_t": (columns, dtype),
            "normed_t": ((2, *columns), jnp.float32),  # of q and of k, before rounding
            "scales": ((2, 1, positions), jnp.float32),  # their reciprocal root mean squares
            "log_sum_columns": (rows, jnp.float32)}  # 128 equal ones
