"""The kernels `chunked` and `flash` on XLA: layers as a loop, and Pallas attention. xla_loss.py has their loss.

Their backward passes add to the `main_grad` of the weights in place (see Decoder.create_main_grads).
"""
from functools import cache, partial

import torch
import torch.nn.functional as F

from nanochat.common import BadInput
from nanochat.device import tpu
from nanochat.device.xla_ops import import_jax, jax_call, row_major_matmul, take
from nanochat.kernels import plain, xla_loss
from nanochat.kernels.attention_tiles import HEAD_DIM, MAX_WHOLE
from nanochat.kernels.gpt_layer import AttentionByHand, How, layer_for_loop
from nanochat.kernels.layer_loop import run_layers
from nanochat.kernels.products import Halves, Int8, MlpKernels, Plain
from nanochat.kernels.sharded import WHOLE
from nanochat.model.layers import Kernels, apply_rotary, norm, split_heads


def get_kernels(name, interpret, sharding, chunk_tokens, products):
    """Returns the Kernels `chunked` or `flash`. interpret: Pallas kernels run as plain XLA operations, on a CPU too:
    the numbers are right, but it is slow. sharding: how the ranks divide the weights. chunk_tokens: tokens whose logits
    the loss holds at a time. products: Plain or Int8, of the layers in training. Raises BadInput."""
    if sharding.tensor_groups and products == Int8():
        raise BadInput("--products=int8 rounds the rows of whole weights, and --mesh_tensor divides them: use "
                       "--mesh_tensor=1")
    matrix_unit, max_whole = _options_of_chip()
    halves = Halves(products, products)
    if name == "flash":
        import_jax()
        if products == Int8():
            halves = _with_kernels(interpret, matrix_unit)

    def run_all(options, x, stacks, windows, rotary, recompute, values):
        sizes = ()
        of_layers = None
        if windows:
            sizes, of_layers = windows
        attention = PYTORCH_ATTENTION
        if name == "flash":
            attention = _pallas_attention(interpret, matrix_unit, max_whole, sizes)
        in_layer = halves if torch.is_grad_enabled() else Halves()
        how = How(options, attention, sharding, in_layer)
        layer = layer_for_loop(how)
        if name == "flash" and layer.by_hand:
            rotary = _pallas_tables(*rotary)
        if values and sharding.tensor_groups:
            # This rank's heads of what every rank along tensor has looked up.
            values = values._replace(array=sharding.own_part(values.array))
        return run_layers(layer, x, stacks, of_layers, rotary, recompute == "all", values)

    def embedding(ids, table, dtype):
        return xla_loss.Embedding.apply(ids, table, dtype, sharding)

    return Kernels(name, plain.attention, partial(xla_loss.cross_entropy, chunk_tokens, sharding),
                   partial(xla_loss.mean_loss, chunk_tokens, sharding, halves.attention), embedding, recompute=None,
                   run_layers=run_all, whole=None if sharding == WHOLE else sharding.whole,
                   round_weights=halves.round_weights if halves.are_rounded else None, times=_Times.apply)


# Attention, see gpt_layer.AttentionByHand


def _attend(q, k, v, window, cos, sin):
    """Attention's output (B, T, H × head_dim) from the products (B, T, heads × head_dim) of one layer."""
    rotary = cos.to(q.dtype), sin.to(q.dtype)
    head_dim = 2 * cos.size(1)
    q = norm(apply_rotary(split_heads(q, head_dim), *rotary))
    k = norm(apply_rotary(split_heads(k, head_dim), *rotary))
    return plain.attention(q, k, split_heads(v, head_dim), window).transpose(1, 2).flatten(2)


def _forward_of_layer(q, k, v, index, window, *tables):
    return _attend(take(q, index), take(k, index), take(v, index), window, *tables), None


def _backward_of_layer(q, k, v, index, window, log_sums, d_y, *tables):
    with torch.enable_grad():
        inputs = [take(stack, index).detach().requires_grad_() for stack in (q, k, v)]
        return torch.autograd.grad(_attend(*inputs, window, *tables), inputs, d_y)


PYTORCH_ATTENTION = AttentionByHand(_forward_of_layer, _backward_of_layer)


def _pallas_tables(cos, sin):
    """Returns the rotary tables in the layout of the Pallas kernels, (128, T)."""
    return torch.cat([cos.t(), cos.t()]), torch.cat([sin.t(), -sin.t()])


def _options_of_chip():
    """Returns matrix_unit and max_whole (see pallas_attention) of this machine's TPU, or of the preflight's target."""
    accelerator = tpu.detect_accelerator()
    if not accelerator:
        return 128, MAX_WHOLE
    found = tpu.parse_accelerator(accelerator).tpu
    return found.matrix_unit, found.max_whole or MAX_WHOLE


# Compiled loops are cached by their Layer, a Layer by its How, and JAX's functions by their partial. New objects at
# each call would build and trace them again.
_cached_partial = cache(partial)


@cache
def _pallas_attention(interpret, matrix_unit, max_whole, windows):
    from nanochat.kernels import pallas_attention, pallas_parts

    def call(function, index, window, *arrays, **options):
        options |= {"windows": windows, "matrix_unit": matrix_unit, "max_whole": max_whole, "interpret": interpret}
        place = torch.stack([index, torch.zeros_like(index) if window is None else window])
        return jax_call(_cached_partial(function, **options), place, *arrays)

    def forward(q, k, v, index, window, *tables, **options):
        return call(pallas_attention.forward, index, window, q, k, v, *tables, **options)

    def backward(q, k, v, index, window, log_sums, d_y, *tables, **options):
        return call(pallas_attention.backward, index, window, q, k, v, log_sums, d_y, *tables, **options)

    def of_heads(q, k, v, window):
        length, size = q.shape[2:]
        if window is not None or size > HEAD_DIM or length > max_whole or length % (1 if interpret else 128):
            return plain.attention(q, k, v, window)
        heads = pallas_parts.Heads(eps=None, scale=size**-0.5)
        return _HeadsOfAnySize.apply(q, k, v, partial(forward, heads=heads), partial(backward, heads=heads))

    matmul = torch.matmul if interpret else row_major_matmul
    return AttentionByHand(forward, backward, pallas_parts.log_sums_shape, of_heads, matmul)


# A model without QK-norm. Its rotation is done, and heads of less than 128 get zeros: they cost no product, because a
# matrix unit is 128 wide, or more.
class _HeadsOfAnySize(torch.autograd.Function):
    """Attention of q (B, H, T, D), rotated, with k and v, by Pallas kernels that find the maximum of each query's
    scores. by_columns, d_by_columns: as AttentionByHand's forward and backward."""

    @staticmethod
    def forward(ctx, q, k, v, by_columns, d_by_columns):
        ctx.backward_of = d_by_columns
        ctx.size = q.size(-1)
        index = torch.zeros((), dtype=torch.int32, device=q.device)
        table = torch.zeros(HEAD_DIM, q.size(2), device=q.device)  # of a rotation; not read
        stacks = [_in_columns(x)[None] for x in (q, k, v)]
        y, log_sums = by_columns(*stacks, index, None, table, table)
        ctx.save_for_backward(*stacks, log_sums[None], index, table)
        return _in_heads(y, ctx.size)

    @staticmethod
    def backward(ctx, d_y):
        *stacks, log_sums, index, table = ctx.saved_tensors
        gradients = ctx.backward_of(*stacks, index, None, log_sums, _in_columns(d_y), table, table)
        return *(_in_heads(gradient, ctx.size) for gradient in gradients), None, None


def _in_columns(x):
    """Returns x (B, H, T, D) as (B, T, H × 128), with zeros behind each head."""
    return F.pad(x.transpose(1, 2), (0, HEAD_DIM - x.size(-1))).flatten(2)


def _in_heads(x, size):
    """Returns x (B, T, H × 128) as (B, H, T, size)."""
    return split_heads(x, HEAD_DIM)[..., :size]


@cache
def _with_kernels(interpret, matrix_unit):
    """Returns the Halves of int8 products with Pallas kernels."""
    from nanochat.kernels import pallas_int8
    is_v6e = matrix_unit > 128
    arithmetic = {"arithmetic": "bfloat16" if is_v6e else "float32"}

    def call(function, index, *arrays, **options):
        return jax_call(_cached_partial(function, interpret=interpret, **options), index[None], *arrays)

    def tokens_of(stack):
        return stack.flatten(1, 2)

    def new_stack(x, shape):
        some = torch.zeros((), dtype=torch.int32, device=x.device)[None]
        return jax_call(_cached_partial(pallas_int8.new_stack, shape=shape, interpret=interpret), some)[0]

    def hidden(index, x, weight, stack):
        new, scale = call(pallas_int8.hidden, index, x.flatten(0, 1), weight.integers.t(), weight.scale.t(),
                          tokens_of(stack), **arithmetic)
        return new.view_as(stack), scale.view(x.shape[:2])

    def d_hidden(index, d, mlp_out, mlp_in, stack):
        found, scale = call(pallas_int8.d_hidden, index, d.flatten(0, 1), mlp_out.scale.t(), mlp_out.integers,
                            mlp_in.scale.t(), tokens_of(stack), **arithmetic)
        return found.view(stack.shape[1:]), scale.view(d.shape[:2])

    def by_tokens(index, small, factor, stack):
        return call(pallas_int8.by_tokens, index, small.flatten(0, 1), factor.flatten()[None], tokens_of(stack))[0]

    mlp = Int8(MlpKernels(pallas_int8.fits, new_stack, hidden, d_hidden, by_tokens))
    # On v6e, rounding for the other products takes longer than they save.
    return Halves(Plain() if is_v6e else Int8(), mlp)


class _Times(torch.autograd.Function):
    """See layers.Kernels."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x * weight

    @staticmethod
    def backward(ctx, d_out):
        x, = ctx.saved_tensors
        ctx.weight.main_grad.add_((d_out.float() * x.float()).flatten(0, -2).sum(0))
        return d_out * ctx.weight, None
