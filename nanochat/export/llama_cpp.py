"""A model of the Llama family as a GGUF file, which llama.cpp runs. Written with the package gguf."""
import json
from dataclasses import replace
from importlib.util import find_spec

import numpy as np

from nanochat.common import BadInput
from nanochat.data.hub_tokenizer import HubTokenizer
from nanochat.data.tokenizer_files import LLAMA_CPP_PATTERN
from nanochat.export import llama
from nanochat.export.tokenizer_json import tokenizer_json
from nanochat.infer.prompt import fills_gaps

LARGEST_F16 = 65504
BLOCK = 32  # values of a row that share a scale in q8_0
# By llama.cpp's name of a way to split text: the steps of a tokenizer.json that do the same, and whether a piece that
# is a token is taken whole (ignore_merges).
_WORDS = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
          r"\s+(?!\S)|\s+")


def _byte_level(use_regex):
    return {"type": "ByteLevel", "add_prefix_space": False, "use_regex": use_regex}


def _split(pattern):
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


SPLITS = {
    "smollm": ([{"type": "Digits", "individual_digits": True}, _byte_level(True)], False),
    "qwen2": ([_split(_WORDS % ""), _byte_level(False)], False),
    "llama-bpe": ([_split(_WORDS % "{1,3}"), _byte_level(False)], True)}

# {key of llama.cpp: names in tokenizers, ours first} of the tokens around gaps
GAPS = {"fim_pre": ("<|fim_prefix|>",), "fim_suf": ("<|fim_suffix|>",), "fim_mid": ("<|fim_middle|>",),
        "fim_pad": ("<|fim_pad|>", "<fim_pad>")}
# The same for tokens before the names of a project and a file. If a token has such a name, /infill begins each prompt
# with "myproject" and "filename". Only Qwen's Coder was trained with that; others then wrote "filename" into the gap.
FILES = {"fim_rep": ("<|repo_name|>", "<repo_name>", "<reponame>"), "fim_sep": ("<|file_sep|>",)}


def require_package():
    """Raises BadInput unless the package gguf is installed."""
    if not find_spec("gguf"):
        raise BadInput("*.gguf needs the package gguf, which is not installed: pip install '.[gguf]'")


def find_split(tokenizer):
    """Returns the name under which llama.cpp splits text as the tokenizer does. Raises BadInput if it has none."""
    if not isinstance(tokenizer, HubTokenizer):
        if tokenizer.pattern == LLAMA_CPP_PATTERN:
            return "superbpe"
        raise BadInput(f"llama.cpp cannot split text by {tokenizer.pattern}: export for transformers, or train with a "
                       "tokenizer of SmolLM2, Qwen or Llama 3, or of tok_train --llama_cpp (--tokenizer_dir)")
    found = json.loads(tokenizer.json)
    model, before, normalizer = found["model"], found["pre_tokenizer"] or {}, found.get("normalizer") or {}
    steps = [{key: value for key, value in step.items() if key != "trim_offsets"}
             for step in before.get("pretokenizers", [before])]
    is_plain = model.get("type") == "BPE" and not model.get("byte_fallback") and normalizer.get("type", "NFC") == "NFC"
    for name, (known, ignores_merges) in SPLITS.items():
        if is_plain and steps == known and bool(model.get("ignore_merges")) == ignores_merges:
            return name
    shown = json.dumps([model.get("type"), *steps], ensure_ascii=False)[:200]
    raise BadInput(f"llama.cpp is not known to split text as this tokenizer does ({shown}): export for transformers")


def write_gguf(file, path, model, tokenizer, meta, kind):
    """Writes the GGUF `file`. path: of the checkpoint, with its Meta; kind: "f16" or "q8_0", the type of the matrices.
    Raises BadInput for what llama.cpp does not compute."""
    import gguf
    if model.config.arch != "llama":
        raise BadInput("llama.cpp does not know the architecture of this GPT: give a model of --arch=llama, or export "
                       "for transformers")
    if _arch(model.config) == "qwen2" and model.config.head_dim * model.config.n_head != model.config.n_embd:
        raise BadInput(f"llama.cpp's qwen2 has heads of {model.config.n_embd} / {model.config.n_head}, and these have "
                       f"{model.config.head_dim}: export for transformers")
    split = find_split(tokenizer)
    writer = gguf.GGUFWriter(file, _arch(model.config))
    writer.add_name(meta.source["model"] if meta.source else path.parent.name)
    if meta.source and meta.source["licence"]:
        writer.add_license(meta.source["licence"])
    writer.add_file_type({"f16": gguf.LlamaFileType.MOSTLY_F16, "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0}[kind])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _add_sizes(writer, model.config)
    knows_files = fills_gaps(replace(meta, flags={}))  # before its import
    _add_tokens(writer, tokenizer, model.config.vocab_size, split, knows_files)
    _add_special_tokens(writer, path, tokenizer, meta, knows_files)
    for name, weight in _weights(model):
        data, stored_as = _stored(name, weight, kind)
        writer.add_tensor(name, data, raw_dtype=stored_as)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _arch(config):
    return "qwen2" if config.qkv_bias else "qwen3" if config.qk_norm else "llama"


def _add_sizes(writer, config):
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.n_embd)
    writer.add_block_count(config.n_layer)
    writer.add_feed_forward_length(config.mlp_dim)
    writer.add_head_count(config.n_head)
    writer.add_head_count_kv(config.n_kv_head)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)


def _add_tokens(writer, tokenizer, rows, split, knows_files):
    """rows: of the embedding. llama.cpp wants a token, with a name of its own, for each. knows_files: see FILES."""
    from gguf import TokenType
    found = json.loads(tokenizer_json(tokenizer))
    added = {token["content"]: token["id"] for token in found.get("added_tokens") or ()}
    tokens, kinds = [f"[PAD{number}]" for number in range(rows)], [TokenType.UNUSED] * rows
    for name, number in (found["model"]["vocab"] | added).items():
        tokens[number], kinds[number] = name, TokenType.NORMAL
    for number in added.values():
        kinds[number] = TokenType.USER_DEFINED
    for number in tokenizer.special_tokens.values():
        kinds[number] = TokenType.CONTROL
    if not knows_files:
        for name in set(sum(FILES.values(), ())) & set(tokens):
            tokens[tokens.index(name)] = f"[{name}]"
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    merges = found["model"]["merges"]  # each "a b", or since 2024 a pair
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])


def _add_special_tokens(writer, path, tokenizer, meta, knows_files):
    """What begins and ends texts, as the makers of the weights say it, the tokens around gaps, the chat template."""
    config = tokenizer.settings("tokenizer_config.json") if meta.source else {}
    generation = tokenizer.settings("generation_config.json") if meta.source else {}

    def id_of(name, default):
        token = config.get(f"{name}_token")
        token = token["content"] if isinstance(token, dict) else token
        number = generation.get(f"{name}_token_id")
        number = number[0] if isinstance(number, list) else number
        is_id = type(number) is int and 0 <= number < tokenizer.n_vocab
        return tokenizer.special_tokens.get(token, number if is_id else default)

    # llama.cpp takes 11, a comma in many vocabularies, for what a file does not have.
    if meta.flags:  # training here puts it before each document, whatever the source does
        writer.add_bos_token_id(tokenizer.bos_id)
        writer.add_add_bos_token(True)
    else:
        writer.add_bos_token_id(id_of("bos", tokenizer.bos_id))
        writer.add_add_bos_token(bool(config.get("add_bos_token", _puts_bos_first(tokenizer))))
    writer.add_eos_token_id(id_of("eos", tokenizer.bos_id))
    if fills_gaps(meta) and "<|fim_middle|>" in tokenizer.special_tokens:
        if not knows_files:
            writer.add_eot_token_id(tokenizer.middle_end)
        for key, names in (GAPS | FILES if knows_files else GAPS).items():
            for name in [name for name in names if name in tokenizer.special_tokens][:1]:
                writer.add_uint32(f"tokenizer.ggml.{key}_token_id", tokenizer.special_tokens[name])
    template = llama.small_files(path).get("chat_template.jinja", b"").decode() if meta.source else ""
    template = template or config.get("chat_template")
    if isinstance(template, str):  # of several, none is the usual one
        writer.add_chat_template(template)


def _puts_bos_first(tokenizer):
    """Returns whether the tokenizer.json puts a special token before a text."""
    step = json.loads(tokenizer_json(tokenizer)).get("post_processor") or {}
    steps = step.get("processors", [step])
    return any("SpecialToken" in each["single"][0] for each in steps if each.get("type") == "TemplateProcessing")


def _weights(model):
    """Yields (name in llama.cpp, numpy array in fp32) of the weights."""
    import gguf
    config = model.config
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[_arch(config).upper()], config.n_layer)  # from transformers'
    heads = {"attn_q": config.n_head, "attn_k": config.n_kv_head}
    for name, weight in model.state_dict().items():
        for theirs, layer in llama.layers(name, weight, config):
            layer = layer.numpy()
            if name in heads and _arch(config) == "llama":
                layer = _interleaved(layer, heads[name])
            yield names.get_name(theirs, try_suffixes=(".weight", ".bias")), layer


def _interleaved(weight, heads):
    """Returns the rows in llama.cpp's order: for `llama`, its rotary turns neighbouring channels of a head together."""
    rows, width = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, width).swapaxes(1, 2).reshape(rows, width)


def _stored(name, weight, kind):
    """Returns the array to write, and the type in which it is quantized, or None. llama.cpp wants vectors in fp32."""
    from gguf import GGMLQuantizationType, quants
    if not np.isfinite(weight).all():
        raise BadInput(f"{name} has a value that is not finite: give another checkpoint")
    if weight.ndim == 1:
        return weight, None
    largest = np.abs(weight).max()
    # With attention's matrices in 8 bits, too, SmolLM2-135M needs 0.40% more bits per byte, and 0.17% without.
    stays_f16 = ".attn_" in name and largest <= LARGEST_F16
    if kind == "q8_0" and weight.shape[1] % BLOCK == 0 and not stays_f16:
        return quants.quantize(weight, GGMLQuantizationType.Q8_0), GGMLQuantizationType.Q8_0
    if largest > LARGEST_F16:
        raise BadInput(f"{name} has {largest:,.0f}, and f16 ends at {LARGEST_F16:,}: give --gguf=q8_0, for rows of "
                       f"whole {BLOCK}, or export for transformers")
    return weight.astype(np.float16), None
