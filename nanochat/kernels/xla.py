"""The kernels `chunked` and `flash` on XLA: layers as a loop, and Pallas attention. xla_loss.py has their loss.

Their backward passes add to the `main_grad` of the weights in place (see GPT.create_main_grads).
"""
from functools import cache, partial

import torch

from nanochat.common import BadInput
from nanochat.device import tpu
from nanochat.device.xla_ops import import_jax, jax_call, row_major_matmul, take
from nanochat.kernels import plain, xla_loss
from nanochat.kernels.attention_tiles import MAX_WHOLE
from nanochat.kernels.gpt_layer import AttentionByHand, How, layer_for_loop
from nanochat.kernels.layer_loop import run_layers
from nanochat.kernels.products import Plain
from nanochat.kernels.sharded import WHOLE
from nanochat.model.layers import NORM_EPS, Kernels, apply_rotary, norm, split_heads


def get_kernels(name, interpret, sharding, chunk_tokens, products):
    """Returns the Kernels `chunked` or `flash`. interpret: Pallas kernels run as plain XLA operations, on a CPU too:
    the numbers are right, but it is slow. sharding: how the ranks divide the weights. chunk_tokens: tokens whose logits
    the loss holds at a time. products: Plain or Int8, of the layers in training. Raises BadInput."""
    if sharding.tensor_groups and products != Plain():
        raise BadInput("--products=int8 rounds the rows of whole weights, and --mesh_tensor divides them: use "
                       "--mesh_tensor=1")
    chip = _options_of_chip()
    if name == "flash":
        import_jax()

    def run_all(options, x, stacks, windows, rotary, recompute, values):
        sizes = ()
        of_layers = None
        if windows:
            sizes, of_layers = windows
        attention = PYTORCH_ATTENTION
        if name == "flash":
            attention = _pallas_attention(interpret, *chip, sizes)
        in_layer = products if torch.is_grad_enabled() else Plain()
        how = How(options, attention, sharding, in_layer)
        layer = layer_for_loop(how)
        if name == "flash" and layer.by_hand:
            rotary = _pallas_tables(*rotary)
        if values and sharding.tensor_groups:
            width = sharding.whole_shape(stacks.attn_v).size(1)
            # This rank's heads of what every rank along tensor has looked up.
            values = values._replace(array=sharding.own_part(values.array, width))
        return run_layers(layer, x, stacks, of_layers, rotary, recompute == "all", values)

    def embedding(ids, table, dtype):
        return xla_loss.Embedding.apply(ids, table, dtype, sharding)

    return Kernels(name, plain.attention, partial(xla_loss.cross_entropy, chunk_tokens, sharding),
                   partial(xla_loss.mean_loss, chunk_tokens, sharding, products), embedding, recompute=None,
                   run_layers=run_all, whole=None if sharding == WHOLE else sharding.whole,
                   round_weights=products.round_weights, times=_Times.apply)


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

    def call(function, index, window, *arrays):
        options = {"eps": NORM_EPS, "windows": windows, "matrix_unit": matrix_unit, "max_whole": max_whole,
                   "interpret": interpret}
        place = torch.stack([index, torch.zeros_like(index) if window is None else window])
        return jax_call(_cached_partial(function, **options), place, *arrays)

    def forward(q, k, v, index, window, *tables):
        return call(pallas_attention.forward, index, window, q, k, v, *tables)

    def backward(q, k, v, index, window, log_sums, d_y, *tables):
        return call(pallas_attention.backward, index, window, q, k, v, log_sums, d_y, *tables)

    matmul = torch.matmul if interpret else row_major_matmul
    return AttentionByHand(forward, backward, pallas_parts.log_sums_shape, matmul)


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
