"""Searches with the real compiler and a tiny model, each line of which is wrong half of the time."""
import random

import pytest
import torch
import torch.nn.functional as F

from nanochat.data.tokenizer import load_tokenizer
from nanochat.device.ranks import Dist
from nanochat.infer.engine import Engine
from nanochat.infer.evaluate import Sampling, Writer
from nanochat.infer.judge import PASSED, Judge
from nanochat.infer.problems import Problem
from nanochat.infer.search import COMPILES, METHODS, UNFINISHED, Budget, Search
from nanochat.kernels.choose import get_kernels
from nanochat.model.gpt import GPT, GPTConfig
from tests.infer.test_sandbox import require_sandbox

PROMPT = "int f(int a) {\n"
TESTS = "int main() { return f(1) != 4; }\n"
STEPS = 200
LENGTH = 112


def example(tokenizer, generator):
    """A row of a function, half of the lines of which are wrong: from left to right, or with a line at its end."""
    special, encode = tokenizer.special, tokenizer.encode
    lines = [PROMPT[:-1]] + [f"    {name} += 1;" for name in generator.choices("ab", k=3)] + ["    return a;", "}", ""]
    gap = generator.randrange(1, 4)
    if generator.random() < 0.5:
        ids = [special("<|bos|>"), *encode("\n".join(lines)), special("<|bos|>")]
    else:
        ids = [special("<|bos|>"), special("<|fim_prefix|>"), *encode("".join(f"{line}\n" for line in lines[:gap])),
               special("<|fim_suffix|>"), *encode("".join(f"\n{line}" for line in lines[gap + 1:])),
               special("<|fim_middle|>"), *encode(lines[gap]), special("<|file_sep|>")]
    return ids[:-1] + [0] * (LENGTH + 1 - len(ids)), ids[1:] + [-1] * (LENGTH + 1 - len(ids))


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def learner(one_thread, byte_tokenizer_dir):
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


@pytest.fixture(scope="module")
def judge():
    require_sandbox()
    with Judge() as judge:
        yield judge


def find(learner, judge, method, tokens=400, calls=100, seed=0, tests=""):
    """Searches with one method, and returns the Search."""
    writer = Writer(*learner, Dist("cpu", torch.device("cpu")), Sampling(1, 100, 0.8, 0.95, seed))
    search = Search(writer, judge, Problem("f", PROMPT, tests), Budget(tokens, calls))
    METHODS[method](search)
    return search


def test_the_tree_and_repair_find_what_compiles_at_a_budget_at_which_whole_functions_do_not(learner, judge):
    found = {method: [find(learner, judge, method, seed=seed).answer for seed in range(0, 400, 100)]
             for method in METHODS}
    num = {method: sum(answer.compiles for answer in answers) for method, answers in found.items()}
    assert num["sample"] <= num["best_of"] < num["repair"] and num["tree"] == 4, num
    for answer in [answer for answers in found.values() for answer in answers if answer.status != UNFINISHED]:
        assert (answer.status == COMPILES) == judge.check_syntax(PROMPT + answer.text + "\n}\n").passed


@pytest.mark.parametrize("method", METHODS)
def test_every_token_and_every_call_is_charged_and_no_budget_exceeded(learner, judge, method, monkeypatch):
    drawn, asked = [], set()
    choose, check = Engine._choose, judge.check_syntax
    monkeypatch.setattr(Engine, "_choose", lambda *args: drawn.append(choose(*args)) or drawn[-1])
    monkeypatch.setattr(judge, "check_syntax", lambda code: asked.add(code) or check(code))
    search = find(learner, judge, method, tokens=150, calls=7)
    assert search.num_tokens <= 150 and search.num_calls <= 7
    assert search.num_calls == len(asked)
    # a sample that has ended beside others that have not is given tokens that are no part of it
    assert search.num_tokens == len(drawn) if method != "tree" else search.num_tokens <= len(drawn)
    again = find(learner, judge, method, tokens=150, calls=7)
    assert (again.answer, again.num_tokens, again.num_calls) == (search.answer, search.num_tokens, search.num_calls)


def test_tests_decide_and_end_the_search(learner, judge):
    found = find(learner, judge, "tree", tests=TESTS)
    assert found.answer.status == PASSED and found.num_tokens < 400
    assert judge.judge(PROMPT + found.answer.text + "\n}\n", TESTS).passed
    wrong = find(learner, judge, "tree", tokens=200, tests="int main() { return f(1) != 9; }\n").answer
    assert wrong.status == "failed" and wrong.compiles
