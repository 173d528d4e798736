"""NanoChat with a scaled residual stream and attention windows, for Hugging Face's transformers.

    AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)

This file lies in the folder of an exported model and needs nothing else of the program that trained it. It extends the
NanoChat of transformers by two things. The input of each layer is resid_scale × x + x0_scale × x0, where x0 is the
normalised embedding (modded-nanogpt). And a layer may see only the last `sliding_window` positions.

The model has a name of its own, because transformers would otherwise load these weights without the scales, and without
an error, where trust_remote_code is left out. Licence: MIT.
"""
import torch
from torch import nn
from transformers.cache_utils import DynamicCache
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.nanochat.configuration_nanochat import NanoChatConfig
from transformers.models.nanochat.modeling_nanochat import NanoChatDecoderLayer, NanoChatForCausalLM, NanoChatModel
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs


class ScaledNanoChatConfig(NanoChatConfig):
    """layer_types: "full_attention" or "sliding_attention" for each layer; sliding_window: the positions that a layer
    of the second kind sees, its own among them."""
    model_type = "nanochat_scaled"
    layer_types: list[str] | None = None
    sliding_window: int | None = None

    def __post_init__(self, **kwargs):
        if self.layer_types is None:
            self.layer_types = ["full_attention"] * self.num_hidden_layers
        super().__post_init__(**kwargs)


class ScaledNanoChatLayer(NanoChatDecoderLayer):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.resid_scale = nn.Parameter(torch.ones(1))
        self.x0_scale = nn.Parameter(torch.zeros(1))
        self.sliding_window = config.sliding_window if config.layer_types[layer_idx] == "sliding_attention" else None

    def forward(self, hidden_states, x0, **kwargs):
        scaled = self.resid_scale * hidden_states + self.x0_scale * x0  # (B, T, C)
        return super().forward(scaled, sliding_window=self.sliding_window, **kwargs)


class ScaledNanoChatModel(NanoChatModel):
    config_class = ScaledNanoChatConfig

    def __init__(self, config):
        super().__init__(config)
        self.layers = nn.ModuleList(ScaledNanoChatLayer(config, i) for i in range(config.num_hidden_layers))
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, inputs_embeds=None,
                use_cache=None, **kwargs):
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        embeddings = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds  # (B, T, C)
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        if position_ids is None:
            past_length = past_key_values.get_seq_length() if past_key_values is not None else 0
            position_ids = (past_length + torch.arange(embeddings.shape[1], device=embeddings.device))[None]
        masks = attention_mask  # {type of layer: mask} where generate() has made them for a compiled forward
        if not isinstance(masks, dict):
            arguments = {"config": self.config, "inputs_embeds": embeddings, "attention_mask": attention_mask,
                         "past_key_values": past_key_values, "position_ids": position_ids}
            makers = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}
            masks = {kind: makers[kind](**arguments) for kind in set(self.config.layer_types)}
        rotary = self.rotary_emb(embeddings, position_ids=position_ids)
        x0 = hidden_states = self.norm(embeddings)
        for layer, kind in zip(self.layers, self.config.layer_types, strict=True):
            hidden_states = layer(hidden_states, x0, attention_mask=masks[kind], position_embeddings=rotary,
                                  position_ids=position_ids, past_key_values=past_key_values, **kwargs)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states), past_key_values=past_key_values)


class ScaledNanoChatForCausalLM(NanoChatForCausalLM):
    config_class = ScaledNanoChatConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = ScaledNanoChatModel(config)
        self.post_init()
