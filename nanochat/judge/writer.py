"""Lets a model write code, and measures the bits that it needs for a text."""
import difflib
import math
import os
from dataclasses import replace

import torch

from nanochat.device.programs import one_program
from nanochat.infer.engine import Engine
from nanochat.infer.prompt import BOS, cut_to, encode_prompt, gap_prompt
from nanochat.judge.gaps import ONE_LINE, Gap
from nanochat.judge.problems import STOP, size
from nanochat.model.layers import IGNORE_INDEX


class Writer:
    """Writes code with a model: one greedy sample, and further ones drawn by `sampling`."""

    def __init__(self, model, tokenizer, dist, sampling):
        self.model = model
        self.tokenizer = tokenizer
        self.dist = dist
        self.sampling = replace(sampling, top_k=0, stop=(STOP,))
        self.engine = Engine(model, tokenizer, dist)

    @property
    def greedy(self):
        return replace(self.sampling, num_samples=1, temperature=0)

    def write(self, item):
        """Returns the records of a problem or a Gap."""
        return self.fill_gap(item) if isinstance(item, Gap) else self.write_functions(item)

    def write_functions(self, problem):
        """Returns the records of a problem: of the greedy sample, and of the drawn ones."""
        samples = self.engine.completions(problem.prompt, self.greedy)
        if self.sampling.num_samples:
            samples += self.engine.completions(problem.prompt, self.sampling)
        records = [{"name": problem.name, "group": problem.difficulty, "sample": i, "text": sample.text}
                   for i, sample in enumerate(samples)]
        if problem.solution:
            records[0] |= {"bits": self.bits(problem.prompt, problem.solution), "bytes": size(problem.solution)}
        return records

    def fill_gap(self, gap):
        """Returns the record of a Gap, in a list. The prompt is that of an editor."""
        max_tokens = self.sampling.max_tokens
        room = self.model.config.max_seq_len - max_tokens
        prompt = gap_prompt(self.tokenizer, gap.prefix, gap.suffix, room)
        stop = ("\n",) if gap.kind == ONE_LINE else ()
        [sample] = self.engine.completions(prompt.parts, replace(self.greedy, stop=stop))
        middle = cut_to(self.tokenizer, gap.middle, slice(max_tokens))
        return [{"name": gap.name, "group": gap.kind, "sample": 0, "text": sample.text,
                 "exact": sample.text.strip() == gap.middle.strip(),
                 "similarity": similarity(sample.text, gap.middle),
                 "bits": self.bits(prompt.line, middle, prompt.head), "bytes": size(middle),
                 "bits_without_suffix": self.bits(prompt.before, middle)}]

    def bits(self, prompt, text, head=(BOS,)):
        """Returns the bits that the model needs for `text` after `head` and `prompt`: of both texts less of the prompt,
        because a token may span their border."""
        first, _ = encode_prompt(self.tokenizer, head)
        alone = self.tokenizer.encode(prompt)
        together = self.tokenizer.encode(prompt + text)
        # The common tokens at the beginning cost the same bits in both, and count in neither.
        num_known = len(first) + len(os.path.commonprefix([together, alone]))
        return self.bits_of(first + together, num_known) - self.bits_of(first + alone, num_known)

    @torch.no_grad()
    def bits_of(self, ids, num_known):
        """Returns the bits of ids[num_known:] after the ids before, in parts if they do not fit into the context. Of a
        longer text, the model sees the last part."""
        if len(ids) == num_known:
            return 0.0
        context = self.model.config.max_seq_len
        if len(ids) - num_known > context:
            cut = len(ids) - (context + 1) // 2
            return self.bits_of(ids[:cut], num_known) + self.bits_of(ids, cut)
        # The text loses its beginning, and num_known counts from the cut. Nothing predicts the first token.
        num_known = max(1, num_known - max(0, len(ids) - context - 1))
        ids = ids[-context - 1:]
        length = min(max(128, 1 << (len(ids) - 2).bit_length()), context)  # few lengths, because XLA compiles each
        # (1, length) each: the target at a position is the token after it. IGNORE_INDEX adds nothing to the loss. No
        # earlier position sees the padding at the end.
        inputs = torch.zeros(1, length, dtype=torch.long)
        targets = torch.full((1, length), IGNORE_INDEX)
        inputs[0, :len(ids) - 1] = torch.tensor(ids[:-1])
        targets[0, num_known - 1:len(ids) - 1] = torch.tensor(ids[num_known:])
        with one_program(self.dist, f"bits {length}"):
            nats = self.model(inputs.to(self.dist.device), targets.to(self.dist.device)).sum()
        return round(nats.item() / math.log(2), 3)


def similarity(text, other):
    """Returns the similarity of two texts, 0 to 1: twice the common characters over all (Ratcliff, Obershelp)."""
    return round(difflib.SequenceMatcher(None, text.strip(), other.strip(), autojunk=False).ratio(), 4)
