"""A tiny model that has learnt to fill in the middle of one C++ file, and a server of it."""
import threading
import time
from contextlib import contextmanager
from dataclasses import replace

import httpx
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from nanochat.data.tokenizer import load_tokenizer
from nanochat.device.ranks import Dist
from nanochat.infer.engine import Engine
from nanochat.infer.load import load_model
from nanochat.kernels.choose import get_kernels
from nanochat.model.config import GPTConfig
from nanochat.model.gpt import GPT
from nanochat.serve.completer import Completer
from nanochat.serve.server import Server, listen, make_runner
from tests.infer.test_engine import make_model, save_model

SOURCE = """\
int add(int a, int b) {
    return a + b;
}

int twice(int a) {
    return add(a, a);
}
"""
BEFORE, AFTER = SOURCE.split("    return a + b;")
REST = "urn a + b;"  # what the model has learnt to write between them after "    ret"
STEPS = 150


def example(tokenizer, generator, length):
    """A row of SOURCE with a middle that begins at a line's start and ends at an end of line, and what to predict."""
    breaks = [at for at, character in enumerate(SOURCE) if character == "\n"]
    begin, end = sorted(generator.choice(len(breaks), 2, replace=False))
    prefix, middle = SOURCE[:breaks[begin] + 1], SOURCE[breaks[begin] + 1:breaks[end]]
    special, encode = tokenizer.special, tokenizer.encode
    ids = [special("<|bos|>"), special("<|fim_prefix|>"), *encode(prefix), special("<|fim_suffix|>"),
           *encode(SOURCE[breaks[end]:]), special("<|fim_middle|>"), *encode(middle), special("<|file_sep|>")]
    targets = [-1] * (len(ids) - len(encode(middle)) - 2) + ids[-len(encode(middle)) - 1:]
    return ids[:-1] + [0] * (length - len(ids) + 1), targets + [-1] * (length - len(targets))


@pytest.fixture(scope="session")
def gap_run(tmp_path_factory, byte_tokenizer_dir):
    """The base directory of a run `tiny` whose model fills in the middle of SOURCE."""
    tokenizer = load_tokenizer(byte_tokenizer_dir)
    config = GPTConfig(vocab_size=tokenizer.n_vocab, max_seq_len=256, n_layer=2, n_embd=64, n_head=2, n_kv_head=2,
                       window_pattern="L", layer_gates=False, value_embeddings="off", rotary_base=10_000.0)
    model = GPT(config, get_kernels("current", "cpu")).init_weights(seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3)
    generator = np.random.default_rng(0)
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = 6e-3 * (1 - step / STEPS)  # else what it has learnt depends on the threads
        ids, targets = map(torch.tensor, zip(*(example(tokenizer, generator, 160) for _ in range(4)), strict=True))
        loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten(), ignore_index=-1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    base_dir = tmp_path_factory.mktemp("base")
    save_model(base_dir / "checkpoints" / "tiny", model, tokenizer, STEPS, flags={"fim_rate": 1.0})
    return base_dir


@pytest.fixture(scope="session")
def completer(gap_run, byte_tokenizer_dir):
    """Tests that share it use it one after the other."""
    dist = Dist("cpu", torch.device("cpu"))
    path = gap_run / "checkpoints" / "tiny" / f"step_{STEPS:06d}"
    model, tokenizer, _ = load_model(path, dist, tokenizer_dir=byte_tokenizer_dir)
    return Completer(Engine(model, tokenizer, dist), fim=True)


@contextmanager
def serving(completer, max_tokens=64, timeout_s=60.0):
    """Yields an httpx.Client of a server in a thread of this process, and the Server."""
    server = Server(completer, name="tiny", max_tokens=max_tokens, timeout_s=timeout_s)
    with listen(0) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        runner = make_runner(server)
        thread = threading.Thread(target=runner.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            with httpx.Client(base_url=url, timeout=60) as client:
                yield client, server
        finally:
            runner.should_exit = True
            thread.join(timeout=60)
            server.thread.stop()
    assert not thread.is_alive(), "the server does not end"


@pytest.fixture(scope="module")
def served(completer):
    with serving(replace(completer, copies=False)) as found:  # so the text is what the model has learnt
        yield found


@pytest.fixture
def client(served):
    return served[0]


class SlowCompleter:
    """Stands before a real one and takes its time for every token, so that a test can act while it generates."""
    extra_tokens = 0

    def __init__(self, completer):
        self.completer = completer
        self.begun, self.go_on, self.asked = threading.Event(), threading.Event(), 0
        self.prefixes, self.extras = [], []

    def complete(self, prefix, suffix, extra, options, on_text, keep_going):
        self.prefixes.append(prefix)
        self.extras.append(extra)

        def slow_keep_going():
            self.asked += 1
            self.begun.set()
            self.go_on.wait(timeout=0.04)
            return keep_going()

        return self.completer.complete(prefix, suffix, extra, options, on_text, slow_keep_going)


@pytest.fixture(scope="module")
def untrained(byte_tokenizer_dir):
    """A completer whose model does not know when to end."""
    tokenizer = load_tokenizer(byte_tokenizer_dir)
    model = make_model(vocab_size=tokenizer.n_vocab)
    return Completer(Engine(model, tokenizer, Dist("cpu", torch.device("cpu"))), True)


@pytest.fixture
def slow(untrained):
    slow = SlowCompleter(untrained)
    with serving(slow) as (client, server):
        yield slow, client, server
        slow.go_on.set()


class Requests:
    """Requests in threads of their own; `answers` gets the answer of each by its name."""

    def __init__(self, client):
        self.client, self.answers, self._threads = client, {}, {}

    def send(self, name, path, body):
        def ask():
            self.answers[name] = self.client.post(path, json=body)

        self._threads[name] = threading.Thread(target=ask)
        self._threads[name].start()

    def statuses(self):
        """Waits for all answers, and returns {name: status}."""
        for thread in self._threads.values():
            thread.join(60)
        return {name: answer.status_code for name, answer in self.answers.items()}


def wait_until(condition, describe=str):
    """describe: returns what is there instead, for the error after a minute."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, describe()
        time.sleep(0.005)
