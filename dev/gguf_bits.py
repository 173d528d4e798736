"""Bits per byte of a GGUF file by llama.cpp itself, on the solutions of code_eval's problems, beside this program's.

    python3 -m dev.gguf_bits CHECKPOINT FILE.gguf…    (four minutes for a file of SmolLM2-135M)
"""
import math
import sys
import tempfile
from pathlib import Path

import torch

from nanochat.checkpoint.on_disk import find_checkpoint
from nanochat.device.ranks import Dist
from nanochat.infer.load import load_model
from nanochat.judge.problems import read_problems
from tests.export.test_real_llama_cpp import served


def texts():
    return [problem.prompt + problem.solution for problem in read_problems()]


def of_llama_cpp(file, rows):
    """Returns the bits of all tokens but the first in each of `rows`."""
    bits = 0.0
    with tempfile.TemporaryDirectory() as folder, served(file, Path(folder) / "log") as ask:
        for ids in rows:
            for end in range(1, len(ids)):
                bits -= log_probability(ask, ids[:end], ids[end]) / math.log(2)
    return bits


def log_probability(ask, ids, token):
    """Returns that of the token after the ids. Most tokens are among the 100 likeliest ones."""
    for count in (100, 200_000):
        # Without ignore_eos, an answer that ends at once has no probabilities.
        answer = ask("/completion", prompt=ids, n_predict=1, n_probs=count, cache_prompt=True, temperature=0,
                     ignore_eos=True)
        for each in answer["completion_probabilities"][0]["top_logprobs"]:
            if each["id"] == token:
                return each["logprob"]
    raise ValueError(f"llama.cpp does not name token {token}")


@torch.no_grad()
def of_ours(model, rows):
    return sum(model(torch.tensor([ids[:-1]]), torch.tensor([ids[1:]])).sum().item() for ids in rows) / math.log(2)


def main(checkpoint, *files):
    model, tokenizer, _ = load_model(find_checkpoint(checkpoint), Dist("cpu", torch.device("cpu")))
    rows = [[tokenizer.bos_id, *tokenizer.encode(text)] for text in texts()]
    size = sum(len(text.encode()) for text in texts())
    print(f"{size:,} bytes, {sum(map(len, rows)) - len(rows):,} tokens", flush=True)
    print(f"{checkpoint}, in fp32: {of_ours(model, rows) / size:.5f} bits per byte", flush=True)
    for file in files:
        print(f"{file}: {of_llama_cpp(file, rows) / size:.5f} bits per byte", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
