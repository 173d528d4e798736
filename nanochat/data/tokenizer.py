"""The tokenizer: a lossless byte-level BPE in tiktoken's format, with special tokens.

A tokenizer directory holds `vocabulary.tiktoken` (one line per token: base64 and rank), `tokenizer.json` (split pattern
and special tokens) and `token_bytes.pt` (number of bytes of every token, for other programs), as scripts/tok_train.py
writes them; or the `tokenizer.json` of Hugging Face's library (see hub_tokenizer.py).
"""
import base64
import binascii
import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tiktoken

from nanochat.common import SOURCE, BadInput, expand_path, flag, get_base_dir
from nanochat.data.hub_tokenizer import FILES, HubTokenizer, read_source
from nanochat.data.tokenizer_files import config_json, hash_of, vocabulary_lines

SHIPPED_DIR = Path(__file__).resolve().parents[2] / "tokenizer"  # in a checkout
INSTALLED_DIR = Path(__file__).resolve().parent / "shipped_tokenizer"  # the same after pip install, see pyproject.toml
VOCABULARY_FILE = "vocabulary.tiktoken"
CONFIG_FILE = "tokenizer.json"
TOKEN_BYTES_FILE = "token_bytes.pt"

FIM_TOKENS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>")  # in the order of a document
_INFILL_TOKENS = {"<|bos|>", *FIM_TOKENS}
_VALID_THEN_MALFORMED = re.compile("([^\udc80-\udcff]*)([\udc80-\udcff]*)")  # malformed as "surrogateescape" marks it


@dataclass(frozen=True)
class TokenizerFlags:
    """The flag of scripts that read a tokenizer."""
    tokenizer_dir: Path | None = flag(None, "folder of the tokenizer; default: that of the imported weights in the "
                                      "checkpoint, else $NANOCHAT_BASE_DIR/tokenizer if it exists, else the shipped "
                                      "one", of=expand_path)


class Infill(NamedTuple):
    """A document for fill in the middle, see fim.py. "surrogateescape" marks malformed bytes of its texts."""
    prefix: str
    suffix: str
    middle: str


def encode_text(encoding, text):
    """Returns the ids of `text` (str) in a tiktoken.Encoding as a uint32 array. The name of a special token is ordinary
    text. Raises UnicodeEncodeError for lone surrogates."""
    try:
        return encoding.encode_to_numpy(text, disallowed_special=())
    except UnicodeEncodeError:
        raise
    except ValueError:  # the regular expression has no room for, say, a million spaces in a row
        if len(text) < 2:
            raise
        half = text.rfind("\n", 1, len(text) // 2) + 1 or len(text) // 2
        return np.concatenate([encode_text(encoding, text[:half]), encode_text(encoding, text[half:])])


def joined(arrays):
    """Returns the tokens of uint32 arrays as one memoryview, which is faster than np.concatenate."""
    return memoryview(b"".join(arrays)).cast("I")


class Tokenizer:
    """Encodes and decodes text. Threads may share it and encode concurrently: encoding releases the GIL."""
    holes = ()  # ids that no token has
    losses = ""  # text that does not come back
    lent = {}  # see HubTokenizer
    suffix_first = False  # in a document with a gap

    def __init__(self, mergeable_ranks, pattern, special_tokens):
        """Makes a tokenizer from {bytes: rank}, a regular expression that splits text, and {name: id}. Raises
        ValueError if it would not be lossless or has no <|bos|>."""
        n_vocab = len(mergeable_ranks) + len(special_tokens)
        if not all(bytes([byte]) in mergeable_ranks for byte in range(256)):
            raise ValueError("some of the 256 single bytes are not tokens")
        if sorted([*mergeable_ranks.values(), *special_tokens.values()]) != list(range(n_vocab)):
            raise ValueError("the ids of ranks and special tokens are not 0, 1, 2 …, each once")
        if "<|bos|>" not in special_tokens:
            raise ValueError("there is no <|bos|> among the special tokens")
        self._encoding = tiktoken.Encoding("nanochat", pat_str=pattern, mergeable_ranks=mergeable_ranks,
                                           special_tokens=special_tokens)
        self._ranks = mergeable_ranks
        self.special_tokens = special_tokens  # {name: id}
        self.pattern = pattern
        self._byte_ids = [mergeable_ranks[bytes([byte])] for byte in range(256)]
        self.n_vocab = n_vocab
        self.bos_id = special_tokens["<|bos|>"]
        self.middle_end = special_tokens.get("<|file_sep|>")
        self.ends = set(special_tokens.values())  # any of these ends a completion
        self._marks = {name: np.array([id_], np.uint32) for name, id_ in special_tokens.items()}
        lowest_mark = min(special_tokens[name] for name in _INFILL_TOKENS if name in special_tokens)
        self._lowest_mark = np.uint32(lowest_mark)  # NumPy compares with this faster than with an int

    def special(self, name):
        """Returns the id of a special token. Raises BadInput if there is none of this name."""
        if name not in self.special_tokens:
            raise BadInput(f"this tokenizer has no special token {name}: it has {' '.join(self.special_tokens)}")
        return self.special_tokens[name]

    def tokens(self):
        """Returns {bytes: id} of all tokens except special ones."""
        return self._ranks

    def encode(self, text):
        """Returns the ids of `text` (str or bytes) as a list. The name of a special token is ordinary text."""
        return self.encode_to_numpy(text).tolist()

    def encode_to_numpy(self, text):
        """Returns the ids of `text` (str or bytes) as a uint32 array, which is faster than a list."""
        try:
            return encode_text(self._encoding, str(text, "utf-8") if isinstance(text, bytes) else text)
        except UnicodeEncodeError:  # a str with lone surrogates
            return self._encode_malformed(text.encode("utf-8", "surrogatepass"))
        except UnicodeDecodeError:
            return self._encode_malformed(text)

    def encode_documents(self, texts):
        """Returns a list with a memoryview of uint32 for each text (str or bytes): BOS and the ids of the text."""
        bos = self._marks["<|bos|>"]
        return [joined((bos, self.encode_to_numpy(text))) for text in texts]

    # One call for all texts, not three for each document: after each call a thread waits for those that run Python.
    def encode_infills(self, infills):
        """Returns (tokens, prefix, suffix) of each Infill: BOS, and FIM_TOKENS before, between and after its three
        texts, as a memoryview of uint32; and the slices of the tokens of two texts."""
        texts = []
        for prefix, suffix, middle in infills:
            texts += ("<|bos|>", "<|fim_prefix|>", prefix, "<|fim_suffix|>", suffix, "<|fim_middle|>", middle,
                      "<|file_sep|>")
        try:
            ids = self._encoding.encode_to_numpy("".join(texts), allowed_special=_INFILL_TOKENS, disallowed_special=())
            marks = (ids >= self._lowest_mark).nonzero()[0].tolist()
        except ValueError:  # as in encode_text and encode_to_numpy
            marks = []
        if len(marks) != 5 * len(infills):  # or a text has the name of a special token
            return [self._encode_infill(infill) for infill in infills]
        data = ids.data
        found = []
        for first in range(0, len(marks), 5):
            begin, _, suffix, middle, end = marks[first:first + 5]
            found.append((data[begin:end + 1], slice(2, suffix - begin), slice(suffix - begin + 1, middle - begin)))
        return found

    def _encode_infill(self, infill):
        prefix, suffix, middle = (self.encode_to_numpy(text.encode("utf-8", "surrogateescape")) for text in infill)
        marks = [self._marks[name] for name in FIM_TOKENS]
        tokens = joined((self._marks["<|bos|>"], marks[0], prefix, marks[1], suffix, marks[2], middle, marks[3]))
        second = 2 + len(prefix)
        return tokens, slice(2, second), slice(second + 1, second + 1 + len(suffix))

    def _encode_malformed(self, data):
        """Returns the ids of bytes that are not UTF-8: one per malformed byte, and the text between as usual."""
        ids = []
        # "surrogateescape" makes U+DC80 to U+DCFF of the malformed bytes 0x80 to 0xFF.
        for match in _VALID_THEN_MALFORMED.finditer(data.decode("utf-8", "surrogateescape")):
            ids += encode_text(self._encoding, match[1]).tolist()
            ids += (self._byte_ids[ord(escaped) - 0xDC00] for escaped in match[2])
        return np.array(ids, dtype=np.uint32)

    def decode_bytes(self, ids):
        """Returns the bytes that were encoded. Special tokens become their names."""
        return self._encoding.decode_bytes(ids)

    def decode(self, ids):
        """Returns the text that was encoded. Bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def token_bytes(self):
        """Returns the number of bytes of each token, int32 (n_vocab,). Special tokens have 0."""
        import torch
        counts = torch.zeros(self.n_vocab, dtype=torch.int32)
        for token, rank in self._ranks.items():
            counts[rank] = len(token)
        return counts

    @functools.cached_property
    def sha256(self):
        """Hex SHA-256 of the vocabulary, the pattern and the special tokens."""
        return hash_of(self._ranks, self.pattern, self.special_tokens)

    def save(self, directory):
        import torch
        directory = Path(directory)
        (directory / VOCABULARY_FILE).write_bytes(vocabulary_lines(self._ranks))
        (directory / CONFIG_FILE).write_text(config_json(self.pattern, self.special_tokens), encoding="utf-8")
        torch.save(self.token_bytes(), directory / TOKEN_BYTES_FILE)


# Loading


def load_tokenizer(tokenizer_dir=None, checkpoint=None):
    """Returns the tokenizer in `tokenizer_dir`; by default the one that came with the imported weights from which the
    `checkpoint` (a path) was made, else the one in the base directory, else the shipped one.

    `gcloud storage cp -r` nests the directory that it copies, so each of these may have it in `tokenizer_65k/` instead.
    Raises BadInput if there is no tokenizer or it is damaged.
    """
    if checkpoint and not tokenizer_dir and (Path(checkpoint) / SOURCE).exists():
        return _load(Path(checkpoint) / SOURCE, _read_source)
    parents = [get_base_dir() / "tokenizer", SHIPPED_DIR, INSTALLED_DIR]
    if tokenizer_dir:
        parents = [Path(tokenizer_dir)]
    places = []
    for parent in parents:
        places += parent, parent / "tokenizer_65k"
    for directory in places:
        try:
            there = {name for name in (VOCABULARY_FILE, CONFIG_FILE) if (directory / name).exists()}
        except OSError as error:
            raise BadInput(f"{directory} cannot be read ({error.strerror}): give yourself the right to read it, or "
                           "name another with --tokenizer_dir") from None
        if VOCABULARY_FILE not in there and _is_huggingface(directory / CONFIG_FILE):
            return _load(directory / CONFIG_FILE, _read_huggingface)
        if there:
            return _load(directory, _read_files)
        if (directory / "tokenizer.pkl").exists():  # of karpathy/nanochat; earlier versions read it
            raise BadInput(f"{directory} has only a tokenizer.pkl, which is read no more: make a tokenizer with "
                           "scripts.tok_train, or name another with --tokenizer_dir")
    raise BadInput(f"no tokenizer in {' or '.join(map(str, parents))}: it needs {VOCABULARY_FILE} and {CONFIG_FILE}, "
                   f"or Hugging Face's {CONFIG_FILE}")


def check_tokenizer(tokenizer, vocab_size, sha256):
    """Raises BadInput if the tokenizer has more than `vocab_size` tokens, or another hash than `sha256`."""
    if tokenizer.n_vocab > vocab_size:
        raise BadInput(f"the tokenizer has {tokenizer.n_vocab} tokens but the model's vocabulary is {vocab_size}: "
                       "name the tokenizer of the model's training with --tokenizer_dir")
    if tokenizer.sha256 != sha256:
        raise BadInput(f"the tokenizer (sha256 {tokenizer.sha256[:12]}…) is not the checkpoint's ({sha256[:12]}…): "
                       "name the tokenizer of the model's training with --tokenizer_dir")


def _load(path, read):
    try:
        return read(path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = " ".join(f"{type(error).__name__} {error}".split()).removeprefix("ValueError ")
        raise BadInput(f"the tokenizer in {path} cannot be loaded ({reason}): copy it again, or name another with "
                       "--tokenizer_dir") from None


def _read_huggingface(path):
    return HubTokenizer({name: path.with_name(name).read_bytes() for name in FILES if path.with_name(name).exists()})


def _read_source(path):
    found = read_source(path.parent)
    return HubTokenizer({name: found[name] for name in FILES if name in found})


def _is_huggingface(path):
    """Returns whether a tokenizer.json is Hugging Face's and not this module's."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(config, dict) and "model" in config and "pattern" not in config


def _read_files(directory):
    if _is_huggingface(directory / CONFIG_FILE):
        raise ValueError(f"{VOCABULARY_FILE} is there, but its {CONFIG_FILE} was overwritten by one of Hugging Face")
    ranks = {}
    for number, line in enumerate((directory / VOCABULARY_FILE).read_bytes().splitlines(), start=1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise ValueError(f"{VOCABULARY_FILE} line {number} is not a base64 token and a rank") from None
    config = json.loads((directory / CONFIG_FILE).read_text(encoding="utf-8"))
    return Tokenizer(ranks, config["pattern"], config["special_tokens"])
