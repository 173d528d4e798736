"""Compares a tokenizer with OpenAI's cl100k_base and o200k_base: bytes per token, speed, and exact round trips.

    python3 -m scripts.prepare_data --eval_only --debian_source="$(paste -sd, tokenizer/heldout.txt)" --out_dir=heldout
    python3 -m scripts.tok_eval --data_dir=heldout/val

No training corpus has packages whose names begin with o or z. tiktoken downloads OpenAI's vocabularies, or reads them
from the folder $TIKTOKEN_CACHE_DIR. The exit status is 1 if a text does not come back exactly.
"""
import functools
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import tiktoken

from nanochat.common import flag, read_flags, run_script
from nanochat.data.projects import require_files
from nanochat.data.shards import TextFlags, open_text, read_columns
from nanochat.data.tokenizer import TokenizerFlags, encode_text, load_tokenizer

OPENAI = ("cl100k_base", "o200k_base")
FETCH_S = 120  # tiktoken itself has no limit
KINDS = ("C++ sources", "C++ headers", "C", "comments", "strings", "all")


@dataclass(frozen=True)
class Flags(TextFlags, TokenizerFlags):
    max_bytes_per_source: int = flag(1_000_000, "bytes of text of one source, at most", at_least=1)


# Texts


def first_documents(shards, max_bytes_per_source):
    """Returns [(path, text)] of the first documents of every source."""
    documents = []
    nbytes = Counter()
    for shard in shards:
        for text, path, source in read_columns(shard, "path", "source"):
            if nbytes[source] < max_bytes_per_source:
                nbytes[source] += len(text)
                documents.append((path, text.decode("utf-8", "replace")))
    return documents


COMMENT = r"//[^\n]*|/\*.*?\*/"
STRING = r'"(?:[^"\\\n]|\\.)*"'
CHARACTER = r"'(?:[^'\\\n]|\\.)+'"  # the character '"' does not begin a string
LEXEME = re.compile(rf"(?P<comments>{COMMENT})|(?P<strings>{STRING})|{CHARACTER}", re.DOTALL)


def by_kind(documents):
    """Returns {kind: texts}: files by the suffix of their names, and the comments and string literals in all files."""
    kinds = {kind: [] for kind in KINDS}
    for path, text in documents:
        suffix = Path(path).suffix.lower()
        kind = "C++ sources"
        if suffix.startswith((".h", ".i", ".t")):
            kind = "C++ headers"
        elif suffix == ".c":
            kind = "C"
        kinds[kind].append(text)
        kinds["all"].append(text)
        for match in LEXEME.finditer(text):
            if match.lastgroup:
                kinds[match.lastgroup].append(match[0])
    # Comments and strings are joined, because a token may continue after the end of one.
    for kind in ("comments", "strings"):
        kinds[kind] = ["\n".join(kinds[kind])]
    return kinds


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
            # This thread's CPU time, because other work on the machine changes it less than the clock's.
            started = time.thread_time()
            for text in texts:
                self.encode(text)
            seconds.append(time.thread_time() - started)
        return count_bytes(texts) / min(seconds)

    def is_lossless(self, texts):
        return all(self.decode_bytes(self.encode(text).tolist()) == text.encode() for text in texts)


def count_bytes(texts):
    return sum(len(text.encode()) for text in texts)


def find_entrants(tokenizer_dir):
    """Returns Entrants for OpenAI's encodings, if tiktoken can fetch them, and for our tokenizer, which is the last."""
    tokenizer = load_tokenizer(tokenizer_dir)
    print(f"ours: {tokenizer.n_vocab} tokens, sha256 {tokenizer.sha256}", flush=True)
    print(f"fetching OpenAI's vocabularies, for up to {FETCH_S} s", flush=True)
    entrants = []
    problems = [f"it has not ended after {FETCH_S} s"]

    def fetch():
        try:
            for name in OPENAI:
                encoding = tiktoken.get_encoding(name)
                entrants.append(Entrant(name, functools.partial(encode_text, encoding), encoding.decode_bytes))
        except Exception as error:
            problems.append(" ".join(str(error).split())[:200])

    thread = threading.Thread(target=fetch, name="fetch", daemon=True)  # abandoned if it does not end
    thread.start()
    thread.join(FETCH_S)
    fetched = entrants[:]  # the thread may go on
    if len(fetched) < len(OPENAI):
        print(f"without {' and '.join(OPENAI[len(fetched):])}, which tiktoken cannot fetch ({problems[-1]}): connect "
              "to the internet, or copy its cache to $TIKTOKEN_CACHE_DIR", flush=True)
    return [*fetched, Entrant("ours", tokenizer.encode_to_numpy, tokenizer.decode_bytes)]


def main(argv=None):
    (flags,) = read_flags(argv, __doc__, {Flags: "flags"})
    shards = open_text(flags, "val")
    require_files(shards, "comparing tokenizers")
    entrants = find_entrants(flags.tokenizer_dir)
    others = entrants[:-1]
    documents = first_documents(shards, flags.max_bytes_per_source)
    kinds = by_kind(documents)

    titles = ["bytes per token", "MB"]
    titles += [entrant.name for entrant in entrants]
    titles += [f"more than {other.name}" for other in others]
    print_row(titles)
    print_row(["---"] * len(titles))
    for kind in KINDS:
        texts = kinds[kind]
        if any(texts):
            row = [kind, f"{count_bytes(texts) / 1e6:.1f}"]
            values = [entrant.bytes_per_token(texts) for entrant in entrants]
            row += map("{:.3f}".format, values)
            row += [f"{values[-1] / value - 1:+.1%}" for value in values[:-1]]
            print_row(row)
    texts = kinds["all"]
    speeds = ["MB/s on one core", ""]
    for entrant in entrants:
        speeds.append(f"{entrant.bytes_per_second(texts) / 1e6:.1f}")
    blank = [""] * len(others)
    print_row(speeds + blank)
    answers = ["every text comes back", ""]
    for entrant in entrants:
        answers.append("yes" if entrant.is_lossless(texts) else "no")
    print_row(answers + blank)
    return int(answers[-1] == "no")


def print_row(cells):
    print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    run_script(main)
