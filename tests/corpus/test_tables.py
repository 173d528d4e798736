"""Sources that are tables, as people have them: The Stack in folders, Hive, JSON Lines, Hugging Face."""
import gzip
import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nanochat.common import BadInput
from nanochat.corpus import tables
from tests.corpus.projects import cpp, make_project, manifest, prepare, read, stack_rows, write_table

ROWS = stack_rows("a", 40)


def split(folder, names):
    """Writes ROWS as tables of these names."""
    size = -(-len(ROWS) // len(names))
    for number, name in enumerate(names):
        write_table(folder / name, ROWS[number * size:(number + 1) * size])


def rows_of(path):
    """Returns an iterator of the Rows of a table that is one file."""
    piece, = tables.pieces(tables.open_table(path))
    return tables.iter_rows(piece)


def hugging_face(folder):
    """As `git clone` and snapshot_download leave a data set: notes, and links to the files."""
    split(folder, ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"])
    (folder / "README.md").write_text("---\nlicense: other\n---\n")
    (folder / "dataset_infos.json").write_text("{}")
    (folder / ".git").mkdir()
    blob = folder / "blob"
    (folder / "data/train-00000-of-00002.parquet").rename(blob)
    (folder / "data/train-00000-of-00002.parquet").symlink_to(blob)


LAYOUTS = {
    "nested": lambda folder: split(folder, ["data/cpp/part-0.parquet", "data/c/deeper/part-1.parquet"]),
    "hive": lambda folder: split(folder, ["year=2023/lang=C%2B%2B/a.parquet", "year=2024/lang=C%2B%2B/b.parquet"]),
    "jsonl": lambda folder: split(folder, ["a.jsonl", "more/b.ndjson"]),
    "jsonl.gz": lambda folder: split(folder, ["a.jsonl.gz", "b.json.gz"]),
    "jsonl.zst": lambda folder: split(folder, ["a.jsonl.zst", "b.jsonl.zst"]),
    "hugging_face": hugging_face,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_documents_with_what_the_columns_say(tmp_path, layout):
    (tmp_path / "in").mkdir()
    LAYOUTS[layout](tmp_path / "in")
    result = prepare(tmp_path / "out", f"--source={tmp_path / 'in'}", "--val_fraction=0.2")
    sides = [read(tmp_path / "out", side) for side in ("base_data_v3", "val")]
    found = sorted((row["text"], row["path"], row["source"], row["licence"]) for side in sides for row in side)
    assert found == sorted((row["content"], row["max_stars_repo_path"], row["max_stars_repo_name"],
                            "MIT AND Apache-2.0") for row in ROWS)
    training, held_out = ({row["source"] for row in side} for side in sides)
    assert training and held_out and not training & held_out, "a project is on both sides"
    source, = result["sources"]
    assert source["files"] == 80 and source["columns"]["text"] == "content"
    assert source["licences"] == {"MIT AND Apache-2.0": 80} and result["totals"]["val"]["documents"] > 0


def test_without_projects_the_path_decides_and_without_paths_the_text(tmp_path):
    for drop in (["max_stars_repo_name"], ["max_stars_repo_name", "max_stars_repo_path"]):
        rows = []
        for number, row in enumerate(ROWS):
            row = {**row, "max_stars_repo_path": f"src/{number % 20}.cpp"}
            rows.append({name: value for name, value in row.items() if name not in drop})
        write_table(tmp_path / "in" / "a.jsonl", rows)
        out = tmp_path / f"out{len(drop)}"
        prepare(out, f"--source={tmp_path / 'in'}", "--val_fraction=0.3")
        training, held_out = ({row["path"] for row in read(out, side)} for side in ("base_data_v3", "val"))
        if len(drop) == 1:
            assert training and held_out and not training & held_out
        else:
            assert training == held_out == {"a.jsonl"}


def test_tables_and_projects_are_one_corpus_and_a_named_table_is_held_out_whole(tmp_path):
    write_table(tmp_path / "stack.jsonl", ROWS)
    mine = make_project(tmp_path, "mine")
    sources = f"--source={mine},{tmp_path / 'stack.jsonl'}"
    prepare(tmp_path / "out", sources, "--val_fraction=0.2")
    assert {row["source"] for row in read(tmp_path / "out", "base_data_v3")} > {"mine"}
    assert "mine" not in {row["source"] for row in read(tmp_path / "out", "val")}
    prepare(tmp_path / "named", sources, "--val_projects=stack")
    assert {row["source"] for row in read(tmp_path / "named", "base_data_v3")} == {"mine"}
    prepare(tmp_path / "only_val", sources, "--eval_only")
    assert len(read(tmp_path / "only_val", "val")) == 86


def test_a_table_beside_projects_does_not_take_their_part_of_validation(tmp_path):
    write_table(tmp_path / "stack.jsonl", ROWS)
    for number in range(20):
        make_project(tmp_path / "in", f"p{number}", files=1, lines=12)
    result = prepare(tmp_path / "out", f"--source={tmp_path / 'stack.jsonl'}", f"--projects_dir={tmp_path / 'in'}",
                     "--val_fraction=0.1")
    assert 1 <= len(result["val_projects"]) <= 2, "--val_fraction is of the projects' bytes, without the table's"


def test_empty_files_and_files_that_lack_a_column_are_no_obstacle(tmp_path):
    folder = write_table(tmp_path / "in" / "part-3.parquet", ROWS[:1]).parent
    pq.write_table(pa.table({"content": pa.array([], pa.string())}), folder / "part-0.parquet")
    (folder / "part-1.jsonl").touch()
    pq.write_table(pa.table({"content": [cpp(1)]}), folder / "part-2.parquet")
    prepare(tmp_path / "out", f"--source={tmp_path / 'in'}", "--eval_only")
    assert {row["source"] for row in read(tmp_path / "out", "val")} == {"in", "a/repo0"}


def test_what_is_not_c_or_cpp_is_dropped_by_path_or_else_by_language(tmp_path):
    rows = [{"text": cpp(number), "path": path, "lang": language} for number, (path, language) in enumerate([
        ("a.cpp", "Text"), ("/b.CUH", None), ("include/vector", "c++"), (None, "C"), (None, None),
        ("a.py", "C++"), ("Makefile", "Makefile"), (None, "Rust"), ("README", None), ("src.d/Makefile", "")])]
    result = prepare(tmp_path / "out", f"--source={write_table(tmp_path / 'a.jsonl', rows)}", "--eval_only")
    assert sorted(row["path"] for row in read(tmp_path / "out", "val")) == [
        "a.cpp", "a.jsonl", "a.jsonl", "b.CUH", "include/vector"]
    assert result["dropped"]["not_c_or_cpp"] == 5


def test_text_is_read_whatever_its_type(tmp_path):
    texts = [cpp(number) for number in range(4)]
    for kind in (pa.large_string(), pa.string_view(), pa.binary(), pa.binary_view(), pa.dictionary(pa.int32(),
                                                                                                   pa.string())):
        table = pa.table({"code": pa.array(texts).cast(kind)})
        pq.write_table(table, tmp_path / "a.parquet")
        assert [row.read().decode() for row in rows_of(tmp_path / "a.parquet")] == texts
    malformed = pa.array([b"int \xff;"]).cast(pa.binary()).view(pa.string())
    pq.write_table(pa.table({"code": malformed, "path": malformed}), tmp_path / "a.parquet")
    row, = rows_of(tmp_path / "a.parquet")
    assert row.read() == b"int \xff;" and row.path == "int \ufffd;"


def test_memory_is_bounded_by_a_few_rows_and_not_by_the_row_group_or_the_file(tmp_path):
    """170 MB of text that hardly compresses, in one row group and in one file of JSON Lines."""
    program = """
import sys
from pathlib import Path
from nanochat.corpus import tables
from tests.memory import peak_bytes
for path in map(Path, sys.argv[1:]):
    before = peak_bytes()
    nbytes = sum(row.nbytes for piece in tables.pieces(tables.open_table(path)) for row in tables.iter_rows(piece))
    print(nbytes >> 20, peak_bytes() - before >> 20)
"""
    block = [f"{number} ".encode().hex() * 50 for number in range(100_000)]
    texts = ["".join(block[start::1000]) for start in range(1000)] * 3
    texts = [f"{number} {text}" for number, text in enumerate(texts)]
    table = pa.table({"text": texts})
    # A page, of which Arrow holds one, gets so many rows at a time.
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=len(texts), use_dictionary=False, write_batch_size=16)
    with pa.output_stream(tmp_path / "a.jsonl.zst", compression="zstd") as file:
        for text in texts:
            file.write(json.dumps({"text": text}).encode() + b"\n")
    run = subprocess.run([sys.executable, "-c", program, tmp_path / "a.parquet", tmp_path / "a.jsonl.zst"],
                         capture_output=True, text=True, check=True)
    for line in run.stdout.splitlines():
        if not line.startswith("/"):
            mebibytes, peak = map(int, line.split())
            assert mebibytes > 160 and peak < 80, run.stdout


# -----------------------------------------------------------------------------
# What is refused


@pytest.mark.parametrize("rows, flags, message", [
    ([{"text": ["a", "b"]}], [], r"text holds list<.*string>, not strings .*: name another|text is not text in"),
    ([{"text": 3}], [], "holds int64, not strings|text is not text in"),
    ([{"words": "int a;", "n": 1}], [], "none of the columns text, .*name its text with --text_column, of words"),
    (ROWS, ["--text_column=body"], "has no column body: name its text with --text_column, of content, max_stars"),
    (ROWS[:2], [], "of 2 documents, .* none is left for val/: add sources, or give another --val_fraction"),
])
@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_a_column_that_does_not_fit_is_one_line(tmp_path, rows, flags, message, suffix):
    path = write_table(tmp_path / f"a{suffix}", rows)
    with pytest.raises(BadInput, match=message):
        prepare(tmp_path / "out", f"--source={path}", *flags)


def test_halves_of_characters_in_json_become_question_marks(tmp_path):
    row = {"text": cpp(1) + "// \ud800\U0001f600", "path": "a\udc00.cpp", "meta": {"\udfff": ["\ud834"]}}
    for is_escaped in (True, False):
        (tmp_path / "a.jsonl").write_bytes(json.dumps(row, ensure_ascii=is_escaped).encode(errors="surrogatepass"))
        found, = rows_of(tmp_path / "a.jsonl")
        assert found.read().decode().endswith("// ?\U0001f600") and found.path == "a?.cpp"


def test_a_bad_line_of_json_is_skipped_counted_and_named(tmp_path, capsys):
    lines = [json.dumps({"text": cpp(number)}).encode() for number in range(30)]
    (tmp_path / "in").mkdir()
    lines = [*lines[:9], b'{"text": "\xff"}', *lines[9:], b'{"text": ["int a;"]}', b'{"text": "int']
    (tmp_path / "in" / "a.jsonl").write_bytes(b"\n".join(lines))
    result = prepare(tmp_path / "out", f"--source={tmp_path / 'in'}", "--eval_only")
    assert result["dropped"] == {"bad_line": 3} and len(read(tmp_path / "out", "val")) == 30
    assert "3 of 33 lines are skipped: line 10 is not JSON: 'utf-8' codec can't decode" in capsys.readouterr().out


@pytest.mark.parametrize("suffix, padding", [("gz", b"\0" * 1000), ("gz", b""), ("zst", b"")])
def test_several_packed_parts_are_one_file_and_zeros_behind_gzip_are_read_past(tmp_path, suffix, padding):
    path = write_table(tmp_path / f"a.jsonl.{suffix}", ROWS)
    path.write_bytes(path.read_bytes() * 2 + padding)
    assert len(list(rows_of(path))) == 2 * len(ROWS)


@pytest.mark.parametrize("name, data, message", [
    ("a.jsonl", b"", "in has no documents: its files are empty"),
    ("a.jsonl", b'{"text": "int a;"}\n' + b'{"text"\n' * 11, "11 of its first 12 lines are bad: line 2 is not JSON"),
    ("a.jsonl", b'[{"text": "int a;"}]\n', "line 1 is not an object of JSON"),
    ("a.jsonl", b'{"text": "int a;"}\n' * 200 + b'{"text": [1]}\n' * 11,
     r'11 of its first 211 lines are bad: line 201: text is not text in \{"text": \[1\]\}'),
    ("a.jsonl.gz", gzip.compress(b'{"text": "int a;"}\n', mtime=0)[:-9] + b"\0" * 512, "cannot be read"),
    ("a.jsonl.gz", b"no gzip", "cannot be read"),
    ("a.jsonl.zst", pa.Codec("zstd").compress(b'{"text": "int a;"}\n' * 9999, asbytes=True)[:-9], "Truncated"),
    ("a.parquet", b"version https://git-lfs.github.com/spec/v1\n", "cannot be read .*: copy it again, or leave it out"),
    ("notes.txt", b"", "has neither C or C[+][+] files nor parquet or JSON Lines"),
    ("dataset_infos.json", b"{}", "has neither"),
    ("_delta_log/a.parquet", b"", "has neither"),
])
def test_a_file_that_is_damaged_or_empty_and_a_folder_without_documents_are_named(tmp_path, name, data, message):
    path = tmp_path / "in" / name
    path.parent.mkdir(parents=True)
    path.write_bytes(data)
    with pytest.raises(BadInput, match=message) as error:
        prepare(tmp_path / "out", f"--source={tmp_path / 'in'}", "--eval_only")
    assert str(tmp_path / "in") in str(error.value)


def test_the_flag_of_tables_needs_one_and_the_corpus_may_not_lie_in_it(tmp_path):
    mine = make_project(tmp_path, "mine")
    with pytest.raises(BadInput, match="--text_column is for tables"):
        prepare(tmp_path / "out", f"--source={mine}", "--text_column=a")
    write_table(tmp_path / "in" / "a.parquet", ROWS)
    with pytest.raises(BadInput, match="which is read as a source"):
        prepare(tmp_path / "in" / "out", f"--source={tmp_path / 'in'}")
    prepare(tmp_path / "in" / "out", f"--source={tmp_path / 'in/a.parquet'}", "--val_fraction=0.2")
    assert manifest(tmp_path / "in" / "out")["totals"]


def test_a_folder_with_cpp_is_no_table_and_tables_in_folders_that_begin_with_an_underscore_are_left_out(tmp_path):
    folder = write_table(tmp_path / "_in" / "year=2024" / "a.parquet", ROWS).parent.parent
    write_table(folder / "_delta_log" / "deeper" / "b.parquet", ROWS)
    write_table(folder / "year=2024" / "_temporary" / "c.parquet", ROWS)
    assert tables.open_table(folder).files == ("year=2024/a.parquet",)
    (folder / "_delta_log" / "a.cpp").touch()
    assert tables.open_table(folder) is tables.open_table(Path(sys.executable)) is None
