"""Measures completion on this CPU: reading a prompt, generating tokens, and drafts, with and without 8 bits.

    python3 -m scripts.bench_generate --data_dir=some/parquet

Rounds alternate between the engines, so that other work on the machine falls on all of them; a ratio is the median of
the rounds' ratios. Times are of the clock and, where the machine has other work, of the CPU. The engine called "static"
computes as on XLA: its cache is copied for each token, and each token looks at all positions of the context.

Beside them stands llama.cpp, if it is installed, with a model of the same shapes and random weights in Q8_0:

    pip install xllamacpp==2026.10.11549 gguf==0.19.0

Its layers are those of "arcee", the nearest that it has: without a norm of queries and keys.

Drafts are measured on C++ from --data_dir, whose lines are to be filled in. They depend on the text and not on how good
the model is: it computes as always, and is then given the next token of the text as the likeliest one.
"""
import importlib.util
import math
import random
import statistics
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch

from nanochat.common import BadInput, expand_path, flag, read_flags, run_script
from nanochat.data.shards import list_shards
from nanochat.data.tokenizer import load_tokenizer
from nanochat.device.ranks import Dist
from nanochat.infer.engine import Engine, Special
from nanochat.infer.quantize import Int8GPT
from nanochat.infer.readers import Reader
from nanochat.kernels.choose import get_kernels
from nanochat.model.gpt import GPT, KVCache, config_for_depth

CPU = Dist("cpu", torch.device("cpu"))


@dataclass(frozen=True)
class Flags:
    depth: int = flag(16, "number of layers; the weights are random", at_least=1, at_most=64)
    max_seq_len: int = flag(1024, "positions of the model", at_least=128, at_most=65536)
    prompt_tokens: int = flag(300, "tokens of the prompt", at_least=1)
    tokens: int = flag(24, "tokens generated in a round", at_least=1)
    rounds: int = flag(5, "number of rounds", at_least=1)
    threads: int = flag(0, "threads; 0: as PyTorch chooses", at_least=0, at_most=1024)
    data_dir: Path | None = flag(None, "parquet shards with a column text, to measure drafts on; none: no drafts",
                                 of=expand_path)
    documents: int = flag(30, "documents in each of which some lines are filled in", at_least=1)


@dataclass
class Spent:
    """Time that something took; cpu_s is NaN where only the clock is known."""
    wall_s: float = 0.0
    cpu_s: float = 0.0

    @contextmanager
    def measure(self):
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        self.wall_s += time.perf_counter() - wall
        self.cpu_s += time.process_time() - cpu

    def __str__(self):
        return f"{1000 * self.wall_s:8.1f}" + ("" if math.isnan(self.cpu_s) else f" ({1000 * self.cpu_s:8.1f})")


def main(argv=None):
    (flags,) = read_flags(argv, __doc__, {Flags: "flags"})
    if flags.prompt_tokens + flags.tokens > flags.max_seq_len:
        raise BadInput(f"--prompt_tokens={flags.prompt_tokens} and --tokens={flags.tokens} are more than "
                       f"--max_seq_len={flags.max_seq_len}")
    tokenizer = load_tokenizer()
    texts = read_texts(flags.data_dir) if flags.data_dir else []
    model = make_model(flags, tokenizer.n_vocab)
    torch.set_num_threads(flags.threads or torch.get_num_threads())
    quantized = Prompter(model)
    print(f"depth {flags.depth}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}, "
          f"VNNI: {'yes' if torch.cpu._is_vnni_supported() else 'no'}; ms, and in brackets ms of CPU time")
    measures = {name: measure_reader(reader) for name, reader in {
        "static fp32": Static(model), "fp32": Reader(model, CPU.device), "int8": Reader(quantized, CPU.device)}.items()}
    if all(map(importlib.util.find_spec, ("gguf", "xllamacpp"))):
        measures["llama.cpp Q8_0"] = measure_llama_cpp(model.config)
    else:
        print("llama.cpp is not compared: xllamacpp and gguf are not installed")
    compare_engines(flags, measures)
    if texts:
        compare_drafts(quantized, tokenizer, texts, flags.documents)


def make_model(flags, vocab_size):
    config = config_for_depth(flags.depth, vocab_size=vocab_size, max_seq_len=flags.max_seq_len)
    model = GPT(config, get_kernels("current", "cpu")).init_weights()
    for matrix in (model.attn_o, model.mlp_out, model.lm_head):  # which are zero or nearly so before training
        torch.nn.init.normal_(matrix, 0.0, 0.02)
    return model.eval().requires_grad_(False)


def read_texts(data_dir):
    return [text for path in list_shards(data_dir)[:4]
            for text in pq.read_table(path, columns=["text"])["text"].to_pylist() if text]


# -----------------------------------------------------------------------------
# Reading a prompt, and tokens


def compare_engines(flags, measures):
    """measures: {name: function of (ids, length of the prompt) that returns two Spent: the prompt's and a token's}."""
    ids = torch.randint(0, 60_000, (flags.prompt_tokens + flags.tokens,)).tolist()
    rounds = []
    for number in range(-1, flags.rounds):  # the first warms up
        spent = {name: measure(ids, flags.prompt_tokens) for name, measure in measures.items()}
        if number >= 0:
            rounds.append(spent)
            print(f"round {number + 1}: " + "   ".join(
                f"{name} prompt {prompt} token {token}" for name, (prompt, token) in spent.items()), flush=True)
    first = next(iter(measures))
    for part, what in enumerate((f"a prompt of {flags.prompt_tokens}", "a token")):
        for name in measures:
            of_name, of_first = ([spent[key][part] for spent in rounds] for key in (name, first))
            ratio, cpu_ratio = (statistics.median(getattr(a, clock) / getattr(b, clock)
                                                  for a, b in zip(of_first, of_name, strict=True))
                                for clock in ("wall_s", "cpu_s"))
            median = 1000 * statistics.median(spent.wall_s for spent in of_name)
            print(f"{what}, {name}: {median:.1f} ms ({1000 / median:.1f} a second), {ratio:.2f} times as fast as "
                  f"{first}" + ("" if math.isnan(cpu_ratio) else f" ({cpu_ratio:.2f} in CPU time)"))


class Static:
    """A reader in shapes that never change."""

    def __init__(self, model):
        self.model, self.ids = model, []

    @torch.no_grad()
    def read(self, ids):
        config, begin = self.model.config, len(self.ids)
        if not begin:
            self.cache = KVCache(config, 1, config.max_seq_len, torch.float32, "cpu")
        new = ids[begin:] if begin else ids + [0] * min((1 << (len(ids) - 1).bit_length()) - len(ids),
                                                        config.max_seq_len - len(ids))
        self.ids = list(ids)
        hidden = self.model.hidden(torch.tensor([new]), self.cache, torch.arange(begin, begin + len(new)))
        return self.model.logits(hidden[:, len(ids) - begin - 1])


def measure_reader(reader):
    def measure(ids, prompt_tokens):
        of_prompt, of_tokens = Spent(), Spent()
        reader.ids = []  # it remembers nothing
        with of_prompt.measure():
            reader.read(ids[:prompt_tokens])
        with of_tokens.measure():
            for length in range(prompt_tokens + 1, len(ids) + 1):
                reader.read(ids[:length])
        count = len(ids) - prompt_tokens
        return of_prompt, Spent(of_tokens.wall_s / count, of_tokens.cpu_s / count)
    return measure


def measure_llama_cpp(config):
    """Starts llama.cpp within this process. Its times are those that it reports: of the clock only."""
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.n_ctx, parameters.n_parallel, parameters.verbosity = config.max_seq_len, 1, 0
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder:
        parameters.model.path = f"{folder}/model.gguf"
        write_gguf(config, parameters.model.path)
        server = xllamacpp.Server(parameters)

    def measure(ids, prompt_tokens):
        answer = server.handle_completions({
            "prompt": ids[:prompt_tokens], "n_predict": len(ids) - prompt_tokens, "ignore_eos": True,
            "cache_prompt": False, "temperature": 0})
        times = answer["timings"]
        if (times["prompt_n"], times["predicted_n"]) != (prompt_tokens, len(ids) - prompt_tokens):
            raise AssertionError(f"llama.cpp did something else: {times}")
        return tuple(Spent(ms / 1000, float("nan")) for ms in (times["prompt_ms"], times["predicted_per_token_ms"]))
    return measure


def write_gguf(config, path):
    """Writes a model of random weights in Q8_0."""
    import gguf

    writer, width = gguf.GGUFWriter(path, "arcee"), config.n_embd
    writer.add_context_length(config.max_seq_len)
    writer.add_embedding_length(width)
    writer.add_block_count(config.n_layer)
    writer.add_feed_forward_length(4 * width)
    writer.add_head_count(config.n_head)
    writer.add_head_count_kv(config.n_kv_head)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"t{id}" for id in range(config.vocab_size)])
    writer.add_token_merges(["t 1"])
    generator = np.random.default_rng(0)

    def add(name, rows, columns):
        matrix = generator.standard_normal((rows, columns), dtype=np.float32) * 0.02
        writer.add_tensor(name, gguf.quants.quantize(matrix, gguf.GGMLQuantizationType.Q8_0),
                          raw_dtype=gguf.GGMLQuantizationType.Q8_0)

    keys, hidden = config.n_kv_head * config.head_dim, 4 * width
    add("token_embd.weight", config.vocab_size, width)
    add("output.weight", config.vocab_size, width)
    writer.add_tensor("output_norm.weight", np.ones(width, np.float32))
    for layer in range(config.n_layer):
        for name, rows, columns in (("attn_q", width, width), ("attn_k", keys, width), ("attn_v", keys, width),
                                    ("attn_output", width, width), ("ffn_up", hidden, width),
                                    ("ffn_down", width, hidden)):
            add(f"blk.{layer}.{name}.weight", rows, columns)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(width, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# -----------------------------------------------------------------------------
# Drafts


class Prompter(Int8GPT):
    """Computes as an Int8GPT does, and its likeliest token is then that of the text `ids`."""

    def __init__(self, model):
        super().__init__(model)
        self.ids, self.num_read = [], 0

    def hidden(self, ids, cache, positions):
        self.num_read = positions.stop
        return super().hidden(ids, cache, positions)

    def logits(self, hidden):
        logits = super().logits(hidden)
        for row in range(len(logits)):
            position = self.num_read - len(logits) + row + 1
            if position < len(self.ids):
                logits[row, self.ids[position]] += 1000.0
        return logits


def compare_drafts(prompter, tokenizer, texts, num_documents):
    """Fills in 1 to 30 lines of each of some texts, with drafts and without."""
    engine = Engine(prompter, tokenizer, CPU)
    generator, spent = random.Random(0), {True: Spent(), False: Spent()}
    done = tokens = drafted = accepted = 0
    for text in generator.sample(texts, len(texts)):
        lines = text.splitlines(keepends=True)
        if len(lines) < 60:
            continue
        count = generator.randint(1, 30)
        begin = generator.randrange(len(lines) - count)
        parts = ["".join(lines[:begin])[-1500:], "".join(lines[begin + count:])[:500]]
        middle = tokenizer.encode("".join(lines[begin:begin + count])) + [tokenizer.special("<|file_sep|>")]
        prompt = [Special("<|bos|>"), Special("<|fim_prefix|>"), parts[0], Special("<|fim_suffix|>"), parts[1],
                  Special("<|fim_middle|>")]
        ids = [id for part in prompt for id in (
            [tokenizer.special(part.name)] if isinstance(part, Special) else tokenizer.encode(part))]
        if len(ids) + len(middle) > prompter.config.max_seq_len:
            continue
        prompter.ids = ids + middle
        options = {"temperature": 0, "max_tokens": len(middle)}
        engine.complete(prompt, **options | {"max_tokens": 0})  # reads the prompt
        found = {}
        for drafts in generator.sample([True, False], 2):
            with spent[drafts].measure():
                found[drafts] = engine.complete(prompt, drafts=drafts, **options)
            drafted, accepted = drafted + engine.timings.drafted_tokens, accepted + engine.timings.accepted_tokens
        if not found[True] == found[False] == tokenizer.decode(middle[:-1]):
            raise AssertionError("drafts changed the text")
        done, tokens = done + 1, tokens + len(middle)
        if done == num_documents:
            break
    if not done:
        raise BadInput("--data_dir has no text of 60 lines that fits: name another, or leave it out")
    print(f"drafts, int8: {tokens:,} tokens in {done} documents, {1000 * spent[True].wall_s / tokens:.1f} ms a token, "
          f"{spent[False].wall_s / spent[True].wall_s:.2f} times as fast as without "
          f"({spent[False].cpu_s / spent[True].cpu_s:.2f} in CPU time); {accepted:,} of {drafted:,} guesses were "
          "right; the text is the same")


if __name__ == "__main__":
    run_script(main)
