"""meta.json is restored as it was saved, by this version or by an older one."""
import json

import pytest
import torch

from nanochat.checkpoint.meta import (
    FORMAT_VERSION,
    META,
    Meta,
    load_meta,
    read_config,
    require_match,
    restore_rng,
    rng_state,
)
from nanochat.common import BadInput
from nanochat.model.gpt import GPTConfig
from tests.checkpoint.states import make_meta, save

# As a run of base_train wrote it before format_version, with fewer flags and a shorter state of the generator.
VERSION_1 = """{
 "step": 2,
 "config": {"vocab_size": 270, "max_seq_len": 32, "n_layer": 2, "n_embd": 64, "n_head": 2, "n_kv_head": 2,
  "window_pattern": "L", "softcap": 15.0},
 "tokenizer_sha256": "bac1784d222182e732567be781cabb632fc139b6ac4994d7846ab9456a55048e",
 "data_fingerprint": "synthetic",
 "flags": {"run": "parts", "device_type": "xla", "data_dir": null, "synthetic_data": true, "depth": 2,
  "batch_ramp": "2:1.4", "target_param_data_ratio": 20.0},
 "batch_schedule": [[0, 512], [2, 768]],
 "rng": "sGAnYrUu7QgBAAAAAQAAAA==",
 "wandb_id": "9444b218",
 "interruptions": 1,
 "bad_steps": {"total": 3, "in_a_row": 1},
 "time": 1795324630.6803794,
 "seconds": {"other": 0.016204477999963274, "compile": 10.143464649, "train": 2.5060834309997517}
}"""


def test_a_meta_is_restored_as_it_was_saved():
    meta = make_meta(7, wandb_id="abcd1234", time=1795257657.2, batch_schedule=((0, 512), (2, 768)), interruptions=2,
                     nonfinite_steps={"total": 3, "in_a_row": 1}, seconds={"train": 20.5, "other": 1.5}, is_pause=True,
                     mesh={"data": 2, "fsdp": 4, "tensor": 1})
    saved = json.loads(json.dumps(meta.to_json()))
    assert Meta.from_json(saved) == meta
    assert saved["format_version"] == FORMAT_VERSION and saved["bad_steps"] == {"total": 3, "in_a_row": 1}
    assert Meta.from_json({**saved, "a_field_of_later": 1}) == meta


def test_a_checkpoint_of_version_1_is_loaded(tmp_path):
    (tmp_path / META).write_text(VERSION_1)
    assert load_meta(tmp_path) == Meta(
        step=2, config=dict(vocab_size=270, max_seq_len=32, n_layer=2, n_embd=64, n_head=2, n_kv_head=2,
                            window_pattern="L", softcap=15.0, rotary_base=10_000.0, layer_gates=False,
                            value_embeddings=False, short_window=0, key_shift=False, shared_values=False),
        tokenizer_sha256="bac1784d222182e732567be781cabb632fc139b6ac4994d7846ab9456a55048e",
        data_fingerprint="synthetic",
        flags=dict(run="parts", device_type="xla", data_dir=None, synthetic_data=True, depth=2, batch_ramp="2:1.4",
                   target_param_data_ratio=20.0, window_pattern="L", short_window=-1, key_shift="off",
                   layer_gates="off", value_embeddings="off"),
        rng="sGAnYrUu7QgBAAAAAQAAAA==", wandb_id="9444b218", time=1795324630.6803794,
        batch_schedule=((0, 512), (2, 768)), interruptions=1, nonfinite_steps={"total": 3, "in_a_row": 1},
        seconds={"other": 0.016204477999963274, "compile": 10.143464649, "train": 2.5060834309997517})


def test_a_puzzle_checkpoint_of_version_3_has_no_tasks():
    saved = make_meta(task="puzzles", config={"cells": 16}).to_json() | {"format_version": 3}
    assert Meta.from_json(saved).config == {"cells": 16, "tasks": 0}
    assert Meta.from_json(saved | {"format_version": 4}).config == {"cells": 16}


def test_flags_of_version_5_have_the_values_of_today():
    saved = make_meta(flags={"weight_decay": 0.2, "activation_checkpointing": True, "depth": 4}).to_json()
    assert Meta.from_json(saved).flags["weight_decay"] == 0.2
    assert Meta.from_json(saved | {"format_version": 5}).flags == {
        "weight_decay": "0.2 a step", "activation_checkpointing": "all", "depth": 4}


def test_a_checkpoint_of_version_4_has_no_gates_and_no_value_embeddings():
    saved = make_meta(config={"n_layer": 2}).to_json() | {"format_version": 4}
    assert Meta.from_json(saved).config == {"n_layer": 2, "layer_gates": False, "value_embeddings": False,
                                            "short_window": 0, "key_shift": False, "shared_values": False}
    assert Meta.from_json(saved | {"format_version": 5}).config == {
        "n_layer": 2, "value_embeddings": False, "short_window": 0, "key_shift": False, "shared_values": False}


def test_keys_of_version_7_stay_in_place_and_values_of_version_8_are_not_shared():
    saved = make_meta(config={"n_layer": 2}).to_json() | {"format_version": 7}
    assert Meta.from_json(saved).config == {"n_layer": 2, "key_shift": False, "shared_values": False}
    assert Meta.from_json(saved | {"format_version": 8}).config == {"n_layer": 2, "shared_values": False}
    for flag, name in ((True, "own"), (False, "off"), ("shared", "shared")):
        assert Meta.from_json(saved | {"flags": {"value_embeddings": flag}}).flags == {"value_embeddings": name}
    for flag, name in ((True, "on"), (False, "off"), ("on", "on")):
        assert Meta.from_json(saved | {"flags": {"layer_gates": flag}}).flags == {"layer_gates": name}


def test_flags_that_were_left_to_the_program_are_what_they_became_in_the_model():
    auto = {"depth": 2, "window_pattern": "auto", "short_window": -1, "key_shift": "auto", "layer_gates": "auto",
            "value_embeddings": "auto"}
    config = {"max_seq_len": 1024, "window_pattern": "SSSL", "short_window": 256, "key_shift": True,
              "layer_gates": True, "value_embeddings": True, "shared_values": True}
    settled = {"depth": 2, "window_pattern": "SSSL", "short_window": 256, "key_shift": "on", "layer_gates": "on",
               "value_embeddings": "shared"}
    saved = make_meta(config=config, flags=auto).to_json()
    assert saved["flags"] == settled == Meta.from_json(saved | {"flags": auto}).flags
    assert Meta.from_json(saved | {"format_version": 7}).flags["key_shift"] == "off"
    assert Meta.from_json(saved | {"flags": {}}).flags == {}  # an imported model was trained elsewhere


def test_a_short_window_of_version_6_is_half_of_the_rows():
    saved = make_meta(config={"window_pattern": "SL", "max_seq_len": 512}).to_json()
    assert "short_window" not in Meta.from_json(saved).config
    assert Meta.from_json(saved | {"format_version": 6}).config["short_window"] == 256


def test_fields_that_the_first_checkpoints_lack_have_defaults(tmp_path):
    found = json.loads(VERSION_1)
    for name in ("batch_schedule", "bad_steps", "interruptions", "seconds", "time", "wandb_id"):
        del found[name]
    (tmp_path / META).write_text(json.dumps(found))
    meta = load_meta(tmp_path)
    assert (meta.batch_schedule, meta.nonfinite_steps, meta.interruptions, meta.seconds) == ((), {}, 0, {})
    assert meta.time is None and meta.wandb_id is None and meta.is_pause is False


@pytest.mark.parametrize("content, message", [
    ('{"format_version": 10, "step": 4}', "has format version 10 and this program reads versions up to 9: update"),
    ('{"format_version": "11"}', "has format version 11 and this program reads versions up to 9: update"),
    ('{"step": 4}', "is not a checkpoint .meta.json has no 'config'.: give a step_"),
    (VERSION_1.replace('"step": 2', '"step": "2"'), 'is not a checkpoint .meta.json: step is "2"'),
    (VERSION_1.replace('"synthetic"', "null"), "is not a checkpoint .meta.json: data_fingerprint is null"),
    ('{"step": 4', "is not a checkpoint .meta.json: Expecting ',' delimiter"),
    ("[4]", "is not a checkpoint"),
    (None, "is not a checkpoint .meta.json: .*No such file"),
])
def test_a_newer_version_and_a_damaged_file_are_refused_in_one_line(tmp_path, content, message):
    if content is not None:
        (tmp_path / META).write_text(content)
    with pytest.raises(BadInput, match=message) as error:
        load_meta(tmp_path)
    assert "\n" not in str(error.value)


CONFIG = json.loads(VERSION_1)["config"]


@pytest.mark.parametrize("config, problem", [
    ({name: CONFIG[name] for name in CONFIG if name != "softcap"}, "has no softcap"),
    (CONFIG | {"n_experts": 4}, "has n_experts, which this program does not know"),
    (CONFIG | {"n_head": "2"}, 'has n_head = "2"'),
    (CONFIG | {"n_layer": 2.0}, "has n_layer = 2.0"),
    (CONFIG | {"n_layer": True}, "has n_layer = true"),
    (CONFIG | {"n_layer": -1}, "has n_layer = -1"),
    (CONFIG | {"window_pattern": None}, "has window_pattern = null"),
    (CONFIG | {"n_head": 0}, "makes no model"),
    (CONFIG | {"n_head": 3}, "makes no model .--model_dim=64 does not divide"),
    ({}, "has no vocab_size"),
])
def test_a_config_that_makes_no_model_is_refused_by_the_name_of_its_field(tmp_path, config, problem):
    (tmp_path / META).write_text(json.dumps(json.loads(VERSION_1) | {"config": config}))
    with pytest.raises(BadInput, match=f"the model's config in its meta.json {problem}") as error:
        read_config(tmp_path, load_meta(tmp_path), GPTConfig)
    assert "\n" not in str(error.value)
    meta = make_meta(config=CONFIG | {"softcap": 15, "rotary_base": 10_000, "layer_gates": False,
                                       "value_embeddings": False, "short_window": 0, "key_shift": False,
                                       "shared_values": False})
    assert read_config(tmp_path, meta, GPTConfig) == GPTConfig(**CONFIG, key_shift=False)


@pytest.mark.parametrize("change, message", [
    ({"config": {"n_layer": 3, "n_embd": 128}}, "another architecture: --depth is 2 there and 3 here"),
    ({"tokenizer_sha256": "cc" * 32}, "another tokenizer"),
    ({"data_fingerprint": "cc" * 32}, "other data than that in --data_dir"),
])
def test_resuming_with_another_model_tokenizer_or_data_is_bad_input(tmp_path, change, message):
    meta = load_meta(save(tmp_path, 1))
    ours = dict(config=meta.config, tokenizer_sha256=meta.tokenizer_sha256, data_fingerprint=meta.data_fingerprint)
    require_match(tmp_path, meta, **ours)
    with pytest.raises(BadInput, match=message):
        require_match(tmp_path, meta, **{**ours, **change})


def test_a_switch_of_the_model_is_on_or_off(tmp_path):
    meta = make_meta(config={"key_shift": False})
    with pytest.raises(BadInput, match="--key_shift is off there and on here: leave --key_shift out, or"):
        require_match(tmp_path, meta, config={"key_shift": True}, tokenizer_sha256=None, data_fingerprint=None)


def test_the_random_generator_is_restored():
    state = json.loads(json.dumps(rng_state()))
    expected = torch.rand(3)
    restore_rng(state)
    assert torch.equal(torch.rand(3), expected)
