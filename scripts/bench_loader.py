"""How fast the loader is against the tokenizer alone, how much each packing drops, and how much memory it takes.

    python3 -m scripts.bench_loader --data_dir=DIR

Without --data_dir it reads the prepared training data, and if there is none, the C++ headers that PyTorch and pyarrow
installed. Tokenizer and loader are measured in turns, and per second of CPU time too, which is what counts when the
machine has other work.
"""
import resource
import statistics
import tempfile
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from nanochat.common import ArgumentParser, BadInput, run_script
from nanochat.dataloader import DataLoader
from nanochat.dataset import list_shards, open_shards, read_pieces
from nanochat.tokenizer import load_tokenizer


def main(argv=None):
    parser = ArgumentParser(description=__doc__)
    add = parser.add_argument_group("what is read").add_argument
    add("--data_dir", default="", help="directory of parquet shards with a column text; empty: see above")
    add("--tokenizer_dir", default="", help="directory of the tokenizer; empty: the default one")
    add = parser.add_argument_group("how").add_argument
    add("--device_batch_size", type=int, default=8, help="rows in a batch")
    add("--max_seq_len", type=int, default=1024, help="tokens in a row")
    add("--world_size", type=int, default=1, help="ranks that share the lanes; this is rank 0 of them")
    add("--threads", type=int, default=2, help="threads that tokenize, in both measurements")
    add("--seconds", type=float, default=10.0, help="length of one measurement")
    add("--rounds", type=int, default=3, help="measurements of each kind")
    add = parser.add_argument_group("packing").add_argument
    add("--sample_mb", type=float, default=64.0, help="text that the packings are compared on, in MB")
    args = parser.parse_args(argv)

    with tempfile.TemporaryDirectory() as scratch:
        tokenizer = load_tokenizer(args.tokenizer_dir)
        paths = find_data(args.data_dir, scratch)
        texts = sample_texts(paths, args.sample_mb * 1e6)
        print(f"{len(paths)} shards; sample: {len(texts)} documents, {sum(map(len, texts)) / 1e6:.1f} MB; "
              f"{args.threads} threads, {args.device_batch_size} rows of {args.max_seq_len}")
        compare_speed(args, paths, tokenizer, texts)
        compare_packings([len(tokenizer.encode_to_numpy(text)) for text in texts], args.max_seq_len)


def find_data(data_dir, scratch):
    try:
        return list_shards(data_dir)
    except BadInput:
        if data_dir:
            raise
    headers = [path for package in (torch, pa) for path in sorted(Path(package.__file__).parent.rglob("include/**/*.h"))
               if "ops" not in path.parts]  # PyTorch's are generated, and near copies of each other
    headers = [headers[i] for i in np.random.default_rng(0).permutation(len(headers))]
    table = pa.table({"text": [path.read_text("utf-8", "replace") for path in headers]})
    pq.write_table(table, Path(scratch) / "headers.parquet", row_group_size=64)
    return [Path(scratch) / "headers.parquet"]


def sample_texts(paths, max_bytes):
    """Documents from row groups chosen at random."""
    shards = open_shards(paths)
    row_groups = [(shard, i) for shard in shards for i in range(len(shard.row_group_rows))]
    texts, n_bytes = [], 0
    for i in np.random.default_rng(0).permutation(len(row_groups)):
        shard, row_group = row_groups[i]
        pieces, _ = read_pieces(shard, row_group, 0, shard.row_group_rows[row_group])
        texts += [piece.text for piece in pieces]
        n_bytes = sum(map(len, texts))
        if n_bytes >= max_bytes:
            break
    return texts


class CountingTokenizer:
    """The tokenizer, and how many tokens it has made."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.bos_id, self.n_vocab, self.sha256 = tokenizer.bos_id, tokenizer.n_vocab, tokenizer.sha256
        self.tokens, self._lock = 0, threading.Lock()

    def encode_to_numpy(self, text):
        ids = self.tokenizer.encode_to_numpy(text)
        with self._lock:
            self.tokens += len(ids)
        return ids


def compare_speed(args, paths, tokenizer, texts):
    """Prints tokens per second with and without the loader, and the loader's memory."""
    rss_before_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    tokenizer = CountingTokenizer(tokenizer)
    ratios = []
    loader = DataLoader(paths, tokenizer, batch_size=args.device_batch_size, seq_len=args.max_seq_len,
                        world_size=args.world_size, threads=args.threads)
    parts = (texts[i:i + 16] for _ in range(10**9) for i in range(0, len(texts), 16))
    with loader, ThreadPoolExecutor(args.threads) as pool:
        running = deque()

        def tokenize(part):
            for text in part:
                tokenizer.encode_to_numpy(text)

        def tokenize_next_part():
            while len(running) < 2 * args.threads:
                running.append(pool.submit(tokenize, next(parts)))
            running.popleft().result()

        wait_until_idle(tokenizer)
        print(f"{'':16}{'tokens/s':>12}{'per core-second':>17}")
        for _ in range(args.rounds):
            with_loader = measure(args.seconds, tokenizer, lambda: next(loader))
            wait_until_idle(tokenizer)
            alone = measure(args.seconds, tokenizer, tokenize_next_part)
            wait_until_idle(tokenizer)
            print(f"tokenizer alone {alone[0]:>12,.0f}{alone[1]:>17,.0f}")
            print(f"with the loader {with_loader[0]:>12,.0f}{with_loader[1]:>17,.0f}   "
                  f"{with_loader[0] / alone[0]:.1%} and {with_loader[1] / alone[1]:.1%} of the tokenizer's")
            ratios.append((with_loader[0] / alone[0], with_loader[1] / alone[1]))
        stats = loader.stats
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"median: {statistics.median(r[0] for r in ratios):.1%} of the tokenizer's speed, "
          f"{statistics.median(r[1] for r in ratios):.1%} per core-second")
    print(f"peak memory {peak_mb:,.0f} MB, {rss_before_mb:,.0f} MB of it before the loader was opened")
    print(f"the loader dropped {stats['dropped']:,} of {stats['tokens']:,} tokens ({stats['dropped_share']:.4%})")


def wait_until_idle(tokenizer):
    """The loader works ahead: waits until it has done so."""
    before = -1
    while before != tokenizer.tokens:
        before = tokenizer.tokens
        time.sleep(0.2)


def measure(seconds, tokenizer, advance):
    """Tokens made per second and per second of CPU time while `advance()` is called again and again.

    Counted where they are made: what the loader hands out at first was made before.
    """
    begin, cpu_begin, tokens_begin = time.perf_counter(), time.process_time(), tokenizer.tokens
    while time.perf_counter() - begin < seconds:
        advance()
    tokens = tokenizer.tokens - tokens_begin
    return tokens / (time.perf_counter() - begin), tokens / (time.process_time() - cpu_begin)


def compare_packings(lengths, seq_len):
    """Prints what two other ways to fill rows do with documents of these lengths."""
    row_tokens = seq_len + 1
    documents = [length + 1 for length in lengths]  # and BOS
    total = sum(documents)
    print(f"\n{len(documents)} documents, {sum(n > row_tokens for n in documents) / len(documents):.0%} of them "
          f"longer than a row; with other packings:")
    print(f"best fit, cropping the rest  {best_fit_crop(documents, row_tokens) / total:8.2%} of the tokens dropped")
    ends = np.cumsum(documents)
    split = sum(begin // row_tokens != (end - 1) // row_tokens and end - begin <= row_tokens
                for begin, end in zip(np.concatenate([[0], ends[:-1]]), ends, strict=True))
    print(f"plain concatenation          {0:8.2%} dropped, but {split / len(documents):.1%} of the documents "
          "are cut that would fit into a row")


def best_fit_crop(documents, row_tokens, buffer_size=1000):
    """Tokens dropped if each row takes the largest of 1000 documents that fits, and in the end crops the shortest."""
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
