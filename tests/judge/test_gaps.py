import pytest

from nanochat.data.shards import open_shards
from nanochat.judge.gaps import DOCUMENT_KINDS, document_gaps, function_gaps, read_documents, spans
from nanochat.judge.problems import read_problems

CODE = """#include <string>
// if (this) { is a comment
int f(int x) {
    const char* text = "a ) quoted ( bracket";
    if (x > 1'000 && g(x, ')')) {
        return g(x + 1, text);
    }
    while (x < 3) ++x;
    return sizeof(x);
}
"""


@pytest.mark.parametrize("kind, expected", [
    ("arguments", ["int x", "x + 1, text", "x, ')'"]),
    ("condition", ["x < 3", "x > 1'000 && g(x, ')')"]),
    ("block", ["\n        return g(x + 1, text);\n    ", CODE[CODE.index("{\n    const") + 1:-2]]),
])
def test_spans_between_brackets_ignore_what_is_quoted(kind, expected):
    assert sorted(CODE[begin:end] for begin, end in spans(CODE, kind)) == sorted(expected)


def test_spans_of_lines_are_whole_lines():
    lines = CODE.splitlines()
    assert [CODE[begin:end] for begin, end in spans(CODE, "single line")] == [
        line for line in lines if len(line.strip()) >= 5]
    assert "\n".join(lines[4:7]) in [CODE[begin:end] for begin, end in spans(CODE, "several lines")]


def test_gaps_depend_on_the_texts_and_the_seed_and_not_on_their_order(corpus_dir):
    texts = list(read_documents(open_shards(sorted(corpus_dir.glob("*/*.parquet")))))
    gaps = document_gaps(texts, 5, seed=0)
    assert document_gaps(texts[::-1], 5, seed=0) == gaps != document_gaps(texts, 5, seed=1)
    assert [gap.kind for gap in gaps] == [kind for kind in DOCUMENT_KINDS for _ in range(5)]
    assert all(gap.prefix + gap.middle + gap.suffix in texts and gap.middle for gap in gaps)
    assert len({gap.name for gap in gaps}) == len(gaps)


def test_gaps_are_cut_from_solutions():
    for gap in function_gaps(read_problems(), 20, seed=0):
        problem = gap.problem
        assert gap.prefix + gap.middle + gap.suffix == problem.prompt + problem.solution
        assert gap.prefix.startswith(problem.prompt)
