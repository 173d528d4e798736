from nanochat.judge.gaps import KINDS, brackets, make_gaps, spans
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


def test_pairs_of_brackets_ignore_what_is_quoted():
    inside = {CODE[begin + 1:end] for begin, end in brackets(CODE)[0]}
    assert {"int x", "x + 1, text", "x, ')'", "x < 3", "x > 1'000 && g(x, ')')"} <= inside
    assert {"\n        return g(x + 1, text);\n    ", CODE[CODE.index("{\n    const") + 1:-2]} <= inside
    assert not {"this", " quoted "} & inside


def test_spans_of_lines_are_whole_lines():
    lines = CODE.splitlines()
    assert [CODE[begin:end] for begin, end in spans(CODE, "single line")] == [
        line for line in lines if len(line.strip()) >= 5]
    assert "\n".join(lines[4:7]) in [CODE[begin:end] for begin, end in spans(CODE, "several lines")]


def test_gaps_are_cut_from_solutions_and_depend_on_the_seed_and_not_on_the_order_of_the_problems():
    problems = read_problems()
    gaps = make_gaps(problems, 20, seed=0)
    assert make_gaps(problems[::-1], 20, seed=0) == gaps != make_gaps(problems, 20, seed=1)
    assert [gap.kind for gap in gaps] == [kind for kind in KINDS for _ in range(20)]
    assert len({gap.name for gap in gaps}) == len(gaps)
    for gap in gaps:
        assert gap.prefix + gap.middle + gap.suffix == gap.problem.prompt + gap.problem.solution
        assert gap.prefix.startswith(gap.problem.prompt) and gap.middle
