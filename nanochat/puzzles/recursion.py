"""The cycles of a Tiny Recursive Model. On XLA they are loops of the program, and so is the backward pass.

Autograd would unroll the last cycle, and the program would grow with the recursions. Here an iteration of a loop is one
layer of one application of the network. The last cycle writes what the backward pass needs into stacks, with a slot for
each iteration. The backward loop differentiates the layer as it stands, but reads the kept tensors instead of computing
the products with weights again.
"""
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch

from nanochat.device.xla_ops import loop, put, take
from nanochat.model.layers import NORM_EPS


def keep_nothing(tensor):
    """The `keep` of a layer under autograd, which keeps by itself, and without a gradient."""
    return tensor


def norm(x, keep):
    """RMSNorm of x (…, C) without parameters. Its backward pass reads the kept tensors, not x."""
    # In the backward loop `keep` returns the kept tensors, and _Norm differentiates from them. So XLA finds no use for
    # x there, nor for what computes it.
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
        # n = s x with s = (mean(x²) + ε)^-½, so d s / d x = -s³ x / C, and d x = s (d n - n mean(n d n)), exactly.
        d_x = scale[..., None] * (d_out.float() - normed * (normed * d_out.float()).mean(-1, keepdim=True))
        return d_x.to(d_out.dtype), None, None


def run_cycles(layer, x, y, z, stacks, tables, recursions, cycles):
    """Returns y and z (B, P, C) after so many cycles, from those before and the puzzle x. Only the last cycle has a
    gradient: of x and the weights, through y. The returned z has none.

    layer(x, weights, tables, keep) -> (B, P, C): differentiable; an equal object at every call. weights: its slices of
        `stacks`. It passes tensors that are worth keeping for its backward pass through `keep`, which returns them
    stacks: a NamedTuple of weights, each (layers, …), fp32; tables: further tensors, without a gradient
    """
    has_gradient = torch.is_grad_enabled()
    if x.device.type == "xla":
        network = _Network(layer, type(stacks), len(tables), len(stacks[0]), recursions)
        return _Cycles.apply(x, y, z, tables, network, cycles, has_gradient, *stacks)

    def apply_network(x):
        for weights in zip(*(stack.unbind(0) for stack in stacks), strict=True):
            x = layer(x, type(stacks)(*weights), tables, keep_nothing)
        return x

    for number in range(cycles):
        y = y.detach()
        z = z.detach()
        with torch.set_grad_enabled(has_gradient and number == cycles - 1):
            for _ in range(recursions):
                z = apply_network(z + y + x)
            y = apply_network(y + z)
    return y, z.detach()


@dataclass(frozen=True)
class _Network:
    """The network as the loops' bodies know it. Iteration i is layer i % layers of application i // layers. The last
    application of each cycle updates the answer, the others the latent."""
    layer: Callable
    weights_type: type
    num_tables: int
    layers: int
    recursions: int

    @property
    def slots(self):
        return (self.recursions + 1) * self.layers

    def weights(self, constants):
        """Returns the stacks of weights in (*tables, *weights, …)."""
        return self.weights_type(*constants[self.num_tables:self.num_tables + len(self.weights_type._fields)])

    def place(self, index):
        """Returns the number of the layer, and whether the application updates the answer."""
        return index % self.layers, index // self.layers % (self.recursions + 1) == self.recursions


class _Cycles(torch.autograd.Function):

    @staticmethod
    def forward(ctx, x, y, z, tables, network, cycles, is_training, *stacks):
        weights = network.weights_type(*(stack.detach().to(x.dtype) for stack in stacks))

        def run(cycles, *carry):
            # A loop runs once for each slice of its stacks. The counter is such a stack, and nothing reads it.
            counter = torch.empty(cycles * network.slots, device=x.device)
            return loop(_Forward(network), carry, (counter,), (), (x, *tables, *weights))[0]

        # state: (3, B, P, C): latent, answer, and a slot that nobody reads. into: (B, P, C), the next layer's input.
        state = torch.stack([z, y, y])
        into = z + y + x
        first = cycles - 1 if is_training else cycles
        if first:
            state, into = run(first, state, into)
        if is_training:
            # Only the last cycle keeps anything: a slot for each of its iterations. The others are a loop of their own,
            # without these stacks.
            kept = []
            for size, dtype in _kept_shapes(network.layer, tuple(x.shape),
                                            network.weights_type(*(tuple(w.shape[1:]) for w in weights)),
                                            tuple(tuple(table.shape) for table in tables), x.dtype):
                kept.append(x.new_zeros(network.slots, *size, dtype=dtype))
            state, _, *kept = run(1, state, into, *kept)
            ctx.save_for_backward(*tables, *weights, *kept)
            ctx.network = network
        z, y, _ = state.unbind(0)
        ctx.mark_non_differentiable(z)
        return y, z

    @staticmethod
    def backward(ctx, d_y, _):
        network = ctx.network
        sums = [torch.zeros_like(stack, dtype=torch.float32) for stack in network.weights(ctx.saved_tensors)]
        counter = torch.empty(network.slots, device=d_y.device)
        (_, d_x, *sums), _ = loop(_Backward(network), (d_y, torch.zeros_like(d_y), *sums), (counter,), (),
                                  ctx.saved_tensors, reverse=True)
        return d_x, *[None] * 6, *sums


@dataclass(frozen=True)
class _Forward:
    """Goes from the state and a layer's input to the state and the next layer's input. The state is the latent, the
    answer, and a slot that every layer writes except the network's last."""
    network: _Network

    def __call__(self, index, carry, read, write, constants):
        state, into, *kept = carry
        x, *rest = constants
        number, is_answer = self.network.place(index)
        is_last = number == self.network.layers - 1
        new = []

        # A layer calls `keep` in the same order at every call, the order of _kept_shapes. The tensor is read back from
        # the stack, so that the operation that computes it writes it there, without a copy.
        def keep(tensor):
            new.append(put(kept[len(new)], index, tensor, use_from_memory=True))
            return take(new[-1], index)

        keep = keep if kept else keep_nothing
        weights = self.network.weights_type(*(take(stack, number) for stack in self.network.weights(rest)))
        out = self.network.layer(keep(into), weights, rest[:self.network.num_tables], keep)
        # No branches: every layer writes somewhere, the network's last one to the latent (0) or the answer (1), the
        # others to slot 2. After the last layer the next application begins: from z + y + x, or, if it updates the
        # answer, from z + y.
        state = put(state, torch.where(is_last, is_answer.int(), 2), out)
        _, answer_is_next = self.network.place(index + 1)
        into = torch.where(is_last, state[0] + state[1] + torch.where(answer_is_next, 0, x), out)
        return (state, into, *new), ()


@dataclass(frozen=True)
class _Backward:
    """Goes from the gradient of a layer's output to that of its input, and adds up those of x and the weights."""
    network: _Network

    def __call__(self, index, carry, read, write, constants):
        # The cycle is a chain: z' = f(z + y + x), again and again, and then y' = f(y + z), where the first z and y have
        # no gradient. So d_in, the gradient of an application's input, is d_out of the one before. It also goes to x
        # wherever x was added: at the first layer of all applications but the last.
        d_out, d_x, *sums = carry
        number, is_answer = self.network.place(index)
        stacks = self.network.weights(constants)
        tables = constants[:self.network.num_tables]
        x, *kept = (take(stack, index) for stack in constants[len(tables) + len(stacks):])
        inputs = [x, *(take(stack, number) for stack in stacks)]
        x, *weights = (tensor.detach().requires_grad_() for tensor in inputs)
        left = iter(kept)
        with torch.enable_grad():
            out = self.network.layer(x, self.network.weights_type(*weights), tables,
                                     lambda tensor: _Kept.apply(tensor, next(left)))
            d_in, *d_weights = torch.autograd.grad(out, [x, *weights], d_out)
        sums = (put(total, number, take(total, number) + d.float()) for total, d in zip(sums, d_weights, strict=True))
        return (d_in, d_x + torch.where((number == 0) & ~is_answer, d_in, 0), *sums), ()


class _Kept(torch.autograd.Function):
    """Has the value `kept` and the gradient of `computed`, so XLA never computes the latter."""

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
