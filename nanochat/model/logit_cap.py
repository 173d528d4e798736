"""How a GPT bounds its logits. All code that computes logits uses LogitCap: the model, the kernels with their backward
passes by hand, evaluation, generation, and exports."""
from dataclasses import dataclass

import torch

LARGEST_WITHOUT_MAXIMUM = 60  # exp(60) summed over a vocabulary of 2**20 is 1e32, and fp32 reaches 3e38


@dataclass(frozen=True)
class LogitCap:
    """softcap × tanh(logits / softcap), which keeps logits within ±softcap (Gemma 2, arXiv 2408.00118); a no-op if
    softcap is 0.

    Autograd differentiates __call__, the reference. The other methods serve backward passes by hand; a test compares
    them with the reference.
    """
    softcap: float

    @classmethod
    def of(cls, config):
        """Returns the cap of a GPTConfig."""
        return cls(config.softcap)

    def __call__(self, logits):
        """Returns the capped logits, in the shape and dtype of `logits`."""
        if not self.softcap:
            return logits
        return self.softcap * torch.tanh(logits / self.softcap)

    def slope_at(self, capped):
        """Returns the cap's derivative at the capped logits `capped`, in their shape, or 1.0."""
        if not self.softcap:
            return 1.0
        return 1 - (capped / self.softcap).square()

    def with_slope(self, logits):
        """Returns the capped logits and the derivative there, clamped at 0: a chip's tanh may exceed 1 by rounding."""
        if not self.softcap:
            return logits, 1.0
        tanh = torch.tanh(logits / self.softcap)
        return self.softcap * tanh, (1 - tanh.square()).clamp(min=0.0)

    @property
    def needs_maximum(self):
        """Whether summing exponentials of capped logits in fp32 requires subtracting their maximum first."""
        return not 0 < self.softcap <= LARGEST_WITHOUT_MAXIMUM

    def for_transformers(self):
        """Returns the cap's entries of an export's config.json, {name: value}. The NanoChat of transformers knows one
        name; modeling_nanochat_scaled.py reads the others."""
        return {"final_logit_softcapping": self.softcap or None}
