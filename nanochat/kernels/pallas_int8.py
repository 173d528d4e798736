"""The MLP's products of 8-bit integers as Pallas kernels, which round between the products: no pass over memory rounds.

A kernel computes blocks of tokens. It finds the largest number of a row while the row is in VMEM. Each kernel computes
what a method of products.Int8 defines in plain PyTorch, up to factors of a token: the caller multiplies the scale of
the token's row with them. Scales of tokens are rows, (1, tokens): a column would take 128 times its memory.

`arithmetic` is the dtype in which numbers are rounded to the nearest: bfloat16 on v6e, whose vector units compute twice
as many of them, and float32 on v5e, which has no such units.
"""
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from nanochat.kernels.attention_tiles import pipeline
from nanochat.kernels.int8 import COLUMN_STEP, LARGEST, ROW_STEP

NEAR_LARGEST = 126  # in bfloat16, a row's largest number times the reciprocal may be one more
SMALLEST = 1e-28  # the largest number of a row of zeros counts as this
BITS = 14  # of a chance
# Plus this, a number from -127 to 128 has its fraction in the last BITS bits of an fp32, and before them the lowest 8
# bits of the integer below it.
OFFSET = 768.0
PART = 256  # tokens whose product the matrix units compute while the vector units round those before
TURN = 8  # rows of the chances by which a part begins later than the one before
TURNS = 32  # then the places begin again


def fits(tokens, width):
    """Returns whether the kernels take so many tokens, and stacks of this width, whose blocks must fit into VMEM."""
    return tokens % PART == 0 and width % 128 == 0 and width <= 6144


def new_stack(some, *, shape, interpret=False):
    """Returns an int8 stack without writing to its memory, because zeros for all layers would take 0.7 ms. some: any
    array: an operation of torch_xla needs an argument."""
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(lambda some, stack: None, name="new_stack", in_specs=[anywhere], out_specs=anywhere,
                          out_shape=jax.ShapeDtypeStruct(shape, jnp.int8), interpret=interpret,
                          cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=0))(some)


def dot(a, b):
    """Returns the exact sums a · b, fp32, of int8 (m, k) and (k, n)."""
    return jax.lax.dot_general(a, b, (((1,), (0,)), ((), ())), preferred_element_type=jnp.int32).astype(jnp.float32)


def _reciprocal(of_row, largest=LARGEST):
    return largest / jnp.maximum(of_row.astype(jnp.float32), SMALLEST)


def rounded(x, is_positive=False):
    """Returns the rows of x as int8, each number rounded to the nearest, and their scales, fp32 (m, 1)."""
    if x.dtype != jnp.bfloat16:
        return dithered(x, OFFSET + 0.5)
    of_row = jnp.max(x if is_positive else jnp.abs(x), axis=1, keepdims=True)
    reciprocal = _reciprocal(of_row, NEAR_LARGEST).astype(x.dtype)
    return jnp.round(x * reciprocal).astype(jnp.int8), 1 / reciprocal.astype(jnp.float32)


def dithered(x, chances):
    """Returns the rows of x, fp32, as int8, each number plus its chance rounded down, and their scales, fp32 (m, 1).
    chances: plus OFFSET, as of chances_of."""
    reciprocal = _reciprocal(jnp.max(jnp.abs(x), axis=1, keepdims=True))
    bits = jax.lax.bitcast_convert_type(x * reciprocal + chances, jnp.int32)
    return (bits >> BITS).astype(jnp.int8), 1 / reciprocal


def chances_of(rows, columns):
    """Returns chances, spread evenly over rows, columns and both (see int8.ROW_STEP), plus OFFSET: fp32 (rows,
    columns)."""
    row, column = (jnp.arange(count, dtype=jnp.int32) * round(step * 2**24)
                   for count, step in ((rows, ROW_STEP), (columns, COLUMN_STEP)))
    chances = (row[:, None] + column & 2**24 - 1) >> 24 - BITS
    return OFFSET + chances.astype(jnp.float32) / 2**BITS


def _chances(ref, number, rows, columns):
    """Returns those of part `number`."""
    return ref[pl.ds(pl.multiple_of(number % TURNS * TURN, TURN), rows), :columns]


def _as_row(column):
    """Returns (m, 1) as (1, m)."""
    return jnp.broadcast_to(column, (len(column), 128)).T[:1]


def _by_parts(tokens, *stages):
    """Calls each stage(n, rows, *what the stage before returned) for the rows of each part n of the tokens. A stage
    works on part n while the next one works on part n - 1: the compiler keeps the order of products."""
    results = {}

    def call(stage, n):
        results[n] = stage(n, slice(n * PART, (n + 1) * PART), *results.get(n, ()))

    pipeline(tokens // PART, [(delay, partial(call, stage)) for delay, stage in enumerate(stages)])


def _hidden_kernel(place, x, weight, weight_scale, _, squares, scale, *, arithmetic):
    def multiply(n, rows):
        integers, of_x = rounded(x[rows].astype(arithmetic))
        return dot(integers, weight[...]), of_x

    def finish(n, rows, product, of_x):
        h = jnp.maximum((product * weight_scale[...]).astype(arithmetic), 0)
        squares[0, rows], of_squares = rounded(h * h, is_positive=True)
        scale[:, rows] = _as_row(of_squares * of_x * of_x)

    _by_parts(len(x), multiply, finish)


def hidden(place, x, weight, weight_scale, stack, *, arithmetic, interpret=False):
    """Returns the stack of h² with that of a layer, and its scales (1, tokens), of h = relu(x · weight).

    place: int32 (1,), the layer; x (tokens, in); weight: int8 (in, out); weight_scale (1, out); stack: int8 (layers,
    tokens, out)."""
    _, tokens, width = stack.shape
    block = _block(tokens, width)
    blocks = [_tokens(block, x.shape[1]), _whole(weight), _whole(weight_scale), pl.BlockSpec(memory_space=pl.ANY)]
    return _call(partial(_hidden_kernel, arithmetic=arithmetic), (tokens // block,), blocks,
                 [_of_layer(block, width), _row(block)], [stack, _scales(tokens)], 2 * tokens * weight.size,
                 (x, weight, stack[:1]), interpret, _vmem_mib(width), {4: 0})(place, x, weight, weight_scale, stack)


def _d_hidden_kernel(place, d, out_scale, weight, in_scale, squares, chances, found, scale, *, arithmetic):
    before = pl.program_id(0) * (len(d) // PART)  # parts

    def multiply(n, rows):
        chance = _chances(chances, before + n, PART, d.shape[1])
        integers, of_d = dithered(d[rows].astype(jnp.float32) * out_scale[...], chance)
        return dot(integers, weight[...]), of_d

    def finish(n, rows, product, of_d):
        # x × rsqrt(x) takes fewer operations than the root, which must know 0 and infinity.
        whole = squares[0, rows].astype(arithmetic)
        h = whole * jax.lax.rsqrt(jnp.maximum(whole, 1))
        chance = _chances(chances, before + n, *h.shape)
        found[rows], of_found = dithered(product * in_scale[...] * h.astype(jnp.float32), chance)
        scale[:, rows] = _as_row(of_found * of_d)

    _by_parts(len(d), multiply, finish)


def d_hidden(place, d, out_scale, weight, in_scale, stack, *, arithmetic, interpret=False):
    """Returns int8 (tokens, width) and its scales (1, tokens): d times out_scale, times the weight, times in_scale and
    the root of the layer's integers h².

    place: int32 (1,), the layer; d (tokens, out); out_scale (1, out); weight: int8 (out, width); in_scale (1, width);
    stack: int8 (layers, tokens, width)."""
    _, tokens, width = stack.shape
    block = _block(tokens, width)
    chances = chances_of(PART + (TURNS - 1) * TURN, width)
    blocks = [_tokens(block, d.shape[1]), _whole(out_scale), _whole(weight), _whole(in_scale), _of_layer(block, width),
              _whole(chances)]
    return _call(partial(_d_hidden_kernel, arithmetic=arithmetic), (tokens // block,), blocks,
                 [_tokens(block, width), _row(block)], [stack[0], _scales(tokens)], 2 * tokens * weight.size,
                 (d, weight, stack[:2], chances), interpret, _vmem_mib(width))(
                     place, d, out_scale, weight, in_scale, stack, chances)


def _by_tokens_kernel(place, small, factor, large, chances, result, total):
    step = pl.program_id(1)
    chance = _chances(chances, step, small.shape[1], len(small))
    integers, scale = dithered(small[...].T.astype(jnp.float32) * factor[...], chance)
    so_far = jnp.where(step > 0, total[...], 0) + dot(integers, large[0]) * scale
    total[...] = so_far
    # At every step, because the last one alone would be a branch, in which no product overlaps with it.
    result[...] = so_far.astype(result.dtype)


def by_tokens(place, small, factor, stack, *, interpret=False):
    """Returns the sum over the tokens of (small × factor)ᵀ · the layer's integers, (width of small, of the stack), in
    the dtype of small. The first factor is dithered, with a scale for each column of a block of tokens.

    place: int32 (1,), the layer; small (tokens, n); factor (1, tokens); stack: int8 (layers, tokens, m)."""
    _, tokens, width = stack.shape
    rows = small.shape[1]
    block = _block(tokens, rows, largest=2048)
    columns = width
    while rows * columns > 2**22 and columns % 256 == 0:  # their sums take 16 MiB at most
        columns //= 2
    chances = chances_of(rows + (TURNS - 1) * TURN, block)
    blocks = [pl.BlockSpec((block, rows), lambda j, i, place: (i, 0)),
              pl.BlockSpec((1, block), lambda j, i, place: (0, i)),
              pl.BlockSpec((1, block, columns), lambda j, i, place: (place[0], i, j)), _whole(chances)]
    result = jax.ShapeDtypeStruct((rows, width), small.dtype)
    return _call(_by_tokens_kernel, (width // columns, tokens // block), blocks,
                 [pl.BlockSpec((rows, columns), lambda j, i, place: (0, j))], [result], 2 * tokens * rows * width,
                 (small, stack[:1], result), interpret, 96, scratch=[pltpu.VMEM((rows, columns), jnp.float32)])(
                     place, small, factor, stack, chances)[0]


# Blocks: of some tokens, of a layer in a stack, the scales of tokens, and arrays that every step reads.


def _block(tokens, width, largest=1024):
    """Returns how many tokens a step computes: as many as divide all tokens, fewer if they are wide."""
    block = PART
    while block < min(largest, 2**22 // width) and tokens % (2 * block) == 0:
        block *= 2
    return block


def _vmem_mib(width):
    return 64 if width <= 4096 else 96


def _tokens(block, width):
    return pl.BlockSpec((block, width), lambda i, place: (i, 0))


def _of_layer(block, width):
    return pl.BlockSpec((1, block, width), lambda i, place: (place[0], i, 0))


def _row(block):
    return pl.BlockSpec((1, block), lambda i, place: (0, i))


def _whole(array):
    return pl.BlockSpec(array.shape, lambda *_: (0,) * array.ndim)


def _scales(tokens):
    return jax.ShapeDtypeStruct((1, tokens), jnp.float32)


def _call(kernel, grid, in_blocks, out_blocks, results, flops, touched, interpret, vmem_mib, aliases=None,
          scratch=()):
    """Returns the pallas_call of a kernel whose first operand chooses the layer. touched: arrays of the sizes that it
    reads and writes in HBM. vmem_mib: what it may take of VMEM; XLA keeps other arrays in the rest."""
    specs = pltpu.PrefetchScalarGridSpec(num_scalar_prefetch=1, grid=grid, in_specs=in_blocks, out_specs=out_blocks,
                                         scratch_shapes=scratch)
    return pl.pallas_call(
        kernel, name=getattr(kernel, "func", kernel).__name__, grid_spec=specs, interpret=interpret,
        out_shape=[jax.ShapeDtypeStruct(result.shape, result.dtype) for result in results],
        input_output_aliases=aliases or {},
        cost_estimate=pl.CostEstimate(flops=flops, transcendentals=0, bytes_accessed=sum(
            array.size * array.dtype.itemsize for array in touched)),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",) * len(grid),
                                             vmem_limit_bytes=vmem_mib * 2**20))
