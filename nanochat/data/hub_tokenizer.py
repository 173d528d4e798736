"""A tokenizer of Hugging Face's library `tokenizers`, from its tokenizer.json: that of public weights.

The library encodes. It is told to do three things differently, so that text comes back from its tokens and pieces of a
text can be joined:

- Text never becomes a control token, such as <|endoftext|>: only this program puts one between texts.
- No space is put before a text, as Llama 2's tokenizer does.
- Bytes that are not UTF-8 get the tokens of their bytes.

docs/data.md has the table of what begins and ends documents and gaps.
"""
import hashlib
import json
import os
import re
import unicodedata
import zipfile
import zlib
from collections import Counter

import numpy as np
import tokenizers

from nanochat.common import SOURCE, BadInput
from nanochat.data.tokenizer_files import SPECIAL_TOKENS, hash_of

FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")  # only the first must be there
ID_BITS = 20  # of a token in the rows of an evaluation; see HubTokenizer.with_lost_bytes
MOST_IDS = (1 << ID_BITS) - 1  # real vocabularies have up to 2^18
SPACE = "\u2581"  # how sentencepiece writes a space
BYTE = re.compile("<0x([0-9A-F]{2})>")  # how it writes a byte
CONTROL = re.compile(r"<[^<>\s]+>|\[[A-Z_]+\]")  # not all control tokens are marked as special: Qwen's for gaps are not
# Bytes that may lack a token, because no text of today has them: SmolLM2 lacks 21 of these.
RARE = {*range(0x20), 0x7F, 0xC0, 0xC1, *range(0xF1, 0x100)} - set(b"\t\n\r")

# What begins a document, in training and in a prompt, is the first of these: what separates the documents of Qwen and
# SmolLM2, although the bos_token of their tokenizer_config.json is null or another; else that bos_token; else Llama's.
SEPARATORS = ("<|bos|>", "<|endoftext|>")
BEGINNINGS = ("<|begin_of_text|>", "<s>")
# {our name: other names}
OTHER_NAMES = {
    "<|fim_prefix|>": ("<fim_prefix>",), "<|fim_suffix|>": ("<fim_suffix>",), "<|fim_middle|>": ("<fim_middle>",),
    "<|file_sep|>": ("<file_sep>",), "<|pad|>": ("<pad>", "[PAD]", "<|padding|>")}
# SmolLM2 has no tokens for gaps: --fim_rate gives their meaning to these, which are for notebooks.
LENT = {"<|fim_prefix|>": "<jupyter_start>", "<|fim_suffix|>": "<jupyter_text>", "<|fim_middle|>": "<jupyter_code>"}


def read_source(checkpoint):
    """Returns {name: content} of the files in a checkpoint's SOURCE. Raises ValueError if it is damaged."""
    try:
        with zipfile.ZipFile(checkpoint / SOURCE) as file:
            return {name: file.read(name) for name in file.namelist()}
    except (OSError, zipfile.BadZipFile, NotImplementedError, RuntimeError, zlib.error) as error:
        raise ValueError(f"{SOURCE}: {error}") from None


def byte_of_character():
    """Returns {character: byte}: GPT-2 writes each byte as a visible character, from U+0100 on if necessary."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in visible]
    characters = [*map(chr, visible), *map(chr, range(256, 256 + len(others)))]
    return dict(zip(characters, visible + others, strict=True))


class HubTokenizer:
    """Encodes and decodes text as tokenizer.Tokenizer does. Threads may share it and encode concurrently: encoding
    releases the GIL."""
    suffix_first = False  # in a document with a gap
    _says_lost_bytes = False

    def __init__(self, files):
        """files: {name: content} of FILES, as bytes. Raises ValueError, KeyError, TypeError or AttributeError if they
        are damaged, or if text would not come back."""
        self._files = files
        self.json = files["tokenizer.json"].decode()
        config = json.loads(self.json)
        former = _former(config)
        added = {token["content"]: token for token in config.get("added_tokens") or ()}
        control = {name for name, token in added.items() if token.get("special") or CONTROL.fullmatch(name)}
        is_byte_level = "ByteLevel" in [step["type"] for step in _steps(config["pre_tokenizer"])]
        self._is_nfc = "NFC" in [step["type"] for step in _steps(config.get("normalizer"))]
        self._library = _library(config, control)
        vocabulary = self._library.get_vocab()  # {name: id}
        self.n_vocab = max(vocabulary.values()) + 1
        if self.n_vocab > MOST_IDS:
            raise ValueError(f"it has the id {self.n_vocab - 1}")
        self.holes = sorted({*range(self.n_vocab)} - {*vocabulary.values()})  # ids that no token has
        self._pieces = [b""] * self.n_vocab  # the bytes of each id
        self._tokens = {}
        byte_of = byte_of_character() if is_byte_level else None
        # Tokens of a byte come first: of two for the same text, the library encodes it with the other.
        for name, number in sorted(vocabulary.items(), key=lambda item: not BYTE.fullmatch(item[0])):
            self._pieces[number] = name.encode() if name in added else _piece(name, byte_of)
            if name not in control:
                self._tokens[self._pieces[number]] = number
        self._byte_ids = {byte: self._tokens[bytes([byte])] for byte in range(256) if bytes([byte]) in self._tokens}
        self._by_bytes = re.compile("([\udc80-\udcff]+)" if is_byte_level else f"([\udc80-\udcff{SPACE}]+)")
        ids = {name: vocabulary[name] for name in added if name in control}
        self._control = {*ids.values()}
        self._name_tokens(ids, self.settings("tokenizer_config.json"))
        self.sha256 = self._hash_of_former(former) or hashlib.sha256(files["tokenizer.json"]).hexdigest()
        ends = self.settings("generation_config.json").get("eos_token_id")  # an id, a list of them, or null
        ends = ends if isinstance(ends, list) else [ends]
        self.ends = {*self._control, *ends} - {None}  # any of these ends a completion
        self._require_texts_come_back(added)

    # Ranks on TPU chips get a copy, and the library's own copies would make control tokens of text again.
    def __reduce__(self):
        return HubTokenizer, (self._files,)

    def _name_tokens(self, ids, config):
        """Sets what begins a document and ends a middle, and gives our names to control tokens. ids: {name: id} of
        these; config: the tokenizer_config.json."""
        bos = config.get("bos_token")
        names = (*SEPARATORS, bos["content"] if isinstance(bos, dict) else bos, *BEGINNINGS)
        found = [name for name in names if name in ids]
        if not found:
            raise ValueError(f"it has no token that begins a document: none of {' '.join(filter(None, names))}")
        self.special_tokens = ids | {"<|bos|>": ids[found[0]]}
        self.bos_id = ids[found[0]]
        for ours, others in OTHER_NAMES.items():
            for name in others:
                if name in ids:
                    self.special_tokens.setdefault(ours, ids[name])
        self.lent = {}  # {our name: their name} of what is for gaps only by --fim_rate
        if "<|fim_middle|>" not in self.special_tokens and ids.keys() >= set(LENT.values()):
            self.lent = LENT
            self.suffix_first = True
            self.special_tokens |= {ours: ids[name] for ours, name in LENT.items()}
        # Qwen's middles, and StarCoder's, end as their documents do.
        is_ours = self.lent or found[0] == "<|bos|>"
        self.middle_end = self.special_tokens.get("<|file_sep|>") if is_ours else self.bos_id

    def _hash_of_former(self, former):
        """Returns the hash of a former Tokenizer, (hash, special tokens), or None if there was none that gives the same
        rows."""
        if not former:
            return None
        sha256, special = former
        ends_alike = "<|fim_middle|>" not in special or special.get("<|file_sep|>") == self.middle_end
        return sha256 if special["<|bos|>"] == self.bos_id and ends_alike else None

    def settings(self, name):
        """Returns the object in one of FILES, {} if it did not come."""
        found = json.loads(self._files.get(name, b"{}"))
        if not isinstance(found, dict):
            raise ValueError(f"{name} is no JSON object")
        return found

    @property
    def losses(self):
        """What does not come back from tokens exactly, as text for a person; "" if all does."""
        found = ["characters change to NFC"] if self._is_nfc else []
        if missing := 256 - len(self._byte_ids):
            found.append(f"{missing} bytes have no token and are left out")
        return " and ".join(found)

    def special(self, name):
        """Returns the id of a special token. Raises BadInput if there is none of this name."""
        if name not in self.special_tokens:
            raise BadInput(f"this tokenizer has no special token {name}: it has {' '.join(self.special_tokens)}")
        return self.special_tokens[name]

    def tokens(self):
        """Returns {bytes: id} of all tokens except special ones."""
        return self._tokens

    def encode(self, text):
        """Returns the ids of `text` (str or bytes) as a list. The name of a special token is ordinary text."""
        data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
        # Every second part is encoded by bytes: malformed ones, and a character that sentencepiece takes for a space.
        parts = self._by_bytes.split(data.decode("utf-8", "surrogateescape"))
        ids = []
        for number, part in enumerate(parts):
            if number % 2:
                found = map(self._byte_ids.get, part.encode("utf-8", "surrogateescape"))
                ids += [token for token in found if token is not None]
            else:
                ids += self._ids_of(part)
        return ids

    def _ids_of(self, text):
        try:  # in a batch: `encode` alone does not release the GIL
            return self._library.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except BaseException as error:  # a panic of Rust's is no Exception
            if isinstance(error, KeyboardInterrupt):
                raise
            if len(text) < 2:
                raise ValueError(f"text cannot be encoded ({error})") from None
        # The regular expression gave up, as in ten million spaces: each half is then a text of its own.
        half = text.rfind("\n", 1, len(text) // 2) + 1 or len(text) // 2
        return self._ids_of(text[:half]) + self._ids_of(text[half:])

    def with_lost_bytes(self):
        """Returns this tokenizer for the rows of an evaluation, which divides by the bytes of the file: each text's
        tokens hold, in the bits above ID_BITS, how many more bytes the text has than they stand for (see `losses`)."""
        found = object.__new__(HubTokenizer)
        found.__dict__ = self.__dict__ | {"_says_lost_bytes": True}
        return found

    def _encode_for_rows(self, text):
        ids = self.encode(text)
        if not self._says_lost_bytes or not ids:
            return ids
        data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
        lost = len(data) - len(self.decode_bytes(ids))  # below 0 where NFC makes the text longer
        # Evenly: whole texts then count exactly, and parts of one as a row's end cuts it nearly so.
        shares = np.diff(np.arange(len(ids) + 1) * lost // len(ids)).clip(-1024, 1023)
        return (np.array(ids) + (shares << ID_BITS)).astype(np.uint32).tolist()

    def encode_documents(self, texts):
        """Returns a list with a memoryview of uint32 for each text (str or bytes): BOS and the ids of the text."""
        return [np.array([self.bos_id, *self._encode_for_rows(text)], np.uint32).data for text in texts]

    def encode_infills(self, infills):
        """Returns what Tokenizer.encode_infills does."""
        before_prefix, before_suffix, before_middle = map(self.special, LENT)
        found = []
        for infill in infills:
            texts = [text.encode("utf-8", "surrogateescape") for text in infill]
            prefix, suffix, middle = map(self._encode_for_rows, texts)
            around = [before_prefix, *prefix, before_suffix, *suffix]
            second = 2 + len(prefix)
            if self.suffix_first:
                around = [before_suffix, *suffix, before_prefix, *prefix]
                second = 2 + len(suffix)
            ids = [self.bos_id, *around, before_middle, *middle, self.middle_end]
            places = slice(2, second), slice(second + 1, len(around) + 1)
            found.append((np.array(ids, np.uint32).data, *(reversed(places) if self.suffix_first else places)))
        return found

    def decode_bytes(self, ids):
        """Returns the bytes that were encoded. Special tokens become their names."""
        return b"".join(map(self._pieces.__getitem__, ids))

    def decode(self, ids):
        """Returns the text that was encoded. Bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def token_bytes(self):
        """Returns the number of bytes of each token, int32 (n_vocab,). Special tokens have 0."""
        import torch
        counts = [0 if number in self._control else len(piece) for number, piece in enumerate(self._pieces)]
        return torch.tensor(counts, dtype=torch.int32)

    def _require_texts_come_back(self, added):
        """Raises ValueError unless text comes back, apart from `losses`, and is no control token. added: the names of
        added tokens."""
        missing = bytes({*range(256)} - self._byte_ids.keys())
        if not RARE.issuperset(missing):
            raise ValueError(f"it has no token of the byte 0x{min({*missing} - RARE):02x}")
        for text in (sample_of_characters(), " ".join(added)):
            kept = tokenizers.normalizers.NFC().normalize_str(text) if self._is_nfc else text
            if self.decode_bytes(self.encode(text)) != kept.encode().translate(None, missing):
                raise ValueError("text would not come back from its tokens")
        for name in added:
            if self._control.intersection(self.encode(name)):
                raise ValueError(f"the text {name} would become a control token")


# Earlier versions read some of these files into a Tokenizer, whose hash their checkpoints have.
FORMER_NAMES = {"<|bos|>": ("<|begin_of_text|>", "<bos>", "<s>", "[BOS]", "<|startoftext|>", "<|endoftext|>"),
                "<|file_sep|>": ("<file_sep>", "<|file_separator|>"), "<|pad|>": ("<pad>", "[PAD]", "<|padding|>")}
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _former(config):
    """Returns (hash, {special token: id}) that earlier versions made of a tokenizer.json, or None if they refused it.
    """
    steps = _steps(config["pre_tokenizer"])
    kinds = [step["type"] for step in steps]
    if _steps(config.get("normalizer")) or kinds not in (["ByteLevel"], ["Split", "ByteLevel"]):
        return None
    pattern = GPT2_PATTERN if kinds == ["ByteLevel"] else steps[0]["pattern"].get("Regex")
    added = {token["content"]: token["id"] for token in config.get("added_tokens") or ()}
    names = {name: name for name in added}
    for ours in SPECIAL_TOKENS:
        others = [name for name in FORMER_NAMES.get(ours, (f"<{ours[2:-2]}>",)) if name in names]
        if ours not in names and others:
            names[others[0]] = ours
    byte_of = byte_of_character()
    ranks = {_piece(name, byte_of): number for name, number in config["model"]["vocab"].items()
             if number not in added.values()}
    if pattern is None or "<|bos|>" not in names.values() or not all(bytes([byte]) in ranks for byte in range(256)):
        return None
    special_tokens = {names[name]: number for name, number in added.items()}
    return hash_of(ranks, pattern, special_tokens), special_tokens


def _library(config, control):
    """Returns the tokenizers.Tokenizer of a tokenizer.json that does what this module's docstring says."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the loader has threads, and a fork is then safe
    for token in config.get("added_tokens") or ():
        token |= {"special": token["content"] in control, "lstrip": False, "rstrip": False}
    for step in (*_steps(config.get("normalizer")), *_steps(config["pre_tokenizer"])):
        if step["type"] == "Metaspace":
            step.pop("add_prefix_space", None)
            step["prepend_scheme"] = "never"
        if step["type"] == "ByteLevel":
            step["add_prefix_space"] = False
        if step["type"] == "Split" and step.get("behavior") == "Removed" and not step.get("invert"):
            raise ValueError(f"it removes {json.dumps(step['pattern'])[:100]} from text, which would not come back")
    config["normalizer"] = {"type": "Sequence", "normalizers": _kept_normalizers(config.get("normalizer"))}
    config["model"] |= {"dropout": None}  # the same ids each time
    try:
        library = tokenizers.Tokenizer.from_str(json.dumps(config | dict.fromkeys(("truncation", "padding"))))
    except BaseException as error:  # of no closer class; a panic of Rust's is no Exception
        if isinstance(error, KeyboardInterrupt):
            raise
        raise ValueError(str(error)) from None
    library.encode_special_tokens = True
    return library


def _steps(step):
    """Returns a list of the steps of a normalizer or pre_tokenizer, which may be nested."""
    if not step:
        return []
    if step["type"] != "Sequence":
        return [step]
    inner = step["normalizers"] if "normalizers" in step else step["pretokenizers"]
    return [found for each in inner for found in _steps(each)]


def _kept_normalizers(normalizer):
    found = []
    for step in _steps(normalizer):
        is_space = (step.get("pattern"), step.get("content")) == ({"String": " "}, SPACE)
        if step["type"] == "NFC" or step["type"] == "Replace" and is_space:
            found.append(step)
        elif step["type"] != "Prepend":
            raise ValueError(f"its normalizer {step['type']} changes the text")
    return found


def _piece(name, byte_of):
    """Returns the bytes of a token. byte_of: byte_of_character() if the vocabulary is byte-level, else None."""
    if byte_of:
        return bytes(map(byte_of.__getitem__, name)) if byte_of.keys() >= set(name) else name.encode()
    byte = BYTE.fullmatch(name)
    return bytes.fromhex(byte[1]) if byte else name.replace(SPACE, " ").encode()


def sample_of_characters():
    """Returns a text of all characters of alphabets, one in 97 of the others, and pairs of all kinds."""
    every = "".join(map(chr, [*range(0x3000), *range(0x3000, 0xD800, 97), *range(0xE000, 0x110000, 97)]))
    seen = Counter()
    kinds = []  # all of ASCII, and two characters of each other category
    for character in every:
        category = unicodedata.category(character)
        seen[category] += 1
        if character < "\x80" or seen[category] < 3:
            kinds.append(character)
    return every + "".join(first + second for first in kinds for second in kinds)
