"""Trains a tokenizer: a byte-level BPE on the C++ of a corpus, with a split pattern made for C++.

    python3 -m scripts.tok_train --data_dir=corpus/base_data_v3 --out_dir=my_tokenizer

The shards may also have a column source. The same data and flags give the same files. llama.cpp cannot split text as
the result does; this makes one of the same tokens that it can use:

    python3 -m scripts.tok_train --tokens_of=tokenizer --llama_cpp --out_dir=my_tokenizer
"""
import shutil
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import rustbpe
from tqdm import tqdm

from nanochat.checkpoint.on_disk import SUMS, sums_text
from nanochat.common import BadInput, expand_path, flag, get_base_dir, read_flags, require_writable_dir, run_script
from nanochat.data.shards import TextFlags, open_text, read_columns
from nanochat.data.tokenizer import Tokenizer, load_tokenizer
from nanochat.data.tokenizer_files import LLAMA_CPP_PATTERN, SPECIAL_TOKENS

# The split pattern: it cuts text into pieces, and no token crosses the border between two. There is no look-around, so
# it runs in linear time, and no piece is long, so BPE on it is quick. dev/log says what each choice gains.
PUNCTUATION = r"[!-/:-@\[-`{-~\x00-\x08\x0B\x0C\x0E-\x1F\x7F]"  # ASCII except letters, digits and white space
LOWER = r"[^\x00-`{-\x7F]"  # a to z, and every character that is not ASCII
PATTERN = "|".join((
    # One part of a name in snake_case or CamelCase, or one or two digits, with a space and punctuation before it:
    # " int32", "::size", "->get", "_cast", "(x", " !Is", ".5", " 0xFF"
    rf" ?{PUNCTUATION}{{0,2}}"
    rf"(?:(?:[A-Z]{{0,32}}{LOWER}{{1,32}}|[A-Z]{{1,32}})[0-9]{{0,2}}|0[xX][0-9a-fA-F]{{1,2}}|[0-9]{{1,2}})",
    # A sequence of operators and brackets, with newlines and the indentation after them: " = {", ");\n    }\n"
    rf"(?: ?{PUNCTUATION}|\r?\n[ \t]{{0,32}}){{1,64}}",
    r"[ \t]{1,64}",
    r"\r",
))


@dataclass(frozen=True)
class Flags(TextFlags):
    out_dir: Path | None = flag(None, "directory for the tokenizer; default: $NANOCHAT_BASE_DIR/tokenizer",
                                of=expand_path)
    vocab_size: int = flag(65536, "number of tokens, special tokens included", at_least=256 + len(SPECIAL_TOKENS),
                           at_most=2**24)
    max_bytes: int = flag(2_000_000_000, "bytes of text to train on, at most", at_least=1)
    max_bytes_per_source: int = flag(40_000_000, "bytes of text of one source, at most", at_least=1)
    llama_cpp: bool = flag(False, "the finished tokenizer splits text as llama.cpp can: 1.05 × as many tokens, and a "
                           "model of --arch=llama that is trained with it becomes a *.gguf")
    tokens_of: Path | None = flag(None, "take the tokens of the tokenizer in this folder, and train none",
                                  of=expand_path)


def choose_texts(shards, max_bytes, max_bytes_per_source, nbytes):
    """Yields the texts of the shards in their order, within the limits on bytes in total and per source. nbytes: a
    Counter, which gets the bytes of each source."""
    total = 0
    bar = tqdm(shards, desc="counting pieces", unit="shard", disable=None)  # None: only on a terminal
    for shard in bar:
        for text, source in read_columns(shard, "source"):
            # A text that exceeds the limit of its source is skipped, and the next one may fit; the total limit ends the
            # reading.
            if nbytes[source] + len(text) > max_bytes_per_source:
                continue
            if total + len(text) > max_bytes:
                return
            total += len(text)
            nbytes[source] += len(text)
            yield text.decode("utf-8", "replace")
        if bar.disable:
            print(f"counting pieces: {shard.file.name} read, {total / 1e6:.0f} MB so far", flush=True)


def train(flags, nbytes):
    """Returns {bytes: rank} of tokens that the text of the flags makes. nbytes: see choose_texts. Raises BadInput."""
    trainer = rustbpe.Tokenizer()
    n_merged = flags.vocab_size - len(SPECIAL_TOKENS)
    texts = choose_texts(open_text(flags), flags.max_bytes, flags.max_bytes_per_source, nbytes)
    trainer.train_from_iterator(texts, n_merged, buffer_size=1024, pattern=PATTERN)
    # A token's rank is the order of its merge; special tokens come after all of them.
    ranks = {bytes(token): rank for token, rank in trainer.get_mergeable_ranks()}
    if len(ranks) < n_merged:
        raise BadInput(f"{nbytes.total() / 1e6:.1f} MB of text make {len(ranks) + len(SPECIAL_TOKENS)} tokens, "
                       f"not --vocab_size={flags.vocab_size}: choose fewer, or give more text")
    return ranks


def read_tokens(directory):
    """Returns {bytes: rank} of the tokenizer in a folder. Raises BadInput."""
    found = load_tokenizer(directory)
    if not isinstance(found, Tokenizer):
        raise BadInput(f"--tokens_of={directory} is a tokenizer of Hugging Face, whose merges have an order of their "
                       "own: give one that tok_train made")
    return found.tokens()


def main(argv=None):
    (flags,) = read_flags(argv, __doc__, {Flags: "flags"}, gone={"pattern": "change PATTERN in scripts/tok_train.py"})
    out_dir = flags.out_dir or get_base_dir() / "tokenizer"
    if there := sorted(path.name for path in out_dir.glob("[!.]*")):
        raise BadInput(f"{out_dir} is not empty (it holds {there[0]}{' …' if there[1:] else ''}), and checkpoints may "
                       "need a tokenizer in it: name another --out_dir")
    require_writable_dir(out_dir)
    nbytes = Counter()
    started = time.monotonic()
    ranks = read_tokens(flags.tokens_of) if flags.tokens_of else train(flags, nbytes)
    pattern = LLAMA_CPP_PATTERN if flags.llama_cpp else PATTERN
    tokenizer = Tokenizer(ranks, pattern, {name: len(ranks) + i for i, name in enumerate(SPECIAL_TOKENS)})
    # Elsewhere first: a full disk, or a kill, leaves nothing that the same command refuses.
    unfinished = out_dir / ".unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    tokenizer.save(unfinished)
    (unfinished / SUMS).write_text(sums_text(sorted(unfinished.iterdir())))
    for path in unfinished.iterdir():
        path.rename(out_dir / path.name)
    unfinished.rmdir()
    origin = flags.tokens_of or f"{nbytes.total() / 1e6:.1f} MB of {len(nbytes)} sources"
    print(f"{out_dir}: {tokenizer.n_vocab} tokens from {origin} in {time.monotonic() - started:.0f} s; sha256 "
          f"{tokenizer.sha256}")


if __name__ == "__main__":
    run_script(main, "training the tokenizer")
