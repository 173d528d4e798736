"""A GGUF file is the checkpoint: transformers, which reads the format with a program of its own, gets the same weights,
and what llama.cpp needs to know about sizes and tokens is there. What llama.cpp would compute otherwise is refused."""
import json
import sys
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from nanochat.checkpoint import on_disk
from nanochat.common import BadInput
from nanochat.data.tokenizer import load_tokenizer
from nanochat.kernels.choose import get_kernels
from nanochat.model.config import GPTConfig
from nanochat.model.llama import LlamaConfig
from scripts import export
from tests.checkpoint.states import make_source, names
from tests.data.hub import SMOLLM2_SPECIAL
from tests.export.test_hub import MODELS, change, import_to, tensors_in, write_model, write_tokenizer
from tests.infer.test_engine import save_model

transformers = pytest.importorskip("transformers")
gguf = pytest.importorskip("gguf")
gguf_reader = pytest.importorskip("transformers.modeling_gguf_pytorch_utils")

def imported(tmp_path, kind="llama tied"):
    write_model(tmp_path / "model", kind)
    return import_to("imported", tmp_path / "model")


def export_to(out, *flags):
    export.main(["--checkpoint=imported", f"--out={out}", *flags])
    return out


def entries(file):
    return {name: field.contents() for name, field in gguf.GGUFReader(file).fields.items()}


@pytest.mark.parametrize("kind, flags", [
    *(pytest.param(kind, [], marks=pytest.mark.slow) for kind in MODELS),
    pytest.param("llama tied", ["--gguf=q8_0"], marks=pytest.mark.slow), ("qwen2", ["--gguf=q8_0"])])
def test_transformers_reads_the_same_weights_and_sizes(tmp_path, base_dir, kind, flags):
    imported(tmp_path, kind)
    out = export_to(tmp_path / "model.gguf", *flags)
    original = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    theirs = transformers.AutoModelForCausalLM.from_config(original.config).eval()
    found = gguf_reader.load_gguf_checkpoint(out, return_tensors=True, model_to_load=theirs)["tensors"]
    theirs.load_state_dict(found, strict="tied" not in kind)
    for name, tensor in tensors_in(tmp_path / "model").items():
        expected = tensor.float() if tensor.ndim == 1 else tensor.to(torch.float16).float()
        is_attention = ".self_attn." in name
        # Half a step of 127, and the step's rounding.
        if flags and tensor.ndim == 2 and tensor.shape[1] % 32 == 0 and not is_attention:
            assert 0 < (found[name] - expected).abs().max() <= 0.6 * tensor.abs().max() / 127, name
        else:
            assert torch.equal(found[name], expected), name
    config = transformers.AutoConfig.from_pretrained(tmp_path, gguf_file=out.name)
    for key in ("model_type", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings"):
        assert getattr(config, key) == pytest.approx(getattr(original.config, key)), key
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(out).tensors}
    assert ("output.weight" in stored) == ("tied" not in kind)
    types = {name: tensor.tensor_type.name for name, tensor in stored.items()}
    assert types["blk.0.ffn_norm.weight"] == "F32" and types["blk.0.ffn_down.weight"] == "F16"  # rows of 48
    assert types["token_embd.weight"] == ("Q8_0" if flags else "F16")
    assert types["blk.0.attn_output.weight"] == "F16"
    if not flags:
        ids = torch.randint(257, (2, 50), generator=torch.Generator().manual_seed(2))
        with torch.no_grad():
            assert (theirs(ids).logits - original(ids).logits).abs().max() < 0.02


def test_tokens_and_texts_are_entries_that_llama_cpp_reads(tmp_path, base_dir):
    imported(tmp_path)
    found = entries(export_to(tmp_path / "a.GGUF"))
    assert found["general.name"] == "model" and found["general.license"] == "apache-2.0"
    ggml = {key.removeprefix("tokenizer.ggml."): value for key, value in found.items() if "tokenizer.ggml." in key}
    shown = [f"[{name}]" if name in ("<reponame>", "<repo_name>") else name for name in SMOLLM2_SPECIAL]
    assert ggml["tokens"][:len(shown)] == shown and ggml["tokens"][900:902] == ["    ", "[PAD901]"]
    normal, control, user_defined, unused = 1, 3, 4, 5
    assert ggml["token_type"] == ([control] * len(shown) + [normal] * (900 - len(shown)) + [user_defined]
                                  + [unused] * 59)
    bos, eos = (shown.index(name) for name in ("<|im_start|>", "<|im_end|>"))
    assert (ggml["bos_token_id"], ggml["eos_token_id"], ggml["add_bos_token"]) == (bos, eos, False)
    assert not [key for key in ggml if key.startswith("fim")]  # nobody trained it to fill gaps
    assert found["tokenizer.chat_template"] == "{{ messages }}\r\n"


NOTEBOOKS = {"fim_pre": "<jupyter_start>", "fim_suf": "<jupyter_text>", "fim_mid": "<jupyter_code>"}


@pytest.mark.parametrize("meta, expected", [
    ({"flags": {"fim_rate": 0.5}}, NOTEBOOKS | {"eot": "<file_sep>"}),
    ({"source": make_source(model="Qwen/Qwen2.5-Coder-0.5B")},
     NOTEBOOKS | {"fim_rep": "<repo_name>", "fim_sep": "<file_sep>"})], ids=["trained here", "a coder of Qwen"])
def test_gap_tokens_are_named_where_training_had_them_and_those_of_files_for_a_coder_of_qwen(tmp_path, base_dir, meta,
                                                                                             expected):
    change(imported(tmp_path), meta)
    found = entries(export_to(tmp_path / "a.gguf"))
    tokens = found["tokenizer.ggml.tokens"]
    named = {key.split(".")[-1].removesuffix("_token_id"): tokens[value] for key, value in found.items()
             if "fim_" in key or "eot_" in key}
    assert named == expected
    assert "<reponame>" in tokens if "fim_rep" in named else "[<reponame>]" in tokens
    # Training puts <|endoftext|> before each document, and the source puts nothing before a text.
    assert found["tokenizer.ggml.add_bos_token"] == ("flags" in meta)
    assert tokens[found["tokenizer.ggml.bos_token_id"]] == ("<|endoftext|>" if "flags" in meta else "<|im_start|>")


def save_new(base_dir, tokenizer, config):
    """Saves a model that began from nothing as a checkpoint of the run `imported`."""
    model = config.new_model(get_kernels("current", "cpu")).init_weights()
    save_model(base_dir / "checkpoints" / "imported", model, tokenizer)


NEW = {"vocab_size": 960, "n_layer": 1, "n_embd": 32, "n_head": 2, "n_kv_head": 1, "max_seq_len": 64}


def test_a_model_from_nothing_begins_and_ends_texts_as_in_its_training(tmp_path, base_dir):
    write_tokenizer(tmp_path)
    save_new(base_dir, load_tokenizer(tmp_path), LlamaConfig(**NEW, head_dim=16, mlp_dim=64))
    found = entries(export_to(tmp_path / "a.gguf", f"--tokenizer_dir={tmp_path}"))
    assert found["general.name"] == "imported"
    assert (found["tokenizer.ggml.bos_token_id"], found["tokenizer.ggml.eos_token_id"]) == (0, 0)
    assert found["tokenizer.ggml.add_bos_token"] is True


def test_what_llama_cpp_would_compute_otherwise_is_refused_and_nothing_is_left(tmp_path, base_dir):
    path = imported(tmp_path)
    out = tmp_path / "a.gguf"

    def refused(match, *flags):
        with pytest.raises(BadInput, match=match):
            export_to(out, *flags)
        assert names(tmp_path) == ["base", "model"]

    weights = load_file(path / on_disk.MODEL)
    weights["mlp_in"][0, 0, 0] = 70_000
    change(path, mlp_in=weights["mlp_in"])
    refused("blk.0.ffn_up.weight.*70,000.*65,504.*q8_0")
    export_to(out, "--gguf=q8_0")
    out.unlink()
    weights["mlp_in"][0, 0, 0] = np.inf
    change(path, mlp_in=weights["mlp_in"])
    refused("blk.0.ffn_up.weight.*not finite", "--gguf=q8_0")
    with mock.patch.dict(sys.modules, gguf=None):
        refused(r"package gguf.*pip install '.\[gguf\]'")
    with pytest.raises(BadInput, match="--gguf=q8_0.*/folder does not end in .gguf"):
        export_to(tmp_path / "folder", "--gguf=q8_0")


@pytest.mark.parametrize("key, value", [
    ("pre_tokenizer", {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}),
    ("model", {"ignore_merges": True})])
def test_a_tokenizer_that_splits_otherwise_is_refused_by_name(tmp_path, base_dir, key, value):
    write_model(tmp_path / "model")
    file = tmp_path / "model" / "tokenizer.json"
    found = json.loads(file.read_text())
    file.write_text(json.dumps(found | {key: found[key] | value if key == "model" else value}))
    import_to("imported", tmp_path / "model")
    with pytest.raises(BadInput, match="llama.cpp.*BPE.*ByteLevel"):
        export_to(tmp_path / "a.gguf")


@pytest.mark.parametrize("config, words", [
    (GPTConfig(**NEW), "GPT.*--arch=llama"),
    (LlamaConfig(**NEW, head_dim=32, mlp_dim=64, qkv_bias=True), "qwen2.*32 / 2.*have 32")])
def test_models_that_llama_cpp_does_not_know_are_refused(tmp_path, base_dir, config, words):
    write_tokenizer(tmp_path)
    save_new(base_dir, load_tokenizer(tmp_path), config)
    with pytest.raises(BadInput, match=words):
        export_to(tmp_path / "a.gguf", f"--tokenizer_dir={tmp_path}")
