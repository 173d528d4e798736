"""Search and scripts/solve.py with the real compiler and a tiny model, each line of which is wrong half of the time."""
import json
import random
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from dev import bench_search
from dev.bench_search import METHODS
from nanochat.common import BadInput
from nanochat.data.tokenizer import load_tokenizer
from nanochat.device.ranks import Dist
from nanochat.infer.engine import Engine
from nanochat.infer.sample import Sampling, default_max_tokens
from nanochat.judge.judge import PASSED
from nanochat.judge.problems import Problem
from nanochat.judge.search import COMPILES, UNFINISHED, Budget, Search
from nanochat.judge.writer import Writer
from nanochat.kernels.choose import get_kernels
from nanochat.model.config import GPTConfig
from nanochat.model.gpt import GPT
from scripts.solve import main
from tests.infer.test_engine import save_model
from tests.judge.test_sandbox import require_sandbox

PROMPT = "int f(int a) {\n"
TESTS = "int main() { return f(1) != 4; }\n"
STEPS = 120
LENGTH = 112


def example(tokenizer, generator):
    """A row of a function, half of the lines of which are wrong."""
    lines = [PROMPT[:-1]] + [f"    {name} += 1;" for name in generator.choices("ab", k=3)] + ["    return a;", "}", ""]
    bos = tokenizer.special("<|bos|>")
    ids = [bos, *tokenizer.encode("\n".join(lines)), bos]
    return ids[:-1] + [0] * (LENGTH + 1 - len(ids)), ids[1:] + [-1] * (LENGTH + 1 - len(ids))


@pytest.fixture(scope="module")
def learner(byte_tokenizer_dir):
    """A model that writes such functions, and its tokenizer."""
    tokenizer, generator = load_tokenizer(byte_tokenizer_dir), random.Random(0)
    config = GPTConfig(vocab_size=tokenizer.n_vocab, max_seq_len=256, n_layer=2, n_embd=64, n_head=2, n_kv_head=2,
                       window_pattern="L")
    model = GPT(config, get_kernels("current", "cpu")).init_weights(seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3)
    for _ in range(STEPS):
        ids, targets = map(torch.tensor, zip(*(example(tokenizer, generator) for _ in range(8)), strict=True))
        loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten(), ignore_index=-1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.requires_grad_(False).eval(), tokenizer


def find(learner, judge, method, tokens=400, calls=100, seed=0, tests="", max_tokens=100):
    """Searches with one method, and returns the Search."""
    writer = Writer(*learner, Dist("cpu", torch.device("cpu")), Sampling(1, max_tokens, 0.8, top_p=0.95, seed=seed))
    search = Search(writer, judge, Problem("f", PROMPT, tests), Budget(tokens, calls))
    METHODS[method](search)
    return search


@pytest.mark.slow
def test_the_tree_finds_what_compiles_at_a_budget_at_which_whole_functions_do_not(learner, judge):
    found = {method: [find(learner, judge, method, seed=seed, tokens=300).answer for seed in (0, 100, 200)]
             for method in METHODS}
    num = {method: sum(answer.compiles for answer in answers) for method, answers in found.items()}
    assert num["best_of"] < num["tree"] == 3, num
    for answer in [answer for answers in found.values() for answer in answers if answer.status != UNFINISHED]:
        assert (answer.status == COMPILES) == judge.check_syntax(PROMPT + answer.text + "\n}\n").passed


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_every_token_and_every_call_is_charged_and_no_budget_exceeded(learner, judge, method, monkeypatch):
    drawn, asked = [], set()
    draw, check = Engine._draw, judge.check_syntax
    monkeypatch.setattr(Engine, "_draw", lambda *args: drawn.append(draw(*args)) or drawn[-1])
    monkeypatch.setattr(judge, "check_syntax", lambda code: asked.add(code) or check(code))
    search = find(learner, judge, method, tokens=150, calls=7)
    assert search.num_tokens <= 150 and search.num_calls <= 7
    assert search.num_calls == len(asked)
    # a sample that has ended beside others that have not is given tokens that are no part of it
    assert search.num_tokens == len(drawn) if method != "tree" else search.num_tokens <= len(drawn)
    again = find(learner, judge, method, tokens=150, calls=7)
    assert (again.answer, again.num_tokens, again.num_calls) == (search.answer, search.num_tokens, search.num_calls)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_model_with_a_short_context_is_searched(learner, judge, method):
    config = replace(learner[0].config, max_seq_len=32)
    model = GPT(config, get_kernels("current", "cpu")).init_weights(seed=1).requires_grad_(False).eval()
    search = find((model, learner[1]), judge, method, tokens=100, max_tokens=default_max_tokens(32))
    assert 0 < search.num_tokens <= 100


def test_tests_decide_and_end_the_search(learner, judge):
    found = find(learner, judge, "tree", tests=TESTS)
    assert found.answer.status == PASSED and found.num_tokens < 400
    assert judge.judge(PROMPT + found.answer.text + "\n}\n", TESTS).passed
    wrong = find(learner, judge, "tree", tests="int main() { return f(1) != 9; }\n").answer
    assert wrong.status == "failed" and wrong.compiles


# scripts/solve.py


@pytest.fixture
def solve(learner, byte_tokenizer_dir, base_dir, capsys):
    """Runs the script, and returns its status and what it prints."""
    require_sandbox()
    model, tokenizer = learner
    save_model(base_dir / "checkpoints" / "tiny", model, tokenizer, STEPS)

    def run(*flags, main=main):
        status = main(["--checkpoint=tiny", f"--tokenizer_dir={byte_tokenizer_dir}", "--device_type=cpu", *flags])
        return status, capsys.readouterr()
    return run


def test_the_script_prints_code_that_compiles_and_its_verdict(solve, judge, tmp_path):
    (tmp_path / "tests.cpp").write_text(TESTS)
    flags = ["--prompt=int f(int a)", f"--tests={tmp_path / 'tests.cpp'}", "--budget=400"]
    status, output = solve(*flags)
    assert status == 0 and "// passed: " in output.out
    assert judge.judge(output.out, TESTS).passed
    assert "alive" in output.err and "a whole function: passed" in output.err
    assert solve(*flags)[1].out == output.out
    (tmp_path / "tests.cpp").write_text("int main() { return 1; }\n")
    status, output = solve("--prompt", PROMPT, f"--tests={tmp_path / 'tests.cpp'}", "--budget=20")
    assert status == 1 and "// unfinished: " in output.out


def test_the_bench_compares_the_methods_and_repeats_itself_exactly(solve, tmp_path):
    row = {"prompt": PROMPT, "declaration": PROMPT, "canonical_solution": "    return a;\n}\n", "test": TESTS}
    problems = tmp_path / "problems.jsonl"
    problems.write_text("".join(json.dumps(row | {"task_id": name}) + "\n" for name in "xy"))
    flags = [f"--problems={problems}", "--budget=30,60"]
    output = solve(*flags, main=bench_search.main)[1].out
    assert "| 60 | `tree` |" in output and "p = " in output
    assert solve(*flags, main=bench_search.main)[1].out == output


@pytest.mark.parametrize("flags, message", [
    (["--prompt=int f() {", "--prompt_file=f.cpp"], "give one of --prompt and --prompt_file"),
    (["--prompt= "], "--prompt is empty"),
    (["--prompt=// adds two numbers"], "--prompt ends with a comment: give the signature"),
    (["--prompt=itn f() {"], "--prompt does not compile by itself.*itn"),
    (["--prompt=int f() {", "--tests=missing.cpp"], "--tests=missing.cpp cannot be read: No such file"),
    (["--prompt=int f() {", "--budget=8"], "--budget=8"),
    (["--prompt=int f() {", "--max_tokens=200"], "--max_tokens=200 is more than half of the 256"),
])
def test_bad_input_is_refused(solve, flags, message):
    with pytest.raises(BadInput, match=message):
        solve(*flags)
