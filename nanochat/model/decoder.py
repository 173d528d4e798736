"""What the models have in common: a decoder whose layers run one after another, or as one loop on XLA. It knows neither
its device nor how a mesh divides it. gpt.py and llama.py add what differs. The loss of a task (language.py) calls it.

The weights of all layers are stacked: `attn_q` is (layer, out, in). So Muon orthogonalises all layers in one batched
product, collectives move a few large gradients, and a loop over the layers copies nothing.
"""
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F

from nanochat.model import layers
from nanochat.model.logit_cap import LogitCap
from nanochat.model.weights import layer_weights, shapes


class Decoder(nn.Module):
    """Predicts tokens: model(ids) are logits, model(ids, targets) losses; `kernels` are how it computes.

    A model adds `_options`, which have its layer, `_rotary_tables`, and `_begin` and `_end`, what is done to the
    vectors before and after the layers. Its weights follow from its config (see weights.py)."""

    def __init__(self, config, kernels, compute_dtype=torch.float32, activation_checkpointing="none"):
        """config: one of models.py; kernels: layers.Kernels; compute_dtype: of activations and products;
        activation_checkpointing: one of config.RECOMPUTED."""
        super().__init__()
        self.config = config
        self.options = self._options()
        self.layer_weights = layer_weights(config)  # kept, because torch.compile cannot make a type in forward
        self.kernels = kernels
        self.compute_dtype = compute_dtype
        self.activation_checkpointing = activation_checkpointing
        self.logit_cap = LogitCap.of(config)
        for name, shape in shapes(config).items():
            setattr(self, name, nn.Parameter(torch.empty(shape, dtype=torch.float32)))
        cos, sin = self._rotary_tables()
        windows = [window or config.max_seq_len for window in config.windows()]
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.register_buffer("windows", torch.tensor(windows, dtype=torch.int32), persistent=False)
        # A loop over the layers reads a number for each layer: 1 if it adds the value embeddings, else 0.
        self.register_buffer("adds", torch.tensor(config.adds_values(), dtype=torch.int32), persistent=False)

    @torch.no_grad()
    def init_weights(self, seed=0):
        """Draws the weights with a CPU generator: a seed gives every rank the same weights, without a broadcast."""
        for name, index, value in initial_weights(self.config, seed):
            weight = getattr(self, name)
            if index is not None:
                weight = weight[index]
            weight.copy_(value)
        return self

    # Training

    @property
    def training_dtype(self):
        """Dtype of the weights in training. With run_layers, whose loops add to main_grad themselves, they are copies
        of the optimizer's fp32 weights. Otherwise autograd sums, in the dtype of the weight, so they stay fp32."""
        return self.compute_dtype if self.kernels and self.kernels.run_layers else torch.float32

    def create_main_grads(self):
        """Gives every weight `main_grad`, the fp32 sum of its gradients since the optimizer's last update.

        Autograd adds to `p.grad`, which is the same tensor if the weight is fp32. The loops in kernels/ add to
        `p.main_grad` in place: a separate gradient would cost as much traffic as the weights do.
        """
        for p in self.parameters():
            p.main_grad = torch.zeros_like(p, dtype=torch.float32)
            if p.dtype == torch.float32:
                p.grad = p.main_grad

    def after_update(self):
        """Brings up to date what is computed from the weights once a step. Called when they are known, and after each
        update."""
        if self.kernels.round_weights:
            self.kernels.round_weights(self)

    # Computing

    def hidden(self, ids, cache=None, positions=None):
        """Final hidden states (B, T, C) of ids (B, T).

        With a KVCache (infer/readers.py), or another object with its methods, `positions` are the ids' places in the
        text, as the cache takes them. It writes their keys and values there, and they see all earlier positions in it.
        """
        x0 = self._begin(self.kernels.embedding(ids, self.wte, self.compute_dtype))  # (B, T, C)
        if self.kernels.run_layers and cache is None:
            return self._end(self._all_layers(x0, ids))
        return self._end(self._layer_by_layer(x0, ids, cache, positions))

    def _stacks(self):
        return self.layer_weights(*(getattr(self, name) for name in self.layer_weights._fields))

    def _all_layers(self, x0, ids):
        windows = None
        if any(self.config.windows()):
            sizes = {window or self.config.max_seq_len for window in self.config.windows()}
            windows = layers.LayerWindows(tuple(sorted(sizes)), self.windows)
        values = self.values(ids)
        if values is not None:
            values = layers.LayerValues(self.adds, values)
        rotary = self.cos[:ids.size(1)], self.sin[:ids.size(1)]
        return self.kernels.run_layers(self.options, x0, self._stacks(), windows, rotary, self.activation_checkpointing,
                                       values)

    def _layer_by_layer(self, x0, ids, cache, positions):
        if positions is None:
            positions = torch.arange(ids.size(1), device=ids.device)
        rotary = self.cos[positions].to(self.compute_dtype), self.sin[positions].to(self.compute_dtype)
        values = self.values(ids)
        recomputes = self.activation_checkpointing == "all" and torch.is_grad_enabled()
        # unbind's backward pass is one stack; that of indexing would add up whole stacks.
        weights_of = zip(*(stack.unbind(0) for stack in self._stacks()), strict=True)
        each = zip(self.config.windows(), self.config.adds_values(), weights_of, strict=True)
        x = x0
        for index, (window, adds, weights) in enumerate(each):
            text = layers.WholeText(self.kernels.attention, window)
            if cache is not None:
                text = layers.CachedText(cache, index, positions, window)
            value = values if adds else None
            run_layer = partial(self._layer, rotary, text)
            if recomputes:
                x = self.kernels.recompute(run_layer, x, x0, value, *weights)
            else:
                x = run_layer(x, x0, value, *weights)
        return x

    def _layer(self, rotary, text, x, x0, value, *weights):
        whole = self._whole(x, dict(zip(self.layer_weights._fields, weights, strict=True)))
        products = self.kernels.products if torch.is_grad_enabled() else layers.PLAIN
        return self.options.layer(x, x0, self.layer_weights(*whole), rotary, text, value, products)

    def _whole(self, after, weights):
        return weights.values() if self.kernels.whole is None else self.kernels.whole(after, weights)

    @property
    def head(self):
        """The weight (V, C) that makes logits of hidden states."""
        return self.lm_head

    def values(self, ids):
        """Returns what layers add to attention's values at ids (B, T), (B, T, C_kv), see adds_values; or None."""
        if not self.config.has_values:
            return None
        return self.kernels.embedding(ids, self.value_table, self.compute_dtype)

    def logits(self, hidden):
        """fp32 logits (…, V) of hidden states (…, C)."""
        head, = self._whole(hidden, {"lm_head": self.head.to(hidden.dtype)})
        return self.logit_cap(F.linear(hidden, head).float())

    def forward(self, ids, targets=None, reduction="none", teaching=None):
        """Logits (B, T, V) of ids (B, T). With targets (B, T): the tokens' losses instead, fp32, nats, (B, T), or their
        mean, a scalar, with reduction "mean". With a Teaching, the mean is that of the student's loss."""
        hidden = self.hidden(ids)
        if targets is None:
            return self.logits(hidden)
        arguments = hidden.flatten(0, 1), self.head, targets.flatten(), self.logit_cap
        if reduction == "mean":
            return self.kernels.mean_loss(*arguments, teaching)
        return self.kernels.cross_entropy(*arguments).view_as(targets)


@torch.no_grad()
def initial_weights(config, seed=0):
    """Yields (name, index, tensor) of all initial weights on the CPU: layer `index` of a stack of matrices, or the
    whole weight if the index is None. A caller that keeps parts never holds a whole stack."""
    generator = torch.Generator().manual_seed(seed)
    shape_of = shapes(config)
    # The tables that every model has are drawn first, so options do not change them.
    tables_first = sorted(config.weights, key=lambda weight: weight.name not in ("wte", "lm_head"))
    for weight in tables_first:
        shape = shape_of.get(weight.name)
        if shape is None:
            continue
        initial = weight.initial
        if config.has_values and weight.initial_with_values:
            initial = weight.initial_with_values
        if weight.is_matrix:
            for layer in range(config.n_layer):
                yield weight.name, layer, _drawn(initial, shape[1:], config.n_embd, generator)
        elif not weight.is_stack:
            yield weight.name, None, _drawn(initial, shape, config.n_embd, generator)
        else:
            of_layers = torch.linspace(initial.first, initial.last, config.n_layer)
            yield weight.name, None, of_layers.view(-1, *[1] * (len(shape) - 1)).expand(shape).clone()


def _drawn(initial, shape, width, generator):
    if initial.normal:
        return torch.empty(shape).normal_(0.0, initial.normal, generator=generator)
    if initial.uniform:
        bound = initial.uniform * (3 / width) ** 0.5  # a uniform distribution's bound is sqrt(3) × its deviation
        return torch.empty(shape).uniform_(-bound, bound, generator=generator)
    return torch.full(shape, initial.first)
