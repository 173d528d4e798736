"""Compares a tokenizer with OpenAI's cl100k_base and o200k_base: bytes per token, speed, and exact round trips.

    python3 -m scripts.tok_eval --data_dir=heldout/val    # tokenizer/README.md says how to make it

tiktoken downloads OpenAI's vocabularies, or reads them from the folder $TIKTOKEN_CACHE_DIR. The exit status is 1 if a
text does not come back exactly.
"""
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass

import tiktoken

from nanochat.common import flag, read_flags, run_script
from nanochat.data.shards import TextFlags, open_text, read_columns
from nanochat.data.tokenizer import TokenizerFlags, encode_text, load_tokenizer

OPENAI = ("cl100k_base", "o200k_base")
FETCH_S = 120  # tiktoken itself has no limit


@dataclass(frozen=True)
class Flags(TextFlags, TokenizerFlags):
    max_bytes_per_source: int = flag(1_000_000, "bytes of text of one source, at most", at_least=1)


def first_texts(shards, max_bytes_per_source):
    """Returns the first documents of every source."""
    texts = []
    nbytes = Counter()
    for shard in shards:
        for text, source in read_columns(shard, "source"):
            if nbytes[source] < max_bytes_per_source:
                nbytes[source] += len(text)
                texts.append(text.decode("utf-8", "replace"))
    return texts


def fetch_openai():
    """Returns {name: tiktoken's encoding} of those that tiktoken can fetch."""
    print(f"fetching OpenAI's vocabularies, for up to {FETCH_S} s", flush=True)
    found = {}

    def fetch():
        with suppress(Exception):
            for name in OPENAI:
                found[name] = tiktoken.get_encoding(name)

    thread = threading.Thread(target=fetch, name="fetch", daemon=True)  # abandoned if it does not end
    thread.start()
    thread.join(FETCH_S)
    if len(found) < len(OPENAI):
        print(f"without {' and '.join(OPENAI[len(found):])}, which tiktoken cannot fetch: connect to the internet, or "
              "copy its cache to $TIKTOKEN_CACHE_DIR", flush=True)
    return dict(found)  # the thread may go on


def measure(name, encode, decode_bytes, texts):
    """Prints a line of the table. Returns whether every text comes back exactly."""
    begin = time.thread_time()  # this thread's CPU time: other work on the machine changes it less than the clock's
    encoded = [encode(text) for text in texts]
    seconds = time.thread_time() - begin
    nbytes = sum(len(text.encode()) for text in texts)
    is_lossless = all(decode_bytes(ids) == text.encode() for ids, text in zip(encoded, texts, strict=True))
    print(f"| {name} | {nbytes / sum(map(len, encoded)):.3f} | {nbytes / 1e6 / seconds:.1f} | "
          f"{'yes' if is_lossless else 'no'} |", flush=True)
    return is_lossless


def main(argv=None):
    (flags,) = read_flags(argv, __doc__, {Flags: "flags"})
    shards = open_text(flags, "val")
    tokenizer = load_tokenizer(flags.tokenizer_dir)
    others = fetch_openai()
    texts = first_texts(shards, flags.max_bytes_per_source)
    print(f"ours: {tokenizer.n_vocab} tokens, sha256 {tokenizer.sha256}")
    print("| tokenizer | bytes per token | MB/s on one core | every text comes back |\n| --- | --- | --- | --- |")
    for name, encoding in others.items():
        measure(name, lambda text, of=encoding: encode_text(of, text).tolist(), encoding.decode_bytes, texts)
    return int(not measure("ours", tokenizer.encode, tokenizer.decode_bytes, texts))


if __name__ == "__main__":
    run_script(main, "encoding")
