"""The model card of a checkpoint that has only its Meta."""
from pathlib import Path
from types import SimpleNamespace

from nanochat.data.tokenizer import load_tokenizer
from nanochat.export.model_card import write_card
from nanochat.model.config import GPTConfig


def card_of(meta):
    model = SimpleNamespace(parameters=lambda: [], config=GPTConfig())
    return write_card(Path("no_runs/a_run/step_000020"), model, meta, load_tokenizer())
