"""Measures how long an editor waits for a completion: a server on this CPU, to which text is typed.

    python3 -m scripts.bench_serve --data_dir=some/parquet

The server is that of scripts.serve, with --quantize=int8 and random weights, in a process of its own. At random places
of documents of --data_dir, one character after the other is typed, and after each one 16 tokens are asked for, as
llama.vim does. Times are those of the clock, of the whole request over loopback. Needs pip install '.[serve]'.
"""
import http.client
import json
import random
import statistics
import threading
import time
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from pathlib import Path

from nanochat.common import BadInput, end_with_parent, expand_path, flag, read_flags, run_script
from nanochat.data.tokenizer import load_tokenizer
from nanochat.infer.engine import Engine
from nanochat.infer.quantize import Int8GPT
from nanochat.serve.infill import Infiller
from scripts.bench_generate import CPU, make_model, read_texts
from scripts.serve import ServerFlags, listen

START_TIMEOUT_S, REQUEST_TIMEOUT_S = 600, 60
TOKENS = 16  # of a completion


@dataclass(frozen=True)
class Flags:
    data_dir: Path = flag(Path(), "parquet shards with a column text, whose documents are typed", of=expand_path,
                          required=True)
    depth: int = flag(16, "number of layers; the weights are random", at_least=1, at_most=64)
    max_seq_len: int = flag(1024, "positions of the model", at_least=128, at_most=65536)
    places: int = flag(4, "documents in which something is typed", at_least=1, at_most=10_000)
    characters: int = flag(15, "characters typed in each", at_least=1, at_most=1000)


def main(argv=None):
    (flags,) = read_flags(argv, __doc__, {Flags: "flags"})
    need = 4000 + flags.characters
    texts = [text for text in read_texts(flags.data_dir) if len(text) > need]
    if not texts:
        raise BadInput(f"--data_dir={flags.data_dir} has no document of more than {need} characters: name another")
    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    server = context.Process(target=run_server, args=(flags, sender), daemon=True)
    server.start()
    sender.close()
    try:
        if not receiver.poll(START_TIMEOUT_S):
            raise BadInput(f"the server has not started after {START_TIMEOUT_S} s: try a smaller --depth")
        try:
            port = receiver.recv()
        except EOFError:
            raise BadInput("the server has ended: see above") from None
        measure(port, texts, flags)
    finally:
        server.terminate()
        server.join(10)


def run_server(flags, sender):
    end_with_parent(parent_process().pid)
    try:
        import uvicorn

        from nanochat.serve.server import Server, make_app
    except ImportError as error:
        print(f"error: there is no {error.name}: pip install '.[serve]'")
        return
    tokenizer = load_tokenizer()
    infiller = Infiller(Engine(Int8GPT(make_model(flags, tokenizer.n_vocab)), tokenizer, CPU), True)
    listening = listen(ServerFlags(port=0))
    sender.send(listening.getsockname()[1])
    app = make_app(Server(infiller, name="random", device="cpu", max_tokens=TOKENS, timeout_s=REQUEST_TIMEOUT_S))
    uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False)).run(sockets=[listening])


def measure(port, texts, flags):
    generator, connection = random.Random(0), connect(port)
    first, warm, read, short, health, generating = [], [], [], 0, [], threading.Event()
    done = threading.Event()
    watcher = threading.Thread(target=ask_health, args=(port, health, generating, done))
    watcher.start()
    try:
        for _ in range(flags.places):
            text = generator.choice(texts)
            begin = generator.randrange(2000, len(text) - 1000 - flags.characters)
            suffix = text[begin + flags.characters:]
            for cursor in range(begin, begin + flags.characters):
                lines, _, line = text[:cursor].rpartition("\n")
                body = {"input_prefix": f"{lines}\n", "prompt": line, "input_suffix": suffix, "n_predict": TOKENS}
                generating.set()
                begun = time.perf_counter()
                answer = ask(connection, "POST", "/infill", json.dumps(body))
                seconds = time.perf_counter() - begun
                generating.clear()
                if cursor == begin:
                    first.append(seconds)
                else:
                    warm.append(seconds)
                    read.append(answer["timings"]["prompt_n"])
                    short += answer["timings"]["predicted_n"] < TOKENS
    finally:
        done.set()
        watcher.join()
    print(f"depth {flags.depth}, int8, {TOKENS} tokens: the first completion in a document takes "
          f"{statistics.median(first):.2f} s (median of {len(first)})")
    if warm:
        print(f"each further character: p50 {quantile(warm, 0.5):.2f} s, p90 {quantile(warm, 0.9):.2f} s, at most "
              f"{max(warm):.2f} s; the model reads {statistics.median(read):.0f} tokens anew, at most {max(read)} "
              f"({len(warm)} requests, {short} of which ended earlier)")
    if health:
        print(f"/health while the model works: p50 {1000 * quantile(health, 0.5):.1f} ms, at most "
              f"{1000 * max(health):.1f} ms ({len(health)} requests)")


def connect(port):
    return http.client.HTTPConnection("127.0.0.1", port, timeout=REQUEST_TIMEOUT_S)


def ask(connection, method, path, body=None):
    connection.request(method, path, body, {"Content-Type": "application/json"} if body else {})
    response = connection.getresponse()
    answer = response.read()
    if response.status != 200:
        raise BadInput(f"the server answers {response.status}: {answer[:300].decode(errors='replace')}")
    return json.loads(answer)


def ask_health(port, health, generating, done):
    connection = connect(port)
    while not done.wait(0.1):
        if generating.is_set():
            begun = time.perf_counter()
            ask(connection, "GET", "/health")
            health.append(time.perf_counter() - begun)


def quantile(values, share):
    return sorted(values)[int(share * (len(values) - 1) + 0.5)]


if __name__ == "__main__":
    run_script(main)
