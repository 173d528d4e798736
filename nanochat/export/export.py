"""Writes a checkpoint as a folder for Hugging Face's transformers, without needing transformers.

A model of the Llama family is one of transformers' own (llama.py). A GPT needs modeling_nanochat_scaled.py, which is
copied beside it.
"""
import contextlib
import json
import os
import shutil
from pathlib import Path

from nanochat.checkpoint.on_disk import SUMS, sums_text, sync_to_disk
from nanochat.checkpoint.pieces import save_tensors
from nanochat.common import BadInput
from nanochat.export import llama
from nanochat.export.tokenizer_json import tokenizer_json
from nanochat.model.layers import NORM_EPS

CODE = "modeling_nanochat_scaled"
MODEL = "model.safetensors"
KNOWN = {"head_dim", "layer_gates", "key_shift"}  # the LayerOptions that modeling_nanochat_scaled.py computes
GGUF = ".gguf"  # a file, where another export is a folder
# The names of a layer's weights in transformers, for those of weights.WEIGHTS.
LAYER_NAMES = {"resid_scale": "resid_scale", "x0_scale": "x0_scale",
               "attn_q": "self_attn.q_proj.weight", "attn_k": "self_attn.k_proj.weight",
               "attn_v": "self_attn.v_proj.weight", "attn_o": "self_attn.o_proj.weight",
               "mlp_in": "mlp.fc1.weight", "mlp_out": "mlp.fc2.weight",
               "gate_map": "gate_map", "gate_scale": "gate_scale"}
OTHER_NAMES = {"wte": "model.embed_tokens.weight", "lm_head": "lm_head.weight",
               "value_table": "model.value_table.weight"}


def is_llama(model):
    return model.config.arch == "llama"


def check_exportable(model):
    """Raises BadInput if transformers would compute the model otherwise."""
    if is_llama(model):
        return
    if unknown := model.options.unknown(KNOWN):
        raise BadInput(f"--checkpoint has {unknown}, which an export does not compute")
    if 1 in model.config.windows():
        raise BadInput("--checkpoint has windows of 1 position, with which transformers' cache gives wrong results")


def weights(model, meta):
    """Returns the weights of a model by their names in transformers, {name: tensor}."""
    if is_llama(model):
        return llama.weights(model, meta)
    named = {}
    for ours, weight in model.state_dict().items():
        if ours in OTHER_NAMES:
            named[OTHER_NAMES[ours]] = weight
            continue
        for layer, of_layer in enumerate(weight.unbind(0)):
            # A layer's scale has the shape () here, and (1,) in transformers.
            named[f"model.layers.{layer}.{LAYER_NAMES[ours]}"] = of_layer.reshape(of_layer.shape or (1,))
    return named


def config_json(model, tokenizer):
    """Returns the object of transformers' config.json."""
    config = model.config
    if is_llama(model):
        return llama.config_json(config) | special_ids(tokenizer)
    windows = config.windows()
    return {
        "architectures": ["ScaledNanoChatForCausalLM"],
        "model_type": "nanochat_scaled",
        "auto_map": {"AutoConfig": f"{CODE}.ScaledNanoChatConfig", "AutoModel": f"{CODE}.ScaledNanoChatModel",
                     "AutoModelForCausalLM": f"{CODE}.ScaledNanoChatForCausalLM"},
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
        "layer_types": ["sliding_attention" if window else "full_attention" for window in windows],
        "sliding_window": next(filter(None, windows), None),
        "key_shift": config.key_shift,
        "layer_gates": config.layer_gates,
        "value_embeddings": config.value_embeddings,
        **special_ids(tokenizer),
    }


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
    if not is_llama(model):
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


def check_place(out):
    """Raises BadInput unless there is nothing at `out`."""
    if os.path.lexists(out):
        raise BadInput(f"--out={out} exists: name another place, or delete it")


@contextlib.contextmanager
def new_place(out, needed_bytes):
    """Yields an empty folder OUT.PID.partial. When the block ends, the folder takes the name `out`, or its file
    model.gguf does. Raises BadInput if the folder cannot be made, or the disk has not `needed_bytes`."""
    check_place(out)
    partial = out.with_name(f"{out.name}.{os.getpid()}.partial")
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
        check_place(out)  # another export may have finished meanwhile
        (partial / "model.gguf" if out.suffix.lower() == GGUF else partial).rename(out)
        sync_to_disk(out.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
