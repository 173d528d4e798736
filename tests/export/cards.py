"""The model card of a checkpoint that has only its Meta."""
from types import SimpleNamespace

from nanochat.data.tokenizer import load_tokenizer
from nanochat.export.model_card import write_card
from nanochat.model.config import GPTConfig


def card_of(meta, manifest=None):
    model = SimpleNamespace(parameters=lambda: [], config=GPTConfig())
    return write_card("a_run", model, meta, load_tokenizer(), run=None, manifest=manifest, is_scaled=False)
