"""Measures the loader beside the tokenizer alone, and the tokens it drops:

    python3 -m scripts.bench loader --data_dir=DIR

The tokenizer alone gets the same documents as the loader.
"""
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from nanochat.common import flag, read_flags
from nanochat.data.loader import DataLoader, RankRows
from nanochat.data.shards import TextFlags, open_text
from nanochat.data.tokenizer import TokenizerFlags, load_tokenizer
from scripts.bench.rounds import compare

# In a round the loader reads this many million characters, then the tokenizer has its turn. If it held the texts of a
# whole run, the loader could not reuse their memory, and new pages from the kernel would cost it 10 ns per token.
MILLIONS_IN_ROUND = 8


@dataclass(frozen=True)
class Flags(TextFlags, TokenizerFlags):
    device_batch_size: int = flag(8, "rows in a batch", at_least=1)
    max_seq_len: int = flag(1024, "T, one less than the tokens in a row", at_least=1)
    threads: int = flag(2, "threads that tokenize, with and without the loader", at_least=1, at_most=1000)
    rounds: int = flag(20, f"rounds of {MILLIONS_IN_ROUND} million characters", at_least=1)


class Recorder:
    """A tokenizer that keeps the round's texts, and the lengths of all documents in tokens."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self.lengths = []  # threads append concurrently
        self.begin()

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def begin(self):
        self.groups = []  # of texts
        self.counts = []  # of each group's characters
        self.ended = time.perf_counter()  # when the last group was tokenized

    def encode_documents(self, texts):
        documents = self._tokenizer.encode_documents(texts)
        self.counts.append(sum(map(len, texts)))
        self.groups.append(texts)
        self.lengths += map(len, documents)
        self.ended = time.perf_counter()
        return documents

    def millions(self):
        """Returns how many millions of characters the round's texts have."""
        return sum(self.counts) / 1e6


def load(loader, recorder):
    """Makes the rows of a round, and returns the seconds of a million tokenized characters: rows do not count, because
    some were prefetched earlier."""
    recorder.begin()
    begun = recorder.ended
    while recorder.millions() < MILLIONS_IN_ROUND:
        next(loader)
    # The loader prefetches in threads, so the round ends when a tenth of a second has brought no further document.
    while time.perf_counter() - recorder.ended < 0.1:
        time.sleep(0.01)
    return (recorder.ended - begun) / recorder.millions()


def tokenize(pool, tokenizer, recorder):
    """Tokenizes the texts of the loader's round, because a token takes longer in one document than in another. Returns
    the seconds of a million characters."""
    begun = time.perf_counter()
    list(pool.map(tokenizer.encode_documents, recorder.groups))
    return (time.perf_counter() - begun) / recorder.millions()


def best_fit_crop(documents, row_tokens, buffer_size=1000):
    """Returns the share of the tokens that best-fit packing drops of documents of these lengths. Each row takes the
    longest document of a buffer that fits; if none fits, it crops the shortest, which loses the fewest tokens."""
    waiting = documents[::-1]
    buffer = []
    space = row_tokens
    dropped = 0
    while waiting or buffer:
        while waiting and len(buffer) < buffer_size:
            buffer.append(waiting.pop())
        taken = max((length for length in buffer if length <= space), default=min(buffer))
        buffer.remove(taken)
        dropped += max(0, taken - space)
        space = max(0, space - taken) or row_tokens
    return dropped / sum(documents)


def main(argv=None):
    (flags,) = read_flags(argv, __doc__, {Flags: "flags"})
    tokenizer = load_tokenizer(flags.tokenizer_dir)
    shards = open_text(flags)
    recorder = Recorder(tokenizer)
    rows = RankRows(flags.device_batch_size, flags.max_seq_len)
    with DataLoader(shards, recorder, rows, threads=flags.threads) as loader, ThreadPoolExecutor(flags.threads) as pool:
        compare("a million characters", {"loader": partial(load, loader, recorder),
                                         "tokenizer alone": partial(tokenize, pool, tokenizer, recorder)}, flags.rounds)
        dropped = loader.stats["dropped_share"]
    best_fit = best_fit_crop(recorder.lengths[:50_000], flags.max_seq_len + 1)
    print(f"the loader dropped {dropped:.4%} of the tokens; best fit, cropping the rest, drops {best_fit:.2%}")
