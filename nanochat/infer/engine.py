"""Completes text."""
import time
from dataclasses import dataclass
from functools import cached_property

import torch

from nanochat.common import BadInput
from nanochat.infer.drafts import guess_next
from nanochat.infer.healing import MAX_TAKEN_BACK, Vocabulary
from nanochat.infer.quantize import Int8GPT
from nanochat.infer.readers import BLOCK, Reader, StaticReader
from nanochat.infer.sample import Sample, choose_token


@dataclass(frozen=True)
class Special:
    """A special token in a prompt, such as Special("<|fim_prefix|>")."""
    name: str


@dataclass
class Timings:
    """What a call of Engine.completions did. Times are of the clock, and those of XLA include compilation."""
    prompt_tokens: int = 0  # in the whole prompt
    read_tokens: int = 0  # of these, how many the model had to read; it still knew the others
    prompt_ms: float = 0.0
    predicted_tokens: int = 0  # in all samples
    predicted_ms: float = 0.0
    drafted_tokens: int = 0  # guesses that the model read
    accepted_tokens: int = 0  # guesses that were right


class Engine:
    """Not for several threads at the same time. The weights of the model must not change while it is used."""

    def __init__(self, model, tokenizer, dist):
        """model: a GPT on the device of `dist`."""
        self.model, self.tokenizer, self.dist = model, tokenizer, dist
        self.timings = Timings()

    @cached_property
    def _vocabulary(self):
        return Vocabulary(self.tokenizer)

    @cached_property
    def _reader(self):
        return Reader(self.model, self.dist.device)

    def complete(self, prompt, **options):
        """Returns the completion of `prompt`, without the prompt; options as in completions."""
        return self.completions(prompt, num_samples=1, **options)[0].text

    def completions(self, prompt, *, num_samples, max_tokens=-1, temperature=0.8, top_k=50, top_p=1.0, stop=(), seed=0,
                    on_text=lambda sample, text: None, on_cut=lambda num_tokens, num_read: None, heal=True, drafts=True,
                    keep_going=lambda: True, score=False):
        """Returns `num_samples` completions of `prompt`, as Samples, whose `text` is without the prompt. Afterwards,
        `timings` says what it took.

        prompt: str or bytes, which begins a document; or a list of str, bytes and Special, which is read as it stands.

        A completion ends with the document, before the first of the strings `stop`, or after `max_tokens` tokens (-1:
        256, or half of the model's context if that is less). If a text leaves no room for them, only its last part is
        read. Sample i is drawn with seed + i, so it does not depend on the number of samples.

        temperature: 0 always takes the likeliest token. top_k > 0: draws from the k likeliest tokens only; top_p < 1:
        draws from the likeliest tokens that have this probability together. on_text(sample, text): called with each
        new piece of text. on_cut(num_tokens, num_read): called if only the last `num_read` tokens of the prompt's
        `num_tokens` are read. heal: the prompt may end inside a token (see healing.py). drafts: guesses tokens, which
        changes no text, but its speed (see drafts.py); with 8 bits and for one sample only. keep_going(): asked before
        every token, and before every 64 of the prompt; once it returns False, the samples end as they are. score: adds
        up the `log_prob` of each sample.

        Raises BadInput if `max_tokens` is the whole context, or a list is longer than what they leave.
        """
        begun = time.monotonic()
        context = self.model.config.max_seq_len
        max_tokens = min(256, context // 2) if max_tokens == -1 else max_tokens
        if max_tokens >= context:
            raise BadInput(f"--max_tokens={max_tokens} leaves no room for a prompt: the model sees {context} tokens")
        ids, num_last = self._encode(prompt)
        room = context - max_tokens
        self.timings = Timings(prompt_tokens=len(ids))
        if len(ids) > room:
            if isinstance(prompt, list):
                raise BadInput(f"the prompt has {len(ids)} tokens, but the model sees {context} together with the "
                               f"{max_tokens} of --max_tokens: shorten it")
            on_cut(len(ids), room)
            ids = ids[-room:]
        tail = self._tail(ids, num_last) if heal else []  # what is taken back
        known = self.tokenizer.decode_bytes(tail)
        samples = [Sample(self.tokenizer, stop, max_tokens, lambda text, i=i: on_text(i, text), known)
                   for i in range(num_samples)]
        generators = [torch.Generator().manual_seed(seed + i) for i in range(num_samples)]

        def choose(i, logits):
            token = self._choose(logits, samples[i].known, generators[i], temperature, top_k, top_p)
            if score and not samples[i].known:
                samples[i].add_log_prob(float(logits[token] - logits[:self.tokenizer.n_vocab].logsumexp(0)))
            return token

        if num_samples == 1 and not self.dist.is_xla:
            self._generate_one(ids, tail, samples[0], lambda logits: choose(0, logits),
                               drafts and isinstance(self.model, Int8GPT), keep_going)
        else:
            self._generate_together(ids[:len(ids) - len(tail)], samples, choose, keep_going)
        self.timings.predicted_tokens = sum(sample.num_tokens for sample in samples)
        self.timings.predicted_ms = (time.monotonic() - begun) * 1000 - self.timings.prompt_ms
        return samples

    def _encode(self, prompt):
        """Returns the ids of a prompt, and how many of the last ones are text."""
        ids, num_last = [], 0
        for part in prompt if isinstance(prompt, list) else [Special("<|bos|>"), prompt]:
            is_special = isinstance(part, Special)
            new = [self.tokenizer.special(part.name)] if is_special else self.tokenizer.encode(part)
            ids, num_last = ids + new, 0 if is_special else len(new)
        if not ids:
            raise BadInput("the prompt is an empty list: begin it with Special('<|bos|>')")
        return ids, num_last

    def _tail(self, ids, num_last):
        """Returns the tokens at the end of a prompt that are taken back; the model needs one to read."""
        end = ids[len(ids) - min(num_last, len(ids) - 1, MAX_TAKEN_BACK):]
        number = self._vocabulary.num_taken_back([self.tokenizer.decode_bytes([token]) for token in end])
        return ids[len(ids) - number:]

    def _choose(self, logits, known, generator, *options):
        """Returns the id of the next token of a text that must go on with the bytes `known`."""
        if not known:
            return choose_token(logits[:self.tokenizer.n_vocab], generator, *options)
        fitting = torch.tensor(self._vocabulary.fitting(known))
        return int(fitting[choose_token(logits[fitting], generator, *options)])

    def _generate_one(self, ids, tail, sample, choose, drafts, keep_going):
        """Draws the tokens of `sample` after the prompt `ids`, of which `tail` is drawn again."""
        begun, reader, context = time.monotonic(), self._reader, self.model.config.max_seq_len
        num_read = reader.num_read
        rows = reader.read(ids, 1 + len(tail), keep_going)
        self.timings.prompt_ms = (time.monotonic() - begun) * 1000
        self.timings.read_tokens = reader.num_read - num_read
        ids, guesses = ids[:len(ids) - len(tail)], tail
        while rows is not None and not sample.ended:
            for row, guess in zip(rows, [*guesses, None], strict=True):
                if not keep_going():
                    sample.end("stopped")
                    return
                ids.append(choose(row))
                sample.add(ids[-1])
                if sample.ended or ids[-1] != guess:
                    break
                self.timings.accepted_tokens += guesses is not tail
            if sample.ended:
                return
            if len(ids) == context:
                sample.end("length")
                return
            room = min(context - len(ids), -len(ids) % BLOCK)  # no guess is worth a second block
            guesses = guess_next(ids)[:room] if drafts and not sample.known else []
            self.timings.drafted_tokens += len(guesses)
            rows = reader.read(ids + guesses, 1 + len(guesses), keep_going)
        sample.end("stopped")

    def _generate_together(self, ids, samples, choose, keep_going):
        """Draws the tokens of all samples after the prompt `ids`, one of each at a time."""
        begun, context = time.monotonic(), self.model.config.max_seq_len
        if self.dist.is_xla:
            reader, num_read = StaticReader(self.model, self.dist, len(samples)), len(ids)
            logits = reader.prefill(ids, range(len(samples)))
        else:
            reader, num_read = self._reader, -self._reader.num_read
            logits = reader.prefill(ids, len(samples), keep_going)
            num_read += reader.num_read
        self.timings.prompt_ms = (time.monotonic() - begun) * 1000
        self.timings.read_tokens = num_read
        rows = None if logits is None else logits.expand(len(samples), -1)
        for length in range(len(ids), context + 1):
            if rows is None or not keep_going():
                reason = "stopped"
                break
            chosen = [choose(i, row) for i, row in enumerate(rows)]
            for sample, token in zip(samples, chosen, strict=True):
                sample.add(token)
            reason = "length"
            if all(sample.ended for sample in samples) or length == context:
                break
            rows = reader.decode(chosen)
        for sample in samples:
            sample.end(reason)
