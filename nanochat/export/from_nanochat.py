"""Reads a model of karpathy/nanochat as a GPT of this project."""
import json
import pickle
import re
import zipfile

import torch

from nanochat.common import BadInput, require_file
from nanochat.model.config import GPTConfig
from nanochat.model.gpt import GPT

# nanochat's names of a layer's weights, for those of weights.WEIGHTS.
LAYER_NAMES = {"attn_q": "attn.c_q.weight", "attn_k": "attn.c_k.weight", "attn_v": "attn.c_v.weight",
               "attn_o": "attn.c_proj.weight", "mlp_in": "mlp.c_fc.weight", "mlp_out": "mlp.c_proj.weight"}

TABLE_NAMES = {"wte": "transformer.wte.weight", "lm_head": "lm_head.weight"}

# The parts of a GPT that these models lack.
NANOCHAT = {"window_pattern": "L", "key_shift": False, "layer_gates": False, "value_embeddings": "off"}


def read_meta(model):
    """Returns (step, GPTConfig) of the meta_STEP.json beside nanochat's model_STEP.pt. Raises BadInput."""
    name = re.fullmatch(r"model_(\d{1,9})\.pt", model.name)
    if not name:
        raise BadInput(f"--model={model} is not named model_STEP.pt, such as model_000650.pt")
    path = model.with_name(f"meta_{name[1]}.json")
    try:
        require_file(model)
        require_file(path)
        found = json.loads(path.read_text(encoding="utf-8"))["model_config"]
        sizes = {"vocab_size": found["vocab_size"], "max_seq_len": found["sequence_len"], "n_layer": found["n_layer"],
                 "n_embd": found["n_embd"], "n_head": found["n_head"], "n_kv_head": found["n_kv_head"]}
        letters = set(found.get("window_pattern", "L"))
    except OSError as error:
        raise BadInput(f"--model={model}: {error.filename} cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadInput(f"--model={model}: {path} is not nanochat's ({type(error).__name__} {error})") from None
    if not all(type(size) is int and 0 < size < 2**31 for size in sizes.values()):
        raise BadInput(f"--model={model}: {path} has impossible sizes: {sizes}")
    if letters - {"L", "l"}:
        raise BadInput(f"--model={model} has attention windows ({found['window_pattern']}), which nanochat makes a "
                       "position longer")
    return int(name[1]), GPTConfig(**sizes, **NANOCHAT)


def read_weights(path):
    """Returns nanochat's {name: tensor}. Raises BadInput if the file cannot be read."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        size = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
        if size > path.stat().st_size:  # a tensor may repeat few bytes, and would fill the memory
            raise ValueError(f"its tensors take {size:,} bytes, more than the file")
        # torch.compile puts this prefix before the names of a compiled model.
        return {name.removeprefix("_orig_mod."): tensor for name, tensor in state.items()}
    except (OSError, ValueError, RuntimeError, EOFError, AttributeError, pickle.UnpicklingError,
            zipfile.BadZipFile) as error:
        reason = str(error).partition("\n")[0][:200]
        raise BadInput(f"--model={path} cannot be read ({reason}): copy it again") from None


def convert(state, config, path):
    """Returns nanochat's `state` as the weights of a GPT, fp32. Raises BadInput for parts that a GPT here lacks."""
    # Each known weight is taken out of `state`. The rest would be lost, so it is refused.
    found = {"resid_scale": state.pop("resid_lambdas", torch.ones(config.n_layer)),
             "x0_scale": state.pop("x0_lambdas", torch.zeros(config.n_layer))}
    for ours, theirs in TABLE_NAMES.items():
        if theirs in state:  # it may be padded with rows for no token
            found[ours] = state.pop(theirs)[:config.vocab_size]
    for ours, theirs in LAYER_NAMES.items():
        layers = [state.pop(f"transformer.h.{i}.{theirs}", None) for i in range(config.n_layer)]
        if all(layer is not None for layer in layers):
            found[ours] = torch.stack(layers).float()
    for name in ("cos", "sin"):  # computed from the config
        state.pop(name, None)
    if state:
        raise BadInput(f"--model={path} has {min(state)}, which the model here lacks: give one from before value "
                       "embeddings (January 2026)")
    for name, expected in GPT.on_meta(config).state_dict().items():
        if name not in found or found[name].shape != expected.shape:
            shape = tuple(found[name].shape) if name in found else "missing"
            expected = tuple(expected.shape)
            raise BadInput(f"--model={path} does not fit its meta file: {name} is {shape} and should be {expected}")
    return {name: tensor.float().contiguous() for name, tensor in found.items()}
