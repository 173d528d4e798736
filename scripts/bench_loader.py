"""Measures the loader: its speed compared with the tokenizer alone, its memory, and the tokens that packing drops; and
its speed with fill in the middle compared with that without.

    python3 -m scripts.bench_loader --data_dir=DIR

Without --data_dir it reads the prepared training data or, if there is none, the C++ headers that PyTorch and pyarrow
install. Tokenizer and loader are measured in turns. Tokens per second of CPU time are to be compared when the machine
has other work. The tokenizer alone gets the same documents as the loader: one by one, and in groups as the loader does.
"""
import resource
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from nanochat.common import BadInput, expand_path, flag, read_flags, run_script
from nanochat.data.loader import DataLoader
from nanochat.data.shards import list_shards
from nanochat.data.tokenizer import Infill, load_tokenizer

# The tokenizer has its turn each time the loader has read this many documents. If the texts of a whole measurement were
# held for it, the loader could not use their memory again, and new pages from the kernel would cost it 10 ns per token.
DOCUMENTS_IN_TURN = 1000


@dataclass(frozen=True)
class Flags:
    data_dir: Path | None = flag(None, "directory of parquet shards with a column text; default: as described above",
                                 of=expand_path)
    tokenizer_dir: Path | None = flag(None, "directory of the tokenizer; default: that of training", of=expand_path)
    device_batch_size: int = flag(8, "rows in a batch", at_least=1)
    max_seq_len: int = flag(1024, "T, one less than the tokens in a row", at_least=1)
    world_size: int = flag(1, "number of ranks; rank 0 is measured", at_least=1, at_most=64)
    threads: int = flag(2, "threads that tokenize, with and without the loader", at_least=1, at_most=1000)
    seconds: float = flag(10.0, "length of one measurement", above=0)
    fim_rate: float = flag(0.5, "of the loader that is compared with one without; 0: none", at_least=0, at_most=1)
    rounds: int = flag(3, "number of measurements", at_least=1)


def main(argv=None):
    (flags,) = read_flags(argv, __doc__, {Flags: "flags"})
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer = load_tokenizer(flags.tokenizer_dir)
        paths = find_data(flags.data_dir, scratch)
        print(f"{len(paths)} shards, {flags.threads} threads, {flags.device_batch_size} rows of {flags.max_seq_len}")
        lengths = compare_speed(flags, paths, tokenizer)
        if flags.fim_rate:
            compare_fim(flags, paths, tokenizer)
        compare_packings(lengths[:50_000], flags.max_seq_len)


def find_data(data_dir, scratch):
    """Returns the paths of the shards in `data_dir`, or as described above without it; `scratch` is for the headers."""
    try:
        return list_shards(data_dir)
    except BadInput:
        if data_dir:
            raise
    headers = [path for package in (torch, pa) for path in sorted(Path(package.__file__).parent.rglob("include/**/*.h"))
               if "ops" not in path.parts]  # those of PyTorch are generated and nearly identical
    headers = [headers[i] for i in np.random.default_rng(0).permutation(len(headers))]
    table = pa.table({"text": [path.read_text("utf-8", "replace") for path in headers]})
    pq.write_table(table, Path(scratch) / "headers.parquet", row_group_size=64)
    return [Path(scratch) / "headers.parquet"]


class RecordingTokenizer:
    """A tokenizer that records the texts that it is called with, and the numbers of their tokens."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.bos_id, self.n_vocab, self.sha256 = tokenizer.bos_id, tokenizer.n_vocab, tokenizer.sha256
        self.special, self.encode_to_numpy = tokenizer.special, tokenizer.encode_to_numpy
        self.clear()

    def clear(self):
        self.groups, self.lengths, self.ended = [], [], time.perf_counter()  # threads may append concurrently

    def encode_documents(self, texts):
        documents = self.tokenizer.encode_documents(texts)
        self.groups.append(texts)
        self.lengths += map(len, documents)
        self.ended = time.perf_counter()
        return documents


@dataclass
class Speed:
    """Tokens made, and the time for making them. Batches are not counted: some were made earlier."""
    tokens: int = 0
    seconds: float = 0.0
    core_seconds: float = 0.0

    @property
    def per_second(self):
        return self.tokens / self.seconds

    @property
    def per_core_second(self):
        return self.tokens / self.core_seconds


def compare_speed(flags, paths, tokenizer):
    """Prints tokens per second with and without the loader, and its memory. Returns the tokens of each document."""
    rss_before_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    recorder, lengths = RecordingTokenizer(tokenizer), []
    loader = DataLoader(paths, recorder, batch_size=flags.device_batch_size, seq_len=flags.max_seq_len,
                        world_size=flags.world_size, threads=flags.threads)
    ways = {"one by one": lambda texts: sum(1 + len(tokenizer.encode_to_numpy(text)) for text in texts),
            "in groups": lambda texts: sum(map(len, tokenizer.encode_documents(texts)))}
    ratios = {name: [] for name in ways}

    def load(speed):
        recorder.clear()
        begin, cpu_begin = time.perf_counter(), time.process_time()
        while len(recorder.lengths) < DOCUMENTS_IN_TURN:
            next(loader)
        wait_until_idle(recorder)
        speed.tokens += sum(recorder.lengths)
        speed.seconds += recorder.ended - begin
        speed.core_seconds += time.process_time() - cpu_begin

    def tokenize(speed, way, pool):
        begin, cpu_begin = time.perf_counter(), time.process_time()
        # The texts are the same, because a token takes longer in one document than in another.
        speed.tokens += sum(pool.map(way, recorder.groups))
        speed.seconds += time.perf_counter() - begin
        speed.core_seconds += time.process_time() - cpu_begin

    with loader, ThreadPoolExecutor(flags.threads) as pool:
        next(loader)
        wait_until_idle(recorder)
        print(f"{'':32}{'tokens/s':>12}{'per core-second':>17}")
        for _ in range(flags.rounds):
            with_loader, alone = Speed(), {name: Speed() for name in ways}
            while with_loader.seconds < flags.seconds:
                load(with_loader)
                lengths += recorder.lengths
                for name, way in ways.items():
                    tokenize(alone[name], way, pool)
                recorder.clear()
            for name, speed in alone.items():
                print(f"{'tokenizer alone, ' + name:32}{speed.per_second:>12,.0f}{speed.per_core_second:>17,.0f}")
                ratios[name].append((with_loader.per_second / speed.per_second,
                                     with_loader.per_core_second / speed.per_core_second))
            print(f"{'with the loader':32}{with_loader.per_second:>12,.0f}{with_loader.per_core_second:>17,.0f}   "
                  + "; ".join(f"{of[-1][0]:.1%} and {of[-1][1]:.1%}" for of in ratios.values()))
        stats = loader.stats
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    for name, pairs in ratios.items():
        speed, per_core = (statistics.median(column) for column in zip(*pairs, strict=True))
        print(f"median: {speed:.1%} of the tokenizer's speed {name}, {per_core:.1%} per core-second")
    print(f"peak memory {peak_mb:,.0f} MB, {rss_before_mb:,.0f} MB of it before the loader was opened")
    print(f"the loader dropped {stats['dropped']:,} of {stats['tokens']:,} tokens ({stats['dropped_share']:.4%})")
    return lengths


def compare_fim(flags, paths, tokenizer):
    """Prints the speed of a loader with fill in the middle as a fraction of that of one without, in characters of text
    per core-second. Each is tokenized once. There are few lanes, because each reads a megabyte of text at a time."""
    rates = 0.0, flags.fim_rate
    recorders = [RecordingTokenizer(tokenizer) for _ in rates]
    with ExitStack() as stack:
        loaders = [stack.enter_context(DataLoader(
            paths, recorder, batch_size=flags.device_batch_size, seq_len=flags.max_seq_len,
            world_size=flags.world_size, threads=flags.threads, fim_rate=rate, num_lanes=4 * flags.world_size))
            for rate, recorder in zip(rates, recorders, strict=True)]
        speeds = [Speed() for _ in rates]  # in characters
        for number in range(1 + 20 * flags.rounds):
            for loader, recorder, speed in zip(loaders, recorders, speeds, strict=True):
                recorder.clear()
                begin, cpu_begin = time.perf_counter(), time.process_time()
                while time.perf_counter() - begin < flags.seconds / 20 or not recorder.groups:
                    next(loader)
                wait_until_idle(recorder)
                if number:  # the first turn makes the first rows of all lanes
                    speed.core_seconds += time.process_time() - cpu_begin
                    speed.tokens += sum(sum(map(len, text)) if isinstance(text, Infill) else len(text)
                                        for texts in recorder.groups for text in texts)
        print(f"\nwith --fim_rate={flags.fim_rate:g}: {speeds[1].per_core_second / speeds[0].per_core_second:.1%} of "
              f"the speed without, {loaders[1].stats['dropped_share']:.4%} of the tokens dropped")


def wait_until_idle(recorder):
    """Waits until the loader has made its next blocks, which it does ahead."""
    before = -1
    while before != len(recorder.lengths):
        before = len(recorder.lengths)
        time.sleep(0.1)


def compare_packings(documents, seq_len):
    """Prints what two other methods of packing do with documents of these lengths, in tokens."""
    row_tokens, total = seq_len + 1, sum(documents)
    print(f"\n{len(documents)} documents, {sum(n > row_tokens for n in documents) / len(documents):.0%} of them "
          f"longer than a row; with other methods of packing:")
    print(f"best fit, cropping the rest  {best_fit_crop(documents, row_tokens) / total:8.2%} of the tokens dropped")
    ends = np.cumsum(documents)
    split = sum(begin // row_tokens != (end - 1) // row_tokens and end - begin <= row_tokens
                for begin, end in zip(np.concatenate([[0], ends[:-1]]), ends, strict=True))
    print(f"plain concatenation          {0:8.2%} dropped, but {split / len(documents):.1%} of the documents "
          "would fit into a row but are cut")


def best_fit_crop(documents, row_tokens, buffer_size=1000):
    """Returns the number of tokens dropped by best-fit packing.

    Each row takes the longest document that fits, of `buffer_size`, and when none fits, crops the shortest.
    """
    waiting, buffer, dropped = list(reversed(documents)), [], 0
    while waiting or buffer:
        space = row_tokens
        while space:
            while waiting and len(buffer) < buffer_size:
                buffer.append(waiting.pop())
            if not buffer:
                return dropped
            fitting = [n for n in buffer if n <= space]
            taken = max(fitting) if fitting else min(buffer)
            buffer.remove(taken)
            dropped += max(0, taken - space)
            space -= min(taken, space)
    return dropped


if __name__ == "__main__":
    run_script(main)
