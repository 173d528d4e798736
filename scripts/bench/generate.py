"""Measures completion on this CPU: reading a prompt, generating tokens, and drafts, with and without 8 bits:

    python3 -m scripts.bench generate --data_dir=some/parquet

The weights are random. Drafts are measured by filling in lines of the C++ in --data_dir. They depend on the text, and
not on the model: it computes as always, and then the next token of the text is made its likeliest one.
"""
import random
from dataclasses import dataclass

import torch

from nanochat.common import BadInput, flag, read_flags
from nanochat.data.projects import require_files
from nanochat.data.shards import TextFlags, open_text, whole_pieces
from nanochat.data.tokenizer import load_tokenizer
from nanochat.device.ranks import Dist
from nanochat.infer.engine import Engine
from nanochat.infer.prompt import encode_prompt, gap_prompt
from nanochat.infer.quantize import Int8GPT
from nanochat.infer.readers import Reader
from nanochat.kernels.choose import get_kernels
from nanochat.model.config import GPTConfig
from nanochat.model.gpt import GPT
from scripts.bench.rounds import Clock, compare

CPU = Dist("cpu", torch.device("cpu"))


@dataclass(frozen=True)
class Flags(TextFlags):
    depth: int = flag(16, "number of layers", at_least=1, at_most=64)
    max_seq_len: int = flag(1024, "positions of the model", at_least=128, at_most=65536)
    prompt_tokens: int = flag(300, "tokens of the prompt", at_least=1)
    tokens: int = flag(24, "tokens generated in a round", at_least=1)
    rounds: int = flag(5, "rounds, and texts that are continued with and without drafts", at_least=1)


def make_model(flags, vocab_size):
    """Returns a GPT of random weights."""
    config = GPTConfig(n_layer=flags.depth, vocab_size=vocab_size, max_seq_len=flags.max_seq_len)
    model = GPT(config, get_kernels("current", "cpu")).init_weights()
    for matrix in (model.attn_o, model.mlp_out, model.lm_head):  # zero, or nearly, before training
        torch.nn.init.normal_(matrix, 0.0, 0.02)
    return model.eval().requires_grad_(False)


def read_pieces(flags, least_characters):
    """Returns the TextPieces in the first shards of TextFlags that have so many characters. Raises BadInput if none
    has."""
    shards = open_text(flags)[:4]
    require_files(shards, "this benchmark")
    pieces = [piece for piece in whole_pieces(shards) if len(piece.text.strip()) > least_characters]
    if not pieces:
        raise BadInput(f"--data_dir={flags.data_dir} has no document of {least_characters} characters: name another")
    return pieces


class Reading:
    """Reads a prompt, and tokens behind it."""

    def __init__(self, model, ids, prompt_tokens):
        self.reader = Reader(model, CPU.device)
        self.ids = ids
        self.prompt_tokens = prompt_tokens

    def prompt(self):
        self.reader.ids = []  # it remembers nothing
        clock = Clock()
        self.reader.read(self.ids[:self.prompt_tokens])
        return clock.spent()

    def token(self):
        # The reader computes only what follows the beginning that a text shares with the one before. So the prompt is
        # not measured, and each further text is one token more.
        self.reader.read(self.ids[:self.prompt_tokens])
        clock = Clock()
        for length in range(self.prompt_tokens + 1, len(self.ids) + 1):
            self.reader.read(self.ids[:length])
        return clock.spent(len(self.ids) - self.prompt_tokens)


# Drafts

LINES = 15  # of a gap


class Prompter(Int8GPT):
    """Computes as an Int8GPT does, and then makes the next token of the text `ids` its likeliest one."""

    def __init__(self, model):
        super().__init__(model)
        self.ids = []
        self.num_read = 0

    def hidden(self, ids, cache, positions):
        self.num_read = positions.stop
        return super().hidden(ids, cache, positions)

    def logits(self, hidden):
        # Computed all the same, so that the time is a real model's.
        logits = super().logits(hidden)
        for row in range(len(logits)):
            # Row r of R rows belongs to position num_read - R + r, and predicts the token after it. A thousand exceeds
            # every logit.
            position = self.num_read - len(logits) + row + 1
            if position < len(self.ids):
                logits[row, self.ids[position]] += 1000.0
        return logits


class Filling:
    """Fills in lines of one TextPiece after the other, with drafts or without."""

    def __init__(self, model, tokenizer, pieces, drafts):
        self.engine = Engine(model, tokenizer, CPU)
        self.tokenizer = tokenizer
        self.pieces = iter(pieces)
        self.drafts = drafts
        self.drafted = 0
        self.accepted = 0

    def token(self):
        lines = next(self.pieces).text.splitlines(keepends=True)
        begin = (len(lines) - LINES) // 2
        middle = "".join(lines[begin:begin + LINES])[:1000]
        of_middle = [*self.tokenizer.encode(middle), self.tokenizer.special("<|file_sep|>")]
        room = self.engine.model.config.max_seq_len - len(of_middle)
        before = "".join(lines[:begin])[-1500:]
        after = "".join(lines[begin + LINES:])[:500]
        prompt = gap_prompt(self.tokenizer, before, after, room).parts
        ids, _ = encode_prompt(self.tokenizer, prompt)
        self.engine.model.ids = ids + of_middle
        self.engine.complete(prompt, temperature=0, max_tokens=0)  # reads the prompt
        clock = Clock()
        found = self.engine.complete(prompt, temperature=0, max_tokens=len(of_middle), drafts=self.drafts)
        # A draft may change the time, and never the text.
        if found != middle:
            raise AssertionError(f"with drafts={self.drafts} the text differs")
        self.drafted += self.engine.timings.drafted_tokens
        self.accepted += self.engine.timings.accepted_tokens
        return clock.spent(len(of_middle))


def compare_drafts(model, tokenizer, pieces, rounds):
    # Both contenders fill in the same texts, one in each round; the first round warms up.
    pieces = random.Random(0).choices(pieces, k=rounds + 1)
    drafting = Filling(model, tokenizer, pieces, drafts=True)
    contenders = {"without drafts": Filling(model, tokenizer, pieces, drafts=False).token, "drafts": drafting.token}
    compare("a token, int8", contenders, rounds, reference="without drafts")
    print(f"{drafting.accepted:,} of {drafting.drafted:,} guesses were right; the text is the same")


def main(argv=None):
    (flags,) = read_flags(argv, __doc__, {Flags: "flags"})
    if flags.prompt_tokens + flags.tokens > flags.max_seq_len:
        raise BadInput(f"--prompt_tokens={flags.prompt_tokens} and --tokens={flags.tokens} exceed "
                       f"--max_seq_len={flags.max_seq_len}: lower one of them")
    tokenizer = load_tokenizer()
    pieces = read_pieces(flags, least_characters=3000) if flags.data_dir else []
    model = make_model(flags, tokenizer.n_vocab)
    quantized = Prompter(model)
    ids = torch.randint(0, 60_000, (flags.prompt_tokens + flags.tokens,)).tolist()
    fp32 = Reading(model, ids, flags.prompt_tokens)
    int8 = Reading(quantized, ids, flags.prompt_tokens)
    print(f"depth {flags.depth}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}")
    compare(f"a prompt of {flags.prompt_tokens}", {"fp32": fp32.prompt, "int8": int8.prompt}, flags.rounds, "fp32")
    compare("a token", {"fp32": fp32.token, "int8": int8.token}, flags.rounds, "fp32")
    if pieces:
        compare_drafts(quantized, tokenizer, pieces, flags.rounds)
