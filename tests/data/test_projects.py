"""Rows that hold a project: its files in dependency order, and how they become tokens."""
import re
from dataclasses import asdict

import numpy as np
import pyarrow.parquet as pq
import pytest

from dev.bench_replay import read_pieces
from nanochat.checkpoint.saver import save_checkpoint
from nanochat.common import BadInput
from nanochat.data.fim import SAMPLE
from nanochat.data.projects import encode_document, require_files
from nanochat.data.shards import TextFlags, TextPiece, list_shards, open_shards
from nanochat.data.tokenizer import load_tokenizer
from nanochat.infer.eval_rows import GapRows, ProjectRows, require_packed
from scripts import base_eval
from tests.checkpoint.states import make_meta
from tests.corpus.projects import cpp, prepare, read, shard_hashes
from tests.data.documents import open_loader
from tests.infer.test_engine import make_model


def test_separators_become_the_token_between_files_only_where_a_shard_says_so():
    tokenizer = load_tokenizer()
    text = "\0a.h\nint x;\n\0b.cpp\nint y;\n"
    pieces = TextPiece(0, 0, True, text, True), TextPiece(1, 0, True, text), TextPiece(2, 1, True, text[1:], True)
    packed, plain, later = (encode_document(piece, tokenizer) for piece in pieces)
    separator = tokenizer.special("<|file_sep|>")
    files = [tokenizer.encode(part) for part in ("a.h\nint x;\n", "b.cpp\nint y;\n")]
    assert list(packed) == [tokenizer.bos_id, separator, *files[0], separator, *files[1]]
    assert list(plain) == [tokenizer.bos_id, *tokenizer.encode(text)]
    assert list(later) == [tokenizer.bos_id, *files[0], separator, *files[1]]


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """The corpora of three projects: of files, and packed by one worker and by two."""
    folder = tmp_path_factory.mktemp("projects")
    for name in "abv":
        for number in range(12):
            path = folder / "in" / name / f"file{number:02d}.{'h' if number % 2 else 'cpp'}"
            path.parent.mkdir(parents=True, exist_ok=True)
            includes = "" if number % 2 else f'#include "file{11 - number:02d}.h"\n'
            path.write_text(includes + cpp(f"{name}{number}"))
    flags = [f"--projects_dir={folder / 'in'}", "--val_projects=v", "--shard_bytes=20000"]
    prepare(folder / "files", *flags)
    prepare(folder / "one", *flags, "--pack=project")
    prepare(folder / "two", *flags, "--pack=project", "--workers=2")
    return folder


def test_a_packed_corpus_has_the_same_files_and_the_same_bytes_for_any_number_of_workers(corpora):
    assert shard_hashes(corpora / "one") == shard_hashes(corpora / "two")
    for side, projects in (("base_data_v3", {"a", "b"}), ("val", {"v"})):
        documents, files = read(corpora / "one", side), read(corpora / "files", side)
        assert {document["source"] for document in documents} == projects and len(documents) == len(projects)
        parts = [part.partition("\n")[::2] for document in documents for part in document["text"].split("\0")[1:]]
        assert sorted(parts) == sorted((file["path"], file["text"]) for file in files)
        assert [path for path, _ in parts[:4]] == ["file11.h", "file00.cpp", "file09.h", "file02.cpp"]
    shard = next((corpora / "one" / "val").iterdir())
    assert pq.read_metadata(shard).metadata[b"pack"] == b"project"


def test_rows_of_projects_hold_file_separators_and_resume(corpora):
    tokenizer, paths = load_tokenizer(), list_shards(corpora / "one" / "base_data_v3")

    def rows(count, **options):
        with open_loader(paths, tokenizer, seq_len=1024, num_lanes=4, **options) as loader:
            return [next(loader) for _ in range(count)]

    batches = rows(6)
    assert sum(int((batch.rows == tokenizer.special("<|file_sep|>")).sum()) for batch in batches) > 5
    [again] = rows(1, state=batches[3].state)
    assert np.array_equal(again.rows, batches[4].rows)
    with pytest.raises(BadInput, match="--pack=project.* fill in the middle"):
        rows(1, fim_rate=0.5)
    with pytest.raises(BadInput, match="--pack=project.* training a tokenizer"):
        require_files(open_shards(paths), "training a tokenizer")
    with pytest.raises(BadInput, match="--pack=project.* this benchmark"):
        read_pieces(TextFlags(str(corpora / "one" / "val")), 1)
    with pytest.raises(BadInput, match="--project: "):
        require_packed(open_shards(list_shards(corpora / "files" / "val")), "project")


def test_a_file_given_its_project_counts_the_same_tokens_as_alone(corpora):
    tokenizer, shards = load_tokenizer(), open_shards(list_shards(corpora / "one" / "val"))
    found = {}
    for given in ("project", "nothing"):
        rows = ProjectRows(shards, tokenizer, 2048, 4, 1 << 20, given)
        found[given] = [(batch.rows.clone(), rows.view(batch.rows)[1]) for batch in rows]
        assert rows.num_files == 11  # all but the first
    for (together, counts), (alone, counts_alone) in zip(*found.values(), strict=True):
        assert together.shape == alone.shape == (4, 2049)
        for row in range(4):
            own = together[row][counts[row]]
            assert own.equal(alone[row][counts_alone[row]])
            text = tokenizer.decode(own.tolist())
            assert not len(own) or text.count("{ return ") >= 20 and "\0" not in text and ".cpp\n" not in text
        assert int((together >= 0).sum()) > 1.5 * int((alone >= 0).sum())


def test_base_eval_says_what_the_project_of_a_file_is_worth(corpora, byte_tokenizer_dir, tmp_path, capsys):
    tokenizer = load_tokenizer(byte_tokenizer_dir)
    model = make_model(vocab_size=tokenizer.n_vocab)
    meta = make_meta(20, config=asdict(model.config), tokenizer_sha256=tokenizer.sha256)
    trained = save_checkpoint(tmp_path / "run", model.state_dict(), {}, meta, num_lanes=0)
    flags = [f"--checkpoint={trained}", f"--tokenizer_dir={byte_tokenizer_dir}", "--device_type=cpu", "--project"]
    base_eval.main([*flags, f"--data_dir={corpora}/one/val"])
    said = capsys.readouterr().out
    numbers = re.search(r"11 files, .* given their project ([\d.]+) bits per byte, alone ([\d.]+) ", said)
    assert numbers and 1 < float(numbers[1]) < 20 and numbers[1] != numbers[2]
    for others, message in (([f"--data_dir={corpora}/files/val"], "holds other documents"),
                            ([f"--data_dir={corpora}/one/val", "--max_seq_len=4"], "the path fits into 2 tokens"),
                            ([f"--data_dir={corpora}/one/val", "--fim"], "are different evaluations")):
        with pytest.raises(BadInput, match=message):
            base_eval.main([*flags, *others])


@pytest.fixture(scope="module")
def with_context(corpora):
    flags = [f"--projects_dir={corpora / 'in'}", "--val_projects=v", "--shard_bytes=20000", "--pack=context"]
    prepare(corpora / "context", *flags)
    prepare(corpora / "context2", *flags, "--workers=2")
    return corpora / "context"


def test_a_corpus_with_context_has_the_rows_of_one_of_files(corpora, with_context):
    assert shard_hashes(with_context) == shard_hashes(corpora / "context2")
    documents = {document["path"]: document for document in read(with_context, "val")}
    context = documents["file00.cpp"]["context"].split("\0")
    assert context[-1].partition("\n")[::2] == ("file01.h", documents["file01.h"]["text"]) and len(context) > 2
    rows = []
    for name in ("context", "files"):
        with open_loader(list_shards(corpora / name / "base_data_v3"), load_tokenizer(), seq_len=256, num_lanes=2,
                         fim_rate=0.5) as loader:
            rows.append([next(loader).rows for _ in range(20)])
    assert all(map(np.array_equal, *rows))


def test_gaps_stand_after_files_of_their_project_and_such_runs_resume(with_context):
    tokenizer, paths = load_tokenizer(), list_shards(with_context / "base_data_v3")
    separator, prefix = map(tokenizer.special, ("<|file_sep|>", "<|fim_prefix|>"))

    def steps(count, **options):
        with open_loader(paths, tokenizer, seq_len=512, num_lanes=4, fim_rate=1.0, fim_context=0.5,
                         **options) as loader:
            return [next(loader) for _ in range(count)], loader.stats

    most_chars = 0.5 * 513 * len(SAMPLE) / len(tokenizer.encode(SAMPLE))
    batches, stats = steps(40)
    assert stats["dropped_share"] <= 0.01
    documents = [(document["path"], document["text"]) for document in read(with_context, "base_data_v3")]
    with_files = without = 0
    for row in np.concatenate([batch.rows for batch in batches]).tolist():
        for begin in (place for place, token in enumerate(row[:-1]) if token == tokenizer.bos_id):
            without += row[begin + 1] == prefix
            if row[begin + 1] == separator and prefix in row[begin:]:
                files = tokenizer.decode(row[begin + 2:row.index(prefix, begin)]).split("<|file_sep|>")
                assert sum(map(len, files)) <= most_chars
                for file in files:
                    path, _, text = file.partition("\n")
                    assert text and any(name == path and whole.startswith(text) for name, whole in documents)
                with_files += 1
    assert with_files > without > 10
    [again], _ = steps(1, state=batches[30].state)
    assert np.array_equal(again.rows, batches[31].rows)
    halves = [steps(5, batch_size=2, world_size=2, rank=rank)[0] for rank in range(2)]
    for batch, *parts in zip(batches, *halves, strict=False):
        assert np.array_equal(np.stack([part.rows for part in parts], 1).reshape(batch.rows.shape), batch.rows)
    with pytest.raises(BadInput, match="is for fim_context 0.5, but this run has 0"):
        with open_loader(paths, tokenizer, seq_len=512, num_lanes=4, fim_rate=1.0, state=batches[0].state):
            pass


def test_base_eval_says_what_a_context_is_worth(corpora, with_context, byte_tokenizer_dir, tmp_path, capsys):
    tokenizer = load_tokenizer(byte_tokenizer_dir)
    shards = open_shards(list_shards(with_context / "base_data_v3"))
    found = {}
    for given in ("own", "other", "none"):
        rows = GapRows(shards, tokenizer, 2048, 4, 1 << 20, given)
        found[given] = [tokenizer.decode([token for token in row if token >= 0])
                        for batch in rows for row in batch.rows.tolist() if row[0] >= 0]
        assert rows.num_files == len(found[given]) > 10
    separator, prefix = "<|file_sep|>", "<|fim_prefix|>"
    sources = {document["text"]: document["source"] for document in read(with_context, "base_data_v3")}
    for own, other, none in zip(*found.values(), strict=True):
        assert own.partition(prefix)[2] == other.partition(prefix)[2] == none.partition(prefix)[2]
        assert none.startswith(f"<|bos|>{prefix}")
        [source], [stranger] = ({project for text, project in sources.items()
                                 if row.partition(prefix)[0].rpartition("\nint f")[2] in text} for row in (own, other))
        assert source != stranger and own.startswith(f"<|bos|>{separator}file")
    model = make_model(vocab_size=tokenizer.n_vocab)
    meta = make_meta(20, config=asdict(model.config), tokenizer_sha256=tokenizer.sha256)
    trained = save_checkpoint(tmp_path / "run", model.state_dict(), {}, meta, num_lanes=0)
    flags = [f"--checkpoint={trained}", f"--tokenizer_dir={byte_tokenizer_dir}", "--device_type=cpu", "--context"]
    base_eval.main([*flags, f"--data_dir={with_context}/base_data_v3"])
    assert re.search(r"\d+ middles of .* given their project [\d.]+ .* another [\d.]+ .* none [\d.]+",
                     capsys.readouterr().out)
    for data_dir, message in ((f"{with_context}/val", "and another project before it"),
                              (f"{corpora}/files/val", "--context: .* holds other documents")):
        with pytest.raises(BadInput, match=message):
            base_eval.main([*flags, f"--data_dir={data_dir}"])
