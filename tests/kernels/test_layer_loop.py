"""The loop over the layers: its own backward pass, and the one of the GPT's layer that is written by hand."""
from typing import NamedTuple

import pytest
import torch
import torch_xla

from nanochat.kernels.gpt_layer import How, gpt_layer_for_loop
from nanochat.kernels.layer_loop import Layer, run_layers
from nanochat.kernels.xla import PYTORCH_ATTENTION
from nanochat.model.layers import LayerWeights, rotary_tables

LAYERS, BATCH, TIME, WIDTH, HEADS, KV_HEADS = 3, 2, 6, 16, 2, 1
BY_HAND = gpt_layer_for_loop(How(PYTORCH_ATTENTION))
SHIFTED = gpt_layer_for_loop(How(PYTORCH_ATTENTION, shifted_head_dim=WIDTH // HEADS))


def gpt_weights():
    """Random stacks of the GPT's layers, and what goes into the first."""
    kv_width = WIDTH // HEADS * KV_HEADS
    shapes = LayerWeights(
        resid_scale=(), x0_scale=(), attn_q=(WIDTH, WIDTH), attn_k=(kv_width, WIDTH), attn_v=(kv_width, WIDTH),
        attn_o=(WIDTH, WIDTH), mlp_in=(4 * WIDTH, WIDTH), mlp_out=(WIDTH, 4 * WIDTH))
    generator = torch.Generator().manual_seed(0)
    return (LayerWeights(*(0.3 * torch.randn(LAYERS, *shape, generator=generator) for shape in shapes)),
            torch.randn(BATCH, TIME, WIDTH, generator=generator))


def by_loop(layer, stacks, x, windows, tables, keeps_input_only=False):
    """Output, gradient of x and gradients of the stacks, as one XLA program each way."""
    device = torch_xla.device()
    stacks = type(stacks)(*(stack.clone().to(device).requires_grad_() for stack in stacks))
    for stack in stacks:
        stack.main_grad = torch.zeros_like(stack)
    x = x.clone().to(device).requires_grad_()
    windows = None if windows is None else torch.tensor(windows, dtype=torch.int32).to(device)
    out = run_layers(layer, x, stacks, windows, [table.to(device) for table in tables], keeps_input_only)
    out.square().sum().backward()
    torch_xla.sync()
    return [tensor.detach().cpu() for tensor in (out, x.grad, *(stack.main_grad for stack in stacks))]


def by_autograd(layer, stacks, x, windows, tables):
    """The same, layer after layer, by PyTorch on the CPU."""
    stacks, x = type(stacks)(*(stack.clone().requires_grad_() for stack in stacks)), x.clone().requires_grad_()
    out = x
    for index in range(LAYERS):
        weights = type(stacks)(*(stack[index] for stack in stacks))
        out = layer.forward(out, x, weights, None if windows is None else torch.tensor(windows[index]), tables)
    out.square().sum().backward()
    return [tensor.detach() for tensor in (out, x.grad, *(stack.grad for stack in stacks))]


@pytest.mark.parametrize("windows", [None, (3, 2, 6)])
@pytest.mark.parametrize("layer, keeps_input_only", [
    (Layer(BY_HAND.forward), False), (BY_HAND, False), (BY_HAND, True), (SHIFTED, False), (SHIFTED, True),
    (gpt_layer_for_loop(How(PYTORCH_ATTENTION, keeps_qkv=False)), False),
    (gpt_layer_for_loop(How(PYTORCH_ATTENTION, keeps_qkv=False, shifted_head_dim=WIDTH // HEADS)), False)])
def test_the_loop_gives_the_gradients_of_autograd_by_default_and_by_hand(layer, keeps_input_only, windows):
    stacks, x = gpt_weights()
    tables = rotary_tables(torch.arange(TIME), WIDTH // HEADS)
    found = by_loop(layer, stacks, x, windows, tables, keeps_input_only)
    for one, other in zip(found, by_autograd(layer, stacks, x, windows, tables), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5 * float(other.abs().max()), rtol=1e-4)


class GatedWeights(NamedTuple):
    gate: torch.Tensor
    value: torch.Tensor


def gated(x, x0, weights, window, tables):
    return x + torch.sigmoid(x @ weights.gate) * (x0 @ weights.value)


GATED_LAYER = Layer(gated)


def test_another_layer_needs_its_forward_pass_only():
    generator = torch.Generator().manual_seed(1)
    stacks = GatedWeights(*(0.3 * torch.randn(LAYERS, WIDTH, WIDTH, generator=generator) for _ in range(2)))
    x = torch.randn(BATCH, TIME, WIDTH, generator=generator)
    found = by_loop(GATED_LAYER, stacks, x, None, ())
    for one, other in zip(found, by_autograd(GATED_LAYER, stacks, x, None, ()), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5 * float(other.abs().max()), rtol=1e-4)
