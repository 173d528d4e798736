"""Completes text."""
import time
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch

from nanochat.common import BadInput
from nanochat.data.tokenizer import Tokenizer
from nanochat.device.ranks import Dist
from nanochat.infer.prompt import BOS, MAX_TAKEN_BACK, Vocabulary, encode_prompt
from nanochat.infer.quantize import Int8GPT
from nanochat.infer.readers import BLOCK, Reader, StaticReader
from nanochat.infer.sample import Sample, Sampling, choose_token, default_max_tokens, ignore, never_stop

# (tokens that must recur, tokens then guessed): the longer the repetition, the further it can be trusted.
GUESSES = ((4, 7), (3, 7), (2, 7), (1, 3))


@dataclass
class Timings:
    """What a call of Engine.completions did. Times are wall-clock times; on XLA they include compilation."""
    prompt_tokens: int = 0  # in the whole prompt
    read_tokens: int = 0  # of these, how many the model read; the others were in its cache
    prompt_ms: float = 0.0
    predicted_tokens: int = 0  # in all samples
    predicted_ms: float = 0.0


@dataclass
class Engine:
    """Completes text with a model. Not thread-safe. The weights of the model must not change meanwhile."""
    model: object  # a GPT on the device of `dist`
    tokenizer: Tokenizer
    dist: Dist
    timings: Timings = field(default_factory=Timings)  # of the last call

    @cached_property
    def _vocabulary(self):
        return Vocabulary(self.tokenizer)

    @cached_property
    def _reader(self):
        return Reader(self.model, self.dist.device)

    def complete(self, prompt, **sampling):
        """Returns the completion of `prompt`, without the prompt; sampling: fields of Sampling."""
        return self.completions(prompt, Sampling(**sampling))[0].text

    def completions(self, prompt, sampling, on_text=ignore, on_cut=ignore, keep_going=never_stop, copy=("", 0.0)):
        """Returns the completions of `prompt`, as Samples, whose `text` excludes the prompt. Sets `timings`.

        prompt: str or bytes, which begins a document; or a list of str, bytes and Special, which is read verbatim.

        A completion ends with the document, before the first of `sampling.stop`, or after `sampling.max_tokens` tokens.
        If a text leaves no room for them, only its last part is read.

        on_text(sample, text): called with each new piece of text. on_cut(num_tokens, num_read): called if only the last
        `num_read` of the prompt's `num_tokens` tokens are read. keep_going(): called before every token, and before
        every 64 of the prompt; once it returns False, the samples end as they are. copy: (text, nats); the text is the
        completion if the model gives each of its tokens a log-probability of at least -nats. Several samples, and XLA,
        do without.

        Raises BadInput if `max_tokens` fills the context, or a list does not fit into the rest.
        """
        begun = time.monotonic()
        context = self.model.config.max_seq_len
        max_tokens = sampling.max_tokens
        if max_tokens == -1:
            max_tokens = default_max_tokens(context)
        if max_tokens >= context:
            raise BadInput(f"--max_tokens={max_tokens} leaves no room for a prompt: the model sees {context} tokens")
        ids, num_last = self._prompt_ids(prompt, max_tokens, on_cut)
        tail = [] if sampling.no_heal else self._tail(ids, num_last)  # the end of the prompt, which is drawn again
        known = self.tokenizer.decode_bytes(tail)
        samples = [Sample(self.tokenizer, sampling.stop, max_tokens, partial(on_text, i), known, sampling.seed + i)
                   for i in range(sampling.num_samples)]
        if sampling.num_samples == 1 and not self.dist.is_xla:
            text, nats = copy
            copied = self.tokenizer.encode(known + text.encode()) if text else []
            if len(copied) > max_tokens:
                copied = []
            self._generate_one(ids[:len(ids) - len(tail)], tail, samples[0], sampling, keep_going, copied, nats)
        else:
            self._generate_together(ids[:len(ids) - len(tail)], samples, sampling, keep_going)
        self.timings.predicted_tokens = sum(sample.num_tokens for sample in samples)
        self.timings.predicted_ms = (time.monotonic() - begun) * 1000 - self.timings.prompt_ms
        return samples

    def _prompt_ids(self, prompt, max_tokens, on_cut):
        """Returns the ids of a prompt to read before `max_tokens` tokens, and how many of the last ones are text.
        Resets `timings`."""
        is_list = isinstance(prompt, list)
        if not is_list:
            prompt = [BOS, prompt]
        ids, num_last = encode_prompt(self.tokenizer, prompt)
        if not ids:
            raise BadInput("the prompt is an empty list: begin it with Special('<|bos|>')")
        self.timings = Timings(prompt_tokens=len(ids))
        context = self.model.config.max_seq_len
        room = context - max_tokens
        if len(ids) > room and is_list:
            raise BadInput(f"the prompt has {len(ids)} tokens, but the model sees {context} including the "
                           f"{max_tokens} of --max_tokens: shorten it")
        if len(ids) > room:
            on_cut(len(ids), room)
        return ids[-room:], num_last

    def _tail(self, ids, num_last):
        """Returns the last tokens of a prompt, which are drawn again. Never its first: the model must read one."""
        end = ids[len(ids) - min(num_last, len(ids) - 1, MAX_TAKEN_BACK):]
        number = self._vocabulary.num_taken_back([self.tokenizer.decode_bytes([token]) for token in end])
        return ids[len(ids) - number:]

    def _draw(self, sample, logits, sampling):
        """Draws the next token of `sample` from its logits (V,), adds it, and returns its id."""
        options = sample.generator, sampling.temperature, sampling.top_k, sampling.top_p
        # The end of the prompt is drawn again, only among the tokens that agree with its bytes.
        if sample.known:
            fitting = torch.tensor(self._vocabulary.fitting(sample.known))
            token = int(fitting[choose_token(logits[fitting], *options)])
        else:
            logits = logits[:self.tokenizer.n_vocab]
            if self.tokenizer.holes:
                logits = logits.index_fill(0, torch.tensor(self.tokenizer.holes), -torch.inf)
            token = choose_token(logits, *options)
            if sampling.score:
                sample.add_log_prob(float(logits[token] - logits.logsumexp(0)))
        sample.add(token)
        return token

    def _begin_reading(self, read, *arguments):
        """Calls read(*arguments), which reads a prompt, and returns its result. Measures it."""
        begun = time.monotonic()
        num_read = self._reader.num_read
        logits = read(*arguments)
        self.timings.prompt_ms = (time.monotonic() - begun) * 1000
        self.timings.read_tokens = self._reader.num_read - num_read
        return logits

    def _least_log_prob(self, rows, tokens, known):
        """Returns the log-probability of the unlikeliest of `tokens`, by the logits before each. Their first bytes are
        `known`, the end of the prompt."""
        found = []
        for row, token in zip(rows, tokens, strict=False):
            # As _draw would draw it: a token that repeats the prompt's end competes only with those that fit there.
            others = row[:self.tokenizer.n_vocab]
            if known:
                others = row[self._vocabulary.fitting(known)]
                known = known[len(self.tokenizer.decode_bytes([token])):]
            found.append(row[token] - others.logsumexp(0))
        return min(found)

    def _generate_one(self, ids, tail, sample, sampling, keep_going, copy, nats):
        """Draws the tokens of `sample` after the prompt `ids` + `tail`, whose `tail` is drawn again; or takes `copy`,
        the tokens of tail and copied text, if there are any and none is less likely than -`nats`."""
        context = self.model.config.max_seq_len
        drafts = isinstance(self.model, Int8GPT)
        guesses = copy or tail  # which is read as if it had been guessed
        rows = self._begin_reading(self._reader.read, ids + guesses, 1 + len(guesses), keep_going)
        self.timings.read_tokens = max(self.timings.read_tokens - len(guesses) + len(tail), 0)  # those of the prompt
        if copy and rows is not None and self._least_log_prob(rows, copy, sample.known) >= -nats:
            for token in copy:
                sample.add(token)
            sample.end("end")
        # Row i holds the logits after the first i guesses, so the rows are valid as long as each drawn token is the
        # next guess.
        while rows is not None and not sample.ended:
            for row, guess in zip(rows, [*guesses, None], strict=True):
                if not keep_going():
                    sample.end("stopped")
                    return
                ids.append(self._draw(sample, row, sampling))
                if sample.ended or ids[-1] != guess:
                    break
            if sample.ended:
                return
            if len(ids) == context:
                sample.end("length")
                return
            guesses = []
            if drafts and not sample.known:
                room = min(context - len(ids), -len(ids) % BLOCK)  # no guess is worth a second block
                guesses = guess_next(ids)[:room]
            rows = self._reader.read(ids + guesses, 1 + len(guesses), keep_going)
        sample.end("stopped")

    def _generate_together(self, ids, samples, sampling, keep_going):
        """Draws the tokens of all samples after the prompt `ids`, one token of each at a time."""
        begun = time.monotonic()
        if self.dist.is_xla:
            reader = StaticReader(self.model, self.dist, len(samples))
            logits = reader.prefill(ids)
            self.timings.prompt_ms = (time.monotonic() - begun) * 1000
            self.timings.read_tokens = len(ids)
        else:
            reader = self._reader
            logits = self._begin_reading(reader.prefill, ids, len(samples), keep_going)
        reason = "stopped"
        if logits is not None:
            rows = logits.expand(len(samples), -1)
            reason = self._draw_together(reader, rows, len(ids), samples, sampling, keep_going)
        for sample in samples:
            sample.end(reason)

    def _draw_together(self, reader, rows, length, samples, sampling, keep_going):
        """Draws tokens of all samples after `length` tokens. Returns why the samples end that are still going. rows:
        the logits (samples, V) of their first tokens."""
        while keep_going():
            chosen = [self._draw(sample, row, sampling) for sample, row in zip(samples, rows, strict=True)]
            if all(sample.ended for sample in samples) or length == self.model.config.max_seq_len:
                return "length"
            rows = reader.decode(chosen)
            length += 1
        return "stopped"


# Code repeats itself: a name is declared and then used, a line recurs with one word changed. Prompt lookup decoding
# (Saxena 2023) proposes the next tokens: the model reads the guesses at once and keeps those that it would have drawn.
# With weights of 8 bits, eight tokens cost 1.3 times as much as one, and the guesses repay that. In fp32 they cost 2.5
# times as much, and the engine guesses nothing.
def guess_next(ids):
    """Returns the tokens that followed the previous occurrence of the end of `ids`; [] if there is none."""
    text = "".join(map(chr, ids))  # one character for each token, because Python finds strings fast
    for length, num_guessed in GUESSES:
        found = text.rfind(text[-length:], 0, len(text) - 1)
        if found >= 0:
            return ids[found + length:found + length + num_guessed]
    return []
