"""Compares a tokenizer with OpenAI's cl100k_base and o200k_base: bytes per token, speed, and exact round trips.

    python3 -m scripts.prepare_data --eval_only --debian_source="$(paste -sd, tokenizer/heldout.txt)" --out_dir=heldout
    python3 -m scripts.tok_eval --data_dir=heldout/val

Packages whose names begin with o or z are in no training corpus. OpenAI's vocabularies are read from the npm package
tiktoken, which npm downloads. Without npm, run `npm pack tiktoken` on another machine, and give the path of the file
that it makes with --npm_package. The exit status is 1 if a text does not come back exactly.
"""
import functools
import hashlib
import json
import os
import re
import subprocess
import tarfile
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import tiktoken

from nanochat.common import BadInput, expand_path, flag, get_base_dir, read_flags, require_writable_dir, run_script
from nanochat.data.shards import TextFlags, open_text, read_columns, require_files
from nanochat.data.tokenizer import load_tokenizer

NPM_PACKAGE, NPM_TIMEOUT_S = "tiktoken@1.0.22", 120
# tiktoken's address of a vocabulary, and the SHA-256 that it expects (tiktoken_ext/openai_public.py)
OPENAI_URL = "https://openaipublic.blob.core.windows.net/encodings/{}.tiktoken"
OPENAI_SHA256 = {
    "cl100k_base": "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7",
    "o200k_base": "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d",
}
KINDS = ("C++ sources", "C++ headers", "C", "comments", "strings", "all")


@dataclass(frozen=True)
class Flags(TextFlags):
    tokenizer_dir: Path | None = flag(None, "directory of the tokenizer; default: the one in $NANOCHAT_BASE_DIR, else "
                                      "the shipped one", of=expand_path)
    npm_package: Path | None = flag(None, "file made by `npm pack tiktoken`; default: download it", of=expand_path)
    max_bytes_per_source: int = flag(1_000_000, "bytes of text of one source, at most", at_least=1)


# -----------------------------------------------------------------------------
# OpenAI's vocabularies


def fetch_npm_package(directory):
    """Returns the path of the npm package tiktoken in `directory`, downloaded if necessary; None if that fails."""
    path = directory / f"{NPM_PACKAGE.replace('@', '-')}.tgz"
    if path.exists():
        return path
    command = ["npm", "pack", NPM_PACKAGE, "--pack-destination", str(require_writable_dir(directory))]
    print(f"downloading OpenAI's vocabularies: {' '.join(command)}", flush=True)
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=NPM_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError) as error:
        path.unlink(missing_ok=True)
        reason = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[0]
        print(f"npm cannot download them ({reason}), so cl100k_base and o200k_base are left out: "
              "run `npm pack tiktoken` on another machine, and give the path of its file with --npm_package")
        return None
    return path


def openai_encoding(package, name, cache_dir):
    """Returns tiktoken's own Encoding `name`. The vocabulary of the npm package is put into its cache for this."""
    try:
        with tarfile.open(package) as archive:
            lines = json.load(archive.extractfile(f"package/encoders/{name}.json"))["bpe_ranks"].splitlines()
        ranked = []
        for line in lines:  # a line has "!", the rank of its first token, and its tokens in base64
            _, first, *tokens = line.split(" ")
            ranked += (f"{token} {int(first) + i}\n" for i, token in enumerate(tokens))
    except (OSError, EOFError, zlib.error, tarfile.TarError, KeyError, ValueError, AttributeError, TypeError) as error:
        raise BadInput(f"{package} is not the npm package tiktoken ({error}): make it with npm pack tiktoken") from None
    vocabulary = "".join(ranked).encode()
    if hashlib.sha256(vocabulary).hexdigest() != OPENAI_SHA256[name]:
        raise BadInput(f"{package}: its {name} is not the vocabulary that OpenAI publishes: use {NPM_PACKAGE}")
    # tiktoken looks in this folder for a file that is named by the SHA-1 of the address, before it goes to the network.
    (cache_dir / hashlib.sha1(OPENAI_URL.format(name).encode()).hexdigest()).write_bytes(vocabulary)
    os.environ["TIKTOKEN_CACHE_DIR"] = str(cache_dir)
    return tiktoken.get_encoding(name)


# -----------------------------------------------------------------------------
# Texts


def first_documents(shards, max_bytes_per_source):
    """Returns [(path, text)] of the first documents of every source."""
    documents, nbytes = [], Counter()
    for shard in shards:
        for text, path, source in read_columns(shard, "path", "source"):
            if nbytes[source] < max_bytes_per_source:
                nbytes[source] += len(text)
                documents.append((path, text.decode("utf-8", "replace")))
    return documents


COMMENT = r"//[^\n]*|/\*.*?\*/"
STRING = r'"(?:[^"\\\n]|\\.)*"'
CHARACTER = r"'(?:[^'\\\n]|\\.)+'"  # the character '"' does not begin a string
LEXEME = re.compile(rf"(?P<comment>{COMMENT})|(?P<string>{STRING})|{CHARACTER}", re.DOTALL)


def by_kind(documents):
    """Returns {kind: texts}: files by the suffix of their names, and the comments and string literals in all files."""
    kinds = {"all": [text for _, text in documents]}
    for path, text in documents:
        suffix = Path(path).suffix.lower()
        kind = "C++ headers" if suffix.startswith((".h", ".i", ".t")) else "C" if suffix == ".c" else "C++ sources"
        kinds.setdefault(kind, []).append(text)
        for match in LEXEME.finditer(text):
            if match.lastgroup:
                kinds.setdefault(match.lastgroup + "s", []).append(match[0])
    # Comments and strings are joined, because a token may continue after the end of one.
    return {kind: ["\n".join(texts)] if kind in ("comments", "strings") else texts for kind, texts in kinds.items()}


# -----------------------------------------------------------------------------
# The table


@dataclass(frozen=True)
class Entrant:
    """A tokenizer in the comparison."""
    name: str
    encode: Callable  # from str to an array of ids
    decode_bytes: Callable  # from a list of ids to bytes

    def bytes_per_token(self, texts):
        return count_bytes(texts) / sum(len(self.encode(text)) for text in texts)

    def bytes_per_second(self, texts, repeats=3):
        """Returns the speed of encoding on one core, the best of `repeats` measurements."""
        seconds = []
        for _ in range(repeats):
            # The CPU time of this thread, which other work on the machine changes less than the clock's.
            started = time.thread_time()
            for text in texts:
                self.encode(text)
            seconds.append(time.thread_time() - started)
        return count_bytes(texts) / min(seconds)

    def is_lossless(self, texts):
        return all(self.decode_bytes(self.encode(text).tolist()) == text.encode() for text in texts)


def count_bytes(texts):
    return sum(len(text.encode()) for text in texts)


def find_entrants(tokenizer_dir, package):
    """Returns Entrants for OpenAI's encodings, if they are available, and for our tokenizer, which is the last."""
    tokenizer = load_tokenizer(tokenizer_dir)
    print(f"ours: {tokenizer.n_vocab} tokens, sha256 {tokenizer.sha256}", flush=True)
    package = package or fetch_npm_package(get_base_dir() / "downloads")
    entrants = []
    with tempfile.TemporaryDirectory() as cache_dir:
        for name in OPENAI_SHA256 if package else ():
            encoding = openai_encoding(package, name, Path(cache_dir))
            # A name such as <|endoftext|> in a source file is text.
            encode = functools.partial(encoding.encode_to_numpy, disallowed_special=())
            entrants.append(Entrant(name, encode, encoding.decode_bytes))
    return [*entrants, Entrant("ours", tokenizer.encode_to_numpy, tokenizer.decode_bytes)]


def main(argv=None):
    (flags,) = read_flags(argv, __doc__, {Flags: "flags"})
    shards = open_text(flags, "val")
    require_files(shards, "comparing tokenizers")
    *others, ours = entrants = find_entrants(flags.tokenizer_dir, flags.npm_package)
    documents = first_documents(shards, flags.max_bytes_per_source)
    kinds = by_kind(documents)

    def print_cells(*cells):
        print(f"| {' | '.join(cells)} |", flush=True)

    gains = [f"more than {other.name}" for other in others]
    print_cells("bytes per token", "MB", *(entrant.name for entrant in entrants), *gains)
    print_cells(*["---"] * (2 + len(entrants) + len(others)))
    for kind in KINDS:
        if texts := kinds.get(kind):
            values = [entrant.bytes_per_token(texts) for entrant in entrants]
            print_cells(kind, f"{count_bytes(texts) / 1e6:.1f}", *(f"{value:.3f}" for value in values),
                        *(f"{values[-1] / value - 1:+.1%}" for value in values[:-1]))
    texts, blank = kinds["all"], [""] * len(others)
    speeds = [f"{entrant.bytes_per_second(texts) / 1e6:.1f}" for entrant in entrants]
    print_cells("MB/s on one core", "", *speeds, *blank)
    lossless = ["yes" if entrant.is_lossless(texts) else "no" for entrant in entrants]
    print_cells("every text comes back", "", *lossless, *blank)
    return 0 if ours.is_lossless(texts) else 1


if __name__ == "__main__":
    run_script(main)
