"""The cycles of a Tiny Recursive Model. On XLA they are loops of the program, and so is the backward pass.

Autograd would unroll the last cycle, and the program would grow with the recursions. Here a loop over the applications
of the network has a loop over its layers in it. The forward pass puts what the backward pass needs into stacks, with a
slot for each layer of each application of the last cycle. The backward pass differentiates the layer as it stands, but
computes none of the products again: in their place it takes what was kept.
"""
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch

from nanochat.device.xla_ops import loop, put, take
from nanochat.model.layers import NORM_EPS


def keep_nothing(tensor):
    """What a layer calls `keep` where autograd keeps what it needs, or where nothing has a gradient."""
    return tensor


def norm(x, keep):
    """RMSNorm without parameters, over the last dimension. Its backward pass needs what it keeps, and x no more."""
    with torch.no_grad():
        scale = keep(torch.rsqrt(x.float().square().mean(-1) + NORM_EPS))
        normed = keep((x.float() * scale[..., None]).to(x.dtype))
    return _Norm.apply(x, normed, scale)


class _Norm(torch.autograd.Function):

    @staticmethod
    def forward(ctx, x, normed, scale):
        ctx.save_for_backward(normed, scale)
        return normed.view_as(normed)

    @staticmethod
    def backward(ctx, d_out):
        normed, scale = (tensor.float() for tensor in ctx.saved_tensors)
        d_x = scale[..., None] * (d_out.float() - normed * (normed * d_out.float()).mean(-1, keepdim=True))
        return d_x.to(d_out.dtype), None, None


def run_cycles(layer, x, y, z, stacks, tables, recursions, cycles):
    """Returns y and z (B, P, C) after so many cycles. Only the last one has a gradient, and it ends at the y and z with
    which this cycle begins. The returned z has none.

    layer(x, weights, tables, keep) -> (B, P, C): differentiable; an equal object at every call. weights: its slices of
        `stacks`. What is worth keeping for its backward pass it passes through `keep`, which returns the same values
    stacks: a NamedTuple of weights, each (layers, …), fp32; tables: further tensors, which have no gradient
    """
    if x.device.type == "xla":
        return _Cycles.apply(x, y, z, tables, layer, recursions, cycles, torch.is_grad_enabled(), type(stacks), *stacks)
    has_gradient = torch.is_grad_enabled()
    for number in range(cycles):
        y, z = y.detach(), z.detach()
        with torch.set_grad_enabled(has_gradient and number == cycles - 1):
            for _ in range(recursions):
                z = _network(layer, z + y + x, stacks, tables)
            y = _network(layer, y + z, stacks, tables)
    return y, z.detach()


def _network(layer, x, stacks, tables):
    for weights in zip(*(stack.unbind(0) for stack in stacks), strict=True):
        x = layer(x, type(stacks)(*weights), tables, keep_nothing)
    return x


class _Cycles(torch.autograd.Function):

    @staticmethod
    def forward(ctx, x, y, z, tables, layer, recursions, cycles, is_training, weights_type, *stacks):
        weights = weights_type(*(stack.detach().to(x.dtype) for stack in stacks))
        body = _Application(layer, weights_type, len(tables), recursions)

        def run(cycles, *carry):
            counter = torch.empty(cycles * (recursions + 1), device=x.device)
            return loop(body, carry, (counter,), (), (x, *tables, *weights))[0]

        state = torch.stack([z, y])
        first = cycles - 1 if is_training else cycles
        if first:
            state, = run(first, state)
        if is_training:
            slots = (recursions + 1) * len(weights[0])
            kept = _kept_shapes(layer, tuple(x.shape), weights_type(*(tuple(w.shape[1:]) for w in weights)),
                                  tuple(tuple(table.shape) for table in tables), x.dtype)
            state, *kept = run(1, state, *(x.new_zeros(slots, *shape, dtype=dtype) for shape, dtype in kept))
            ctx.save_for_backward(*kept, *tables, *weights)
            ctx.others = layer, weights_type, len(kept), len(tables), recursions
        z, y = state.unbind(0)
        ctx.mark_non_differentiable(z)
        return y, z

    @staticmethod
    def backward(ctx, d_y, _):
        layer, weights_type, num_kept, num_tables, recursions = ctx.others
        sums = [torch.zeros_like(stack, dtype=torch.float32) for stack in ctx.saved_tensors[num_kept + num_tables:]]
        body = _BackwardApplication(layer, weights_type, num_kept, num_tables, recursions)
        counter = torch.empty(recursions + 1, device=d_y.device)
        (_, d_x, *sums), _ = loop(body, (d_y, torch.zeros_like(d_y), *sums), (counter,), (), ctx.saved_tensors,
                                  reverse=True)
        return d_x, *[None] * 8, *sums


@dataclass(frozen=True)
class _Application:
    """Iteration i is application i % (recursions + 1) of the network in its cycle: the last one updates the answer."""
    layer: Callable
    weights_type: type
    num_tables: int
    recursions: int

    def __call__(self, index, carry, read, write, constants):
        (state, *kept), (x, *rest) = carry, constants
        tables, weights = rest[:self.num_tables], rest[self.num_tables:]
        is_answer = index % (self.recursions + 1) == self.recursions
        body = _Layer(self.layer, self.weights_type, len(weights[0]))
        x = state[0] + state[1] + torch.where(is_answer, 0, x)
        (out, *kept), _ = loop(body, (x, *kept), weights, (), (index, *tables))
        return (put(state, is_answer.int(), out), *kept), ()


@dataclass(frozen=True)
class _Layer:
    layer: Callable
    weights_type: type
    layers: int

    def __call__(self, index, carry, read, write, constants):
        (x, *kept), (application, *tables) = carry, constants
        slot, new = application * self.layers + index, []

        def keep(tensor):
            new.append(put(kept[len(new)], slot, tensor, use_from_memory=True))
            return take(new[-1], slot)

        keep = keep if kept else keep_nothing
        return (self.layer(keep(x), self.weights_type(*read), tables, keep), *new), ()


@dataclass(frozen=True)
class _BackwardApplication:
    layer: Callable
    weights_type: type
    num_kept: int
    num_tables: int
    recursions: int

    def __call__(self, index, carry, read, write, constants):
        d_out, d_x, *sums = carry
        others, weights = constants[:self.num_kept + self.num_tables], constants[self.num_kept + self.num_tables:]
        body = _BackwardLayer(self.layer, self.weights_type, self.num_kept, len(weights[0]))
        (d_in,), sums = loop(body, (d_out,), weights, sums, (index, *others), reverse=True)
        d_x = d_x + torch.where(index == self.recursions, 0, d_in)  # the answer is updated without the puzzle
        return (d_in, d_x, *sums), ()


@dataclass(frozen=True)
class _BackwardLayer:
    layer: Callable
    weights_type: type
    num_kept: int
    layers: int

    def __call__(self, index, carry, read, write, constants):
        application, *others = constants
        slot, tables = application * self.layers + index, others[self.num_kept:]
        x, *kept = (take(stack, slot) for stack in others[:self.num_kept])
        x, *weights = (tensor.detach().requires_grad_() for tensor in (x, *read))
        left = iter(kept)
        with torch.enable_grad():
            out = self.layer(x, self.weights_type(*weights), tables, lambda tensor: _Kept.apply(tensor, next(left)))
            d_in, *d_weights = torch.autograd.grad(out, [x, *weights], carry[0])
        return (d_in,), tuple(total + d.float() for total, d in zip(write, d_weights, strict=True))


class _Kept(torch.autograd.Function):
    """Has the value `kept` and the gradient of `computed`, which is then never computed."""

    @staticmethod
    def forward(ctx, computed, kept):
        return kept.view_as(kept)

    @staticmethod
    def backward(ctx, d_out):
        return d_out, None


@cache
def _kept_shapes(layer, shape, weight_shapes, table_shapes, dtype):
    """Returns the shape and dtype of each tensor that a layer keeps, its input first."""
    shapes = []

    def keep(tensor):
        shapes.append((tuple(tensor.shape), tensor.dtype))
        return tensor

    empty = partial(torch.empty, dtype=dtype, device="meta")
    layer(keep(empty(shape)), type(weight_shapes)(*map(empty, weight_shapes)), [*map(empty, table_shapes)], keep)
    return shapes
