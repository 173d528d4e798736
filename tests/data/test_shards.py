"""Missing, unsuitable and corrupt data give clear errors, and text is the same wherever reading begins."""
import base64
import os
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as encryption
import pytest

from nanochat.common import BadInput
from nanochat.data import shards as shards_module
from nanochat.data import units as units_module
from nanochat.data.shards import all_pieces, fingerprint, list_shards, open_shards, read_pieces, whole_texts
from nanochat.data.tokenizer import load_tokenizer
from nanochat.data.units import Units
from tests.data.documents import write


def read_all(shard):
    """Returns {(row group, document): text} of all documents that are not empty."""
    found = {}
    for row_group, n_documents in enumerate(shard.row_group_documents):
        document = 0
        while document < n_documents:
            pieces, document = read_pieces(shard, row_group, document, n_documents, max_bytes=1 << 40)
            for piece in pieces:
                found.setdefault((row_group, piece.document), []).append(piece.text)
    return {key: "".join(parts) for key, parts in found.items()}


class Keys(encryption.KmsClient):
    def __init__(self, config):
        super().__init__()

    def wrap_key(self, key, name):
        return base64.b64encode(key)


def test_an_encrypted_column_is_named(tmp_path):
    properties = encryption.CryptoFactory(Keys).file_encryption_properties(
        encryption.KmsConnectionConfig(), encryption.EncryptionConfiguration(
            footer_key="a", column_keys={"b": ["text"]}, plaintext_footer=True))
    table = pa.table({"text": ["int x;"]})
    with pq.ParquetWriter(tmp_path / "a.parquet", table.schema, encryption_properties=properties) as writer:
        writer.write_table(table)
    with pytest.raises(BadInput, match="a.parquet has encrypted columns: decrypt it, or name other data"):
        open_shards([tmp_path / "a.parquet"])


def test_texts_that_share_their_bytes_in_the_file_do_not_share_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(shards_module, "LONGEST_BATCH_BYTES", 4 << 20)
    text = "int value;\n" * 95_325
    path = write(tmp_path / "a.parquet", [text] * 40, dictionary_pagesize_limit=4 << 20)
    assert path.stat().st_size < 20_000
    shard, = open_shards([path])
    before, bytes_in, held = pa.total_allocated_bytes(), shards_module._bytes_in, []
    monkeypatch.setattr(shards_module, "_bytes_in",
                        lambda column: held.append(pa.total_allocated_bytes() - before) or bytes_in(column))
    assert list(read_all(shard).values()) == [text] * 40
    assert max(held) < 20 << 20


@pytest.mark.parametrize("change", [
    lambda path: write(path, ["changed"] * 100, row_group_size=10), lambda path: write(path, ["changed"]),
    lambda path: os.replace(write(path.with_name("b"), ["changed"] * 100, row_group_size=10), path),
    lambda path: path.write_bytes(b""), Path.unlink])
def test_a_shard_that_is_replaced_while_it_is_read_is_named(tmp_path, change):
    path = write(tmp_path / "a.parquet", ["original"] * 100, row_group_size=10)
    shard, = open_shards([path])
    assert read_pieces(shard, 0, 0, 10)
    change(path)
    for row_group in (1, 9):
        with pytest.raises(BadInput, match="/a.parquet was replaced|/a.parquet: .*make it readable again"):
            read_pieces(shard, row_group, 0, 10)


OF_OTHER_PROGRAMS = ["._a.parquet", ".ipynb_checkpoints/a-checkpoint.parquet", "_delta_log/1.parquet"]


@pytest.mark.parametrize("there, read, left_out", [
    (["a.parquet", *OF_OTHER_PROGRAMS], ["a.parquet"], None),
    (["part/a.parquet", *OF_OTHER_PROGRAMS], ["part/a.parquet"], None),
    (["corpus.parquet/part-0.parquet", *OF_OTHER_PROGRAMS], ["corpus.parquet/part-0.parquet"], None),  # Spark's
    (["a.parquet", "sub/b.parquet"], ["a.parquet"], "1 of 2 .*sub/b.parquet"),
    (["A/a.parquet", "B/C/b.parquet", "B/b.parquet"], ["A/a.parquet", "B/b.parquet"], "2 of 3 .*B/C/b.parquet"),
    (["a.parquet", "b.PARQUET", "c.parq"], ["a.parquet"], "1 of 3 .*b.PARQUET …"),
    (["x/y/a.parquet", ".hidden/b.parquet", "_temporary/c.parquet"], ["x/y/a.parquet"], None),
])
def test_the_first_level_with_shards_is_read_and_what_is_left_out_is_counted(there, read, left_out, tmp_path, capsys):
    for name in there:
        write(tmp_path / name, ["int x;"])
    (tmp_path / "again").symlink_to(tmp_path)
    for _ in range(2):
        assert [str(file.path.relative_to(tmp_path)) for file in list_shards(tmp_path)] == read
    said = capsys.readouterr().out.splitlines()
    assert len(said) == (left_out is not None) and all(re.search(left_out, line) for line in said)


def test_a_folder_whose_name_is_not_utf8_is_named(tmp_path):
    path = write(tmp_path / "data" / "a.parquet", ["int x;"])
    path.parent.rename(tmp_path / os.fsdecode(b"\xff"))
    with pytest.raises(BadInput, match="is not UTF-8"):
        open_shards(list_shards(tmp_path / os.fsdecode(b"\xff")))


def test_the_default_folder_is_in_the_base_directory_and_missing_data_is_one_clear_line(tmp_path, base_dir):
    for name in ("shard_00001", "shard_00000", "shard_00002"):
        write(base_dir / "parquet" / "val" / f"{name}.parquet", ["int x;"])
    assert [path.name for path in list_shards(split="val")] == [f"shard_0000{i}.parquet" for i in range(3)]
    with pytest.raises(BadInput, match=r"no train data: .*base_data_v3 cannot be read .No such file or directory"):
        list_shards()
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput, match=r"has no \*\.parquet file"):
        list_shards(tmp_path / "empty")


def test_files_that_are_not_whole_parquet_files_are_named(tmp_path):
    good = write(tmp_path / "good.parquet", ["int x;"] * 100).read_bytes()
    for content in (b"", b"PAR1", good[:-10], good[:len(good) // 2], good[-100:], b"no parquet at all " * 10):
        (tmp_path / "bad.parquet").write_bytes(content)
        with pytest.raises(BadInput, match=r"bad\.parquet is not a whole parquet file"):
            open_shards([tmp_path / "good.parquet", tmp_path / "bad.parquet"])
    os.mkfifo(tmp_path / "pipe.parquet")
    (tmp_path / "link.parquet").symlink_to("nowhere")
    for name, problem in (("pipe", "it is no ordinary file"), ("link", "No such file or directory")):
        with pytest.raises(BadInput, match=rf"{name}\.parquet is not a whole parquet file \({problem}\): copy"):
            open_shards([tmp_path / f"{name}.parquet"])


def test_files_without_text_of_files_are_named(tmp_path):
    table = pa.table({"text": ["int x;\0int y;"]}).replace_schema_metadata({"pack": "project"})
    pq.write_table(table, tmp_path / "packed.parquet")
    with pytest.raises(BadInput, match="packed.parquet holds a whole project in each document"):
        open_shards([tmp_path / "packed.parquet"])
    pq.write_table(pa.table({"content": ["int x;"]}), tmp_path / "other.parquet")
    with pytest.raises(BadInput, match=r"other\.parquet has no column named text \(it has content\)"):
        open_shards([tmp_path / "other.parquet"])
    pq.write_table(pa.table([["int x;"], ["int y;"]], ["text", "text"]), tmp_path / "twice.parquet")
    with pytest.raises(BadInput, match=r"twice\.parquet has several columns named text \(it has text, text\)"):
        open_shards([tmp_path / "twice.parquet"])
    with pytest.raises(BadInput, match=r"numbers\.parquet: its column text holds int64"):
        open_shards([write(tmp_path / "numbers.parquet", [1, 2], text_type=pa.int64())])
    with pytest.raises(BadInput, match="every document is empty"):
        open_shards([write(tmp_path / "empty.parquet", ["", None, ""]), write(tmp_path / "none.parquet", [])])


@pytest.mark.parametrize("checksums, offset, content", [
    (False, 0, bytes(100)),  # the page's header
    (True, 5000, b"?"),  # one byte: seen because the page was written with a checksum
])
def test_a_corrupt_row_group_is_named(tmp_path, checksums, offset, content):
    rng = np.random.default_rng(0)
    texts = ["".join(map(chr, rng.integers(32, 127, size=1000))) for _ in range(30)]
    path = write(tmp_path / "shard.parquet", texts, row_group_size=10, use_dictionary=False,
                 write_page_checksum=checksums)
    text = pq.read_metadata(path).row_group(1).column(1)
    assert text.path_in_schema == "text" and offset + len(content) < text.total_compressed_size
    data, begin = bytearray(path.read_bytes()), text.data_page_offset + offset
    assert data[begin:begin + len(content)] != content
    data[begin:begin + len(content)] = content
    path.write_bytes(data)
    shard, = open_shards([path])
    assert len(read_pieces(shard, 0, 0, 10)[0]) == 10
    with pytest.raises(BadInput, match=r"shard\.parquet: row group 1 cannot be read"):
        read_pieces(shard, 1, 0, 10)
    path.unlink()
    with pytest.raises(BadInput, match=r"shard\.parquet: row group 2 cannot be read"):
        read_pieces(shard, 2, 0, 10)


def test_fingerprint_tells_whether_the_data_is_the_same(tmp_path):
    def of(*names):
        return fingerprint(open_shards([tmp_path / name for name in names]))
    write(tmp_path / "a.parquet", ["int x;", "int y;"])
    write(tmp_path / "copy/a.parquet", ["int x;", "int y;"])
    write(tmp_path / "b.parquet", ["int x;", "int y;"])
    write(tmp_path / "other/a.parquet", ["int x;", "int z;"])
    assert of("a.parquet") == of("copy/a.parquet")
    assert len({of("a.parquet"), of("b.parquet"), of("other/a.parquet"), of("a.parquet", "b.parquet")}) == 4


@pytest.mark.parametrize("text_type", [
    pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.binary_view(),
    pa.dictionary(pa.int32(), pa.string())])
def test_every_kind_of_text_column_is_read(tmp_path, text_type):
    texts = ["int x;", "", None, "käse\r\n\t\0", "int x;", "日本語"]
    if text_type in (pa.binary(), pa.binary_view()):
        texts = [text and text.encode() for text in texts]
    shard, = open_shards([write(tmp_path / "a.parquet", texts, row_group_size=4, text_type=text_type)])
    assert read_all(shard) == {(0, 0): "int x;", (0, 3): "käse\r\n\t\0", (1, 0): "int x;", (1, 1): "日本語"}


def test_malformed_utf8_comes_back_as_bytes(tmp_path):
    malformed = b"char *s = \"\xff\xfe\xe4\";"
    table = pa.table({"text": pa.array([malformed, b"ok"], pa.binary()).view(pa.string())})
    pq.write_table(table, tmp_path / "a.parquet")
    shard, = open_shards([tmp_path / "a.parquet"])
    assert [piece.text for piece in read_pieces(shard, 0, 0, 2)[0]] == [malformed, "ok"]


def test_long_documents_are_cut_and_can_be_read_from_any_piece(tmp_path, monkeypatch):
    monkeypatch.setattr(shards_module, "PIECE_BYTES", 100)
    monkeypatch.setattr(shards_module, "READ_BATCH_BYTES", 1000)
    lines = "".join(f"void f{i}() {{\n    return;\n\n}}\n" for i in range(60))
    texts = ["short", lines, "{1, 2},\n" * 30, "", "ß日" * 200, "x" * 100, "x" * 101, None, "\n" * 250]
    shard, = open_shards([write(tmp_path / "a.parquet", texts)])
    assert read_all(shard) == {(0, i): text for i, text in enumerate(texts) if text}
    everything, _ = read_pieces(shard, 0, 0, len(texts))
    assert all(len(piece.text.encode()) <= 100 for piece in everything)
    in_lines = [piece.text for piece in everything if piece.document == 1]
    assert len(in_lines) > 5 and all(text.startswith("void") for text in in_lines)
    for max_bytes in (1, 150, 1000):
        pieces, document, index = [], 0, 0
        while document < len(texts):
            some, document = read_pieces(shard, 0, document, len(texts), index, max_bytes)
            pieces += some
            index = some[-1].index + 1 if some and not some[-1].is_last else 0
        assert pieces == everything


def test_whole_texts_are_those_of_one_piece(tmp_path):
    texts = ["int a;\n", "int long_one;\n" * 400_000, "int b;\n"]
    shards = open_shards([write(tmp_path / "a.parquet", texts)])
    assert "".join(piece.text for piece in all_pieces(shards)) == "".join(texts)
    assert list(whole_texts(shards)) == [texts[0], texts[2]]


@pytest.mark.parametrize("row_groups", [[1], [7], [500], [30] * 3, [5, 0, 9, 1], [20] * 100])
def test_an_epoch_has_every_document_once_in_an_order_of_its_own(row_groups):
    shard = shards_module.Shard(None, 0, tuple(row_groups), "")
    units = Units([shard], num_lanes=8, seed=1)
    orders = []
    for epoch in range(3):
        numbers = range(epoch * len(units.units), (epoch + 1) * len(units.units))
        order = [units.get(n % 8, n // 8) for n in numbers]
        documents = sorted((row_group, i) for _, row_group, first, stop in order for i in range(first, stop))
        assert documents == [(row_group, i) for row_group, n in enumerate(row_groups) for i in range(n)]
        orders.append(order)
    if len(units.units) > 4:
        assert orders[0] != orders[1] != orders[2]
        assert [Units([shard], 8, seed=2).get(n % 8, n // 8) for n in range(len(units.units))] != orders[0]
    assert [Units([shard], 8, seed=1).get(n % 8, n // 8) for n in range(len(units.units))] == orders[0]


@pytest.mark.parametrize("kept_bytes", [0, 500, 1 << 20])
def test_data_that_is_kept_reads_the_same(tmp_path, monkeypatch, kept_bytes):
    monkeypatch.setattr(shards_module, "PIECE_BYTES", 100)
    monkeypatch.setattr(units_module, "KEPT_BYTES", 1 << 20)
    shard, = open_shards([write(tmp_path / "a.parquet", ["x" * n for n in range(0, 400, 7)], row_group_size=10)])
    units = Units([shard], num_lanes=16, seed=0)
    units._room = kept_bytes
    for _ in range(2):
        for unit in units.units:
            _, row_group, first, stop = unit
            for start in range(first, stop):
                expected = read_pieces(shard, row_group, start, stop, first_piece=2)
                assert units.read(unit, start, 2, 1 << 20) == expected
    assert bool(units._kept) == (kept_bytes > 0)


def test_the_pieces_of_a_document_have_the_tokens_of_the_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(shards_module, "PIECE_BYTES", 25_000)
    tokenizer = load_tokenizer()
    text = "".join(path.read_text() for path in sorted(Path(pa.__file__).parent.rglob("include/arrow/*.h")))
    shard, = open_shards([write(tmp_path / "a.parquet", [text])])
    pieces, _ = read_pieces(shard, 0, 0, 1)
    assert len(pieces) > 15
    tokens = [token for piece in pieces for token in tokenizer.encode(piece.text)]
    assert tokens == tokenizer.encode(text)
