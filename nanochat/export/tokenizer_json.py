"""A tokenizer as the tokenizer.json of Hugging Face's library; data/hub_tokenizer.py reads it back."""
import json
from itertools import pairwise

from nanochat.data.hub_tokenizer import HubTokenizer, byte_of_character

BOS = "<|bos|>"
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def tokenizer_json(tokenizer):
    """Returns the content of a tokenizer.json that gives text the ids of `tokenizer`. The library differs in two ways:
    it puts <|bos|> before the text unless add_special_tokens is False, and encodes the name of a special token as that
    token unless split_special_tokens is True. One that was read from a tokenizer.json is written as it was."""
    if isinstance(tokenizer, HubTokenizer):
        return tokenizer.json
    return json.dumps({
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added_token(name, number) for name, number in _by_id(tokenizer.special_tokens)],
        "normalizer": None,
        # "Removed" drops what the pattern does not match, as tiktoken does.
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": tokenizer.pattern}, "behavior": "Removed", "invert": True},
            BYTE_LEVEL]},
        "post_processor": _put_bos_first(tokenizer.bos_id),
        "decoder": BYTE_LEVEL,
        "model": _model(tokenizer.tokens(), tokenizer.special_tokens),
    }, ensure_ascii=False)


def _by_id(ids):
    return sorted(ids.items(), key=lambda item: item[1])


def _added_token(name, number):
    return {"id": number, "content": name, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
            "special": True}


def _put_bos_first(bos_id):
    bos = {"SpecialToken": {"id": BOS, "type_id": 0}}
    first = {"Sequence": {"id": "A", "type_id": 0}}
    second = {"Sequence": {"id": "B", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [bos, first],
        "pair": [bos, first, bos, second],
        "special_tokens": {BOS: {"id": BOS, "ids": [bos_id], "tokens": [BOS]}},
    }


def _model(ranks, special_tokens):
    character_of = {byte: character for character, byte in byte_of_character().items()}

    def written(token):
        return "".join(character_of[byte] for byte in token)

    vocabulary = {}
    merges = []
    for token, rank in _by_id(ranks):
        vocabulary[written(token)] = rank
        # One merge per token is enough, that of its last pair: when tiktoken makes a token, all pairs of lower rank are
        # merged, so it meets only that pair. A token that no pair of tokens makes has none. It stands only for a whole
        # piece of text, which ignore_merges looks up.
        pair = last_pair(token, rank, ranks)
        if len(pair) == 2:
            merges.append([written(part) for part in pair])
    # The library numbers the special tokens after the vocabulary, unless the vocabulary lists them.
    if min(special_tokens.values()) != len(ranks):
        vocabulary |= special_tokens
    return {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": True,
            "vocab": vocabulary, "merges": merges}


def last_pair(token, rank, ranks):
    """Returns the parts of a token after merging all pairs of a lower rank than its own, the leftmost lowest first."""
    parts = [token[i:i + 1] for i in range(len(token))]
    while len(parts) > 2:
        found = [ranks.get(left + right, rank) for left, right in pairwise(parts)]
        lowest = min(found)
        if lowest >= rank:
            break
        i = found.index(lowest)
        parts[i:i + 2] = [parts[i] + parts[i + 1]]
    return tuple(parts)
