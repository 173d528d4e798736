"""meta.json is restored as it was saved."""
import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from nanochat.checkpoint.meta import FORMAT, Meta, load_meta, read_config, require_same, restore_rng, rng_state
from nanochat.checkpoint.on_disk import META
from nanochat.common import BadInput
from nanochat.model.config import GPTConfig
from nanochat.model.models import CONFIG_FLAGS, require_as_saved
from tests.checkpoint.states import make_meta, make_source

CONFIG = asdict(GPTConfig(vocab_size=270, max_seq_len=32, n_layer=2, n_embd=64, n_head=2))


def test_a_meta_is_restored_as_it_was_saved():
    meta = make_meta(7, wandb_id="abcd1234", time=1795257657.2, total_batch_size=512, interruptions=2,
                     nonfinite_steps={"total": 3, "in_a_row": 1}, seconds={"train": 20.5, "other": 1.5}, is_pause=True,
                     mesh={"data": 2, "fsdp": 4, "tensor": 1})
    saved = json.loads(json.dumps(meta.to_json()))
    assert Meta.from_json(saved) == meta
    assert saved["format"] == FORMAT
    assert f"Checkpoints have format {FORMAT}." in (Path(__file__).parents[2] / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("change, message", [
    ({"format": 1}, "has format 1 and this program reads format 2"),
    ({"format": None, "format_version": 9}, "has format None and this program reads format 2"),
    ({"config": None}, "is damaged .meta.json: config is null"),
    ({"step": "2"}, 'is damaged .meta.json: step is "2"'),
    ({"data_fingerprint": None}, "is damaged .meta.json: data_fingerprint is null"),
    ({"total_batch_size": "5"}, "is damaged .meta.json: total_batch_size is .5."),
    ({"seconds": [20]}, "is damaged .meta.json: seconds is .20."),
    ("[" * 100_000, "is damaged .meta.json: maximum recursion depth"),
    ({"source": make_source(dtype="zzz")}, "is damaged .*source is"),
    ({"source": make_source(model=None)}, "is damaged .*source is"),
    ({"source": make_source(more="")}, "is damaged .*source is"),
    ({"a_field_of_later": 1}, "is damaged .meta.json: a_field_of_later is missing or unknown"),
    ('{"format": 2}', "is damaged .meta.json: config is missing or unknown"),
    ("{\"step\": 4", "is damaged .meta.json: Expecting ',' delimiter"),
    ("[4]", "is damaged .meta.json: it is no JSON object.: move it away, or name another step"),
    (None, "is damaged .meta.json: No such file or directory.: move it away"),
])
def test_another_format_and_a_damaged_file_are_refused_in_one_line(tmp_path, change, message):
    content = json.dumps(make_meta().to_json() | change) if isinstance(change, dict) else change
    if content is not None:
        (tmp_path / META).write_text(content)
    with pytest.raises(BadInput, match=message) as error:
        load_meta(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("config, problem", [
    ({name: CONFIG[name] for name in CONFIG if name != "softcap"},
     "has no softcap: use another checkpoint, or the version of nanochat that wrote it"),
    (CONFIG | {"n_experts": 4}, "has n_experts, which this program does not know"),
    (CONFIG | {"n_head": "2"}, 'has n_head = "2"'),
    (CONFIG | {"n_layer": 2.0}, "has n_layer = 2.0"),
    (CONFIG | {"n_layer": True}, "has n_layer = true"),
    (CONFIG | {"n_layer": -1}, "has n_layer = -1"),
    (CONFIG | {"window_pattern": None}, "has window_pattern = null"),
    (CONFIG | {"n_head": 0}, "makes no model"),
    (CONFIG | {"n_layer": 10**9}, "makes no model .--depth=1e.09 is more than 10000"),
    (CONFIG | {"n_embd": 10**9}, "makes no model .--model_dim=1e.09 is more than 65536"),
    (CONFIG | {"n_head": 3}, "makes no model .--model_dim=64 does not divide"),
    ({}, "has no vocab_size"),
])
def test_a_config_that_makes_no_model_is_refused_by_the_name_of_its_field(tmp_path, config, problem):
    (tmp_path / META).write_text(json.dumps(make_meta(config=config).to_json()))
    with pytest.raises(BadInput, match=f"the model's config in its meta.json {problem}") as error:
        read_config(tmp_path, load_meta(tmp_path), GPTConfig)
    assert "\n" not in str(error.value)
    meta = make_meta(config=CONFIG | {"softcap": 15, "rotary_base": 10_000})
    assert read_config(tmp_path, meta, GPTConfig) == GPTConfig(**CONFIG)


def test_a_checkpoint_of_other_flags_or_data_is_refused_with_both_values(tmp_path):
    require_same(tmp_path, {"--fim_rate": (0.5, 0.5), "the hash of the data": ("ab", "ab")})
    with pytest.raises(BadInput, match="--fim_rate is 0.5 there and 0.0 here.*another --run"):
        require_same(tmp_path, {"--seed": (1, 1), "--fim_rate": (0.5, 0.0)})


@pytest.mark.parametrize("given, saved", [({"key_shift": "on"}, "off"), ({"depth": 3}, 2), ({"softcap": 0.0}, 15.0),
                                          ({"value_embeddings": "off"}, "shared")])
def test_a_flag_that_is_not_that_of_the_saved_model_is_refused(given, saved):
    config = GPTConfig(**{**CONFIG, "key_shift": False})
    not_given = dict.fromkeys(CONFIG_FLAGS)
    (name, value), = given.items()
    with pytest.raises(BadInput, match=f"--{name}={value}, but the model in here has --{name}={saved}"):
        require_as_saved(not_given | given, config, "here")
    require_as_saved(not_given | {name: saved, "model_dim": -1}, config, "here")


def test_the_random_generator_is_restored():
    state = json.loads(json.dumps(rng_state()))
    expected = torch.rand(3)
    restore_rng(state)
    assert torch.equal(torch.rand(3), expected)
