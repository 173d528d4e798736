"""Compares the layer by hand (gpt_layer.py) with its definition (layers.gpt_layer), before anything trains with it."""
from functools import cache
from math import prod
from types import SimpleNamespace

import torch

from nanochat.kernels.gpt_layer import KNOWN, AttentionByHand, How, gpt_layer_for_loop
from nanochat.model.tiny import IDS, require_close, tiny_gpt

# Finite differences stand for derivatives: autograd starts its threads once, for the devices that exist, and XLA's come
# later. A step of 3e-3 gives the smallest error, 3.3e-4 of a gradient.
STEP = 3e-3


@cache
@torch.no_grad()
def require_same_layer(attend):
    """Raises BadInput unless a tiny layer with all options has the same output and gradients by hand and by definition,
    on the CPU. attend(q, k, v, window, cos, sin): attention's output from the products of one layer."""
    model = tiny_gpt(None, KNOWN).double()
    type_of_weights = model.layer_weights
    weights = [getattr(model, name)[0] for name in type_of_weights._fields]
    width, value_width = model.config.n_embd, model.attn_v.size(1)
    x = _waves(0, (1, IDS.size(1), width))
    x0 = _waves(1, x.shape)
    value = _waves(2, (1, IDS.size(1), value_width))
    d_out = _waves(3, x.shape)
    window = torch.tensor(model.config.short_window)
    tables = model.cos, model.sin
    layer = gpt_layer_for_loop(How(model.options, _attention(attend)))
    given = SimpleNamespace(x0=x0, weights=type_of_weights(*weights), window=window, tables=tables, value=lambda: value)
    index = torch.tensor(0)
    out, saved = layer.by_hand.forward(x, index, layer.by_hand.new_saved(x, given.weights, 1), given)
    *gradients, of_weights = layer.by_hand.backward(x, index, d_out, saved, given)

    def by_definition(x, x0, value, *weights):
        return layer.forward(x, x0, type_of_weights(*weights), window, tables, value)

    # Of each input, one number is compared: the derivative of out · d_out along a direction that moves all of the
    # input's numbers. That takes two forward passes; a difference for each number would take two for each.
    inputs = [x, x0, value, *weights]
    found = []
    expected = []
    for number, gradient in enumerate((*gradients, *of_weights)):
        direction = _waves(number, inputs[number].shape)
        found.append((gradient * direction).sum())
        ends = []
        for step in (STEP, -STEP):
            moved = [*inputs[:number], inputs[number] + step * direction, *inputs[number + 1:]]
            ends.append((by_definition(*moved) * d_out).sum())
        expected.append((ends[0] - ends[1]) / (2 * STEP))
    require_close([out, *found], [by_definition(*inputs), *expected],
                  "--kernel=chunked and flash compute another layer than layers.gpt_layer: change "
                  "nanochat/kernels/gpt_layer.py, too, or use --kernel=current")


def _attention(attend):
    def forward(q, k, v, index, window, *tables):
        return attend(q[0], k[0], v[0], window, *tables), None

    def backward(q, k, v, index, window, log_sums, d_y, *tables):
        inputs = [q[0], k[0], v[0]]
        found = []
        for number, tensor in enumerate(inputs):
            # One row of the batch for each number of the tensor, which is moved there.
            steps = STEP * torch.eye(tensor.numel(), dtype=tensor.dtype).view(-1, *tensor.shape[1:])
            ends = []
            for moved in (tensor + steps, tensor - steps):
                rows = [other.expand(len(moved), -1, -1) for other in inputs]
                rows[number] = moved
                ends.append((attend(*rows, window, *tables) * d_y).sum((1, 2)))
            found.append(((ends[0] - ends[1]) / (2 * STEP)).view_as(tensor))
        return found

    return AttentionByHand(forward, backward)


def _waves(number, shape):
    """Returns a tensor that looks random."""
    return torch.arange(prod(shape), dtype=torch.float64).add(number).mul(1.3 + number).sin().view(shape)
