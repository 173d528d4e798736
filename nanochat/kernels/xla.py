"""The kernels `chunked` and `flash` on XLA: layers as a loop, and Pallas attention. Their loss is in xla_loss.py.

Their backward passes add to the `main_grad` of the weights in place (see GPT.create_main_grads).
"""
from functools import cache, partial

import torch

from nanochat.device import tpu
from nanochat.device.jax_import import import_jax
from nanochat.device.xla_ops import jax_call, row_major_matmul, take, use_device_of
from nanochat.kernels import plain, xla_loss
from nanochat.kernels.gpt_layer import AttentionByHand, How, gpt_layer_for_loop, tables_for_loop
from nanochat.kernels.layer_loop import run_layers
from nanochat.kernels.sharded import WHOLE
from nanochat.model.layers import NORM_EPS, Kernels, apply_rotary, norm, split_heads


def get_kernels(name, interpret, sharding, chunk_tokens):
    """Returns the Kernels `chunked` or `flash`. interpret: Pallas kernels run as plain XLA operations, which a CPU can
    do: the numbers are right, and it is slow. sharding: how the ranks divide the weights. chunk_tokens: tokens whose
    logits the loss holds at a time."""
    chip = _options_of_chip()
    if name == "flash":
        import_jax()

    def run_all(options, x, stacks, windows, rotary, recompute, values):
        sizes = windows.sizes if windows else ()
        attention = _pallas_attention(interpret, *chip, sizes) if name == "flash" else PYTORCH_ATTENTION
        how = How(options, attention, sharding, keeps_qkv=recompute != "qkv")
        if values and sharding.tensor_groups:
            width = sharding.whole_shape(stacks.attn_v).size(1)
            values = values._replace(array=_OfOwnHeads.apply(values.array, width, sharding))
        return run_layers(gpt_layer_for_loop(how), x, stacks, windows.of_layers if windows else None,
                          tables_for_loop(how, rotary), recompute == "all", values)

    def embedding(ids, table, dtype):
        return xla_loss.Embedding.apply(ids, table, dtype, sharding)

    return Kernels(name, plain.attention, partial(xla_loss.cross_entropy, chunk_tokens, sharding),
                   partial(xla_loss.mean_loss, chunk_tokens, sharding), embedding, recompute=None, run_layers=run_all,
                   whole=None if sharding == WHOLE else sharding.whole)


# -----------------------------------------------------------------------------
# Attention, see gpt_layer.AttentionByHand


def _attend(q, k, v, window, cos, sin):
    """Attention's output (B, T, H × head_dim) from the products (B, T, heads × head_dim) of one layer."""
    rotary, head_dim = (cos.to(q.dtype), sin.to(q.dtype)), 2 * cos.size(1)
    q, k = (norm(apply_rotary(split_heads(x, head_dim), *rotary)) for x in (q, k))
    return plain.attention(q, k, split_heads(v, head_dim), window).transpose(1, 2).flatten(2)


def _forward_of_layer(q, k, v, index, window, *tables):
    return _attend(*(take(stack, index) for stack in (q, k, v)), window, *tables), None


def _backward_of_layer(q, k, v, index, window, log_sums, d_y, *tables):
    with torch.enable_grad():
        inputs = [take(stack, index).detach().requires_grad_() for stack in (q, k, v)]
        return torch.autograd.grad(_attend(*inputs, window, *tables), inputs, d_y)


def _rotary_tables(cos, sin):
    return cos, sin


PYTORCH_ATTENTION = AttentionByHand(_forward_of_layer, _backward_of_layer, _rotary_tables)


def _pallas_tables(cos, sin):
    """The rotary tables as the Pallas kernels take them, (128, T)."""
    return torch.cat([cos.t(), cos.t()]), torch.cat([sin.t(), -sin.t()])


def _options_of_chip():
    """Returns matrix_unit and max_whole (see pallas_attention) of this machine's TPU, or of that for which it compiles
    (preflight)."""
    if accelerator := tpu.detect_accelerator():
        found = tpu.parse_accelerator(accelerator).tpu
        return found.matrix_unit, found.max_whole
    return 128, None


# The loops over the layers are kept under their Layer, which is kept under its How. Another object at each call would
# build, and trace, them all again.
@cache
def _pallas_attention(interpret, matrix_unit, max_whole, windows):
    from nanochat.kernels import pallas_attention, pallas_parts

    def call(function, index, window, *arrays):
        options = dict(eps=NORM_EPS, windows=windows, matrix_unit=matrix_unit, max_whole=max_whole,
                       interpret=interpret)
        place = torch.stack([index, torch.zeros_like(index) if window is None else window])
        return jax_call(_with_options(function, **options), place, *arrays)

    def forward(q, k, v, index, window, *tables):
        return call(pallas_attention.forward, index, window, q, k, v, *tables)

    def backward(q, k, v, index, window, log_sums, d_y, *tables):
        return call(pallas_attention.backward, index, window, q, k, v, log_sums, d_y, *tables)

    return AttentionByHand(forward, backward, _pallas_tables, pallas_parts.log_sums_shape,
                           *([] if interpret else [row_major_matmul]))


@cache
def _with_options(function, **options):
    """functools.partial, and the same object whenever the options are the same: programs are kept under it."""
    return partial(function, **options)


class _OfOwnHeads(torch.autograd.Function):
    """Returns the columns (B, T, n × width) of this rank's heads, of what n layers add to attention's values, (B, T,
    n × C_kv), which every rank along tensor has looked up."""

    @staticmethod
    def forward(ctx, values, width, sharding):
        ctx.width, ctx.sharding = width, sharding
        return sharding.own_columns(values, width)

    @staticmethod
    def backward(ctx, d_own):
        use_device_of(d_own)
        return ctx.sharding.all_columns(d_own, ctx.width), None, None
