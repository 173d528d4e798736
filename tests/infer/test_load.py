"""Which checkpoint a name stands for."""
import json
import os

import pytest
import torch

from nanochat.checkpoint.meta import load_meta
from nanochat.checkpoint.on_disk import META, MODEL, find_checkpoint, find_problem
from nanochat.common import BadInput
from nanochat.data.tokenizer import load_tokenizer
from nanochat.device.ranks import Dist
from nanochat.infer.load import load_model, weights_of
from nanochat.kernels.choose import get_kernels
from nanochat.model.llama import LlamaConfig
from scripts import base_eval, code_eval, solve
from tests.checkpoint.states import make_meta, save
from tests.infer.test_engine import make_model, save_model


def test_a_checkpoint_is_found_by_path_by_run_and_as_the_newest(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    with pytest.raises(BadInput, match="there is no checkpoint in"):
        find_checkpoint()
    runs = tmp_path / "checkpoints"
    first, second = save(runs / "old", 1), save(runs / "old", 2)
    newest = save(runs / "new", 1)
    os.utime(first, (1, 1))
    os.utime(second, (2, 2))
    assert find_checkpoint() == newest
    assert find_checkpoint("old") == second
    assert find_checkpoint("old/step_000001") == first
    assert find_checkpoint(str(first)) == first
    (runs / "mine").mkdir()
    with pytest.raises(BadInput, match="no checkpoint at mine yet: a run saves one every"):
        find_checkpoint("mine")
    with pytest.raises(BadInput, match="no checkpoint at nothing: give a run in .*/checkpoints .new, old.,"):
        find_checkpoint("nothing")
    (runs / "mine/step_000030").touch()
    with pytest.raises(BadInput, match="step_000030 is damaged .meta.json: Not a directory.: move it away"):
        load_meta(find_checkpoint("mine"))


@pytest.fixture
def saved(tmp_path, byte_tokenizer_dir):
    """A model and the path of its checkpoint."""
    tokenizer = load_tokenizer(byte_tokenizer_dir)
    model = make_model(vocab_size=tokenizer.n_vocab)
    return model, save_model(tmp_path, model, tokenizer)


def test_an_accelerator_holds_the_weights_in_bf16_and_computes_what_it_does_with_fp32(saved, byte_tokenizer_dir):
    model, path = saved
    accelerator = Dist("cuda", torch.device("cpu"))
    loaded, _, _ = load_model(path, accelerator, tokenizer_dir=byte_tokenizer_dir, kernel="current")
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    model.compute_dtype = torch.bfloat16
    ids = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids), model(ids)) and torch.equal(loaded(ids, ids), model(ids, ids))


@pytest.mark.parametrize("rows, positions, context", [(64, 4096, 2048), (64, 128, 128), (4096, 8192, 4096)])
def test_a_model_of_the_llama_family_sees_more_than_the_rows_of_its_training(tmp_path, byte_tokenizer_dir, rows,
                                                                             positions, context):
    tokenizer = load_tokenizer(byte_tokenizer_dir)
    config = LlamaConfig(vocab_size=tokenizer.n_vocab, n_layer=1, n_embd=16, head_dim=16, max_seq_len=rows,
                         max_positions=positions)
    path = save_model(tmp_path, config.new_model(get_kernels("current", "cpu")).init_weights(), tokenizer)
    model, _, meta = load_model(path, Dist("cpu", torch.device("cpu")), tokenizer_dir=byte_tokenizer_dir)
    assert model.config.max_seq_len == len(model.cos) == context
    assert meta.model_config.max_seq_len == rows


@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_a_model_stays_the_same_when_its_files_are_overwritten(saved, byte_tokenizer_dir, quantize):
    _, path = saved
    dist = Dist("cpu", torch.device("cpu"))
    loaded, _, _ = load_model(path, dist, tokenizer_dir=byte_tokenizer_dir, quantize=quantize)
    ids = torch.arange(16)[None]
    before = loaded(ids)
    with open(path / MODEL, "r+b") as file:  # in place, as cp does
        file.write(bytes(os.path.getsize(path / MODEL)))
    assert torch.equal(loaded(ids), before)


@pytest.mark.parametrize("flags, device_type", [([], "xla"), (["--quantize=int8"], "cpu")])
def test_base_eval_takes_the_cpu_for_8_bits_where_there_is_no_accelerator(monkeypatch, flags, device_type):
    def stop(resolved):
        raise BadInput(resolved)

    for name in ("nanochat.infer.flags.count_tpu_chips", "nanochat.device.ranks.count_tpu_chips"):
        monkeypatch.setattr(name, lambda *_: 0)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(base_eval, "prepare_xla_environment", stop)
    with pytest.raises(BadInput, match=f"^{device_type}$"):
        base_eval.main(flags)


@pytest.mark.parametrize("main, flags", [
    (base_eval.main, []), (code_eval.main, []), (solve.main, ["--prompt=int f() {"])])
@pytest.mark.parametrize("fields, message", [
    ({"task": "puzzles", "config": {"cells": 16}}, "is of the task puzzles"),
    ({"config": {"layers": 2}}, "the model's config in its meta.json has no vocab_size")])
def test_a_checkpoint_of_something_else_is_refused(tmp_path, monkeypatch, main, flags, fields, message):
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    (save(tmp_path / "checkpoints" / "run", 1) / META).write_text(json.dumps(make_meta(**fields).to_json()))
    with pytest.raises(BadInput, match=message):
        main(["--checkpoint=run", "--device_type=cpu", *flags])


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"weight_map": 3}'])
def test_a_damaged_index_of_pieces_is_a_damaged_checkpoint(tmp_path, text):
    path = save(tmp_path, 1)
    index = path / "model.safetensors.index.json"
    index.write_text(text)
    with pytest.raises(BadInput, match="is damaged .model.safetensors: it is no index of pieces"):
        weights_of(path)
    assert find_problem(path) == f"{index.name} does not match its checksum"
