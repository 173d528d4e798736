"""The C++ headers that pyarrow installs: real text for tests of the tokenizer."""
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

HEADERS = [path.read_text() for path in sorted(Path(pa.get_include()).glob("arrow/**/*.h"))]


def write_headers(path):
    """Writes the headers to directory `path` as prepare_data would: two shards, two sources. Returns `path`."""
    for number in range(2):
        texts = HEADERS[number::2]
        sources = ["even=1.0" if i % 2 else "odd=2.0" for i in range(len(texts))]
        table = pa.table({"licence": ["Apache-2.0"] * len(texts), "source": sources, "text": texts,
                          "path": [f"{i}.h" for i in range(len(texts))]})
        pq.write_table(table, path / f"shard_{number:05d}.parquet", row_group_size=50, compression="zstd")
    return path
