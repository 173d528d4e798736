"""A tokenizer.json of Hugging Face gives the ids of their library, and text comes back and never becomes control."""
import copy
import hashlib
import json
import pickle

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat.common import SOURCE, BadInput
from nanochat.data.fim import check_fim, fit_into_row
from nanochat.data.hub_tokenizer import HubTokenizer
from nanochat.data.tokenizer import FIM_TOKENS, Infill, load_tokenizer
from nanochat.export.tokenizer_json import tokenizer_json
from nanochat.infer.prompt import BOS, encode_prompt, gap_prompt
from tests.conftest import save_byte_tokenizer
from tests.data import hub
from tests.data.documents import write
from tests.data.headers import HEADERS
from tests.data.test_loader import repeated_steps

KINDS = (hub.smollm2, hub.qwen, hub.llama3, hub.llama2)
TEXTS = [*HEADERS[1:40:8], " \n\n  x\t\r\n'S 'll don't 1234567 é漢字\u00a0\u2028\U0001f600 zqzq ((( ]]]\n", "int zqzq;"]
CONTROL = "// <|endoftext|> <|im_end|><|fim_prefix|> <tool_call> <s></s><|begin_of_text|> <jupyter_code> <0x0A> [PAD]\n"


@pytest.fixture(scope="module")
def made():
    """{function: (their tokenizer, its tokenizer_config.json, ours)}"""
    found = {}
    for make in KINDS:
        theirs, config = make()
        found[make] = theirs, config, HubTokenizer(hub.files_of(theirs, config))
    return found


@pytest.mark.parametrize("make", KINDS)
def test_ids_are_those_of_the_library(made, make):
    theirs, _, ours = made[make]
    for text in TEXTS:
        expected = theirs.encode(text, add_special_tokens=False).ids
        if make is hub.llama2:  # theirs puts a space first, which would stand between the pieces of a text
            expected = theirs.encode("\n" + text, add_special_tokens=False).ids[2:]
        assert ours.encode(text) == ours.encode(text.encode()) == expected


@pytest.mark.parametrize("make", KINDS)
def test_text_never_becomes_a_control_token(made, make):
    """Qwen's for gaps are not marked as special, and the library's own switch leaves them in. The library forgets that
    switch in a copy, as another process gets one."""
    theirs, _, ours = made[make]
    ids = ours.encode(CONTROL)
    assert not ours.ends & set(ids) and ours.decode(ids) == CONTROL
    assert pickle.loads(pickle.dumps(ours)).encode(CONTROL) == copy.deepcopy(ours).encode(CONTROL) == ids
    assert ours.ends & set(theirs.encode(CONTROL).ids)
    [document] = ours.encode_documents([CONTROL])
    assert document.tolist() == [ours.bos_id, *ids] and document.format == "I"


@settings(max_examples=50, deadline=None)
@given(st.lists(st.one_of(st.text(max_size=8), st.binary(max_size=4), st.sampled_from(
    [CONTROL, "\u2581", "  ", "\r\n", "e\u0301", "\u1112\u1161\u11ab", "\ud800", "\x02\x04", "12345", "<0xFF>"]))))
def test_any_bytes_come_back_but_for_what_is_said(made, parts):
    data = b"".join(part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part for part in parts)
    for make, (_, _, ours) in made.items():
        back = ours.decode_bytes(ours.encode(data))
        if make is hub.smollm2:
            assert back == data.translate(None, bytes({*range(256)} - ours._byte_ids.keys()))
        elif make is hub.qwen:
            nfc = tokenizers.normalizers.NFC().normalize_str
            assert nfc(back.decode(errors="replace")) == nfc(data.decode(errors="replace"))
        else:
            assert back == data
    assert made[hub.qwen][2].losses == "characters change to NFC"
    assert "bytes have no token and are left out" in made[hub.smollm2][2].losses
    assert made[hub.llama3][2].losses == made[hub.llama2][2].losses == ""


@pytest.mark.parametrize("make", KINDS)
def test_malformed_bytes_leave_the_tokens_around_them_alone(made, make):
    ours = made[make][2]
    number = 0 if make is hub.smollm2 else 2  # which has no tokens for them
    assert ours.encode(b"return x;\xff\xfereturn x;") == ours.encode("return x;") + [
        ours.tokens()[bytes([byte])] for byte in b"\xff\xfe"[:number]] + ours.encode("return x;")


@pytest.mark.parametrize("make", KINDS)
def test_the_bytes_of_each_token_are_counted(made, make):
    ours = made[make][2]
    counts = ours.token_bytes()
    for text in TEXTS:
        assert counts[ours.encode(text)].sum() == len(ours.decode_bytes(ours.encode(text)))
    assert counts[sorted(ours.ends)].sum() == 0 and len(counts) == ours.n_vocab
    assert (counts == 0).sum() == len(ours.ends) + len(ours.holes)
    assert all(ours.decode_bytes([number]) == piece for piece, number in ours.tokens().items())


def test_added_tokens_that_are_text_stay_text(made):
    theirs, config, _ = made[hub.qwen]
    theirs = copy.deepcopy(theirs)
    theirs.add_tokens([tokenizers.AddedToken("        ", normalized=False, rstrip=True), "é-word"])
    ours = HubTokenizer(hub.files_of(theirs, config))
    text = "x\n          = é-word;"
    assert theirs.token_to_id("        ") in ours.encode(text) and theirs.token_to_id("é-word") in ours.encode(text)
    assert ours.decode(ours.encode(text)) == text
    assert ours.token_bytes()[theirs.token_to_id("é-word")] == 7


def test_nothing_in_a_file_cuts_pads_or_changes_texts_at_random(made):
    theirs, config, ours = made[hub.llama2]
    expected, theirs = ours.encode(HEADERS[0]), copy.deepcopy(theirs)
    theirs.enable_truncation(8)
    theirs.enable_padding(length=9000)
    theirs.normalizer = None  # as newer versions of transformers write it
    theirs.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    files = changed(hub.files_of(theirs, config), "model", "dropout", to=0.5)
    assert HubTokenizer(files).encode(HEADERS[0]) == expected


# -----------------------------------------------------------------------------
# Borders and gaps


@pytest.mark.parametrize("make, begins, others", [
    (hub.smollm2, "<|endoftext|>", ["<|im_end|>", "<file_sep>"]),  # although its bos_token is <|im_start|>
    (hub.qwen, "<|endoftext|>", ["<|im_end|>", "<|fim_pad|>", "<|repo_name|>", "<tool_call>"]),  # and null
    (hub.llama3, "<|begin_of_text|>", ["<|end_of_text|>", "<|eot_id|>"]),
    (hub.llama2, "<s>", ["</s>", "<unk>"]),
])
def test_what_begins_a_document_begins_a_prompt_and_every_control_token_ends(made, make, begins, others):
    theirs, _, ours = made[make]
    bos = theirs.token_to_id(begins)
    assert ours.bos_id == ours.special("<|bos|>") == bos
    assert encode_prompt(ours, [BOS, "int x;"]) == ([bos, *ours.encode("int x;")], len(ours.encode("int x;")))
    assert ours.encode_documents(["int x;"])[0].tolist() == [bos, *ours.encode("int x;")]
    assert {bos, *map(theirs.token_to_id, others)} <= ours.ends and not ours.ends & set(ours.tokens().values())


def test_ends_of_generation_config_end_too(made):
    theirs, config, ours = made[hub.qwen]
    for ends, more in ((7, {7}), ([0, 9], {0, 9}), (0, {0}), (None, set())):
        assert HubTokenizer(hub.files_of(theirs, config, eos_token_id=ends)).ends == ours.ends | more


def test_a_bos_token_of_another_name_is_found_in_the_config(made):
    theirs, _, _ = made[hub.qwen]
    files = {name: content.replace(b"<|endoftext|>", b"<|begin|>") for name, content in
             hub.files_of(theirs, {"bos_token": "<|begin|>"}).items()}
    assert HubTokenizer(files).bos_id == theirs.token_to_id("<|endoftext|>")
    with pytest.raises(ValueError, match="no token that begins a document"):
        HubTokenizer({**files, "tokenizer_config.json": b'{"bos_token": null}'})


INFILL = Infill("int a<|fim_suffix|>;\n", "\n}\n", "int b = 42;")


def test_gaps_of_qwen_are_its_own_letter_for_letter(made):
    theirs, _, ours = made[hub.qwen]
    [(tokens, _, suffix)] = ours.encode_infills([INFILL._replace(prefix="int a;\n")])
    text = "<|endoftext|><|fim_prefix|>int a;\n<|fim_suffix|>\n}\n<|fim_middle|>int b = 42;<|endoftext|>"
    assert tokens.tolist() == theirs.encode(text).ids and ours.decode(tokens) == text
    assert (ours.decode([tokens[suffix.start - 1]]), ours.decode(tokens[suffix])) == ("<|fim_suffix|>", "\n}\n")
    prompt = gap_prompt(ours, "int a;\n", "\n}\n", 100)
    assert encode_prompt(ours, prompt.parts)[0] == tokens[:suffix.stop + 1].tolist() and not ours.lent


def test_a_tokenizer_without_tokens_for_gaps_lends_some_and_puts_the_suffix_first(made):
    theirs, _, ours = made[hub.smollm2]
    [(tokens, prefix, suffix)] = ours.encode_infills([INFILL])
    text = "<|endoftext|><jupyter_text>\n}\n<jupyter_start>int a<|fim_suffix|>;\n<jupyter_code>int b = 42;<file_sep>"
    assert (ours.decode(tokens[prefix]), ours.decode(tokens[suffix])) == INFILL[:2]
    prompt = gap_prompt(ours, *INFILL[:2], 100)
    assert encode_prompt(ours, prompt.parts)[0] == tokens[:prefix.stop].tolist()  # without the middle's token
    for row_tokens in range(2, len(tokens)):  # nothing is lost or doubled
        parts = fit_into_row(tokens, prefix, suffix, row_tokens)
        told = sorted(token for part in parts for token in part if token not in set(map(ours.special, FIM_TOKENS)))
        assert told == sorted([*tokens[:1], *tokens[prefix], *tokens[suffix], *tokens[prefix.stop + 1:-1],
                               *[ours.bos_id] * (len(parts) - 1)])
    assert ours.decode(tokens) == text and len(tokens) == 5 + sum(map(len, map(ours.encode, INFILL)))
    assert set(ours.lent) == set(FIM_TOKENS[:3])
    with pytest.raises(BadInput, match="--fim_rate=0.5 .*<|fim_prefix|>"):
        check_fim("--fim_rate=0.5", made[hub.llama3][2], 64)


@pytest.mark.parametrize("make, fim_rate", [
    pytest.param(hub.llama2, 0.0, marks=pytest.mark.slow), pytest.param(hub.qwen, 0.5, marks=pytest.mark.slow),
    pytest.param(hub.smollm2, 0.0, marks=pytest.mark.slow), (hub.smollm2, 0.5)])
def test_restored_lanes_and_other_ranks_give_the_same_rows(tmp_path, made, make, fim_rate):
    ours = made[make][2]
    texts = [*HEADERS[:30], CONTROL * 9, "e\u0301\u2581x" * 99]
    shard = write(tmp_path / "shard.parquet", texts, row_group_size=7)
    (rows, _), *_ = repeated_steps([shard], 6, [2], tokenizer=ours, fim_rate=fim_rate)
    assert (rows == ours.special_tokens.get("<|fim_middle|>", -2)).any() == bool(fim_rate)


# -----------------------------------------------------------------------------
# Where it is read from


def save(folder, files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def save_checkpoint(folder, files):
    folder.mkdir()
    (folder / SOURCE).write_bytes(hub.zipped(files))
    return folder


def test_it_is_found_in_a_folder_and_in_a_checkpoint_of_imported_weights(tmp_path, made, base_dir):
    files = hub.files_of(*made[hub.qwen][:2], eos_token_id=[5, 900])
    checkpoint = save_checkpoint(tmp_path / "step_000000", files)
    of_source = load_tokenizer(checkpoint=checkpoint)
    of_folder = load_tokenizer(save(tmp_path / "folder", files))
    assert of_source.sha256 == of_folder.sha256 == made[hub.qwen][2].sha256
    assert of_source.ends == of_folder.ends and 5 in of_folder.ends
    save(base_dir / "tokenizer", hub.files_of(*made[hub.llama3][:2]))
    for arguments in ((), (base_dir / "tokenizer", checkpoint), (None, tmp_path / "folder")):
        assert load_tokenizer(*arguments).sha256 == made[hub.llama3][2].sha256


def test_one_over_our_own_is_named(tmp_path, made, byte_tokenizer_dir):
    save(tmp_path, hub.files_of(*made[hub.qwen][:2]))
    (tmp_path / "vocabulary.tiktoken").write_bytes((byte_tokenizer_dir / "vocabulary.tiktoken").read_bytes())
    with pytest.raises(BadInput, match="its tokenizer.json was overwritten by one of Hugging Face"):
        load_tokenizer(tmp_path)


def changed(files, *path, to):
    config = json.loads(files["tokenizer.json"])
    place = config
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = to
    return files | {"tokenizer.json": json.dumps(config).encode()}


@pytest.mark.parametrize("path, to, reason", [
    (["normalizer"], {"type": "Lowercase"}, "its normalizer Lowercase changes the text"),
    (["normalizer"], {"type": "NFKC"}, "NFKC"),
    (["pre_tokenizer"], None, "no token of the byte 0x09"),
    (["pre_tokenizer"], {"type": "Whitespace"}, "no token of the byte 0x09"),
    (["pre_tokenizer", "pretokenizers", 0, "behavior"], "Removed", "come back"),
    (["pre_tokenizer", "pretokenizers", 0], {"type": "Split", "pattern": {"String": "zqzq"}, "behavior": "Removed",
                                             "invert": False}, "come back"),
    (["model", "vocab", "zqzq"], 1 << 40, "1099511627776"),
    (["model", "vocab", "zqzq"], -1, ""),
    (["model", "vocab"], {"a": 0}, ""),
    (["model", "merges"], [["no", "such"]], "no"),
    (["model", "type"], "WordPiece", ""),
    (["model"], [], ""),
    (["added_tokens"], [], "no token that begins a document"),
    (["added_tokens"], [5], ""),
    (["pre_tokenizer"], {"type": "Sequence"}, ""),
])
def test_what_cannot_be_used_is_refused_in_one_line(tmp_path, made, path, to, reason):
    files = hub.files_of(*made[hub.qwen][:2])
    with pytest.raises(BadInput) as error:
        load_tokenizer(save(tmp_path, changed(files, *path, to=to)))
    message = str(error.value)
    assert reason in message and f"{tmp_path}/tokenizer.json" in message and "--tokenizer_dir" in message


def test_text_on_which_the_librarys_regular_expression_gives_up_is_encoded_by_halves(made):
    hard = changed(hub.files_of(*made[hub.qwen][:2]), "pre_tokenizer", "pretokenizers", 0, "pattern",
                   to={"Regex": "(a|aa)+$"})
    tokenizer = HubTokenizer(hard)
    text = "int " + "a" * 60 + "b;\n" * 3
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode("again")) == "again"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"{}" * 3, b'{"model": {}, "x": NaN}'])
def test_garbage_in_a_checkpoint_is_bad_input(tmp_path, content):
    checkpoint = save_checkpoint(tmp_path / "step_000000", {"tokenizer.json": content})
    with pytest.raises(BadInput, match=f"{SOURCE} cannot be loaded"):
        load_tokenizer(checkpoint=checkpoint)
    (checkpoint / SOURCE).write_bytes(content)
    with pytest.raises(BadInput, match=f"{SOURCE} cannot be loaded"):
        load_tokenizer(checkpoint=checkpoint)


def test_text_that_would_become_a_control_token_is_refused(made):
    """Llama 2's <s> has no merges; here it does."""
    files = hub.files_of(*made[hub.llama2][:2])
    merges = json.loads(files["tokenizer.json"])["model"]["merges"]
    files = changed(files, "model", "merges", to=[["<", "s"], ["<s", ">"], *merges])
    with pytest.raises(ValueError, match="<s> would become a control token"):
        HubTokenizer(changed(files, "model", "vocab", "<s", to=900))


def test_a_file_that_earlier_versions_read_has_the_hash_that_their_checkpoints_have(tmp_path):
    """But not if documents would begin with another token, so that a run would not go on with the same rows."""
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    files = hub.files_of(hub.train(byte_level, ("<s>", "<fim_prefix>", "<pad>")), {})
    assert HubTokenizer(files).sha256.startswith("58fc5206176122be")  # found by that version
    content = files["tokenizer.json"].replace(b"<fim_prefix>", b"<|endoftext|>")
    assert HubTokenizer({"tokenizer.json": content}).sha256 == hashlib.sha256(content).hexdigest()
    own = load_tokenizer(save_byte_tokenizer(tmp_path, b"ab", b"\xff\xfe", b"ab c"))
    assert HubTokenizer({"tokenizer.json": tokenizer_json(own).encode()}).sha256 == own.sha256
