"""An exported checkpoint is the checkpoint: transformers, in a process that does not see this project, gives the same
logits, tokens and ids."""
import errno
import json
import os
import random
import subprocess
import sys
import sysconfig
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
import torch

from nanochat.common import BadInput
from nanochat.data.shards import fingerprint, list_shards, open_shards
from nanochat.data.tokenizer import SHIPPED_DIR, Tokenizer, load_tokenizer
from nanochat.data.tokenizer_files import LLAMA_CPP_PATTERN
from nanochat.export import export
from nanochat.export.model_card import describe_gaps, write_card
from nanochat.export.tokenizer_json import tokenizer_json
from nanochat.model.config import GPTConfig
from nanochat.model.weights import WEIGHTS
from scripts import export as script
from tests.checkpoint.states import make_meta, names
from tests.conftest import last_of_each
from tests.data import hub
from tests.data.headers import HEADERS, write_headers
from tests.infer.test_engine import save_model
from tests.model.test_gpt import build

pytest.importorskip("transformers")

PROMPT_LEN, CONTEXT = 44, 56  # a short window is 28 positions: the prompt does not fit into it

# What a user of an export has: the packages, the folder, and no nanochat. -S leaves out what points to this checkout.
READER = """
import contextlib, importlib.util, json, os, sys
assert not importlib.util.find_spec("nanochat") and not importlib.util.find_spec("scripts")
import numpy as np, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
found = {}
for number, job in enumerate(json.load(sys.stdin)):
    if "texts" in job:
        tokenizer = AutoTokenizer.from_pretrained(job["folder"], trust_remote_code=True)
        ids = tokenizer(job["texts"], add_special_tokens=False, split_special_tokens=True).input_ids
        assert [tokenizer.decode(text_ids) for text_ids in ids] == job["texts"]
        assert tokenizer(job["texts"][0]).input_ids == [tokenizer.bos_token_id, *ids[0]]
        found[f"{number} ids"] = np.concatenate([np.array([len(text_ids), *text_ids]) for text_ids in ids])
    with contextlib.suppress(ValueError):  # the native class would take the weights, and leave out the scales
        AutoModelForCausalLM.from_pretrained(job["folder"], trust_remote_code=False)
        raise AssertionError("it was loaded without its code")
    model, loading = AutoModelForCausalLM.from_pretrained(job["folder"], trust_remote_code=True,
                                                          output_loading_info=True)
    assert not any(loading.values()), loading
    ids = torch.tensor([job["ids"]])
    with torch.no_grad():
        found[f"{number} logits"] = model(ids).logits[0].numpy()
    prompt = ids[:, :job["prompt_len"]]
    found[f"{number} tokens"] = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=ids.shape[1] - job["prompt_len"],
        do_sample=False, eos_token_id=-1, pad_token_id=0)[0].numpy()
    padded = torch.cat([torch.zeros(1, 7, dtype=torch.long), prompt], dim=1)
    is_text = torch.arange(padded.shape[1])[None] >= 7
    with torch.no_grad():
        found[f"{number} padded"] = model(padded, attention_mask=is_text.long()).logits[0, 7:].numpy()
    for cache in ("dynamic", "static"):
        found[f"{number} {cache}"] = model.generate(
            torch.cat([padded, padded]), attention_mask=torch.cat([is_text, torch.ones_like(is_text)]).long(),
            max_new_tokens=ids.shape[1] - job["prompt_len"], do_sample=False, eos_token_id=-1, pad_token_id=0,
            cache_implementation=cache, disable_compile=True)[0, 7:].numpy()
    found[f"{number} class"] = type(model).__name__
    found[f"{number} end"] = model.generation_config.eos_token_id
np.savez(sys.argv[1], **found)
"""


def read(folder, jobs):
    """Returns what READER finds for the jobs, {"NUMBER what": array}."""
    environment = {**os.environ, "PYTHONPATH": sysconfig.get_path("purelib"), "HF_HOME": str(folder / "huggingface"),
                   "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-S", "-c", READER, folder / "found.npz"], cwd=folder, env=environment,
                          input=json.dumps(jobs), capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return np.load(folder / "found.npz")


def make_model(tokenizer, kv_heads=2, pattern="SL", softcap=15.0, **sizes):
    sizes = {"max_seq_len": CONTEXT, "n_layer": 3, "n_embd": 64, "n_head": 4, "key_shift": False,
             "layer_gates": False, "value_embeddings": "off", "short_window": CONTEXT // 2 if "S" in pattern else None,
             **sizes}
    config = GPTConfig(vocab_size=tokenizer.n_vocab, n_kv_head=kv_heads, window_pattern=pattern, softcap=softcap,
                       **sizes)
    return build(config).eval().requires_grad_(False)


@torch.no_grad()
def greedy(model, ids, count):
    """Returns `ids` and the `count` likeliest tokens after them."""
    ids = list(ids)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids


def text_ids(tokenizer, count):
    return [tokenizer.bos_id, *tokenizer.encode(HEADERS[0] + HEADERS[1])][:count]


def stress_strings(count, seed=0):
    """Strings in which the library's split could differ from ours: runs of everything, ends of lines, all scripts."""
    draw = random.Random(seed)
    pieces = [" ", "\t", "\n", "\r", "\r\n", "\0", "\x7f", "\u00a0", "\u2028", "{", "}", "()", "::", "->", "//", "\"",
              "\\", "#", "_", "<|", "|>", "<|bos|>", "0x", "1", "9", "0", "a", "Z", "int", "std", "HTTPServer",
              "camelCase", "don't", "'S", "é", "ß", "ſ", "漢字", "한", "ا", "\U0001f600", "\u0301", "\ufeff", "ﬁ"]
    return ["".join(draw.choice(pieces) * draw.choice((1, 1, 1, 2, 3, 17, 70)) for _ in range(draw.randint(1, 12)))
            for _ in range(count)]


GATES, SHIFT = {"layer_gates": True}, {"key_shift": True}
VALUES = {"value_embeddings": "shared"}
# Heads of keys and values, windows, softcap, other parts: each with each of the others.
COMBINATIONS = [
    (4, "L", 15.0, {}), (1, "SSL", 0.0, GATES), (2, "L", 15.0, {"n_layer": 4, **VALUES}), (1, "SSL", 0.0, VALUES),
    (4, "SSL", 0.0, SHIFT), (2, "L", 15.0, SHIFT | VALUES),
    (2, "SSL", 15.0, GATES | VALUES | SHIFT | {"short_window": 12})]


@pytest.mark.parametrize("combinations", [COMBINATIONS[-1:], pytest.param(COMBINATIONS[:-1], marks=pytest.mark.slow)])
def test_every_part_of_the_model_and_the_shipped_tokenizer_are_exact_in_transformers(tmp_path, byte_tokenizer_dir,
                                                                                     combinations):
    of_bytes, shipped = load_tokenizer(byte_tokenizer_dir), load_tokenizer(SHIPPED_DIR)
    exported = [(make_model(of_bytes, kv_heads, pattern, softcap, **parts), of_bytes)
                for kv_heads, pattern, softcap, parts in combinations]
    exported.append((make_model(shipped), shipped))
    jobs = []
    for number, (model, tokenizer) in enumerate(exported):
        folder = tmp_path / str(number)
        folder.mkdir()
        export.check_exportable(model)
        export.write_for_transformers(folder, None, model, tokenizer, make_meta(), card="")
        jobs.append({"folder": str(folder), "ids": text_ids(tokenizer, CONTEXT), "prompt_len": PROMPT_LEN})
    texts = jobs[-1]["texts"] = [*HEADERS[20:60], *stress_strings(500, seed=1)]
    found = read(tmp_path, jobs)
    for number, (model, tokenizer) in enumerate(exported):
        ids = jobs[number]["ids"]
        torch.testing.assert_close(torch.tensor(found[f"{number} logits"]), model(torch.tensor([ids]))[0],
                                   atol=1e-4, rtol=0)
        expected = greedy(model, ids[:PROMPT_LEN], CONTEXT - PROMPT_LEN)
        for way in ("tokens", "dynamic", "static"):
            assert found[f"{number} {way}"].tolist() == expected, (number, way)
        torch.testing.assert_close(torch.tensor(found[f"{number} padded"]), model(torch.tensor([ids[:PROMPT_LEN]]))[0],
                                   atol=1e-4, rtol=0)
        assert str(found[f"{number} class"]).startswith("Scaled")
        assert found[f"{number} end"].tolist() == [tokenizer.bos_id, tokenizer.special("<|file_sep|>")]
    assert len({found[f"{number} logits"].tobytes() for number in range(len(exported))}) == len(exported)
    of_texts = [token for ids in map(shipped.encode, texts) for token in (len(ids), *ids)]
    assert found[f"{len(exported) - 1} ids"].tolist() == of_texts


def scaled(**options):
    """Returns a model of transformers, with the code that an export brings along."""
    from nanochat.export import modeling_nanochat_scaled as code
    return code.ScaledNanoChatForCausalLM(code.ScaledNanoChatConfig(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_attention_heads=2, num_key_value_heads=2, **options))


def test_transformers_keeps_layers_and_value_embeddings_whole():
    model = scaled(num_hidden_layers=1, value_embeddings="shared")
    assert set(model._no_split_modules) <= {type(module).__name__ for module in model.modules()}
    for part in (model, model.model):
        with pytest.raises(ValueError, match="value embeddings keeps its vocabulary"):
            part.resize_token_embeddings(40)
    with pytest.raises(ValueError, match="value embeddings needs input_ids"):
        model(inputs_embeds=torch.zeros(1, 3, 32))


@pytest.fixture
def shifted():
    """A model of transformers with shifted keys and windows, ids for it, and their logits."""
    torch.manual_seed(0)
    model = scaled(num_hidden_layers=2, key_shift=True, sliding_window=4,
                   layer_types=["sliding_attention", "full_attention"]).eval().requires_grad_(False)
    ids = torch.randint(32, (1, 16))
    return model, ids, model(ids, use_cache=False).logits


def test_shifted_keys_need_a_cache_and_positions_that_are_understood(shifted):
    from transformers import QuantizedCache
    model, ids, logits = shifted
    mask = torch.ones(16, 16, dtype=torch.bool).tril()[None, None]
    with pytest.raises(ValueError, match="give position_ids, too"):
        model(ids, attention_mask=mask)
    with pytest.raises(ValueError, match="do not work with continuous batching"):
        model(ids, cache=object())
    model.config.layer_types = ["full_attention"] * 2
    cache = QuantizedCache(backend="fp8", config=model.config)
    with pytest.raises(ValueError, match="work with a dynamic or a static cache"):
        for part in ids.split(8, dim=1):
            model(part, past_key_values=cache)


def test_a_mask_may_be_as_long_as_its_static_cache(shifted):
    from transformers import StaticCache
    model, ids, logits = shifted
    cache, found = StaticCache(config=model.config, max_cache_len=16), []
    for start, end in ((0, 3), (3, 4), (4, 9), (9, 16)):
        mask = (torch.arange(16) < end)[None].long()
        found.append(model(ids[:, start:end], attention_mask=mask, past_key_values=cache).logits)
    torch.testing.assert_close(torch.cat(found, dim=1), logits, atol=1e-5, rtol=0)


@pytest.mark.slow
@torch.no_grad()
@torch._dynamo.config.patch(automatic_dynamic_shapes=True)  # which torch_xla turns off
def test_a_static_cache_compiles_few_programs(shifted):
    from transformers import StaticCache
    model, ids, logits = shifted
    programs, cache = [], StaticCache(config=model.config, max_cache_len=16)
    compiled = torch.compile(model.forward, backend=lambda module, _: programs.append(module) or module.forward)
    found = []
    for end, count, forward in [(3, 3, model)] + [(end, 1, compiled) for end in range(4, 17)]:
        inputs = model.prepare_inputs_for_generation(
            ids[:, :end], next_sequence_length=count, past_key_values=cache, use_cache=True,
            attention_mask=torch.ones(1, end, dtype=torch.long), position_ids=torch.arange(end)[None])
        found.append(forward(**inputs).logits)
    torch.testing.assert_close(torch.cat(found, dim=1), logits, atol=1e-5, rtol=0)
    assert len(programs) <= 4  # for a window that is not full, that becomes full, and that is


def test_ids_of_a_tokenizer_for_llama_cpp_are_those_of_the_library():
    shipped = load_tokenizer(SHIPPED_DIR)
    ours = Tokenizer(shipped.tokens(), LLAMA_CPP_PATTERN, shipped.special_tokens)
    theirs = tokenizers.Tokenizer.from_str(tokenizer_json(ours))
    theirs.encode_special_tokens = True  # the name of a special token is text like any other
    for text in (*HEADERS[:20], *stress_strings(500)):
        ids = ours.encode(text)
        assert theirs.encode(text).ids == [ours.bos_id, *ids] and theirs.decode(ids) == text


def test_an_exported_tokenizer_is_read_back_with_the_same_ids_and_borders(tmp_path):
    shipped = load_tokenizer()
    (tmp_path / "tokenizer.json").write_text(tokenizer_json(shipped), encoding="utf-8")
    again = load_tokenizer(tmp_path)
    for text in (*HEADERS[:9], b"\xff \xe9<|bos|>", "\n\n  x"):
        assert again.encode(text) == shipped.encode(text)
    assert again.special_tokens == shipped.special_tokens and again.losses == ""
    for name in ("sha256", "n_vocab", "bos_id", "middle_end", "ends"):
        assert getattr(again, name) == getattr(shipped, name)
    assert again.tokens() == shipped.tokens() and again.token_bytes().equal(shipped.token_bytes())


def test_a_tokenizer_of_the_library_is_written_as_it_was():
    files = hub.files_of(*hub.smollm2())
    tokenizer = hub.HubTokenizer(files)
    assert tokenizer_json(tokenizer).encode() == files["tokenizer.json"]
    config = export.tokenizer_config(tokenizer, 64)
    assert config["bos_token"] == config["eos_token"] == "<|endoftext|>" and "pad_token" not in config
    assert export.special_ids(tokenizer)["eos_token_id"] == [0, tokenizer.special("<file_sep>")]


# scripts/export.py


@pytest.fixture
def trained(tmp_path, byte_tokenizer_dir):
    """The path of a checkpoint of a tiny model."""
    tokenizer = load_tokenizer(byte_tokenizer_dir)
    return save_model(tmp_path / "a_run", make_model(tokenizer), tokenizer, step=20)


@pytest.fixture
def run(trained, byte_tokenizer_dir):
    return lambda *flags: script.main(last_of_each(
        f"--checkpoint={trained}", f"--tokenizer_dir={byte_tokenizer_dir}", *flags))


def card_of(meta):
    """Returns the model card of a checkpoint that has only its Meta."""
    model = SimpleNamespace(parameters=lambda: [], config=GPTConfig())
    return write_card(Path("no_runs/a_run/step_000020"), model, meta, load_tokenizer())


def test_the_card_says_what_is_known(tmp_path, run, trained):
    records = [{"step": step, "time": 100.0 + step, "loss": 9.0 - step / 10, "tokens": 1000 * step,
                **({"val_bpb": 3.0 - step / 20, "fim_bpb": 2.5, "fim_bytes": 8170} if step % 10 == 0 else {})}
               for step in range(31)]
    (trained.parent / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    run(f"--out={tmp_path / 'out'}")
    card = (tmp_path / "out" / "README.md").read_text()
    for text in ("# a_run\n", "validation, bits per byte 2.0000 (step 20)", "loss, nats a token 7.0000 (step 20).",
                 "--depth=2", "manifest of the corpus was missing"):
        assert text in card
    assert names(tmp_path / "out") == [
        "README.md", "SHA256SUMS", "config.json", "generation_config.json", "model.safetensors",
        "modeling_nanochat_scaled.py", "tokenizer.json", "tokenizer_config.json"]
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=tmp_path / "out", check=True)
    card = card_of(make_meta(flags={"layer_gates": "on", "value_embeddings": "off", "seed": 0, "seq_len_ramp": "0:8",
                                    "teacher": "/home/me/large", "data_dir": "gs://mine/parquet"}))
    assert "base_train --layer_gates=on --value_embeddings=off --seq_len_ramp=0:8 --seed=0\n" in card
    assert "/home" not in card and "mine" not in card


def test_the_card_says_how_to_fill_gaps_in_the_names_of_the_tokenizer():
    card = describe_gaps(hub.hub_tokenizer(hub.smollm2), 0.5)
    assert "`<jupyter_text>text after<jupyter_start>text before<jupyter_code>`. `<file_sep>` ends" in card
    assert "<|fim_middle|>`. `<|endoftext|>` ends" in describe_gaps(hub.hub_tokenizer(hub.qwen), 0.5)
    assert "<|fim_middle|>`. `<|file_sep|>` ends" in describe_gaps(load_tokenizer(), 0.5)
    assert "not trained to fill" in describe_gaps(hub.hub_tokenizer(hub.llama3), 0.0)


def test_the_card_has_the_licences_of_the_data_of_the_training(tmp_path):
    (tmp_path / "data").mkdir()
    shards = open_shards(list_shards(write_headers(tmp_path / "data")))
    manifest = tmp_path / "manifest.json"
    manifest.write_text(json.dumps({"val_projects": ["held"], "sources": [
        {"name": "fmt", "version": "9", "project": "fmt", "licences": {"MIT": 5, "GPL-2": 3}},
        {"name": "held", "project": "held", "licences": {"BSD-3-Clause": 9}},
        {"name": "stack", "licences": {"MIT": 60, "Zlib": 15, "BSL-1.0": 5},
         "held_out_licences": {"MIT": 15, "BSL-1.0": 5}}]}))
    meta = make_meta(flags={"data_dir": str(tmp_path / "data")}, data_fingerprint=fingerprint(shards))
    assert "\n- fmt 9 (MIT: 5 files, GPL-2: 3 files)\n- stack (MIT: 45 files, Zlib: 15 files)\n" in card_of(meta)
    (tmp_path / "data" / "shard_00001.parquet").unlink()
    assert "Unknown: the manifest" in card_of(meta)
    manifest.write_text("[]")
    assert "Unknown: the manifest" in card_of(meta)


def test_the_files_express_every_weight_and_every_field_of_a_gpt():
    """A new field needs a place in config.json and in modeling_nanochat_scaled.py. Until then
    check_exportable refuses an option of a layer."""
    assert export.LAYER_NAMES.keys() | export.OTHER_NAMES.keys() == {weight.name for weight in WEIGHTS}
    assert {field.name for field in fields(GPTConfig)} == {
        "vocab_size", "max_seq_len", "n_layer", "n_embd", "n_head", "n_kv_head", "window_pattern", "short_window",
        "rotary_base", "key_shift", "softcap", "layer_gates", "value_embeddings"}


def test_what_the_files_do_not_compute_is_refused(byte_tokenizer_dir, monkeypatch):
    tokenizer = load_tokenizer(byte_tokenizer_dir)
    with monkeypatch.context() as patch, pytest.raises(BadInput, match="has --key_shift, which an export does not"):
        patch.setattr(export, "KNOWN", {"head_dim"})
        export.check_exportable(make_model(tokenizer, key_shift=True))
    export.check_exportable(make_model(tokenizer, short_window=2))
    with pytest.raises(BadInput, match="windows of 1 position"):
        export.check_exportable(make_model(tokenizer, short_window=1))


@pytest.mark.parametrize("error, shown", [(OSError(errno.EIO, "Input/output error"), BadInput),
                                          (OSError(errno.ENOSPC, "No space left"), OSError),
                                          (KeyboardInterrupt(), KeyboardInterrupt)])
def test_an_export_that_fails_leaves_nothing(tmp_path, run, monkeypatch, error, shown):
    def fail(*arguments, **options):
        raise error

    monkeypatch.setattr(export, "save_tensors", fail)
    with pytest.raises(shown):
        run(f"--out={tmp_path / 'new'}")
    assert names(tmp_path) == ["a_run"]


@pytest.mark.parametrize("flags, message", [
    ([], "--out is needed"),
    (["--out=FOLDER/file/x"], "--out=.* cannot be written"),
    (["--out=FOLDER/file"], "--out=.* exists"),
    (["--out=FOLDER/link"], "--out=.* exists"),
    (["--out=FOLDER/a_run"], "--out=.* exists"),
    (["--out=FOLDER/a_run/step_000020/x"], "is in the checkpoint"),
    (["--out=FOLDER/x", "--checkpoint=none"], "no checkpoint at none"),
    (["--out=FOLDER/x", f"--tokenizer_dir={SHIPPED_DIR}"], "tokenizer has 65536 tokens"),
])
def test_bad_input_is_refused_and_nothing_is_made(tmp_path, run, flags, message):
    (tmp_path / "file").write_text("[]")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(BadInput, match=message):
        run(*(flag.replace("FOLDER", str(tmp_path)) for flag in flags))
    assert names(tmp_path) == ["a_run", "file", "link"]
