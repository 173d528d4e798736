"""The kernels `chunked` and `flash` on XLA: layers as a loop, Pallas attention, cross-entropy in chunks of tokens.

Their backward passes add to the `main_grad` of the weights in place (see GPT.create_main_grads).
"""
from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.nn.functional as F

from nanochat.device import tpu
from nanochat.device.jax_import import import_jax
from nanochat.device.xla_ops import jax_call, loop, row_major_matmul, take, use_device_of
from nanochat.kernels import distillation, plain
from nanochat.kernels.gpt_layer import AttentionByHand, How, gpt_layer_for_loop
from nanochat.kernels.layer_loop import run_layers
from nanochat.kernels.sharded import WHOLE, Sharding
from nanochat.model.layers import IGNORE_INDEX, NORM_EPS, Kernels, apply_rotary, norm, split_heads

CHUNK_TOKENS = 8192  # tokens whose logits are held at a time, in bf16: 8192 × 65,536 × 2 bytes = 1 GiB


def get_kernels(name, interpret, sharding):
    """Returns the Kernels `chunked` or `flash`. interpret: Pallas kernels run as plain XLA operations, which a CPU can
    do: the numbers are right, and it is slow. sharding: how the ranks divide the weights."""
    chip = _options_of_chip()
    if name == "flash":
        import_jax()

    def run_all(x, stacks, windows, rotary, key_shift, recompute, values):
        sizes, of_layers = windows or ((), None)
        attention = _pallas_attention(interpret, *chip, sizes) if name == "flash" else PYTORCH_ATTENTION
        tables = _pallas_tables(*rotary) if name == "flash" else rotary
        how = How(attention, sharding, recompute != "qkv", 2 * rotary[0].size(-1) if key_shift else 0)
        if values and sharding.tensor_groups:
            numbers, array = values
            values = numbers, _OfOwnHeads.apply(array, sharding.whole_shape(stacks.attn_v).size(1), sharding)
        return run_layers(gpt_layer_for_loop(how), x, stacks, of_layers, tables, recompute == "all", values)

    def mean_cross_entropy(hidden, head, targets, softcap):
        return _MeanCrossEntropy.apply(hidden, head, targets, softcap, sharding)

    def embedding(ids, table, dtype):
        return _Embedding.apply(ids, table, dtype, sharding)

    return Kernels(name, plain.attention, partial(_cross_entropy, sharding), mean_cross_entropy,
                   partial(_mean_distillation, sharding), embedding, recompute=None, run_layers=run_all,
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


PYTORCH_ATTENTION = AttentionByHand(_forward_of_layer, _backward_of_layer)


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

    return AttentionByHand(forward, backward, pallas_parts.log_sums_shape,
                           *([] if interpret else [row_major_matmul]))


@cache
def _with_options(function, **options):
    """functools.partial, and the same object whenever the options are the same: programs are kept under it."""
    return partial(function, **options)


# -----------------------------------------------------------------------------
# Embedding and loss


class _Embedding(torch.autograd.Function):

    @staticmethod
    def forward(ctx, ids, table, dtype, sharding):
        ctx.save_for_backward(ids)
        ctx.table, ctx.sharding = table, sharding
        table = sharding.gather(table)
        if not sharding.tensor_groups:
            return F.embedding(ids, table).to(dtype)
        rows, is_here = sharding.rows_here(ids, table.size(0))
        return sharding.sum(torch.where(is_here[..., None], F.embedding(rows, table).to(dtype), 0.0))

    @staticmethod
    def backward(ctx, d_out):
        ids, = ctx.saved_tensors
        ids, d_out, total, sharding = ids.flatten().long(), d_out.flatten(0, 1), ctx.table.main_grad, ctx.sharding
        if sharding != WHOLE:
            use_device_of(d_out)
        if sharding.tensor_groups:
            ids, is_here = sharding.rows_here(ids, total.size(0) * len(sharding.groups[0] if sharding.groups else [0]))
            d_out = torch.where(is_here[:, None], d_out, 0.0)
        if not sharding.groups:
            total.index_add_(0, ids, d_out.float())
        else:
            whole = total.new_zeros(len(sharding.groups[0]) * total.size(0), total.size(1))
            total.add_(sharding.scatter(whole.index_add_(0, ids, d_out.float()).to(d_out.dtype)))
        return None, None, None, None


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


def _chunks(x, chunk_tokens=CHUNK_TOKENS):
    """Returns x (N, …) as a stack of chunks of equal size, (N / size, size, …), of at most `chunk_tokens` tokens."""
    tokens = x.size(0)
    size = max(size for size in range(1, min(tokens, chunk_tokens) + 1) if tokens % size == 0)
    return x.view(-1, size, *x.shape[1:])


def _losses(hidden, head, targets, softcap, sharding, first_row=0):
    """Returns the losses (N,) of hidden (N, C), and what their gradients need: `weights` (N, V), `of_target` (N, 1) and
    `total` (N, 1), of this rank's rows of the head, which begin with `first_row`.

    A loss's gradient with respect to the logits is (softmax - one-hot) × slope, where slope is the derivative of the
    softcap. Times `total`, the sum of a row's exponentials, it is exponentials × slope, and (exponential - total) ×
    slope at the target. The first is known as soon as the logits are, so the product that makes them writes it, and
    nothing else of this size: `weights`, with -1 at the target, where `of_target` belongs.

    A bounded softcap makes it safe to sum exponentials in fp32 without subtracting a maximum, which would cost another
    pass over the logits.
    """
    logits, slope = _capped(F.linear(hidden.float(), head.float()), softcap)  # a product in bfloat16 rounds its result
    largest = 0.0 if 0 < softcap <= 60 else sharding.largest(logits.max(dim=-1, keepdim=True).values)
    exponentials = torch.exp(logits - largest)
    total = exponentials.sum(dim=-1, keepdim=True)
    rows = sharding.count_from(first_row, targets)
    is_target = torch.arange(head.size(0), device=head.device) == rows[:, None]
    picked = torch.where(is_target, logits, 0.0).sum(dim=-1, keepdim=True)
    total, picked = sharding.sums(total, picked)
    losses = (torch.log(total) + largest - picked)[:, 0]
    losses = torch.where(targets == IGNORE_INDEX, 0.0, losses)
    weights = torch.where(is_target, -1.0, exponentials * slope).to(hidden.dtype)
    slope_of_target = 1 - (picked / softcap).square() if softcap else 1.0
    of_target = (torch.exp(picked - largest) - total) * slope_of_target
    return losses, weights, of_target.to(hidden.dtype), total


def _capped(logits, softcap):
    """Returns softcapped(logits, softcap) and its derivative there, which is never negative: a chip's tanh may exceed 1
    by rounding."""
    if not softcap:
        return logits, 1.0
    tanh = torch.tanh(logits / softcap)
    return softcap * tanh, (1 - tanh.square()).clamp(min=0.0)


def _with_targets(weights, of_target):
    """Returns what `_losses` gives as one tensor."""
    return torch.where(weights < 0, of_target, weights)


@dataclass(frozen=True)
class _LossBody:
    softcap: float
    sharding: Sharding

    def __call__(self, index, carry, read, write, constants):
        head, *first_row = constants
        return (), (_losses(read[0], head, read[1], self.softcap, self.sharding, *first_row)[0],)


def _cross_entropy(sharding, hidden, head, targets, softcap):
    constants = sharding.head(head, hidden.dtype)
    chunks = _chunks(hidden), _chunks(targets.long())
    losses = torch.zeros(chunks[1].shape, device=hidden.device)
    _, (losses,) = loop(_LossBody(softcap, sharding), (), chunks, [losses], constants)
    return losses.flatten()


@dataclass(frozen=True)
class _GradientBody:
    softcap: float
    num_tokens: int
    sharding: Sharding

    def __call__(self, index, carry, read, write, constants):
        import torch_xla.core.xla_model as xm
        (loss, d_head), (hidden, targets), (head, *first_row) = carry, read, constants
        losses, weights, of_target, total = _losses(hidden, head, targets, self.softcap, self.sharding, *first_row)
        xm.optimization_barrier_([weights])  # else XLA keeps the logits, and both products compute exponentials again
        scale = torch.where(targets == IGNORE_INDEX, 0.0, 1 / self.num_tokens)[:, None] / total
        # Twice, because a result of which both products need the same copy would be written to HBM first.
        d_head = d_head + (_with_targets(weights.t(), of_target.t()) @ (hidden * scale).to(hidden.dtype)).float()
        d_hidden = (_with_targets(weights, of_target) @ head) * scale
        return (loss + losses.sum() / self.num_tokens, d_head), (d_hidden.to(hidden.dtype),)


class _MeanCrossEntropy(torch.autograd.Function):
    """The mean loss. Its gradients are computed in the forward pass, chunk by chunk, while what _losses gives is in
    memory."""

    @staticmethod
    def forward(ctx, hidden, head, targets, softcap, sharding):
        body = _GradientBody(softcap, hidden.size(0), sharding)
        chunks = _chunks(hidden), _chunks(targets.long())
        constants = sharding.head(head, hidden.dtype)
        sums = torch.zeros((), device=hidden.device), torch.zeros_like(constants[0], dtype=torch.float32)
        if len(chunks[0]) == 1:
            (loss, d_head), (d_hidden,) = body(None, sums, [chunk[0] for chunk in chunks], None, constants)
        else:
            (loss, d_head), (d_hidden,) = loop(body, sums, chunks, [torch.zeros_like(chunks[0])], constants)
        if sharding.groups:
            d_head = sharding.scatter(d_head.to(hidden.dtype))
        ctx.save_for_backward(sharding.sum(d_hidden.view_as(hidden)), d_head)
        ctx.head = head
        return loss

    @staticmethod
    def backward(ctx, d_loss):
        d_hidden, d_head = ctx.saved_tensors
        ctx.head.main_grad.add_(d_head * d_loss)
        return d_hidden * d_loss.to(d_hidden.dtype), None, None, None, None


def _mean_distillation(sharding, hidden, head, targets, softcap, teaching):
    """See layers.Kernels. Chunks are half as large, because there are logits of two models."""
    return distillation.MeanLoss.apply(hidden, head, targets, softcap, teaching, _half_chunks, loop, True, sharding)


def _half_chunks(x):
    return _chunks(x, CHUNK_TOKENS // 2)
