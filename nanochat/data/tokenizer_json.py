"""Reads the tokenizer.json of Hugging Face's tokenizers, if it is a byte-level BPE that tiktoken encodes alike.

Both libraries merge the pair of lowest rank first. But Hugging Face has a list of pairs, and tiktoken merges any pair
that makes a token; their regular expressions differ; and Hugging Face may change the text first. So only what is known
to give the same ids is accepted.
"""
import json
import re
from itertools import pairwise

# The split of GPT-2, which ByteLevel makes unless a Split does (tokenizers, src/pre_tokenizers/byte_level.rs)
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# The syntax that means the same to Oniguruma, which Hugging Face uses, and to the regex crates of Rust, which tiktoken
# uses. It excludes ^ and $, which match at every line in Oniguruma; \w, \b and \h, which match other characters;
# back-references and look-behind; {m,n} before another quantifier; and flags, except for English endings ('s, 'll):
# without case, Oniguruma also takes "ss" and "st" for one character.
_CHARACTER = r"\\[pP]\{[A-Z][a-z]?\}|\\[sSdDrnt]|\\x[0-7][0-9A-Fa-f]|\\[^\w\s]"
ALIKE = re.compile(
    rf"(?:{_CHARACTER}|\(\?(?::|[=!])|\(\?i:(?![^)]*s[st])['sdmtlvre|\[\]]+\)|\((?!\?)|[)|.]|"
    rf"\[\^?(?:{_CHARACTER}|(?!&&|--|~~)[^\\\[\]])+\]|"
    r"\{\d+(?:,\d*)?\}(?![?*+{])|[?*+][?+]?(?![?*+{])|[^\\^$.\[\](){}|?*+])+")

LONGEST = 1000  # bytes of a token: last_pair is quadratic, and real vocabularies have up to a few hundred

# Other names of nanochat's special tokens in Hugging Face's models; the first that is present counts.
_OTHER_NAMES = {
    "<|bos|>": ("<|begin_of_text|>", "<bos>", "<s>", "[BOS]", "<|startoftext|>", "<|endoftext|>"),
    "<|file_sep|>": ("<file_sep>", "<|file_separator|>"),
    "<|pad|>": ("<pad>", "[PAD]", "<|padding|>"),
}
_CONTROL = re.compile(r"<[^<>\s]+>|\[[A-Z_]+\]")


def byte_of_character():
    """Returns {character: byte}: GPT-2 writes each byte as a visible character, from U+0100 on if necessary."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in visible]
    characters = [*map(chr, visible), *map(chr, range(256, 256 + len(others)))]
    return dict(zip(characters, visible + others, strict=True))


def read_huggingface(path, our_names):
    """Returns ({bytes: id}, split pattern, {special token: id}) of a tokenizer.json, with its ids.

    Special tokens get nanochat's names, `our_names`. Raises ValueError with the reason if text would get other ids, or
    if the tokenizer is not byte-level. The caller has to check that no character is lost.
    """
    config = json.loads(path.read_text(encoding="utf-8"))
    _require(config.get("normalizer") in (None, {"type": "Sequence", "normalizers": []}),
             "its normalizer changes the text")
    pattern = _split_pattern(config.get("pre_tokenizer"))
    model = config["model"]
    _require(model.get("type", "BPE") == "BPE", f"it is a {model.get('type')}, not a BPE")
    for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        _require(not model.get(name), f"its model has a {name}")
    special_tokens = _special_tokens(config.get("added_tokens") or [])
    ranks = _ranks(model["vocab"], set(special_tokens.values()))
    merges = []
    for pair in model["merges"]:  # older versions write "left right", newer ones ["left", "right"]
        merges.append(pair.split(" ") if isinstance(pair, str) else pair)
    _check_merges(ranks, merges)
    return ranks, pattern, _with_our_names(special_tokens, our_names)


def _require(condition, complaint):
    if not condition:
        raise ValueError(complaint)


def _split_pattern(pre_tokenizer):
    """Returns the regular expression that splits text."""
    _require(pre_tokenizer, "it has no pre_tokenizer, so it is not byte-level")
    steps = pre_tokenizer["pretokenizers"] if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]
    kinds = [step["type"] for step in steps]
    _require(kinds in (["ByteLevel"], ["Split", "ByteLevel"]),
             f"its pre_tokenizer is {' and '.join(kinds)}, not ByteLevel or one Split and ByteLevel")
    _require(steps[-1].get("add_prefix_space") is False, "its pre_tokenizer adds a space (add_prefix_space)")
    if kinds == ["ByteLevel"]:
        _require(steps[0].get("use_regex", True), "its pre_tokenizer does not split text")
        return GPT2_PATTERN
    split, byte_level = steps
    _require(byte_level.get("use_regex") is False, "its pre_tokenizer splits text twice (use_regex)")
    _require((split.get("behavior"), bool(split.get("invert"))) in (("Isolated", False), ("Removed", True)),
             f"its Split has the behavior {split.get('behavior')}, not Isolated")
    pattern = split["pattern"].get("Regex")
    _require(pattern is not None and ALIKE.fullmatch(pattern),
             f"its split pattern may mean something else to tiktoken: {pattern or split['pattern']}")
    return pattern


def _special_tokens(added_tokens):
    """Returns {name: id} of the added tokens. Text never becomes one of them."""
    for token in added_tokens:
        _require(token.get("special") or _CONTROL.fullmatch(token["content"]),
                 f"it has a token that is cut out of the text before the rest: {token['content']!r}")
    return {token["content"]: token["id"] for token in added_tokens}


def _with_our_names(special_tokens, our_names):
    names = {name: name for name in special_tokens}
    for ours in our_names:
        if ours in names:
            continue
        for name in _OTHER_NAMES.get(ours, (f"<{ours[2:-2]}>",)):
            if name in names:
                names[name] = ours
                break
    _require("<|bos|>" in names.values(), "it has no token for the beginning of a document")
    return {names[name]: number for name, number in special_tokens.items()}


def _ranks(vocabulary, special_ids):
    """Returns {bytes: id} of the tokens that are not special."""
    byte_of = byte_of_character()
    ranks = {}
    for token, number in vocabulary.items():
        if number not in special_ids:
            _require(token and all(character in byte_of for character in token),
                     f"its token {token!r} is not of bytes, so it is not byte-level")
            _require(len(token) <= LONGEST, f"its token {token[:20]!r}… has more than {LONGEST} bytes")
            ranks[_bytes_of(token, byte_of)] = number
    return ranks


def _bytes_of(token, byte_of):
    return bytes(map(byte_of.__getitem__, token))


def _check_merges(ranks, merges):
    """Raises ValueError unless merging any pair that makes a token, lowest id first, is the same as these `merges`."""
    # It is if the ids of the results never fall, no token is made of later ones, and the pair of which tiktoken makes
    # each token is among the merges. When tiktoken makes a token, all pairs of lower rank are merged, so it meets only
    # that pair.
    byte_of = byte_of_character()
    pairs = {}  # token: the pairs of which it is made
    last = -1
    for left, right in merges:
        pair = _bytes_of(left, byte_of), _bytes_of(right, byte_of)
        token = b"".join(pair)
        rank = ranks.get(token, -1)
        _require(rank >= last, f"its merges are not in the order of ids, at {token!r}")
        _require(all(len(part) == 1 or ranks.get(part, rank) < rank for part in pair),
                 f"its token {token!r} is made of later ones")
        pairs.setdefault(token, []).append(pair)
        last = rank
    for token, rank in ranks.items():
        if len(token) > 1:
            _require(last_pair(token, rank, ranks) in pairs.get(token, ()), f"no merge makes its token {token!r}")


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
