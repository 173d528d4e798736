"""The GPT: rotary positions, QK-norm, ReLU², RMSNorm without parameters, an untied head with softcapped logits,
grouped-query attention and short attention windows. layers.gpt_layer is its layer."""
import torch

from nanochat.model import layers
from nanochat.model.decoder import Decoder


class GPT(Decoder):

    def _options(self):
        return layers.LayerOptions.of(self.config)

    def _rotary_tables(self):
        config = self.config
        return layers.rotary_tables(torch.arange(config.max_seq_len), config.head_dim, config.rotary_base)

    def _begin(self, x):
        return layers.norm(x)

    def _end(self, x):
        return layers.norm(x)
