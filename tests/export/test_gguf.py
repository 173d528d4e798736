"""A GGUF file is the checkpoint: transformers, which reads the format with a program of its own, gets the same weights,
and what llama.cpp needs to know about sizes and tokens is there. What llama.cpp would compute otherwise is refused."""
import json
import sys
from dataclasses import asdict
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from nanochat.checkpoint import on_disk
from nanochat.checkpoint.meta import load_meta
from nanochat.checkpoint.saver import save_checkpoint
from nanochat.common import BadInput
from nanochat.data.tokenizer import load_tokenizer
from nanochat.kernels.choose import get_kernels
from nanochat.model.config import GPTConfig
from nanochat.model.llama import LlamaConfig
from scripts import export
from tests.checkpoint.states import make_meta, names
from tests.export.test_hub import MODELS, change_json, import_to, tensors_in, write_model

transformers = pytest.importorskip("transformers")
gguf = pytest.importorskip("gguf")
gguf_reader = pytest.importorskip("transformers.modeling_gguf_pytorch_utils")

# As the makers' tokenizer.json have them.
QWEN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|"
        r"\s+")
LLAMA_3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
           r"\s+(?!\S)|\s+")
# Ids 258 to 265, after bytes and two merges.
CONTROL = ("<|endoftext|>", "<|im_end|>", "<file_sep>", "<reponame>", "<repo_name>", "<jupyter_start>",
           "<jupyter_text>", "<jupyter_code>")


def write_tokenizer(folder, split="smollm"):
    """Writes a tokenizer that splits text as the makers of SmolLM2 ("smollm"), Qwen ("qwen2") or Llama 3 do."""
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: number for number, character in enumerate(characters)} | {"in": 256, "int": 257}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("i", "n"), ("in", "t")], ignore_merges=split == "llama-bpe"))
    if split == "smollm":
        steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    else:
        steps = [pre_tokenizers.Split(Regex(QWEN if split == "qwen2" else LLAMA_3), "isolated"),
                 pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.normalizer = normalizers.NFC() if split == "qwen2" else None
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in CONTROL])
    tokenizer.add_tokens([AddedToken("    ", normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<|endoftext|>", "eos_token": {"content": "<|im_end|>"}, "add_bos_token": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def imported(tmp_path, kind="llama tied", split="smollm"):
    write_model(tmp_path / "model", kind)
    write_tokenizer(tmp_path / "model", split)
    return import_to("imported", tmp_path / "model")


def change(path, meta=None, **weights):
    """Changes a checkpoint as training would."""
    file = path / on_disk.MODEL
    save_file(load_file(file) | weights, file)
    change_json(on_disk.META, **(meta or {}))(path)
    (path / on_disk.SUMS).write_text(
        on_disk.sums_text([path / name for name in (on_disk.MODEL, on_disk.META, on_disk.SOURCE)]))


def export_to(out, *flags):
    export.main(["--checkpoint=imported", f"--out={out}", *flags])
    return out


def entries(file):
    return {name: field.contents() for name, field in gguf.GGUFReader(file).fields.items()}


@pytest.mark.parametrize("kind, flags", [
    *((kind, []) for kind in MODELS), ("llama tied", ["--gguf=q8_0"]), ("qwen2", ["--gguf=q8_0"])])
def test_transformers_reads_the_same_weights_and_sizes(tmp_path, base_dir, kind, flags):
    imported(tmp_path, kind)
    out = export_to(tmp_path / "model.gguf", *flags)
    original = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    theirs = transformers.AutoModelForCausalLM.from_config(original.config).eval()
    found = gguf_reader.load_gguf_checkpoint(out, return_tensors=True, model_to_load=theirs)["tensors"]
    theirs.load_state_dict(found, strict="tied" not in kind)
    for name, tensor in tensors_in(tmp_path / "model").items():
        expected = tensor.float() if tensor.ndim == 1 else tensor.to(torch.float16).float()
        if flags and tensor.ndim == 2 and tensor.shape[1] % 32 == 0:  # half a step of 127, and the step's rounding
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
    if not flags:
        ids = torch.randint(257, (2, 50), generator=torch.Generator().manual_seed(2))
        with torch.no_grad():
            assert (theirs(ids).logits - original(ids).logits).abs().max() < 0.02


@pytest.mark.parametrize("kind, split", [("llama tied", "smollm"), ("qwen2", "qwen2"), ("qwen3", "llama-bpe")])
def test_sizes_and_tokens_are_entries_that_llama_cpp_reads(tmp_path, base_dir, kind, split):
    imported(tmp_path, kind, split)
    found = entries(export_to(tmp_path / "a.gguf"))
    arch = kind.split()[0]
    head_dim = 16 if arch == "qwen3" else 8
    expected = {"context_length": 64, "embedding_length": 32, "block_count": 3, "feed_forward_length": 48,
                "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": head_dim,
                "attention.value_length": head_dim, "rope.dimension_count": head_dim, "rope.freq_base": 5000,
                "vocab_size": 288}
    assert {key: found[f"{arch}.{key}"] for key in expected} == expected
    assert found["general.architecture"] == arch and found["general.name"] == "model"
    assert found["general.license"] == "apache-2.0"
    ggml = {key.removeprefix("tokenizer.ggml."): value for key, value in found.items() if "tokenizer.ggml." in key}
    assert (ggml["model"], ggml["pre"]) == ("gpt2", split) and ggml["merges"] == ["i n", "in t"]
    shown = [f"[{name}]" if name in ("<reponame>", "<repo_name>") else name for name in CONTROL]
    assert ggml["tokens"][256:268] == ["in", "int", *shown, "    ", "[PAD267]"]
    normal, control, user_defined, unused = 1, 3, 4, 5
    assert ggml["token_type"] == [normal] * 258 + [control] * 8 + [user_defined] + [unused] * 21
    assert (ggml["bos_token_id"], ggml["eos_token_id"], ggml["add_bos_token"]) == (258, 259, False)
    assert not [key for key in ggml if key.startswith("fim")]  # nobody trained it to fill gaps
    assert found["tokenizer.chat_template"] == "{{ messages }}\r\n"


def test_gap_tokens_are_named_once_a_model_was_trained_with_them(tmp_path, base_dir):
    change(imported(tmp_path), {"flags": {"fim_rate": 0.5}})
    found = entries(export_to(tmp_path / "a.gguf"))
    names = {"fim_pre": "<jupyter_start>", "fim_suf": "<jupyter_text>", "fim_mid": "<jupyter_code>",
             "eot": "<file_sep>"}
    for key, name in names.items():
        assert found["tokenizer.ggml.tokens"][found[f"tokenizer.ggml.{key}_token_id"]] == name
    for key in ("fim_pad", "fim_rep", "fim_sep"):
        assert f"tokenizer.ggml.{key}_token_id" not in found
    # Training puts <|endoftext|> before each document, and the source puts nothing before a text.
    assert found["tokenizer.ggml.tokens"][found["tokenizer.ggml.bos_token_id"]] == "<|endoftext|>"
    assert found["tokenizer.ggml.add_bos_token"] is True


def test_only_a_coder_of_qwen_gets_names_of_files_before_a_gap(tmp_path, base_dir):
    path = imported(tmp_path)
    source = load_meta(path).source
    change(path, {"source": source | {"model_type": "qwen2", "model": "Qwen/Qwen2.5-Coder-0.5B"}})
    found = entries(export_to(tmp_path / "a.gguf"))
    for key, name in {"fim_rep": "<repo_name>", "fim_sep": "<file_sep>"}.items():
        assert found["tokenizer.ggml.tokens"][found[f"tokenizer.ggml.{key}_token_id"]] == name
    assert "<reponame>" in found["tokenizer.ggml.tokens"] and "tokenizer.ggml.eot_token_id" not in found


def save_new(base_dir, tokenizer, config):
    """Saves a model that began from nothing as the newest checkpoint of the run `imported`."""
    model = config.new_model(get_kernels("current", "cpu")).init_weights()
    save_checkpoint(base_dir / "checkpoints" / "imported", model.state_dict(), {}, make_meta(
        7, config=asdict(config), tokenizer_sha256=tokenizer.sha256), num_lanes=0)


NEW = {"vocab_size": 512, "n_layer": 1, "n_embd": 32, "n_head": 2, "n_kv_head": 1, "max_seq_len": 64}


def test_a_model_from_nothing_begins_and_ends_texts_as_in_its_training(tmp_path, base_dir):
    write_tokenizer(tmp_path)
    save_new(base_dir, load_tokenizer(tmp_path), LlamaConfig(**NEW, head_dim=16, mlp_dim=64))
    found = entries(export_to(tmp_path / "a.gguf", f"--tokenizer_dir={tmp_path}"))
    assert found["general.name"] == "imported"
    assert (found["tokenizer.ggml.bos_token_id"], found["tokenizer.ggml.eos_token_id"]) == (258, 258)
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
    write_tokenizer(tmp_path / "model")
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
