"""Made-up documents, and a tokenizer with one token for each byte: material for the tests of lanes and loader."""
from dataclasses import fields

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nanochat.data.fim import KINDS, Infilling
from nanochat.data.loader import DataLoader, RankRows
from nanochat.data.shards import open_shards


class ByteTokenizer:
    """One token for each byte."""
    bos_id, n_vocab, sha256, losses = 256, 257, "bytes", ""

    def encode_to_numpy(self, text):
        return np.frombuffer(text.encode() if isinstance(text, str) else text, np.uint8).astype(np.uint32)

    def encode_documents(self, texts):
        return [memoryview(np.append(np.uint32(self.bos_id), self.encode_to_numpy(text))) for text in texts]


def write(path, texts, row_group_size=None, text_type=None, **options):
    """Writes a shard, with options of pq.write_table; returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    names = [f"{i}.cc" for i in range(len(texts))]
    table = pa.table({"path": names, "text": pa.array(texts, text_type or pa.string())})
    pq.write_table(table, path, row_group_size=row_group_size, compression="zstd", **options)
    return path


def make_texts(count, seed=0):
    """Documents of a few bytes to some rows, each of them unlike all others, some empty."""
    rng = np.random.default_rng(seed)
    lengths = np.minimum(2000, rng.lognormal(4.5, 1.3, size=count)).astype(int)
    return [None if i % 29 == 3 else "" if i % 29 == 7 else f"<{i}:" + rng.bytes(length // 2).hex() + ">"
            for i, length in enumerate(lengths)]


def rows_and_others(options):
    """Returns RankRows of those of the options that are its fields, and the other options."""
    names = [field.name for field in fields(RankRows)]
    return RankRows(**{name: options[name] for name in names if name in options}), \
        {name: value for name, value in options.items() if name not in names}


def open_loader(paths, tokenizer=None, fim_rate=0.0, fim_kinds=KINDS, **options):
    """Returns a DataLoader over shards. options: fields of RankRows, some with a default here, and arguments."""
    rows, options = rows_and_others({"batch_size": 4, "seq_len": 128, "num_lanes": 8, **options})
    if fim_rate:
        options["infilling"] = Infilling(fim_rate, rows.seed, fim_kinds)
    return DataLoader(open_shards(paths), tokenizer or ByteTokenizer(), rows, **options)
