"""The tokenizer.json of an export gives the ids of the tokenizer, and is read back."""
import json

from nanochat.data.tokenizer import load_tokenizer
from nanochat.export import export, tokenizer_json
from nanochat.export.model_card import describe_gaps
from tests.data import hub
from tests.data.headers import HEADERS


def test_an_exported_tokenizer_is_read_back_with_the_same_ids_and_borders(tmp_path):
    shipped = load_tokenizer()
    (tmp_path / "tokenizer.json").write_text(tokenizer_json.tokenizer_json(shipped), encoding="utf-8")
    again = load_tokenizer(tmp_path)
    for text in (*HEADERS[:9], b"\xff \xe9<|bos|>", "\n\n  x"):
        assert again.encode(text) == shipped.encode(text)
    assert again.special_tokens == shipped.special_tokens and again.losses == ""
    for name in ("n_vocab", "bos_id", "middle_end", "ends"):
        assert getattr(again, name) == getattr(shipped, name)
    assert again.tokens() == shipped.tokens() and again.token_bytes().equal(shipped.token_bytes())


def test_the_card_says_how_to_fill_gaps_in_the_names_of_the_tokenizer():
    card = describe_gaps(hub.hub_tokenizer(hub.smollm2), 0.5)
    assert "`<jupyter_text>text after<jupyter_start>text before<jupyter_code>`. `<file_sep>` ends" in card
    assert "<|fim_middle|>`. `<|endoftext|>` ends" in describe_gaps(hub.hub_tokenizer(hub.qwen), 0.5)
    assert "<|fim_middle|>`. `<|file_sep|>` ends" in describe_gaps(load_tokenizer(), 0.5)
    assert "not trained to fill" in describe_gaps(hub.hub_tokenizer(hub.llama3), 0.0)


def test_a_tokenizer_of_the_library_is_written_as_it_was(tmp_path):
    files = hub.files_of(*hub.smollm2())
    tokenizer = hub.HubTokenizer(files)
    assert tokenizer_json.tokenizer_json(tokenizer).encode() == files["tokenizer.json"]
    config = export.tokenizer_config(tokenizer, 64)
    assert config["bos_token"] == config["eos_token"] == "<|endoftext|>" and "pad_token" not in config
    assert export.special_ids(tokenizer)["eos_token_id"] == [0, tokenizer.special("<file_sep>")]
    assert json.loads(files["tokenizer.json"])["added_tokens"][0]["content"] == config["bos_token"]
