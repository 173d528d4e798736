"""The weights of the GPT: what each is called, its shape, how it starts, how it learns, and how a mesh divides it.

From this table follow the parameters of the model, what a layer gets (layer_weights), the initial weights, the groups
of the optimizer, and the parts of ranks. A new weight is a line here.
"""
from collections import namedtuple
from dataclasses import dataclass
from functools import cache
from math import prod

import torch

from nanochat.model.gates import NUM_GATES


@dataclass(frozen=True)
class Start:
    """Values at the start: drawn at random, or from one in the first layer evenly to another in the last one."""
    normal: float = 0.0  # standard deviation of a normal distribution
    uniform: float = 0.0  # standard deviation of a uniform one, × sqrt(width)
    first: float = 0.0
    last: float = 0.0

    @classmethod
    def at(cls, value):
        return cls(first=value, last=value)


@dataclass(frozen=True)
class Rate:
    """The learning rate of AdamW: the value of a flag (a field of OptimConfig; "": 1) × factor."""
    flag: str
    factor: float = 1.0
    by_width: bool = False  # it depends on the width of the model: optim.width_lr_scale


@dataclass(frozen=True)
class Weight:
    """One weight. A stack has one slice for each layer; a table has a row for each token."""
    name: str
    shape: str  # as in `sizes`; a stack begins with L, a table with V
    group: str  # as people count parameters
    start: Start = Start()
    start_with_values: Start | None = None  # in a model with value embeddings; None: the same
    rate: Rate | None = None  # None: a matrix, which Muon updates
    divides: str = "outputs"  # what the ranks of a mesh divide among them along tensor: outputs (or rows) or inputs
    only_with: str = ""  # the field of GPTConfig without which there is none

    @property
    def is_stack(self):
        return self.shape.startswith("L")

    @property
    def is_divided(self):
        """Whether ranks hold parts of it. Single numbers of a layer, and rows of them, are whole on every rank."""
        return self.rate is None or not self.is_stack


# Start: the numbers with value embeddings are nanochat's. They are worth 0.15 bits per byte there, and nothing without
# (dev/LOG.md, 2026-11-24). Where attn_o and mlp_out are 0, a layer is the identity; where lm_head is small, predictions
# are almost uniform; where gate_map is 0 and gate_scale 1, every gate is 1.
# Rates: other ones were not tried for gates. The residual stream is multiplied by resid_scale once per layer.
WEIGHTS = (
    Weight("wte", "V C", "embedding", Start(normal=1.0), Start(normal=0.8), Rate("embedding_lr", by_width=True)),
    Weight("attn_q", "L C C", "matrices", Start(uniform=1.0)),
    Weight("attn_k", "L C_kv C", "matrices", Start(uniform=1.0)),
    Weight("attn_v", "L C_kv C", "matrices", Start(uniform=1.0)),
    Weight("attn_o", "L C C", "matrices", divides="inputs"),  # they are what attn_q, k and v make in parts
    Weight("mlp_in", "L 4C C", "matrices", Start(uniform=1.0), Start(uniform=0.4)),
    Weight("mlp_out", "L C 4C", "matrices", divides="inputs"),
    Weight("resid_scale", "L", "scalars", Start.at(1.0), Start(first=1.15, last=1.05), Rate("scalar_lr", 0.01)),
    Weight("x0_scale", "L", "scalars", Start.at(0.1), Start(first=0.2, last=0.05), Rate("scalar_lr")),
    Weight("gate_map", "L G C", "gates", rate=Rate("", 0.001, by_width=True), only_with="layer_gates"),
    Weight("gate_scale", "L G 1", "gates", Start.at(1.0), rate=Rate("", 0.035), only_with="layer_gates"),
    Weight("value_table", "V N", "value embeddings", Start(uniform=1.5), rate=Rate("embedding_lr", 0.5, by_width=True),
           only_with="num_values"),
    Weight("lm_head", "V C", "head", Start(normal=0.001), rate=Rate("unembedding_lr", by_width=True)),
)
DIVIDED_BY_INPUTS = frozenset(weight.name for weight in WEIGHTS if weight.divides == "inputs")
UNDIVIDED = frozenset(weight.name for weight in WEIGHTS if not weight.is_divided)
GROUPS = ("matrices", "embedding", "head", "scalars", "gates", "value embeddings")  # in the order in which one reads


def sizes(config):
    """Returns what the letters in the shapes mean for a GPTConfig."""
    kv_width = config.n_kv_head * config.head_dim
    return {"V": config.vocab_size, "L": config.n_layer, "C": config.n_embd, "C_kv": kv_width, "4C": 4 * config.n_embd,
            "G": NUM_GATES, "1": 1, "N": config.num_values * kv_width}


def shapes(config):
    """Returns {name: shape} of the weights that a GPTConfig's model has."""
    size_of = sizes(config)
    found = {}
    for weight in WEIGHTS:
        if not weight.only_with or getattr(config, weight.only_with):
            found[weight.name] = tuple(size_of[letter] for letter in weight.shape.split())
    return found


def count_parameters(config):
    """Returns {group: number of parameters} of a GPTConfig's model."""
    there_are = shapes(config)
    counted = dict.fromkeys(GROUPS, 0)
    for weight in WEIGHTS:
        counted[weight.group] += prod(there_are.get(weight.name, [0]))
    return {group: number for group, number in counted.items() if number}


def layer_weights(config):
    """Returns the type of a layer's weights, a named tuple. The model has a stack over all layers of each of them."""
    stacks = [weight for weight in WEIGHTS if weight.is_stack and weight.name in shapes(config)]
    numbers_first = sorted(stacks, key=lambda weight: weight.shape != "L")
    return _named_tuple(tuple(weight.name for weight in numbers_first))


@cache
def _named_tuple(names):  # the same type at every call: programs are kept under it
    return namedtuple("LayerWeights", names)


@torch.no_grad()
def initial_weights(config, seed=0):
    """Yields (name, index, tensor) of all initial weights on the CPU: layer `index` of a stack of matrices, or, where
    the index is None, the whole weight. So whoever keeps parts of them never holds a whole stack."""
    generator = torch.Generator().manual_seed(seed)
    there_are = shapes(config)
    # What every model has is drawn first, so that options leave it as it is.
    tables_first = sorted(WEIGHTS, key=lambda weight: weight.name not in ("wte", "lm_head"))
    for weight in tables_first:
        shape = there_are.get(weight.name)
        if shape is None:
            continue
        start = weight.start
        if config.num_values and weight.start_with_values:
            start = weight.start_with_values
        if weight.rate is None:
            for layer in range(config.n_layer):
                yield weight.name, layer, _drawn(start, shape[1:], config.n_embd, generator)
        elif start.normal or start.uniform:
            yield weight.name, None, _drawn(start, shape, config.n_embd, generator)
        else:
            of_layers = torch.linspace(start.first, start.last, config.n_layer)
            yield weight.name, None, of_layers.view(-1, *[1] * (len(shape) - 1)).expand(shape).clone()


def _drawn(start, shape, width, generator):
    """Returns a tensor that begins at random, or at 0."""
    if start.normal:
        return torch.empty(shape).normal_(0.0, start.normal, generator=generator)
    if start.uniform:
        bound = start.uniform * (3 / width) ** 0.5  # a uniform distribution's bound is sqrt(3) × its deviation
        return torch.empty(shape).uniform_(-bound, bound, generator=generator)
    return torch.zeros(shape)
