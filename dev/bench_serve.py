"""Measures how long an editor waits for a completion: a server on this CPU, to which text is typed:

    python3 -m dev.bench_serve --data_dir=some/parquet

The server computes in 8 bits, with random weights, in a process of its own. The bench types at random places of
documents of --data_dir, and asks for 16 tokens after each character, as llama.vim does. It prints the wall time of the
whole request over loopback. It needs pip install '.[serve]'.
"""
import http.client
import json
import random
import statistics
import time
from dataclasses import dataclass
from multiprocessing import get_context, parent_process

import torch

from dev.bench_replay import read_texts
from nanochat.common import BadInput, end_with_parent, flag, read_flags, run_script
from nanochat.data.shards import TextFlags
from nanochat.data.tokenizer import load_tokenizer
from nanochat.device.ranks import Dist
from nanochat.infer.engine import Engine
from nanochat.infer.quantize import Int8GPT
from nanochat.kernels.choose import get_kernels
from nanochat.model.config import GPTConfig
from nanochat.model.gpt import GPT
from nanochat.serve.completer import Completer

START_TIMEOUT_S = 600
REQUEST_TIMEOUT_S = 60
TOKENS = 16  # of a completion


@dataclass(frozen=True)
class Flags(TextFlags):
    depth: int = flag(16, "number of layers; the weights are random", at_least=1, at_most=64)
    max_seq_len: int = flag(1024, "positions of the model", at_least=128, at_most=65536)
    places: int = flag(4, "documents in which the bench types", at_least=1, at_most=10_000)
    characters: int = flag(15, "characters typed in each", at_least=2, at_most=1000)


def make_model(flags, vocab_size):
    """Returns a GPT of random weights."""
    config = GPTConfig(n_layer=flags.depth, vocab_size=vocab_size, max_seq_len=flags.max_seq_len)
    model = GPT(config, get_kernels("current", "cpu")).init_weights()
    for matrix in (model.attn_o, model.mlp_out, model.lm_head):  # zero, or nearly, before training
        torch.nn.init.normal_(matrix, 0.0, 0.02)
    return model.eval().requires_grad_(False)


def run_server(flags, sender):
    """Serves in this process until its parent ends. Sends the port."""
    end_with_parent(parent_process().pid)
    try:
        from nanochat.serve.server import Server, listen, make_runner
    except ImportError as error:
        print(f"error: {error.name} is not installed: pip install '.[serve]'")
        return
    tokenizer = load_tokenizer()
    model = Int8GPT(make_model(flags, tokenizer.n_vocab))
    completer = Completer(Engine(model, tokenizer, Dist("cpu", torch.device("cpu"))), True, copies=False)
    listening = listen(0)
    sender.send(listening.getsockname()[1])
    server = Server(completer, name="random", max_tokens=TOKENS, timeout_s=REQUEST_TIMEOUT_S)
    make_runner(server).run(sockets=[listening])


def ask(connection, body):
    """Returns the seconds that the server takes for a completion, and its answer. Raises BadInput if it refuses."""
    begun = time.perf_counter()
    connection.request("POST", "/infill", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    answer = response.read()
    seconds = time.perf_counter() - begun
    if response.status != 200:
        raise BadInput(f"the server answers {response.status}: {answer[:300].decode(errors='replace')}")
    return seconds, json.loads(answer)


def type_texts(port, texts, flags):
    """Types at random places of the texts, and prints how long the answers took."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=REQUEST_TIMEOUT_S)
    generator = random.Random(0)
    # At a new place the engine reads the whole prompt. The further characters change only its last line.
    first = []  # seconds
    further = []
    read = []  # tokens that the model read anew
    for _ in range(flags.places):
        text = generator.choice(texts)
        begin = generator.randrange(2000, len(text) - 1000 - flags.characters)
        for cursor in range(begin, begin + flags.characters):
            before, _, line = text[:cursor].rpartition("\n")
            body = {"input_prefix": f"{before}\n", "prompt": line, "input_suffix": text[begin + flags.characters:],
                    "n_predict": TOKENS}
            seconds, answer = ask(connection, body)
            if cursor == begin:
                first.append(seconds)
            else:
                further.append(seconds)
                read.append(answer["timings"]["prompt_n"])
    first_s = statistics.median(first)
    further_s = statistics.median(further)
    slow_s = sorted(further)[9 * (len(further) - 1) // 10]
    print(f"depth {flags.depth}, int8, {TOKENS} tokens: the first completion in a document takes {first_s:.2f} s; each "
          f"further character {further_s:.2f} s ({further_s / first_s:.0%} of it), p90 {slow_s:.2f} s, at most "
          f"{max(further):.2f} s; the model reads {statistics.median(read):.0f} tokens anew, at most {max(read)}")


def main(argv=None):
    (flags,) = read_flags(argv, __doc__, {Flags: "flags"})
    texts = read_texts(flags, least_characters=4000 + flags.characters)
    # The server has a process of its own, so that it does not share Python's lock with the client.
    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    server = context.Process(target=run_server, args=(flags, sender), daemon=True)
    server.start()
    # The server now has the only end that sends: if it dies, recv() raises EOFError instead of waiting for ever.
    sender.close()
    try:
        if not receiver.poll(START_TIMEOUT_S):
            raise BadInput(f"the server did not start within {START_TIMEOUT_S} s: try a smaller --depth")
        try:
            port = receiver.recv()
        except EOFError:
            raise BadInput("the server has ended: see above") from None
        type_texts(port, texts, flags)
    finally:
        server.terminate()
        server.join(10)


if __name__ == "__main__":
    run_script(main)
