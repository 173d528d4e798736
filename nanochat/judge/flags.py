"""The flags of scripts that let a model write code. Nothing here imports torch, so --help comes at once."""
from dataclasses import dataclass

from nanochat.common import flag
from nanochat.infer.sample import Sampling, checked_max_tokens


@dataclass(frozen=True)
class WriterFlags:
    """How code_eval and solve draw code."""
    max_tokens: int = flag(-1, "tokens of a sample; -1: 256, at most half of the context", at_least=1, unset=-1)
    temperature: float = flag(0.8, "of the drawn samples", above=0)
    top_p: float = flag(0.95, "draw from the likeliest tokens that have this probability together", above=0, at_most=1)
    seed: int = flag(0, "the same seed gives the same code, and chooses the same gaps", at_least=0)

    def sampling(self, context, num_samples=1):
        """Returns the Sampling for a context. Raises BadInput if a sample leaves less than half of it to the prompt."""
        max_tokens = checked_max_tokens(self.max_tokens, context)
        return Sampling(num_samples, max_tokens, self.temperature, top_p=self.top_p, seed=self.seed)
