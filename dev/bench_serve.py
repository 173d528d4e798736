"""Measures how long an editor waits for a completion: a server on this CPU, to which text is typed:

    python3 -m dev.bench_serve --data_dir=some/parquet

The server computes in 8 bits, in a process of its own, from a checkpoint of random weights that the bench writes. The
bench types at random places of documents of --data_dir, and asks for 16 tokens after each character, as llama.vim does,
but streamed. It prints the wall times over loopback, to the first text and to the end of the answer, and the server's
peak memory. It needs pip install '.[serve]'.
"""
import http.client
import json
import random
import re
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from multiprocessing import get_context, parent_process
from pathlib import Path

import torch

from dev.bench_replay import read_texts
from nanochat.checkpoint.meta import Meta, rng_state
from nanochat.checkpoint.saver import save_checkpoint
from nanochat.common import BadInput, end_with_parent, flag, read_flags, run_script
from nanochat.data.shards import TextFlags
from nanochat.data.tokenizer import load_tokenizer
from nanochat.device.ranks import Dist
from nanochat.infer.engine import Engine
from nanochat.infer.load import load_model
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
    threads: int = flag(2, "of the server", at_least=1, at_most=256)


def save_model(flags, run_dir):
    """Saves a checkpoint of a GPT of random weights. Returns its path."""
    tokenizer = load_tokenizer()
    config = GPTConfig(n_layer=flags.depth, vocab_size=tokenizer.n_vocab, max_seq_len=flags.max_seq_len)
    model = GPT(config, get_kernels("current", "cpu")).init_weights()
    for matrix in (model.attn_o, model.mlp_out, model.lm_head):  # zero, or nearly, before training
        torch.nn.init.normal_(matrix, 0.0, 0.02)
    meta = Meta(step=1, config=asdict(config), tokenizer_sha256=tokenizer.sha256, data_fingerprint="", flags={},
                rng=rng_state())
    return save_checkpoint(run_dir, model.state_dict(), {}, meta, num_lanes=0)


def run_server(flags, path, sender):
    """Serves in this process until its parent ends. Sends the port."""
    end_with_parent(parent_process().pid)
    try:
        from nanochat.serve.server import Server, listen, make_runner
    except ImportError as error:
        print(f"error: {error.name} is not installed: pip install '.[serve]'")
        return
    torch.set_num_threads(flags.threads)
    dist = Dist("cpu", torch.device("cpu"))
    model, tokenizer, _ = load_model(path, dist, quantize="int8")
    completer = Completer(Engine(model, tokenizer, dist), True, copies=False)
    listening = listen(0)
    sender.send(listening.getsockname()[1])
    server = Server(completer, name="random", max_tokens=TOKENS, timeout_s=REQUEST_TIMEOUT_S)
    make_runner(server).run(sockets=[listening])


def ask(connection, body):
    """Returns the seconds to the first text of a completion and to its end, and its answer. Raises BadInput if the
    server refuses."""
    begun = time.perf_counter()
    connection.request("POST", "/infill", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise BadInput(f"the server answers {response.status}: {response.read()[:300].decode(errors='replace')}")
    response.readline()
    first_s = time.perf_counter() - begun
    last = re.findall(rb"data: ({.*})\n", response.read())[-1]
    return first_s, time.perf_counter() - begun, json.loads(last)


def percentiles(seconds):
    ordered = sorted(seconds)
    p50, p95 = (ordered[share * (len(ordered) - 1) // 100] for share in (50, 95))
    return f"p50 {p50 * 1000:.0f}, p95 {p95 * 1000:.0f}, at most {ordered[-1] * 1000:.0f} ms"


def type_texts(port, texts, flags):
    """Types at random places of the texts, and prints how long the answers took."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=REQUEST_TIMEOUT_S)
    generator = random.Random(0)
    # At a new place the engine reads the whole prompt. The further characters change only its last line.
    new_places = []  # seconds to the first text
    first = []  # the same for further characters
    whole = []
    read = []  # tokens that the model read anew
    for _ in range(flags.places):
        text = generator.choice(texts)
        begin = generator.randrange(2000, len(text) - 1000 - flags.characters)
        for cursor in range(begin, begin + flags.characters):
            before, _, line = text[:cursor].rpartition("\n")
            body = {"input_prefix": f"{before}\n", "prompt": line, "input_suffix": text[begin + flags.characters:],
                    "n_predict": TOKENS, "stream": True}
            first_s, whole_s, answer = ask(connection, body)
            if cursor == begin:
                new_places.append(first_s)
            else:
                first.append(first_s)
                whole.append(whole_s)
                read.append(answer["timings"]["prompt_n"])
    print(f"depth {flags.depth}, int8, {flags.threads} threads, {len(first)} characters typed in {flags.places} places")
    print(f"first text at a new place: {percentiles(new_places)}")
    print(f"first text after a character: {percentiles(first)}; the model reads {statistics.median(read):.0f} tokens "
          f"anew, at most {max(read)}")
    print(f"{TOKENS} tokens after a character: {percentiles(whole)}")


def main(argv=None):
    (flags,) = read_flags(argv, __doc__, {Flags: "flags"})
    texts = read_texts(flags, least_characters=4000 + flags.characters)
    with tempfile.TemporaryDirectory() as folder:
        measure(flags, texts, save_model(flags, Path(folder)))


def measure(flags, texts, path):
    """Serves the checkpoint at `path`, and prints the figures."""
    # The server has a process of its own, so that it does not share Python's lock with the client.
    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    server = context.Process(target=run_server, args=(flags, path, sender), daemon=True)
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
        peak_kb = int(re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{server.pid}/status").read_text())[1])
        print(f"peak memory of the server: {peak_kb / 1000:.0f} MB")
    finally:
        server.terminate()
        server.join(10)


if __name__ == "__main__":
    run_script(main)
