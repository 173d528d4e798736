"""The Llama family as Hugging Face's transformers spells it: names of weights, config.json and the small files, for the
import (hub.py) and the export (export.py)."""
import json
from fnmatch import fnmatchcase

import torch

from nanochat.checkpoint.on_disk import SOURCE
from nanochat.common import BadInput
from nanochat.data.hub_tokenizer import read_source
from nanochat.model.llama import CONTEXT, LlamaConfig
from nanochat.model.weights import shapes

CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}  # by model_type
CONFIG = "config.json"
CARD = "README.md"
# What comes with weights and goes on with them, byte for byte.
SMALL_FILES = (CONFIG, "generation_config.json", "tokenizer.json", "tokenizer_config.json",
               "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja",
               "LICENSE*", CARD)
# The names of a layer's weights in transformers, for those of model/llama.py, and of the others.
LAYER_NAMES = {"attn_norm": "input_layernorm.weight",
               "attn_q": "self_attn.q_proj.weight", "attn_k": "self_attn.k_proj.weight",
               "attn_v": "self_attn.v_proj.weight", "attn_o": "self_attn.o_proj.weight",
               "q_bias": "self_attn.q_proj.bias", "k_bias": "self_attn.k_proj.bias", "v_bias": "self_attn.v_proj.bias",
               "q_norm": "self_attn.q_norm.weight", "k_norm": "self_attn.k_norm.weight",
               "mlp_norm": "post_attention_layernorm.weight", "mlp_gate": "mlp.gate_proj.weight",
               "mlp_in": "mlp.up_proj.weight", "mlp_out": "mlp.down_proj.weight"}
OTHER_NAMES = {"wte": "model.embed_tokens.weight", "out_norm": "model.norm.weight", "lm_head": "lm_head.weight"}


def matches(name, patterns):
    """Returns whether the name of a file is one of these, SMALL_FILES for example."""
    return "/" not in name and any(fnmatchcase(name, pattern) for pattern in patterns)


def their_names(name, config):
    """Returns the names in transformers of a weight's layers, or its one name in a list."""
    if name in OTHER_NAMES:
        return [OTHER_NAMES[name]]
    return [f"model.layers.{layer}.{LAYER_NAMES[name]}" for layer in range(config.n_layer)]


def their_shapes(config):
    """Returns {name in transformers: shape} of the weights in a config's model."""
    found = {}
    for name, shape in shapes(config).items():
        found |= dict.fromkeys(their_names(name, config), shape if name in OTHER_NAMES else shape[1:])
    return found


# In


def read_config(found, max_seq_len=None):
    """Returns the LlamaConfig of the object in a config.json. max_seq_len: of the run's rows; by default the model's
    positions, and at most 2,048. Raises BadInput for everything that this program would compute otherwise."""
    kind = found.get("model_type")
    if kind not in CLASSES:
        raise BadInput(f"model_type {_shown(kind)} is not of this family: give a model of {', '.join(CLASSES)}")
    _require_plain(found, kind)

    def number(key, default=None, of=int):
        value = found.get(key)
        value = default if value is None else value
        if type(value) not in (int, of) or not 0 < value < 2**31:
            raise BadInput(f"{key} is {_shown(value)}, and must be a number above 0")
        return of(value)

    base = (found.get("rope_parameters") or {}).get("rope_theta") or found.get("rope_theta")
    if base is None:
        raise BadInput("there is no rope_theta, in rope_parameters or beside: its makers say which, older models have "
                       "10000.0. Add it to a copy of the file")
    found = found | {"rope_theta": base}
    heads, width = number("num_attention_heads"), number("hidden_size")
    # Llama and Qwen2 leave these out where they follow from others; Qwen3 has other defaults, and never does.
    head_dim = number("head_dim", None if kind == "qwen3" else width // heads)
    positions = number("max_position_embeddings")
    return LlamaConfig(
        vocab_size=number("vocab_size"), n_layer=number("num_hidden_layers"), n_embd=width, n_head=heads,
        n_kv_head=number("num_key_value_heads", heads if kind == "llama" else None), head_dim=head_dim,
        mlp_dim=number("intermediate_size"), tied_head=bool(found.get("tie_word_embeddings", False)),
        max_seq_len=max_seq_len or min(positions, CONTEXT), max_positions=positions,
        rope_theta=number("rope_theta", of=float), norm_eps=number("rms_norm_eps", of=float),
        qkv_bias=kind == "qwen2", qk_norm=kind == "qwen3")


def _require_plain(found, kind):
    """Raises BadInput if a config.json has what model/llama.py does not compute."""
    has_windows = found.get("use_sliding_window") and found.get("sliding_window", 4096)
    is_plain = {
        "architectures": found.get("architectures") in (None, [CLASSES[kind]]),
        "hidden_act": found.get("hidden_act", "silu") == "silu",
        "mlp_bias": not found.get("mlp_bias"),
        "attention_bias": kind == "qwen2" or not found.get("attention_bias"),  # it biases o_proj, too; Qwen2 ignores it
        "quantization_config": not found.get("quantization_config"),
        "rope_scaling": _is_plain_rope(found.get("rope_scaling")),
        "rope_parameters": _is_plain_rope(found.get("rope_parameters")),
        "partial_rotary_factor": found.get("partial_rotary_factor") in (None, 1),
        "use_sliding_window": not has_windows or found.get("max_window_layers", 28) >= found["num_hidden_layers"],
        "layer_types": set(found.get("layer_types") or ()) <= {"full_attention"},
    }
    for key, is_so in is_plain.items():
        if not is_so:
            raise BadInput(f"{key} is {_shown(found[key])}, which this program does not compute: give a model without "
                           "it")


def _is_plain_rope(rope):
    """Returns whether rotary positions are neither scaled nor partial, nor different from layer to layer."""
    return not rope or rope.get("rope_type", rope.get("type", "default")) == "default" and rope.keys() <= {
        "rope_type", "type", "rope_theta"}


# Out


def layers(name, weight, config):
    """Returns [(name in transformers, tensor)] of a weight's layers, or of the one weight."""
    return zip(their_names(name, config), [weight] if name in OTHER_NAMES else weight.unbind(0), strict=True)


def weights(model, meta):
    """Returns the weights by their names in transformers, in the dtype that they came in or else in fp32."""
    dtype = getattr(torch, meta.source["dtype"] if meta.source else "float32")
    found = {}
    for name, weight in model.state_dict().items():
        found |= {theirs: layer.to(dtype) for theirs, layer in layers(name, weight, model.config)}
    return found


def small_files(path):
    """Returns {name: bytes} of the small files that came with the weights of the checkpoint at `path`. Raises BadInput
    if they are damaged."""
    try:
        found = {name: content for name, content in read_source(path).items() if matches(name, SMALL_FILES)}
        read_config(json.loads(found[CONFIG]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, BadInput) as error:
        raise BadInput(f"checkpoint {path} is damaged ({SOURCE}: {error}): use another one") from None
    return found


def config_json(config):
    """Returns the object of a config.json for a model that was trained from nothing. Readers of transformers 4 and 5
    find rope_theta and dtype at different places."""
    return {
        "architectures": [CLASSES["llama"]], "model_type": "llama", "dtype": "float32", "torch_dtype": "float32",
        "vocab_size": config.vocab_size, "hidden_size": config.n_embd, "intermediate_size": config.mlp_dim,
        "num_hidden_layers": config.n_layer, "num_attention_heads": config.n_head,
        "num_key_value_heads": config.n_kv_head, "head_dim": config.head_dim,
        "max_position_embeddings": config.max_positions, "hidden_act": "silu", "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": config.tied_head}


def _shown(value):
    return json.dumps(value, ensure_ascii=False)[:80]
