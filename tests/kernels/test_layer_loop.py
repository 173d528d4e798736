"""The loop over the layers: its own backward pass, and the one of the GPT's layer that is written by hand."""
from dataclasses import dataclass, replace

import pytest
import torch
import torch_xla

from nanochat.common import BadInput
from nanochat.kernels.gpt_layer import How, layer_for_loop
from nanochat.kernels.layer_loop import Layer, run_layers
from nanochat.kernels.sharded import Sharding
from nanochat.kernels.xla import PYTORCH_ATTENTION
from nanochat.model.config import GPTConfig
from nanochat.model.layers import LayerOptions, LayerValues, rotary_tables
from nanochat.model.weights import layer_weights, shapes

LAYERS, BATCH, TIME, WIDTH, HEADS, KV_HEADS = 3, 2, 6, 16, 2, 1
TABLES = rotary_tables(torch.arange(TIME), WIDTH // HEADS)
PLAIN = LayerOptions(WIDTH // HEADS)
ALL = LayerOptions(WIDTH // HEADS, layer_gates=True, key_shift=True)
CONFIG = GPTConfig(vocab_size=8, n_layer=LAYERS, n_embd=WIDTH, n_head=HEADS, n_kv_head=KV_HEADS,
                   value_embeddings="shared")


def gpt_weights(options):
    """Random stacks of the GPT's layers, and what goes into the first."""
    config = replace(CONFIG, layer_gates=options.layer_gates, key_shift=options.key_shift)
    stacks, generator = layer_weights(config), torch.Generator().manual_seed(0)
    return (stacks(*(0.3 * torch.randn(shapes(config)[name], generator=generator) for name in stacks._fields)),
            torch.randn(BATCH, TIME, WIDTH, generator=generator))


def some_values():
    generator = torch.Generator().manual_seed(5)
    width = WIDTH // HEADS * KV_HEADS
    return LayerValues(torch.tensor([1, 2, 0], dtype=torch.int32),
                       torch.randn(BATCH, TIME, 2 * width, generator=generator), count=2)


def by_loop(layer, stacks, x, windows, keeps_input_only, values):
    """Output, gradient of x, those of the stacks, and that of values, as one XLA program each way."""
    device = torch_xla.device()
    stacks = type(stacks)(*(stack.clone().to(device).requires_grad_() for stack in stacks))
    for stack in stacks:
        stack.main_grad = torch.zeros_like(stack)
    x = x.clone().to(device).requires_grad_()
    windows = None if windows is None else torch.tensor(windows, dtype=torch.int32).to(device)
    found = [x]
    if values is not None:
        values = LayerValues(values.numbers.to(device), values.array.to(device).requires_grad_(), values.count)
        found.append(values.array)
    out = run_layers(layer, x, stacks, windows, [table.to(device) for table in TABLES], keeps_input_only, values)
    out.square().sum().backward()
    torch_xla.sync()
    return [tensor.detach().cpu() for tensor in (out, *(tensor.grad for tensor in found),
                                                 *(stack.main_grad for stack in stacks))]


def by_autograd(layer, stacks, x, windows, values):
    """The same, layer after layer, by PyTorch on the CPU."""
    stacks = type(stacks)(*(stack.clone().requires_grad_() for stack in stacks))
    x = x.clone().requires_grad_()
    out, found = x, [x]
    if values is not None:
        values = values._replace(array=values.array.clone().requires_grad_())
        found.append(values.array)
    for index in range(LAYERS):
        weights = type(stacks)(*(stack[index] for stack in stacks))
        window, value = None if windows is None else torch.tensor(windows[index]), None
        if values is not None:
            blocks = [*values.array.chunk(values.count, -1), torch.zeros(BATCH, TIME, 8)]
            value = blocks[values.numbers[index]]
        out = layer.forward(out, x, weights, window, TABLES, value)
    out.square().sum().backward()
    return [tensor.detach() for tensor in (out, *(tensor.grad for tensor in found), *(stack.grad for stack in stacks))]


@pytest.mark.parametrize("windows", [None, (3, 2, 6)])
@pytest.mark.parametrize("options", [PLAIN, ALL])
@pytest.mark.parametrize("way", ["by definition", "by hand", "input only"])
def test_the_loop_gives_the_gradients_of_autograd_by_definition_and_by_hand(way, options, windows):
    layer = layer_for_loop(How(options, PYTORCH_ATTENTION))
    assert layer.by_hand
    if way == "by definition":
        layer = Layer(layer.forward)
    stacks, x = gpt_weights(options)
    values = some_values() if options == ALL else None
    found = by_loop(layer, stacks, x, windows, way == "input only", values)
    for one, other in zip(found, by_autograd(layer, stacks, x, windows, values), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5 * float(other.abs().max()), rtol=1e-4)


@dataclass(frozen=True)
class MoreOptions(LayerOptions):
    """Those of a variant that only the definition of the layer knows."""
    novelty: bool = False


def test_a_variant_that_is_unknown_by_hand_goes_by_its_definition():
    assert layer_for_loop(How(MoreOptions(8), PYTORCH_ATTENTION)).by_hand
    how = How(MoreOptions(8, novelty=True), PYTORCH_ATTENTION)
    assert layer_for_loop(how).by_hand is None
    with pytest.raises(BadInput, match="--mesh_tensor=2 .*--novelty: use --mesh_tensor=1"):
        layer_for_loop(replace(how, sharding=Sharding(tensor_groups=((0, 1),))))
