"""Made-up C++ projects, and prepare_data run on them: material for the tests of sources, corpora and packages."""
import hashlib
import io
import json
import random
import tarfile

import pyarrow as pa
import pyarrow.parquet as pq

from scripts.prepare_data import main
from tests.conftest import last_of_each

LICENCE_MIT = "Permission is hereby granted, free of charge, to any person obtaining a copy"


def cpp(seed, lines=40):
    """Returns C++ that has no sequence of five words in common with that of another seed."""
    rng = random.Random(seed)
    return "".join(f"int f{rng.getrandbits(40):x}(int a{rng.getrandbits(40):x}) {{ return {rng.choice('abc')}; }}\n"
                   for _ in range(lines))


def make_project(parent, name, files=6, seed=None, lines=40):
    directory = parent / name
    for number in range(files):
        path = directory / "src" / f"file{number}.cpp"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(cpp(f"{seed or name}{number}", lines))
    return directory


def make_tar(path, members):
    """Writes a tarball of {name: bytes}; .zst with pyarrow, because Python's tarfile does not know it."""
    kind = path.suffix[1:]
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w" if kind == "zst" else f"w:{kind}") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    data = raw.getvalue()
    path.write_bytes(pa.Codec("zstd").compress(data, asbytes=True) if kind == "zst" else data)
    return path


def stack_rows(seed, count, files=2):
    """Returns rows with the columns of The Stack: `count` projects with some files each."""
    rows = []
    for number in range(count):
        for file in range(files):
            rows.append({"content": cpp(f"{seed}{number}{file}", 12), "max_stars_repo_path": f"src/file{file}.cpp",
                         "max_stars_repo_name": f"{seed}/repo{number}", "lang": "C++", "score": number,
                         "max_stars_repo_licenses": ["MIT", "Apache-2.0"]})
    return rows


def write_table(path, rows):
    """Writes rows in the format that the end of the file's name says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist(rows)
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=8)
    else:
        data = "".join(json.dumps(row) + "\n" for row in rows).encode()
        with pa.output_stream(path, compression="detect") as file:
            file.write(data)
    return path


def read(out_dir, side):
    """Returns the documents of train or validation as a list of {column: value}."""
    return [document for path in sorted((out_dir / side).iterdir()) for document in pq.read_table(path).to_pylist()]


def shard_hashes(out_dir):
    return {str(path.relative_to(out_dir)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(out_dir.rglob("shard_*.parquet"))}


def manifest(out_dir):
    return json.loads((out_dir / "manifest.json").read_text())


def prepare(out_dir, *flags):
    main(last_of_each(
        f"--out_dir={out_dir}", f"--cache_dir={out_dir.parent / 'downloads'}", "--workers=1", *map(str, flags)))
    return manifest(out_dir)
