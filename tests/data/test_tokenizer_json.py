"""A tokenizer.json of Hugging Face gives the ids that their library would give, or is refused with the reason."""
import copy
import json
import random

import pytest
import regex
import rustbpe
import tiktoken

from nanochat.common import BadInput
from nanochat.data import tokenizer_json
from nanochat.data.tokenizer import SPECIAL_TOKENS, load_tokenizer
from tests.data.headers import HEADERS

NANOCHAT = (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)"
            r"|\s+")
CHARACTER_OF = {byte: character for character, byte in tokenizer_json.byte_of_character().items()}
TEXTS = [*HEADERS[1:40:4], " \n\n  x\t\r\n'S 'll don't 1234567 é漢字\u00a0\u2028\U0001f600 <|bos|> ((( ]]] \0\x7f"]


def visible(token):
    return "".join(CHARACTER_OF[byte] for byte in token)


def split_and_byte_level(pattern, **split):
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False, **split}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [split, byte_level]}


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def make(pattern, pre_tokenizer, special_tokens=("<|bos|>", "<|user_start|>"), first=True, pairs=True, vocab_size=1500):
    """Returns the content of a tokenizer.json as the library's BpeTrainer writes it, trained with rustbpe.

    first: the special tokens have the first ids, as BpeTrainer gives them. pairs: how newer versions write merges.
    """
    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator(iter(HEADERS[::2]), vocab_size, pattern=pattern)
    tokens = {bytes(token): rank for token, rank in trainer.get_mergeable_ranks()}
    shift = len(special_tokens) if first else 0
    special = {name: i if first else len(tokens) + i for i, name in enumerate(special_tokens)}
    merges = [[visible(part) for part in tokenizer_json.last_pair(token, rank, tokens)]
              for token, rank in tokens.items() if len(token) > 1]
    vocabulary = {**special, **{visible(token): rank + shift for token, rank in tokens.items()}}
    return make_config(vocabulary, merges if pairs else [" ".join(pair) for pair in merges], pre_tokenizer, special)


def make_config(vocabulary, merges, pre_tokenizer=BYTE_LEVEL, special=None):
    return {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [{"id": number, "content": name, "single_word": False, "lstrip": False, "rstrip": False,
                          "normalized": False, "special": True}
                         for name, number in (special or {"<|bos|>": 0}).items()],
        "normalizer": None, "pre_tokenizer": pre_tokenizer, "post_processor": None, "decoder": BYTE_LEVEL,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": True, "ignore_merges": False,
                  "vocab": vocabulary, "merges": merges}}


def save(directory, config):
    directory.mkdir(exist_ok=True)
    (directory / "tokenizer.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return directory


def encode(config, pattern, text):
    """Returns the ids of a text by the library's algorithm: in each piece, the pair that is listed first is merged."""
    order = {tuple(pair) if isinstance(pair, list) else tuple(pair.split(" ")): i
             for i, pair in enumerate(config["model"]["merges"])}
    ids = []
    for piece in regex.findall(pattern, text):
        parts = [CHARACTER_OF[byte] for byte in piece.encode()]
        while len(parts) > 1:
            pairs = zip(parts, parts[1:], strict=False)
            best, i = min((order.get(pair, len(order)), i) for i, pair in enumerate(pairs))
            if best == len(order):
                break
            parts[i:i + 2] = ["".join(parts[i:i + 2])]
        ids += (config["model"]["vocab"][part] for part in parts)
    return ids


@pytest.fixture(scope="module")
def trained():
    """The tokenizer.json that karpathy/nanochat's trainer writes with Hugging Face's library."""
    return make(NANOCHAT, split_and_byte_level(NANOCHAT))


@pytest.mark.parametrize("pattern, pre_tokenizer, options", [
    (NANOCHAT, split_and_byte_level(NANOCHAT), {}),
    (NANOCHAT, split_and_byte_level(NANOCHAT, behavior="Removed", invert=True), {"first": False, "pairs": False}),
    (tokenizer_json.GPT2_PATTERN, BYTE_LEVEL, {"special_tokens": ["<|endoftext|>"], "first": False}),
])
def test_ids_are_those_of_the_library_and_text_comes_back(tmp_path, pattern, pre_tokenizer, options):
    config = make(pattern, pre_tokenizer, **options)
    tokenizer = load_tokenizer(save(tmp_path, config))
    for text in TEXTS:
        assert tokenizer.encode(text) == encode(config, pattern, text)
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode_bytes(tokenizer.encode(b"\xff\xfe")) == b"\xff\xfe"
    special = config["added_tokens"]
    assert tokenizer.bos_id == special[0]["id"] and tokenizer.n_vocab == 1500 + len(special)
    assert tokenizer.token_bytes()[special[0]["id"]] == 0 and tokenizer.token_bytes().sum() > 1500
    assert tokenizer.encode_documents(["int x;\n"])[0].tolist() == [tokenizer.bos_id, *tokenizer.encode("int x;\n")]


def test_ids_are_those_of_the_installed_library(tmp_path, trained):
    tokenizers = pytest.importorskip("tokenizers")
    trained = copy.deepcopy(trained)
    theirs, ours = tokenizers.Tokenizer.from_str(json.dumps(trained)), load_tokenizer(save(tmp_path, trained))
    for text in TEXTS:
        text = text.replace("<|bos|>", "")  # which their library takes for the special token
        assert ours.encode(text) == theirs.encode(text).ids


def test_it_is_found_where_a_tokenizer_of_ours_is_and_saved_as_one(tmp_path, base_dir, trained):
    (base_dir / "tokenizer").mkdir(parents=True)
    save(base_dir / "tokenizer" / "tokenizer_65k", trained)
    tokenizer = load_tokenizer()
    tokenizer.save(tmp_path)
    assert load_tokenizer(tmp_path).sha256 == tokenizer.sha256
    assert load_tokenizer(tmp_path).encode(HEADERS[0]) == tokenizer.encode(HEADERS[0])


@pytest.mark.parametrize("names, expected", [
    (SPECIAL_TOKENS, SPECIAL_TOKENS),
    (["<s>", "<|begin_of_text|>", "[PAD]"], ["<s>", "<|bos|>", "<|pad|>"]),
    (["<|endoftext|>", "<fim_prefix>", "<fim_middle>", "<file_sep>", "<|x|>"],
     ["<|bos|>", "<|fim_prefix|>", "<|fim_middle|>", "<|file_sep|>", "<|x|>"]),
])
def test_special_tokens_get_our_names(tmp_path, trained, names, expected):
    config = copy.deepcopy(trained)
    tokens = len(config["model"]["vocab"])
    new = [name for name in names if name not in config["model"]["vocab"]]
    config["added_tokens"] = [{"id": i, "content": f"<old{i}>", "special": False} for i in range(2)]
    config["added_tokens"] += [{"id": tokens + i, "content": name, "special": True} for i, name in enumerate(names)]
    config["model"]["vocab"] = {token: i for token, i in config["model"]["vocab"].items() if i > 1}
    tokenizer = load_tokenizer(save(tmp_path, config))
    assert len(new) >= len(names) - 2
    assert [tokenizer.special(name) for name in expected] == list(range(tokens, tokens + len(names)))


def changed(config, *path, to):
    """Returns a copy of the content with another value at this path."""
    config = copy.deepcopy(config)
    place = config
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = to
    return config


LLAMA2 = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "_"}]}
DIGITS = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, BYTE_LEVEL]}
PRE = "pre_tokenizer"


@pytest.mark.parametrize("path, to, reason", [
    (["normalizer"], {"type": "NFC"}, "normalizer changes the text"),
    (["normalizer"], LLAMA2, "normalizer changes the text"),
    ([PRE], None, "has no pre_tokenizer"),
    ([PRE], {"type": "Metaspace", "replacement": "_"}, "its pre_tokenizer is Metaspace"),
    ([PRE], DIGITS, "its pre_tokenizer is Digits and ByteLevel"),
    ([PRE], {**BYTE_LEVEL, "add_prefix_space": True}, "adds a space"),
    ([PRE], {**BYTE_LEVEL, "use_regex": False}, "does not split text"),
    ([PRE, "pretokenizers", 0, "behavior"], "MergedWithPrevious", "behavior MergedWithPrevious"),
    ([PRE, "pretokenizers", 1, "use_regex"], True, "splits text twice"),
    ([PRE, "pretokenizers", 0, "pattern"], {"String": " "}, "may mean something else"),
    ([PRE, "pretokenizers", 0, "pattern", "Regex"], r"\w+|\W", r"may mean something else to tiktoken: \w"),
    ([PRE, "pretokenizers", 0, "pattern", "Regex"], r"\p{L}+|[^\p{L}\n]", "leaves out some characters"),
    ([PRE, "pretokenizers", 0, "pattern", "Regex"], r"[a-z]{2,}|[^a-z]", "leaves out some characters"),
    (["model", "type"], "Unigram", "is a Unigram, not a BPE"),
    (["model", "dropout"], 0.1, "its model has a dropout"),
    (["model", "end_of_word_suffix"], "</w>", "its model has a end_of_word_suffix"),
    (["model", "vocab", "漢"], 1502, "is not of bytes"),
    (["model", "vocab", "zqzq"], 1502, "no merge makes its token b'zqzq'"),
    (["model", "vocab", "a"], 1502, "are not 0, 1, 2"),
    (["model", "merges"], [], "no merge makes its token"),
    (["added_tokens", 0, "content"], "<x>", "no token for the beginning of a document"),
    (["added_tokens", 1], {"id": 1, "content": "    ", "special": False}, "cut out of the text before the rest"),
    (["model"], [], "AttributeError"),
])
def test_what_would_change_text_or_ids_is_refused_in_one_line(tmp_path, trained, path, to, reason):
    with pytest.raises(BadInput) as error:
        load_tokenizer(save(tmp_path, changed(trained, *path, to=to)))
    message = str(error.value)
    assert reason in message and "\n" not in message
    assert f"{tmp_path}/tokenizer.json" in message and "--tokenizer_dir" in message


def test_merges_in_another_order_are_refused(tmp_path, trained):
    merges = trained["model"]["merges"]
    for other in (merges[::-1], merges[:-1], [*merges[:5], merges[6], merges[5], *merges[7:]]):
        with pytest.raises(BadInput, match="its merges are not in the order of ids|no merge makes its token"):
            load_tokenizer(save(tmp_path, changed(trained, "model", "merges", to=other)))


def test_a_token_of_other_parts_than_tiktokens_is_refused(tmp_path, trained):
    """The library would never make this token, because the pair is never met; tiktoken would."""
    merges = copy.deepcopy(trained["model"]["merges"])
    number = next(i for i, (left, right) in enumerate(merges) if len(left) > 1 and len(right) == 1)
    left, right = merges[number]
    merges[number] = [left[0], left[1:] + right]
    config = changed(trained, "model", "merges", to=merges)
    with pytest.raises(BadInput, match="no merge makes its token|is made of later ones"):
        load_tokenizer(save(tmp_path, config))


def test_one_over_our_own_is_named(tmp_path, trained, byte_tokenizer_dir):
    save(tmp_path, trained)
    (tmp_path / "vocabulary.tiktoken").write_bytes((byte_tokenizer_dir / "vocabulary.tiktoken").read_bytes())
    with pytest.raises(BadInput, match="its tokenizer.json was overwritten by one of Hugging Face"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("pattern, alike", [
    (NANOCHAT, True), (tokenizer_json.GPT2_PATTERN, True), (r"(?:a|b){2,3}|[^\S\n]+|\x41|[\[\]]", True),
    (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)"
     r"|\s+", True),  # Llama 3
    (r"a$", False), (r"^a", False), (r"\bint\b", False), (r"(?m)a", False), (r"(?<=a)b", False), (r"a{2}+", False),
    (r"a{,2}", False), (r"(a)\1", False), (r"[[:alpha:]]", False), (r"[a-z&&[^b]]", False), (r"[a--b]", False),
    (r"(?i:ss)", False), (r"(?i:straße)", False), (r"\p{Alpha}", False), (r"\h", False), (r"\xC3", False), ("", False),
])
def test_only_patterns_that_both_libraries_read_alike_are_taken(pattern, alike):
    assert bool(tokenizer_json.ALIKE.fullmatch(pattern)) == alike


def test_random_vocabularies_are_read_alike_or_refused(tmp_path):
    """Of few letters and with merges in random order, so that most would give other ids with tiktoken."""
    rng, taken = random.Random(0), 0
    for number in range(300):
        letters, merges = "ab"[:rng.randrange(1, 3)], []
        vocabulary = {CHARACTER_OF[byte]: byte + 1 for byte in range(256)}
        tokens = list(letters)
        for _ in range(rng.randrange(1, 6)):
            pair = [rng.choice(tokens), rng.choice(tokens)]
            if pair not in merges:
                merges.append(pair)
            if "".join(pair) not in vocabulary:
                vocabulary["".join(pair)] = len(vocabulary) + 1
                tokens.append("".join(pair))
        config = make_config(vocabulary, merges)
        try:
            ranks, _, _ = tokenizer_json.read_huggingface(save(tmp_path, config) / "tokenizer.json", SPECIAL_TOKENS)
        except ValueError:
            continue
        taken += 1
        encoding = tiktoken.Encoding("random", pat_str=r"[\s\S]+", mergeable_ranks=ranks, special_tokens={"<|bos|>": 0})
        for _ in range(40):
            text = "".join(rng.choices(letters, k=rng.randrange(12)))
            assert encoding.encode_ordinary(text) == encode(config, r"[\s\S]+", text), (number, merges, text)
    assert 50 < taken < 280


def test_a_long_token_is_refused_because_checking_it_would_take_long(tmp_path):
    merges = [["a" * 2**k, "a" * 2**k] for k in range(10)]
    vocabulary = {token: number for number, token in enumerate([*CHARACTER_OF.values(), *map("".join, merges)], 1)}
    path = save(tmp_path, make_config(vocabulary, merges)) / "tokenizer.json"
    with pytest.raises(ValueError, match="its token 'aaaaaaaaaaaaaaaaaaaa'… has more than 1000 bytes"):
        tokenizer_json.read_huggingface(path, SPECIAL_TOKENS)


def test_the_last_pair_is_that_of_merging_one_pair_after_the_other():
    rng = random.Random(0)
    for _ in range(300):
        tokens = [b"a", b"b", b"c"]
        for _ in range(rng.randint(0, 12)):
            tokens.append(rng.choice(tokens) + rng.choice(tokens))
        ranks = {token: rank for rank, token in enumerate(dict.fromkeys(tokens))}
        for token in [*ranks, bytes(rng.choices(b"abc", k=40))]:
            rank = ranks.get(token, rng.randint(0, len(ranks)))
            parts = [bytes([byte]) for byte in token]
            while len(parts) > 2:
                found = [ranks.get(left + right, rank) for left, right in zip(parts, parts[1:], strict=False)]
                if min(found) >= rank:
                    break
                i = found.index(min(found))
                parts[i:i + 2] = [parts[i] + parts[i + 1]]
            assert tokenizer_json.last_pair(token, rank, ranks) == tuple(parts)
