"""The GPT: rotary positions, QK-norm, ReLU², RMSNorm without parameters, an untied head with softcapped logits,
grouped-query attention and short attention windows. layers.gpt_layer is its layer."""
from nanochat.model import layers
from nanochat.model.decoder import Decoder


class GPT(Decoder):

    def _begin(self, x):
        return layers.norm(x)

    def _end(self, x):
        return layers.norm(x)
