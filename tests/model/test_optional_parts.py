"""What --layer_gates and --value_embeddings have in common: they belong to a model from its first step on."""
from dataclasses import asdict

import pytest

from nanochat.checkpoint.meta import Meta, require_match
from nanochat.common import BadInput
from nanochat.model.gpt import GPTConfig
from tests.model.test_gpt import TINY


@pytest.mark.parametrize("part", ["layer_gates", "value_embeddings"])
def test_a_run_resumes_with_those_that_it_began_with(part):
    config = asdict(GPTConfig(**TINY, **{part: True}))
    meta = Meta(step=1, config=config, tokenizer_sha256="", data_fingerprint="", flags={}, rng="")
    require_match("here", meta, config=config, tokenizer_sha256=None, data_fingerprint=None)
    there = "own" if part == "value_embeddings" else "on"
    with pytest.raises(BadInput, match=f"--{part} is {there} there and off here"):
        require_match("here", meta, config=asdict(GPTConfig(**TINY)), tokenizer_sha256=None, data_fingerprint=None)
    if part == "value_embeddings":
        with pytest.raises(BadInput, match="--value_embeddings is own there and shared here"):
            require_match("here", meta, config=config | {"shared_values": True}, tokenizer_sha256=None,
                          data_fingerprint=None)
