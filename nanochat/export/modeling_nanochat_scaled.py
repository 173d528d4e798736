"""NanoChat with a scaled residual stream, windows, shifted keys, gates and value embeddings, for transformers.

    AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)

This file needs nothing else of the program that trained the model. It extends transformers' NanoChat by five parts:

- The input of each layer is resid_scale × x + x0_scale × x0, with the normalised embedding x0 (modded-nanogpt).
- A layer may see only the last `sliding_window` positions.
- `key_shift`: half of the channels of each head's keys come from the position before (modded-nanogpt).
- `layer_gates`: scale × 2 × sigmoid(map · normalised input) multiplies attention's values, and the outputs of attention
  and MLP (arXiv 2409.19606).
- `value_embeddings`: every second layer adds a vector of the token to attention's values (arXiv 2410.17897), the same
  one in all layers.

The model has its own name, because without trust_remote_code transformers would otherwise silently load these weights
without the scales. Licence: MIT.
"""
import torch
from torch import nn
from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.nanochat.configuration_nanochat import NanoChatConfig
from transformers.models.nanochat.modeling_nanochat import (
    NanoChatAttention,
    NanoChatDecoderLayer,
    NanoChatForCausalLM,
    NanoChatModel,
    apply_rotary_pos_emb,
    eager_attention_forward,
)
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

PLAIN_LAYERS = DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer  # of caches


class ScaledNanoChatConfig(NanoChatConfig):
    """layer_types: "full_attention" or "sliding_attention" for each layer; sliding_window: the number of positions that
    a layer of the second kind sees, with its own; value_embeddings: "off" or "shared"."""
    model_type = "nanochat_scaled"
    layer_types: list[str] | None = None
    sliding_window: int | None = None
    key_shift: bool = False
    layer_gates: bool = False
    value_embeddings: str = "off"

    def __post_init__(self, **kwargs):
        if self.layer_types is None:
            self.layer_types = ["full_attention"] * self.num_hidden_layers
        super().__post_init__(**kwargs)


class ScaledNanoChatAttention(NanoChatAttention):
    def forward(self, hidden_states, gate, value_embedding, has_before, position_embeddings, attention_mask=None,
                past_key_values=None, **kwargs):
        """As NanoChatAttention. gate (B, T, 1) multiplies the values, value_embedding (B, T, width) is added to them.
        has_before: whether a position has one before it, (B or 1, T)."""
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q = self.q_proj(hidden_states)
        k = self.k_proj(hidden_states)
        v = gate * self.v_proj(hidden_states) + value_embedding
        q, k, v = (x.view(shape).transpose(1, 2) for x in (q, k, v))  # (B, heads, T, head_dim)
        products = k
        if self.config.key_shift:
            if kwargs.get("cache") is not None:
                raise ValueError("shifted keys do not work with continuous batching: use generate()")
            k = self.shifted(k, past_key_values, has_before[:, None, :, None])
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        q, k = self.q_norm(q), self.k_norm(k)
        if past_key_values is not None and not self.config.key_shift:
            k, v = past_key_values.update(k, v, self.layer_idx)
        elif past_key_values is not None:  # the next position needs these products, so the cache keeps them, too
            k, v = past_key_values.update(torch.cat([k, products], dim=-1), v, self.layer_idx)
            k = k[..., :self.head_dim]
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        attended, weights = attend(self, q, k, v, attention_mask, scaling=self.scaling,
                                   dropout=self.attention_dropout if self.training else 0.0, **kwargs)
        return self.o_proj(attended.flatten(2)), weights

    def shifted(self, k, past_key_values, has_before):
        """Returns the keys k (B, heads, T, head_dim), half of the channels from the position before."""
        # (B, heads, 1, head_dim): the products of the position before the first of k, zeros without one.
        last = torch.zeros_like(k[:, :, :1])
        layers = past_key_values.layers if past_key_values is not None else ()
        if len(layers) > self.layer_idx and layers[self.layer_idx].is_initialized:
            layer = layers[self.layer_idx]
            if past_key_values.offloading or type(layer) not in PLAIN_LAYERS:
                raise ValueError("shifted keys work with a dynamic or a static cache that is not offloaded, and the "
                                 f"layers of this one are {type(layer).__name__}")
            # Keys and their products, (B, heads, positions, 2 × head_dim). A dynamic layer holds the positions so far,
            # a static one room for all, filled up to cumulative_length.
            kept = layer.keys
            length = layer.get_seq_length()
            if isinstance(layer, StaticLayer) and not (isinstance(length, int) and length >= kept.size(2)):
                # Indexed by a tensor: a number would be compiled into the program, and change with each token.
                last = kept.index_select(2, layer.cumulative_length.clamp(min=1).reshape(1) - 1)[..., self.head_dim:]
            elif length:
                last = kept[:, :, -1:, self.head_dim:]
        # (B, heads, T, head_dim): the products, one position later.
        before = torch.where(has_before, torch.cat([last, k[:, :, :-1]], dim=2), 0.0).to(k.dtype)
        # Rotary positions turn the pairs of channels i and i + head_dim / 2. The second half of each half is shifted,
        # so both channels of a pair come from the same position.
        channel = torch.arange(self.head_dim, device=k.device) % (self.head_dim // 2)
        return torch.where(channel < (self.head_dim // 2 + 1) // 2, k, before)


class ScaledNanoChatLayer(NanoChatDecoderLayer):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.self_attn = ScaledNanoChatAttention(config, layer_idx)
        self.resid_scale = nn.Parameter(torch.ones(1))
        self.x0_scale = nn.Parameter(torch.zeros(1))
        if config.layer_gates:  # of attention's values, attention and MLP
            self.gate_map = nn.Parameter(torch.zeros(3, config.hidden_size))
            self.gate_scale = nn.Parameter(torch.ones(3, 1))
        self.sliding_window = config.sliding_window if config.layer_types[layer_idx] == "sliding_attention" else None

    def forward(self, hidden_states, x0, value_embedding, **kwargs):
        x = self.resid_scale * hidden_states + self.x0_scale * x0  # (B, T, C)
        normed = self.input_layernorm(x)
        attended, _ = self.self_attn(normed, self.gate(0, normed), value_embedding, sliding_window=self.sliding_window,
                                     **kwargs)
        x = x + self.gate(1, normed) * attended
        normed = self.post_attention_layernorm(x)
        return x + self.gate(2, normed) * self.mlp(normed)

    def gate(self, which, normed):
        if not hasattr(self, "gate_map"):
            return 1.0
        logit = (normed.float() * self.gate_map[which].float()).sum(-1, keepdim=True)
        return (self.gate_scale[which].float() * 2 * torch.sigmoid(logit)).to(normed.dtype)  # (B, T, 1)


class Scaled:
    """The common parts of the model with and without its head."""
    config_class = ScaledNanoChatConfig
    _supports_attention_backend = False  # a backend that caches the keys itself would not shift them

    def post_init(self):
        super().post_init()
        self._no_split_modules = {"ScaledNanoChatLayer"}  # transformers collected its own layers, which are replaced

    def resize_token_embeddings(self, *args, **kwargs):
        if self.config.value_embeddings != "off":
            raise ValueError("a model with value embeddings keeps its vocabulary: they have a row for each token")
        return super().resize_token_embeddings(*args, **kwargs)


class ScaledNanoChatModel(Scaled, NanoChatModel):

    def __init__(self, config):
        super().__init__(config)
        self.layers = nn.ModuleList(ScaledNanoChatLayer(config, i) for i in range(config.num_hidden_layers))
        if config.value_embeddings != "off":
            width = config.num_key_value_heads * config.hidden_size // config.num_attention_heads
            self.value_table = nn.Embedding(config.vocab_size, width)
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, inputs_embeds=None,
                use_cache=None, **kwargs):
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        if self.config.value_embeddings != "off" and input_ids is None:
            raise ValueError("a model with value embeddings needs input_ids")
        embeddings = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds  # (B, T, C)
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        last = self.config.num_hidden_layers - 1  # sees everything: its static cache knows its length as a tensor
        past_length = past_key_values.get_seq_length(last) if past_key_values is not None else 0
        here = past_length + torch.arange(embeddings.shape[1], device=embeddings.device)  # (T,)
        is_flat = isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 2  # (B, T)
        if self.config.key_shift and position_ids is None and attention_mask is not None and not is_flat:
            raise ValueError("attention_mask is not of the shape (rows, positions): give position_ids, too, because "
                             "shifted keys must know where a text begins")
        if position_ids is None:
            position_ids = here[None]
        has_before = position_ids > 0
        if is_flat:
            # Padding comes before no text. Moved one to the right, the mask says whether the position before is text.
            has_before = has_before & nn.functional.pad(attention_mask, (1, 0)).bool()[:, here]  # (B, T)
        masks = self.masks(attention_mask, inputs_embeds=embeddings, past_key_values=past_key_values,
                           position_ids=position_ids)
        rotary = self.rotary_emb(embeddings, position_ids=position_ids)
        x0 = hidden_states = self.norm(embeddings)
        for layer, kind, value in zip(self.layers, self.config.layer_types, self.values(input_ids), strict=True):
            hidden_states = layer(hidden_states, x0, value, attention_mask=masks[kind], position_embeddings=rotary,
                                  has_before=has_before, position_ids=position_ids, past_key_values=past_key_values,
                                  **kwargs)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states), past_key_values=past_key_values)

    def masks(self, attention_mask, **arguments):
        """Returns {type of layer: mask}, which generate() has already made for a compiled forward."""
        if isinstance(attention_mask, dict):
            return attention_mask
        makers = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}
        return {kind: makers[kind](config=self.config, attention_mask=attention_mask, **arguments)
                for kind in set(self.config.layer_types)}

    def values(self, input_ids):
        """Returns the value embedding of each layer, (B, T, width), or 0.0."""
        found = [0.0] * len(self.layers)
        if self.config.value_embeddings == "off":
            return found
        # Every second layer has an embedding, counted from the last: 1, 3, 5 … of an even number of layers, 0, 2, 4 …
        # of an odd one.
        embedded = self.value_table(input_ids)  # (B, T, width)
        found[(len(found) - 1) % 2::2] = [embedded] * -(-len(found) // 2)
        return found


class ScaledNanoChatForCausalLM(Scaled, NanoChatForCausalLM):

    def __init__(self, config):
        super().__init__(config)
        self.model = ScaledNanoChatModel(config)
        self.post_init()
