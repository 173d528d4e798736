"""The weights of a model: name, shape, initial values, rate, and how a mesh divides each. A new weight is a line in
the table of its model: the model's parameters, a layer's weights (layer_weights), the initial weights, the optimizer's
groups, the ranks' parts and the count of FLOPs follow from it. The table of the GPT is here, that of llama.py there.
"""
from collections import namedtuple
from dataclasses import dataclass
from functools import cache
from math import prod

NUM_GATES = 3  # of a layer, see layers.py


@dataclass(frozen=True)
class Initial:
    """Initial values: random, or changing evenly from the first layer to the last."""
    normal: float = 0.0  # standard deviation of a normal distribution
    uniform: float = 0.0  # sqrt(width) × the standard deviation of a uniform distribution
    first: float = 0.0
    last: float = 0.0

    @classmethod
    def at(cls, value):
        return cls(first=value, last=value)


@dataclass(frozen=True)
class Rate:
    """AdamW's learning rate: the value of a flag (a field of OptimConfig; "": 1) × factor."""
    flag: str
    factor: float = 1.0
    by_width: bool = False  # also × rates.width_lr_scale


@dataclass(frozen=True)
class Weight:
    """One weight. A stack has a slice per layer, a table a row per token."""
    name: str
    shape: str  # as in `sizes`; a stack begins with L, a table with V
    group: str  # in which its parameters are counted
    initial: Initial = Initial()
    initial_with_values: Initial | None = None  # in a model with value embeddings; None: the same
    rate: Rate | None = None  # None: a matrix, which Muon updates
    divides: str = "outputs"  # what a mesh's axis tensor divides: outputs (or rows), inputs, or nothing
    only_with: str = ""  # the field of the config that requires it

    @property
    def is_stack(self):
        return self.shape.startswith("L")

    @property
    def is_table(self):
        return self.shape.startswith("V")

    @property
    def is_divided(self):
        """Whether ranks hold parts of it. A layer's scalars and vectors are whole on every rank."""
        return self.divides != "nothing"

    @property
    def is_matrix(self):
        """Whether it is a stack of matrices."""
        return self.is_stack and self.is_divided


# Initial: with attn_o and mlp_out at 0, a layer is the identity; with a small lm_head, predictions are almost uniform;
# with gate_map at 0 and gate_scale at 1, every gate is 1. The numbers for value embeddings are karpathy/nanochat's:
# value embeddings gain 0.15 bits per byte with its numbers, and nothing without (dev/log, 2026-11-24).
# Rates: no others were tried for gates. Every layer multiplies the residual stream by resid_scale.
WEIGHTS = (
    Weight("wte", "V C", "embedding", Initial(normal=1.0), Initial(normal=0.8), Rate("embedding_lr", by_width=True)),
    Weight("attn_q", "L C C", "matrices", Initial(uniform=1.0)),
    Weight("attn_k", "L C_kv C", "matrices", Initial(uniform=1.0)),
    Weight("attn_v", "L C_kv C", "matrices", Initial(uniform=1.0)),
    Weight("attn_o", "L C C", "matrices", divides="inputs"),  # its inputs are the parts that attn_q, k and v make
    Weight("mlp_in", "L M C", "matrices", Initial(uniform=1.0), Initial(uniform=0.4)),
    Weight("mlp_out", "L C M", "matrices", divides="inputs"),
    Weight("resid_scale", "L", "scalars", Initial.at(1.0), Initial(first=1.15, last=1.05), Rate("scalar_lr", 0.01),
           divides="nothing"),
    Weight("x0_scale", "L", "scalars", Initial.at(0.1), Initial(first=0.2, last=0.05), Rate("scalar_lr"),
           divides="nothing"),
    Weight("gate_map", "L G C", "gates", rate=Rate("", 0.001, by_width=True), divides="nothing",
           only_with="layer_gates"),
    Weight("gate_scale", "L G 1", "gates", Initial.at(1.0), rate=Rate("", 0.035), divides="nothing",
           only_with="layer_gates"),
    Weight("value_table", "V N", "value embeddings", Initial(uniform=1.5),
           rate=Rate("embedding_lr", 0.5, by_width=True), only_with="has_values"),
    Weight("lm_head", "V C", "head", Initial(normal=0.001), rate=Rate("unembedding_lr", by_width=True)),
)
# In the order to print them.
GROUPS = ("matrices", "embedding", "head", "scalars", "vectors", "gates", "value embeddings")


def sizes(config):
    """Returns the sizes that the letters in the shapes stand for, {letter: size}, in a config's model."""
    kv_width = config.n_kv_head * config.head_dim
    return {"V": config.vocab_size, "L": config.n_layer, "C": config.n_embd, "C_q": config.n_head * config.head_dim,
            "C_kv": kv_width, "D": config.head_dim, "M": config.mlp_dim, "G": NUM_GATES, "1": 1, "N": kv_width}


def shapes(config):
    """Returns {name: shape} of the weights in a config's model."""
    size_of = sizes(config)
    found = {}
    for weight in config.weights:
        if not weight.only_with or getattr(config, weight.only_with):
            found[weight.name] = tuple(size_of[letter] for letter in weight.shape.split())
    return found


def count_parameters(config):
    """Returns {group: number of parameters} of a config's model."""
    shape_of = shapes(config)
    counted = dict.fromkeys(GROUPS, 0)
    for weight in config.weights:
        counted[weight.group] += prod(shape_of.get(weight.name, [0]))
    return {group: number for group, number in counted.items() if number}


def matrix_parameters(parameters):
    """Returns how many of the parameters, {group: number}, take part in matrix products: the layers' and the head's,
    which may be the embedding."""
    return parameters["matrices"] + parameters.get("head", parameters["embedding"])


def flops_per_token(config, seq_len):
    """Returns the useful FLOPs per token of forward and backward together; recomputation does not count.

    Each matrix parameter takes 6: a multiplication and an addition, once forward and twice backward (Kaplan et al.
    2020, arXiv 2001.08361). Attention takes 12 × the queries' width for each position that a token attends to (PaLM,
    arXiv 2204.02311, appendix B). PaLM counts all T positions. This counts only those that the causal mask and the
    layer's window leave: (T + 1) / 2 on average without a window.
    """
    positions = 0
    for window in config.windows():
        window = min(window or seq_len, seq_len)
        positions += (window * (window + 1) / 2 + (seq_len - window) * window) / seq_len  # mean of min(t, window)
    return 6 * matrix_parameters(count_parameters(config)) + 12 * config.n_head * config.head_dim * positions


def mfu(tokens_per_s, flops_per_token, peak_flops_per_chip, chips):
    """Returns model FLOPs utilisation, 0 to 1, or None if the chip's peak (FLOP/s) is unknown."""
    if peak_flops_per_chip is None:
        return None
    return tokens_per_s * flops_per_token / (peak_flops_per_chip * chips)


def layer_weights(config):
    """Returns the type of a layer's weights, a named tuple. The model has a stack of each over all layers."""
    stacks = [weight for weight in config.weights if weight.is_stack and weight.name in shapes(config)]
    numbers_first = sorted(stacks, key=lambda weight: weight.shape != "L")
    return _named_tuple(tuple(weight.name for weight in numbers_first))


@cache
def _named_tuple(names):  # the same type at every call: it is part of the keys of compiled programs
    return namedtuple("LayerWeights", names)
