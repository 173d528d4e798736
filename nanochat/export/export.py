"""Writes a checkpoint as a folder for Hugging Face's transformers, without needing transformers.

A model of the Llama family is one of transformers' own (llama.py). A GPT without a scaled
residual stream, windows, shifted keys, gates and value embeddings is a `nanochat` of transformers. Any other needs
modeling_nanochat_scaled.py, which is copied beside it.
"""
import contextlib
import json
import os
import shutil
from dataclasses import fields
from pathlib import Path

from nanochat.checkpoint.on_disk import SUMS, sums_text, sync_to_disk
from nanochat.checkpoint.pieces import save_tensors
from nanochat.common import BadInput
from nanochat.export import llama, llama_cpp
from nanochat.export.tokenizer_json import tokenizer_json
from nanochat.kernels.choose import get_kernels
from nanochat.model import logit_cap
from nanochat.model.layers import NORM_EPS
from nanochat.model.tiny import require_unchanged

CODE = "modeling_nanochat_scaled"
MODEL = "model.safetensors"
GGUF = ".gguf"  # a file, where another export is a folder
FILES = {MODEL, llama.CARD, SUMS, f"{CODE}.py", "config.json", "generation_config.json", "tokenizer.json",
         "tokenizer_config.json"}
# The names of a layer's weights in transformers, for those of weights.WEIGHTS.
LAYER_NAMES = {"resid_scale": "resid_scale", "x0_scale": "x0_scale",
               "attn_q": "self_attn.q_proj.weight", "attn_k": "self_attn.k_proj.weight",
               "attn_v": "self_attn.v_proj.weight", "attn_o": "self_attn.o_proj.weight",
               "mlp_in": "mlp.fc1.weight", "mlp_out": "mlp.fc2.weight",
               "gate_map": "gate_map", "gate_scale": "gate_scale"}
OTHER_NAMES = {"wte": "model.embed_tokens.weight", "lm_head": "lm_head.weight",
               "value_table": "model.value_table.weight"}
# The fields of GPTConfig that the files express. A model whose other fields differ from the defaults is refused.
EXPRESSED = {"vocab_size", "max_seq_len", "n_layer", "n_embd", "n_head", "n_kv_head", "window_pattern", "short_window",
             "rotary_base", "key_shift", "layer_gates", "value_embeddings", *logit_cap.CONFIG_FIELDS}


def check_copy():
    """Raises BadInput if the GPT has changed since the files for transformers were compared with it."""
    require_unchanged(get_kernels("current", "cpu"), "the model computes something else than its export for "
                      f"transformers: change nanochat/export/{CODE}.py, too, and then LOGITS in nanochat/model/tiny.py")


def is_llama(model):
    return model.config.arch == "llama"


def check_exportable(model):
    """Raises BadInput if the model has parts that the files cannot express."""
    if is_llama(model):  # of which transformers computes every one
        return
    if 1 in model.config.windows():
        raise BadInput("--checkpoint has windows of 1 position, with which transformers' cache gives wrong results")
    unknown = sorted(model.state_dict().keys() - LAYER_NAMES.keys() - OTHER_NAMES.keys())
    for field in fields(model.config):
        value = getattr(model.config, field.name)
        if field.name not in EXPRESSED and value != field.default:
            unknown.append(f"{field.name} = {value}")
    if unknown:
        raise BadInput(f"--checkpoint: the model has {', '.join(unknown)}, which cannot be exported")


def is_scaled(model):
    """Returns whether the model is a GPT that is more than the `nanochat` of transformers."""
    if is_llama(model):
        return False
    config = model.config
    has_scales = bool((model.resid_scale != 1).any() or (model.x0_scale != 0).any())
    has_other_cap = model.logit_cap.for_transformers().keys() != {"final_logit_softcapping"}
    return bool(has_scales or has_other_cap or any(config.windows()) or config.key_shift or config.layer_gates
                or config.has_values)


def weights(model, meta):
    """Returns the weights of a model by their names in transformers, {name: tensor}."""
    if is_llama(model):
        return llama.weights(model, meta)
    state = model.state_dict()
    named = {theirs: state[ours] for ours, theirs in OTHER_NAMES.items() if ours in state}
    for ours, theirs in LAYER_NAMES.items():
        if ours not in state or ours in ("resid_scale", "x0_scale") and not is_scaled(model):
            continue
        for layer, weight in enumerate(state[ours].unbind(0)):
            # A layer's scale has the shape () here, and (1,) in transformers.
            named[f"model.layers.{layer}.{theirs}"] = weight.reshape(weight.shape or (1,))
    return named


def config_json(model, tokenizer):
    """Returns the object of transformers' config.json."""
    config = model.config
    if is_llama(model):
        return llama.config_json(config) | special_ids(tokenizer)
    windows = config.windows()
    found = {
        "architectures": ["NanoChatForCausalLM"],
        "model_type": "nanochat",
        "dtype": "float32",
        "vocab_size": config.vocab_size,
        "hidden_size": config.n_embd,
        "intermediate_size": 4 * config.n_embd,
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "num_key_value_heads": config.n_kv_head,
        "max_position_embeddings": config.max_seq_len,
        "hidden_act": "relu2",
        "rms_norm_eps": NORM_EPS,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rotary_base},
        **model.logit_cap.for_transformers(),
        "attention_bias": False,
        "tie_word_embeddings": False,
        **special_ids(tokenizer),
    }
    if is_scaled(model):
        found |= {
            "architectures": ["ScaledNanoChatForCausalLM"],
            "model_type": "nanochat_scaled",
            "auto_map": {"AutoConfig": f"{CODE}.ScaledNanoChatConfig", "AutoModel": f"{CODE}.ScaledNanoChatModel",
                         "AutoModelForCausalLM": f"{CODE}.ScaledNanoChatForCausalLM"},
            "layer_types": ["sliding_attention" if window else "full_attention" for window in windows],
            "sliding_window": next(filter(None, windows), None),
            "key_shift": config.key_shift,
            "layer_gates": config.layer_gates,
            "value_embeddings": config.value_embeddings}
    return found


def special_ids(tokenizer):
    """Returns the ids of the tokens between documents, as config.json and generation_config.json name them."""
    # <|bos|> begins the next document, and <|file_sep|> ends a filled-in middle.
    ends = sorted({tokenizer.bos_id, tokenizer.middle_end} - {None})
    return {"bos_token_id": tokenizer.bos_id, "eos_token_id": ends,
            "pad_token_id": tokenizer.special_tokens.get("<|pad|>")}


def tokenizer_config(tokenizer, max_seq_len):
    """Returns the object of transformers' tokenizer_config.json."""
    names = {}
    for name, number in tokenizer.special_tokens.items():
        names.setdefault(number, name)  # the tokenizer's own name comes first
    bos = names[tokenizer.bos_id]
    found = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos, "eos_token": bos,
             "clean_up_tokenization_spaces": False, "model_max_length": max_seq_len,
             "model_input_names": ["input_ids", "attention_mask"]}
    if "<|pad|>" in tokenizer.special_tokens:
        found["pad_token"] = names[tokenizer.special_tokens["<|pad|>"]]
    return found


def write_for_transformers(folder, path, model, tokenizer, meta, card):
    """Writes the files of AutoModelForCausalLM and AutoTokenizer, and the checksums of all files. path: of the
    checkpoint, with its Meta; card: from model_card.write_card. What came with imported weights goes on as it was."""
    if meta.source:
        for name, content in llama.small_files(path).items():
            (folder / name).write_bytes(content)
    else:
        _write_small_files(folder, model, tokenizer)
    with open(folder / llama.CARD, "a", encoding="utf-8") as file:
        file.write(card)
    if is_scaled(model):
        shutil.copy(Path(__file__).with_name(f"{CODE}.py"), folder)
    save_tensors(weights(model, meta), folder / MODEL, {"format": "pt"})
    (folder / SUMS).write_text(sums_text(sorted(folder.iterdir())))


def _write_small_files(folder, model, tokenizer):
    configs = {"config.json": config_json(model, tokenizer),
               "generation_config.json": special_ids(tokenizer),
               "tokenizer_config.json": tokenizer_config(tokenizer, model.config.max_seq_len)}
    for name, found in configs.items():
        (folder / name).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    (folder / "tokenizer.json").write_text(tokenizer_json(tokenizer), encoding="utf-8")


def check_place(out, force):
    """Raises BadInput unless the folder or file `out` may be written: it is new, or an export and `force`."""
    try:
        if out.is_symlink():
            raise BadInput(f"--out={out} is a symbolic link: name its target")
        is_there = out.is_file() or out.is_dir() and any(out.iterdir())
        is_other_kind = out.exists() and out.is_dir() == (out.suffix == GGUF)
        if is_other_kind or is_there and not _is_export(out):
            raise BadInput(f"--out={out} is something else than an export: name another place")
    except OSError as error:
        raise BadInput(f"--out={out} cannot be read ({error.strerror}): name another place") from None
    if is_there and not force:
        raise BadInput(f"--out={out} exists: name another place, or replace it with --force")


def _is_export(out):
    """Returns whether this module wrote the folder or file, and nobody added anything."""
    if out.is_dir():
        found = {path.name for path in out.iterdir()}
        return SUMS in found and all(name in FILES or llama.matches(name, llama.SMALL_FILES) for name in found)
    return out.suffix == GGUF and llama_cpp.is_file_of_ours(out)


@contextlib.contextmanager
def new_place(out, force, needed_bytes):
    """Yields an empty folder OUT.PID.partial. When the block ends, the folder takes the name `out`, or its file
    model.gguf does. If the block fails, `out` stays unchanged. Raises BadInput if the folder
    cannot be made, or the disk has not `needed_bytes`."""
    check_place(out, force)
    partial = out.with_name(f"{out.name}.{os.getpid()}.partial")
    old = out.with_name(f"{out.name}.{os.getpid()}.replaced")
    try:
        partial.mkdir()
        free = shutil.disk_usage(partial).free
    except OSError as error:
        raise BadInput(f"--out={out} cannot be written ({error.strerror}): name another place") from None
    try:
        if free < needed_bytes:
            raise BadInput(f"--out={out} needs {needed_bytes / 1e6:,.1f} MB, and {free / 1e6:,.1f} MB are free")
        yield partial
        # A rename may reach the disk before the renamed files, so these are synced first, and then their folder.
        for path in (*partial.iterdir(), partial):
            sync_to_disk(path)
        check_place(out, force)  # another export may have finished meanwhile
        if out.suffix == GGUF:
            (partial / "model.gguf").replace(out)
        else:
            # A rename cannot replace a folder that is not empty, so the old one steps aside. A kill between the two
            # renames leaves both under other names: --out is missing, but never half.
            if out.is_dir():
                out.rename(old)
            partial.rename(out)
        sync_to_disk(out.parent)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
