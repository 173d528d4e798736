"""A checkpoint of karpathy/nanochat is imported exactly, or refused with the reason."""
import json
import os
import pickle

import pytest
import rustbpe
import tiktoken
import torch

from nanochat.checkpoint.on_disk import find_checkpoint
from nanochat.common import BadInput
from nanochat.device.ranks import Dist
from nanochat.export import export
from nanochat.infer.load import load_model
from scripts import base_train, import_nanochat
from tests.data.headers import HEADERS
from tests.data.test_tokenizer_json import NANOCHAT

SIZES = {"sequence_len": 64, "n_layer": 2, "n_embd": 32, "n_head": 4, "n_kv_head": 2}
SPECIAL = ("<|bos|>", "<|user_start|>", "<|user_end|>")  # it has no tokens for fill in the middle
# nanochat's names, for those of the NanoChat in transformers, which was ported from it.
NAMES = {"model.embed_tokens": "transformer.wte", "model.layers": "transformer.h", "self_attn.q_proj": "attn.c_q",
         "self_attn.k_proj": "attn.c_k", "self_attn.v_proj": "attn.c_v", "self_attn.o_proj": "attn.c_proj",
         "mlp.fc1": "mlp.c_fc", "mlp.fc2": "mlp.c_proj"}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """(Folder with model_000650.pt, meta and tokenizer.pkl, the same model in transformers). The tables of the .pt are
    padded, as nanochat pads them."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("nanochat")
    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator(iter(HEADERS[::8]), 300, pattern=NANOCHAT)
    ranks = {bytes(token): rank for token, rank in trainer.get_mergeable_ranks()}
    special = {name: len(ranks) + i for i, name in enumerate(SPECIAL)}
    with open(folder / "tokenizer.pkl", "wb") as file:
        pickle.dump(tiktoken.Encoding("rustbpe", pat_str=NANOCHAT, mergeable_ranks=ranks, special_tokens=special), file)
    sizes = {**SIZES, "vocab_size": len(ranks) + len(special)}
    torch.manual_seed(0)
    model = transformers.NanoChatForCausalLM(transformers.NanoChatConfig(
        vocab_size=sizes["vocab_size"], hidden_size=32, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=1.1920928955078125e-07,
        pad_token_id=None, initializer_range=0.3)).eval()
    state = {}
    for name, tensor in model.state_dict().items():
        for here, there in NAMES.items():
            name = name.replace(here, there)
        is_table = name in ("transformer.wte.weight", "lm_head.weight")
        state[f"_orig_mod.{name}"] = torch.cat([tensor, torch.ones(5, 32)]) if is_table else tensor
    torch.save(state, folder / "model_000650.pt")
    (folder / "meta_000650.json").write_text(json.dumps({"step": 650, "model_config": sizes}))
    return folder, model


def run(folder, name="d2"):
    import_nanochat.main([f"--model={folder / 'model_000650.pt'}", f"--tokenizer_dir={folder}", f"--run={name}"])


def change(theirs, tmp_path, new_weights=None, **config):
    """Returns a copy of nanochat's folder with other weights or another config."""
    folder, _ = theirs
    (tmp_path / "tokenizer.pkl").write_bytes((folder / "tokenizer.pkl").read_bytes())
    meta = json.loads((folder / "meta_000650.json").read_text())
    (tmp_path / "meta_000650.json").write_text(json.dumps({"model_config": meta["model_config"] | config}))
    torch.save(torch.load(folder / "model_000650.pt") | (new_weights or {}), tmp_path / "model_000650.pt")
    return tmp_path


@torch.no_grad()
def test_an_imported_model_is_exact_and_exported_for_the_native_class(theirs, tmp_path):
    folder, reference = theirs
    run(folder)
    model, tokenizer, meta = load_model(find_checkpoint("d2"), Dist("cpu", torch.device("cpu")), tokenizer_dir=folder)
    ids = torch.arange(64)[None] * 37 % tokenizer.n_vocab
    torch.testing.assert_close(model(ids), reference(ids).logits, atol=1e-4, rtol=0)
    assert meta.step == 650 and not export.is_scaled(model)
    assert export.weights(model).keys() == reference.state_dict().keys()
    assert export.config_json(model, tokenizer)["pad_token_id"] is None
    with pytest.raises(BadInput, match="--run=d2 has checkpoints already"):
        run(folder)
    with pytest.raises(BadInput, match="step_000650 was imported and holds only weights"):
        base_train.main(["--run=d2", "--device_type=cpu", "--depth=2", "--synthetic_data", "--max_seq_len=512",
                         f"--tokenizer_dir={folder}", "--num_iterations=700", "--total_batch_size=1024",
                         "--device_batch_size=2"])


def test_scales_of_the_residual_stream_are_taken(theirs, tmp_path):
    scales = {"resid_lambdas": torch.tensor([0.9, 1.1]), "x0_lambdas": torch.tensor([0.1, 0.2])}
    folder = change(theirs, tmp_path, scales)
    run(folder)
    model, _, _ = load_model(find_checkpoint("d2"), Dist("cpu", torch.device("cpu")), tokenizer_dir=folder)
    assert model.resid_scale.tolist() == pytest.approx([0.9, 1.1]) and export.is_scaled(model)


@pytest.mark.parametrize("new_weights, config, message", [
    ({"value_embeds.1.weight": torch.ones(3)}, {}, "has value_embeds.1.weight, .* before value embeddings"),
    ({"lm_head.weight": torch.ones(1).expand(10**9, 32)}, {}, "cannot be read .its tensors take 128,000,"),
    ({"lm_head.weight": 3}, {}, "cannot be read .'int' object"),
    ({}, {"window_pattern": "SSSL"}, "has attention windows .SSSL."),
    ({}, {"n_embd": 64}, "does not fit its meta file: wte is .*, 32. and should be .*, 64"),
    ({}, {"n_head": 5}, "model_dim=32 does not divide into"),
    ({}, {"vocab_size": 10}, "the tokenizer has 303 tokens"),
    ({}, {"n_layer": "two"}, "impossible sizes"),
    ({}, {"n_layer": 3}, "attn_q is missing"),
    ({}, {"n_layer": 10**9}, "--depth=1e.09 is more than 10000"),
])
def test_what_cannot_be_imported_is_refused_and_nothing_is_made(theirs, tmp_path, base_dir, new_weights, config,
                                                                message):
    with pytest.raises(BadInput, match=message):
        run(change(theirs, tmp_path, new_weights, **config))
    assert not (base_dir / "checkpoints").exists()


@pytest.mark.parametrize("name", ["model_000650.pt", "meta_000650.json"])
@pytest.mark.parametrize("what", ["pipe", "/dev/zero", "[" * 10**5], ids=["pipe", "zeros", "deep"])
def test_a_file_whose_read_would_never_end_is_refused_in_one_line(theirs, tmp_path, name, what):
    path = change(theirs, tmp_path) / name
    path.unlink()
    if what == "pipe":
        os.mkfifo(path)
    elif what.startswith("/"):
        path.symlink_to(what)
    else:
        path.write_text(what)
    with pytest.raises(BadInput, match=f"--model=.*{name} (cannot be read|is not nanochat's)") as refusal:
        run(tmp_path)
    assert "\n" not in str(refusal.value)


def test_files_that_are_not_nanochats_are_refused(theirs, tmp_path):
    folder = change(theirs, tmp_path)
    with pytest.raises(BadInput, match="not named model_STEP.pt"):
        import_nanochat.main([f"--model={folder}", "--run=x"])
    (folder / "model_000650.pt").write_bytes(b"damaged")
    with pytest.raises(BadInput, match="cannot be read .*: copy it again"):
        run(folder)
    (folder / "meta_000650.json").write_text("{}")
    with pytest.raises(BadInput, match="is not nanochat's"):
        run(folder)
    with pytest.raises(BadInput, match="is not a plain name"):
        run(folder, "../x")
