"""Measures how many MB of C++ a second prepare_data cleans on one core, filter by filter, on documents of --data_dir:

    python3 -m scripts.bench clean --data_dir=some/parquet

Reading the sources and writing the shards are not in these figures.
"""
import time
from dataclasses import dataclass
from functools import partial

from nanochat.common import flag, read_flags
from nanochat.corpus.duplicates import signature
from nanochat.corpus.filters import FILTERS, Code, replace_emails
from nanochat.corpus.scan import clean
from nanochat.data.shards import TextFlags, open_text, whole_texts


@dataclass(frozen=True)
class Flags:
    megabytes: int = flag(20, "amount of text", at_least=1, at_most=1000)


def choose_texts(flags, megabytes):
    """Returns documents with about this much text, as bytes."""
    texts = []
    nbytes = 0
    for text in whole_texts(open_text(flags)):
        texts.append(text.encode())
        nbytes += len(texts[-1])
        if nbytes >= megabytes * 1_000_000:
            break
    return texts


def main(argv=None):
    text_flags, flags = read_flags(argv, __doc__, {TextFlags: "text", Flags: "amount"})
    texts = choose_texts(text_flags, flags.megabytes)
    nbytes = sum(map(len, texts))
    codes = [Code(text) for text in texts]
    steps = {"choice of files (clean)": (partial(clean, "a.cpp"), texts), "MinHash signature": (signature, texts),
             "emails": (replace_emails, texts), "comments and strings": (Code, texts)}
    steps |= {name: (function, codes) for name, (function, *_) in FILTERS.items()}
    total_s = 0.0
    for name, (function, documents) in steps.items():
        begin = time.process_time()
        for document in documents:
            function(document)
        seconds = time.process_time() - begin
        total_s += seconds
        print(f"{name:24} {nbytes / 1e6 / max(seconds, 1e-6):8.1f} MB/s")
    print(f"{'all of these':24} {nbytes / 1e6 / total_s:8.1f} MB/s on one core, {len(texts)} documents")
