"""Small states of models and optimizers, and checkpoints of them, for the tests."""
import torch

from nanochat.run import checkpoint
from nanochat.run.meta import Meta


def make_meta(step=1, **fields):
    return Meta(**{"step": step, "config": {"n_layer": 2, "n_embd": 128}, "tokenizer_sha256": "aa" * 32,
                   "data_fingerprint": "bb" * 32, "flags": {"depth": 2}, "rng": "", **fields})


def make_state(seed=0):
    generator = torch.Generator().manual_seed(seed)
    model = {"attn_q": torch.randn(2, 8, 8, generator=generator), "wte": torch.randn(16, 8, generator=generator)}
    optimizer = {f"{name}.momentum": torch.randn(t.shape, generator=generator).bfloat16() for name, t in model.items()}
    return model, optimizer


def save(run_dir, step, **kwargs):
    """Saves a checkpoint of two lanes, whose weights depend on `step`; returns its path."""
    checkpoint.save_lane_states(run_dir, step, {0: {"row": step}, 1: {"row": step, "buffer": [1, 2, 3]}})
    return checkpoint.save(run_dir, *make_state(step), make_meta(step), num_lanes=2, **kwargs)


def names(run_dir):
    return sorted(path.name for path in run_dir.iterdir())


def flip_a_byte(path, offset=-1):
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)
